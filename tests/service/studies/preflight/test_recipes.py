"""Given recipes: read from documents and mergekit configurations, and compared with the study's models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.baselines import all_baselines
from search_spaces.recipe import Recipe
from search_spaces.study.file import Study, parse_study
from service.studies.preflight.recipes import given_recipes
from tests.service.resolved import study_document
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.models.family import ResolvedFamily, locate_family
from workers.tiny_family import family_dir

MODELS = {
    "base": str(family_dir() / "base"),
    "experts": {name: str(family_dir() / "experts" / name) for name in ("math", "text")},
}

TIES = """
merge_method: ties
base_model: {base}
models:
  - {{model: {math}, parameters: {{weight: 0.5, density: 0.3}}}}
  - {{model: text, parameters: {{weight: 0.5, density: 0.3}}}}
"""


@pytest.fixture(scope="module")
def sources() -> ResolvedFamily:
    experts: dict[str, str] = MODELS["experts"]  # type: ignore[assignment]
    return locate_family(str(MODELS["base"]), experts).resolve(tokenizer="base")


@pytest.fixture(scope="module")
def average(sources: ResolvedFamily) -> Recipe:
    (found,) = all_baselines(
        base="base",
        experts=("math", "text"),
        fingerprints=sources.fingerprints,
        num_layers=sources.layout.num_layers,
        chosen=["uniform average"],
    )
    return found.recipe


def study(*recipes: dict[str, Any], directory: Path | None = None) -> Study:
    return parse_study({**study_document(), "models": MODELS, "search": {"recipes": list(recipes)}}, directory)


def read(sources: ResolvedFamily, *recipes: dict[str, Any], directory: Path | None = None) -> Any:
    problems: list[Any] = []
    found = given_recipes(study(*recipes, directory=directory), sources, problems, note=print)
    return dict(found), [f"{problem.field}: {problem.message}" for problem in problems]


def test_recipes_are_read_from_files_and_documents(tmp_path: Path, sources: ResolvedFamily, average: Recipe) -> None:
    """A recipe.json of an export has the name of its folder; its aliases need not be those of the study."""
    (tmp_path / "found").mkdir()
    document = average.to_json()
    (tmp_path / "found" / "recipe.json").write_text(json.dumps({**document, "dtype": "bfloat16"}))
    renamed = json.loads(json.dumps(document).replace('"math"', '"arithmetic"'))
    found, problems = read(sources, {"file": "found/recipe.json"}, directory=tmp_path)
    assert not problems
    assert {name: recipe.digest for name, recipe in found.items()} == {"found": average.digest}
    found, problems = read(sources, {"name": "renamed", "recipe": renamed})
    assert not problems
    assert found["renamed"].digest == average.digest


def test_mergekit_names_the_studys_models(tmp_path: Path, sources: ResolvedFamily) -> None:
    """By directory and by alias; the recipe has their contents."""
    experts: dict[str, str] = MODELS["experts"]  # type: ignore[assignment]
    (tmp_path / "ties.yml").write_text(TIES.format(base=MODELS["base"], math=experts["math"]))
    found, problems = read(sources, {"file": "ties.yml"}, {"file": "ties.yml", "name": "again"}, directory=tmp_path)
    assert problems == ["search.recipes.1: again is the same merge as ties; leave one out"]
    assert set(found["ties"].models.values()) == {sources.fingerprints[alias] for alias in ("base", "math", "text")}


def test_a_mergekit_file_keeps_its_own_base(sources: ResolvedFamily) -> None:
    """Task vectors of a file whose base is an expert are differences from that expert, not from the study's base."""
    document = {
        "merge_method": "task_arithmetic",
        "base_model": "math",
        "models": [{"model": "text", "parameters": {"weight": 0.5}}],
    }
    found, problems = read(sources, {"name": "own", "recipe": document})
    assert problems == []
    recipe: Recipe = found["own"]
    assert recipe.base == "base"
    assert {merge.base_in(recipe.base).model for merge in recipe.merges()} == {"math"}
    name = "model.layers.0.mlp.up_proj.weight"
    math, text = (sources.checkpoints[alias].read(name).float() for alias in ("math", "text"))
    ((_, merged),) = merged_tensors(recipe, Bank(sources, keeps_statistics=False), torch.float32, names={name})
    torch.testing.assert_close(merged, math + 0.5 * (text - math))


def test_recipes_with_another_vocabulary_are_refused(sources: ResolvedFamily, average: Recipe) -> None:
    union = {**average.to_json(), "tokenizer": "union"}
    padded = {**average.to_json(), "vocabulary": {"multiple_of": 64}}
    found, problems = read(sources, {"name": "union", "recipe": union}, {"name": "padded", "recipe": padded})
    assert found == {}
    assert problems == [
        "search.recipes.0: its vocabulary is tokenizer: union, and the study's is models.tokenizer: base; give a "
        "recipe with the same",
        "search.recipes.1: has the vocabulary options {'multiple_of': 64}, which merges of a study cannot have",
    ]


def test_recipes_that_do_not_fit_are_named(tmp_path: Path, sources: ResolvedFamily, average: Recipe) -> None:
    """What is wrong, in which recipe, and what the study has."""
    other = replace(average, models={**average.models, "math": "f" * 64}).to_json()
    longer = replace(average, layers=(*average.layers, average.layers[0])).to_json()
    (tmp_path / "other.yml").write_text(TIES.format(base="nobody/base", math="math"))
    (tmp_path / "empty.json").write_text("{}")
    _, problems = read(
        sources,
        {"name": "other", "recipe": other},
        {"name": "longer", "recipe": longer},
        {"file": "other.yml"},
        {"file": "empty.json"},
        {"file": "missing.json"},
        {"name": "none", "recipe": {"format": "x"}},
        directory=tmp_path,
    )
    expected = (
        "search.recipes.0: merges math (ffffffffffff), whose content is of no model of this study: it has base",
        f"search.recipes.1: has {len(average.layers) + 1} layers, and merges in this search space have",
        "search.recipes.2: nobody/base is no model of this study; it has base, math, text",
        "search.recipes.3: is neither a recipe (it has no format) nor a mergekit configuration",
        f"search.recipes.4: {tmp_path / 'missing.json'}: cannot be read (No such file or directory)",
        "search.recipes.5: recipe: format is 'x'",
    )
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)
