from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workers.merging.masks import CHUNK, hashes, keep, keep_each, key_words, mask_key, threshold

KEY = mask_key(7, "5e" * 32, "model.layers.0.mlp.up_proj.weight")


def defined_hash(key: int, i: int) -> int:
    """The hash defined in the docstring of `workers.merging.masks`, in Python's integers."""
    k0, k1 = key_words(key)
    x = (i * 0x9E3779B9 + k0) % 2**32
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = (x + k1 + (i >> 32)) % 2**32
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_mask_key() -> None:
    """A key is eight bytes of BLAKE2b over seed, model and name."""
    digest = hashlib.blake2b(b"3\x1fabc\x1fmodel.norm.weight", digest_size=8).digest()
    assert mask_key(3, "abc", "model.norm.weight") == int.from_bytes(digest, "little")
    assert key_words(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)


def test_seed_model_and_name_each_change_the_key() -> None:
    keys = {mask_key(1, "a", "x"), mask_key(2, "a", "x"), mask_key(1, "b", "x"), mask_key(1, "a", "y")}
    assert len(keys) == 4


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 3, 2**33 + 5, 10**12])
def test_hashes_are_as_defined(start: int) -> None:
    assert hashes(KEY, torch.arange(start, start + 9)).tolist() == [defined_hash(KEY, start + i) for i in range(9)]


def test_hashes_have_not_changed() -> None:
    # Recipes outlive versions: the same seed must give the same mask for ever.
    assert hashes(mask_key(0, "model", "name"), torch.arange(3)).tolist() == [1225556877, 3154813718, 372688657]


@pytest.mark.parametrize(
    ("probability", "bound"), [(0.0, 0), (1.0, 2**32), (0.5, 2**31), (0.1, 429496729), (0.000001, 4294)]
)
def test_the_threshold_is_exact_on_six_decimals(probability: float, bound: int) -> None:
    assert threshold(probability) == bound


def test_elements_below_the_threshold_are_kept_across_chunks() -> None:
    shape = (3, CHUNK // 2 + 5)
    kept = keep(KEY, shape, 0.3)
    assert kept.shape == shape
    assert torch.equal(kept.flatten(), hashes(KEY, torch.arange(kept.numel())) < threshold(0.3))
    assert keep(KEY, (1000,), 1.0).all()
    assert not keep(KEY, (1000,), 0.0).any()


def test_elements_may_have_probabilities_of_their_own() -> None:
    chances = torch.linspace(0, 1, 2 * CHUNK + 3, dtype=torch.float64)
    kept = keep_each(KEY, chances)
    assert torch.equal(keep_each(KEY, torch.full((5, 7), 0.5, dtype=torch.float64)), keep(KEY, (5, 7), 0.5))
    tenths = kept[: 2 * CHUNK].view(16, -1).double().mean(1)
    assert torch.allclose(tenths, (torch.arange(16) + 0.5).double() / 16, atol=0.02)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_masks_look_independent_of_neighbours_and_of_other_masks(probability: float) -> None:
    size = 1 << 20
    spread = probability * (1 - probability)
    mask = keep(KEY, (size,), probability).double() - probability
    assert abs(float(mask.sum())) < 4 * math.sqrt(size * spread)
    for lag in (1, 2, 3, 8, 64, 4096, 11008):
        assert abs(float(mask[lag:] @ mask[:-lag])) < 5 * math.sqrt(size) * spread
    for other in (mask_key(8, "5e" * 32, "model.layers.0.mlp.up_proj.weight"), mask_key(7, "5f" * 32, "x"), KEY + 1):
        others = keep(other, (size,), probability).double() - probability
        assert abs(float(mask @ others)) < 5 * math.sqrt(size) * spread


class _Operations(TorchDispatchMode):
    """Counts the operations that a device would execute."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_gpu_is_given_few_operations() -> None:
    """A mask of a large tensor takes some operations for each of a few large chunks, on any device but a CPU."""
    with _Operations() as operations:
        keep(KEY, (1 << 27,), 0.5, device="meta")
    assert operations.count < 1500
    with _Operations() as operations:
        keep_each(KEY, torch.empty(1 << 27, dtype=torch.float64, device="meta"))
    assert operations.count < 1500
