"""CLIP families: merges concern the vision tower, in any form that transformers stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vision import tiny_clip
from workers.errors import InvalidModel
from workers.models.family import open_family, resolve_family


def test_towers_are_merged_whichever_class_stored_them(tmp_path: Path) -> None:
    """A whole model, a tower with a projection and a bare tower have the same tensors; text towers are left out."""
    kinds = {"whole": "CLIPModel", "projected": "CLIPVisionModelWithProjection", "bare": "CLIPVisionModel"}
    places = {
        alias: tiny_clip(tmp_path / alias, seed, kind=kind) for seed, (alias, kind) in enumerate(kinds.items(), 1)
    }
    family = open_family(tiny_clip(tmp_path / "base"), places)
    assert family.modality == "image"
    sources = resolve_family(family.base.directory, {each.alias: each.directory for each in family.experts})
    layout = sources.base.layout
    assert layout.num_layers == 2
    assert layout.task_heads == ("visual_projection.weight",)
    assert {name.partition(".")[0] for name in layout.places} == {"vision_model"}
    assert layout.places["vision_model.pre_layrnorm.weight"].component == "embedding"
    assert layout.places["vision_model.post_layernorm.weight"].component == "head"
    assert layout.places["vision_model.encoder.layers.1.self_attn.q_proj.weight"].component == "attention"
    for expert in sources.checkpoints.values():
        assert expert.layout.places.keys() == layout.places.keys()
        assert expert.settings["hidden_size"] == 32


def test_towers_of_another_depth_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="num_hidden_layers is 3; the base has 2"):
        open_family(
            tiny_clip(tmp_path / "base"), {"deep": tiny_clip(tmp_path / "deep", layers=3, kind="CLIPVisionModel")}
        )
