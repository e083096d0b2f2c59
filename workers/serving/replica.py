"""The Ray Serve deployment of scoring replicas: a thin shell around the engine, and the handle that studies hold.

A replica holds one recipe at a time. One lock spans swap and score of a chunk; chunks that wait for the recipe held go
first; the engine works in a thread of its own, so that health checks are answered while it does. Serve multiplexing is
only a routing hint: it sends work to the replica that holds the recipe already, and evicts without asking. What was
held is stated by the engine itself, before and after scoring.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

from search_spaces.errors import SearchSpaceError
from search_spaces.recipe import Recipe
from workers.errors import EngineUnavailable, EvidenceMismatch, TrialFailed, WorkerError
from workers.types import (
    CHUNKS_IN_FLIGHT_PER_REPLICA,
    EngineOptions,
    Evidence,
    Family,
    SampleResult,
    ScoreRequest,
    ScoreResult,
    Span,
    TaskInfo,
    TaskSpec,
    VerificationReport,
    digest_of,
)

__all__ = ["EngineWorker", "RecipeLock", "ScoringReplica", "ServeScorer", "Worker", "app_name", "deploy_scorer"]

log = logging.getLogger(__name__)
T = TypeVar("T")

# One chunk is scored, the next ones wait at the replica: at 1 the router's back-off idles the engine for up to 0.5 s.
MAX_ONGOING_REQUESTS = 3

VERIFIED_PROMPTS = 8  # whose log-probabilities are compared with the reference's, token by token


class Worker(Protocol):
    """What a replica owns: used by one thread at a time. FakeScorer is one too."""

    def score(self, request: ScoreRequest) -> ScoreResult: ...

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]: ...

    def verify(
        self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]
    ) -> VerificationReport: ...

    def statistics(self) -> Mapping[str, Any]: ...


class EngineWorker:
    """A warm engine and the tasks it was asked. Raises EngineUnavailable if the engine does not start."""

    def __init__(self, family: Family, options: EngineOptions) -> None:
        from workers.engines.vllm.engine import Engine
        from workers.evaluation.lm_eval import TaskEvaluator

        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.engine = Engine(family, options, log_file=log_file())
        self.evaluation = TaskEvaluator(self.engine, self.engine.prompts)
        self.busy_s = 0.0

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Raises TrialFailed, InvalidTask, or EvidenceMismatch if the engine does not hold what it should."""
        swap = self.engine.swap(request.recipe)
        started = time.perf_counter()
        held = self.engine.held_digest
        scored = self.evaluation.score(request.spans)
        if not held == self.engine.held_digest == request.recipe.digest:
            raise EvidenceMismatch(
                f"asked for recipe {request.recipe.digest}; the engine held {held} before scoring and "
                f"{self.engine.held_digest} after it"
            )
        score_s = time.perf_counter() - started
        self.busy_s += swap.materialise_s + swap.swap_s + score_s
        return ScoreResult(
            samples=scored.samples,
            evidence=Evidence(
                recipe_digest=held,
                bank_fingerprint=self.engine.bank_fingerprint,
                prompts=scored.prompts,
                weights_checksum=swap.weights_checksum,
                replica=self.name,
                swap_count=swap.swap_count,
                engine=f"vllm, {self.engine.dtype}, {self.engine.sources}",
            ),
            timings_s={"materialise": swap.materialise_s, "swap": swap.swap_s, "score": score_s, "wait": 0.0},
        )

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        return tuple(map(self.evaluation.describe, tasks))

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        """Export, load with transformers in fp32, score again. A report of 0 samples where memory does not allow it."""
        import torch

        from workers.engines.transformers.backend import fits_in_memory, verify
        from workers.engines.vllm.worker_extension import family_to_json, open_bank
        from workers.evaluation.prompts import LOGPROB_TOLERANCE
        from workers.export.checkpoint import export

        engine = self.engine
        if not fits_in_memory(engine.family.base.directory):
            return VerificationReport(recipe.digest, 0, 0, 0.0, LOGPROB_TOLERANCE[engine.dtype], (), 0)
        engine.swap(recipe)
        prompts = list(
            {
                request.tokens: None
                for span in spans
                for position in range(span.start, min(span.stop, span.start + VERIFIED_PROMPTS))
                for request in self.evaluation.requests(span.task, position)
            }
        )[:VERIFIED_PROMPTS]
        with tempfile.TemporaryDirectory(prefix="mergesearch-verify-") as directory:
            export(recipe, open_bank(family_to_json(engine.family)), directory, dtype=getattr(torch, engine.dtype))
            return verify(
                recipe.digest,
                directory,
                engine.options,
                samples=samples,
                spans=spans,
                dtype=engine.dtype,
                engine_logprobs=dict(zip(prompts, engine.logprobs(prompts), strict=True)),
                evaluation=self.evaluation,
            )

    def statistics(self) -> Mapping[str, Any]:
        return {
            "starts": 1,
            "start_s": [self.engine.start_s],
            "swaps": self.engine.swap_count,
            "swap_s": list(self.engine.swap_s),
            "busy_s": self.busy_s,
            "bank": self.engine.bank_summary,
        }


class RecipeLock:
    """A lock that hands itself first to whoever waits for the recipe last held, else to whoever waits longest."""

    def __init__(self) -> None:
        self._held: str | None = None
        self._is_taken = False
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def turn(self, digest: str) -> AsyncIterator[None]:
        if self._is_taken:
            ready = asyncio.get_running_loop().create_future()
            self._waiting.append((digest, ready))
            try:
                await ready
            except asyncio.CancelledError:
                if ready.done() and not ready.cancelled():
                    self._pass_on()  # the turn came just before the wait was given up
                raise
        self._is_taken, self._held = True, digest
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        waiting = [entry for entry in self._waiting if not entry[1].done()]
        waiting.sort(key=lambda entry: entry[0] != self._held)  # stable: arrival order otherwise
        self._is_taken = bool(waiting)
        if waiting:
            self._waiting = deque(entry for entry in self._waiting if entry is not waiting[0] and not entry[1].done())
            waiting[0][1].set_result(None)


class ReplicaMetrics:
    """What Ray's metrics say of a replica, tagged by Serve with deployment and replica, and by us with the study.

    Samples per second is the rate of `mergesearch_samples`; a recipe's digest is no tag, because each new one would
    be a time series that is never dropped."""

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
    """The body of the deployment. `make_worker` is called once, in the thread that does all the work."""

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._turns = RecipeLock()
        self._fault: str | None = None
        self._worker = self._thread.submit(make_worker).result()
        self._metrics = ReplicaMetrics()

    async def hold(self, digest: str) -> str:
        """Tell the router which recipe is here. Nothing is swapped: that happens under the lock only."""
        return digest

    async def score(self, request: ScoreRequest) -> ScoreResult:
        arrived = time.perf_counter()
        self._metrics.queue(request.study, +1)
        try:
            async with self._turns.turn(request.recipe.digest):
                waited = time.perf_counter() - arrived
                await self.hold(request.recipe.digest)
                result = await self._in_thread(self._worker.score, request)
        finally:
            self._metrics.queue(request.study, -1)
        result = replace(result, timings_s={**result.timings_s, "wait": waited})
        self._metrics.scored(request.study, result)
        return result

    async def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        async with self._turns.turn(""):
            return await self._in_thread(self._worker.describe, tasks)

    async def verify(
        self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]
    ) -> VerificationReport:
        async with self._turns.turn(recipe.digest):
            return await self._in_thread(self._worker.verify, recipe, samples, spans)

    async def statistics(self) -> dict[str, Any]:
        return {**self._worker.statistics(), "replica": os.getpid(), "log_file": log_file()}

    async def check_health(self) -> None:
        """Answered from the event loop, during a chunk too. Raises once the engine has failed: Serve replaces us."""
        if self._fault is not None:
            raise RuntimeError(self._fault)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        except SearchSpaceError as error:
            raise TrialFailed(str(error)) from error
        except WorkerError:
            raise
        except Exception as error:  # vLLM failed in a way of its own: this engine is not used again
            self._fault = f"the engine failed: {type(error).__name__}: {error}; its log is {log_file()}"
            log.exception("the engine failed")
            raise EngineUnavailable(self._fault) from error


def log_file() -> str:
    """Where this process writes what vLLM says: the file behind its standard output."""
    try:
        return os.readlink("/proc/self/fd/1")
    except OSError:
        return "the replica's standard output"


def app_name(family: Family, options: EngineOptions) -> str:
    """The Serve application of a family: the same models and options share replicas."""
    models = [(model.alias, model.directory, model.fingerprint) for model in family.models]
    return f"scorer-{digest_of([models, family.tokenizer, asdict(options)])[:12]}"


@dataclass(frozen=True)
class ServeScorer:
    """The replicas of one Serve application, as workers.types.Scorer. Picklable; connects when it is first called.

    Where a replica dies or fails, Serve replaces it and the same request is made again; where that does not help for
    `deadline_s`, EngineUnavailable says what was wrong. Waiting for other requests is no failure. Errors of the
    candidate pass through.
    """

    app_name: str
    deadline_s: float = 1800.0
    poll_s: float = 5.0

    def score(self, request: ScoreRequest) -> ScoreResult:
        result: ScoreResult = self._call("score", request, model_id=request.recipe.digest)
        if result.evidence.recipe_digest != request.recipe.digest:
            raise EvidenceMismatch(f"asked for {request.recipe.digest}, got {result.evidence.recipe_digest}")
        return result

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        infos: tuple[TaskInfo, ...] = self._call("describe", tasks)
        return infos

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        report: VerificationReport = self._call("verify", recipe, samples, spans, model_id=recipe.digest)
        return report

    def statistics(self) -> Mapping[str, Any]:
        """Sums and lists over the replicas that answer now; those that died are no longer counted."""
        from ray import serve

        application = serve.status().applications.get(self.app_name)
        deployments = application.deployments.values() if application else ()
        running = sum(
            count for each in deployments for state, count in each.replica_states.items() if state == "RUNNING"
        )
        found: dict[int, Mapping[str, Any]] = {}
        for _ in range(8 * max(running, 1)):  # the router chooses who answers: ask until each has
            answer = self._call("statistics")
            found[answer["replica"]] = answer
            if len(found) >= running:
                break
        every = list(found.values())
        return {
            "replicas": len(every),
            "starts": sum(each["starts"] for each in every),
            "start_s": [seconds for each in every for seconds in each["start_s"]],
            "swaps": sum(each["swaps"] for each in every),
            "swap_s": [seconds for each in every for seconds in each["swap_s"]],
            "busy_s": sum(each["busy_s"] for each in every),
            "bank": every[0]["bank"],
            "log_files": [each["log_file"] for each in every],
            "processes": sorted(found),
        }

    def _call(self, method: str, *arguments: Any, model_id: str = "") -> Any:
        from ray.exceptions import RayActorError, RayTaskError
        from ray.serve.exceptions import RayServeException

        failing_since: float | None = None
        pause_s = 0.5
        while True:
            try:
                handle = _handle(self.app_name).options(method_name=method, multiplexed_model_id=model_id)
                return self._result(handle.remote(*arguments))
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, WorkerError) and not isinstance(cause, EngineUnavailable):
                    raise cause from error
                reason = str(cause)
            except (RayActorError, RayServeException) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            _handle.cache_clear()
            _state(self.app_name)
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > self.deadline_s:
                raise EngineUnavailable(f"{self.app_name} has failed for {self.deadline_s:.0f} s: {reason}")
            log.warning("%s: %s; trying again in %.1f s", self.app_name, reason, pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 10.0)

    def _result(self, response: Any) -> Any:
        """Wait for a response, however long others are served before, while there is a replica to give it."""
        missing_since: float | None = None
        while True:
            try:
                return response.result(timeout_s=self.poll_s)
            except TimeoutError:
                pass
            try:
                is_running = _state(self.app_name) == "RUNNING"
                missing_since = None if is_running else missing_since or time.monotonic()
                if missing_since is not None and time.monotonic() - missing_since > self.deadline_s:
                    said = _what_serve_says(self.app_name)
                    raise EngineUnavailable(f"{self.app_name} has had no replica for {self.deadline_s:.0f} s: {said}")
            except EngineUnavailable:
                response.cancel()
                raise


def deploy_scorer(
    family: Family,
    options: EngineOptions,
    *,
    replicas: int = 1,
    name: str | None = None,
    keep_idle_s: float | None = None,
    make_worker: Callable[[], Worker] | None = None,
    health_check_period_s: float = 5.0,
    health_check_timeout_s: float = 30.0,
    start_timeout_s: float = 1800.0,
) -> ServeScorer:
    """Start `replicas` replicas on the Ray that this process is connected to, and wait until they are ready.

    An application of that name that runs already is used as it is. With `keep_idle_s` it is shared by studies: there
    are as many replicas as their requests keep busy and GPUs allow, and those idle for that long are stopped, to the
    last one; the next request starts them again. `make_worker` replaces the engine (tests). Raises EngineUnavailable,
    with the reason and the replica's log, as soon as a replica fails to start.
    """
    from ray import serve

    from workers.engines.vllm.engine import engine_environment

    name = name or app_name(family, options)
    deadline = time.monotonic() + start_timeout_s
    with _deploying(deadline):
        serve.start(proxy_location="Disabled")
        status = serve.status().applications.get(name)
        if status is None or status.status not in ("RUNNING", "DEPLOYING"):
            scaling = _scaling(replicas, options, keep_idle_s)
            processes = replicas * options.tensor_parallel_size
            shared = replace(options, threads=options.threads or max(1, ((os.cpu_count() or 2) - 1) // processes))

            class Scorer(ScoringReplica):  # Serve looks for the decorated method when it deploys
                @serve.multiplexed(max_num_models_per_replica=1)
                async def hold(self, digest: str) -> str:
                    return digest

            deployment = serve.deployment(
                Scorer,
                name="scorer",
                **scaling,
                max_ongoing_requests=MAX_ONGOING_REQUESTS,
                health_check_period_s=health_check_period_s,
                health_check_timeout_s=health_check_timeout_s,
                graceful_shutdown_timeout_s=5.0,
                max_constructor_retry_count=1,
                ray_actor_options={
                    "num_cpus": 0.1,
                    "num_gpus": options.tensor_parallel_size if _num_gpus() else 0,
                    "runtime_env": {"env_vars": engine_environment(shared)},
                },
            )
            application = deployment.bind(make_worker or functools.partial(EngineWorker, family, options))
            serve.run_many(
                [serve.RunTarget(application, name=name, route_prefix=None)], wait_for_applications_running=False
            )
    while _state(name) != "RUNNING":
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"{name}: not ready within {start_timeout_s:.0f} s: {_what_serve_says(name)}")
        time.sleep(0.2)
    return ServeScorer(name)


def _num_gpus() -> int:
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def _scaling(replicas: int, options: EngineOptions, keep_idle_s: float | None) -> dict[str, Any]:
    """How many replicas there are: fixed, or by load, where a study's `replicas` is the load that it brings."""
    if keep_idle_s is None:
        return {"num_replicas": replicas}
    return {
        "autoscaling_config": {
            "min_replicas": 0,
            "initial_replicas": replicas,
            "max_replicas": max(replicas, _num_gpus() // options.tensor_parallel_size),
            "target_ongoing_requests": CHUNKS_IN_FLIGHT_PER_REPLICA,
            "downscale_delay_s": keep_idle_s,
            "downscale_to_zero_delay_s": keep_idle_s,
        }
    }


@contextmanager
def _deploying(deadline: float) -> Iterator[None]:
    """Only one process of the cluster starts Serve or deploys: one of two that start Serve at once fails, and a second
    deployment of an application would restart its replicas.

    The lock is an actor's name; Ray frees it with the process that holds it, however that ends."""
    import ray

    @ray.remote(num_cpus=0)
    class Lock:
        pass

    lock = None
    while lock is None:
        try:
            lock = Lock.options(name="deploying").remote()  # type: ignore[attr-defined]
        except ValueError as error:  # the name is taken
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    'another process still deploys replicas (it holds the Ray actor "deploying"), for longer than one '
                    "may take to start; end that process, or run the study again"
                ) from error
            time.sleep(0.5)
    try:
        yield
    finally:
        ray.kill(lock)


@functools.lru_cache(maxsize=8)
def _handle(name: str) -> Any:
    from ray import serve

    return serve.get_app_handle(name)


def _state(name: str) -> str:
    """Serve's state of the application. Raises EngineUnavailable if it has none, or has given up on it."""
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None:
        raise EngineUnavailable(f"{name}: no such application runs on this Ray")
    if application.status == "DEPLOY_FAILED":
        raise EngineUnavailable(_what_serve_says(name))
    return str(application.status.value)


def _what_serve_says(name: str) -> str:
    """Our own reason in Serve's message where there is one, else the message's last line."""
    from ray import serve

    application = serve.status().applications[name]
    text = "\n".join([application.message, *(each.message for each in application.deployments.values())])
    ours = re.findall(r"(?:EngineUnavailable|InvalidModel|EvidenceMismatch)(?:\(.*?\))?: (.+)", text)
    lines = [line for line in text.splitlines() if line.strip()]
    return ours[-1].strip() if ours else (lines[-1].strip() if lines else str(application.status))
