"""Verification: an exported checkpoint, scored again by plain transformers and compared with stored samples.

The checkpoint is what users get, so that a comparison covers everything behind a score: merge, swap, scoring and
export.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from search_spaces.study.sections import EngineOptions
from workers.engines.host_memory import free_host_bytes
from workers.engines.transformers.backend import Reference, logprobs, whole_characters
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import LOGPROB_TOLERANCE, Continuation, Prompts
from workers.types import SampleDifference, SampleResult, Span, VerificationReport

__all__ = ["fits_in_memory", "verify"]


def verify(
    recipe_digest: str,
    directory: str,
    options: EngineOptions,
    *,
    samples: Sequence[SampleResult],
    spans: Sequence[Span],
    dtype: str,
    engine_logprobs: Mapping[tuple[int, ...], Sequence[float]],
    evaluator: TaskEvaluator | None = None,
) -> VerificationReport:
    """Score `spans` on the exported checkpoint in `directory` and compare with the stored `samples`.

    `evaluator` provides the tokenized requests; without it they are built with the exported tokenizer.
    `engine_logprobs` maps prompts to the engine's log-probabilities of their tokens but the first. Spans of tasks that
    sample are skipped. Raises InvalidTask if a sample of a span is not among `samples`.
    """
    reference = Reference(directory, options)
    if evaluator is None:
        evaluator = TaskEvaluator(reference, Prompts(directory, options))
    else:
        evaluator = evaluator.with_backend(reference)
    greedy = tuple(span for span in spans if evaluator.is_greedy(span.task))
    known = {(sample.objective, sample.position): sample for sample in samples}
    scored = evaluator.score(greedy).samples
    if missing := [s for s in scored if (s.objective, s.position) not in known]:
        raise InvalidTask(f"verify: no stored sample of {missing[0].objective} at position {missing[0].position}")
    tasks = {span.objective: span.task for span in greedy}
    differences: list[SampleDifference] = []
    for expected in scored:
        stored = known[expected.objective, expected.position]
        if stored.value != expected.value:
            requests = evaluator.requests(tasks[expected.objective], expected.position)
            differences.append(
                SampleDifference(
                    objective=expected.objective,
                    position=expected.position,
                    engine=stored.value,
                    reference=expected.value,
                    top2_gap=_gap(reference, requests, stored.response, expected.response),
                )
            )
    apart = [
        abs(ours - theirs)
        for tokens, values in engine_logprobs.items()
        for ours, theirs in zip(values, logprobs(reference.model, tokens), strict=True)
    ]
    del reference, evaluator
    gc.collect()
    tolerance = LOGPROB_TOLERANCE[dtype]
    return VerificationReport(
        recipe_digest=recipe_digest,
        num_samples=len(scored),
        num_equal=len(scored) - len(differences),
        max_logprob_difference=max(apart, default=0.0),
        tolerance=tolerance,
        differences=tuple(differences),
        num_beyond=sum(difference.top2_gap > tolerance for difference in differences),
    )


def _gap(reference: Reference, requests: Sequence[Any], stored: str, expected: str) -> float:
    """How close the choice was where the answers differ: near zero, rounding may explain the difference.

    For completions: the gap between the two largest log-probabilities at the first token that differs. For scored
    options: the largest difference between the engine's and the reference's log-probability of an option, divided by
    the square root of the number of its tokens, because rounding errors add up over them.
    """
    if isinstance(requests[0], Continuation):
        answers = zip(requests, json.loads(stored), json.loads(expected), strict=True)
        apart = (
            abs(ours - theirs) / math.sqrt(max(1, len(request.tokens) - request.num_context))
            for request, ours, theirs in answers
        )
        return float(max(apart))
    steps = reference.gaps[requests[0].tokens]
    for text, gap in steps:
        if not stored.startswith(whole_characters(text)):
            return gap
    return steps[-1][1]


def fits_in_memory(directory: str | Path) -> bool:
    """Whether an export of the checkpoint and its float32 model fit into the host memory that is free now."""
    size = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    return bool(5 * size < free_host_bytes())
