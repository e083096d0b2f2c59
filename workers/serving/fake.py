"""Fake scorer for tests, without models: computed scores, and configurable delays and failures.

A sample is right with a probability that is a smooth function of the recipe's coefficients; a hash of recipe, objective
and position decides whether it is right. Therefore the same request always gives the same result, and different recipes
give different results. As in a real search, some merge is better than every expert. Driver, store and scheduler are
tested with this scorer.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from search_spaces.recipe import Merge, Recipe
from workers.errors import EngineCrashed, EngineFault, EngineUnavailable, InvalidTask, TrialFailed
from workers.evaluation.image_pictures import pictures_of
from workers.evaluation.image_tasks import load_image_task
from workers.evaluation.inline_files import read_inline
from workers.evaluation.sample_texts import sample_texts
from workers.evaluation.task_reader import reader_of
from workers.models.modalities import modality_of_task
from workers.serving.completions import CompletionBatch, CompletionPart, CompletionRequest, LiveCompletion
from workers.types import (
    CanaryReport,
    Evidence,
    SampleDifference,
    SamplePictures,
    SampleResult,
    SampleTexts,
    ScoreRequest,
    ScoreResult,
    Span,
    TaskInfo,
    TaskSpec,
    VerificationReport,
    digest_of,
)

__all__ = ["FakeScorer", "expected_value"]


@dataclass
class FakeScorer:
    """Fake of the interface `workers.types.Scorer`, for tests without models; it can delay answers and fail.

    The object is picklable. Calls are counted by the lines of `log_file`, so that counts survive the end of a process.
    Every finished or failed call appends one JSON line: {call, recipe, spans (ranges of samples): [[objective, start,
    stop], ...], outcome, process}.

    - `num_samples`: the number of samples of tasks that are not inline
    - `sample_delay_s`, `swap_delay_s`: seconds to wait for each sample, and for each change of the recipe (swap)
    - `failing`: digests of recipes for which TrialFailed is raised
    - `fails_above`: TrialFailed is also raised for every recipe with a coefficient above this number
    - `exits_at_call`: the call of the method `score` that ends the process without clean-up, counted from 1; with a
      `log_file`, the calls of all processes that share the file are counted
    - `unavailable_calls`: the number of calls that raise EngineUnavailable before the first success
    - `crashing`, `crash_by`: digests of recipes that crash the engine, and how: by an error, a signal, the end of the
      process, or a hang
    - `garbles`: whether completions and their tokens are wrong although the values are right; the method `verify`
      detects this
    - `fails_canary_at`: the swap at which the engine fails a canary (a comparison with transformers); the engine
      refuses all later calls
    - `wrong_since`: the swap since which the engine gives wrong values, and the method `check` fails
    - `skips_canaries`: the reason why the method `check` compares nothing; "" if it compares
    - `replica`: the name of the replica in results; the default is a name for each process
    - `bank_fingerprint`: the fingerprint of the source weights in results
    - `seed`: the seed of the pseudorandom numbers from which values are computed

    If several processes share `log_file`, only the first process fails a canary or gives wrong values.
    """

    num_samples: int = 1000
    sample_delay_s: float = 0.0
    swap_delay_s: float = 0.0
    failing: frozenset[str] = frozenset()
    fails_above: float = math.inf
    exits_at_call: int | None = None
    unavailable_calls: int = 0
    crashing: Collection[str] = ()
    crash_by: Literal["error", "signal", "exit", "hang"] = "error"
    garbles: bool = False
    fails_canary_at: int | None = None
    wrong_since: int | None = None
    skips_canaries: str = ""
    replica: str | None = None
    log_file: str | None = None
    bank_fingerprint: str = "fake"
    seed: int = 0
    _calls: int = 0
    _held: str | None = None
    _swaps: int = 0
    _canaries: int = 1
    _is_wrong: bool = False
    _fault: EngineFault | None = None
    _busy_s: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.replica or f"fake-{os.getpid()}"

    def base_recipe(self) -> Recipe:
        """Recipe of a made-up base model of one layer, because the fake scorer knows no models."""
        return Recipe.of_model("base", models={"base": self.bank_fingerprint}, base="base", num_layers=1)

    def score(self, request: ScoreRequest) -> ScoreResult:
        with self._lock:
            call = self._next_call()
            if call == self.exits_at_call:
                self._log(call, request, "exit")
                os._exit(70)
            if call <= self.unavailable_calls:
                self._log(call, request, "unavailable")
                raise EngineUnavailable(f"fake: no engine for the first {self.unavailable_calls} calls; this is {call}")
            started = time.perf_counter()
            self._refuse_after_a_fault()
            swap_s = 0.0
            if self._held != request.recipe.digest:
                swap_s = self.swap_delay_s
                _wait(swap_s)
                self._held, self._swaps = request.recipe.digest, self._swaps + 1
                is_first = not any(call["outcome"] == "fault" for call in self.calls())
                self._is_wrong |= self._swaps == self.wrong_since and is_first
                if self._swaps == self.fails_canary_at and is_first:
                    self._log(call, request, "fault")
                    raise self._failed_check()
            if request.recipe.digest in self.crashing:
                self._log(call, request, "crash")
                self._crash()
            if reason := self._failure(request.recipe):
                self._log(call, request, "failed")
                raise TrialFailed(reason)
            _wait(self.sample_delay_s * request.num_samples)
            samples = tuple(s for span in request.spans for s in self._samples(request.recipe, span, self._is_wrong))
            if self.garbles:
                samples = tuple(replace(sample, response="##", tokens=((2,),)) for sample in samples)
            score_s = time.perf_counter() - started - swap_s
            self._busy_s += swap_s + score_s
            self._log(call, request, "scored")
            return ScoreResult(
                samples=samples,
                evidence=Evidence(
                    recipe_digest=request.recipe.digest,
                    bank_fingerprint=self.bank_fingerprint,
                    prompts={span.objective: prompt_hash(span) for span in request.spans},
                    weights_checksum=digest_of([request.recipe.digest, self.bank_fingerprint]),
                    replica=self.name,
                    swap_count=self._swaps,
                    engine="fake",
                    canaries=self._canaries,
                ),
                timings_s={"materialise": 0.0, "swap": swap_s, "score": score_s, "wait": 0.0},
            )

    def complete(self, batch: CompletionBatch, check: Callable[[], None]) -> None:
        """Complete the prompts of `batch` with made-up words.

        A completion has the beginning of the recipe's digest, then the words of the prompt. Each word is a token, and
        takes as many seconds as the field `sample_delay_s` says. `check` is called before each word; an error that it
        raises ends the call.
        """
        digest = batch.recipe.digest
        live: list[tuple[LiveCompletion, list[str]]] = []
        with self._lock:
            self._refuse_after_a_fault()
            if self._held != digest:
                self._held, self._swaps = digest, self._swaps + 1
            if digest in self.crashing:
                self._crash()
            if reason := self._failure(batch.recipe):
                raise TrialFailed(reason)
            while True:
                check()
                live += [(each, fake_words(each.request)) for each in batch.take(closes=not live)]
                live = [(each, words) for each, words in live if not each.is_cancelled]
                if not live:
                    return
                _wait(self.sample_delay_s)
                for each, words in live:
                    word = words.pop(0)
                    each.add(CompletionPart(word, 1, 3, digest, None if words else "stop"))
                live = [(each, words) for each, words in live if words]

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        """Return facts about tasks, such as their numbers of samples, without building them.

        A task in a JSONL file has a sample for each line of the file; any other task has the number of samples in the
        field `num_samples`. Raises InvalidTask if a file cannot be read.
        """
        return tuple(
            TaskInfo(
                num_samples=self._num_samples_of(task),
                higher_is_better=True,
                output_type="generate_until",
            )
            for task in tasks
        )

    def _num_samples_of(self, task: TaskSpec) -> int:
        if isinstance(task.task, str):
            return self.num_samples
        return len(read_inline(task.task)) if "file" in task.task else reader_of(task.task).check(task).num_samples

    def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts:
        """Prompts and right answers of the task's samples from `start` to before `stop`.

        This method and `sample_pictures` build the task; the other methods of the fake do not.
        """
        return sample_texts(task, start, stop)

    def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures:
        """Pictures of the task's samples from `start` to before `stop`.

        This method and `sample_texts` build the task; the other methods of the fake do not.
        """
        if not modality_of_task(task.task).has_pictures:
            raise InvalidTask(f"{task.task}: samples of text have no pictures; give an image task")
        return pictures_of(load_image_task(task), start, stop)

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        known = {(sample.objective, sample.position): sample for sample in samples}
        reference = [sample for span in spans for sample in self._samples(recipe, span)]
        if missing := [sample for sample in reference if (sample.objective, sample.position) not in known]:
            raise InvalidTask(f"verify: no stored sample for {missing[0].objective} at {missing[0].position}")
        differences = tuple(
            SampleDifference(
                objective=expected.objective,
                position=expected.position,
                engine=stored.value,
                reference=expected.value,
                top2_gap=1.0,
                what="tokens" if stored.value == expected.value else "value",
                is_beyond=True,
            )
            for expected in reference
            if (stored := known[expected.objective, expected.position]).value != expected.value
            or stored.response != expected.response
            or stored.tokens not in (None, expected.tokens)
        )
        return VerificationReport(
            recipe_digest=recipe.digest,
            num_samples=len(reference),
            num_equal=len(reference) - len(differences),
            max_logprob_difference=0.0,
            tolerance=1e-3,
            differences=differences,
            num_beyond=len(differences),
            num_tokens=sum(known[s.objective, s.position].tokens is not None for s in reference),
            num_without_tokens=sum(known[s.objective, s.position].tokens is None for s in reference),
        )

    def is_starting(self) -> bool:
        return False

    def check(self) -> tuple[CanaryReport, ...]:
        with self._lock:
            self._refuse_after_a_fault()
            if self._is_wrong and not self.skips_canaries:
                raise self._failed_check()
            self._canaries += not self.skips_canaries
            return (CanaryReport(self.name, self._canaries, self.skips_canaries),)

    def close(self) -> None:
        """Do nothing: the fake scorer has no engine and no memory that would outlive its process."""

    def statistics(self) -> Mapping[str, Any]:
        """Statistics of the fake engine, with the keys of a real engine; only calls in this process are counted."""
        return {
            "starts": 1,
            "canaries": self._canaries,
            "canaries_skipped": 0,
            "swaps": self._swaps,
            "swap_s": [0.0] * self._swaps,
            "busy_s": self._busy_s,
            "start_s": [0.0],
            "bank": {"placement": "none", "bytes": 0, "fingerprint": self.bank_fingerprint},
            "replicas": 1,
        }

    def calls(self) -> list[dict[str, Any]]:
        """Read the log of all calls of the method `score`, from every process that wrote to the file `log_file`."""
        if self.log_file is None or not Path(self.log_file).exists():
            return []
        return [json.loads(line) for line in Path(self.log_file).read_text().splitlines()]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def _next_call(self) -> int:
        self._calls += 1
        return len(self.calls()) + 1 if self.log_file is not None else self._calls

    def _crash(self) -> None:
        if self.crash_by == "signal":
            ctypes.string_at(0)  # SIGSEGV in this thread
        if self.crash_by == "exit":
            os._exit(70)
        if self.crash_by == "hang":
            threading.Event().wait()
        raise EngineCrashed("fake: this recipe crashes the engine", self.name, scored_others=self._swaps > 1)

    def _refuse_after_a_fault(self) -> None:
        if self._fault is not None:
            raise EngineFault(*self._fault.args)

    def _failed_check(self) -> EngineFault:
        self._held = None
        self._fault = EngineFault(f"engine {self.name}: the canary failed", self.name, self._canaries)
        return self._fault

    def _failure(self, recipe: Recipe) -> str | None:
        if recipe.digest in self.failing:
            return "fake: this recipe fails"
        worst = max((abs(number) for merge in recipe.merges() for number in _numbers(merge)), default=0.0)
        if worst > self.fails_above:
            return f"fake: coefficient {worst} is above {self.fails_above}"
        return None

    def _samples(self, recipe: Recipe, span: Span, is_wrong: bool = False) -> list[SampleResult]:
        value = expected_value(recipe, span.objective)
        samples = []
        for position in range(span.start, span.stop):
            # Half of the draw is the sample's difficulty, the same for all recipes: paired comparisons vary less.
            difficulty = _draw(self.seed, span.objective, position)
            luck = _draw(self.seed, recipe.digest, span.objective, position)
            is_right = (0.5 * (difficulty + luck) < _quantile(value)) is not is_wrong
            response = "right" if is_right else "wrong"
            samples.append(
                SampleResult(
                    span.objective, position, str(position), float(is_right), response, tokens=((int(is_right),),)
                )
            )
        return samples

    def _log(self, call: int, request: ScoreRequest, outcome: str) -> None:
        if self.log_file is None:
            return
        spans = [[span.objective, span.start, span.stop] for span in request.spans]
        recipe = request.recipe.digest
        line = {"call": call, "recipe": recipe, "spans": spans, "outcome": outcome, "process": os.getpid()}
        with Path(self.log_file).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _wait(seconds: float) -> None:
    if seconds:  # a sleep of no time lets all other processes run first
        time.sleep(seconds)


def expected_value(recipe: Recipe, objective: str) -> float:
    """Expected score of a recipe on an objective in the fake scorer, in [0.05, 0.95]; larger is better.

    Each model has a skill on each objective, derived from its fingerprint. The best merge mixes several models and is
    never an expert alone.
    """
    shares = _shares(recipe)
    base = recipe.models[recipe.base]
    skills = {print_: _draw("skill", print_, objective) for print_ in recipe.models.values()}
    total = 0.3
    for print_, share in shares.items():
        if print_ != base:
            # Concave with its maximum inside (0, 1): too much of an expert hurts.
            total += 0.9 * (0.3 + skills[print_]) * share * (1.2 - share)
    return min(max(total, 0.05), 0.95)


def fake_words(request: CompletionRequest) -> list[str]:
    """Words of the fake scorer's completion of a prompt: the beginning of the recipe's digest, then the prompt."""
    said = request.prompt if request.messages is None else request.messages[-1]["content"]
    words = [request.recipe.digest[:8], *(f" {word}" for word in str(said).split())]
    return words[: request.max_tokens or len(words)]


def prompt_hash(span: Span) -> str:
    """Fake hash of the prompts of a range of samples (`span`); it depends only on the task and the positions."""
    return digest_of([span.task.digest, span.start, span.stop])


def _shares(recipe: Recipe) -> dict[str, float]:
    """Mean coefficient of each model over all merges in a recipe, keyed by the model's fingerprint.

    A recipe has a merge for each component of each layer and for other tensors; the mean is over all of them. In SLERP
    the coefficients of the two models are 1 - t and t. If a method has no coefficients, each of its sources has the
    coefficient 1.
    """
    shares: dict[str, float] = {}
    merges = recipe.merges()
    for merge in merges:
        for fingerprint, share in _merge_shares(merge, recipe).items():
            shares[fingerprint] = shares.get(fingerprint, 0.0) + share / len(merges)
    return shares


def _merge_shares(merge: Merge, recipe: Recipe) -> dict[str, float]:
    fingerprints = [recipe.models[source.model] for source in merge.sources]
    if merge.method == "slerp":
        t = merge.number("t")
        weights: tuple[float, ...] = (1 - t, t)
    elif merge.method == "linear":
        raw = merge.per_source("weight")
        weights = tuple(weight / (sum(raw) or 1.0) for weight in raw)
    elif merge.method == "ties":
        weights = (merge.number("lambda") * math.sqrt(merge.number("k")) / len(fingerprints),) * len(fingerprints)
    elif "lambda" in merge.coefficients:
        weights = merge.per_source("lambda")
    else:
        weights = (1.0,) * len(fingerprints)
    shares: dict[str, float] = {}
    for fingerprint, weight in zip(fingerprints, weights, strict=True):
        shares[fingerprint] = shares.get(fingerprint, 0.0) + weight
    return shares


def _numbers(merge: Merge) -> list[float]:
    numbers: list[float] = []
    for value in merge.coefficients.values():
        numbers.extend(value if isinstance(value, tuple) else (value,))
    return numbers


def _draw(*key: object) -> float:
    """Pseudorandom number in [0, 1) that depends only on the arguments `key`."""
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _quantile(probability: float) -> float:
    """Quantile, at `probability`, of the mean of two independent numbers that are uniform in [0, 1).

    The class FakeScorer compares the quantile with the mean of two such pseudorandom numbers, so that a sample is right
    with this probability.
    """
    if probability < 0.5:
        return math.sqrt(probability / 2)
    return 1 - math.sqrt((1 - probability) / 2)
