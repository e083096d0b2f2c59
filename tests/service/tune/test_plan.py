"""The baselines of a continued study: those of its beginning, even if this version has another list."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.baselines import all_baselines
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.tune.plan import Baseline, baselines_of
from service.types import Origin, TrialRecord, TrialState
from tests.mid_rung import write_database
from tests.service.tune.harness import make_plan

KNOWN = make_plan("s").baselines


def stored(baselines: tuple[Baseline, ...]) -> list[TrialRecord]:
    return [
        TrialRecord(number, origin, label, TrialState.WAITING, recipe)
        for number, (origin, label, recipe) in enumerate(baselines)
    ]


def test_a_new_study_has_the_list_of_this_version() -> None:
    assert baselines_of([], KNOWN, has_begun=False) == KNOWN


def test_a_search_that_has_begun_keeps_its_own_list() -> None:
    begun = [*stored(KNOWN[:4]), TrialRecord(4, Origin.SEARCH, "trial 4", TrialState.WAITING, KNOWN[0][2])]
    assert baselines_of(begun, KNOWN, has_begun=True) == KNOWN[:4]
    assert baselines_of(list(reversed(begun)), KNOWN, has_begun=True) == KNOWN[:4]


@pytest.mark.parametrize("num_stored", range(len(KNOWN) + 1))
def test_kill_before_the_search(num_stored: int) -> None:
    """A study killed before its search began continues to the same list."""
    assert baselines_of(stored(KNOWN[:num_stored]), KNOWN, has_begun=False) == KNOWN


def test_stored_order_keeps_numbers() -> None:
    """Recipes that were stored in another order keep their numbers."""
    other = (*KNOWN[:4], KNOWN[-1])
    assert baselines_of(stored(other), KNOWN, has_begun=False) == (*other, *KNOWN[4:-1])


def test_earlier_versions_baselines_stay(tmp_path: Path) -> None:
    """A study of an earlier version keeps the baselines of that version."""
    write_database(tmp_path / "study.db", data_dir=tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    (record,) = store.jobs()
    trials = store.trials(record.id)
    experts = tuple(alias for alias in ResolvedStudy.of(record).fingerprints if alias != "base")
    known = tuple(
        (Origin(origin), label, recipe)
        for origin, label, recipe in all_baselines(
            base="base",
            experts=experts,
            fingerprints=ResolvedStudy.of(record).fingerprints,
            num_layers=ResolvedStudy.of(record).num_layers,
        )
    )
    assert store.brackets(record.id), "its search has begun"
    found = baselines_of(trials, known, has_begun=True)
    first_searched = min(trial.number for trial in trials if trial.origin is Origin.SEARCH)
    assert len(found) == first_searched < len(known)
    assert [recipe.digest for _, _, recipe in found] == [trial.recipe.digest for trial in trials[:first_searched]]
    store.close()
