"""Runs the evaluations of a study on Ray Tune, with a few trial actors that are reused.

Rungs, promotions and results are in the coordinator and in SQL, because Tune restores neither schedulers nor rungs
after a crash. Each evaluation of a trial at a rung is one Tune trial, whether it is new, promoted or resumed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import ray
from ray import tune
from ray.tune.error import TuneError
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from service.tune.coordinator import Coordinator
from service.tune.evaluation import Evaluation
from service.tune.trainable import CPUS, EvaluationTrainable
from workers.telemetry import tracing
from workers.types import Scorer

__all__ = ["run_evaluations"]

logger = logging.getLogger(__name__)

# Longest wait for the searcher in seconds: with no evaluation in flight, before signals and progress are looked at
# again, and with some evaluations in flight. The second wait is for quick proposals, because Tune's loop may take 0.1 s
# until it asks again.
SEARCHER_WAIT_S = 0.25
SEARCHER_SOON_S = 0.03

# Seconds that chunks wait for further trial actors after the last actor has started: without a free CPU for another
# actor, and with a free CPU.
CPU_WAIT_S = 10.0
ACTOR_START_S = 60.0

# Seconds that an idle trial actor is kept for a new evaluation before it takes over one whose own actor waits for CPUs.
# If that actor has its CPUs and is starting, the idle actor takes over after ACTOR_START_S seconds.
IDLE_S = 3.0

# Seconds that a run that is to end waits for the chunks that are being scored.
CHUNK_GRACE_S = 60.0

# Tune's own files are not used: no experiment snapshots while the study runs, no per-trial logs. Tune still makes a
# snapshot at the start and one at the end; if these are close together, the second one makes copying the first one
# fail.
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "TUNE_WARN_SLOW_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "86400",
    "RAY_AIR_NEW_OUTPUT": "0",
}
TUNE_SNAPSHOT_LOGGERS = ("ray.tune.execution.experiment_state", "ray.train._internal.syncer")


class _NotPickled:
    """Base class of objects that are pickled without their attributes.

    Tune pickles the objects that it receives, so that it can restore them after a crash. This project restores them
    from the database instead, so their content need not be pickled.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Interrupt:
    """Context manager that defers Ctrl-C and SIGTERM until the samples being scored are stored.

    After the first signal, `note` is called with a message for the user. A second signal is raised immediately. `held`
    has the ids of Tune's trials that score no further samples because of a signal, although Tune still lists these
    trials as running.

    Signals are deferred because Python raises KeyboardInterrupt at the main thread's current line. If that line is in
    one of Ray's callbacks, Ray only prints the error.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.held: set[str] = set()
        self._note: Callable[[str], None] | None = note
        self._requested_at: float | None = None

    def __enter__(self) -> Self:
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._requested_at is not None:
            signal.default_int_handler(number, frame)
        self._requested_at = time.monotonic()

    @property
    def is_requested(self) -> bool:
        return self._requested_at is not None

    def check(self, trials: Iterable[Any]) -> None:
        """Raise KeyboardInterrupt after a signal, once none of Tune's `trials` waits for samples that are being scored.

        If trials still wait CHUNK_GRACE_S seconds after the signal, KeyboardInterrupt is raised nevertheless.
        """
        if self._requested_at is None:
            return
        if self._note is not None:
            self._note("ends when the chunks that are being scored are stored; a second Ctrl-C ends it at once")
            self._note = None
        is_late = time.monotonic() - self._requested_at > CHUNK_GRACE_S
        if is_late or not any(trial.status == "RUNNING" and trial.trial_id not in self.held for trial in trials):
            raise KeyboardInterrupt


class _Raised:
    """Holder of an error that the coordinator raised while Tune handled a result; the error is raised again later.

    Tune itself raises a TuneError, which has only the text of the traceback.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            raise


class _EvaluationSource(_NotPickled, Searcher):
    """A search algorithm for Tune that gives Tune the coordinator's evaluations, at most `concurrency` at a time.

    `interrupt` says whether the run must end after Ctrl-C. `raised` keeps an error of the coordinator, because Tune
    would raise a different error. `tick` is called several times a second while no evaluation runs and none can start.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        concurrency: int,
        interrupt: _Interrupt,
        raised: _Raised,
        tick: Callable[[], None],
    ) -> None:
        super().__init__(metric=None, mode=None)
        self._tick = tick
        self._raised = raised
        self._interrupt = interrupt
        self._coordinator = coordinator
        self._concurrency = concurrency
        self._evaluations: dict[str, Evaluation] = {}
        self._spans: dict[str, tracing.Span] = {}

    def suggest(self, trial_id: str) -> Any:
        """Give Tune the next evaluation, or None if a running evaluation must finish first.

        If no evaluation runs, this method waits for the next one, for example for the searcher's next proposal. Tune
        would otherwise repeat the call for ten minutes within one step of its loop, without calling `_Observer`.
        Therefore this method calls `tick` meanwhile, and lets the run end after Ctrl-C.
        """
        while True:
            asked_at = time.monotonic()
            suggested = self._suggested(trial_id)
            if suggested is not None or self._evaluations:
                return suggested
            self._interrupt.check(())
            self._tick()
            time.sleep(max(0.0, asked_at + SEARCHER_WAIT_S - time.monotonic()))

    def _suggested(self, trial_id: str) -> Any:
        """The next evaluation in the form of a Tune configuration, FINISHED if none is left, or None if none can start.

        With no evaluation in flight, the method waits at most SEARCHER_WAIT_S seconds for the searcher.
        """
        if self._interrupt.is_requested:
            return None
        # The limit counts Tune's trials, not the coordinator's evaluations in flight: Tune would start another actor
        # before it has set the actor of a finished trial aside for reuse.
        coordinator = self._coordinator
        if len(self._evaluations) >= self._concurrency:
            with self._raised.kept():
                coordinator.ask_ahead(timeout_s=SEARCHER_SOON_S)
            return None
        idle = coordinator.num_in_flight == 0
        with self._raised.kept():
            evaluation = coordinator.next_evaluation(timeout_s=SEARCHER_WAIT_S if idle else SEARCHER_SOON_S)
        if evaluation is None:
            return Searcher.FINISHED if coordinator.is_finished else None
        self._evaluations[trial_id] = evaluation
        span = self._spans[trial_id] = _span_of(evaluation)
        return {"evaluation": evaluation, "traceparent": span.traceparent}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        evaluation = self._evaluations.pop(trial_id, None)
        if (span := self._spans.pop(trial_id, None)) is not None:
            if error:
                span.fail("the trial actor was lost")
            span.end()
        if error and evaluation is not None:
            with self._raised.kept():
                self._coordinator.on_lost(evaluation, "see the driver's log for Ray's message")

    def end_spans(self) -> None:
        """End the trace spans of all evaluations that have not ended, and mark them as interrupted."""
        for span in self._spans.values():
            span.fail("interrupted")
            span.end()

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Do nothing when Tune saves this search algorithm, because its state is rebuilt from the database."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing when Tune saves this search algorithm, because its state is rebuilt from the database."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing when Tune restores this search algorithm, because its state is rebuilt from the database."""


def _span_of(evaluation: Evaluation) -> tracing.Span:
    """Begin the trace span of an evaluation, as the root of a new trace with a link to the driver's span.

    Each evaluation has its own trace, because a study may have a million chunks of samples, and last for days. One
    trace for the study would be too large, and could only be recorded whole or not at all.
    """
    attributes: tracing.Attributes = {
        "mergesearch.job": evaluation.study,
        "mergesearch.trial": evaluation.trial,
        "mergesearch.split": evaluation.split.value,
        "mergesearch.rung": evaluation.rung,
        "mergesearch.recipe": evaluation.recipe.digest[:12],
        "mergesearch.samples": sum(span.stop - span.start for chunk in evaluation.chunks for span in chunk),
    }
    return tracing.begin("trial", attributes, links=[tracing.current()], is_root=True)


class _ChunkScheduler(_NotPickled, FIFOScheduler):
    """A scheduler for Tune that passes the result of every chunk to the coordinator, and keeps idle actors alive.

    A chunk is the samples of one request to an engine. An evaluation stops when the coordinator has all its samples.
    After Ctrl-C, which `interrupt` notices, no further samples are scored. `raised` keeps an error of the coordinator,
    because Tune would raise a different error. `note` is called with messages for the user. The scheduler also changes
    how Tune handles up to `concurrency` trial actors:

    - Tune ends an idle actor unless a trial waits for an actor. Tune would therefore start and kill a process for
      almost every evaluation. The scheduler keeps idle actors for new trials.
    - Tune gives an idle actor to a trial whose own actor is still starting, and then kills the starting actor. If
      chunks are quick, some actors would therefore never run. The scheduler prevents this (class `_IdleActors`).
    - At the start of a run, an actor that is ready waits for the other actors, so that all actors begin together. On a
      busy cluster some actor may never start; after a while the scheduler begins without the missing actors.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        concurrency: int,
        interrupt: _Interrupt,
        raised: _Raised,
        note: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._interrupt = interrupt
        self._raised = raised
        self._coordinator = coordinator
        self._num_actors = concurrency
        self._note = note
        self._is_first_trial = True
        self._num_up = 0
        self._last_up = time.monotonic()
        self._num_noted: int | None = None
        self._held_back: list[Any] = []

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if self._is_first_trial:
            self._is_first_trial = False
            self._last_up = time.monotonic()
            controller = tune_controller._tune_controller
            controller._actor_cache.increase_max(trial.placement_group_factory, by=self._num_actors)
            _count_memory_kills_as_deaths(controller._actor_manager)
            _IdleActors(controller).install()

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Choose the next Tune trial to run, without waiting for trial actors that take too long to start.

        Tune calls this method at every step of its loop.
        """
        if self._interrupt.is_requested:
            self._release(tune_controller)
        is_waiting = self._held_back or self._coordinator.num_in_flight >= self._num_actors
        if self._num_up < self._num_actors and is_waiting and _is_late(time.monotonic() - self._last_up):
            self._start_without_missing(tune_controller)
        return super().choose_trial_to_run(tune_controller)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if result["outcome"] is None:
            return self._on_actor_up(tune_controller, trial)
        evaluation: Evaluation = trial.config["evaluation"]
        with self._raised.kept():
            done = self._coordinator.on_outcome(evaluation, result["outcome"])
        return str(FIFOScheduler.STOP) if done else self._next(trial)

    def _next(self, trial: Any) -> str:
        """Tune's next action after a result of `trial`: CONTINUE, or NOOP (wait) if the run must end."""
        if not self._interrupt.is_requested:
            return str(FIFOScheduler.CONTINUE)
        self._interrupt.held.add(trial.trial_id)
        return str(FIFOScheduler.NOOP)

    def _on_actor_up(self, tune_controller: Any, trial: Any) -> str:
        self._num_up += 1
        self._last_up = time.monotonic()
        if self._num_up < self._num_actors and self._coordinator.num_in_flight >= self._num_actors:
            self._held_back.append(trial)
            return str(FIFOScheduler.NOOP)
        self._release(tune_controller)
        return self._next(trial)

    def _start_without_missing(self, tune_controller: Any) -> None:
        if self._num_noted != self._num_up:
            self._num_noted = self._num_up
            text = _missing_actors(self._num_up, self._num_actors)
            self._coordinator.on_missing_actors(text, running=self._num_up, wanted=self._num_actors)
            self._note(text)
        if self._num_up:
            self._num_actors = self._num_up
            self._release(tune_controller)

    def _release(self, tune_controller: Any) -> None:
        held_back, self._held_back = self._held_back, []
        for trial in held_back:
            tune_controller._tune_controller._execute_action(trial, self._next(trial))


class _IdleActors:
    """Rule by which a Tune `controller` gives idle trial actors to trials.

    Trials that have no actor yet come first. A trial that has its own actor gets an idle actor only after this has been
    idle for IDLE_S seconds if its own actor waits for CPUs, and for ACTOR_START_S seconds if its own actor is starting.
    Tune ends an actor that is replaced so. A process may need 20 seconds to start on a busy machine, so with a short
    wait new actors would be started and ended again and again.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._reuse = controller._maybe_reuse_cached_actor
        self._idle_since: float | None = None

    def install(self) -> None:
        self._controller._maybe_reuse_cached_actor = self.give

    def give(self, trial: Any) -> bool:
        """Give an idle actor to `trial`, and return whether it got one."""
        is_idle = self._controller._actor_cache.has_cached_object(trial.placement_group_factory)
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        idle_s = time.monotonic() - (self._idle_since or 0.0)
        if is_idle and idle_s < self._patience_s(trial):
            return False
        return bool(self._reuse(trial))

    def _patience_s(self, trial: Any) -> float:
        own = self._controller._trial_to_actor.get(trial)
        if own is None:
            return 0.0
        return IDLE_S if own in self._controller._actor_manager.pending_actors else ACTOR_START_S


def _count_memory_kills_as_deaths(actor_manager: Any) -> None:
    """Make Tune replace a trial actor that Ray's memory monitor ended, as after any other death of an actor.

    Ray reports such an end to Tune as OutOfMemoryError, which would end the whole run of Tune (Ray 2.60). This function
    replaces the OutOfMemoryError by a RayActorError with the same text before Tune's actor manager sees it.
    """
    task_failed = actor_manager._actor_task_failed

    def on_failure(tracked_actor_task: Any, exception: Exception) -> None:
        is_memory_kill = isinstance(exception, ray.exceptions.OutOfMemoryError)
        task_failed(
            tracked_actor_task, ray.exceptions.RayActorError(error_msg=str(exception)) if is_memory_kill else exception
        )

    actor_manager._actor_task_failed = on_failure


def _is_late(waited_s: float) -> bool:
    """Whether a run should begin without the trial actors that are missing, after `waited_s` seconds without a new one.

    The run should begin after ACTOR_START_S seconds, or after CPU_WAIT_S seconds if the cluster has too few free CPUs
    for another actor.
    """
    if waited_s < CPU_WAIT_S:
        return False
    return waited_s >= ACTOR_START_S or ray.available_resources().get("CPU", 0.0) < CPUS


def _missing_actors(running: int, wanted: int) -> str:
    free, total = (resources().get("CPU", 0.0) for resources in (ray.available_resources, ray.cluster_resources))
    reason = "wait for CPUs" if free < CPUS else "have not started yet"
    return f"{running} of {wanted} trial actors run; the others {reason} ({CPUS:g} each, {free:g} of {total:g} free)"


class _Observer(_NotPickled, tune.Callback):
    """Callback for Tune that saves memory by removing samples from the results that Tune keeps.

    At every step of Tune's loop it also calls the function `tick`, and lets `interrupt` end the run after Ctrl-C. While
    no evaluation runs and none can start, the loop stays in one step, in which `_EvaluationSource` does the same.
    """

    def __init__(self, tick: Callable[[], None], interrupt: _Interrupt) -> None:
        self._tick = tick
        self._interrupt = interrupt

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._interrupt.check(trials)
        self._tick()

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        result.pop("outcome", None)


def run_evaluations(
    coordinator: Coordinator,
    scorer: Scorer,
    *,
    name: str,
    storage_dir: Path,
    concurrency: int,
    tick: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a study's evaluations on Ray Tune until the coordinator is finished. Ray must be connected.

    Trial actors send samples to `scorer`, whose replicas have the engines. At most `concurrency` evaluations run at a
    time. `name` and `storage_dir` are the name of Tune's run and the directory for its files. `tick` is called several
    times a second. `note` is called with messages for the user.

    Raises the errors of the coordinator: EvidenceMismatch (a result does not come from the requested merge or prompts),
    EngineUnavailable, StudyFailed, StudyUnusable, StaleAttempt. Raises KeyboardInterrupt after Ctrl-C or SIGTERM, when
    the samples that were being scored are stored.
    """
    for variable, value in TUNE_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(concurrency)
    for unused in TUNE_SNAPSHOT_LOGGERS:
        logging.getLogger(unused).setLevel(logging.CRITICAL)
    trainable = tune.with_parameters(EvaluationTrainable, scorer=scorer)
    trainable.__qualname__ = EvaluationTrainable.__qualname__  # the name of the actors in the dashboard
    interrupt, raised = _Interrupt(note), _Raised()
    source = _EvaluationSource(coordinator, concurrency, interrupt, raised, tick)
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=source,
            scheduler=_ChunkScheduler(coordinator, concurrency, interrupt, raised, note),
            num_samples=-1,
            reuse_actors=True,
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(storage_dir),
            verbose=0,
            callbacks=[_Observer(tick, interrupt)],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )
    with interrupt:
        try:
            tuner.fit()
        except TuneError:
            if raised.error is None:
                raise
            raise raised.error from None
        finally:
            source.end_spans()


def _trial_name(trial: Any) -> str:
    return f"{trial.config['evaluation']!r}-{trial.trial_id}"
