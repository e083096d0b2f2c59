"""Scoring replica of Ray Serve: it owns a warm engine, and scores one request at a time.

A replica holds one recipe at a time. One lock covers the swap and the scoring of a chunk; chunks of the held recipe are
scored first (`recipe_lock`). The engine runs in its own thread, so that health checks are answered while it works.
Serve's multiplexing is used only as a hint for routing work to a replica that already holds the recipe; the hint can be
wrong. The engine itself states which recipe it holds, before and after scoring.

A replica ends when its engine raises an error or its work is overdue. Any other error fails only the request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from search_spaces.errors import SearchSpaceError
from search_spaces.recipe import Recipe
from workers.errors import (
    EngineCrashed,
    EngineFault,
    EngineUnavailable,
    NodeDraining,
    RequestFailed,
    TrialFailed,
    WorkerError,
)
from workers.serving.current_chunk import CurrentChunk, chunk_id, note_chunk
from workers.serving.draining import is_being_moved
from workers.serving.process_logs import error_log, keeping_serve_log, log_file
from workers.serving.recipe_lock import RecipeLock
from workers.serving.watchdog import TIME_LIMITS, TimeLimits, Watchdog
from workers.types import (
    CanaryReport,
    SampleResult,
    ScoreRequest,
    ScoreResult,
    Span,
    TaskInfo,
    TaskSpec,
    VerificationReport,
)

__all__ = ["ReplicaMetrics", "ScoringReplica", "Worker"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Worker(Protocol):
    """Interface of the object that does the work of a replica, such as scoring. Only one thread uses it at a time.

    `FakeScorer` implements the interface. If a worker raises EngineCrashed, it cannot be used any more. After any other
    error it can be used again.
    """

    @property
    def name(self) -> str:
        """Name of the replica, which is stored with its results."""
        ...

    def score(self, request: ScoreRequest) -> ScoreResult: ...

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]: ...

    def verify(
        self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]
    ) -> VerificationReport: ...

    def check(self) -> tuple[CanaryReport, ...]: ...

    def statistics(self) -> Mapping[str, Any]: ...


class ReplicaMetrics:
    """Ray metrics of one replica, each with a tag for the study. Serve adds the deployment and the replica.

    `mergesearch_samples` is a counter, whose rate is samples per second. A recipe's digest is not a tag, because each
    new digest would start a time series that is never dropped.
    """

    def __init__(self) -> None:
        from ray.serve import metrics

        keys = ("study",)
        self._samples = metrics.Counter("mergesearch_samples", "Samples scored.", keys)
        self._seconds = metrics.Counter("mergesearch_seconds", "Seconds by phase of a chunk.", (*keys, "phase"))
        self._swap_s = metrics.Histogram(
            "mergesearch_swap_seconds",
            "Seconds from a recipe to an engine that holds it.",
            boundaries=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100],
            tag_keys=keys,
        )
        self._queued = metrics.Gauge("mergesearch_queued_chunks", "Chunks here, scored or waiting.", keys)
        self._recipe = metrics.Gauge(
            "mergesearch_recipe_held", "First 8 hex digits of the digest of the recipe held, as a number.", keys
        )
        self._num_queued: Counter[str] = Counter()

    def queue(self, study: str, change: int) -> None:
        self._num_queued[study] += change
        self._queued.set(self._num_queued[study], tags={"study": study})

    def scored(self, study: str, result: ScoreResult) -> None:
        tags = {"study": study}
        digest = result.evidence.recipe_digest
        if result.samples:
            self._samples.inc(len(result.samples), tags=tags)
        for phase, seconds in result.timings_s.items():
            if seconds > 0:
                self._seconds.inc(seconds, tags={**tags, "phase": phase})
        swap_s = result.timings_s.get("materialise", 0.0) + result.timings_s.get("swap", 0.0)
        if swap_s > 0:
            self._swap_s.observe(swap_s, tags=tags)
        self._recipe.set(int(digest[:8], 16), tags=tags)
        log.info("study %s: recipe %s: %d samples", study, digest[:12], len(result.samples))


class ScoringReplica:
    """Ray Serve deployment class: a scoring replica with one worker.

    `make_worker` is called once, in the thread that does all the work. Raises EngineUnavailable if the worker does not
    start within `limits.start_s` seconds.
    """

    def __init__(self, make_worker: Callable[[], Worker], limits: TimeLimits = TIME_LIMITS) -> None:
        started = time.monotonic()
        self._limits = limits
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._lock = RecipeLock()
        self._fault: str | None = None
        self._scored: set[str] = set()
        self._current: CurrentChunk | None = None
        self._overdue: CurrentChunk | None = None
        with keeping_serve_log():
            start = self._thread.submit(make_worker)
            if not wait([start], timeout=limits.start_s).done:
                raise EngineUnavailable(f"no engine within {limits.start_s:.0f} s; its log is {log_file()}")
            self._worker = start.result()
        self._watchdog = Watchdog(limits, start_s=time.monotonic() - started)
        self._metrics = ReplicaMetrics()

    async def hold(self, digest: str) -> str:
        """Make Serve prefer this replica for requests with the recipe `digest`, and return the digest.

        Serve treats the digest as the id of a multiplexed model, and prefers to send requests with this id to this
        replica. The method does not change the engine: the recipe's merge is written into it when a request is scored.
        """
        return digest

    async def score(self, request: ScoreRequest) -> ScoreResult:
        arrived = time.perf_counter()
        self._metrics.queue(request.study, +1)
        try:
            async with self._lock.hold(request.recipe.digest):
                waited = time.perf_counter() - arrived
                await self.hold(request.recipe.digest)
                result = await self._in_thread(self._score, request)
        finally:
            self._metrics.queue(request.study, -1)
        result = replace(result, timings_s={**result.timings_s, "wait": waited})
        self._metrics.scored(request.study, result)
        return result

    async def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        async with self._lock.hold(""):
            return await self._in_thread(self._other, "describing tasks", self._worker.describe, tasks)

    async def verify(
        self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]
    ) -> VerificationReport:
        async with self._lock.hold(recipe.digest):
            return await self._in_thread(self._other, "verification", self._worker.verify, recipe, samples, spans)

    async def check(self) -> tuple[CanaryReport, ...]:
        async with self._lock.hold(""):
            return await self._in_thread(self._worker.check)

    async def statistics(self) -> dict[str, Any]:
        return {**self._worker.statistics(), "replica": os.getpid(), "log_file": log_file()}

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed or its work is overdue; Serve then replaces the replica.

        This runs in the event loop, also while a chunk is scored.
        """
        if self._fault is not None:
            raise RuntimeError(self._fault)
        if (overdue := self._watchdog.overdue()) is not None:
            if (current := self._current) is not None and current is not self._overdue:
                self._overdue = current
                note_chunk(replace(current, overdue=overdue))
            raise RuntimeError(f"{self._worker.name} counts as hung: {overdue}")

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, functools.partial(self._run, function, *arguments)
        )

    # -- in the engine's thread ------------------------------------------------------------------------------------

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the engine's thread, and convert its exceptions to those of `workers.errors`.

        After an error of the engine (EngineCrashed or EngineFault) the replica refuses all work, and fails its health
        checks. After any other error it continues.
        """
        if self._fault is not None:
            raise EngineUnavailable(self._fault)
        try:
            return function(*arguments)
        except SearchSpaceError as error:
            raise TrialFailed(str(error)) from error
        except EngineFault as error:  # the engine refuses everything from now on
            self._fault = str(error)
            raise
        except EngineCrashed as error:
            log.exception("the engine failed")
            self._fault = f"{error}; its log is {log_file()}"
            scored_others = self._current is not None and self._current.scored_others
            raise EngineCrashed(self._fault, self._worker.name, scored_others) from error
        except WorkerError:
            raise
        except Exception as error:
            log.exception("a request failed")
            raise RequestFailed(
                f"{self._worker.name}: {type(error).__name__}: {error}; the engine continues; its log is {log_file()}"
            ) from error

    def _score(self, request: ScoreRequest) -> ScoreResult:
        if is_being_moved():
            raise NodeDraining(f"{self._worker.name} begins no chunk: its node is drained, and Serve stops it")
        digest = request.recipe.digest
        if request.crashes and not self._has_scored_others(digest):
            self._try_the_base(request)
        self._current = CurrentChunk(
            chunk_id(request),
            self._worker.name,
            self._has_scored_others(digest),
            log_file=log_file(),
            error_log=error_log(),
        )
        note_chunk(self._current)
        with self._watchdog.chunk(request):
            result = self._worker.score(request)
        self._add_scored(digest)
        return result

    def _other(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        self._current = None
        with self._watchdog.work(self._limits.other_s, what):
            return function(*arguments)

    def _has_scored_others(self, digest: str) -> bool:
        return bool(self._scored - {digest})

    def _add_scored(self, digest: str) -> None:
        if len(self._scored) < 2:  # two recipes are enough to know whether another was scored
            self._scored.add(digest)

    def _try_the_base(self, request: ScoreRequest) -> None:
        """Score the request's first sample with the base model, to test whether the engine works.

        If this succeeds and the engine then crashes on the request, the request is the cause of the crash. Nothing is
        done if the request's own recipe is the base model. Raises EngineUnavailable if the engine crashes on the base
        model.
        """
        recipe = _base_alone(request.recipe)
        if recipe.digest == request.recipe.digest:
            return
        first = request.spans[0]
        sample = replace(request, recipe=recipe, spans=(replace(first, stop=first.start + 1),))
        try:
            with self._watchdog.chunk(sample):
                self._run(self._worker.score, sample)
            self._add_scored(recipe.digest)
        except EngineCrashed as error:
            raise EngineUnavailable(str(error)) from error
        except WorkerError as error:
            log.warning("the base was not scored: %s", error)


def _base_alone(recipe: Recipe) -> Recipe:
    """Recipe over the models of `recipe` that gives the unchanged base model."""
    return Recipe.of_model(
        recipe.base,
        models=recipe.models,
        base=recipe.base,
        num_layers=len(recipe.layers),
        tokenizer=recipe.tokenizer,
    ).canonical()
