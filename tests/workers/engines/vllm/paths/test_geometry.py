from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import tiny_family, tiny_qwen2
from tests.layouts import layout_family
from workers.engines.vllm.paths.geometry import PATH_TYPES, path_problems
from workers.models.family import ResolvedFamily, resolve_family
from workers.types import Family


def changed(family: Family, alias: str, **fields: Any) -> ResolvedFamily:
    """The family after a change of the configuration of one of its models."""
    models = {model.alias: Path(model.directory) for model in family.models}
    file = models[alias] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    base = models.pop("base")
    return resolve_family(base, models)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm_eps": 1e-5}, "math: {dir}: rms_norm_eps is 1e-05; the base has 1e-06"),
        (
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3},
            "math: {dir}: sliding_window is 32; the base has none",
        ),
    ],
)
def test_settings_that_layers_do_not_share_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    family = tiny_family(tmp_path, build=tiny_qwen2, experts=("math", "text"), rms_norm_eps=1e-6)
    assert path_problems(changed(family, "base")) == []
    problems = path_problems(changed(family, "math", **fields))
    assert problems[0].startswith(message.format(dir=tmp_path / "math"))
    assert all(problem.startswith("math: ") for problem in problems)


def test_layers_of_several_kinds_are_refused(tmp_path: Path) -> None:
    settings = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    family = tiny_family(tmp_path, build=tiny_qwen2, experts=("math",), **settings)
    (problem,) = path_problems(changed(family, "base"))
    assert "layer_types has full_attention and sliding_attention; in paths all layers must be of one kind" in problem
    file = tmp_path / "base" / "config.json"  # transformers computes what a file leaves out
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "layer_types"}))
    assert path_problems(changed(family, "base")) == [problem]


@pytest.mark.parametrize("model_type", ["gemma2", "qwen2_moe"])
def test_other_model_types_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (problem,) = path_problems(changed(layout_family(tmp_path, model_type), "base"))
    assert f"model_type is '{model_type}'; other depths and orders of layers are scored for llama, mistral" in problem


@pytest.mark.parametrize("model_type", PATH_TYPES)
def test_one_kind_of_layers_is_accepted(model_type: str, tmp_path: Path) -> None:
    make: Callable[..., Family] = layout_family
    assert path_problems(changed(make(tmp_path, model_type), "base")) == []
