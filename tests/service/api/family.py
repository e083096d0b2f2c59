"""Finished studies whose models a server can open: of the shipped family, and of image classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from search_spaces.study.file import load_study, parse_study
from service.store import Store
from service.studies.preflight.examine import examine
from service.studies.preflight.result import PreflightResult
from service.types import JobRecord, JobState, Origin, RungRecord, TrialRecord, TrialState
from tests.end_to_end.studies import LFS, image_study, write_image_models
from tests.service.api.harness import FAMILY


def image_document(directory: Path) -> dict[str, Any]:
    """The file of a study of image classifiers, whose models and images are written into `directory`."""
    return image_study(write_image_models(directory), LFS, fidelity={"scheduler": "hyperband", "rungs": [4, 12, 36]})


def _sixth_is_best(number: int, objective: str) -> float:
    return 0.9 if number == 6 else 0.1


@cache
def family_preflight() -> PreflightResult:
    """The preflight of the shipped family's study, whose models do not change."""
    return examine(load_study(FAMILY / "study.yaml"))


def family_study(
    store: Store,
    document: Mapping[str, Any] | None = None,
    *,
    value: Callable[[int, str], float] = _sixth_is_best,
) -> JobRecord:
    """A finished study of the shipped family, or of `document`, with its baselines.

    `value` is the value of a trial's number for an objective; by default number 6 is best.
    """
    preflight = family_preflight() if document is None else examine(parse_study(document))
    study = preflight.study
    record = store.create_job(
        kind="search", name=study.name, document=study.canonical(), accepted=preflight.resolved().to_json()
    )
    writer = store.open_attempt(record.id)
    for number, (_, label, recipe) in enumerate(preflight.baselines()):
        writer.add_trial(TrialRecord(number, Origin.PUBLISHED, label, TrialState.WAITING, recipe))
        values = {objective: value(number, objective) for objective in preflight.tasks.search}
        finished = RungRecord(2, preflight.budget.rung_samples[-1], values, dict.fromkeys(values, 0.01))
        writer.finish_rung(number, finished, samples_reused=0, state=TrialState.COMPLETE)
    writer.set_state(JobState.COMPLETE)
    return store.job(record.id)
