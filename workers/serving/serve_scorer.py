"""Client of the scoring replicas in a Ray Serve application, used by studies."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from search_spaces.recipe import Recipe
from workers.errors import (
    CrashKind,
    EngineCrashed,
    EngineUnavailable,
    EvidenceMismatch,
    RequestFailed,
    ServeUnavailable,
    WorkerError,
)
from workers.serving.application import answered, application_state, failure_reason, is_ready, num_replicas
from workers.serving.current_chunk import chunk_id, current_chunk, scored_last
from workers.serving.fatal_errors import fatal_error
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

__all__ = ["DEPLOYMENT", "ServeScorer"]

log = logging.getLogger(__name__)

# Name of the one Serve deployment of an application, which has the replicas.
DEPLOYMENT = "scorer"

# The number of times that a request which fails outside the engine is sent; another replica may succeed.
MAX_TRIES = 3


@dataclass
class _Wait:
    """Seconds for which a request has waited for its result while the application was running."""

    seconds: float = 0.0


@dataclass(frozen=True)
class ServeScorer:
    """Client of the scoring replicas in a Ray Serve application; it implements the interface `workers.types.Scorer`.

    The client is picklable, and connects at the first call. `app_name` is the name of the application. While a request
    is waited for, the application's state is checked every `poll_s` seconds. When a replica dies or fails, Serve
    replaces the replica, and the client sends the request again. There is one exception: if the replica was scoring the
    request and the caller counts crashes (the request's field `crashes` is not None), EngineCrashed is raised. If
    sending fails for `deadline_s` seconds, EngineUnavailable is raised with the reason. Time in which the request waits
    behind other requests does not count. Errors of the merge or its task (TrialFailed, InvalidTask) and a replica's
    EngineFault are raised as they are.

    Serve's controller may be unavailable for a while. Requests are answered meanwhile; calls that need the controller
    wait for it, at most `deadline_s` seconds. An application that was deleted or cannot start is not waited for.
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

    def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts:
        texts: SampleTexts = self._call("sample_texts", task, start, stop)
        return texts

    def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures:
        pictures: SamplePictures = self._call("sample_pictures", task, start, stop)
        return pictures

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        report: VerificationReport = self._call("verify", recipe, samples, spans, model_id=recipe.digest)
        return report

    def is_starting(self) -> bool:
        """Whether no replica runs yet but at least one is being started."""
        try:
            replicas = num_replicas(self.app_name)
        except ServeUnavailable:
            return False
        return not replicas["RUNNING"] and bool(replicas["STARTING"])

    def check(self) -> tuple[CanaryReport, ...]:
        """Let each running replica compare its engine with transformers, and return the reports.

        The call starts no replica.
        """
        if not self._known_replicas()["RUNNING"]:
            return ()
        answers = self._ask_each("check", lambda reports: reports[0].replica)
        return tuple(report for reports in answers.values() for report in reports)

    def _ask_each(self, method: str, name_of: Callable[[Any], Any]) -> dict[Any, Any]:
        """Call the method `method` of each running replica, and return the answers, keyed by replica name.

        `name_of` reads the name from an answer. Serve chooses the replica for each call. Therefore calls are repeated
        until each replica has answered; the number of calls is at most 8 times the number of replicas.
        """
        running = self._known_replicas()["RUNNING"]
        found: dict[Any, Any] = {}
        for _ in range(8 * max(running, 1)):  # the router chooses the replica: ask until each has answered
            answer = self._call(method)
            found[name_of(answer)] = answer
            if len(found) >= running:
                break
        return found

    def _known_replicas(self) -> Counter[str]:
        """Number of replicas in each state ("RUNNING", ...), once Serve's controller knows all of them.

        A controller that was restarted must first find its replicas again. This method waits until the controller has
        found them, for at most the seconds in the field `deadline_s`. Raises ServeUnavailable if the controller does
        not answer within that time.
        """
        deadline = time.monotonic() + self.deadline_s
        while True:
            replicas = answered(functools.partial(num_replicas, self.app_name), deadline=deadline)
            if not replicas["RECOVERING"] or time.monotonic() > deadline:
                return replicas
            time.sleep(min(0.5, self.poll_s))

    def statistics(self) -> Mapping[str, Any]:
        """Statistics of all replicas that answer now; dead replicas are left out.

        Numbers such as "swaps" (merges written into engines) are sums over the replicas. Lists such as "swap_s"
        (seconds of each swap) have the entries of all replicas.
        """
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
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        failing_since: float | None = None
        failed_requests = 0
        counts_crashes = method == "score" and arguments[0].crashes is not None
        pause_s = 0.5
        while True:
            wait = _Wait()
            try:
                handle = _handle(self.app_name).options(method_name=method, multiplexed_model_id=model_id)
                return self._result(handle.remote(*arguments), wait)
            except RayTaskError as error:
                cause = error.cause
                failed_requests += isinstance(cause, RequestFailed)
                is_final = not isinstance(cause, EngineUnavailable) or failed_requests >= MAX_TRIES
                if isinstance(cause, WorkerError) and is_final:
                    raise cause from error
                if isinstance(cause, EngineCrashed):
                    if counts_crashes:
                        raise cause from error
                    wait.seconds = 0.0  # the engine was working on this request
                reason = str(cause)
            except (RayError, RayServeException) as error:
                if counts_crashes:
                    _raise_if_scoring(arguments[0], error)
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            _handle.cache_clear()
            with suppress(ServeUnavailable):
                application_state(self.app_name)
            # As the time of the wait does not count, the first failure moves by this time.
            failing_since = time.monotonic() if failing_since is None else failing_since + wait.seconds
            if time.monotonic() - failing_since > self.deadline_s:
                raise EngineUnavailable(f"{self.app_name} has failed for {self.deadline_s:.0f} s: {reason}")
            log.warning("%s: %s; trying again in %.1f s", self.app_name, reason, pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 10.0)

    def _result(self, response: Any, wait: _Wait) -> Any:
        """Wait for the result of a request, without a time limit while the application is running.

        `response` is the object that Serve's handle returned. `wait` counts the seconds of the wait. Raises
        EngineUnavailable if the application has failed, or if it stops running for more than `deadline_s` seconds (a
        field).
        """
        missing_since: float | None = None
        while True:
            try:
                return response.result(timeout_s=self.poll_s)
            except TimeoutError:
                pass
            try:
                is_running = self._is_running()
                wait.seconds += self.poll_s if is_running else 0.0
                missing_since = None if is_running else missing_since or time.monotonic()
                if missing_since is not None and time.monotonic() - missing_since > self.deadline_s:
                    reason = failure_reason(self.app_name)
                    raise EngineUnavailable(f"{self.app_name} has had no replica for {self.deadline_s:.0f} s: {reason}")
            except EngineUnavailable:
                response.cancel()
                raise

    def _is_running(self) -> bool:
        """Whether Serve reports that the application answers requests; False if the controller does not answer."""
        try:
            return is_ready(self.app_name)
        except ServeUnavailable as error:
            log.warning("%s: %s", self.app_name, error)
            return False


def _raise_if_scoring(request: ScoreRequest, error: Exception) -> None:
    """Raise EngineCrashed if `error` means that a replica died while it scored the samples of `request`.

    The function returns if the error means something else, if the request was still waiting when the replica died, or
    if the replica died because its node was preempted.
    """
    from ray.exceptions import OutOfMemoryError, RayActorError

    if isinstance(error, OutOfMemoryError):  # it does not say which actor Ray ended
        current = scored_last(chunk_id(request))
    elif isinstance(error, RayActorError) and not error.preempted:
        current = current_chunk(error.actor_id)
    else:
        return
    if current is None or current.chunk != chunk_id(request):
        return
    kind, why = CrashKind.EXIT, "ended while it scored the chunk"
    if isinstance(error, OutOfMemoryError):
        why = "was ended by Ray for lack of memory on its node while it scored the chunk"
    elif current.overdue:
        kind, why = CrashKind.HANG, f"was replaced: {current.overdue}"
    elif report := fatal_error(current):
        kind, why = CrashKind.ERROR, f"{why}: {report}"
    raise EngineCrashed(
        f"{current.replica} {why}; its log is {current.log_file}", current.replica, current.scored_others, kind
    ) from error


@functools.lru_cache(maxsize=8)
def _handle(name: str) -> Any:
    """Ray Serve's handle for sending requests to the replicas of the application `name`.

    Serve's controller is not queried, because the function `ray.serve.get_app_handle` would wait for its answer without
    limit. Therefore the application may be missing; requests through the handle are then never answered.
    """
    from ray import serve

    return serve.get_deployment_handle(DEPLOYMENT, app_name=name, _check_exists=False)
