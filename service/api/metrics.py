"""Prometheus metrics of the server: their declarations, and the code that reads their values at each scrape.

Replicas have separate metrics, which Ray exports (`workers.serving.replica.ReplicaMetrics`).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from search_spaces.study.engine import Engine
from service.api.request_counter import RequestCounter
from service.disk import DRAINED, existing
from service.jobs.finetune.events import WORKERS
from service.jobs.heartbeat import ENGINE
from service.jobs.registry import KINDS
from service.jobs.search.kind import SEARCH
from service.store import Store
from service.types import EventKind, JobRecord, JobState, TrialState

__all__ = ["JOB", "METRICS", "SETBACKS", "SHOWN_AFTER_END_S", "Metric", "Scrape", "Stored", "prometheus_text"]

# Seconds for which a job that has ended keeps its metrics: longer than any usual interval of scrapes.
SHOWN_AFTER_END_S = 3600.0

# Events that tell of something that went wrong.
SETBACKS = (
    EventKind.CRASH,
    EventKind.ENGINE_FAULT,
    EventKind.DATABASE,
    EventKind.JOB_REFUSED,
    EventKind.WAITING,
    EventKind.HOLDOUT_FAILED,
)

Labels: TypeAlias = Mapping[str, str]
Samples: TypeAlias = Iterator[tuple[Labels, float]]


@dataclass(frozen=True)
class Stored:
    """Data that one scrape of the metrics reads from the database.

    `counts` has the number of jobs by kind and state. `shown` has the jobs that have not ended, or ended less than
    SHOWN_AFTER_END_S ago. `setbacks` has the number of events of the kinds in SETBACKS, as job id -> kind -> number.
    `num_engine_faults` is the number of engines that have failed a check, over all jobs.
    """

    counts: Mapping[tuple[str, JobState], int]
    shown: tuple[JobRecord, ...]
    setbacks: Mapping[str, Mapping[str, int]]
    num_engine_faults: int

    @classmethod
    def read(cls, store: Store) -> Stored:
        shown = store.unfinished_jobs(heard_since=store.now() - SHOWN_AFTER_END_S)
        setbacks = store.event_counts([job.id for job in shown], kinds=SETBACKS)
        return cls(store.job_counts(), shown, setbacks, store.num_engine_faults())


@dataclass(frozen=True)
class Scrape:
    """Inputs from which the metrics of one scrape (a request by Prometheus) are computed.

    `stored` has the data from the database; None while the database does not answer. `not_ready` is the reason why no
    job can make progress, or None if jobs can. `requests` counts the HTTP requests. `data_dir` is the directory of the
    server's files.
    """

    stored: Stored | None
    not_ready: str | None
    requests: RequestCounter
    data_dir: Path


@dataclass(frozen=True)
class Metric:
    """Declaration of a metric: its name, type, meaning and labels.

    `read` returns the samples of one scrape, each as its labels and its value.
    """

    name: str
    type: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...]
    read: Callable[[Scrape], Samples]


def prometheus_text(scrape: Scrape) -> str:
    """Text of all METRICS with their current values, in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.type}"]
        for labels, value in metric.read(scrape):
            assert tuple(labels) == metric.labels, metric.name
            # No value has characters that need an escape: names of jobs are of letters, digits and `._-`.
            text = ",".join(f'{label}="{its_value}"' for label, its_value in labels.items())
            lines.append(f"{metric.name}{{{text}}} {value:.15g}" if text else f"{metric.name} {value:.15g}")
    return "\n".join(lines) + "\n"


# -- readers -----------------------------------------------------------------------------------------------------------


def _jobs(scrape: Scrape) -> Samples:
    if scrape.stored is not None:
        for kind, state in itertools.product(KINDS, JobState):
            yield {"kind": kind, "state": state.value}, scrape.stored.counts.get((kind, state), 0)


def _requests(scrape: Scrape) -> Samples:
    for (method, route, status), number in scrape.requests.items():
        yield {"method": method, "route": route, "status": str(status)}, number


def _engine_faults(scrape: Scrape) -> Samples:
    if scrape.stored is not None:
        yield {}, scrape.stored.num_engine_faults


def _value(value: Callable[[Scrape], float]) -> Callable[[Scrape], Samples]:
    return lambda scrape: iter([({}, value(scrape))])


def _of_job(job: JobRecord) -> dict[str, str]:
    return {"study": job.id, "name": job.name, "kind": job.kind}


def _each_job(value: Callable[[JobRecord], float | None]) -> Callable[[Scrape], Samples]:
    """Make a reader of a metric with one value per job: the number that `value` returns for the job.

    Jobs for which `value` returns None are left out.
    """

    def read(scrape: Scrape) -> Samples:
        for job in scrape.stored.shown if scrape.stored is not None else ():
            if (found := value(job)) is not None:
                yield _of_job(job), found

    return read


def _progress(key: str) -> Callable[[Scrape], Samples]:
    """Make a reader of a metric with one value per study: the number `key` of the study's progress.

    Studies without this number are left out.
    """
    return _each_job(lambda job: job.progress.get(key) if job.kind == SEARCH.name and job.progress else None)


def _states(scrape: Scrape) -> Samples:
    for job in scrape.stored.shown if scrape.stored is not None else ():
        yield {**_of_job(job), "state": job.state.value}, 1


def _setbacks(scrape: Scrape) -> Samples:
    if scrape.stored is not None:
        for job, event in itertools.product(scrape.stored.shown, SETBACKS):
            yield {**_of_job(job), "event": event.value}, scrape.stored.setbacks.get(job.id, {}).get(event.value, 0)


def _trials(scrape: Scrape) -> Samples:
    for job in scrape.stored.shown if scrape.stored is not None else ():
        if job.kind == SEARCH.name and job.progress:
            for state in TrialState:
                yield {**_of_job(job), "state": state.value}, job.progress["trials"].get(state.value, 0)


def _waits_for_workers(job: JobRecord) -> float:
    return not job.state.is_finished and job.waiting_for in (ENGINE, WORKERS)


def _gpu_seconds(job: JobRecord) -> float | None:
    if job.kind != SEARCH.name:
        return None
    return job.wall_clock_s * Engine.model_validate(job.document["engine"]).num_gpus


# -- declarations ------------------------------------------------------------------------------------------------------

# Labels of the metrics of a job: its id, its name and its kind.
JOB = ("study", "name", "kind")

METRICS = (
    Metric("mergesearch_jobs", "gauge", "Jobs by kind and state.", ("kind", "state"), _jobs),
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
