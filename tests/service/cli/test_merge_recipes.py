"""`merge` with a recipe file: the places of its models, and the check that they are the right models."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file

from search_spaces.baselines import all_baselines
from tests.service.cli.terminals import Workplace, model_options, spoilt
from tests.workers.recipes import arithmetic
from workers.types import Family


def test_merge_needs_to_know_where_every_model_is(place: Workplace, family: Family) -> None:
    file, out = place.recipe_file(arithmetic(family, 0.5, 0.5).to_json()), place.directory / "merged"
    assert place.refused("merge", file, "--out", out, *model_options(family, "base")) == (
        f"{file}: no directory is given for math, text; add --model math=DIR --model text=DIR"
    )
    everything = model_options(family, "base", "math", "text")
    assert place.refused("merge", file, "--out", out, *everything, "--model", "code=x") == (
        f"{file}: has no model code; it names base, math, text"
    )
    assert place.refused("merge", file, "--out", out, "--model", "math") == (
        "--model 'math': write ALIAS=DIR, e.g. math=/models/math"
    )
    assert place.refused("merge", file, "--out", out, "--model", "a=b", "--model", "a=c") == (
        "--model 'a=c': a is given twice, first as b"
    )
    assert "expert 'text': " in place.refused(
        "merge", file, "--out", out, *model_options(family, "base", "math"), "--model", "text=/nowhere"
    )
    assert not out.exists()
    assert place.run("merge", file, "--out", out, *everything)[0] == 0
    assert (out / "model.safetensors").is_file()


def test_merge_refuses_another_model_than_the_recipe_means(place: Workplace, family: Family) -> None:
    recipe = arithmetic(family, 0.5, 0.5).to_json()
    recipe["models"]["math"] = "f" * 64
    file = place.recipe_file(recipe)
    message = place.refused(
        "merge", file, "--out", place.directory / "m", *model_options(family, "base", "math", "text")
    )
    assert message == (
        f"{file}: {place.models}/math is not the recipe's 'math': its content has fingerprint "
        f"{family.fingerprints['math'][:12]}, the recipe's ffffffffffff"
    )


def test_a_recipe_that_names_only_the_base_is_the_base(place: Workplace, family: Family) -> None:
    known = all_baselines(base="base", experts=("math",), fingerprints=family.fingerprints, num_layers=2)
    (recipe,) = (known.recipe for known in known if known.label == "base")
    assert list(recipe.models) == ["base"]
    out = place.directory / "merged"
    file = place.recipe_file(recipe.to_json())
    code, _, err = place.run("merge", file, "--out", out, *model_options(family, "base"), "--dtype", "float32")
    assert (code, err) == (0, "")
    merged, base = load_file(out / "model.safetensors"), load_file(place.models / "base" / "model.safetensors")
    assert all(torch.equal(merged[name], base[name]) for name in merged)
    assert "does not exist" in place.refused("merge", file, "--out", place.directory / "m", "--model", "base=/nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON: "),
        ("[1]", "is neither a mergekit configuration (it has no merge_method) nor a recipe (it has no format)"),
        ('{"format": "other"}', "recipe: format is 'other'; this version reads "),
        ("9" * 10_000, "Exceeds the limit"),
        ("[" * 100_000, "is nested too deeply"),
        ("\udcff", "is not UTF-8 text (byte 0); give a recipe.json"),
    ],
    ids=["malformed", "list", "format", "number", "deep", "not UTF-8"],
)
def test_recipes_that_cannot_be_read(place: Workplace, text: str, message: str) -> None:
    file = place.directory / "recipe.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    found = place.refused("merge", file, "--out", place.directory / "merged")
    assert found.startswith(f"{file}: {message}")


def test_a_recipe_file_that_is_missing_or_a_directory(place: Workplace) -> None:
    for file, reason in ((place.directory / "no.json", "No such file"), (place.directory, "Is a directory")):
        message = place.refused("merge", file, "--out", place.directory / "merged")
        assert message.startswith(f"{file}: cannot be read: {reason}")


def test_whatever_a_recipe_says_is_a_merge_or_a_message(place: Workplace, family: Family) -> None:
    draw = random.Random(0)
    good = arithmetic(family, 0.5, 0.5).to_json()
    everything = model_options(family, "base", "math", "text")
    codes = []
    for number in range(60):
        document = spoilt(good, draw)
        out = place.directory / f"merged-{number}"
        code, _, err = place.run("merge", place.recipe_file(document), "--out", out, *everything)
        codes.append(code)
        assert code in (0, 2), (document, err)
        assert code == 0 or err.strip(), document
    assert 2 in codes
