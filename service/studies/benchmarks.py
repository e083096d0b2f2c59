"""Benchmarks that are added to a study after it was created: the study file with them, and their checks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.benchmarks import BenchmarkSpec
from search_spaces.study.file import Study, with_benchmarks
from service.resolved_study import ResolvedStudy
from service.studies.preflight.files import check_files, file_path_problem, no_file_problem, task_files
from service.studies.preflight.tasks import benchmarks_of, check_tasks
from service.types import JobRecord
from workers.file_access import FileAccess

__all__ = ["check_added", "on_trial", "study_with"]

logger = logging.getLogger(__name__)


def on_trial(specs: Sequence[BenchmarkSpec], trial: int | str | None) -> tuple[BenchmarkSpec, ...]:
    """The benchmarks, to be scored on one trial: its number, or "best". None leaves the choice to each of them."""
    if trial is None:
        return tuple(specs)
    return tuple(spec.model_copy(update={"trials": (trial,)}) for spec in specs)


def study_with(record: JobRecord, specs: Sequence[BenchmarkSpec], *, trials: Collection[int]) -> Study:
    """The study file of a stored study with more benchmarks.

    `trials` are the numbers of the study's trials. Raises InvalidStudy if a benchmark names another trial, or has the
    name of one of the study's with another task or metric.
    """
    study = with_benchmarks(Study.model_validate(record.document), specs)
    unknown = [
        Problem(f"benchmarks.{index}.trials.{place}", f"{choice} is not the number of a trial of {record.name!r}")
        for index, spec in enumerate(specs)
        for place, choice in enumerate(spec.trials)
        if isinstance(choice, int) and choice not in trials
    ]
    if unknown:
        raise InvalidStudy(tuple(unknown))
    return study


def check_added(document: Mapping[str, Any], accepted: Mapping[str, Any], access: FileAccess | None) -> None:
    """Check the benchmarks of a study file that are to be added to a stored study on a server.

    `accepted` are the facts that were stored when the study was created. Files must be allowed by `access`, which the
    server allows now, and by what was stored with the study. The study's models and other tasks are not checked again.
    Raises InvalidStudy with every problem.
    """
    study = Study.model_validate(document)
    of_benchmarks = {place: file for place, file in task_files(study) if place.startswith("benchmarks.")}
    found = {place: file_path_problem(file) for place, file in of_benchmarks.items()}
    _refuse(found)
    for allowed in (access, ResolvedStudy.from_json(accepted).access):
        check_files(study.model_copy(update={"objectives": (), "holdout": ()}), allowed, with_models=False)
    _refuse({place: no_file_problem(file) for place, file in of_benchmarks.items()})
    problems: list[Problem] = []
    try:
        tasks, infos = check_tasks(dict(enumerate(study.benchmarks)), "benchmarks", study, problems, access=access)
        benchmarks_of(study, tasks, infos, problems)
    except Exception as error:  # a task is code and data of any origin, and the driver would fail too
        logger.exception("benchmarks could not be checked")
        message = f"the benchmarks could not be checked: {type(error).__name__}: {error}"
        raise InvalidStudy((Problem("benchmarks", message),)) from error
    if problems:
        raise InvalidStudy(tuple(problems))


def _refuse(found: Mapping[str, str | None]) -> None:
    if problems := tuple(Problem(place, text) for place, text in found.items() if text):
        raise InvalidStudy(problems)
