"""Outlines (shapes computed from a configuration) equal the shapes of the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import tiny_llama, tiny_qwen2
from workers.cache import CACHE_VARIABLE
from workers.engines.transformers.outlines import outline
from workers.errors import InvalidModel
from workers.models.checkpoints import open_checkpoint, stored_bytes
from workers.models.family import resolve_family
from workers.models.remote import absent_bytes, is_metadata_only, lack_of_space


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def without_weights(model: Path, place: Path) -> Path:
    shutil.copytree(model, place, ignore=shutil.ignore_patterns("*.safetensors"))
    return place


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
@pytest.mark.parametrize("options", [{"tied": True}, {"tied": False, "dtype": torch.bfloat16}])
def test_outline_has_the_shapes_of_the_weights(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Names, shapes, dtypes and bytes are those of the files of the same model."""
    real = make(tmp_path / "real", **options)
    made = outline(str(without_weights(real, tmp_path / "bare")))
    assert is_metadata_only(Path(made))
    assert outline(made) == made
    outlined, whole = open_checkpoint(made), open_checkpoint(real)
    found = [{name: (t.shape, t.dtype) for name, t in each.tensors.items()} for each in (outlined, whole)]
    assert found[0] == found[1]
    assert stored_bytes([outlined]) == stored_bytes([whole])
    assert absent_bytes([Path(made)]) == 0
    assert lack_of_space([Path(made)]) is None


def test_models_of_one_configuration_are_different(tmp_path: Path) -> None:
    """A base and its expert have one configuration, and are two models."""
    real = tiny_llama(tmp_path / "real")
    base, expert = (outline(str(without_weights(real, tmp_path / name))) for name in ("base", "expert"))
    prints = resolve_family(base, {"expert": expert}).fingerprints
    assert prints["base"] != prints["expert"]


def test_models_with_weights_stay_what_they_are(tmp_path: Path) -> None:
    real = str(tiny_llama(tmp_path / "real"))
    assert outline(real) == real
    assert outline("s3://bucket/model") == "s3://bucket/model"


def test_what_has_no_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidModel, match=r"empty: no config\.json"):
        outline(str(tmp_path / "empty"))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(InvalidModel, match=r"odd: its size does not follow from config\.json: "):
        outline(str(tmp_path / "odd"))
    with pytest.raises(InvalidModel, match="owner/none: its configuration cannot be loaded here"):
        outline("owner/none")
