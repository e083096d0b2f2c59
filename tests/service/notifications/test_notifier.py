"""Webhooks get one notice for each change of a job, also after failures and kills and with several servers."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any

import pytest
from standardwebhooks import Webhook

from service.notifications import notifier as notifying
from service.notifications import retries
from service.notifications.settings import NotificationSettings
from service.store import Store, schema
from service.types import Account, Coverage, DeliveryState, JobRecord, JobState, NoticeKind, Role, Sharing
from tests.postgresql import PostgreSQL
from tests.service.notifications.office import ACTOR, Office
from tests.service.notifications.receiver import Receiver, receiver, wait_until


def settle(office: Office) -> None:
    """Wait until nothing is left to do."""
    wait_until(lambda: office.notices() == 0)
    wait_until(
        lambda: (
            not [
                1
                for hook in office.notifications.webhooks()
                for each in office.deliveries(hook)
                if each.state is DeliveryState.WAITING
            ]
        )
    )


def kinds(target: Receiver) -> list[str]:
    return [received.document["type"] for received in target.received]


def test_the_end_of_a_job_is_sent_signed(office: Office) -> None:
    """A job that is COMPLETE causes one signed request with the documented fields, and no more."""
    with receiver() as target:
        hook = office.webhook(target.url())
        office.start(NotificationSettings(frozenset({"127.0.0.1"}), public_url="https://search.example.org"))
        writer = office.job()
        writer.heartbeat(wall_clock_s=7.0, progress={"best_trial": 3})
        writer.set_state(JobState.COMPLETE, "all trials are done")
        (received,) = target.wait()
        settle(office)
        assert len(target.received) == 1
        assert hook.secret is not None
        document = Webhook(hook.secret).verify(received.body, received.headers)
    job = writer.job_id
    assert document == received.document
    assert document["type"] == "job.complete"
    assert document["timestamp"].endswith("Z")
    assert document["data"] == {
        "id": job,
        "kind": "search",
        "name": "sums",
        "state": "COMPLETE",
        "reason": "all trials are done",
        "waiting_for": None,
        "url": f"https://search.example.org/v1/studies/{job}",
        "owner": None,
        "team": None,
        "wall_clock_s": 7.0,
        "progress": {"best_trial": 3},
    }
    assert received.headers["content-type"] == "application/json"
    assert received.headers["user-agent"].startswith("mergesearch/")
    (delivery,) = office.deliveries(hook)
    assert (delivery.state, delivery.attempts, delivery.status, delivery.error) == (
        DeliveryState.DELIVERED,
        1,
        204,
        None,
    )
    assert f"msg_{delivery.id}" == received.headers["webhook-id"]


def test_only_chosen_events_are_sent(office: Office) -> None:
    """Of the changes of a job, a webhook receives those that it chose, each time that they happen."""
    with receiver() as target:
        office.webhook(target.url(), events=(NoticeKind.COMPLETE, NoticeKind.CANCELLED))
        office.start()
        for state in (JobState.FAILED, JobState.PAUSED, JobState.COMPLETE, JobState.RUNNING, JobState.COMPLETE):
            writer = office.job()
            writer.set_state(state)
        writer = office.job()
        writer.set_state(JobState.COMPLETE)
        writer.set_state(JobState.STOPPED)
        writer.set_state(JobState.COMPLETE)
        office.job().set_state(JobState.CANCELLED)
        target.wait(5)
        settle(office)
        assert sorted(kinds(target)) == ["job.cancelled"] + 4 * ["job.complete"]


@pytest.mark.slow
def test_failures_are_tried_again_with_the_same_id(office: Office) -> None:
    """A receiver that fails gets the same message again, newly signed, until it accepts it."""
    with receiver(statuses=[500, 404, 302]) as target:
        hook = office.webhook(target.url())
        office.start()
        office.job().set_state(JobState.FAILED, "no engine")
        received = target.wait(4)
        settle(office)
        assert len({each.headers["webhook-id"] for each in received}) == 1
        assert len({each.body for each in received}) == 1
        assert hook.secret is not None
        for each in received:
            Webhook(hook.secret).verify(each.body, each.headers)
        (delivery,) = office.deliveries(hook)
        assert (delivery.state, delivery.attempts, delivery.status) == (DeliveryState.DELIVERED, 4, 204)
        assert office.notifications.webhook(hook.id).failing_since is None


def test_a_slow_receiver_delays_only_itself(office: Office) -> None:
    """While one receiver takes long for each request, another one gets all of its."""
    with receiver(stall_s=3.0) as slow, receiver() as fast:
        office.webhook(slow.url())
        office.webhook(fast.url())
        office.start()
        for _ in range(5):
            office.job().set_state(JobState.COMPLETE)
        fast.wait(5)
        assert len(slow.received) == 1


def test_what_happened_while_no_server_ran_is_sent(office: Office) -> None:
    """Changes that no server saw are sent when a server starts; so is a try that was begun and not ended."""
    with receiver() as target:
        hook = office.webhook(target.url())
        office.job(name="first").set_state(JobState.COMPLETE)
        assert office.notifications.expand(lambda job, notice: "{}") == 1
        (delivery,) = office.deliveries(hook)
        assert office.notifications.begin(delivery, pause_s=0.0) is not None
        assert office.notifications.begin(delivery, pause_s=0.0) is None  # another server's try
        office.job(name="second").set_state(JobState.FAILED)
        office.start()
        target.wait(2)
        settle(office)
        assert [each.attempts for each in office.deliveries(hook)] == [1, 2]
        assert len(target.received) == 2


# A server with a notifier and nothing else.
KILLED = """
import sys, time
from service.notifications import retries
from service.notifications.notifier import Notifier
from service.notifications.settings import NotificationSettings
from service.store import Store

class Leader:
    def is_leader(self):
        return True

    def waiting_for(self, job, *, reader=None):
        return None

retries.FIRST_S = 0.1
Notifier(Store(sys.argv[1]), Leader(), NotificationSettings(frozenset({"127.0.0.1"}))).start()
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_server_loses_nothing(office: Office, database: str) -> None:
    """A server that is killed in the middle of a try is followed by one that sends the same message again."""
    with receiver(stall_s=1.0) as target:
        hook = office.webhook(target.url())
        url = office.store.url
        office.job().set_state(JobState.COMPLETE)
        server = subprocess.Popen([sys.executable, "-c", KILLED, url])
        wait_until(lambda: target.received, seconds=60)
        server.kill()
        server.wait()
        (delivery,) = office.deliveries(hook)
        assert (delivery.state, delivery.attempts) == (DeliveryState.WAITING, 1)
        target.stall_s = 0.0
        office.start()
        target.wait(2)
        settle(office)
        assert len({each.headers["webhook-id"] for each in target.received}) == 1
        assert office.deliveries(hook)[0].state is DeliveryState.DELIVERED


def test_two_leaders_send_each_change_once(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers that both lead for a moment send each message once."""
    for name in ("FIRST_S", "LONGEST_S"):  # no try takes so long that another server would repeat it
        monkeypatch.setattr(retries, name, 60.0)
    with receiver() as target:
        hook = office.webhook(target.url())
        for _ in range(3):
            office.start()
        for _ in range(20):
            office.job().set_state(JobState.COMPLETE)
        target.wait(20)
        settle(office)
        assert len(target.received) == 20
        assert len({each.headers["webhook-id"] for each in target.received}) == 20
        assert len(office.deliveries(hook)) == 20


def test_only_the_leader_sends(office: Office) -> None:
    """A server that is not the leader sends nothing, and begins when it is."""
    office.cluster.leads = False
    with receiver() as target:
        office.webhook(target.url())
        notifier = office.start()
        office.job().set_state(JobState.COMPLETE)
        notifier.wake()
        time.sleep(0.3)
        assert (target.received, office.notices()) == ([], 1)
        office.cluster.leads = True
        target.wait()


@pytest.mark.slow
def test_a_receiver_that_always_fails_is_disabled(office: Office, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """After the last try, a webhook to which nothing has arrived for days is disabled, until a test arrives."""
    monkeypatch.setattr(notifying, "MAX_TRIES", 2)
    with receiver(statuses=[500] * 4, content=b"planted") as target, caplog.at_level(logging.INFO):
        hook = office.webhook(target.url(path="/planted"))
        office.start()
        office.job().set_state(JobState.COMPLETE)
        target.wait(2)
        settle(office)
        failing = office.notifications.webhook(hook.id)
        assert failing.disabled_at is None
        assert failing.failing_since is not None
        (delivery,) = office.deliveries(hook)
        assert (delivery.state, delivery.attempts, delivery.status) == (DeliveryState.FAILED, 2, 500)
        office.shift(schema.subscriptions, "failing_since", 3 * 86_400)
        office.job().set_state(JobState.COMPLETE)
        wait_until(lambda: office.notifications.webhook(hook.id).disabled_at is not None)
        disabled = office.notifications.webhook(hook.id)
        assert (disabled.disabled_reason or "").startswith(
            "nothing arrived for 3.0 days; the last error: status 500; the"
        )
        wait_until(lambda: "is disabled, as nothing arrives" in caplog.text)  # written after it is stored
        assert "planted" not in caplog.text
        office.job().set_state(JobState.COMPLETE)
        settle(office)
        assert len(target.received) == 4
        office.notifications.add_test(hook.id, lambda _: '{"type":"test"}')
        target.wait(5)
        wait_until(lambda: office.notifications.webhook(hook.id).disabled_at is None)


def test_a_receiver_that_is_gone_is_disabled_at_once(office: Office) -> None:
    """The status 410 ends the tries, and disables the webhook."""
    with receiver(statuses=[410]) as target:
        hook = office.webhook(target.url())
        office.start()
        office.job().set_state(JobState.COMPLETE)
        wait_until(lambda: office.notifications.webhook(hook.id).disabled_at is not None)
        assert len(target.received) == 1


@pytest.mark.parametrize("change", ["disabled", "moved", "demoted", "hidden", "no administrator"])
def test_who_lost_the_right_gets_nothing(office: Office, change: str) -> None:
    """Rights are those of the moment of sending: what the owner may no longer read is dropped."""
    office.staff()
    accounts = office.accounts
    with receiver() as target:
        hooks = {
            "disabled": lambda: office.webhook(target.url(), owner="ann", covers=Coverage.OWN),
            "moved": lambda: office.webhook(target.url(), owner="max", covers=Coverage.TEAM, team="red"),
            "demoted": lambda: office.webhook(target.url(), owner="max", covers=Coverage.TEAM, team="red"),
            "hidden": lambda: office.webhook(target.url(), owner="max", covers=Coverage.TEAM, team="red"),
            "no administrator": lambda: office.webhook(target.url(), owner="root", covers=Coverage.ALL),
        }
        hook = hooks[change]()
        writer = office.job(owner="ann", team="red")
        writer.set_state(JobState.COMPLETE)
        assert office.notifications.expand(lambda job, notice: "{}") == 1
        if change == "disabled":
            accounts.change_user("ann", is_disabled=True, actor=ACTOR)
        elif change == "moved":
            accounts.share(writer.job_id, actor=ACTOR, sharing=Sharing.PRIVATE, team=None)
        elif change == "demoted":
            accounts.set_role("red", "max", Role.MEMBER, actor=ACTOR)
        elif change == "hidden":
            accounts.set_role("red", "max", None, actor=ACTOR)
        else:
            accounts.add_user("other", is_admin=True, actor=ACTOR)
            accounts.change_user("root", is_admin=False, actor=ACTOR)
        office.start()
        wait_until(lambda: not office.deliveries(hook))
        assert target.received == []


def test_each_owner_gets_what_it_covers(office: Office) -> None:
    """Users get their own jobs, administrators of a team those of the team, and of the server all."""
    office.staff()
    with receiver() as target:
        office.webhook(target.url(path="/ann"), owner="ann", covers=Coverage.OWN)
        office.webhook(target.url(path="/max"), owner="max", covers=Coverage.TEAM, team="red")
        office.webhook(target.url(path="/root"), owner="root", covers=Coverage.ALL)
        office.webhook(target.url(path="/nobody"))
        office.start()
        office.job(name="in the team", owner="ann", team="red").set_state(JobState.COMPLETE)
        office.job(name="alone", owner="ann").set_state(JobState.COMPLETE)
        office.job(name="of max", owner="max").set_state(JobState.COMPLETE)
        target.wait(6)
        settle(office)
        got = sorted((each.path, each.document["data"]["name"]) for each in target.received)
    assert got == [
        ("/ann", "alone"),
        ("/ann", "in the team"),
        ("/max", "in the team"),
        ("/root", "alone"),
        ("/root", "in the team"),
        ("/root", "of max"),
    ]


def test_what_is_deleted_is_not_sent(office: Office) -> None:
    """A removed webhook and a deleted job take their deliveries with them."""
    with receiver() as target:
        hooks = [office.webhook(target.url(path=f"/{n}")) for n in range(2)]
        writer, other = office.job(), office.job(name="other")
        writer.set_state(JobState.COMPLETE)
        other.set_state(JobState.COMPLETE)
        office.notifications.expand(lambda job, notice: f'{{"name":"{job.name}"}}')
        office.store.delete_job(writer.job_id)
        office.notifications.remove_webhook(hooks[0].id, actor=ACTOR)
        office.start()
        target.wait()
        settle(office)
        assert [(each.path, each.document["name"]) for each in target.received] == [("/1", "other")]


def test_a_webhook_that_is_not_allowed_any_more(office: Office) -> None:
    """A host that the operator no longer allows is not reached, over http or at a private address."""
    with receiver() as target:
        hooks = [office.webhook(target.url()), office.webhook(target.url("localhost", scheme="https"))]
        office.start(NotificationSettings())
        office.job().set_state(JobState.COMPLETE)
        wait_until(lambda: all(any(each.error for each in office.deliveries(hook)) for hook in hooks))
        assert target.connections == 0
        errors = [office.deliveries(hook)[0].error or "" for hook in hooks]
    assert "its host must be named by --webhook-allow" in errors[0]
    assert "is not a public address" in errors[1]


@pytest.mark.slow
def test_a_job_that_waits_is_told_once(office: Office) -> None:
    """A job that waits for the same causes one notification, and another one only after it has run again."""
    with receiver() as target:
        office.webhook(target.url(), events=(NoticeKind.WAITING,))
        office.cluster.reason = "Ray: no dashboard answers"
        writer = office.job()
        office.start(NotificationSettings(frozenset({"127.0.0.1"}), waiting_s=0.2))
        (received,) = target.wait()
        data = received.document["data"]
        assert received.document["type"] == "job.waiting"
        assert (data["id"], data["waiting_for"], data["reason"]) == (writer.job_id, "Ray: no dashboard answers", None)
        assert data["state"] == "RUNNING"
        time.sleep(0.6)  # several looks
        assert len(target.received) == 1


def test_the_numbers_of_quotas_are_not_sent(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of a wait is that for a reader from outside the team: the owner may have left it."""

    def waiting_for(job: JobRecord, *, reader: Account | None = None) -> str:
        is_insider = reader is None or reader.is_admin or job.team in reader.roles
        return "quota gpu_hours of team red: 3.0 of 2 are used" if is_insider else "a quota of its team"

    monkeypatch.setattr(office.cluster, "waiting_for", waiting_for)
    office.staff()
    with receiver() as target:
        office.webhook(target.url(), owner="ann", covers=Coverage.OWN, events=(NoticeKind.WAITING,))
        office.job(owner="ann", team="red")
        office.accounts.set_role("red", "ann", None, actor=ACTOR)
        office.start(NotificationSettings(frozenset({"127.0.0.1"}), waiting_s=0.0))
        (received,) = target.wait()
    assert received.document["data"]["waiting_for"] == "a quota of its team"


@pytest.mark.slow
@pytest.mark.usefixtures("short_pauses")
def test_it_continues_after_the_database_was_away(postgresql: PostgreSQL) -> None:
    """While the database is away nothing is sent; what changed is sent when it answers again."""
    url = postgresql.migrated()
    store = Store(url)
    with receiver() as target, Office(store) as office:
        office.webhook(target.url())
        writer = office.job()
        office.start()
        postgresql.kill()
        wait_until(lambda: store.problem() is not None)
        postgresql.start()
        wait_until(lambda: store.problem() is None)
        writer.set_state(JobState.COMPLETE)
        target.wait()
    store.close()
    postgresql.drop(url)
