"""Kills and stops parts of a server in a seeded order, while users of two teams pause, edit and resume their studies.

Accounts, HTTP, PostgreSQL, Ray, its jobs and Serve are real; scores are those of fakes.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.study.file import load_study
from service.auth.tokens import new_token
from service.client import Client, RequestRefused, ServerUnreachable
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.store.accounts import AccountStore, Actor
from service.types import EventKind, JobState, Role, Scope
from tests.end_to_end.chaos import KILLS, POLL_S, RECOVERY_S, kill_database, stop_until_replaced
from tests.end_to_end.server import Server, serving
from tests.end_to_end.studies import DIS, LFS, SFS, undisturbed, write_small_study
from tests.postgresql import PostgreSQL
from tests.service.stored_values import stored_values
from tests.service.tune.harness import trial_list
from workers.types import Split

__all__ = ["OWNERS", "Steered", "run_team_chaos"]

# Owner of each study; the team of ann and cat is red, that of bob is blue.
OWNERS = ("ann", "bob", "cat")
TEAMS = {"ann": "red", "bob": "blue", "cat": "red"}
SPACES = {"ann": DIS, "bob": SFS, "cat": LFS}

PATIENCE_S = 30.0  # for a part that is being replaced

# Seconds that Ray waits for the end of a driver that was asked to end; a driver that is stopped cannot end by itself.
STOP_WAIT_S = 15


@dataclass
class Steered:
    """A user's study, and the requests that the user has sent about it."""

    id: str
    owner: str
    file: Path
    actions: list[str] = field(default_factory=list)


def run_team_chaos(
    directory: Path,
    postgresql: PostgreSQL,
    *,
    kills: Sequence[str],
    stops: Sequence[str] = (),
    max_trials: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Run three studies of two teams, each with a search space of its own, while parts are killed and stopped.

    Every study is paused once, resumed later, and edited once, by its owner. Faults and requests are in an order that
    is drawn from `seed`; before each, a chunk of any study is stored. A stop lasts until an event reports that the part
    was replaced. Returns what was killed and stopped, what differs from undisturbed studies, and what each study's
    events say of its owner's requests.
    """
    draw = random.Random(seed)
    studies_in = directory / "models"
    studies_in.mkdir()
    first = write_small_study(studies_in, name="chaos", rungs=[20, 60], max_trials=max_trials)
    url = postgresql.migrated()
    store = Store(url, waits=True)
    tokens = _accounts(store)
    settings = {
        "MERGESEARCH_DATABASE": url,
        "FAKE_SCORER": json.dumps({"sample_delay_s": 0.02}),
        "FAKE_IN_FLIGHT": "1",
        "FAKE_SERVE": json.dumps({"LOST_AFTER_S": 8.0}),
        "FAKE_DEPLOY": json.dumps({"health_check_timeout_s": 1.0}),
        "FAKE_LATE_CHECKS": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
    }
    done: Counter[str] = Counter()
    stopped: list[dict[str, Any]] = []
    parts = {**KILLS, "database": kill_database(postgresql)}
    with ExitStack() as stack:
        server = stack.enter_context(serving(["tests.benchmarks.fake_serve"], directory / "data", environment=settings))
        clients = {user: stack.enter_context(Client(server.url, token=tokens[user])) for user in OWNERS}
        studies = [_submitted(clients[user], user, first, seed=number) for number, user in enumerate(OWNERS)]
        faults = {f"kill {part}": _kill(part, parts[part], studies) for part in kills}
        faults |= {f"stop {part}": _stop(part, store, studies, stopped) for part in stops}
        for action in _schedule(draw, faults, studies):
            _until_stored(store, studies)
            time.sleep(draw.uniform(0.0, 0.3))
            done[action(server, clients)] += 1
        for study in studies:
            _wait_until_ended(store, study)
        for study in studies:
            _check_others_see_nothing(clients, study)
        found = {
            "done": dict(done),
            "stopped": stopped,
            "states": [store.job(study.id).state for study in studies],
            "differing": [study.id for study in studies if _differs(store, study, directory)],
            "scored_twice": [study.id for study in studies if _scored_twice(store, study.id)],
            "told": {study.owner: _told(store, study) for study in studies},
            "done_by": {study.owner: study.actions for study in studies},
            "attempts": {study.owner: _attempts(store, study) for study in studies},
        }
        server.stop()
    store.close()
    return found


def _accounts(store: Store) -> dict[str, str]:
    """Add two teams with three users; returns the token of each user."""
    accounts, actor = AccountStore(store), Actor(None, "test")
    accounts.add_user("root", is_admin=True, actor=actor)
    tokens = {}
    for team in {*TEAMS.values()}:
        accounts.add_team(team, actor=actor)
    for user, team in TEAMS.items():
        accounts.add_user(user, is_admin=False, actor=actor)
        accounts.set_role(team, user, Role.MEMBER, actor=actor)
        token = new_token()
        accounts.add_token(
            user,
            name="chaos",
            digest=token.digest,
            prefix=token.prefix,
            scope=Scope.SUBMIT,
            lifetime_s=None,
            actor=actor,
        )
        tokens[user] = token.secret
    return tokens


def _submitted(client: Client, owner: str, first: Path, *, seed: int) -> Steered:
    document = yaml.safe_load(first.read_text())
    document["name"] = f"study of {owner}".replace(" ", "-")
    document["search"]["seed"] = seed
    document["search_space"] = dict(SPACES[owner])
    file = first.with_name(f"{owner}.yaml")
    file.write_text(yaml.safe_dump(document))
    study = client.submit(load_study(file).canonical(), sharing="private")
    return Steered(study["id"], owner, file)


Kill = Callable[[Server, str], bool]
Step = Callable[[Server, dict[str, Client]], str]


def _schedule(draw: random.Random, faults: Mapping[str, Step], studies: Sequence[Steered]) -> list[Step]:
    """Faults and requests in a random order, in which each study's resume is somewhere after its pause."""
    named: list[tuple[str, Steered | None]] = [(fault, None) for fault in faults]
    named += [(verb, study) for study in studies for verb in ("pause", "edit", "resume")]
    draw.shuffle(named)
    for study in studies:
        pause, resume = sorted((named.index(("pause", study)), named.index(("resume", study))))
        named[pause], named[resume] = ("pause", study), ("resume", study)
    return [faults[name] if study is None else _steer(name, study) for name, study in named]


def _kill(part: str, once: Kill, studies: Sequence[Steered]) -> Step:
    def kill(server: Server, _: dict[str, Client]) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not any(once(server, study.id) for study in studies):
            if time.monotonic() > deadline:
                return f"nothing: no {part}"
            time.sleep(POLL_S)
        return part

    return kill


def _stop(part: str, store: Store, studies: Sequence[Steered], stopped: list[dict[str, Any]]) -> Step:
    def stop(server: Server, _: dict[str, Client]) -> str:
        stopped.append(stop_until_replaced(server, store, [study.id for study in studies], part))
        return f"stop {part}"

    return stop


def _steer(verb: str, study: Steered) -> Step:
    def steer(_: Server, clients: dict[str, Client]) -> str:
        client = clients[study.owner]
        requests: dict[str, Callable[[], Any]] = {
            "pause": lambda: client.pause(study.id, reason="the engine is needed"),
            "edit": lambda: client.edit(study.id, {"notes": "edited", "limits": {"max_wall_clock_s": 3600.0}}),
            "resume": lambda: client.resume(study.id, reason="the engine is free"),
        }
        _persistently(requests[verb])
        study.actions.append(verb)
        return verb

    return steer


def _persistently(request: Callable[[], Any]) -> Any:
    """Send a request again while the server or its database is away; returns the answer."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        try:
            return request()
        except (ServerUnreachable, RequestRefused) as error:
            is_away = isinstance(error, ServerUnreachable) or error.status >= 500
            if not is_away or time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _until_stored(store: Store, studies: Sequence[Steered]) -> None:
    """Wait until one more chunk of any study is stored. Returns at once if no study is running."""

    def num_stored() -> int:
        return sum(len(store.evidence(study.id)) for study in studies)

    deadline, before = time.monotonic() + RECOVERY_S, num_stored()
    while any(not (job := store.job(study.id)).is_paused and not job.state.is_finished for study in studies):
        if num_stored() > before:
            return
        assert time.monotonic() < deadline, [store.job(study.id) for study in studies]
        time.sleep(POLL_S)


def _wait_until_ended(store: Store, study: Steered) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while not store.job(study.id).state.is_finished:
        assert time.monotonic() < deadline, store.job(study.id)
        time.sleep(POLL_S)


def _check_others_see_nothing(clients: dict[str, Client], study: Steered) -> None:
    """Check that a private study exists for its owner alone."""
    for user, client in clients.items():
        names = {each["id"] for each in client.studies()}
        assert (study.id in names) == (user == study.owner)
        if user != study.owner:
            with pytest.raises(RequestRefused) as refused:
                client.pause(study.id)
            assert refused.value.status == 404


def _differs(store: Store, study: Steered, directory: Path) -> bool:
    """Whether the study is not COMPLETE, or its trials differ from those of an undisturbed run without a server."""
    job = store.job(study.id)
    expected = undisturbed(study.file, directory / f"alone-{study.owner}", resolved=ResolvedStudy.of(job))
    return job.state is not JobState.COMPLETE or trial_list(store, study.id) != expected


def _scored_twice(store: Store, study: str) -> bool:
    """Whether a stored sample was scored again: the study's evidence then has more samples than are stored."""
    scored: Counter[tuple[str, Split]] = Counter()
    for row in store.evidence(study):
        scored[row.recipe_digest, Split(next(iter(row.prompts)).split()[0])] += row.num_samples
    stored = {split: stored_values(store, study, split) for split in {split for _, split in scored}}
    return any(
        count != sum(len(values) for values in stored[split][digest].values())
        for (digest, split), count in scored.items()
    )


def _told(store: Store, study: Steered) -> list[str]:
    """Actions of the requests in the study's events, in order. Checks that all are the owner's."""
    payloads = [event.payload for event in store.events(study.id) if event.kind == EventKind.STEERED]
    assert all(payload["user"] == study.owner for payload in payloads), payloads
    return [payload["action"] for payload in payloads]


def _attempts(store: Store, study: Steered) -> list[str | None]:
    """Reasons why each driver of the study replaced the one before."""
    return [event.payload.get("because") for event in store.events(study.id) if event.kind == EventKind.ATTEMPT]
