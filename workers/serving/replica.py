"""Scoring replica of Ray Serve: it owns a warm engine, and scores one request at a time.

A replica holds one recipe at a time. One lock covers the swap and the scoring of a chunk; chunks of the held recipe are
scored first, and completions of prompts wait in turn (module `recipe_lock`). The engine runs in its own thread, so that
health checks are answered while it works. Serve's multiplexing is used only as a hint for routing work to a replica
that already holds the recipe; the hint can be wrong. The engine itself states which recipe it holds, before and after
scoring.

A replica ends when its engine raises an error or its work is overdue. Any other error fails only the request.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from search_spaces.errors import SearchSpaceError
from search_spaces.recipe import Recipe
from workers.errors import (
    EngineBusy,
    EngineCrashed,
    EngineFault,
    EngineUnavailable,
    NodeDraining,
    RequestFailed,
    TrialFailed,
    WorkerError,
)
from workers.serving.completions import CompletionBatch, CompletionPart, CompletionRequest, LiveCompletion
from workers.serving.current_chunk import CurrentChunk, chunk_id, note_chunk
from workers.serving.draining import is_being_moved
from workers.serving.process_logs import error_log, keeping_serve_log, log_file
from workers.serving.recipe_lock import RecipeLock
from workers.serving.start_phases import note_phase, note_ready
from workers.serving.watchdog import TIME_LIMITS, TimeLimits, Watchdog
from workers.telemetry import logs, phases, tracing
from workers.types import (
    CanaryReport,
    SamplePictures,
    SampleResult,
    SampleTexts,
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

# Seconds for which a replica that Serve stops waits for its worker to close. The ranks of an engine end within seconds
# if they compute nothing; a worker that hangs is killed.
CLOSE_S = 30.0


class Worker(Protocol):
    """Interface of the object that does the work of a replica, such as scoring. Only one thread uses it at a time.

    The class FakeScorer implements the interface. If a worker raises EngineCrashed, it cannot be used any more. After
    any other error it can be used again.
    """

    @property
    def name(self) -> str:
        """Name of the replica, which is stored with its results."""
        ...

    def base_recipe(self) -> Recipe:
        """Recipe whose merge is the unchanged base model; merges may have another number of layers."""
        ...

    def score(self, request: ScoreRequest) -> ScoreResult: ...

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]: ...

    def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts: ...

    def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures: ...

    def verify(
        self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]
    ) -> VerificationReport: ...

    def complete(self, batch: CompletionBatch, check: Callable[[], None]) -> None:
        """Generate the completions of `batch` until none runs or waits.

        `check` is called before each step of the engine; an error that it raises ends the completions.
        """
        ...

    def check(self) -> tuple[CanaryReport, ...]: ...

    def statistics(self) -> Mapping[str, Any]: ...

    def close(self) -> None:
        """Free what would outlive the process if it were killed, such as shared memory; may be called twice."""
        ...


class ReplicaMetrics:
    """Ray metrics of one replica, each with a tag for the study.

    Serve adds tags for the deployment and the replica. The metric `mergesearch_samples` is a counter, whose rate is
    samples per second. A recipe's digest is not a tag, because each new digest would start a time series that is never
    dropped.
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
    """Ray Serve deployment class whose replicas compute the merges of recipes, and score them on samples of tasks.

    A replica has one worker, the object with the inference engine. `make_worker` makes it, once, in the thread in which
    the worker does all its work. `limits` has the seconds that each part of the work may take. Raises EngineUnavailable
    if the worker does not start within `limits.start_s` seconds.
    """

    def __init__(self, make_worker: Callable[[], Worker], limits: TimeLimits = TIME_LIMITS) -> None:
        started = time.monotonic()
        logs.log_in_worker()
        tracing.start_tracing("replica")
        self._limits = limits
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._lock = RecipeLock()
        self._fault: str | None = None
        self._scored: set[str] = set()
        self._num_of_searches = 0  # requests of searches that are here
        self._batches: dict[str, CompletionBatch] = {}  # by recipe: completions that are generated or wait
        self._tasks: set[asyncio.Task[None]] = set()
        self._current: CurrentChunk | None = None
        self._overdue: CurrentChunk | None = None
        phases.report_to(note_phase)
        with keeping_serve_log():
            start = self._thread.submit(make_worker)
            if not wait([start], timeout=limits.start_s).done:
                raise EngineUnavailable(f"no engine within {limits.start_s:.0f} s; its log is {log_file()}")
            self._worker = start.result()
        phases.report_to(None)
        note_ready()
        self._watchdog = Watchdog(limits, start_s=time.monotonic() - started)
        self._metrics = ReplicaMetrics()

    def close(self) -> None:
        """Close the worker, in its thread, and wait at most CLOSE_S seconds for it.

        Serve kills the process of a replica that it stops: exit handlers do not run, and processes that the worker has
        started are killed too.
        """
        wait([self._thread.submit(self._worker.close)], timeout=CLOSE_S)

    async def hold(self, digest: str) -> str:
        """Make Serve prefer this replica for requests with the recipe `digest`, and return the digest.

        Serve treats the digest as the id of a multiplexed model, and prefers to send requests with this id to this
        replica. The method does not change the engine: the recipe's merge is written into it when a request is scored.
        """
        return digest

    async def score(self, request: ScoreRequest) -> ScoreResult:
        with logs.fields(job=request.study, trial=request.trial), _span_of(request, self._worker.name) as span:
            began_ns = time.time_ns()
            result = await self._score_in_turn(request)
            _record_phases(span, result, began_ns=began_ns, ended_ns=time.time_ns())
            return result

    async def _score_in_turn(self, request: ScoreRequest) -> ScoreResult:
        arrived = time.perf_counter()
        self._metrics.queue(request.study, +1)
        try:
            async with self._for_search(request.recipe.digest):
                waited = time.perf_counter() - arrived
                await self.hold(request.recipe.digest)
                result = await self._in_thread(self._score, request)
        finally:
            self._metrics.queue(request.study, -1)
        result = replace(result, timings_s={**result.timings_s, "wait": waited})
        self._metrics.scored(request.study, result)
        return result

    async def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        async with self._for_search(""):
            return await self._in_thread(self._other, "describing tasks", self._worker.describe, tasks)

    async def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts:
        async with self._for_search(""):
            return await self._in_thread(self._other, "reading texts", self._worker.sample_texts, task, start, stop)

    async def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures:
        async with self._for_search(""):
            pictures = self._worker.sample_pictures
            return await self._in_thread(self._other, "making pictures", pictures, task, start, stop)

    async def verify(
        self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]
    ) -> VerificationReport:
        async with self._for_search(recipe.digest):
            limit_s = self._limits.verification_s(sum(span.stop - span.start for span in spans))
            other = functools.partial(self._other, limit_s=limit_s)
            return await self._in_thread(other, "verification", self._worker.verify, recipe, samples, spans)

    async def check(self) -> tuple[CanaryReport, ...]:
        async with self._for_search(""):
            return await self._in_thread(self._other, "checking the engine", self._worker.check)

    async def complete(self, request: CompletionRequest) -> AsyncIterator[CompletionPart]:
        """Complete a prompt, and yield the parts of the completion as the engine generates them.

        If `request.yields` is True, searches come first: the completion is generated alone, and ends as soon as a
        search uses the replica. Other requests for the same merge are completed together. If the caller does not wait
        any more, the engine ends the completion before its next step.

        Raises:
            EngineBusy: `request.yields` is True, and a search uses the replica, or the replica completes another
                prompt.
            InvalidPrompt: The prompt cannot be completed.
            TrialFailed: The merge cannot be computed, or its logits are not finite.
        """
        live = LiveCompletion(request)
        if request.yields and (self._num_of_searches or self._batches):
            raise EngineBusy(f"{self._worker.name} works for a search or completes another prompt")
        batch = self._batches.get(request.recipe.digest)
        if batch is None or (self._lock.has_waiters and not batch.is_waiting) or not batch.join(live):
            batch = CompletionBatch(request.recipe)
            batch.join(live)
            self._batches[request.recipe.digest] = batch
            task = asyncio.create_task(self._run_batch(batch, yields=request.yields))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            async for part in live.parts():
                yield part
        finally:
            live.cancel()

    async def _run_batch(self, batch: CompletionBatch, *, yields: bool) -> None:
        """Wait until no other work uses the engine, and generate the completions of a batch.

        If `yields` is True, generation stops as soon as a search needs the engine, and each completion of the batch
        that is not finished fails with the error EngineBusy.
        """
        digest = batch.recipe.digest
        try:
            async with self._lock.hold(digest, in_turn=True):  # clients may send prompts for one merge without end
                batch.is_waiting = False
                await self.hold(digest)
                await self._in_thread(self._complete, batch, yields)
            batch.close()
        except Exception as error:
            batch.close(error)
        finally:
            if self._batches.get(digest) is batch:
                del self._batches[digest]

    @asynccontextmanager
    async def _for_search(self, digest: str) -> AsyncIterator[None]:
        """Async context manager that gives a search's request sole use of the engine for work with the recipe `digest`.

        While a search is in this context or waits to enter it, completions of prompts that yield to searches are ended.
        `digest` is "" for work without a recipe.
        """
        self._num_of_searches += 1
        try:
            async with self._lock.hold(digest):
                yield
        finally:
            self._num_of_searches -= 1

    async def statistics(self) -> dict[str, Any]:
        return {**self._worker.statistics(), "replica": os.getpid(), "log_file": log_file()}

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed or its work is overdue; Serve then replaces the replica.

        This runs in the event loop, so that it also answers while samples are scored.
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
            self._thread, functools.partial(contextvars.copy_context().run, self._run, function, *arguments)
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

    def _other(self, what: str, function: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
        self._current = None
        with self._watchdog.work(self._limits.other_s if limit_s is None else limit_s, what):
            return function(*arguments)

    def _complete(self, batch: CompletionBatch, yields: bool) -> None:
        if is_being_moved():
            raise NodeDraining(f"{self._worker.name} completes no prompt: its node is drained, and Serve stops it")

        def check() -> None:
            if yields and self._num_of_searches:
                raise EngineBusy(f"{self._worker.name} is needed by a search, and ended its completions")

        if batch.is_abandoned:
            return
        self._other("completions", self._worker.complete, batch, check)

    def _has_scored_others(self, digest: str) -> bool:
        return bool(self._scored - {digest})

    def _add_scored(self, digest: str) -> None:
        if len(self._scored) < 2:  # two recipes are enough to know whether another was scored
            self._scored.add(digest)

    def _try_the_base(self, request: ScoreRequest) -> None:
        """Test whether the engine works, by scoring the request's first sample with the base model.

        If this succeeds and the engine then crashes on the request, the request is the cause of the crash. Nothing is
        done if the request's own recipe is the base model. Raises EngineUnavailable if the engine crashes on the base
        model.
        """
        recipe = self._worker.base_recipe().canonical()
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


def _span_of(request: ScoreRequest, replica: str) -> AbstractContextManager[tracing.Span]:
    """Context manager of the trace span of a request to score samples; `replica` is the name of the replica.

    If the sender of the request does not trace it, the span records nothing.
    """
    if request.traceparent is None:
        return nullcontext(tracing.NOTHING)
    attributes: tracing.Attributes = {
        "mergesearch.job": request.study,
        "mergesearch.trial": request.trial,
        "mergesearch.replica": replica,
        "mergesearch.recipe": request.recipe.digest[:12],
        "mergesearch.samples": request.num_samples,
    }
    return tracing.span("score", attributes, parent=request.traceparent, kind="server")


def _record_phases(span: tracing.Span, result: ScoreResult, *, began_ns: int, ended_ns: int) -> None:
    """Record a trace span for each phase of a request to score samples, with its measured duration.

    The phases are the wait, the merge (computing tensors), the swap (writing them into the engine), and the scoring.
    The first three follow each other from `began_ns` on; the scoring ends at `ended_ns`. Both times are in nanoseconds
    since the epoch. `span` is the span of the request, and `result` has the durations. Merging and swapping may overlap
    in fact, because some tensors are written while others are computed. Therefore the recorded beginning of a phase is
    not always exact.
    """
    if span.traceparent is None:
        return
    seconds, start_ns = result.timings_s, began_ns
    for phase in ("wait", "materialise", "swap"):
        if seconds.get(phase, 0.0) > 0:
            tracing.record(phase, {}, parent=span.traceparent, start_ns=start_ns, seconds=seconds[phase])
            start_ns += round(seconds[phase] * 1e9)
    scored_s = seconds.get("score", 0.0)
    start_ns = ended_ns - round(scored_s * 1e9)
    tracing.record("generate and score", {}, parent=span.traceparent, start_ns=start_ns, seconds=scored_s)
