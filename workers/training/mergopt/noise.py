"""Counter-based noise: element i of a draw is a pure function of (key, i), bit-identical on every device and rank.

    h = hash(key, i), the hash of `workers.merging.masks`;  z_i = quantiles[h >> 16]

A draw is the noise of one optimizer step, `key` is the draw's 64-bit key, and z_i is element i of the draw. The range
of probabilities is divided into 2^16 equal intervals; `quantiles` has, in float32, the distribution's quantile at the
middle of each interval. So a draw computes no transcendental functions, which differ between devices, and the table of
quantiles fits a core's cache. Values beyond probability 2^-17 at either end do not occur: z differs from the mean by
less than 11.1 b under Laplace's distribution with scale b, and by less than 4.4 standard deviations under the normal
distribution.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from workers.merging.masks import hashes

__all__ = ["NUM_QUANTILES", "Gaussian", "Laplace", "Noise", "add_plainly", "draw_key"]

NUM_QUANTILES = 1 << 16
SHIFT = 16

CHUNK = 1 << 16  # elements hashed at a time: their int64 temporaries fit a core's cache


class Noise(Protocol):
    """Interface of a symmetric distribution of noise, which is given by its quantiles.

    The quantiles are float32 [NUM_QUANTILES] on CPU, ascending.
    """

    @property
    def quantiles(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Laplace:
    """Laplace's distribution around `mean`, with density exp(-|z - mean| / b) / 2b, where b > 0 is `scale`.

    The MergOPT paper's defaults are b = 0.0005 and a mean of 0 (appendix B.2).
    """

    scale: float = 0.0005
    mean: float = 0.0

    def __post_init__(self) -> None:
        _check(self.scale, self.mean)

    @cached_property
    def quantiles(self) -> torch.Tensor:
        distance = _middles() - 0.5
        return (self.mean - self.scale * distance.sign() * torch.log1p(-2 * distance.abs())).float()


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution around `mean` with the standard deviation `scale` > 0."""

    scale: float
    mean: float = 0.0

    def __post_init__(self) -> None:
        _check(self.scale, self.mean)

    @cached_property
    def quantiles(self) -> torch.Tensor:
        standard: torch.Tensor = torch.special.ndtri(_middles())
        return (self.mean + self.scale * standard).float()


def draw_key(seed: int, step: int) -> int:
    """The 64-bit key that determines the noise of optimizer step `step`, computed from `seed` and `step`."""
    return int.from_bytes(hashlib.blake2b(f"mergopt\x1f{seed}\x1f{step}".encode(), digest_size=8).digest(), "little")


def add_plainly(flat: torch.Tensor, quantiles: torch.Tensor, *, key: int, start: int) -> None:
    """Add noise to the one-dimensional tensor `flat` in place, in plain PyTorch.

    The compiled kernels for CPU and CUDA give the same result, bit for bit. `flat` has any floating dtype. The noise of
    an element is one of `quantiles`, the 2^16 quantiles (float32, on the device of `flat`) of the noise's distribution.
    The quantile is chosen by a hash of `key`, the seed of the random numbers (function `draw_key`), and of the
    element's index. `start` is the index of the first element of `flat` among the elements of all parameters. Sums are
    computed in float32 and rounded once to the dtype of `flat`.
    """
    for first in range(0, flat.numel(), CHUNK):
        part = flat[first : first + CHUNK]
        elements = torch.arange(start + first, start + first + part.numel(), device=flat.device)
        part.copy_(part.float() + quantiles[hashes(key, elements) >> SHIFT])


def _middles() -> torch.Tensor:
    return (torch.arange(NUM_QUANTILES, dtype=torch.float64) + 0.5) / NUM_QUANTILES


def _check(scale: float, mean: float) -> None:
    if not 0 < scale < float("inf"):
        raise ValueError(f"noise: scale {scale}; expected a finite number above 0")
    if not abs(mean) < float("inf"):
        raise ValueError(f"noise: mean {mean}; expected a finite number")
