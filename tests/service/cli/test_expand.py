"""`expand`: models of two sizes in one shape, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import tiny_llama
from tests.service.cli.terminals import Workplace
from workers.models.checkpoints import open_checkpoint


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Arguments that name a small model and a large one."""
    tiny_llama(tmp_path / "small", hidden=32, head_dim=32)
    tiny_llama(tmp_path / "large", hidden=64, layers=3, head_dim=32)
    return [f"{name}={tmp_path / name}" for name in ("small", "large")]


SHAPE = (
    "common form: llama with 3 layers of 64 channels, 2 query heads and 2 key-value heads of 32, MLPs of 128 channels, "
    "128 tokens, output head tied to the embedding, rotary embedding of the type default"
)


def test_expand_says_where_the_models_are(place: Workplace, models: list[str], tmp_path: Path) -> None:
    out = place.directory / "models"
    code, text = place.run("expand", *models, "--out", out, "--check")[:2]
    assert (code, text.strip()) == (0, SHAPE)
    assert not out.exists()
    code, text = place.run("expand", *models, "--out", out)[:2]
    assert code == 0
    assert text.splitlines() == [SHAPE, f"small: {out / 'small'}", f"large: {tmp_path / 'large'}"]
    assert open_checkpoint(out / "small").layout.num_layers == 3
    shown = json.loads(place.run("expand", *models, "--out", out, "--json")[1])
    assert shown["directories"] == {"small": str(out / "small"), "large": str(tmp_path / "large")}
    assert shown["shape"]["hidden"] == 64


def test_expand_refuses_what_it_cannot_expand(place: Workplace, models: list[str]) -> None:
    out = place.directory / "models"
    assert (
        place.refused("expand", models[0], "--out", out) == "1 model; give at least two, which are expanded to one form"
    )
    assert place.refused("expand", *models, "small=x", "--out", out).startswith("MODEL 'small=x': small is given twice")
    for alias in ("a/b", "..", ".hidden"):
        assert "is the name of a folder" in place.refused("expand", f"{alias}=x", models[0], "--out", out)
    (out / "small").mkdir(parents=True)
    (out / "small" / "notes.txt").write_text("mine")
    assert "exists and is not this model, expanded to this form" in place.refused("expand", *models, "--out", out)
    assert (out / "small" / "notes.txt").read_text() == "mine"
