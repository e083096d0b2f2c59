"""The baselines of a study that goes on: those that it began with, whatever this version's list is."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.baselines import sources_and_published
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
def test_one_that_was_killed_before_its_search_began_goes_on_to_the_same_list(num_stored: int) -> None:
    assert baselines_of(stored(KNOWN[:num_stored]), KNOWN, has_begun=False) == KNOWN


def test_recipes_that_were_stored_in_another_order_keep_their_numbers() -> None:
    other = (*KNOWN[:4], KNOWN[-1])
    assert baselines_of(stored(other), KNOWN, has_begun=False) == (*other, *KNOWN[4:-1])


def test_a_study_of_an_earlier_version_has_the_baselines_of_that_version(tmp_path: Path) -> None:
    write_database(tmp_path / "study.db", data_dir=tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    (record,) = store.jobs()
    trials = store.trials(record.id)
    experts = tuple(alias for alias in record.resolved.fingerprints if alias != "base")
    known = tuple(
        (Origin(origin), label, recipe)
        for origin, label, recipe in sources_and_published(
            base="base",
            experts=experts,
            fingerprints=record.resolved.fingerprints,
            num_layers=record.resolved.num_layers,
        )
    )
    assert store.brackets(record.id), "its search has begun"
    found = baselines_of(trials, known, has_begun=True)
    first_searched = min(trial.number for trial in trials if trial.origin is Origin.SEARCH)
    assert len(found) == first_searched < len(known)
    assert [recipe.digest for _, _, recipe in found] == [trial.recipe.digest for trial in trials[:first_searched]]
    store.close()
