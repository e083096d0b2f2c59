"""Prometheus metrics of the server: their declarations, and the code that reads their values at each scrape.

Replicas have separate metrics, which Ray exports (`workers.serving.replica.ReplicaMetrics`).
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from service.api.request_counter import Histogram, RequestCounter
from service.cluster.queue import Reason
from service.cluster.reconciler import QueueState
from service.disk import DRAINED, existing
from service.jobs.heartbeat import waits_for_start
from service.jobs.registry import KINDS
from service.store import Store
from service.types import DriverWait, EventKind, JobRecord, JobState, TrialState

__all__ = ["JOB", "METRICS", "SETBACKS", "SHOWN_AFTER_END_S", "Metric", "Scrape", "Stored", "prometheus_text"]

# Seconds for which a job that has ended keeps its metrics: longer than any usual interval of scrapes.
SHOWN_AFTER_END_S = 3600.0

# Events about failures.
SETBACKS = (
    EventKind.CRASH,
    EventKind.ENGINE_FAULT,
    EventKind.DATABASE,
    EventKind.JOB_REFUSED,
    EventKind.WAITING,
    EventKind.HOLDOUT_FAILED,
)

Labels: TypeAlias = Mapping[str, str]
Samples: TypeAlias = Iterator[tuple[Labels, float | Histogram]]


@dataclass(frozen=True)
class Stored:
    """Data that one scrape (a request by Prometheus for the metrics) reads from the database.

    `counts` has the number of jobs by kind and state. `shown` has the jobs with metrics of their own: jobs that have
    not ended, and jobs that ended less than SHOWN_AFTER_END_S seconds ago. `setbacks` has the numbers of events that
    tell of a failure, such as a crash, as job id -> kind of event -> number. `num_engine_faults` is the number of
    inference engines that have failed a check, over all jobs. `waits` has, for each job in `shown`, its last wait for a
    driver. `now` is the time of the scrape by the database's clock.
    """

    counts: Mapping[tuple[str, JobState], int]
    shown: tuple[JobRecord, ...]
    setbacks: Mapping[str, Mapping[str, int]]
    num_engine_faults: int
    waits: Mapping[str, DriverWait]
    now: float

    @classmethod
    def read(cls, store: Store) -> Stored:
        now = store.now()
        shown = store.unfinished_jobs(heard_since=now - SHOWN_AFTER_END_S)
        ids = [job.id for job in shown]
        setbacks = store.event_counts(ids, kinds=SETBACKS)
        return cls(store.job_counts(), shown, setbacks, store.num_engine_faults(), store.driver_waits(ids), now)

    def wait_of(self, job: JobRecord) -> DriverWait:
        return self.waits.get(job.id, DriverWait(job.created_at))  # a job may be deleted between the reads


@dataclass(frozen=True)
class Scrape:
    """Inputs from which the metrics of one scrape (a request by Prometheus) are computed.

    `stored` has the data from the database; None while the database does not answer. `not_ready` is the reason why no
    job can make progress, or None if jobs can make progress. `queue` has the jobs that run and that wait. `requests`
    counts the HTTP requests. `data_dir` is the directory of the server's files.
    """

    stored: Stored | None
    not_ready: str | None
    queue: QueueState
    requests: RequestCounter
    data_dir: Path


@dataclass(frozen=True)
class Metric:
    """Declaration of a Prometheus metric, with the function `read` that computes its samples.

    `meaning` is the help text, and `labels` are the names of the labels. `read` yields the metric's samples for one
    scrape: pairs of label values and the sample's value. The value is a Histogram for the type "histogram", else a
    number.
    """

    name: str
    type: Literal["gauge", "counter", "histogram"]
    meaning: str
    labels: tuple[str, ...]
    read: Callable[[Scrape], Samples]


def prometheus_text(scrape: Scrape) -> str:
    """Text of all metrics of the server in Prometheus' text format, version 0.0.4; `scrape` has the data."""
    lines: list[str] = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.type}"]
        for labels, value in metric.read(scrape):
            assert tuple(labels) == metric.labels, metric.name
            if isinstance(value, Histogram):
                numbers = value.cumulative
                for bound, number in zip((*value.bounds, "+Inf"), numbers, strict=True):
                    lines.append(_line(f"{metric.name}_bucket", {**labels, "le": str(bound)}, number))
                lines += [_line(f"{metric.name}_sum", labels, value.sum)]
                lines += [_line(f"{metric.name}_count", labels, numbers[-1])]
            else:
                lines.append(_line(metric.name, labels, value))
    return "\n".join(lines) + "\n"


def _line(name: str, labels: Labels, value: float) -> str:
    # No value has characters that need an escape: names of jobs are of letters, digits and `._-`.
    text = ",".join(f'{label}="{its_value}"' for label, its_value in labels.items())
    return f"{name}{{{text}}} {value:.15g}" if text else f"{name} {value:.15g}"


# -- readers -----------------------------------------------------------------------------------------------------------


def _jobs(scrape: Scrape) -> Samples:
    if scrape.stored is not None:
        for kind, state in itertools.product(KINDS, JobState):
            yield {"kind": kind, "state": state.value}, scrape.stored.counts.get((kind, state), 0)


def _requests(scrape: Scrape) -> Samples:
    for (method, route, status), number in scrape.requests.items():
        yield {"method": method, "route": route, "status": str(status)}, number


def _latencies(scrape: Scrape) -> Samples:
    for (method, route, status), histogram in scrape.requests.latencies():
        yield {"method": method, "route": route, "status": status}, histogram


def _engine_faults(scrape: Scrape) -> Samples:
    if scrape.stored is not None:
        yield {}, scrape.stored.num_engine_faults


def _queue(scrape: Scrape) -> Samples:
    waiting = Counter(waits.reason for waits in scrape.queue.choice.waiting.values())
    yield {"waits_for": "nothing"}, len(scrape.queue.running)
    for reason in Reason:
        yield {"waits_for": reason.value}, waiting[reason]


def _value(value: Callable[[Scrape], float]) -> Callable[[Scrape], Samples]:
    return lambda scrape: iter([({}, value(scrape))])


def _of_job(job: JobRecord) -> dict[str, str]:
    return {"study": job.id, "name": job.name, "kind": job.kind}


def _each_job(value: Callable[[JobRecord], float | None]) -> Callable[[Scrape], Samples]:
    """Make `Metric.read` for a metric with one sample for each job: the number that `value` returns for the job.

    Jobs for which `value` returns None get no sample.
    """

    def read(scrape: Scrape) -> Samples:
        for job in scrape.stored.shown if scrape.stored is not None else ():
            if (found := value(job)) is not None:
                yield _of_job(job), found

    return read


def _has_search(job: JobRecord) -> bool:
    """Whether a job is one of those, such as studies, that score samples for trials."""
    return job.kind in KINDS and KINDS[job.kind].has_search


def _is_queued(scrape: Scrape) -> Samples:
    if scrape.stored is not None:
        for job in scrape.stored.shown:
            yield _of_job(job), job.id in scrape.queue.choice.waiting


def _progress(key: str) -> Callable[[Scrape], Samples]:
    """Make `Metric.read` for a metric with one sample for each study: a number of the study's stored progress.

    `key` is the name of the number, such as `samples_scored`. Studies without this number get no sample.
    """
    return _each_job(lambda job: job.progress.get(key) if _has_search(job) and job.progress else None)


def _steps(key: str) -> Callable[[Scrape], Samples]:
    """Make `Metric.read` for a metric with one sample for each study whose searcher makes steps: a number of them.

    `key` is the name of the number in the study's stored progress. Steps are gradient steps and policy updates.
    """

    def value(job: JobRecord) -> float | None:
        progress = job.progress if _has_search(job) and job.progress else {}
        return progress.get(key) if progress.get("steps_planned") else None

    return _each_job(value)


def _states(scrape: Scrape) -> Samples:
    for job in scrape.stored.shown if scrape.stored is not None else ():
        yield {**_of_job(job), "state": job.state.value}, 1


def _setbacks(scrape: Scrape) -> Samples:
    if scrape.stored is not None:
        for job, event in itertools.product(scrape.stored.shown, SETBACKS):
            yield {**_of_job(job), "event": event.value}, scrape.stored.setbacks.get(job.id, {}).get(event.value, 0)


def _trials(scrape: Scrape) -> Samples:
    for job in scrape.stored.shown if scrape.stored is not None else ():
        if _has_search(job) and job.progress:
            for state in TrialState:
                yield {**_of_job(job), "state": state.value}, job.progress["trials"].get(state.value, 0)


def _waits_s(stored: Stored, kind: str) -> list[float]:
    """Seconds that each waiting job of the kind `kind` has waited for a driver (a process that works on the job).

    Jobs that have a driver, that have ended, or that are paused are left out.
    """
    found = []
    for job in stored.shown:
        if job.kind == kind and not (job.state.is_finished or job.is_paused or job.has_driver(now=stored.now)):
            found.append(stored.now - max(stored.wait_of(job).since, job.heartbeat_at or 0.0))
    return found


def _of_waits(value: Callable[[list[float]], float]) -> Callable[[Scrape], Samples]:
    """Make `Metric.read` for a metric of how long jobs have waited for a driver.

    A driver is a process that works on a job. The metric has one sample for each kind of job. `value` computes the
    sample from the seconds that each waiting job of this kind has waited, for example as their maximum.
    """

    def read(scrape: Scrape) -> Samples:
        if scrape.stored is not None:
            for kind in KINDS:
                yield {"kind": kind}, value(_waits_s(scrape.stored, kind))

    return read


def _last_waits(scrape: Scrape) -> Samples:
    if scrape.stored is not None:
        for job in scrape.stored.shown:
            wait = scrape.stored.wait_of(job)
            if wait.until is not None or not (job.state.is_finished or job.is_paused):
                yield _of_job(job), (wait.until or scrape.stored.now) - wait.since


def _waits_for_workers(job: JobRecord) -> float:
    return not job.state.is_finished and waits_for_start(job.waiting_for)


def _gpu_seconds(job: JobRecord) -> float | None:
    return job.wall_clock_s * KINDS[job.kind].demand(job).num_gpus if _has_search(job) else None


# -- declarations ------------------------------------------------------------------------------------------------------

# Labels of the metrics of a job: its id, its name and its kind.
JOB = ("study", "name", "kind")

METRICS = (
    Metric("mergesearch_jobs", "gauge", "Jobs by kind and state.", ("kind", "state"), _jobs),
    Metric(
        "mergesearch_queue_places",
        "gauge",
        "Jobs that may run at the same time.",
        (),
        _value(lambda scrape: scrape.queue.places),
    ),
    Metric(
        "mergesearch_queue_jobs",
        "gauge",
        "Jobs that run (nothing), and jobs that wait for a place, for a place that is being given up, or for a quota.",
        ("waits_for",),
        _queue,
    ),
    Metric(
        "mergesearch_job_queued",
        "gauge",
        "Whether the job waits in the queue, for a place or a quota.",
        JOB,
        _is_queued,
    ),
    Metric(
        "mergesearch_ready",
        "gauge",
        "Whether jobs can make progress.",
        (),
        _value(lambda scrape: scrape.not_ready is None),
    ),
    Metric(
        "mergesearch_drained",
        "gauge",
        "Whether the servers are drained.",
        (),
        _value(lambda scrape: scrape.not_ready == DRAINED),
    ),
    Metric(
        "mergesearch_database_up",
        "gauge",
        "Whether the database answered this scrape.",
        (),
        _value(lambda scrape: scrape.stored is not None),
    ),
    Metric(
        "mergesearch_data_free_bytes",
        "gauge",
        "Free bytes on the disk of the data directory.",
        (),
        _value(lambda scrape: shutil.disk_usage(existing(scrape.data_dir)).free),
    ),
    Metric(
        "mergesearch_data_size_bytes",
        "gauge",
        "Size of the disk of the data directory.",
        (),
        _value(lambda scrape: shutil.disk_usage(existing(scrape.data_dir)).total),
    ),
    Metric(
        "mergesearch_http_requests_total",
        "counter",
        "Requests answered since the server started.",
        ("method", "route", "status"),
        _requests,
    ),
    Metric(
        "mergesearch_http_request_seconds",
        "histogram",
        "Seconds until the response began, without event streams.",
        ("method", "route", "status"),
        _latencies,
    ),
    Metric(
        "mergesearch_http_streams",
        "gauge",
        "Open event streams.",
        (),
        _value(lambda scrape: scrape.requests.num_streams),
    ),
    Metric(
        "mergesearch_jobs_waiting",
        "gauge",
        "Jobs that wait for a driver: they have none, have not ended and are not paused.",
        ("kind",),
        _of_waits(len),
    ),
    Metric(
        "mergesearch_jobs_oldest_wait_seconds",
        "gauge",
        "Longest time since one of the waiting jobs was created, was resumed or lost its driver; 0 if none waits.",
        ("kind",),
        _of_waits(lambda waits_s: max(waits_s, default=0.0)),
    ),
    Metric(
        "mergesearch_engine_faults_total",
        "counter",
        "Engines that failed a check, such as a canary, over all jobs.",
        (),
        _engine_faults,
    ),
    Metric("mergesearch_job_state", "gauge", "1 for the state that a job has.", (*JOB, "state"), _states),
    Metric(
        "mergesearch_job_progress_timestamp_seconds",
        "gauge",
        "When the job last made progress, or was created.",
        JOB,
        _each_job(lambda job: job.progressed_at or job.created_at),
    ),
    Metric(
        "mergesearch_job_patience_seconds",
        "gauge",
        "Seconds without progress after which the job's driver is replaced.",
        JOB,
        _each_job(lambda job: job.patience_s),
    ),
    Metric(
        "mergesearch_job_waits_for_workers",
        "gauge",
        "Whether the job's driver waits for an engine, or for workers of a training, to start.",
        JOB,
        _each_job(_waits_for_workers),
    ),
    Metric(
        "mergesearch_job_wait_seconds",
        "gauge",
        "Seconds from the job's creation, or its last resumption, to its driver; they grow until the driver starts.",
        JOB,
        _last_waits,
    ),
    Metric(
        "mergesearch_job_drivers_total",
        "counter",
        "Drivers that have taken over the job.",
        JOB,
        _each_job(lambda job: job.attempt),
    ),
    Metric(
        "mergesearch_job_setbacks_total",
        "counter",
        "Events of the job that tell of something that went wrong.",
        (*JOB, "event"),
        _setbacks,
    ),
    Metric(
        "mergesearch_job_wall_clock_seconds",
        "gauge",
        "Seconds that drivers have worked on the job.",
        JOB,
        _each_job(lambda job: job.wall_clock_s),
    ),
    Metric(
        "mergesearch_study_samples_scored_total",
        "counter",
        "Samples scored for the study, as of its last heartbeat.",
        JOB,
        _progress("samples_scored"),
    ),
    Metric(
        "mergesearch_study_samples_planned",
        "gauge",
        "Samples that the study is expected to score in all.",
        JOB,
        _progress("samples_planned"),
    ),
    Metric(
        "mergesearch_study_steps_total",
        "counter",
        "Gradient steps and policy updates that the study has made, as of its last heartbeat.",
        JOB,
        _steps("steps"),
    ),
    Metric(
        "mergesearch_study_steps_planned",
        "gauge",
        "Steps that the study is expected to make in all; those of a refinement are counted after the search.",
        JOB,
        _steps("steps_planned"),
    ),
    Metric("mergesearch_study_trials", "gauge", "Trials of the study by state.", (*JOB, "state"), _trials),
    Metric(
        "mergesearch_study_trials_planned",
        "gauge",
        "Trials that the study may have, baselines included.",
        JOB,
        _progress("max_trials"),
    ),
    Metric(
        "mergesearch_study_gpu_seconds",
        "gauge",
        "Seconds that drivers have worked on the study, times its engines' GPUs, as limits.max_gpu_hours counts them.",
        JOB,
        _each_job(_gpu_seconds),
    ),
)
