"""mergekit with our random masks, which follow from seed, model and tensor name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from workers.merging.masks import keep, keep_each, mask_key

__all__ = ["draw_our_masks", "keys_of_task_vectors"]


def keys_of_task_vectors(
    base: Mapping[str, torch.Tensor], expert: Mapping[str, torch.Tensor], fingerprint: str
) -> dict[bytes, int]:
    """The keys of an expert's masks with seed 0; a dictionary key is the content of a task vector."""
    deltas = {name: expert[name].float() - tensor.float() for name, tensor in base.items() if name in expert}
    return {delta.numpy().tobytes(): mask_key(0, fingerprint, name) for name, delta in deltas.items()}


def draw_our_masks(monkeypatch: pytest.MonkeyPatch, keys: Mapping[bytes, int]) -> list[int]:
    """Make mergekit draw the masks of `keys`, which it finds by the task vector that becomes sparse.

    The key of every mask that is drawn is appended to the result.
    """
    from mergekit.merge_methods import generalized_task_arithmetic as module

    drawn: list[int] = []
    current: list[int] = []
    sparsify = module.sparsify

    def known(delta: torch.Tensor, **settings: Any) -> torch.Tensor:
        current[:] = [keys.get(delta.numpy().tobytes(), 0)]  # 0: where no mask is drawn
        sparse: torch.Tensor = sparsify(delta, **settings)
        return sparse

    def bernoulli(chances: torch.Tensor) -> torch.Tensor:
        assert current[0], "a task vector without a key"
        drawn.append(current[0])
        if bool((chances == chances.flatten()[0]).all()):
            kept = keep(current[0], chances.shape, round(float(chances.flatten()[0]), 6))
        else:
            kept = keep_each(current[0], chances.double())
        return kept.to(chances.dtype)

    monkeypatch.setattr(module, "sparsify", known)
    monkeypatch.setattr(torch, "bernoulli", bernoulli)
    return drawn
