"""Edits of a stored study: the options of its study file that may change while it runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.searchers import SEARCHERS
from search_spaces.study.file import Study, parse_study
from service.errors import Conflict
from service.jobs.edit import JobEdit
from service.resolved_study import ResolvedStudy
from service.types import JobRecord, JobState, Origin

if TYPE_CHECKING:
    from service.store import Store

__all__ = ["StudyEdit", "edited"]


class LimitsEdit(BaseModel):
    """New limits of a study; these limits may change while the study runs.

    A limit that is not given keeps its value, and the value null removes the limit.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    max_samples: Annotated[int, Field(ge=1)] | None = None
    max_gpu_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_wall_clock_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class StudyEdit(JobEdit):
    """Body of a request that edits a study; options that are not in the body keep their values."""

    max_trials: Annotated[int, Field(ge=1, le=1_000_000, description="search.max_trials of the study file.")] = 1
    replicas: Annotated[int, Field(ge=1, le=10_000, description="engine.replicas of the study file.")] = 1
    limits: LimitsEdit = LimitsEdit()


def edited(record: JobRecord, edit: StudyEdit, store: Store) -> Mapping[str, Any]:
    """Return the study file of a stored study with the new values that a user gives to some of its options.

    `record` is the stored study, in the database `store`, and `edit` has the new values. Raises Conflict if an option
    changes although the study has ended without failing, or if `max_trials` changes although the search has ended or is
    asked to end. Raises InvalidStudy if a limit is below its present use, or if the study file would have another
    problem.
    """
    before = Study.model_validate(record.document)
    document = deepcopy(dict(record.document))
    if "max_trials" in edit.model_fields_set:
        document["search"]["max_trials"] = edit.max_trials
    if "replicas" in edit.model_fields_set:
        document["engine"]["replicas"] = edit.replicas
    if "limits" in edit.model_fields_set:
        document["limits"] |= edit.limits.model_dump(include=edit.limits.model_fields_set)
    if document == record.document:
        return document
    if record.state.is_finished and record.state is not JobState.FAILED:
        raise Conflict(
            f"study {record.id} is {record.state.value}; only the labels of a study that has ended can be edited; "
            "a new study can begin with its results (search.warm_start)"
        )
    after = parse_study(document)
    given = set(edit.limits.model_fields_set) if "limits" in edit.model_fields_set else set()
    if after.engine.replicas != before.engine.replicas:
        given.add("max_gpu_hours")  # they are counted with the present number of replicas
    if problems := (*_trial_problems(record, before, after, store), *_used_problems(record, after, given)):
        raise InvalidStudy(problems)
    return after.canonical()


def _trial_problems(record: JobRecord, before: Study, after: Study, store: Store) -> tuple[Problem, ...]:
    from service.tune.refinement_stage import has_begun

    now, then = before.search.max_trials, after.search.max_trials
    if now == then:
        return ()
    if has_begun(store.steps(record.id)):
        raise Conflict(f"study {record.id}: max_trials: the search has ended at {now}, and its front is refined")
    if record.stop_reason is not None:
        raise Conflict(f"study {record.id}: max_trials: the search is {record.stop_reason}")
    trials = store.trial_results(record.id)
    proposed = sum(trial.origin is Origin.SEARCH for trial in trials)
    if then < proposed:
        message = f"{then} is below the {proposed} trials that were proposed already; give {proposed} or more"
        return (Problem("max_trials", message),)
    searcher = SEARCHERS.get(ResolvedStudy.of(record).algorithm or "")
    if searcher is None or not (searcher.computes_steps or searcher.trains_policy):
        return ()
    if then < now:
        message = f"{then} is below {now}, by which the searcher has planned its steps; stop the search early instead"
        return (Problem("max_trials", message),)
    # These searchers know their trials by number, and the numbers of their next trials are taken.
    first = min((trial.number for trial in trials if trial.origin is Origin.SEARCH), default=math.inf)
    if later := [trial.number for trial in trials if trial.origin is Origin.USER and trial.number > first]:
        message = (
            f"{then} is above {now}, and users requested trials after the search ({', '.join(map(str, later))}); this "
            "searcher cannot go on after them: start a new study"
        )
        return (Problem("max_trials", message),)
    return ()


def _used_problems(record: JobRecord, after: Study, given: Collection[str]) -> tuple[Problem, ...]:
    """Problems of edited limits that are below the present use, for example of GPU hours.

    `record` is the stored study, and `after` is the edited study file. `given` has the names of the limits to check.
    """
    hours = record.wall_clock_s / 3600 * after.engine.num_gpus
    used = {
        "max_samples": int((record.progress or {}).get("samples_used", 0)),
        "max_gpu_hours": round(hours, 3),
        "max_wall_clock_s": round(record.wall_clock_s, 1),
    }
    found = ((name, getattr(after.limits, name), value) for name, value in used.items())
    return tuple(
        Problem(f"limits.{name}", f"{limit:g} is below the {value:g} that the study has used; give {value:g} or more")
        for name, limit, value in found
        if name in given and limit is not None and limit < value
    )
