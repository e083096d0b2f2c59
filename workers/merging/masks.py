"""Counter-based random masks: whether an element is kept is a pure function of (seed, model, tensor name, index).

No mask is stored and the order of calls does not matter, so evaluation and export, CPU and GPU, torch and fused kernels
have the same masks, bit for bit. The definition, in unsigned integers:

    key = the 8 bytes of blake2b(text, digest_size=8), little-endian, of the UTF-8 text
          "{seed}\\x1f{model}\\x1f{name}": seed in decimal, model = content fingerprint, name = the source's tensor
    k0, k1 = key mod 2^32, key >> 32
    hash(key, i), i the element's index in C order, modulo 2^32 at every step:
        x = i * 0x9e3779b9 + k0
        x ^= x >> 16;  x *= 0x7feb352d
        x ^= x >> 15;  x += k1 + (i >> 32);  x *= 0x846ca68b
        x ^= x >> 16
    threshold(p) = floor(p * 2^32), p rounded to six decimals, in exact arithmetic; 2^32 for p = 1
    element i is kept if hash(key, i) < threshold(p)

The rounds are those of lowbias32 (C. Wellons' hash prospector) on a Weyl sequence. The second key word is added between
them, so that masks of different keys are not permutations of each other. Without the Weyl step, elements whose distance
is a power of two are correlated. In a loop i * 0x9e3779b9 is an addition, and k1 + (i >> 32) is constant over 2^32
elements. In signed 64-bit arithmetic, multipliers from 2^31 on are replaced by their value minus 2^32, which is equal
modulo 2^32: then every product fits int64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from search_spaces.recipe import COEFFICIENT_DECIMALS

__all__ = ["MULTIPLIERS", "STEP", "hashes", "keep", "keep_each", "key_words", "mask_key", "threshold"]

STEP = 0x9E3779B9
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)

MASK_32 = 0xFFFFFFFF
# Elements hashed at a time. On a CPU their int64 temporaries fit a core's cache. On a GPU each chunk takes some twenty
# launches, so chunks are large: 2^16 elements at a time would take more time to launch than to compute.
CHUNK = 1 << 16
GPU_CHUNK = 1 << 22


def mask_key(seed: int, model: str, name: str) -> int:
    """The 64-bit key of a random mask, from a seed, a model and the name of a tensor.

    `model` is the fingerprint of the model's content. Therefore the mask does not depend on the model's name in the
    recipe (alias).
    """
    text = f"{seed}\x1f{model}\x1f{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def key_words(key: int) -> tuple[int, int]:
    """Split the 64-bit key of a random mask into its low and high 32 bits, (k0, k1)."""
    return key & MASK_32, key >> 32


def threshold(probability: float) -> int:
    """Hash limit of a random mask: an element is kept, with the probability `probability`, if its hash is smaller.

    Hashes are in [0, 2^32), so the limit is floor(probability * 2^32). It is exact for a probability with at most six
    decimals.
    """
    scale: int = 10**COEFFICIENT_DECIMALS
    return min(scale, max(0, round(probability * scale))) * 2**32 // scale


def hashes(key: int, index: torch.Tensor) -> torch.Tensor:
    """The hash of each element; by the hashes, a random mask with the key `key` keeps or drops elements.

    `index` (int64) has the indices of the elements. The hashes are int64 in [0, 2^32), in the shape of `index`. No two
    elements below index 2^32 have the same hash.
    """
    k0, k1 = key_words(key)
    first, second = MULTIPLIERS
    x = (index & MASK_32).mul_(STEP - 2**32).add_(k0).bitwise_and_(MASK_32)
    x ^= x >> 16
    x.mul_(first).bitwise_and_(MASK_32)
    x ^= x >> 15
    x += (index >> 32) + k1
    x.bitwise_and_(MASK_32).mul_(second - 2**32).bitwise_and_(MASK_32)
    x ^= x >> 16
    return x


def keep(
    key: int, shape: torch.Size | tuple[int, ...], probability: float, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A random mask (bool) of the shape `shape`, in which each element is True with `probability`.

    An element is True if its hash by `key` is below `threshold(probability)`. The mask is on `device`.
    """
    kept = torch.empty(torch.Size(shape), dtype=torch.bool, device=device)
    flat, bound = kept.view(-1), threshold(probability)
    for start, stop in _chunks(flat):
        torch.lt(hashes(key, _indices(start, stop, kept.device)), bound, out=flat[start:stop])
    return kept


def keep_each(key: int, probabilities: torch.Tensor) -> torch.Tensor:
    """A random mask (bool) in which each element has its own probability of being True.

    `probabilities` (float64) has the shape of the mask. `key` is the key of the mask, from which the hashes of elements
    are computed. An element is True if its hash is less than floor(probability * 2^32).
    """
    kept = torch.empty(probabilities.shape, dtype=torch.bool, device=probabilities.device)
    flat, chances = kept.view(-1), probabilities.reshape(-1)
    for start, stop in _chunks(flat):
        bounds = (chances[start:stop] * 2.0**32).long()
        torch.lt(hashes(key, _indices(start, stop, probabilities.device)), bounds, out=flat[start:stop])
    return kept


def _indices(start: int, stop: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, stop, dtype=torch.int64, device=device)


def _chunks(flat: torch.Tensor) -> Iterator[tuple[int, int]]:
    size, chunk = flat.numel(), CHUNK if flat.device.type == "cpu" else GPU_CHUNK
    return ((start, min(start + chunk, size)) for start in range(0, size, chunk))
