"""Tolerances of comparisons between an engine in 16 bits and transformers in float32, measured on the compared merge.

How much rounding changes log-probabilities depends on the model: logits near 32 lie 0.125 apart in bfloat16, and small
logits lie much closer together. Therefore transformers computes some texts in both dtypes, with the same weights, and
the tolerances are multiples of the differences between its results. In float32 the tolerance is a constant. If rounding
changes the results so much that a comparison could not distinguish a wrong merge from the right merge, nothing is
compared (function `too_large`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from workers.engines.transformers.backend import next_token_scores
from workers.evaluation.prompts import LOGPROB_TOLERANCE

__all__ = ["LEAST_TOLERANCE", "TIMES_ROUNDING", "Tolerance", "measured_tolerance", "too_large"]

log = logging.getLogger(__name__)

# An engine rounds at other points than transformers: its errors are as large, but not the same.
TIMES_ROUNDING = 2.5

# The least tolerance in 16 bits, for models that hardly round.
LEAST_TOLERANCE = {"float16": 0.002, "bfloat16": 0.01}

# The largest tolerance in 16 bits, as a multiple of the constant LOGPROB_TOLERANCE. With more, wrong merges would pass.
MOST_TIMES_CONSTANT = 2.0

# The root mean square of n differences varies by chance, by about 1/sqrt(n) of itself: so many times this share are
# allowed for a single text or sample.
TIMES_CHANCE = 5.0

# The largest error of a gap between two tokens, in units of its root mean square. Errors have heavy tails, and a study
# compares some ten thousand tokens.
TIMES_GAP = 10.0

# Tokens on which rounding is measured: 16 bits are slow on most CPUs.
MOST_TOKENS = 1024

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Tolerance:
    """The largest differences between an engine and transformers that rounding explains, in nats.

    - `dtype`: the engine's dtype
    - `rounding`: root mean square by which a token's log-probability changes when transformers computes in `dtype`
      instead of float32; None if it was not measured
    - `gap_rounding`: root mean square by which the gap between the log-probabilities of the two likeliest tokens
      changes; None if it was not measured
    """

    dtype: str
    rounding: float | None = None
    gap_rounding: float | None = None

    @property
    def value(self) -> float:
        """Largest difference between an engine and transformers over many tokens that rounding explains, in nats.

        The function `backend.typical_difference` measures the difference.
        """
        if self.rounding is None:
            return LOGPROB_TOLERANCE[self.dtype]
        return max(TIMES_ROUNDING * self.rounding, LEAST_TOLERANCE[self.dtype])

    @property
    def gap(self) -> float:
        """Largest change of the gap between two tokens' log-probabilities that rounding explains, in nats."""
        if self.gap_rounding is None:
            return self.value
        return max(TIMES_GAP * self.gap_rounding, self.value)

    @property
    def too_large(self) -> str | None:
        """Reason why these tolerances are too large to find wrong merges; None if no tolerance is too large."""
        return too_large(self.dtype, self.rounding, self.gap_rounding)

    def of(self, count: int) -> float:
        """Largest difference between an engine and transformers over `count` tokens that rounding explains, in nats.

        The function `backend.typical_difference` measures the difference. The tolerance is larger for few tokens,
        because their root mean square varies more by chance. If rounding was not measured, it is the property `value`
        for every count.
        """
        if self.rounding is None:
            return self.value
        return self.value * (1 + TIMES_CHANCE / TIMES_ROUNDING / math.sqrt(max(1, count)))


def too_large(dtype: str, *roundings: float | None) -> str | None:
    """Reason why rounding to `dtype` changes a model's results too much to detect a wrong merge; None if it does not.

    `roundings` are measured changes by rounding, as root mean squares in nats, of log-probabilities or of gaps between
    them; None for a change that was not measured. NaN is too large.
    """
    most = MOST_TIMES_CONSTANT * LOGPROB_TOLERANCE[dtype] / TIMES_ROUNDING
    for rounding in roundings:
        if rounding is not None and not rounding <= most:  # NaN is not
            return (
                f"rounding to {dtype} alone changes the log-probabilities of this model by {rounding:.3g} nats (root "
                f"mean square); a wrong merge is only found up to {most:.3g}"
            )
    return None


def measured_tolerance(model: Any, texts: Iterable[Sequence[int]], *, dtype: str) -> Tolerance:
    """Measure how rounding to `dtype` changes the log-probabilities of `texts`, and return the tolerances.

    `model` is a transformers model in float32. Its weights are converted to `dtype` and restored at the end. `texts`
    are lists of token ids; at most MOST_TOKENS tokens are read. The tolerances are constants if `dtype` is "float32",
    if there are no texts, or if transformers cannot compute in `dtype`. Measured tolerances may be too large to find
    wrong merges (property `Tolerance.too_large`).
    """
    chosen = list(_first(texts))
    if dtype == "float32" or not chosen:
        return Tolerance(dtype)
    exact = [_read(model, text) for text in chosen]
    try:
        with _computing_in(model, getattr(torch, dtype)):
            rounded = [_read(model, text, likeliest) for text, (_, _, likeliest) in zip(chosen, exact, strict=True)]
    except RuntimeError as error:
        log.warning("rounding in %s is not measured, transformers cannot compute in it: %s", dtype, error)
        return Tolerance(dtype)
    logprobs, gaps = (torch.cat([a[i] - b[i] for a, b in zip(rounded, exact, strict=True)]) for i in (0, 1))
    return Tolerance(dtype, _root_mean_square(logprobs), _root_mean_square(gaps))


def _first(texts: Iterable[Sequence[int]]) -> Iterator[Tokens]:
    """Yield the first texts of `texts`, up to MOST_TOKENS tokens in total; the last text may be cut."""
    left = MOST_TOKENS
    for text in texts:
        if left < 2:
            return
        if len(text) > 1:
            yield tuple(text[:left])
            left -= len(text)


def _read(
    model: Any, text: Tokens, likeliest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read `text`: log-probabilities of its tokens, without the first token, and gaps at each position.

    A gap is the difference between two tokens' log-probabilities. The two tokens at each position are `likeliest`
    [num_tokens, 2]; if `likeliest` is None, they are the two tokens that `model` finds likeliest. Returns the
    log-probabilities [num_tokens - 1], the gaps [num_tokens], and the two tokens.
    """
    scores = next_token_scores(model, text)
    if likeliest is None:
        likeliest = scores.topk(2).indices
    two = scores.gather(-1, likeliest)
    chosen = scores[:-1].gather(-1, torch.tensor(text[1:], device=scores.device)[:, None])[:, 0]
    return chosen, two[:, 0] - two[:, 1], likeliest


@contextmanager
def _computing_in(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Context manager that converts the parameters of `model` to another dtype, and restores them at the end.

    Buffers are not converted: transformers keeps them in float32, whatever the dtype of the weights.
    """
    kept: list[tuple[torch.nn.Parameter, torch.dtype, torch.Tensor | None]] = []
    try:
        for parameter in model.parameters():
            old = parameter.data
            new = old.to(dtype)
            kept.append((parameter, old.dtype, None if torch.equal(new.to(old.dtype), old) else old))
            parameter.data = new
            del old, new
        yield
    finally:
        for parameter, was, weights in kept:
            parameter.data = parameter.data.to(was) if weights is None else weights


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
