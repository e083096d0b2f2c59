"""The driver of one stored study as a Ray Job: `python -m service.jobs.driver --data DIR --study ID`.

What it does depends on the study's kind. Exit code 0: the study has ended, with success or failure, as stored; 1: it
has not, and another driver may continue it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from search_spaces.errors import InvalidStudy
from service.disk import job_dir
from service.errors import Conflict, InUse, NotFound, StaleAttempt, StudyFailed
from service.jobs import finetune, search
from service.jobs.progress_log import ProgressLog
from service.store import JobWriter, Store
from service.studies.heartbeat import Heartbeat
from service.studies.preflight.files import FilesRefused
from service.types import JobKind, JobState
from workers.errors import EngineUnavailable

__all__ = ["KINDS", "Work", "drive"]

logger = logging.getLogger(__name__)


class Work(Protocol):
    """Works on a study from where its store says it is, to its end, which it stores too. `work_dir` is a directory for
    its files, `heartbeat` says that it gets on, `view` is its log."""

    def __call__(
        self, store: Store, writer: JobWriter, *, work_dir: Path, heartbeat: Heartbeat, view: ProgressLog
    ) -> None: ...


KINDS: Mapping[JobKind, Work] = {JobKind.SEARCH: search.work, JobKind.FINETUNE: finetune.work}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m service.jobs.driver", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--study", required=True)
    # With several Ray clusters on a machine, a job may get the address of another one (Ray 2.60).
    parser.add_argument("--ray-address", help="the cluster to join (default: Ray's choice)")
    parser.add_argument("--because", help="why the previous driver was replaced")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.ray_address:
        os.environ["RAY_ADDRESS"] = options.ray_address
    store = Store(f"sqlite:///{options.data / search.DATABASE}")
    try:
        return drive(store, options.study, work_dir=job_dir(options.data, options.study), because=options.because)
    finally:
        store.close()


def drive(store: Store, study_id: str, *, work_dir: Path, because: str | None = None) -> int:
    """Take over a stored study and work on it. Returns the process's exit code.

    The study was accepted once. So where something is missing now (a model, the hub, an engine, Ray), it waits: this
    driver ends, and another one tries again. Only what cannot change back without a new study ends this one."""
    try:
        writer = store.open_attempt(study_id, because=because)
    except (StaleAttempt, NotFound) as error:
        logger.info("%s", error)
        return 0
    heartbeat = Heartbeat(writer, store.job(study_id).wall_clock_s)
    try:
        with heartbeat, ProgressLog() as view:
            work = KINDS[store.job(study_id).kind]
            work(store, writer, work_dir=work_dir, heartbeat=heartbeat, view=view)
        return 0
    except StudyFailed as error:  # stored already
        logger.error("%s", error)
        return 0
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
