"""Verification: plain transformers scores an exported checkpoint again, and the results are compared with the engine's.

Users get this checkpoint, so the comparison covers all steps behind a score: merge, swap, scoring and export. Samples
are equal if three things agree: the metric values, the tokens of the completions, and the log-probabilities within the
tolerance for rounding, which is measured on the merge (module `tolerance`). A token is unclear if transformers finds
the engine's choice as likely as its own, within the tolerance. Completions may differ from the first unclear token on.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from search_spaces.study.engine import EngineOptions
from workers.engines.host_memory import free_host_bytes
from workers.engines.transformers.backend import Reference, choice_gaps, logprobs, typical_difference, whole_characters
from workers.engines.transformers.batches import TEXTS_READ
from workers.engines.transformers.rounding import explained, rounding_bounds
from workers.engines.transformers.tolerance import Tolerance, measured_tolerance
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import LOGPROB_TOLERANCE, Continuation, Generation, Prompts
from workers.types import SampleDifference, SampleResult, Span, VerificationReport

__all__ = ["nothing_to_compare", "texts_to_read", "verify"]

COPIES = 5  # of the checkpoint's bytes in memory: an export, and its model in float32
GIB = 1 << 30

# Replaces infinite differences and NaN, which JSON does not have.
FAR = 1e6

Requests = tuple[Generation | Continuation, ...]
Tokens = tuple[int, ...]


def verify(
    recipe_digest: str,
    directory: str,
    options: EngineOptions,
    *,
    samples: Sequence[SampleResult],
    spans: Sequence[Span],
    dtype: str,
    engine_logprobs: Mapping[Tokens, Sequence[float]],
    evaluator: TaskEvaluator | None = None,
    model: Any = None,
    device: str = "cpu",
) -> VerificationReport:
    """Score samples of an exported merge with transformers, and compare them with the engine's stored `samples`.

    - `recipe_digest`: the digest of the merge's recipe, for the report
    - `directory`: the exported checkpoint
    - `options`: settings of the inference engine, some of which also apply to prompts
    - `spans`: the ranges of samples to compare, each of one task; spans of tasks that sample at a temperature above 0
      are left out
    - `dtype`: the engine's dtype
    - `engine_logprobs`: the engine's log-probabilities of the tokens, except the first, of each text that the function
      `texts_to_read` returns
    - `evaluator`: builds the tasks, and keeps the token ids of their prompts and answer options; None means that an
      evaluator with the exported tokenizer is made
    - `model`: the merge as a transformers model, if it cannot be stored as a checkpoint; then `directory` contains only
      its tokenizer and configuration
    - `device`: where transformers computes

    Returns a report of 0 samples, with the reason, if rounding to `dtype` changes the merge's log-probabilities so much
    that a wrong merge could pass (function `tolerance.too_large`).

    Raises InvalidTask if a sample of a span is missing in `samples`, or if a text in `engine_logprobs` does not begin
    with a prompt of the compared samples.
    """
    reference = Reference(directory, options, model=model, device=device)
    if evaluator is None:
        evaluator = TaskEvaluator(reference, Prompts(directory, options))
    else:
        evaluator = evaluator.with_backend(reference)
    greedy = [span for span in spans if evaluator.is_greedy(span.task)]
    tasks = {span.objective: span.task for span in greedy}
    known = {(sample.objective, sample.position): sample for sample in samples}
    pairs = []
    for expected in evaluator.score(greedy).samples:
        stored = known.get((expected.objective, expected.position))
        if stored is None:
            raise InvalidTask(f"verify: no stored sample of {expected.objective} at position {expected.position}")
        pairs.append(_Pair(stored, expected, evaluator.requests(tasks[expected.objective], expected.position)))
    tolerance = measured_tolerance(reference.model, _mixed(engine_logprobs, pairs), dtype=dtype)
    if tolerance.too_large is not None:
        return VerificationReport(recipe_digest, 0, 0, 0.0, LOGPROB_TOLERANCE[dtype], (), 0, reason=tolerance.too_large)
    comparison = _Comparison(reference, tolerance)
    comparison.read(pairs, engine_logprobs)
    differences = tuple(found for pair in pairs if (found := comparison.difference(pair)) is not None)
    report = VerificationReport(
        recipe_digest=recipe_digest,
        num_samples=len(pairs),
        num_equal=len(pairs) - len(differences),
        max_logprob_difference=max(comparison.apart.values(), default=0.0),
        tolerance=tolerance.value,
        differences=differences,
        num_beyond=sum(difference.is_beyond for difference in differences),
        num_tokens=sum(len(tokens) for pair in pairs for tokens in pair.stored.tokens or ()),
        num_logprobs=comparison.num_logprobs,
        num_unstable=comparison.num_unstable,
        num_without_tokens=sum(pair.is_completion and pair.stored.tokens is None for pair in pairs),
        reason=_sampled([span.objective for span in spans if span not in greedy]),
    )
    del reference, evaluator, comparison
    gc.collect()
    return report


def nothing_to_compare(
    directory: str | Path, evaluator: TaskEvaluator, spans: Sequence[Span], *, depth: float = 1.0
) -> str | None:
    """Reason why a merge cannot be verified with transformers, as text; None if it can be verified.

    Possible reasons are that no task can be compared, and that there is too little memory. A task can be compared if
    its completions are greedy, or if it is a multiple choice. `evaluator` builds the tasks. `spans` has the ranges of
    samples to verify. `depth` is the merge's number of layers divided by the number of layers of the checkpoint in
    `directory`; the required memory grows with it.
    """
    if not any(evaluator.is_greedy(span.task) for span in spans):
        return _sampled([span.objective for span in spans])
    needed = COPIES * max(1.0, depth) * sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    free = free_host_bytes()
    if needed < free:
        return None
    return (
        f"an export and its model in transformers take {needed / GIB:.1f} GiB of host memory; {free / GIB:.1f} GiB are "
        "free"
    )


def texts_to_read(
    evaluator: TaskEvaluator, samples: Iterable[SampleResult], spans: Iterable[Span]
) -> tuple[Tokens, ...]:
    """Select the texts, as token ids, for comparing the engine with transformers token by token.

    There is a text for each of the first TEXTS_READ samples of each of `spans` (ranges of samples of one task); tasks
    with random completions are left out. The text is the sample's prompt with the completion that the engine gave in
    `samples`, or with the sample's first option in a multiple choice. The text is cut to the length that the engine
    reads. `evaluator` provides the samples' prompts and options.
    """
    known = {(sample.objective, sample.position): sample for sample in samples}
    room = evaluator.lm.max_length - 1  # the engine always generates one token
    texts: dict[Tokens, None] = {}
    for span in spans:
        if evaluator.is_greedy(span.task):
            for position in range(span.start, min(span.stop, span.start + TEXTS_READ)):
                (request, *_) = evaluator.requests(span.task, position)
                stored = known.get((span.objective, position))
                completion = stored.tokens[0] if stored is not None and stored.tokens else ()
                texts[(*request.tokens, *completion)[:room]] = None
    return tuple(texts)


@dataclass(frozen=True)
class _Pair:
    """One sample with two results: the engine's result (`stored`) and transformers' result (`expected`).

    `requests` are the sample's tokenized requests. A request is a prompt to complete, or one option of a multiple
    choice with its prompt.
    """

    stored: SampleResult
    expected: SampleResult
    requests: Requests

    @property
    def is_completion(self) -> bool:
        return isinstance(self.requests[0], Generation)

    @property
    def key(self) -> tuple[str, int]:
        return self.stored.objective, self.stored.position


class _Comparison:
    """Comparison of the engine's samples of one merge with transformers' samples.

    `tolerance` has the largest differences that still count as equal. The results are in these attributes:

    - `apart`: for each compared sample (objective, position), the largest difference between the log-probabilities of
      the engine and of transformers over all comparisons for the sample (function `backend.typical_difference`)
    - `num_logprobs`: the number of log-probabilities compared
    - `num_unstable`: the number of tokens whose log-probabilities differ by more than the tolerance, but not by more
      than float32 rounding explains (function `rounding.explained`); these tokens are left out of `apart`
    """

    def __init__(self, reference: Reference, tolerance: Tolerance) -> None:
        self.reference = reference
        self.tolerance = tolerance
        self.apart: dict[tuple[str, int], float] = {}
        self.num_logprobs = 0
        self.num_unstable = 0
        self._is_apart: set[tuple[str, int]] = set()
        self._all: list[tuple[_Pair, Sequence[float], Sequence[float]]] = []

    def read(self, pairs: Sequence[_Pair], engine_logprobs: Mapping[Tokens, Sequence[float]]) -> None:
        """Compare log-probabilities by the engine and by transformers, and record the difference for each sample.

        `pairs` are the samples as the engine and as transformers scored them. `engine_logprobs` maps texts, as token
        ids, to the engine's log-probabilities of their tokens except the first. Two kinds of log-probabilities are
        compared: of all tokens of these texts, and of the options of each sample that is a multiple choice.
        """
        for text, values in engine_logprobs.items():
            self._add(_pair_of(text, pairs), values, logprobs(self.reference.model, text), text)
        for pair in pairs:
            if not pair.is_completion:
                # Rounding errors grow with the square root of the number of an option's tokens.
                roots = [math.sqrt(len(r.tokens) - r.num_context) for r in pair.requests if isinstance(r, Continuation)]
                stored, expected = (json.loads(sample.response) for sample in (pair.stored, pair.expected))
                self._add(
                    pair,
                    [value / root for value, root in zip(stored, roots, strict=True)],
                    [value / root for value, root in zip(expected, roots, strict=True)],
                )
        self._compare_together()

    def _add(self, pair: _Pair, ours: Sequence[float], theirs: Sequence[float], text: Tokens = ()) -> None:
        """Compare two lists of log-probabilities for one sample, and record how much they differ.

        `pair` is the sample. `ours` has the engine's log-probabilities, and `theirs` has transformers'
        log-probabilities. With `text`, both lists are for the tokens of this text; without it, they are for the options
        of a multiple choice. If the engine computes in float32, differences of single tokens that rounding explains are
        left out.
        """
        dtype, tolerance = self.tolerance.dtype, self.tolerance.of(len(ours))
        apart = _finite(typical_difference(ours, theirs, dtype=dtype))
        if dtype == "float32" and tolerance < apart < FAR and text:
            bounds = rounding_bounds(self.reference.model, text)
            apart, count = explained(ours, theirs, bounds, tolerance=tolerance)
            self.num_unstable += count
        self.apart[pair.key] = max(self.apart.get(pair.key, 0.0), apart)
        self.num_logprobs += len(ours)
        if apart > tolerance:
            self._is_apart.add(pair.key)
        if dtype != "float32":
            self._all.append((pair, ours, theirs))

    def _compare_together(self) -> None:
        """Compare the log-probabilities of all samples together, if the engine computes in 16 bits.

        The root mean square of many differences varies less by chance than the difference of a single sample, so its
        tolerance is smaller. If the root mean square exceeds the tolerance, each sample whose own difference exceeds
        this tolerance counts as different.
        """
        if not self._all:
            return
        ours = [value for _, own, _ in self._all for value in own]
        theirs = [value for _, _, expected in self._all for value in expected]
        tolerance = self.tolerance.of(len(ours))
        if typical_difference(ours, theirs, dtype=self.tolerance.dtype) <= tolerance:
            return
        for pair, own, expected in self._all:
            if not typical_difference(own, expected, dtype=self.tolerance.dtype) <= tolerance:
                self._is_apart.add(pair.key)

    def difference(self, pair: _Pair) -> SampleDifference | None:
        """Difference between the engine's and transformers' answers to one sample; None if the answers are equal.

        The method `read` must have been called before. The field `is_beyond` of the result is True if rounding does not
        explain the difference. There are three such cases:

        - the log-probabilities differ by more than the tolerance
        - the completions differ although transformers' choice of the token was clear: the gap in log-probability to the
          other token is above the tolerance
        - the tokens of the completions are equal, but their texts or their metrics differ
        """
        apart = self.apart.get(pair.key, 0.0)
        is_apart = pair.key in self._is_apart
        parting = self._parting(pair) if pair.is_completion else None
        if parting is not None:
            what, gap = parting
            has_equal_tokens = what == "text" and pair.stored.tokens is not None  # equal tokens decode to equal text
            is_beyond = is_apart or gap > self.tolerance.gap or has_equal_tokens
        elif is_apart:
            what, gap, is_beyond = "log-probabilities", apart, True
        elif pair.stored.value != pair.expected.value:
            # Options whose log-probabilities agree to rounding may change places; equal completions have equal values.
            what, gap, is_beyond = "value", apart, pair.is_completion
        else:
            return None
        return SampleDifference(
            objective=pair.stored.objective,
            position=pair.stored.position,
            engine=pair.stored.value,
            reference=pair.expected.value,
            top2_gap=gap,
            what=what,
            is_beyond=is_beyond,
        )

    def _parting(self, pair: _Pair) -> tuple[str, float] | None:
        """Find the first difference between the engine's and transformers' completions of a sample; None if equal.

        `pair` is the sample as both have scored it. The result is a pair: "tokens" or "text", and a gap of
        log-probabilities by transformers that shows how clear transformers' choice was:

        - "tokens": the tokens differ. The gap is the largest amount by which a token of the engine's completion is less
          likely than the likeliest token in its place.
        - "text": only the texts differ. The gap is between the two likeliest tokens where the texts begin to differ.
        """
        completions = zip(pair.requests, pair.stored.tokens or (), pair.expected.tokens or (), strict=False)
        for request, ours, theirs in completions:
            if any(a != b for a, b in zip(ours, theirs, strict=False)):
                return "tokens", self._choice_gap(request.tokens, ours)
        if _legible(pair.stored.response) != _legible(pair.expected.response):
            return "text", self._gap_of_text(pair)
        return None

    def _choice_gap(self, prompt: Tokens, completion: Tokens) -> float:
        """Measure how far the engine's completion is from transformers' greedy choices, as a gap of log-probabilities.

        `prompt` and `completion` are token ids. For each token of `completion`, the gap is the log-probability (natural
        log) of the likeliest token minus the log-probability of this token, both computed by transformers. The result
        is the largest gap, but at most FAR, a very large number. The result is also FAR if the completion has a token
        that the exported model lacks.
        """
        if max(completion) >= self.reference.model.get_input_embeddings().num_embeddings:
            return FAR
        return _finite(max(choice_gaps(self.reference.model, prompt, completion)))

    def _gap_of_text(self, pair: _Pair) -> float:
        """Gap between transformers' two likeliest tokens at the first difference of its text from the engine's text.

        `pair` is the sample as both have scored it. The gap is a difference of log-probabilities; a large gap means
        that transformers' choice was clear.
        """
        steps = self.reference.gaps[pair.requests[0].tokens]
        gaps = (gap for text, gap in steps if not pair.stored.response.startswith(whole_characters(text)))
        return next(gaps, steps[-1][1])


def _mixed(texts: Iterable[Tokens], pairs: Sequence[_Pair]) -> list[Tokens]:
    """Reorder `texts` so that texts of different objectives take turns; `pairs` has the sample of each text."""
    by_objective: dict[str, list[Tokens]] = {}
    for text in texts:
        by_objective.setdefault(_pair_of(text, pairs).stored.objective, []).append(text)
    return [text for turn in zip_longest(*by_objective.values()) for text in turn if text is not None]


def _pair_of(text: Tokens, pairs: Iterable[_Pair]) -> _Pair:
    for pair in pairs:
        if any(text[: len(request.tokens)] == request.tokens for request in pair.requests):
            return pair
    raise InvalidTask(f"verify: log-probabilities of a text of {len(text)} tokens that begins with no sample's request")


def _finite(difference: float) -> float:
    return difference if difference <= FAR else FAR


def _legible(text: str) -> str:
    """Remove replacement characters (U+FFFD) from `text`.

    Replacement characters stand for bytes that are not a character. Two programs may decode the same tokens to
    different numbers of such characters.
    """
    return text.replace("\ufffd", "")


def _sampled(objectives: Sequence[str]) -> str | None:
    if not objectives:
        return None
    return f"completions drawn at a temperature above 0 cannot be repeated: {', '.join(objectives)}"
