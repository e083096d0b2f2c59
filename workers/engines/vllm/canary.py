"""The canary: an engine's log-probabilities of one fixed prompt against those of transformers on the same merge.

A wrong swap gives wrong scores without any error; this comparison is what catches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from search_spaces.recipe import Recipe
from workers.engines.transformers.backend import logprobs, merged_model
from workers.engines.vllm.worker_extension import family_to_json, open_bank
from workers.errors import EvidenceMismatch, TrialFailed
from workers.evaluation.prompts import LOGPROB_TOLERANCE
from workers.types import CanaryReport, Family

__all__ = ["CANARY_EVERY", "Canary", "typical_difference"]

CANARY_EVERY = 32  # swaps
CANARY_TOKENS = 48
GIB = 1 << 30


class Canary:
    """The canaries of one engine: makes them, counts those that the engine passed, and says why one was skipped."""

    def __init__(self, family: Family, *, replica: str, dtype: str, vocabulary: int, max_length: int) -> None:
        # Token ids spread over the vocabulary, the same for every engine of a model.
        self.prompt = [(7919 * i + 11) % vocabulary for i in range(min(CANARY_TOKENS, max_length - 1))]
        self.num_passed = 0
        self.num_skipped = 0
        self._family = family
        self._replica = replica
        self._dtype = dtype
        self._passed_at = 0  # the number of swaps then
        self._skipped = ""

    @property
    def report(self) -> CanaryReport:
        """How many passed so far, and why the last one was skipped, if it was."""
        return CanaryReport(self._replica, self.num_passed, self._skipped)

    def is_due(self, swap_count: int) -> bool:
        return swap_count - self._passed_at >= CANARY_EVERY

    def make(
        self,
        recipe: Recipe,
        engine_logprobs: Callable[[Sequence[Sequence[int]]], list[list[float]]],
        *,
        free_bytes: int,
        swap_count: int,
    ) -> CanaryReport:
        """As `compare`; counts the outcome."""
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
        free_bytes: int,
    ) -> float | None:
        """`typical_difference` of the engine's log-probabilities of prompts from those of transformers on the merge.

        None if a second model does not fit into `free_bytes` of memory, or the merge's logits are not finite. Raises
        EvidenceMismatch if the difference is above LOGPROB_TOLERANCE, or NaN.
        """
        needed = 2 * sum(file.stat().st_size for file in Path(self._family.base.directory).glob("*.safetensors"))
        if needed > free_bytes:
            self._skipped = f"comparing with transformers takes {needed / GIB:.1f} GiB more memory than is free"
            return None
        try:
            (ours,) = engine_logprobs([self.prompt])
        except TrialFailed as error:
            self._skipped = str(error)
            return None
        model = merged_model(recipe, open_bank(family_to_json(self._family)), dtype=self._dtype)
        difference = typical_difference(ours, logprobs(model, self.prompt), dtype=self._dtype)
        if not difference <= LOGPROB_TOLERANCE[self._dtype]:
            raise EvidenceMismatch(
                f"recipe {recipe.digest[:12]}: log-probabilities of the engine and of transformers differ by "
                f"{difference:.3g}; at most {LOGPROB_TOLERANCE[self._dtype]} is rounding in {self._dtype}"
            )
        return difference


def typical_difference(ours: Sequence[float], theirs: Sequence[float], *, dtype: str) -> float:
    """How far two lists of log-probabilities are apart: the largest difference in float32, else the root mean square.

    In 16 bits the rounding errors of a whole model, small on average, move single unlikely tokens far.
    """
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(apart) if dtype == "float32" else math.sqrt(sum(value * value for value in apart) / len(apart))
