"""Webhooks, mail addresses and waiting jobs, on each kind of database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from service.errors import Conflict, NotFound
from service.store import Store, schema
from service.store.accounts import Actor
from service.store.connection import transaction
from service.store.notifications import MAX_WEBHOOKS
from service.types import Coverage, JobState, NoticeKind
from tests.postgresql import PostgreSQL
from tests.service.notifications.office import ACTOR, Office

EVENTS = (NoticeKind.COMPLETE, NoticeKind.FAILED)


@pytest.fixture
def office(database: str) -> Iterator[Office]:
    store = Store(database)
    yield Office(store)
    store.close()


def look(office: Office, waiting: Mapping[str, str | None], *, after_s: float = 30.0, works_s: float = 60.0) -> int:
    """Store why jobs wait, as a server does now and then; returns the number of new notices."""
    found = office.notifications.record_waits(
        waiting, notify_after_s=after_s, works_after_s=works_s, passing="its driver to start"
    )
    assert office.notices() >= found
    return found


def pass_by(office: Office, seconds: float) -> None:
    """Move the times of waiting jobs back by `seconds`."""
    office.shift(schema.waits, "since", seconds)
    office.shift(schema.waits, "working_since", seconds)


def test_a_long_wait_is_noticed_once(office: Office) -> None:
    """A job that has waited for the same reason for the given time causes one notice."""
    job = office.job().job_id
    assert look(office, {job: "Ray: away"}) == 0
    pass_by(office, 29)
    assert look(office, {job: "Ray: away"}) == 0
    pass_by(office, 2)
    assert [look(office, {job: "Ray: away"}) for _ in range(3)] == [1, 0, 0]
    pass_by(office, 10_000)
    assert look(office, {job: "Ray: away"}) == 0


def test_another_reason_begins_another_wait(office: Office) -> None:
    """The time is that of one reason; numbers in it that change, and starts of drivers, are the same wait."""
    job = office.job().job_id
    look(office, {job: "its next driver, in 2 s: model /m is missing"})
    pass_by(office, 20)
    look(office, {job: "its driver to start"})
    look(office, {job: None})
    pass_by(office, 5)
    look(office, {job: "its next driver, in 64 s: model /m is missing"})
    pass_by(office, 4)
    assert look(office, {job: "Ray: away"}) == 0
    pass_by(office, 29)
    assert look(office, {job: "Ray: away"}) == 0
    pass_by(office, 2)
    assert look(office, {job: "Ray: away"}) == 1


def test_a_wait_over_several_drivers_is_one(office: Office) -> None:
    """Drivers that only find that something is still missing do not end a wait."""
    job = office.job().job_id
    look(office, {job: "its next driver, in 2 s: model /m is missing"})
    for seconds in (4, 8, 16):
        pass_by(office, seconds)
        look(office, {job: "its driver to start"})
        look(office, {job: None})
        pass_by(office, 2)
        look(office, {job: None})
        look(office, {job: f"its next driver, in {seconds} s: model /m is missing"})
    assert office.notices() == 1


def test_after_work_a_wait_is_new(office: Office) -> None:
    """Once a driver has worked for some time, the job may be noticed again."""
    job = office.job().job_id
    look(office, {job: "Ray: away"})
    pass_by(office, 31)
    assert look(office, {job: "Ray: away"}) == 1
    look(office, {job: None})
    pass_by(office, 61)
    look(office, {job: None})
    for expected in (0, 1):
        assert look(office, {job: "Ray: away"}) == expected
        pass_by(office, 31)


def test_jobs_that_end_or_pause_do_not_wait(office: Office) -> None:
    """A job that is not looked at any more, and one that was deleted, has no wait."""
    writer = office.job()
    look(office, {writer.job_id: "Ray: away"})
    pass_by(office, 31)
    assert look(office, {}) == 0
    assert look(office, {writer.job_id: "Ray: away"}) == 0
    writer.set_state(JobState.CANCELLED)
    office.store.delete_job(writer.job_id)
    assert look(office, {writer.job_id: "Ray: away"}) == 0


def test_a_deletion_and_the_notifier_wait_for_no_lock(postgresql: PostgreSQL) -> None:
    """While a deletion has locked a job, its notices and waits are left alone, so that no deadlock is possible."""
    url = postgresql.migrated()
    store = Store(url)
    office = Office(store)
    office.webhook("https://example.org/")
    writer = office.job()
    look(office, {writer.job_id: "Ray: away"})
    pass_by(office, 31)
    writer.set_state(JobState.COMPLETE)
    this = sa.select(schema.studies.c.id).where(schema.studies.c.id == writer.job_id)
    with ThreadPoolExecutor(1) as other, transaction(store.engine) as deletion:
        deletion.execute(this.with_for_update())
        assert other.submit(office.notifications.expand, lambda job, notice: "{}").result(timeout=10) == 0
        assert other.submit(look, office, {writer.job_id: "Ray: away"}).result(timeout=10) == 0
        for table in (schema.notices, schema.waits):
            assert deletion.execute(sa.delete(table).returning(table.c.study)).scalars().all() == [writer.job_id]
    store.close()
    postgresql.drop(url)


def test_webhooks_are_limited_and_audited(office: Office) -> None:
    """An owner has a bounded number of webhooks; the audit log has neither secrets nor paths of URLs."""
    office.staff()
    actor = Actor("ann", "192.0.2.1", "mst_abc")
    options: dict[str, Any] = {"events": EVENTS, "covers": Coverage.OWN, "owner": "ann", "actor": actor}
    hooks = [
        office.notifications.add_webhook(f"https://example.org/planted/{n}", secret="whsec_planted", **options)
        for n in range(MAX_WEBHOOKS)
    ]
    with pytest.raises(Conflict, match=r"webhooks: ann has 20, and may have 20; remove one first"):
        office.notifications.add_webhook("https://example.org/", secret="whsec_x", **options)
    assert office.notifications.webhooks("ann") == tuple(hooks)
    assert office.notifications.webhooks("max") == ()
    assert "planted" not in repr(hooks[0]).replace(hooks[0].target, "")
    office.notifications.remove_webhook(hooks[0].id, actor=actor)
    with pytest.raises(NotFound, match="there is no such webhook"):
        office.notifications.remove_webhook(hooks[0].id, actor=actor)
    entries = office.accounts.audit(target=f"webhook {hooks[0].id}")
    document = {"host": "example.org", "covers": "own", "team": None, "events": ["complete", "failed"]}
    assert [(entry.action, entry.user, entry.before, entry.after) for entry in entries] == [
        ("webhook.add", "ann", None, document),
        ("webhook.remove", "ann", document, None),
    ]
    assert "planted" not in repr(office.accounts.audit())


def test_a_team_must_exist(office: Office) -> None:
    """A webhook of a team that does not exist is refused; one of a team is removed with it."""
    office.staff()
    options: dict[str, Any] = {"secret": "whsec_x", "events": EVENTS, "covers": Coverage.TEAM, "actor": ACTOR}
    with pytest.raises(NotFound, match="team 'blue': there is no such team"):
        office.notifications.add_webhook("https://example.org/", owner="max", team="blue", **options)
    office.notifications.add_webhook("https://example.org/", owner="max", team="red", **options)
    office.accounts.remove_team("red", actor=ACTOR)
    assert office.notifications.webhooks() == ()


def test_a_user_has_one_address(office: Office) -> None:
    """An address replaces the one before; changes are audited, and None removes it."""
    office.staff()
    for address in ("ann@example.org", "ann@example.com", "ann@example.com", None, None):
        found = office.notifications.set_mail("ann", address, events=EVENTS, actor=ACTOR)
        assert (None if found is None else found.target) == address
        assert office.notifications.mail("ann") == found
    assert office.notifications.mail("max") is None
    changes = [(entry.before, entry.after) for entry in office.accounts.audit() if entry.action == "mail.change"]
    one, other = ({"address": f"ann@example.{end}", "events": ["complete", "failed"]} for end in ("org", "com"))
    assert changes == [(None, one), (one, other), (other, None)]
