"""Deployment of replicas on Ray Serve, and the handle through which studies score with them."""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from search_spaces.recipe import Recipe
from search_spaces.study.sections import EngineOptions
from workers.engines.vllm.environment import engine_environment
from workers.errors import CrashKind, EngineCrashed, EngineUnavailable, EvidenceMismatch, RequestFailed, WorkerError
from workers.serving.current_chunk import chunk_id, current_chunk
from workers.serving.fatal_errors import fatal_error
from workers.serving.replica import EngineWorker, ScoringReplica, Worker
from workers.serving.watchdog import TIME_LIMITS, TimeLimits
from workers.types import (
    CHUNKS_IN_FLIGHT_PER_REPLICA,
    CanaryReport,
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

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

__all__ = ["ServeScorer", "app_name", "deploy_scorer", "serving"]

log = logging.getLogger(__name__)

# One chunk is scored while the next ones wait at the replica. At 1 the router's back-off idles the engine for up to
# 0.5 s.
MAX_ONGOING_REQUESTS = 3

# How often a request that fails outside the engine is sent; another replica may have what this one lacks.
MAX_TRIES = 3

# Only one process of the cluster at a time starts Serve or deploys; this is the name of the Ray actor that it holds.
DEPLOYING = "deploying"


def app_name(family: Family, options: EngineOptions) -> str:
    """The name of a family's Serve application: the same models and options share replicas."""
    models = [(model.alias, model.directory, model.fingerprint) for model in family.models]
    others = [family.alignments_dir] if family.alignments_dir else []
    return f"scorer-{digest_of([models, family.tokenizer, options.document(), *others])[:12]}"


@dataclass(frozen=True)
class ServeScorer:
    """The replicas of one Serve application, as `workers.types.Scorer`. Picklable; connects at the first call.

    When a replica dies or fails, Serve replaces it and the same request is sent again. If the replica was scoring the
    request and the request counts crashes, EngineCrashed is raised instead. If sending fails for `deadline_s` seconds,
    EngineUnavailable gives the reason. Waiting behind other requests does not count as failing. Errors of the candidate
    (TrialFailed, InvalidTask) and a replica's EngineFault are raised as they are.
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

    def is_starting(self) -> bool:
        """Whether no replica runs, but one is being started."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            replicas = _num_replicas(self.app_name)
        except (RayError, RayServeException):  # Serve does not answer
            return False
        return not replicas["RUNNING"] and bool(replicas["STARTING"])

    def check(self) -> tuple[CanaryReport, ...]:
        """Make a canary in every replica that runs; no replica is started for it."""
        if not _num_replicas(self.app_name)["RUNNING"]:
            return ()
        answers = self._ask_each("check", lambda reports: reports[0].replica)
        return tuple(report for reports in answers.values() for report in reports)

    def _ask_each(self, method: str, name_of: Callable[[Any], Any]) -> dict[Any, Any]:
        """The answers of the replicas that run now, by the replica's name, which `name_of` reads from an answer."""
        running = _num_replicas(self.app_name)["RUNNING"]
        found: dict[Any, Any] = {}
        for _ in range(8 * max(running, 1)):  # the router chooses the replica: ask until each has answered
            answer = self._call(method)
            found[name_of(answer)] = answer
            if len(found) >= running:
                break
        return found

    def statistics(self) -> Mapping[str, Any]:
        """Sums and lists over the replicas that answer now; replicas that died do not count."""
        found = self._ask_each("statistics", lambda answer: answer["replica"])
        every = list(found.values())
        return {
            "replicas": len(every),
            "starts": sum(each["starts"] for each in every),
            "canaries": sum(each["canaries"] for each in every),
            "canaries_skipped": sum(each["canaries_skipped"] for each in every),
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
        failed_requests = 0
        counts_crashes = method == "score" and arguments[0].crashes is not None
        pause_s = 0.5
        while True:
            try:
                handle = _handle(self.app_name).options(method_name=method, multiplexed_model_id=model_id)
                return self._result(handle.remote(*arguments))
            except RayTaskError as error:
                cause = error.cause
                failed_requests += isinstance(cause, RequestFailed)
                is_final = not isinstance(cause, EngineUnavailable) or failed_requests >= MAX_TRIES
                if isinstance(cause, WorkerError) and is_final:
                    raise cause from error
                if isinstance(cause, EngineCrashed) and counts_crashes:
                    raise cause from error
                reason = str(cause)
            except (RayActorError, RayServeException) as error:
                if isinstance(error, RayActorError) and counts_crashes:
                    _raise_if_scoring(arguments[0], error)
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
        """Wait for a response, without limit while the application is running."""
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
                    reason = _failure_reason(self.app_name)
                    raise EngineUnavailable(f"{self.app_name} has had no replica for {self.deadline_s:.0f} s: {reason}")
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
    time_limits: TimeLimits = TIME_LIMITS,
) -> ServeScorer:
    """Start `replicas` replicas on the Ray that this process is connected to, and wait until they are ready.

    A running application of that name is used as it is. With `keep_idle_s` studies share the application: it has as
    many replicas as their requests keep busy and the GPUs allow; replicas idle for `keep_idle_s` seconds are stopped,
    down to none, and the next request starts them again. `make_worker` replaces the engine (tests). Serve replaces a
    replica after three failed health checks in a row: by default one that was stopped after at most two minutes, and
    one whose work is overdue (`time_limits`) within a quarter of a minute. Raises EngineUnavailable, with the reason
    and the replica's log file, as soon as a replica fails to start.
    """
    from ray import serve

    name = name or app_name(family, options)
    deadline = time.monotonic() + start_timeout_s
    with _deploying(deadline):
        serve.start(proxy_location="Disabled")
        status = serve.status().applications.get(name)
        if status is None or status.status not in ("RUNNING", "DEPLOYING"):
            scaling = _scaling(replicas, options, keep_idle_s)
            processes = replicas * options.tensor_parallel_size
            threads = options.threads or max(1, ((os.cpu_count() or 2) - 1) // processes)
            environment = engine_environment(options.model_copy(update={"threads": threads}))

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
                    "runtime_env": {"env_vars": environment},
                },
            )
            application = deployment.bind(make_worker or functools.partial(EngineWorker, family, options), time_limits)
            serve.run_many(
                [serve.RunTarget(application, name=name, route_prefix=None)], wait_for_applications_running=False
            )
    while _state(name) != "RUNNING":
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"{name}: not ready within {start_timeout_s:.0f} s: {_failure_reason(name)}")
        time.sleep(0.2)
    return ServeScorer(name)


@contextmanager
def serving(family: Family, options: EngineOptions, *, replicas: int = 1) -> Iterator[ServeScorer]:
    """A context with `replicas` replicas, whose application is deleted at its end.

    Raises EngineUnavailable if a replica does not start.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # importing Serve sets it to INFO
    scorer = deploy_scorer(family, options, replicas=replicas)
    try:
        yield scorer
    finally:
        serve.delete(scorer.app_name)


def _num_gpus() -> int:
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def _scaling(replicas: int, options: EngineOptions, keep_idle_s: float | None) -> dict[str, Any]:
    """Serve's settings for the number of replicas: fixed, or by load with `keep_idle_s`."""
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
    """A lock across the cluster around deployments.

    If two processes start Serve at once, one fails; and deploying an application a second time restarts its replicas.
    The lock is the name of an actor. Ray frees it when the process that holds it ends, however it ends.
    """
    import ray

    @ray.remote(num_cpus=0)
    class Lock:
        pass

    lock = None
    while lock is None:
        try:
            lock = Lock.options(name=DEPLOYING).remote()  # type: ignore[attr-defined]
        except ValueError as error:  # the name is taken
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f'another process is still deploying replicas (it holds the Ray actor "{DEPLOYING}") after the '
                    "time that a replica may take to start; end that process, or run the study again"
                ) from error
            time.sleep(0.5)
    try:
        yield
    finally:
        ray.kill(lock)


def _raise_if_scoring(request: ScoreRequest, error: RayActorError) -> None:
    """Raise EngineCrashed if the replica that died was scoring this chunk."""
    current = current_chunk(error.actor_id)
    if current is None or current.chunk != chunk_id(request):
        return
    kind, why = CrashKind.EXIT, "ended while it scored the chunk"
    if current.overdue:
        kind, why = CrashKind.HANG, f"was replaced: {current.overdue}"
    elif report := fatal_error(current):
        kind, why = CrashKind.ERROR, f"{why}: {report}"
    raise EngineCrashed(
        f"{current.replica} {why}; its log is {current.log_file}", current.replica, current.scored_others, kind
    ) from error


@functools.lru_cache(maxsize=8)
def _handle(name: str) -> Any:
    from ray import serve

    return serve.get_app_handle(name)


def _num_replicas(name: str) -> Counter[str]:
    """The application's number of replicas by Serve's state; empty if there is no such application."""
    from ray import serve

    application = serve.status().applications.get(name)
    counts: Counter[str] = Counter()
    for deployment in application.deployments.values() if application else ():
        counts.update(deployment.replica_states)
    return counts


def _state(name: str) -> str:
    """Serve's state of the application.

    Raises EngineUnavailable if there is no application, its deployment failed, or no replica runs because its models
    cannot be used any more: Serve would retry without end.
    """
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None:
        raise EngineUnavailable(f"{name}: no such application runs on this Ray")
    if application.status == "DEPLOY_FAILED" or _has_unusable_sources(application):
        raise EngineUnavailable(_failure_reason(name))
    return str(application.status.value)


def _has_unusable_sources(application: Any) -> bool:
    deployments = application.deployments.values()
    is_running = any(deployment.replica_states.get("RUNNING") for deployment in deployments)
    return not is_running and any("InvalidModel" in deployment.message for deployment in deployments)


def _failure_reason(name: str) -> str:
    """Why the application failed: an error of `workers.errors` in Serve's message, else the message's last line."""
    from ray import serve

    application = serve.status().applications[name]
    text = "\n".join([application.message, *(each.message for each in application.deployments.values())])
    reasons = re.findall(r"(?:EngineUnavailable|InvalidModel|EvidenceMismatch|EngineFault)(?:\(.*?\))?: (.+)", text)
    lines = [line for line in text.splitlines() if line.strip()]
    return reasons[-1].strip() if reasons else (lines[-1].strip() if lines else str(application.status))
