"""A client that loads all trials as columns once, and then what has changed by `since`, has the trials as they are."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from service.errors import StaleAttempt
from service.store import JobWriter, attempt_writer, results
from service.store.results import CLOCK_STEP_S
from service.store.steering import SteeringStore
from service.types import EventKind, JobRecord, JobState, TrialRecord, TrialState
from tests.service.api.harness import ApiServer, rung, stored_study, write_holdout, write_trial
from tests.service.synthetic_run import run_record
from workers.types import Evidence, SampleResult, ScoreResult, Split

STORE = Path(results.__file__).parent

# The statement by which stored samples change their trial.
STATEMENT = "connection.execute(_SCORED"

MADE = run_record(num_trials=24).whole_trials
NUM_DONE = 20
WAITING, OTHER, NEXT = NUM_DONE, NUM_DONE + 1, NUM_DONE + 2


class Live(NamedTuple):
    """A study whose driver has finished NUM_DONE trials, and has two that wait."""

    server: ApiServer
    http: httpx.Client
    study: JobRecord
    writer: JobWriter

    @property
    def path(self) -> str:
        return f"/v1/studies/{self.study.id}"

    def number_of(self, state: TrialState) -> int:
        """The number of the first trial in this state."""
        return next(trial.number for trial in self.server.store.trials(self.study.id) if trial.state is state)


class Reader:
    """A client that merges what has changed into what it has, as the web page does."""

    def __init__(self, http: httpx.Client, path: str) -> None:
        self._http = http
        self._path = f"{path}/trials/columns"
        self._columns, self._event, is_whole = self._get({})
        assert is_whole
        self.read: list[int] = []

    def _get(self, params: Mapping[str, Any]) -> tuple[dict[str, list[Any]], int, bool]:
        answer = self._http.get(self._path, params=params)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        return document["columns"], document["event"], document["is_whole"]

    def follow(self) -> bool:
        """Ask for what has changed, and compare with all trials. Returns whether the answer had all trials.

        `read` has the numbers of the trials in the answer.
        """
        found, self._event, is_whole = self._get({"since": self._event})
        self.read = found["number"]
        rows = {} if is_whole else {row["number"]: row for row in rows_of(self._columns)}
        rows |= {row["number"]: row for row in rows_of(found)}
        names = found.keys() | (() if is_whole else self._columns.keys())
        self._columns = {name: [rows[number].get(name) for number in sorted(rows)] for name in names}
        whole, _, _ = self._get({})
        assert self._columns == whole
        return is_whole


def rows_of(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.fixture
def live(server: ApiServer, http: httpx.Client) -> Live:
    study = stored_study(server.store)
    writer = server.store.open_attempt(study.id)
    writer.set_state(JobState.RUNNING)
    for trial in MADE[:NUM_DONE]:
        write_trial(writer, trial)
    for trial in MADE[NUM_DONE:NEXT]:
        writer.add_trial(waiting(trial))
    return Live(server, http, study, writer)


def waiting(trial: TrialRecord, **changes: Any) -> TrialRecord:
    fresh = replace(trial, state=TrialState.WAITING, rungs=(), reason=None, values={}, standard_errors={})
    return replace(fresh, samples_scored=0, **changes)


def store_chunk(live: Live, number: int, *, start: int = 0, split: Split = Split.SEARCH, again: bool = False) -> None:
    """Store ten samples of a trial."""
    samples = tuple(SampleResult("math", at, f"d{at}", 1.0, "says") for at in range(start, start + 10))
    prompts = {f"{split} math[{start}:{start + 10}]": "0"}
    evidence = Evidence(MADE[number].recipe.digest, "bank", prompts, "sum", "replica-1", number, "fake")
    keys = [(sample.objective, sample.position) for sample in samples] if again else []
    live.writer.record_chunk(number, split, ScoreResult(samples, evidence, {"score": 0.5}), again=keys)


def set_clock(monkeypatch: pytest.MonkeyPatch, time_s: float) -> None:
    monkeypatch.setattr(attempt_writer, "clock", lambda _: time_s)


def mark(live: Live, number: int, *, is_valid: bool) -> None:
    sent = {"is_valid": is_valid} if is_valid else {"is_valid": False, "reason": "why"}
    assert live.http.put(f"{live.path}/trials/{number}/validity", json=sent).is_success


def add_later_parameter(live: Live) -> None:
    configuration = {**(MADE[NEXT].configuration or {}), "later": 3}
    live.writer.add_trial(waiting(MADE[NEXT], configuration=configuration))


def promote(live: Live) -> None:
    for number in range(2):
        live.writer.finish_rung(WAITING, rung(number, 0.25 * (number + 1)), samples_reused=7)


def complete(live: Live) -> None:
    live.writer.finish_rung(WAITING, rung(2, 0.75), samples_reused=7, state=TrialState.COMPLETE)


def score_later_objective(live: Live) -> None:
    scored = rung(0)
    found = replace(scored, values={**scored.values, "later": 1.0}, standard_errors={**scored.standard_errors})
    live.writer.finish_rung(WAITING, found, samples_reused=0)


def retry(live: Live) -> None:
    """A chunk fails, and is scored by another engine: its samples are stored then."""
    live.writer.add_event(EventKind.CRASH, {"trial": WAITING, "reason": "gone"})
    store_chunk(live, WAITING)


def evaluate_again(live: Live) -> None:
    """A user asks for a pruned trial at the full budget; a new driver adds a trial with its recipe."""
    pruned = live.number_of(TrialState.PRUNED)
    assert live.http.post(f"{live.path}/trials/{pruned}:evaluate").status_code == 202
    writer = live.server.store.open_attempt(live.study.id)
    writer.add_trial(waiting(MADE[pruned], number=NEXT))


def score_again(live: Live) -> None:
    """An engine has failed a check: samples of a finished trial are scored again, with some that were not stored."""
    live.writer.record_engine_fault("replica-1", 0, "the canary failed")
    live.writer.add_event(EventKind.ENGINE_FAULT, {"replicas": {"replica-1": "why"}, "samples": 10})
    store_chunk(live, 0, again=True)
    store_chunk(live, 0, start=10)
    live.writer.add_event(EventKind.SCORED_AGAIN, {"samples": 10})


def resume(live: Live) -> None:
    """A driver is replaced; the next one goes on, and the one before can no longer write."""
    live.writer.set_state(JobState.FAILED, "why")
    SteeringStore(live.server.store).resume(live.study.id, reason="again")
    live.server.store.open_attempt(live.study.id).finish_trials([WAITING], TrialState.FAIL, "gone")
    with pytest.raises(StaleAttempt):
        live.writer.finish_trials([OTHER], TrialState.FAIL, "gone")


# By the name of the function of the store that changes a trial: what users know of it, and the change.
CHANGES: Mapping[str, Mapping[str, Callable[[Live], Any]]] = {
    "add_trial": {
        "new": lambda live: live.writer.add_trial(waiting(MADE[NEXT])),
        "new, with a parameter that no other has": add_later_parameter,
        "evaluated again": evaluate_again,
    },
    "record_chunk": {
        "scored": lambda live: store_chunk(live, WAITING),
        "scored after it was stopped": lambda live: store_chunk(live, live.number_of(TrialState.PRUNED), start=500),
        "retried": retry,
        "scored again after a fault": score_again,
    },
    "finish_rung": {
        "promoted": promote,
        "complete": complete,
        "with an objective that no other has": score_later_objective,
    },
    "finish_trials": {
        "pruned": lambda live: live.writer.finish_trials([WAITING, OTHER], TrialState.PRUNED, "worse", rival=0),
        "failed": lambda live: live.writer.finish_trials([WAITING], TrialState.FAIL, "why"),
        "failed, with others": resume,
    },
    "set_invalid": {
        "invalid": lambda live: mark(live, 1, is_valid=False),
        "valid again": lambda live: (mark(live, 1, is_valid=False), mark(live, 1, is_valid=True)),
    },
}
KINDS = [(function, kind) for function, kinds in CHANGES.items() for kind in kinds]


@pytest.mark.parametrize(("function", "kind"), KINDS, ids=lambda text: text.replace(" ", "-"))
def test_every_change_of_a_trial_is_read(live: Live, function: str, kind: str) -> None:
    """The next request has the change, and the one after it loses nothing."""
    reader = Reader(live.http, live.path)
    CHANGES[function][kind](live)
    reader.follow()
    assert reader.read, "the answer has the trial"
    reader.follow()


def test_every_function_that_writes_trials_is_tested() -> None:
    """A function of the store that writes trials or their rungs has a row in CHANGES, so that `since` shows it."""
    found = set()
    for file in STORE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.FunctionDef) else ""
            has_table = re.search(r"\bschema\.(trials|rungs)\b", text)
            if (has_table and re.search(r"\b(sa\.(update|insert|delete)|_insert_once)\(", text)) or STATEMENT in text:
                found.add(getattr(node, "name", ""))
    assert found == CHANGES.keys()


def test_changes_add_up(live: Live) -> None:
    """Many changes arrive with one request, and each with a request of its own."""
    often, once = Reader(live.http, live.path), Reader(live.http, live.path)
    for change in (add_later_parameter, retry, promote, lambda live: mark(live, 1, is_valid=False), complete):
        change(live)
        assert not often.follow()
    assert not once.follow()
    assert set(once.read) == {1, WAITING, NEXT}
    score_again(live)
    assert often.follow()
    assert once.follow()


def test_only_what_has_changed_is_sent(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that were stored before the event are not news, unless the clock has been set back since."""
    for number in range(NEXT):
        store_chunk(live, number)
    now = time.time()
    set_clock(monkeypatch, now + 3600)
    live.writer.add_event(EventKind.SEARCH_NOTE, {"text": "an hour later"})
    reader = Reader(live.http, live.path)
    assert not reader.follow()
    assert reader.read == []
    promote(live)
    reader.follow()
    assert reader.read == [WAITING]
    set_clock(monkeypatch, now + 3600 - CLOCK_STEP_S / 2)
    store_chunk(live, OTHER, start=10)
    reader.follow()
    assert reader.read == [OTHER]


def test_many_chunks_are_read_in_parts(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "CHUNKS_AT_ONCE", 2)
    reader = Reader(live.http, live.path)
    for number in range(5):
        store_chunk(live, number)
    reader.follow()
    assert reader.read == [0, 1, 2, 3, 4]


def test_held_out_samples_change_no_column(live: Live) -> None:
    reader = Reader(live.http, live.path)
    write_holdout(live.writer, MADE[0])
    assert not reader.follow()
    assert reader.read == []


def test_all_trials_are_sent_after_a_new_driver_and_faults(live: Live) -> None:
    reader = Reader(live.http, live.path)
    for kind in EventKind:
        live.writer.add_event(kind, {})
        is_whole = kind in (EventKind.ATTEMPT, EventKind.ENGINE_FAULT, EventKind.SCORED_AGAIN)
        assert reader.follow() == is_whole, kind
        assert not reader.follow(), kind


def test_all_trials_are_sent_if_the_event_is_not_known(live: Live) -> None:
    """The database is a backup that does not have the event; and before the first event nothing was known."""
    last = live.server.store.last_event_id(live.study.id)
    for since, is_whole in ((last, False), (last + 1, True), (0, True)):
        document = live.http.get(f"{live.path}/trials/columns", params={"since": since}).json()
        assert document["is_whole"] == is_whole
        assert len(document["columns"]["number"]) == (NEXT if is_whole else 0)
