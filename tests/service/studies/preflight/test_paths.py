"""Preflight of studies whose merges have layers in any number and order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.errors import InvalidStudy
from search_spaces.spaces.base import AlignedSpace
from search_spaces.study.file import parse_study
from service.studies.preflight.examine import examine
from service.studies.preflight.resources import ENGINE_OVERHEAD_BYTES
from service.studies.preflight.result import PreflightResult, StudyTasks
from tests.builders import tiny_family
from tests.layouts import layout_family
from workers.engines.vllm.memory import kv_cache_bytes

LAYERS = 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny_family(tmp_path, experts=("math", "text"), layers=LAYERS, tied=False)
    return tmp_path


def examined(
    root: Path,
    *,
    available_bytes: int | None = None,
    before_weights: Callable[[StudyTasks], None] = lambda tasks: None,
    **sections: Any,
) -> PreflightResult:
    (root / "sums.jsonl").write_text("".join(json.dumps({"prompt": f"{i}", "answer": f"{i}"}) + "\n" for i in range(9)))
    document = {
        "name": "paths",
        "models": {"base": "base", "experts": {"math": "math", "text": "text"}},
        "search_space": {"kind": "dis"},
        "search": {"algorithm": "random", "max_trials": 4},
        "fidelity": {"rungs": [4, 8]},
        "objectives": [{"name": "sums", "task": {"file": "sums.jsonl", "max_tokens": 8}, "metric": "exact_match"}],
        "engine": {"max_model_len": 64, "dtype": "float32"},
        "limits": {"max_layers": 5},
    }
    study = parse_study({**document, **sections}, root)
    return examine(study, available_bytes=available_bytes, before_weights=before_weights)


def test_the_engine_has_room_for_the_longest_merge_of_the_space(root: Path) -> None:
    assert examined(root).engine_options.max_layers == 5
    assert examined(root, limits={}).engine_options.max_layers == 4, "a quarter more than the models have"
    layerwise = examined(root, search_space={"kind": "layerwise"}, limits={})
    assert layerwise.engine_options.max_layers == 0
    assert "max_layers" not in layerwise.engine_options.document()


def test_memory_counts_the_layers_that_an_engine_holds(root: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the layers are not in host memory")
    result = examined(root)
    outside = 2 * 128 * 32 + 32
    layer = (result.models.num_parameters - outside) // LAYERS
    held = outside + (3 * LAYERS + 5) * layer  # every layer of three models, and a whole merge besides
    longest = {**json.loads((root / "base" / "config.json").read_text()), "num_hidden_layers": 5}
    keys_and_values = kv_cache_bytes(longest, 64, "float32")
    assert result.memory.engine_bytes == 2 * 4 * held + keys_and_values + ENGINE_OVERHEAD_BYTES


def test_the_largest_merge_is_what_an_export_may_take(root: Path) -> None:
    result, layerwise = examined(root), examined(root, search_space={"kind": "layerwise"}, limits={})
    outside = 2 * 128 * 32 + 32
    layer = (result.models.num_parameters - outside) // LAYERS
    assert layerwise.models.export_bytes == 4 * result.models.num_parameters
    assert result.models.export_bytes == 4 * (outside + 5 * layer)


def changed(root: Path, model: str, **fields: Any) -> None:
    file = root / model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: changed(root, "math", rms_norm_eps=1e-3), "rms_norm_eps is 0.001; the base has 1e-06"),
        (lambda root: layout_family(root, "gemma", hidden=128), "model_type is 'gemma'; other depths and orders"),
    ],
)
def test_unchainable_layers_are_refused(root: Path, change: Callable[[Path], Any], message: str) -> None:
    """Models whose layers cannot follow each other are refused."""
    change(root)
    with pytest.raises(InvalidStudy) as caught:
        examined(root)
    (problem,) = [problem for problem in caught.value.problems if problem.field == "models"]
    assert message in problem.message
    examined(root, search_space={"kind": "layerwise"}, limits={})


@pytest.mark.parametrize(
    ("sections", "field", "message"),
    [
        ({"search_space": {"kind": "dis", "depth_granularity": 2}}, "depth_granularity", "use 1 or 3"),
        ({"search_space": {"kind": "dis", "models": ["math", "code"]}}, "models.1", "give some of math, text, base"),
        ({"search_space": {"kind": "dis", "preset": "d1m3r1"}}, "models", "the study has only 2 experts"),
        ({"limits": {"max_layers": 2}}, "limits.max_layers", "2 is below the 3 layers .* give at least 3"),
        ({"search_space": {"kind": "sfs"}, "limits": {}}, "model", "is missing; give one of math, text, base"),
    ],
)
def test_a_space_that_does_not_fit_the_models_is_refused(
    root: Path, sections: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidStudy) as caught:
        examined(root, **sections)
    (problem,) = caught.value.problems
    assert problem.field == (field if field.startswith("limits") else f"search_space.{field}")
    assert re.search(message, problem.message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("repeats", 0, "0 is not accepted; give at least 1"),
        ("depth_granularity", 0, "0 is not accepted; give at least 1"),
        ("models", [], "is empty; give at least 1"),
        ("alignment", "mlp", "unknown key; .*known keys: kind, depth_granularity"),
    ],
)
def test_an_option_of_paths_that_cannot_be_is_refused(root: Path, field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidStudy) as caught:
        examined(root, search_space={"kind": "dis", field: value})
    (problem,) = caught.value.problems
    assert problem.field == f"search_space.{field}"
    assert re.match(message, problem.message)


def test_geometry_difference_is_described(root: Path) -> None:
    """A difference in geometry is reported with the field and both models."""
    changed(root, "text", num_key_value_heads=2, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    with pytest.raises(InvalidStudy) as caught:
        examined(root)
    found = [problem.message for problem in caught.value.problems if problem.field == "models"]
    assert any("text: num_key_value_heads is 2; the base has 1" in text for text in found)
    assert any("text: rope_theta is 500000.0; the base has 10000.0" in text for text in found)


def test_too_long_merge_is_refused(root: Path) -> None:
    """A longest merge beyond the memory is refused with the length that would fit."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU the layers are not in host memory")
    needed = examined(root, limits={"max_layers": 60_000}).memory.needed_bytes
    with pytest.raises(
        InvalidStudy, match=r"use fewer replicas, a smaller dtype, limits\.max_layers of at most "
    ) as caught:
        examined(root, limits={"max_layers": 500_000}, available_bytes=needed)
    longest = int(re.findall(r"at most (\d+)", str(caught.value))[0])
    assert 60_000 <= longest < 500_000
    examined(root, limits={"max_layers": longest}, available_bytes=needed)
    with pytest.raises(InvalidStudy, match=f"at most {longest} "):
        examined(root, limits={"max_layers": longest + 1}, available_bytes=needed)


def test_no_advice_where_nothing_fits(root: Path) -> None:
    """Where no merge fits into memory, no number of layers is advised."""
    with pytest.raises(InvalidStudy, match="use fewer replicas, a smaller dtype or a larger machine"):
        examined(root, limits={"max_layers": 500_000}, available_bytes=2**20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("space", "field", "message"),
    [
        ({"kind": "sfs", "model": "math"}, "kind", "or another space"),
        ({"kind": "layerwise", "layer_scales": True}, "layer_scales", "or layer_scales: false"),
    ],
)
def test_scales_that_the_type_of_model_cannot_have_are_refused(
    tmp_path: Path, space: dict[str, Any], field: str, message: str
) -> None:
    layout_family(tmp_path, "gemma2", hidden=128)
    with pytest.raises(InvalidStudy) as caught:
        examined(tmp_path, search_space=space, limits={})
    (problem,) = caught.value.problems
    assert problem.field == f"search_space.{field}"
    assert "models of type 'gemma2'; use models of one of the types gemma, llama, mistral" in problem.message
    assert problem.message.endswith(message)
    examined(tmp_path, search_space={"kind": "layerwise"}, limits={})
    layout_family(tmp_path / "other", "gemma", hidden=128)
    examined(tmp_path / "other", search_space=space, limits={})


def test_alignments_need_samples_to_learn_from_and_memory(root: Path) -> None:
    space = {"kind": "hm3", "alignment": "mlp"}
    with pytest.raises(InvalidStudy) as caught:
        examined(root, search_space=space)
    (problem,) = caught.value.problems
    assert problem.field == "search_space.alignment"
    assert "here 1 of 9; they need at least 10: give 100 search samples or more" in problem.message
    many = root / "many.jsonl"
    many.write_text("".join(json.dumps({"prompt": f"{i}", "answer": f"{i}"}) + "\n" for i in range(100)))
    objectives = [{"name": "sums", "task": {"file": "many.jsonl", "max_tokens": 8}, "metric": "exact_match"}]
    with_them = examined(root, search_space=space, objectives=objectives)
    without = examined(root, search_space={"kind": "hm3"}, objectives=objectives)
    assert with_them.space.describe().text.endswith(" one of 20 alignments: mlp")
    if not torch.cuda.is_available():
        assert with_them.memory.engine_bytes > without.memory.engine_bytes


def test_pairs_are_counted_before_the_weights(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A space with too many pairs of layers to align is refused before the weights are read."""
    lines = (json.dumps({"prompt": f"{i}", "answer": f"{i}"}) + "\n" for i in range(100))
    (root / "hundred.jsonl").write_text("".join(lines))
    task = {"file": "hundred.jsonl", "max_tokens": 8}
    sections: dict[str, Any] = {
        "search_space": {"kind": "hm3", "alignment": "moments", "models": ["math", "text"]},
        "objectives": [{"name": "sums", "task": task, "metric": "exact_match"}],
        "limits": {},
    }
    space = examined(root, **sections).space
    assert isinstance(space, AlignedSpace)
    monkeypatch.setattr("search_spaces.spaces.hm3.MAX_PAIRS", len(space.pairs) - 1)
    with pytest.raises(InvalidStudy, match=f"{len(space.pairs)} pairs of layers may be neighbours"):
        examined(root, before_weights=lambda tasks: pytest.fail("the weights are read"), **sections)
