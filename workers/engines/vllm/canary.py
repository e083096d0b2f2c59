"""The canary: a regular check that an engine computes correctly, by comparing its log-probabilities with transformers'.

The engine and transformers compute the log-probabilities of fixed prompts for the same merge. A wrong swap (writing of
a merge into the engine) gives wrong scores without any error, and only this comparison detects it. The tolerance is
measured once for each base model on each machine: it follows from the change of the base model's log-probabilities, in
transformers, when its weights are rounded to the engine's dtype.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.recipe import Recipe
from workers.cache import cache_dir, cached
from workers.directories import turn_if_writable
from workers.engines.canaries import CANARY_EVERY, CANARY_TOKENS, NUM_PROMPTS
from workers.engines.transformers.backend import logprobs, typical_difference
from workers.engines.transformers.merged_models import merged_model
from workers.engines.transformers.rounding import MOST, explained, rounding_bounds
from workers.engines.transformers.tolerance import LEAST_TOLERANCE, TIMES_ROUNDING, too_large
from workers.engines.vllm.worker_extension import family_to_json, open_bank
from workers.errors import EvidenceMismatch, TrialFailed
from workers.evaluation.prompts import LOGPROB_TOLERANCE
from workers.types import CanaryReport, Family, digest_of

if TYPE_CHECKING:
    from workers.merging.bank import Bank

__all__ = ["Calibration", "Canary", "canary_prompts", "typical_difference"]

log = logging.getLogger(__name__)

GIB = 1 << 30

# The largest distance from 0 that the base model's share in the engine's log-probabilities may have: rounding is not
# quite independent of the merge (shares of up to 0.007 were seen), and the estimate has a standard error.
LEAST_SHARE = 0.02
MAX_STANDARD_ERRORS = 5.0


@dataclass(frozen=True)
class Calibration:
    """Measurements on the base model for computing the tolerances of a canary.

    A canary is a comparison of an engine's log-probabilities with transformers' log-probabilities.

    - `dtype`: the engine's dtype
    - `base`: the log-probabilities that transformers computes for the base model in float32
    - `rounding`: the root mean square by which these log-probabilities change when the weights are rounded to `dtype`;
      None for "float32", and if transformers cannot compute in `dtype`
    """

    dtype: str
    base: tuple[float, ...]
    rounding: float | None

    @property
    def tolerance(self) -> float:
        """Largest difference between log-probabilities of the engine and of transformers that rounding explains.

        The function `typical_difference` measures the difference: for "float32" the largest one of all tokens, for
        16-bit dtypes the root mean square over tokens. The tolerance is a multiple of the field `rounding`, but not
        below a minimum for each dtype. If the field is None, the tolerance is a constant for each dtype.
        """
        if self.rounding is None:
            return LOGPROB_TOLERANCE[self.dtype]
        return max(TIMES_ROUNDING * self.rounding, LEAST_TOLERANCE[self.dtype])

    def base_share(self, ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
        """Estimate how large the base model's share in an engine's log-probabilities is; it should be 0.

        `ours` are the engine's log-probabilities, and `theirs` are transformers' log-probabilities for the merge. The
        share is 0 if `ours` equals `theirs`, and 1 if `ours` equals the log-probabilities of the base model. A share
        that is far from 0 suggests that some weights of the merge were not written. The estimate is by least squares
        over all tokens, so that rounding errors average out. Therefore the share detects unwritten weights much earlier
        than the difference of log-probabilities (function `typical_difference`).

        Returns the share, and the largest magnitude of the share that rounding explains. Returns (0, infinity) if the
        field `rounding` is None because rounding was not measured, or if the merge has the log-probabilities of the
        base model.
        """
        step = [base - merged for base, merged in zip(self.base, theirs, strict=True)]
        length = math.sqrt(sum(value * value for value in step))
        if self.rounding is None or length == 0:
            return 0.0, math.inf
        apart = (own - merged for own, merged in zip(ours, theirs, strict=True))
        share = sum(off * towards for off, towards in zip(apart, step, strict=True)) / length**2
        return share, LEAST_SHARE + MAX_STANDARD_ERRORS * self.tolerance / TIMES_ROUNDING / length

    def check(
        self,
        ours: Sequence[float],
        theirs: Sequence[float],
        *,
        of: str,
        bounds: Callable[[], Sequence[float]] | None = None,
    ) -> float:
        """Compare an engine's log-probabilities with transformers' log-probabilities, and return how much they differ.

        Raises EvidenceMismatch if rounding does not explain the difference, or the share of the base model in the
        engine's log-probabilities (method `base_share`), which should be 0.

        `ours` are the engine's log-probabilities, and `theirs` are transformers' log-probabilities of the same tokens.
        `of` names the compared texts in the message. `bounds` is a function that returns, for each token, the largest
        change of its log-probability that rounding explains (function `rounding_bounds`). `bounds` is called only for
        "float32", if a difference is larger than the tolerance. The function `typical_difference` says how the returned
        difference is measured.
        """
        difference = typical_difference(ours, theirs, dtype=self.dtype)
        if bounds is not None and self.dtype == "float32" and self.tolerance < difference < MOST:
            difference, count = explained(ours, theirs, bounds(), tolerance=self.tolerance)
            if count:
                log.warning("%s: %d of %d log-probabilities are unstable in float32", of, count, len(ours))
        share, most = self.base_share(ours, theirs)
        if difference <= self.tolerance and abs(share) <= most:
            return difference
        text = (
            f"{of}: log-probabilities of the engine and of transformers differ by {difference:.3g}; at most "
            f"{self.tolerance:.3g} is rounding in {self.dtype}"
        )
        if not math.isinf(most):
            text += f". They are {share:.1%} of the way to the base model's; at most {most:.1%} is rounding"
        raise EvidenceMismatch(text)


class Canary:
    """Regular comparisons of one engine with transformers (canaries), and the number of comparisons that it passed.

    A comparison is skipped if there is too little memory for it, if logits are not finite, or if rounding changes the
    base model's log-probabilities so much that a wrong swap would pass (function `tolerance.too_large`). The reason of
    the last skipped comparison is kept.

    - `family`: the base model and its experts
    - `base`: the recipe whose merge is the base model
    - `replica`: the name of the engine's replica
    - `dtype`: the engine's dtype
    - `vocabulary`: the number of token ids from which prompts are made
    - `max_length`: the largest number of tokens in a text
    """

    def __init__(
        self, family: Family, *, base: Recipe, replica: str, dtype: str, vocabulary: int, max_length: int
    ) -> None:
        self.num_passed = 0
        self.num_skipped = 0
        self._family = family
        self._base = base
        self._replica = replica
        self._dtype = dtype
        self._prompts = canary_prompts(vocabulary=vocabulary, max_length=max_length)
        self._calibration: Calibration | None = None
        self._passed_at = 0  # the number of swaps when a canary last passed
        self._skipped = ""

    @property
    def report(self) -> CanaryReport:
        """Report of the canaries (comparisons with transformers) that the engine has passed so far, for users.

        The report has the number of passed canaries and, if the last canary was skipped, the reason.
        """
        return CanaryReport(self._replica, self.num_passed, self._skipped)

    def is_due(self, swap_count: int) -> bool:
        return swap_count - self._passed_at >= CANARY_EVERY

    def make(
        self,
        recipe: Recipe,
        engine_logprobs: Callable[[Sequence[Sequence[int]]], list[list[float]]],
        *,
        free_bytes: Callable[[], int],
        swap_count: int,
    ) -> CanaryReport:
        """Make a canary: compare the engine with transformers, and count the comparison as passed or skipped.

        - `recipe`: the recipe that the engine should hold
        - `engine_logprobs`: returns the engine's log-probabilities of the tokens of each prompt except the first
        - `free_bytes`: returns the host memory that a second model, in transformers, may take now
        - `swap_count`: the number of merges that were written into the engine so far

        Raises EvidenceMismatch if the engine fails the canary.
        """
        if self.compare(recipe, engine_logprobs, free_bytes=free_bytes) is None:
            self.num_skipped += 1
        else:
            self.num_passed += 1
            self._passed_at, self._skipped = swap_count, ""
        return self.report

    def compare(
        self,
        recipe: Recipe,
        engine_logprobs: Callable[[Sequence[Sequence[int]]], list[list[float]]],
        *,
        free_bytes: Callable[[], int],
    ) -> float | None:
        """Return how much the log-probabilities of fixed prompts differ between the engine and transformers.

        - `recipe`: the recipe that the engine should hold
        - `engine_logprobs`: returns the engine's log-probabilities of the tokens of each prompt except the first
        - `free_bytes`: returns the host memory that a second model, in transformers, may take now

        Returns None, for a skipped comparison, if a second model does not fit into this memory, the merge's logits are
        not finite, or rounding is too large to find a wrong swap. Raises EvidenceMismatch if the difference, or the
        share of the base model in the engine's log-probabilities, is larger than rounding explains.

        Engines of one machine make their second models one after the other, because all of them take the same memory.
        """
        is_known = recipe.digest == self._base.digest and _known_calibration(self._calibration_key()) is not None
        with nullcontext() if is_known else _turn_of_machine():
            return self._compare(recipe, engine_logprobs, free_bytes=free_bytes())

    def _compare(
        self,
        recipe: Recipe,
        engine_logprobs: Callable[[Sequence[Sequence[int]]], list[list[float]]],
        *,
        free_bytes: int,
    ) -> float | None:
        is_base = recipe.digest == self._base.digest
        key = self._calibration_key()
        known = self._calibration or _known_calibration(key)
        size = sum(file.stat().st_size for file in Path(self._family.base.directory).glob("*.safetensors"))
        needed = 2 * size * max(1.0, len(recipe.layers) / len(self._base.layers))
        if needed > free_bytes and not (is_base and known is not None):
            self._skipped = f"comparing with transformers takes {needed / GIB:.1f} GiB more memory than is free"
            return None
        try:
            ours = _flat(engine_logprobs(self._prompts))
        except TrialFailed as error:
            self._skipped = str(error)
            return None
        bank = open_bank(family_to_json(self._family))
        self._calibration = known or self._make_calibration(key, bank)
        if (reason := too_large(self._dtype, self._calibration.rounding)) is not None:
            self._skipped = reason
            return None
        model = None
        if is_base:
            theirs: Sequence[float] = self._calibration.base
        else:
            model = _merged_model(recipe, bank, dtype=self._dtype)
            theirs = read(model, self._prompts)

        def bounds() -> list[float]:
            own = _merged_model(recipe, bank, dtype=self._dtype) if model is None else model
            return _flat([rounding_bounds(own, prompt) for prompt in self._prompts])

        return self._calibration.check(ours, theirs, of=f"recipe {recipe.digest[:12]}", bounds=bounds)

    def _calibration_key(self) -> str:
        """Cache key of the calibration: the differences from transformers that this canary accepts on this machine."""
        libraries = [version(name) for name in ("torch", "transformers", "mergesearch")]
        return f"canary {digest_of([self._base.digest, self._dtype, self._prompts, libraries])}"

    def _make_calibration(self, key: str, bank: Bank) -> Calibration:
        """Make the calibration with transformers, unless another replica on this machine has made it meanwhile.

        Replicas of a family start at the same time. The first replica makes the calibration, which needs memory for a
        second model; the other replicas wait for it. `key` is the key of the result in the cache, and `bank` has the
        weights.
        """
        with turn_if_writable(cache_dir() / "canaries" / digest_of(key)[:16]):
            if (known := _known_calibration(key)) is not None:
                return known
            model = _merged_model(self._base, bank, dtype=self._dtype)
            found = calibrate(model, self._prompts, dtype=self._dtype)
            cached(key, json.dumps(asdict(found)))
            return found


def _merged_model(recipe: Recipe, bank: Bank, *, dtype: str) -> Any:
    """As `merged_models.merged_model`; the CPU computes the merge if the bank's GPU has too little memory.

    An engine of one process has its bank on its GPU, which swaps of the engine also leave to the CPU if it is full.
    """
    try:
        return merged_model(recipe, bank, dtype=dtype)
    except torch.OutOfMemoryError as error:
        if bank.device.type == "cpu":
            raise
        log.warning("the GPU has too little memory left to merge for a comparison, so the CPU merges: %s", error)
    torch.cuda.empty_cache()  # outside of the handler, whose error refers to tensors of the merge
    return merged_model(recipe, bank.on("cpu"), dtype=dtype)


def _turn_of_machine() -> AbstractContextManager[None]:
    """Lock for the memory of a second model, against other processes of this machine; machines may share the cache."""
    return turn_if_writable(cache_dir() / "canaries" / f"model-on-{socket.gethostname()}")


def _known_calibration(key: str) -> Calibration | None:
    """The calibration with the given key that a process of this machine has stored, or None."""
    if (text := cached(key)) is None:
        return None
    found = json.loads(text)
    return Calibration(found["dtype"], tuple(found["base"]), found["rounding"])


def canary_prompts(*, vocabulary: int, max_length: int) -> list[list[int]]:
    """Make the prompts, as token ids, for comparing log-probabilities of engines and of transformers.

    The tokens are spread over the vocabulary, and the prompts are the same for every engine of a model. `vocabulary` is
    the number of token ids. Each prompt has fewer than `max_length` tokens.
    """
    length = min(CANARY_TOKENS, max_length - 1)
    return [[(7919 * (i + length * prompt) + 11) % vocabulary for i in range(length)] for prompt in range(NUM_PROMPTS)]


def calibrate(model: Any, prompts: Sequence[Sequence[int]], *, dtype: str) -> Calibration:
    """Measure the base model's log-probabilities in float32, and how rounding of the weights to `dtype` changes them.

    `model` is the base model in transformers. `prompts` are lists of token ids. The model's parameters must be in
    float32; they are rounded to `dtype` in place.
    """
    base = read(model, prompts)
    if dtype == "float32":
        return Calibration(dtype, tuple(base), None)
    # Buffers are not rounded: transformers keeps them in float32, whatever the dtype of the weights.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    try:
        rounding = typical_difference(read(model, prompts), base, dtype=dtype)
    except RuntimeError as error:
        log.warning("rounding in %s is not measured, transformers cannot compute in it: %s", dtype, error)
        return Calibration(dtype, tuple(base), None)
    return Calibration(dtype, tuple(base), rounding)


def read(model: Any, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Log-probabilities that a transformers model gives to the tokens of `prompts`, in one list for all prompts.

    The first token of each prompt has no log-probability.
    """
    return _flat([logprobs(model, prompt) for prompt in prompts])


def _flat(lists: Sequence[Sequence[float]]) -> list[float]:
    return [value for values in lists for value in values]
