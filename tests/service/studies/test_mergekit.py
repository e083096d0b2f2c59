"""Files for mergekit from a stored study: mergekit computes the same tensors, or all reasons against it are listed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from search_spaces.errors import InvalidStudy
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.study.file import parse_study
from service.merges.merge import merge_file
from service.resolved_study import ResolvedStudy
from service.studies.mergekit import mergekit_file
from service.types import JobRecord, JobState
from tests.service.resolved import resolved_study, study_document
from workers.file_access import FileAccess
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.models.family import ResolvedFamily, locate_family
from workers.tiny_family import family_dir

EXPERTS = {name: str(family_dir() / "experts" / name) for name in ("math", "text")}


@pytest.fixture(scope="module")
def sources() -> ResolvedFamily:
    return locate_family(str(family_dir() / "base"), EXPERTS).resolve(tokenizer="base")


@pytest.fixture(scope="module")
def stored(sources: ResolvedFamily) -> JobRecord:
    document = {**study_document(), "models": {"base": str(family_dir() / "base"), "experts": EXPERTS}}
    return JobRecord(
        id="c0ffee",
        name="s",
        state=JobState.COMPLETE,
        document=parse_study({**document, "engine": {"dtype": "float32"}}).canonical(),
        accepted=resolved_study(fingerprints=sources.fingerprints).to_json(),
        created_at=0.0,
        kind="search",
    )


def recipe_of(sources: ResolvedFamily, method: str, seed: int | None = None, **coefficients: Any) -> Recipe:
    """A recipe with the same merge of both experts everywhere."""
    named = {name.rstrip("_"): value for name, value in coefficients.items()}

    def merge(layer: int | None) -> Merge:
        return Merge(method, tuple(Source(alias, layer) for alias in EXPERTS), named, seed)

    layers = tuple(LayerRecipe(merge(index), merge(index), merge(index)) for index in range(sources.layout.num_layers))
    return Recipe(sources.fingerprints, "base", layers, merge(None), merge(None))


MERGES: dict[str, dict[str, Any]] = {
    "linear": {"weight": (0.3, 0.7)},
    "task_arithmetic": {"lambda_": (0.4, 0.5)},
    "slerp": {"t": 0.3},
    "nuslerp": {"weight": (0.2, 0.5)},
    "ties_weighted": {"weight": (0.3, 0.4), "density": 1.0, "lambda_": 0.7},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", MERGES)
def test_mergekit_computes_the_same_tensors(
    stored: JobRecord, sources: ResolvedFamily, tmp_path: Path, method: str
) -> None:
    """The oracle is mergekit: it computes from the file what the study has scored."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    recipe = recipe_of(sources, method, **MERGES[method])
    (tmp_path / "mergekit.yml").write_text(mergekit_file(stored, recipe.to_json()))
    document = MergeConfiguration.model_validate(yaml.safe_load((tmp_path / "mergekit.yml").read_text()))
    options = MergeOptions(device="cpu", copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(document, str(tmp_path / "merged"), options)
    theirs = {
        name: tensor for file in (tmp_path / "merged").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    ours = dict(merged_tensors(recipe, Bank(sources, keeps_statistics=False), torch.float32))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == torch.float32
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-6, atol=1e-6, msg=(name + ": {}").format)


def test_a_file_for_another_machine_has_no_directories(
    stored: JobRecord, sources: ResolvedFamily, tmp_path: Path
) -> None:
    """Models have their names in the study; with their directories, the file merges to the same tensors."""
    recipe = recipe_of(sources, "linear", weight=(0.3, 0.7))
    text = mergekit_file(stored, recipe.to_json(), has_directories=False)
    assert text.startswith(
        "# math, text: put the directory of the model in place of each name,\n"
        "# or keep the file as it is: mergesearch merge FILE --model math=DIR --model text=DIR --out DIR\n"
    )
    assert str(family_dir()) not in text
    assert [source["model"] for source in yaml.safe_load(text)["slices"][0]["sources"]] == ["math", "text"]
    file = tmp_path / "mergekit.yml"
    file.write_text(text)
    merge_file(file, {name: Path(place) for name, place in EXPERTS.items()}, tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in merged_tensors(recipe, Bank(sources, keeps_statistics=False), torch.float32):
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6, msg=(name + ": {}").format)


def reasons(stored: JobRecord, recipe: Recipe) -> list[str]:
    with pytest.raises(InvalidStudy) as refused:
        mergekit_file(stored, recipe.to_json())
    return [str(problem) for problem in refused.value.problems]


def test_every_reason_is_listed(stored: JobRecord, sources: ResolvedFamily) -> None:
    """All that mergekit cannot express is named, and not only the first of it."""
    pcb = recipe_of(sources, "pcb", lambda_=1.0, density=0.1)
    dare = recipe_of(sources, "dare_linear_l1", seed=1, lambda_=0.5, density=0.5)
    mixed = replace(pcb, layers=(replace(pcb.layers[0], scale=1.5), dare.layers[1], *pcb.layers[2:]))
    assert reasons(stored, mixed) == [
        "recipe: layers are scaled or aligned",
        "recipe: dare_linear_l1 has random masks, which mergekit draws differently",
        "recipe: mergekit has no pcb",
        "recipe: mergekit applies one method to a whole model; this recipe has dare_linear_l1, pcb",
    ]


def test_reasons_of_all_layers_are_listed(stored: JobRecord, sources: ResolvedFamily) -> None:
    """Layers that mix layers of one model are named one by one."""
    linear = recipe_of(sources, "linear", weight=(0.3, 0.7))
    other = recipe_of(sources, "linear", weight=(0.3, 0.7)).layers[-1].mlp
    crossed = replace(linear, layers=tuple(replace(layer, mlp=other) for layer in linear.layers))
    last = len(linear.layers) - 1
    found = reasons(stored, crossed)
    assert len(found) == last
    for index, reason in enumerate(found):
        assert reason.startswith(f"recipe: layer {index} takes layers {index} and {last} of model")


def test_changed_models_have_no_file(stored: JobRecord, sources: ResolvedFamily) -> None:
    """From models that have changed, mergekit would compute another merge than the one that was scored."""
    recipe = recipe_of(sources, "linear", weight=(0.3, 0.7))
    changed = replace(stored, accepted=resolved_study().to_json())
    assert reasons(changed, recipe) == ["models: their weights have changed since the study was created; restore them"]


def test_models_must_still_be_allowed(stored: JobRecord, sources: ResolvedFamily, tmp_path: Path) -> None:
    """A file of models that the study may not read is not written."""
    recipe = recipe_of(sources, "linear", weight=(0.3, 0.7))
    resolved = replace(ResolvedStudy.of(stored), access=FileAccess((str(tmp_path),)))
    found = reasons(replace(stored, accepted=resolved.to_json()), recipe)
    assert found[0].startswith("models.base: ")
