"""Warm starts: studies whose searcher uses the results of an earlier study from its first proposal on.

When the new study first runs, the observations that the earlier study has at that time are stored as an artifact of the
new study. The origin of the observations is stored as one of its documents. Therefore the new study can be resumed even
if the earlier study has changed or was deleted. The observations are not trials of the new study, and are not among its
results.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from search_spaces.errors import InvalidStudy, Problem, SearchSpaceError
from search_spaces.objectives import Objective
from search_spaces.study.file import Study, same_but_limits
from service.errors import Conflict, NotFound, StudyFailed
from service.resolved_study import ResolvedStudy
from service.store import JobWriter, Store
from service.store.artifacts import ArtifactStore
from service.store.documents import WARM_START, WarmStart, read_warm_start
from service.studies.chains import OpenStudy
from service.studies.preflight.result import PreflightResult
from service.studies.preflight.tasks import earlier_form
from service.tune.feasibility import Feasibility
from service.tune.plan import Plan
from service.tune.samples.sample_cache import SampleCache
from service.tune.searchers.base import Observation
from service.types import JobRecord, JobState, Origin, TrialRecord, TrialState
from workers.types import TaskSpec

__all__ = ["check_warm_start", "with_warm_start"]

ARTIFACT, FILE = "warm-start", "observations.json.gz"


def check_warm_start(preflight: PreflightResult, *, open_study: OpenStudy) -> None:
    """Check the results of an earlier study with which a study starts its search: they must exist and fit the study.

    `preflight` is the checked study. `search.warm_start` in its study file names the earlier study; a study without
    this option always passes. `open_study` opens the earlier study. Raises InvalidStudy if the results do not exist or
    do not fit the study.
    """
    if preflight.study.search.warm_start is None:
        return
    try:
        _found(preflight, preflight.resolved(), open_study)
    except (NotFound, Conflict) as error:
        raise InvalidStudy((Problem("search.warm_start", str(error)),)) from error


def with_warm_start(
    preflight: PreflightResult,
    store: Store,
    writer: JobWriter,
    *,
    artifacts: ArtifactStore,
    open_study: OpenStudy,
) -> PreflightResult:
    """Load the results of an earlier study that a study's searcher may use from its first proposal on.

    `search.warm_start` in the study file names the earlier study. At the study's first run the results are copied to
    the study's own artifacts (stored files); later runs read this copy. Returns `preflight`, the checked study, with
    the results in the field `observed`. If the study file names no earlier study, `preflight` is returned unchanged.
    `open_study` opens the earlier study, and `writer` stores a record of the copy in `store`. Raises StudyFailed if the
    results cannot be used; the study is then stored as FAILED, with the reason.
    """
    if preflight.study.search.warm_start is None:
        return preflight
    study_id = writer.job_id
    try:
        start = read_warm_start(store.document(study_id, WARM_START))
        if start is None:
            start, content = _found(preflight, ResolvedStudy.of(store.job(study_id)), open_study)
            with TemporaryDirectory() as temporary:
                (Path(temporary) / FILE).write_bytes(content)
                digest = artifacts.put(study_id, ARTIFACT, Path(temporary)).digest
            start = replace(start, digest=digest)
            writer.set_document_named(WARM_START, asdict(start))
        kept = _read(artifacts, study_id, start)
    except (NotFound, Conflict) as error:
        reason = f"search.warm_start: {error}"
        writer.set_state(JobState.FAILED, reason)
        raise StudyFailed(reason) from error
    return replace(preflight, observed=kept)


def _read(artifacts: ArtifactStore, study_id: str, start: WarmStart) -> tuple[Observation, ...]:
    """Read the stored results of an earlier study with which a study starts, in the order of the earlier trials.

    The results are an artifact, in `artifacts`, of the study `study_id`. `start` has the digest that the stored file
    must have. The earlier trials have negative numbers, so that they come before the trials of this study. Raises
    NotFound if no results are stored, and Conflict if the stored results differ from the results with which the study
    began.
    """
    record = artifacts.get(study_id, ARTIFACT)
    if record.digest != start.digest:
        raise Conflict(f"artifact {ARTIFACT!r} has other content than the study began with")
    with TemporaryDirectory() as temporary:
        place = artifacts.write_to(record, Path(temporary) / ARTIFACT)
        trials = json.loads(gzip.decompress((place / FILE).read_bytes()))
    return tuple(
        Observation(
            trial["configuration"],
            result["fidelity"],
            None if result["costs"] is None else tuple(result["costs"]),
            number=index - len(trials),
            rung=result["rung"],
            standard_errors=tuple(result["standard_errors"]),
            constraints=tuple(result["constraints"]),
            is_proposed=False,
        )
        for index, trial in enumerate(trials)
        for result in trial["results"]
    )


def _found(preflight: PreflightResult, resolved: ResolvedStudy, open_study: OpenStudy) -> tuple[WarmStart, bytes]:
    """Find the results of the earlier study that `search.warm_start` in the study file names.

    `preflight` is the checked new study, `resolved` has the models, tasks and rungs that are stored with it, and
    `open_study` opens the earlier study. Returns two values: a description of the results, and the content of the file
    in which they will be stored. The description does not have the digest of this file yet.

    Raises NotFound if there is no such study. Raises Conflict if the earlier study has no results, or if the two
    studies differ in models, search space or objectives.
    """
    given = preflight.study.search.warm_start
    assert given is not None
    plan = preflight.plan("", resolved, baselines=())
    with open_study(given) as (store, record):
        if "rung_samples" not in record.accepted:
            raise Conflict(f"job {record.name!r}: is no study; give one that searches for merges")
        _check_same(preflight, record)
        trials = _results(preflight, plan, store, record, is_full_only=given.rungs == "full")
    if not trials:
        what = "at the full budget " if given.rungs == "full" else ""
        raise Conflict(f"study {record.name!r}: no trial of its search has a result {what}yet")
    num = sum(len(trial["results"]) for trial in trials)
    content = gzip.compress(json.dumps(trials).encode(), mtime=0)
    return WarmStart(record.id, record.name, given.rungs, len(trials), num, ""), content


def _results(
    preflight: PreflightResult, plan: Plan, store: Store, record: JobRecord, *, is_full_only: bool
) -> list[dict[str, Any]]:
    """The configurations and results of the trials that an earlier study's search proposed, as JSON for a new study.

    `preflight` is the checked new study, and `plan` is its plan. `record` is the earlier study's job in `store`. Costs
    and constraints are computed by the new study's objectives. The fidelity of a result is its number of samples as a
    share of the new study's full budget, at most 1. Trials that a user has marked as invalid are left out. If
    `is_full_only` is True, results at lower rungs (fewer samples) are left out. Raises Conflict if a configuration is
    outside the new study's search space.
    """
    before = replace(plan, study_id=record.id, rung_samples=ResolvedStudy.of(record).rung_samples)
    trials = {trial.number: trial for trial in store.trials(record.id)}
    feasibility = _feasibility(before, trials, store, record)
    full, last = sum(plan.rung_samples[-1].values()), len(before.rung_samples) - 1
    found = []
    for trial in trials.values():
        if trial.origin is not Origin.SEARCH or trial.configuration is None or trial.invalid is not None:
            continue
        try:
            preflight.space.parameters.check(trial.configuration)
        except SearchSpaceError as error:
            where = f"study {record.name!r}: trial {trial.number}"
            raise Conflict(f"{where} is outside this search space: {error}") from error
        results: list[dict[str, Any]] = [
            {
                "rung": each.rung,
                "fidelity": min(1.0, sum(before.rung_samples[each.rung].values()) / full),
                "costs": before.costs(each.values),
                "standard_errors": before.cost_errors(each.standard_errors),
                "constraints": feasibility.values(trial.number, each.rung),
            }
            for each in trial.rungs
            if each.rung == last or not is_full_only
        ]
        if trial.state is TrialState.FAIL:
            results.append(
                {"rung": last, "fidelity": 1.0, "costs": None, "standard_errors": (), "constraints": ()},
            )
        if results:
            found.append({"trial": trial.number, "configuration": dict(trial.configuration), "results": results})
    return found


def _feasibility(plan: Plan, trials: Mapping[int, TrialRecord], store: Store, record: JobRecord) -> Feasibility:
    """Make the object that evaluates the new study's constraints on the trials of an earlier study.

    `trials` are the earlier study's trials, keyed by number, and `record` is its job in `store`. `plan` is the new
    study's plan, with the earlier study's rungs (numbers of samples at which trials are compared). A constraint may
    bound a trial's value relative to a source model's value; both are then computed on the samples of the same rung.
    Raises Conflict if such a source model has not been scored in the earlier study.
    """
    feasibility = Feasibility(plan.objectives, trials)
    try:
        is_known = feasibility.is_known()
    except StudyFailed as error:
        raise Conflict(f"study {record.name!r}: {error}") from error
    if not is_known:
        raise Conflict(
            f"study {record.name!r}: the source models that search.constraints name are not scored there yet"
        )
    if any(constraint.reference is not None for o in plan.objectives for constraint in o.constraints):
        samples = SampleCache(plan, store)
        for trial in trials.values():
            if trial.origin is Origin.SOURCE and trial.state is TrialState.COMPLETE:
                lower = (samples.rung_record(trial.recipe, rung) for rung in range(len(plan.rung_samples) - 1))
                feasibility.know(trial.number, {each.rung: each.values for each in lower})
    return feasibility


def _check_same(preflight: PreflightResult, record: JobRecord) -> None:
    """Check that the new study `preflight` can use the results of the earlier study `record`.

    Both studies must have the same models, search space, preference vectors (weights of the objectives) and objectives.
    Raises Conflict with all differences.
    """
    study, other = preflight.study, Study.model_validate(record.document)
    theirs, ours = ResolvedStudy.of(record), preflight.models.family.fingerprints
    differing = _differing("model", theirs.fingerprints, ours)
    differing += [
        field
        for field in same_but_limits(other, study)
        if field.startswith("search_space.") or field in ("models.tokenizer", "limits.max_layers")
    ]
    if _weights(other) != _weights(study):
        differing.append("search.preferences")
    digests = {name: _digest(spec, theirs.tasks.get(name)) for name, spec in preflight.tasks.search.items()}
    differing += _differing(
        "objective",
        {o.name: _meaning(o, theirs.tasks) for o in theirs.objectives},
        {o.name: _meaning(o, digests) for o in preflight.tasks.objectives},
    )
    if differing:
        raise Conflict(
            f"study {record.name!r}: its results cannot be used here, because these differ: {', '.join(differing)}; a "
            "warm start needs the same models, search space and objectives"
        )


def _digest(task: TaskSpec, stored: str | None) -> str:
    """Digest of `task` for a comparison with `stored`, the digest that an earlier study stored for its task.

    If an earlier version of the program stored it, the result has the form of that version.
    """
    if stored in (None, task.digest):
        return task.digest
    earlier = earlier_form(task).digest
    return earlier if earlier == stored else task.digest


def _differing(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Names of the entries that differ between an earlier study (`theirs`) and the new study (`ours`).

    Each name follows the word `what`, as in "model math". A name that only the earlier study has is followed by "(only
    there)", and a name that only the new study has is followed by "(only here)".
    """
    lacks = dict.fromkeys(theirs.keys() - ours, " (only there)") | dict.fromkeys(ours.keys() - theirs, " (only here)")
    names = sorted(name for name in theirs.keys() | ours if name in lacks or theirs[name] != ours[name])
    return [f"{what} {name}{lacks.get(name, '')}" for name in names]


def _meaning(objective: Objective, tasks: Mapping[str, str]) -> tuple[Any, ...]:
    """The properties of an objective that two studies must share for its values to be comparable.

    These properties are metric, direction, range, task, and whether the objective counts the recipe's layers or
    parameters. `tasks` contains the digest of each task, keyed by the objective's name. Constraints are left out,
    because the new study evaluates its own constraints.
    """
    o = objective
    return o.metric, o.direction, o.bounds, o.cost_of_recipe, tasks.get(o.name)


def _weights(study: Study) -> tuple[tuple[float, ...], ...] | None:
    """The preference vectors (importances of the objectives) of a study, or None if the study file has none.

    A vector has the weight of each objective with a task, in the order of the study file.
    """
    given = study.search.preferences
    names = tuple(spec.name for spec in study.scored_objectives.values())
    return None if given is None else given.weights(names, seed=study.search.seed)
