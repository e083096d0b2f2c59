"""Studies whose policies (networks that build merges) are initialised with the trained policies of another study.

When the new study first runs, the policies that the other study has at that time are stored as artifacts of the new
study. The digests of the policies are stored as one of its documents. Therefore the new study can be resumed even if
the other study has changed or was deleted.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.spaces.layer_paths import MERGED, LayerPaths
from search_spaces.study.file import Study
from service.disk import artifacts_dir
from service.errors import Conflict, NotFound, StudyFailed
from service.resolved_study import ResolvedStudy
from service.store import JobWriter, Store
from service.store.artifacts import ArtifactStore
from service.store.documents import POLICY_START, PolicyStart, StartPolicy, read_policy_start
from service.studies.chains import OpenStudy
from service.studies.policies.stored import stored_policies
from service.studies.preflight.result import PreflightResult
from service.tune.proposing.checkpoints import read_policy, store_policy
from service.tune.searchers.base import SearchSetting
from service.tune.searchers.hm3 import SAME_WEIGHT, action_of, paths_of
from service.types import JobRecord, JobState

__all__ = ["check_start", "with_start"]


def check_start(preflight: PreflightResult, *, open_study: OpenStudy, artifacts_in: str | Path) -> None:
    """Check the trained policies of another study with which a study's search starts: they must exist and fit.

    `preflight` is the checked study. `search.hm3.start` in its study file names the other study; a study without this
    option always passes. `open_study` opens the other study. `artifacts_in` is the location of the server's artifacts
    (files that jobs store), among which are the policies. Raises InvalidStudy if the policies do not exist, or do not
    fit the study.
    """
    if preflight.study.search.hm3.start is None:
        return
    try:
        _found(preflight, open_study, artifacts_in)
    except (NotFound, Conflict) as error:
        raise InvalidStudy((Problem("search.hm3.start", str(error)),)) from error


def with_start(
    preflight: PreflightResult,
    store: Store,
    writer: JobWriter,
    *,
    artifacts: ArtifactStore,
    open_study: OpenStudy,
) -> PreflightResult:
    """Load the trained policies of another study, as the initial policies of a study.

    `search.hm3.start` in the study file names the other study. At the study's first run the policies are copied to the
    study's own artifacts (stored files); later runs read these copies. Returns `preflight`, the checked study, with the
    policies' checkpoints in the field `start`, one for each policy. If the study file names no other study, `preflight`
    is returned unchanged. `open_study` opens the other study, and `writer` stores a record of the copies in `store`.
    Raises StudyFailed if the policies cannot be used; the study is then stored as FAILED, with the reason.
    """
    if preflight.study.search.hm3.start is None:
        return preflight
    study_id = writer.job_id
    try:
        start = read_policy_start(store.document(study_id, POLICY_START))
        if start is None:
            start, checkpoints = _found(preflight, open_study, artifacts.location)
            for number, content in enumerate(checkpoints):
                store_policy(artifacts, study_id, _artifact(number), content)
            writer.set_document_named(POLICY_START, asdict(start))
        kept = tuple(
            read_policy(artifacts, study_id, _artifact(number), digest=policy.digest)
            for number, policy in enumerate(start.policies)
        )
    except (NotFound, Conflict) as error:
        reason = f"search.hm3.start: {error}"
        writer.set_state(JobState.FAILED, reason)
        raise StudyFailed(reason) from error
    return replace(preflight, start=kept)


def _artifact(number: int) -> str:
    return f"hm3-start-{number}"


def _found(
    preflight: PreflightResult, open_study: OpenStudy, artifacts_in: str | Path
) -> tuple[PolicyStart, tuple[bytes, ...]]:
    """Find the policies of another study that are to be the initial policies of a new study.

    `preflight` is the checked new study, whose option `search.hm3.start` names the other study; `open_study` opens it.
    Returns a description of the policies, and their checkpoints; description and checkpoints have one entry for each
    policy of the new study. `artifacts_in` is the location of the server's artifacts (files that jobs store). If the
    other study was run by `mergesearch run`, its artifacts are in the directory of that run. Raises NotFound if there
    is no such study, and Conflict if its policies do not fit.
    """
    start = preflight.study.search.hm3.start
    assert start is not None
    with open_study(start) as (store, record):
        _check_searcher(record)
        other = Study.model_validate(record.document)
        _check_shapes(preflight, record, other)
        place = artifacts_in if start.dir is None else artifacts_dir(Path(start.dir))
        setting, checkpoints = stored_policies(store, record, other, ArtifactStore(store, place))
    if not checkpoints:
        raise Conflict(f"study {record.name!r}: no policy has been learned yet, or its files are gone from {place}")
    iterations = _iterations(preflight, record, setting, checkpoints)
    kept = tuple(checkpoints[number] for number in iterations)
    _check_actions(preflight, record, kept)
    digests = (hashlib.sha256(content).hexdigest() for content in kept)
    return PolicyStart(record.id, record.name, tuple(map(StartPolicy, iterations, digests))), kept


def _iterations(
    preflight: PreflightResult, record: JobRecord, other: SearchSetting, checkpoints: dict[int, bytes]
) -> list[int]:
    """Choose the checkpoint of another study with which each policy of a new study starts.

    A checkpoint is given by the training iteration in the other study after which it was saved. If the new study has
    one policy for each preference vector (weights of the objectives), each policy takes the latest checkpoint that the
    other study's policy for the same vector has. If the new study has a single policy for all vectors, this policy
    takes the latest of all checkpoints. `preflight` is the checked new study. `record` and `other` are the job and the
    setting of the other study, and `checkpoints` contains its checkpoints, keyed by iteration. Raises Conflict if the
    other study has no policy for one of the vectors.
    """
    if preflight.study.search.hm3.policy == "conditioned":
        return [max(checkpoints)]
    known = other.vectors
    own = preflight.search_setting(num_baselines=0).vectors
    found = []
    for vector in own:
        usable = [
            number
            for number in checkpoints
            if all(abs(a - b) < SAME_WEIGHT for a, b in zip(known[number % len(known)], vector, strict=True))
        ]
        if not usable:
            raise Conflict(
                f"study {record.name!r}: has no policy for the preference vector {_text(vector)} (policy: "
                f"per_preference); it has those for {'; '.join(map(_text, known))}; give these, or begin with a study "
                "of policy: conditioned"
            )
        found.append(max(usable))
    return found


def _text(vector: tuple[float, ...]) -> str:
    return ", ".join(f"{weight:g}" for weight in vector)


def _check_searcher(record: JobRecord) -> None:
    searcher = ResolvedStudy.of(record).algorithm
    if searcher != "hm3":
        raise Conflict(f"study {record.name!r}: its searcher is {searcher}; only hm3 trains policies to begin with")


def _check_actions(preflight: PreflightResult, record: JobRecord, kept: tuple[bytes, ...]) -> None:
    """Check that an earlier study's policies have the same kind of action (`search.hm3.action`) as the new study's.

    `record` is the earlier study's job, and `kept` has the checkpoints of its policies. `preflight` is the checked new
    study. Raises Conflict if the kinds differ.
    """
    from workers.training.hm3.learner import action_in

    paths, setting = preflight.space.parameters.structure, preflight.search_setting(num_baselines=0)
    assert isinstance(paths, LayerPaths), "hm3 searches layer paths"
    own = action_of(paths, setting)
    if wrong := sorted({str(action_in(content)) for content in kept} - {own}):
        raise Conflict(
            f"study {record.name!r}: its policies were trained with action: {wrong[0]}, this study's have action: "
            f"{own}; write search.hm3.action: {wrong[0]}"
        )


def _check_shapes(preflight: PreflightResult, record: JobRecord, other: Study) -> None:
    """Check that the policies of the study `other` have the same network inputs and outputs as those of the new study.

    The study `other` must have trained policies itself. Both studies must have the same kind of policy, number of
    layers, and number of objectives. If both studies have the same objectives, the objectives must be in the same
    order. `preflight` is the checked new study, and `record` is the job of `other`. Raises Conflict if a condition is
    not met.
    """
    where = f"study {record.name!r}: "
    ours, theirs = preflight.study.search.hm3, other.search.hm3
    if not theirs.learns:
        raise Conflict(
            f"{where}learns no policy of its own (search.hm3.learns: false); begin with the study "
            "whose policies it begins with"
        )
    for name in ("policy", "knows_models"):
        if getattr(ours, name) != getattr(theirs, name):
            given, own = (str(getattr(each, name)).lower() for each in (theirs, ours))
            raise Conflict(f"{where}its networks have {name}: {given}, this study's have {name}: {own}; write {given}")
    own_layers, layers = preflight.models.num_layers, ResolvedStudy.of(record).num_layers
    if own_layers != layers:
        raise Conflict(f"{where}its networks are for models of {layers} layers; these have {own_layers}")
    known = tuple(spec.name for spec in other.scored_objectives.values())
    names = tuple(preflight.tasks.search)
    if len(known) != len(names):
        raise Conflict(
            f"{where}its networks are for {len(known)} objectives ({', '.join(known)}); this study has {len(names)} "
            f"({', '.join(names)})"
        )
    if known != names and sorted(known) == sorted(names):
        raise Conflict(f"{where}its objectives are in the order {', '.join(known)}; write them in that order")
    if ours.knows_models:
        _check_models(preflight, record, other, where)


def _check_models(preflight: PreflightResult, record: JobRecord, other: Study, where: str) -> None:
    """Check that policies which know models by learned embeddings were trained for the new study's models.

    `preflight` is the checked new study. `other` is the study that trained the policies, `record` is its job, and
    `where` is the beginning of the error message. Raises Conflict if the models or their order differ.
    """
    space = other.search_space
    chosen = getattr(space, "models", None) or tuple(other.models.experts)
    known = (*chosen, MERGED) if getattr(space, "merged", None) is not None else tuple(chosen)
    own = paths_of(preflight.space.parameters).models
    before, now = ResolvedStudy.of(record).fingerprints, preflight.models.family.fingerprints
    if known != own or any(before[name] != now[name] for name in own if name != MERGED):
        raise Conflict(
            f"{where}its networks know its own models ({', '.join(known)}) and no others; this study has "
            f"{', '.join(own)}: begin with a study of knows_models: false"
        )
