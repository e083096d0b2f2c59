"""Driver that works on one stored job, run as a Ray Job: `python -m service.jobs.driver --data DIR --job ID`.

The driver calls the function `work` that the job's kind declares. The exit code is 0 if the job has ended, with success
or failure, as stored. The exit code is 1 if the job has not ended; another driver may then continue the job.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from contextlib import closing
from pathlib import Path

from search_spaces.errors import InvalidStudy
from service.disk import artifacts_dir, data_dir_of, job_dir
from service.errors import Conflict, InUse, NotFound, StaleAttempt, StudyFailed
from service.jobs.base import Attempt, Resources
from service.jobs.heartbeat import Heartbeat
from service.jobs.registry import kind_of
from service.jobs.resources import SHARED
from service.store import JobWriter, Store
from service.store.artifacts import ArtifactStore
from service.store.database_url import known_url
from service.studies.preflight.files import FilesRefused
from service.types import JobRecord, JobState
from workers.errors import EngineUnavailable
from workers.telemetry import logs, tracing

__all__ = ["drive", "main"]

logger = logging.getLogger(__name__)

# Seconds by which this machine's clock and the database's may differ without a warning.
MAX_SKEW_S = 5.0


def main(resources: Resources | None = None) -> int:
    """Run the driver (the process that works on a job) of the job that the command line names.

    `resources` are the functions with which the driver uses the cluster; by default the functions in
    `service.jobs.resources`. Returns the exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m service.jobs.driver", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--files", help="the location of artifacts (default: in the data directory)")
    # With several Ray clusters on a machine, Ray may give a job another cluster's address (Ray 2.60).
    parser.add_argument("--ray-address", help="the cluster to join (default: Ray's choice)")
    parser.add_argument("--because", help="why the previous driver was replaced")
    options = parser.parse_args()
    logs.log_to_stderr()
    tracing.start_tracing("driver")
    if options.ray_address:
        os.environ["RAY_ADDRESS"] = options.ray_address
    try:
        with logs.fields(job=options.job), closing(Store(known_url(options.data), waits=True)) as store:
            _check_clock(store)
            return drive(
                store,
                options.job,
                work_dir=job_dir(options.data, options.job),
                files=options.files,
                because=options.because,
                resources=resources,
            )
    finally:
        tracing.stop_tracing()


def drive(
    store: Store,
    job_id: str,
    *,
    work_dir: Path,
    files: str | Path | None = None,
    because: str | None = None,
    resources: Resources | None = None,
) -> int:
    """Become the driver of the stored job `job_id`, work on the job, and return the process's exit code.

    A driver is a process that works on a job. The exit code is 0 if the job has ended or belongs to another driver, and
    1 if a later driver must continue the job. The job passed its checks when it was created. If something is missing
    now, such as a model, the hub, an engine or Ray, this driver ends, and a later driver tries again. The job fails
    only for problems that every later driver would have too.

    `work_dir` is the job's directory for files. `files` is the location of artifacts; None is a directory in the
    server's data directory. `because` says why the previous driver was replaced; None if there is no reason to state.
    `resources` are the functions with which the driver uses the cluster; None means the functions in
    `service.jobs.resources`.
    """
    try:
        writer = store.open_attempt(job_id, because=because, as_driver=True)
    except (StaleAttempt, NotFound) as error:
        logger.info("%s", error)
        return 0
    with logs.fields(job=job_id, attempt=writer.attempt):
        return _work_on(store, writer, work_dir=work_dir, files=files, resources=resources)


def _work_on(
    store: Store, writer: JobWriter, *, work_dir: Path, files: str | Path | None, resources: Resources | None
) -> int:
    """Work on a job in this process, and return the process's exit code.

    An attempt is the work of one driver process on the job; `writer` stores the results of this attempt. `work_dir` is
    the directory for files of the work, and `files` is the directory or object store for models that the job trains.
    `resources` has the functions that connect to Ray and start replicas; None means the functions in
    `service.jobs.resources`. The trace spans of the work belong to the trace of the request that created the job.
    """
    job = store.job(writer.job_id)
    about: tracing.Attributes = {"mergesearch.job": job.id, "mergesearch.name": job.name, "mergesearch.kind": job.kind}
    # A driver may work for days, and be killed: its span ends at once, and is the parent of what follows.
    with tracing.span("driver", {**about, "mergesearch.attempt": writer.attempt}, parent=job.traceparent) as span:
        place = span.traceparent
    with tracing.under(place):
        return _end_of_work(store, writer, job, work_dir=work_dir, files=files, resources=resources)


def _end_of_work(
    store: Store,
    writer: JobWriter,
    job: JobRecord,
    *,
    work_dir: Path,
    files: str | Path | None,
    resources: Resources | None,
) -> int:
    """Work on a job until the job or this driver ends; store the outcome, and return the process's exit code.

    A driver is a process that works on a job; this driver stores its results with `writer`. `job` is the stored job.
    The exit code is 1 if another driver must continue the job, else 0. `work_dir` is the directory for files of the
    work, and `files` is the directory or object store for models that the job trains; None means a directory of the
    server. `resources` has the functions that connect to Ray and start replicas; None means the functions in
    `service.jobs.resources`.
    """
    heartbeat = Heartbeat(writer, job.wall_clock_s, num_gpus=kind_of(job.kind).demand(job).num_gpus)
    artifacts = ArtifactStore(store, files or artifacts_dir(data_dir_of(work_dir)))
    try:
        with heartbeat:
            attempt = Attempt(store, writer, artifacts, work_dir, heartbeat, resources or SHARED, _note)
            kind_of(job.kind).work(attempt)
        return 0
    except StudyFailed as error:  # the state and its reason are stored already
        logger.error("%s", error)
        return 0
    except KeyboardInterrupt:  # Ctrl-C or SIGTERM, once the chunks that were being scored are stored
        logger.info("the driver was asked to end; another one continues the job")
        return 1
    except InUse as error:  # the driver before this one has not ended yet
        _wait(writer, heartbeat, str(error))
        return 1
    except (Conflict, FilesRefused) as error:
        _end(writer, JobState.FAILED, str(error))
        return 0
    except StaleAttempt as error:
        logger.info("%s", error)
        return 0
    except (InvalidStudy, EngineUnavailable, OSError) as error:
        _wait(writer, heartbeat, str(error) or type(error).__name__)
        return 1
    except Exception as error:
        logger.exception("the driver failed")
        _end(writer, JobState.STOPPED, f"{type(error).__name__}: {error}")
        return 1


def _check_clock(store: Store) -> None:
    """Log a warning if the clock of this machine differs from the clock of the database `store`.

    The times of events and heartbeats are from the database's clock, and the times of log messages from this machine's.
    """
    before = time.time()
    skew_s = store.now() - time.time()
    if abs(skew_s) > MAX_SKEW_S + time.time() - before:
        logger.warning("this machine's clock differs from the database's by %.0f s, and so do the times here", -skew_s)


def _note(text: str) -> None:
    if logs.is_json():
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def _wait(writer: JobWriter, heartbeat: Heartbeat, reason: str) -> None:
    logger.error("waiting: %s", reason)
    try:
        heartbeat.wait_for(f"its next driver: {reason}")
        heartbeat.discount()
        writer.set_waiting(reason)
    except StaleAttempt as error:
        logger.info("%s", error)


def _end(writer: JobWriter, state: JobState, reason: str) -> None:
    logger.error("%s: %s", state.value, reason)
    try:
        writer.set_state(state, reason)
    except StaleAttempt as error:
        logger.info("%s", error)


if __name__ == "__main__":
    sys.exit(main())
