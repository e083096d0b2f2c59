"""The driver's work on one stored fine-tuning: it continues from the stored state to the end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from service.disk import data_dir_of
from service.errors import Conflict
from service.jobs.base import Attempt
from service.jobs.finetune.analysis import store_analysis
from service.jobs.finetune.directory import EXPERT_DIR, RAY_DIR, SPEC_FILE, WRITER_LOCK
from service.jobs.finetune.events import storing_events
from service.jobs.finetune.request import access_of, check_finetune_files
from service.jobs.finetune.study import begin_study
from service.jobs.finetune.training import run_fleet
from service.types import JobState
from workers.errors import InvalidModel, InvalidTask, TrainingFailed
from workers.training.finetuning.fleet import parse_pipeline
from workers.training.finetuning.history import CHECKPOINTS, LINEARIZED, VALUES

__all__ = ["work"]


def work(attempt: Attempt) -> None:
    """Train the experts (models to be merged) of a fine-tuning, and store each under its alias (name) in the job.

    `attempt` is this driver's work on the fine-tuning; earlier drivers may have done a part. An analysis and a study of
    the experts follow if the specification has them. Raises Conflict if models or data cannot be used or a training
    fails, because every later driver would have the same problem.
    """

    def keep(alias: str, summary: Mapping[str, Any]) -> None:
        facts = {name: summary[name] for name in ("method", "steps", "loss", VALUES)}
        if LINEARIZED in summary:  # of the method tangent
            facts[LINEARIZED] = summary[LINEARIZED]
        artifacts.put(writer.job_id, alias, places[alias] / EXPERT_DIR, facts=facts)
        heartbeat.progressed()

    def count_gpus(side_by_side: int) -> None:
        workers = sorted((spec.workers for spec in pipeline.experts.values()), reverse=True)
        heartbeat.num_gpus = sum(workers[:side_by_side])

    store, writer, heartbeat, artifacts = attempt.store, attempt.writer, attempt.heartbeat, attempt.artifacts
    note = attempt.progressed
    job = attempt.job
    access = access_of(job)
    pipeline = parse_pipeline(job.document)
    check_finetune_files(pipeline, access)
    places = pipeline.places(attempt.work_dir)
    writer.set_state(JobState.RUNNING)
    try:
        with storing_events(store, writer, heartbeat, places, spec_file=SPEC_FILE, worker_file=WRITER_LOCK):
            run_fleet(
                pipeline.experts,
                places,
                resources=attempt.resources,
                parallel=pipeline.parallel_experts,
                note=note,
                begins=count_gpus,
                finished=keep,
                access=access,
            )
    except (InvalidModel, InvalidTask, TrainingFailed) as error:
        raise Conflict(str(error)) from error
    store_analysis(store, writer, heartbeat, pipeline, places, note=note, access=access)
    if pipeline.study is not None:
        note("Checking the study of the experts ...")
        begin_study(store, writer, pipeline, artifacts, data_dir_of(attempt.work_dir))
    heartbeat.send()  # the last progress
    writer.set_state(JobState.COMPLETE)
    for place in places.values():  # the trained experts are stored as artifacts, the other files are no longer needed
        for name in (EXPERT_DIR, CHECKPOINTS, RAY_DIR):
            shutil.rmtree(place / name, ignore_errors=True)
