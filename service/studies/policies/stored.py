"""Reads a study's trained policies from its store and its artifacts (stored files)."""

from __future__ import annotations

from search_spaces.study.file import Study
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.tune.proposing.checkpoints import PolicyCheckpoints
from service.tune.searchers.base import SearchSetting
from service.tune.searchers.hm3 import SEARCHER
from service.types import JobRecord
from workers.types import Family

__all__ = ["stored_policies"]


def stored_policies(
    store: Store, record: JobRecord, study: Study, artifacts: ArtifactStore, *, family: Family | None = None
) -> tuple[SearchSetting, dict[int, bytes]]:
    """Read the policies that a study has trained, from its store and its artifacts (stored files).

    `record` is the study's job in `store`, and `study` is its study file. Returns the facts about the study that its
    searcher needs, and the policies' checkpoints, keyed by the training iteration that they were saved after. `family`
    has the models from whose layers a policy will build merges; None if only the checkpoints are needed.
    """
    objectives = tuple(spec.name for spec in study.scored_objectives.values())
    given = study.search.preferences
    setting = SearchSetting(
        objectives=objectives,
        num_samples={},
        num_baselines=0,
        options=study.search,
        preferences=() if given is None else given.weights(objectives, seed=study.search.seed),
        family=family,
        version=ResolvedStudy.of(record).searcher_version,
    )
    return setting, PolicyCheckpoints(artifacts, record.id, SEARCHER, setting).load(store.steps(record.id))
