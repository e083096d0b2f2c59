"""What preflight says of studies whose merges have layers of any number and order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import parse_study
from service.studies.preflight.examine import PreflightResult, examine
from service.studies.preflight.resources import ENGINE_OVERHEAD_BYTES
from tests.builders import tiny_family
from tests.layouts import layout_family

LAYERS = 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny_family(tmp_path, experts=("math", "text"), layers=LAYERS, tied=False)
    return tmp_path


def examined(root: Path, **sections: Any) -> PreflightResult:
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
    return examine(parse_study({**document, **sections}, root))


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
    layer = (result.num_parameters - outside) // LAYERS
    held = outside + (3 * LAYERS + 5) * layer  # every layer of three models, and a whole merge besides
    assert result.memory.engine_bytes == 2 * 4 * held + ENGINE_OVERHEAD_BYTES


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
def test_models_whose_layers_cannot_follow_each_other_are_refused(
    root: Path, change: Callable[[Path], Any], message: str
) -> None:
    change(root)
    with pytest.raises(InvalidStudy) as caught:
        examined(root)
    (problem,) = [problem for problem in caught.value.problems if problem.field == "models"]
    assert message in problem.message
    examined(root, search_space={"kind": "layerwise"}, limits={})
