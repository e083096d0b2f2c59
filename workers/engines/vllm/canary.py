"""The canary: an engine's log-probabilities of one fixed prompt against those of transformers on the same merge.

A wrong swap gives wrong scores without any error; this comparison is what catches it.
"""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.recipe import Recipe
from workers.engines.transformers.backend import logprobs, merged_model, typical_difference
from workers.engines.vllm.worker_extension import family_to_json, open_bank
from workers.errors import EvidenceMismatch
from workers.evaluation.prompts import LOGPROB_TOLERANCE
from workers.types import Family

__all__ = ["canary_prompt", "compare_with_transformers", "typical_difference"]

CANARY_TOKENS = 48


def canary_prompt(*, vocabulary: int, max_length: int) -> list[int]:
    """Token ids spread over the vocabulary, the same for every engine of a model."""
    return [(7919 * i + 11) % vocabulary for i in range(min(CANARY_TOKENS, max_length - 1))]


def compare_with_transformers(
    engine_logprobs: Sequence[float], recipe: Recipe, family: Family, *, prompt: Sequence[int], dtype: str
) -> float:
    """`typical_difference` of the engine's log-probabilities from those of transformers on the merge of `recipe`.

    Raises EvidenceMismatch if it is above LOGPROB_TOLERANCE, or NaN.
    """
    model = merged_model(recipe, open_bank(family_to_json(family)), dtype=dtype)
    difference = typical_difference(engine_logprobs, logprobs(model, prompt), dtype=dtype)
    if not difference <= LOGPROB_TOLERANCE[dtype]:
        raise EvidenceMismatch(
            f"recipe {recipe.digest[:12]}: log-probabilities of the engine and of transformers differ by "
            f"{difference:.3g}; at most {LOGPROB_TOLERANCE[dtype]} is rounding in {dtype}"
        )
    return difference
