"""The driver of one study as a Ray Job: `python -m service.jobs.search --data DIR --study ID`.

The same code as `mergesearch run`, with a store and replicas that studies share. Exit code 0: the study has ended, with
success or failure, as stored; 1: it has not, and another driver may continue it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import Study
from service.cluster.session import ray_session
from service.disk import study_dir
from service.errors import Conflict, NotFound, StaleAttempt, StudyFailed
from service.jobs.progress_log import ProgressLog
from service.store import Store, StudyWriter
from service.studies.attempt import execute
from service.studies.chains import on_server, with_exported_sources
from service.studies.heartbeat import ENGINE, Heartbeat
from service.studies.preflight.examine import PreflightResult, examine
from service.studies.preflight.files import FilesRefused
from service.studies.preflight.models import check_unchanged, with_revisions
from service.types import StudyState
from workers.errors import EngineUnavailable
from workers.serving.deployment import deploy_scorer
from workers.types import Scorer

__all__ = ["DATABASE", "drive"]

DATABASE = "mergesearch.db"

# Replicas that no study has used for this long are stopped.
KEEP_IDLE_S = 600.0

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m service.jobs.search", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--study", required=True)
    # With several Ray clusters on a machine, a job may get the address of another one (Ray 2.60).
    parser.add_argument("--ray-address", help="the cluster to join (default: Ray's choice)")
    parser.add_argument("--because", help="why the previous driver was replaced")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.ray_address:
        os.environ["RAY_ADDRESS"] = options.ray_address
    store = Store(f"sqlite:///{options.data / DATABASE}")
    try:
        return drive(store, options.study, work_dir=study_dir(options.data, options.study), because=options.because)
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
    heartbeat = Heartbeat(writer, store.study(study_id).wall_clock_s)
    try:
        with heartbeat, ProgressLog() as view:
            _work(store, writer, work_dir=work_dir, heartbeat=heartbeat, view=view)
        return 0
    except StudyFailed as error:  # stored already
        logger.error("%s", error)
        return 0
    except (Conflict, FilesRefused) as error:
        _end(writer, StudyState.FAILED, str(error))
        return 0
    except StaleAttempt as error:
        logger.info("%s", error)
        return 0
    except (InvalidStudy, EngineUnavailable, OSError) as error:
        _wait(writer, heartbeat, str(error) or type(error).__name__)
        return 1
    except Exception as error:
        logger.exception("the driver failed")
        _end(writer, StudyState.STOPPED, f"{type(error).__name__}: {error}")
        return 1


def _work(store: Store, writer: StudyWriter, *, work_dir: Path, heartbeat: Heartbeat, view: ProgressLog) -> None:
    def note(text: str) -> None:
        heartbeat.progressed()
        view.note(text)

    record = store.study(writer.study_id)
    stored = Study.model_validate(record.document)
    exported, chained = with_exported_sources(
        stored, open_study=on_server(store), directory=work_dir.parents[1], before=record.resolved, note=note
    )
    study = with_revisions(exported, replace(record.resolved, chained={}))
    preflight = examine(study, access=record.resolved.access, chained=chained, note=note)
    check_unchanged(record, preflight.resolved())
    note("The models are as they were. Connecting to Ray ...")
    with ray_session():
        note("Waiting for an engine ...")
        heartbeat.wait_for(ENGINE)
        scorer = _shared_scorer(preflight)
        heartbeat.wait_for(None)
        execute(store, writer, preflight, scorer, work_dir=work_dir, heartbeat=heartbeat, view=view)


def _shared_scorer(preflight: PreflightResult) -> Scorer:
    return deploy_scorer(
        preflight.family,
        preflight.engine_options,
        replicas=preflight.study.engine.replicas,
        keep_idle_s=KEEP_IDLE_S,
    )


def _wait(writer: StudyWriter, heartbeat: Heartbeat, reason: str) -> None:
    logger.error("waiting: %s", reason)
    try:
        heartbeat.wait_for(f"its next driver: {reason}")
        heartbeat.discount()
        writer.set_waiting(reason)
    except StaleAttempt as error:
        logger.info("%s", error)


def _end(writer: StudyWriter, state: StudyState, reason: str) -> None:
    logger.error("%s: %s", state.value, reason)
    try:
        writer.set_state(state, reason)
    except StaleAttempt as error:
        logger.info("%s", error)


if __name__ == "__main__":
    sys.exit(main())
