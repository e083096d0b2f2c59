"""Checks of a study file without creating a study: of the file itself, or of everything, with the study's plan.

The functions `check_file` and `check_with_plan` have the signature of a job kind's `accept`, so that the processes that
check submitted jobs can run them. They import heavy modules only when they are called, because the server imports this
module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from service.jobs.base import Accepted, RequestContext

__all__ = ["CHECKS", "Level", "check_file", "check_with_plan"]

Level = Literal["syntax", "full"]


def check_file(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    """Check a study file without reading models and tasks: its keys, values, contradictions and paths.

    `document` is the content of the study file, and `context` says which files the study may name. The field `facts` of
    the result is empty. Raises InvalidStudy with every problem.
    """
    from service.jobs.search.request import read_study

    study = read_study(document, context)
    return Accepted(study.name, study.canonical(), {})


def check_with_plan(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    """Make all checks of a submitted study, without creating the study, and compute its plan.

    `document` is the content of the study file, and `context` says which files and other studies the study may read.
    The field `facts` of the result contains the plan: samples, hours, memory and disk space. Raises InvalidStudy with
    every problem.
    """
    from service.jobs.search.dry_run import checked_plan
    from service.jobs.search.prepare import prepared
    from service.jobs.search.request import read_study, studies_of

    study = read_study(document, context)
    with TemporaryDirectory() as temporary:
        preflight = prepared(
            study,
            open_study=studies_of(context),
            directory=Path(temporary),
            access=context.access,
            downloads=False,
            machines=context.machines,
            before_weights=context.lift_limits,
        )
        plan = checked_plan(study, preflight, context.data_dir or Path(temporary))
    facts = {
        "trials": plan.trials,
        "rungs": list(plan.rungs),
        "samples": asdict(plan.samples),
        "hours": {"least": plan.hours, "most": plan.most_hours},
        "memory_bytes": plan.memory_bytes,
        "disk_bytes": plan.disk_bytes,
        "absent_models": list(plan.absent_models),
        "judgments": plan.judgments,
        "text": plan.to_text(),
    }
    return Accepted(study.name, study.canonical(), facts)


CHECKS: Mapping[Level, Callable[[Mapping[str, Any], RequestContext], Accepted]] = {
    "syntax": check_file,
    "full": check_with_plan,
}
