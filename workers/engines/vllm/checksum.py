"""Checksum of a model's parameters, which depends only on their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

__all__ = ["WEIGHT", "checksum", "combined", "word_sum"]

# Words per piece of a sum on a GPU, with 8 bytes of temporary memory each: at first, and on a GPU that is full.
CHUNK = 1 << 22
SMALLEST_CHUNK = 1 << 14
# The odd weight of word i is i times this, with the last bit set: 2^64 / golden ratio.
WEIGHT = 0x9E3779B97F4A7C15


def checksum(parameters: Mapping[str, torch.Tensor]) -> str:
    """Checksum of a model's parameters: sha256 (hex) over each parameter's name, dtype, shape and 64-bit sum.

    The sum is over the parameter's 64-bit words, each multiplied by an odd number that depends on the word's position,
    modulo 2^64. Odd numbers are invertible modulo 2^64, so a change of a single word always changes the sum. Exchanging
    words also changes the sum.
    """
    return combined(parameters, {name: word_sum(parameter) for name, parameter in parameters.items()})


def combined(parameters: Mapping[str, torch.Tensor], sums: Mapping[str, int]) -> str:
    """Compute the checksum of parameters, as the function `checksum` does, from their 64-bit sums.

    `sums` has the result of the function `word_sum` for each of `parameters`, keyed by name, so that the parameters'
    elements are not read.
    """
    total = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        total.update(f"{name}:{parameter.dtype}:{tuple(parameter.shape)}:{sums[name]}\n".encode())
    return total.hexdigest()


def word_sum(parameter: torch.Tensor) -> int:
    """Sum modulo 2^64 of a parameter's 64-bit words, each multiplied by an odd number that depends on its position.

    If the number of the parameter's bytes or their address is not a multiple of 8, words of 32, 16 or 8 bits are used,
    each converted to 64 bits.
    """
    words = _words(parameter)
    if words.device.type == "cpu":
        from workers.merging.kernels.reductions import weighted_words

        return weighted_words(words.to(torch.int64), WEIGHT)
    return sum_in_pieces(words)


def sum_in_pieces(words: torch.Tensor) -> int:
    """The sum of `word_sum` of words (int64, int32, int16 or uint8) on any device, in pieces.

    On a GPU that lacks the memory for a piece, pieces become smaller. Raises torch.OutOfMemoryError if there is no
    memory for SMALLEST_CHUNK words.
    """
    number, start, chunk = 0, 0, CHUNK
    while start < words.numel():
        piece = words[start : start + chunk]
        try:
            number += _weighted(piece, start)
        except torch.OutOfMemoryError:
            if chunk == SMALLEST_CHUNK:
                raise
            chunk = max(chunk // 8, SMALLEST_CHUNK)
            continue
        start += chunk
    return number % 2**64


def _weighted(piece: torch.Tensor, start: int) -> int:
    """Sum of the words in `piece`, whose first word has the number `start`, with their weights; modulo 2^64."""
    index = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=piece.device)
    weights = index.mul_(WEIGHT - 2**64).bitwise_or_(1)  # as a signed number
    return int(weights.mul_(piece).sum().item())


def _words(parameter: torch.Tensor) -> torch.Tensor:
    """The bytes of `parameter` as a flat tensor of words: of 64 bits, if their number and address allow it.

    If the number of bytes or their address is not a multiple of 8, the words have 32, 16 or 8 bits.
    """
    flat = parameter.detach().contiguous().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if num_bytes % dtype.itemsize == 0 and flat.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat.view(torch.uint8)
