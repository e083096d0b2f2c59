"""Reading a study of many trials: a page and the latest changes take the same time for any number of trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from service.results.load import RunReader
from service.store import Store
from service.types import JobState, TrialRecord, TrialState
from tests.benchmarks.scale_study import Size, stored_study
from tests.service.store.sqlite_steps import num_steps

FEW, MANY = 300, 3000
# Trees of ten times as many rows are a level deeper.
TOLERANCE = 1.15


@dataclass(frozen=True)
class Studies:
    """A study of FEW and one of MANY trials, each in a database of its own."""

    few: tuple[Store, str]
    many: tuple[Store, str]

    def steps(self, call: Callable[[Store, str], object]) -> tuple[int, int]:
        """SQLite's steps for `call` on the study of FEW and on the study of MANY trials."""
        few, many = (num_steps(store, partial(call, store, study)) for store, study in (self.few, self.many))
        return few, many


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studies]:
    directory: Path = tmp_path_factory.mktemp("many")
    made = []
    for num_trials in (FEW, MANY):
        store = Store(f"sqlite:///{directory / f'{num_trials}.db'}")
        made.append((store, stored_study(store, Size(num_trials=num_trials, num_layers=1, rungs=(3, 9)))))
    yield Studies(*made)
    for store, _ in made:
        store.close()


@pytest.mark.parametrize("state", [None, TrialState.COMPLETE, TrialState.PRUNED])
def test_pages_read_a_bounded_number_of_rows(studies: Studies, state: TrialState | None) -> None:
    """A page of 100 trials takes as many steps at 3,000 trials as at 300, also of a state that no trial has."""
    few, many = studies.steps(lambda store, study: store.trials(study, start=100, state=state, limit=101))
    assert 0 < many <= few * TOLERANCE + 100


def test_named_trials_read_their_own_rows(studies: Studies) -> None:
    """Trials are read in the order of their names, with the same steps at 3,000 trials as at 300."""
    numbers = [250, 3, 120]
    store, study = studies.many
    assert [trial.number for trial in store.named_trials(study, [*numbers, 10**6])] == numbers
    assert store.named_trials(study, [3]) == (store.trial(study, 3),)
    few, many = studies.steps(lambda store, study: store.named_trials(study, numbers))
    assert 0 < many <= few * TOLERANCE + 100


def test_one_more_result_reads_few_rows(studies: Studies) -> None:
    """After one more result, results read what has changed, and not the other trials."""

    def add(store: Store, study: str) -> None:
        writer = store.open_attempt(study)
        writer.set_state(JobState.RUNNING)
        last = store.trials(study, start=FEW)[-1]
        writer.add_trial(replace(last, number=last.number + 1, state=TrialState.WAITING, rungs=()))
        writer.finish_rung(last.number + 1, last.rungs[-1], samples_reused=0, state=TrialState.COMPLETE)

    readers = {store: RunReader(store, study) for store, study in (studies.few, studies.many)}
    for store, study in (studies.few, studies.many):
        add(store, study)
        readers[store].read()  # the attempt makes it read everything
        last: TrialRecord = store.trials(study)[-1]
        writer = store.open_attempt(study)
        readers[store].read()
        writer.add_trial(replace(last, number=last.number + 1, state=TrialState.WAITING, rungs=()))
        writer.finish_rung(last.number + 1, last.rungs[-1], samples_reused=0, state=TrialState.COMPLETE)
    few, many = studies.steps(lambda store, _: readers[store].read_trials())
    assert 0 < many <= few * TOLERANCE + 100
    few, many = studies.steps(lambda store, _: readers[store].read())
    assert 0 < many <= few * TOLERANCE + 100
    first_few, first_many = studies.steps(lambda store, study: RunReader(store, study).read())
    assert first_many > 5 * first_few > 5 * few
