"""A path through two models of different widths, whose channels do not correspond: only regression can join them."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from tests.foreign_models import foreign_model, loaded
from workers.alignments.activations import Activations, read_activations
from workers.alignments.fitting import fit_alignment
from workers.alignments.hooks import add_alignments
from workers.alignments.recipes import PlacedAlignment
from workers.export.expansion.files import expand
from workers.models.tokenizers import load_tokenizer
from workers.tiny_family import family_dir

WIDTH, LAYER = 128, 4  # the path takes this layer, and those after it, from the wider model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The shipped expert `text`, of 96 channels, and a model of 128 that computes the same in other channels."""
    directory = tmp_path_factory.mktemp("widths")
    expert = family_dir() / "experts" / "text"
    foreign = foreign_model(expert, directory, width=WIDTH)
    found = expand({"text": expert, "foreign": foreign}, directory / "out")
    assert found.form.shape.hidden == WIDTH
    return tuple(loaded(found.directories[name]) for name in ("text", "foreign"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    size, chosen = len(load_tokenizer(family_dir() / "experts" / "text")), random.Random(0)
    return [[chosen.randrange(size) for _ in range(24)] for _ in range(80)]


@pytest.fixture(scope="module")
def activations(pair: tuple[Any, Any], prompts: list[list[int]]) -> tuple[Activations, ...]:
    return tuple(read_activations(model, prompts[:60]) for model in pair)


def agreement(
    pair: tuple[Any, Any], activations: tuple[Activations, ...], prompts: list[list[int]], kind: Any
) -> float:
    """Share of tokens with the same most likely successor in the path as in the expert, on texts that no map saw."""
    first, second = pair
    x, y = activations
    fitted = fit_alignment(
        kind, x.before[LAYER], y.before[LAYER], x.is_held_out, first=(x.first[LAYER], y.first[LAYER])
    )
    path = copy.deepcopy(second)
    path.model.embed_tokens = first.model.embed_tokens
    for at in range(LAYER):
        path.model.layers[at] = first.model.layers[at]
    add_alignments(path, {LAYER: PlacedAlignment("0" * 64, fitted.alignment, 1.0)})
    unseen = torch.tensor(prompts[60:])
    with torch.no_grad():
        same = path(unseen).logits.argmax(-1) == first(unseen).logits.argmax(-1)
    return float(same.float().mean())


def test_regression_joins_models_of_different_widths(
    pair: tuple[Any, Any], activations: tuple[Activations, ...], prompts: list[list[int]]
) -> None:
    """The path computes what both models compute; maps that only match distributions give another model."""
    found = {kind: agreement(pair, activations, prompts, kind) for kind in ("moments", "mlp", "ridge")}
    assert found["ridge"] > 0.98
    assert max(found["moments"], found["mlp"]) < 0.3
