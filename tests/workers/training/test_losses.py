"""Losses of texts with large vocabularies: the memory of logits, and chunks of them against logits of whole texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.workers.merging.test_devices import peak_of
from workers.evaluation.references import Reading, Target
from workers.training import losses
from workers.training.losses import sample_losses
from workers.training.memory import LOGITS, pass_bytes
from workers.training.model import TrainableModel

ROWS, COLUMNS, CONTEXT = 8, 128, 16


def model_with(vocabulary: int) -> Any:
    """A small Llama with this number of tokens in the vocabulary, with seeded weights."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = object.__new__(TrainableModel)
    model.module, model.device = transformers.LlamaForCausalLM(config).eval(), torch.device("cpu")
    return model


def targets_of(vocabulary: int) -> list[Target]:
    """Texts of different lengths, each with one reading, whose answers begin after CONTEXT tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (ROWS, COLUMNS), generator=generator).tolist()
    return [
        Target((Reading(tuple(row[: COLUMNS - 2 * i]), CONTEXT, ends=(1, 2)),), right=(0,))
        for i, row in enumerate(tokens)
    ]


def losses_and_gradients(model: Any, targets: list[Target]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.module.zero_grad()
    found = sample_losses(model, targets)
    found.sum().backward()
    return found.detach(), {name: leaf.grad.clone() for name, leaf in model.module.named_parameters()}


@pytest.mark.parametrize("chunk", [200 * 30, 200 * 900])
def test_chunks_of_logits_change_only_rounding(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Losses and gradients from chunks of logits are those from all logits of the texts, up to rounding."""
    model, targets = model_with(200), targets_of(200)
    assert ROWS * (COLUMNS - CONTEXT + 1) * 200 < LOGITS, "in one piece"
    expected, gradients = losses_and_gradients(model, targets)
    monkeypatch.setattr(losses, "LOGITS", chunk)
    found, by_chunks = losses_and_gradients(model, targets)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(by_chunks[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    with torch.no_grad():
        assert torch.equal(sample_losses(model, targets), found)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [20_000, 80_000])
def test_logits_take_what_is_planned(vocabulary: int) -> None:
    """A pass with a large vocabulary takes at most the planned memory and one gradient, and at least half of it."""
    model, targets = model_with(vocabulary), targets_of(vocabulary)
    config = model.module.config.to_dict()
    assert ROWS * COLUMNS * 20_000 < LOGITS < ROWS * (COLUMNS - CONTEXT - 8) * 80_000
    for parameter in model.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))

    taken = peak_of(lambda: sample_losses(model, targets).sum().backward())
    gradient = vocabulary * int(config["hidden_size"]) * 4
    planned = pass_bytes(config, ROWS * COLUMNS, 4, recomputes=False) + gradient
    assert taken <= planned <= 2 * taken
