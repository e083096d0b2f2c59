from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from search_spaces.recipe import Merge, Source
from tests.builders import lora_adapter
from tests.workers.merging.test_devices import all_of
from tests.workers.recipes import arithmetic, slerp
from workers.export.checkpoint import export
from workers.export.model_card import licence, model_card, recipe_rows
from workers.merging.bank import Bank
from workers.types import Family


@dataclass(frozen=True)
class Held:
    value: float
    ci95: tuple[float, float]
    samples: int


@pytest.fixture(scope="module")
def untied(untied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(untied_family, cache=tmp_path_factory.mktemp("cache"))


def test_the_model_card_tells_sources_recipe_scores_and_licences(untied_family: Family, tmp_path: Path) -> None:
    experts = []
    for expert, stated_licence in zip(untied_family.experts, ("apache-2.0", "mit"), strict=True):
        copy = shutil.copytree(expert.directory, tmp_path / expert.alias)
        (copy / "README.md").write_text(f"---\nlicense: {stated_licence}\n---\n# Model\n")
        experts.append(replace(expert, directory=str(copy)))
    bank = Bank(replace(untied_family, experts=tuple(experts)), cache=tmp_path / "cache")
    recipe = slerp(bank.family, 0.25)
    scores = {"math": Held(0.61234, (0.55, 0.67), 200)}
    card = (export(recipe, bank, tmp_path / "out", scores=scores, study="demo") / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"library_name": "transformers", "tags": ["merge", "mergesearch"], "license": "other"}
    assert f"| math | expert | math | apache-2.0 | `{recipe.models['math']}` |" in card
    assert f"| base | base | base | not stated | `{recipe.models['base']}` |" in card
    assert "| math | 0.6123 | 0.5500 to 0.6700 | 200 |" in card
    assert 'by the study "demo"' in card
    assert re.search(r"\| 0-4 \| attention \| slerp \| (math, text|text, math) \| t = 0\.[27]5 \|", card)
    assert "| 0-4 | norm | passthrough | base |  |" in card
    assert recipe.digest in card
    assert str(tmp_path) not in card


def test_card_bounds_the_weights_of_adapters(untied_family: Family, tmp_path: Path) -> None:
    """The card claims the scored bits, except for weights that adapters change: of these it states a bound."""
    family = untied_family
    for has_adapter in (False, True):
        if has_adapter:
            lora_adapter(family.base.directory, tmp_path / "tuned")
            lora = replace(family.experts[0], alias="lora", directory=str(tmp_path / "tuned"))
            family = replace(family, experts=(lora, *family.experts[1:]))
        recipe = arithmetic(family, 0.3, 0.5)
        card = model_card(recipe, family, dtype="bfloat16", scores={}, study=None, mergekit="none")
        assert ("at most (r + 3) 2^-23 of the sum" in card) == has_adapter
        assert ("Weights that lora change" in card) == has_adapter


def test_card_names_methods_whose_bits_depend_on_the_device(untied_family: Family) -> None:
    """The card claims no scored bits for methods that compute exponentials or matrix products."""
    for method in ("task_arithmetic", "pcb"):
        numbers = {"lambda": 0.4} | ({"density": 0.5} if method == "pcb" else {})
        recipe = all_of(untied_family, method, numbers)
        card = model_card(recipe, untied_family, dtype="bfloat16", scores={}, study=None, mergekit="none")
        assert ("tensors merged by pcb depend on the device" in card) == (method == "pcb")


def test_several_licences_of_a_source_are_all_told(tmp_path: Path) -> None:
    for text, found in (
        ("---\nlicense: [mit, cc-by-4.0]\n---\n", "mit, cc-by-4.0"),
        ("---\nlicense: []\n---\n", None),
        ("# No head\n", None),
        ("---\n: : [\n---\n", None),
    ):
        (tmp_path / "README.md").write_text(text)
        assert licence(tmp_path) == found
    assert licence(tmp_path / "nowhere") is None


def test_card_lists_single_tensors(untied: Bank, tmp_path: Path) -> None:
    """Single tensors are in the card and in the mergekit configuration."""
    norm = Merge("passthrough", (Source("text"),))
    recipe = replace(arithmetic(untied.family, 0.3, 0.4), tensors={"model.norm.weight": norm})
    card = (export(recipe, untied, tmp_path / "out") / "README.md").read_text()
    assert "| tensor | model.norm.weight | passthrough | text |  |" in card
    assert "`mergekit_config.yml` gives the same tensors with mergekit" in card
    assert "model.norm.weight" in (tmp_path / "out" / "mergekit_config.yml").read_text()


def test_layers_that_differ_have_rows_of_their_own(untied: Bank, tmp_path: Path) -> None:
    one, other = arithmetic(untied.family, 0.3, 0.4), arithmetic(untied.family, 0.5, 0.6)
    mixed = replace(one, layers=(*one.layers[:2], other.layers[2], *one.layers[3:]))
    card = (export(mixed, untied, tmp_path / "out") / "README.md").read_text()
    assert re.findall(r"^\| ([-\d]+) \| mlp ", card, re.MULTILINE) == ["0-1", "2", "3-4"]


def test_scales_of_layers_and_of_mlps_have_rows(untied: Bank) -> None:
    plain = arithmetic(untied.family, 0.3, 0.4)
    layers = (
        replace(plain.layers[0], mlp_scale=0.0),
        replace(plain.layers[1], scale=1.25),
        replace(plain.layers[2], mlp_scale=1.5),
        replace(plain.layers[3], mlp_scale=1.5),
        plain.layers[4],
    )
    rows = [row for row in recipe_rows(replace(plain, layers=layers)) if row[2] == "scale"]
    assert rows == [
        ("0", "output of the MLP", "scale", "", "0"),
        ("1", "output", "scale", "", "1.25"),
        ("2-3", "output of the MLP", "scale", "", "1.5"),
    ]
