"""The policies that a study has learned, as its store and its artifacts hold them."""

from __future__ import annotations

from search_spaces.study.file import Study
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.tune.proposing.checkpoints import PolicyCheckpoints
from service.tune.searchers.base import SearchSetting
from service.tune.searchers.hm3 import SEARCHER
from service.tune.steps import Step
from service.types import JobRecord
from workers.types import Family

__all__ = ["stored_policies"]


def stored_policies(
    store: Store, record: JobRecord, study: Study, artifacts: ArtifactStore, *, family: Family | None = None
) -> tuple[SearchSetting, dict[int, bytes]]:
    """What the searcher of a study knew of it, and its policies' checkpoints by the iteration that they learned from
    last."""
    objectives = tuple(spec.name for spec in study.scored_objectives.values())
    given = study.search.preferences
    setting = SearchSetting(
        objectives=objectives,
        num_samples={},
        num_baselines=0,
        options=study.search.gradient,
        preferences=() if given is None else given.weights(objectives, seed=study.search.seed),
        policy=study.search.hm3,
        family=family,
    )
    steps = [Step.from_json(row.number, row.proposal, row.document) for row in store.steps(record.id)]
    return setting, PolicyCheckpoints(artifacts, record.id, SEARCHER, setting).load(steps)
