"""The loss over target tokens: computed in chunks, it equals the loss of all logits, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from tests.workers.merging.test_devices import peak_of
from workers.training.finetuning.data import IGNORED
from workers.training.finetuning.target_loss import TargetLoss

# Sums over chunks in another order: a few units in the last place of float32.
RTOL, ATOL = 1e-4, 1e-6

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **options)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def rows(count: int, columns: int, vocabulary: int, *, share: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocabulary, (count, columns), generator=generator)
    is_target = torch.rand((count, columns), generator=generator) < share
    return tokens, torch.where(is_target, tokens.roll(-1, 1), IGNORED)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {**SMALL, "vocab_size": 50, "num_key_value_heads": 1}),
        # Logits are capped, or divided, after the last matrix.
        (
            "gemma2",
            {**SMALL, "vocab_size": 50, "num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 0.5},
        ),
        ("granite", {**SMALL, "vocab_size": 50, "num_key_value_heads": 1, "logits_scaling": 8.0}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "resid_pdrop": 0.0, "attn_pdrop": 0.0}),
    ],
)
def test_chunks_give_the_loss_of_all_logits(kind: str, options: dict[str, Any]) -> None:
    """Loss and gradients of seven targets at a time are those of all logits of the model at once."""
    model = model_of(kind, **options)
    tokens, labels = rows(3, 16, 50)
    if kind == "gpt2":
        model.transformer.drop.p = 0.0
    logits = model(input_ids=tokens).logits.flatten(0, 1).float()
    expected = cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    chunked = TargetLoss(model, chunk=7 * 50)
    found = chunked(labels=labels, input_ids=tokens)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=RTOL, atol=ATOL), name
    assert torch.equal(model(input_ids=tokens).logits, chunked(input_ids=tokens).logits)


def test_without_targets_there_are_gradients() -> None:
    """Rows without a target have loss 0 and gradients 0, which other ranks wait for."""
    model = model_of("llama", **SMALL, vocab_size=50)
    tokens, _ = rows(2, 16, 50)
    loss = TargetLoss(model, chunk=50)(labels=torch.full_like(tokens, IGNORED), input_ids=tokens)
    loss.backward()
    assert float(loss) == 0
    layer = model.model.layers[0].mlp.up_proj.weight
    assert layer.grad is not None
    assert not layer.grad.any()


@pytest.mark.slow
def test_chunks_take_the_memory_of_a_chunk() -> None:
    """A vocabulary of 20,000 tokens and 512 positions take 41 MB for logits at once; a chunk takes a 16th."""
    model = model_of("llama", **SMALL, vocab_size=20_000)
    tokens, labels = rows(2, 256, 20_000, share=1.0)
    peaks = {}
    for share in (1, 16):
        loss = TargetLoss(model, chunk=tokens.numel() * 20_000 // share)

        def step(loss: TargetLoss = loss) -> None:
            model.zero_grad()
            loss(labels=labels, input_ids=tokens).backward()

        step()
        peaks[share] = peak_of(step)
    of_logits = tokens.numel() * 20_000 * 4
    print(f"logits {of_logits / 1e6:.0f} MB; peak at once {peaks[1] / 1e6:.0f} MB, in chunks {peaks[16] / 1e6:.0f} MB")
    assert peaks[1] > 2 * of_logits  # logits and their gradient
    assert peaks[16] < peaks[1] / 4
