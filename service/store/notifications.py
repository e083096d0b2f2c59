"""Webhooks and e-mail addresses that receive notices of jobs, and the deliveries to them.

A change of a job's state stores a notice in the same transaction (function `attempt_writer.insert_event`). The leader
of the servers makes deliveries of the notices, one for each subscription that covers the job, and deletes the notices
in the same transaction. Therefore each subscription gets exactly one delivery of each change, even if servers are
killed. A delivery may be sent repeatedly, but always with the same id.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from service.errors import Conflict, NotFound
from service.store import schema
from service.store.accounts import Actor, record_change
from service.store.availability import repeated
from service.store.connection import clock, clock_time, reading, transaction
from service.store.records import job_record
from service.store.sql import Store
from service.types import (
    Coverage,
    DeliveryRecord,
    DeliveryState,
    JobRecord,
    JobState,
    NoticeKind,
    SubscriptionKind,
    SubscriptionRecord,
)

__all__ = ["KEPT_S", "MAX_WEBHOOKS", "TEST", "Notice", "NotificationStore"]

# Webhooks of one user.
MAX_WEBHOOKS = 20

# Notices that become deliveries in one transaction.
BATCH = 100

# Seconds for which deliveries are kept after their end.
KEPT_S = 7 * 86_400.0

# The event of a test delivery.
TEST = "test"

# Numbers in the reason of a wait, such as seconds until the next driver, which change while the job waits for the same.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Notice:
    """A stored change of a job, for notifying users who want it.

    `study` is the job's id, and `kind` is the kind of change. `state` and `reason` are the job's state and reason after
    the change; if the kind is WAITING, `reason` says what the job waits for. `time` is in seconds since the epoch.
    """

    study: str
    kind: NoticeKind
    state: JobState
    reason: str | None
    time: float


@repeated
class NotificationStore:
    """Store of webhooks, e-mail addresses and deliveries in the database of `store`. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._engine = store.engine
        self._reads = reading(self._engine)

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def add_webhook(
        self,
        url: str,
        *,
        secret: str,
        events: Collection[NoticeKind],
        owner: str | None,
        covers: Coverage,
        team: str | None = None,
        actor: Actor,
    ) -> SubscriptionRecord:
        """Store a new webhook, a URL to which changes of jobs are sent, and return it.

        `secret` is the key with which messages are signed. `events` has the kinds of changes that are sent. `owner` is
        the name of the user whose webhook this is; None if the server has no accounts. `covers` says whether changes of
        the owner's jobs, of the jobs of `team`, or of all jobs are sent; `team` is None unless changes of a team's jobs
        are sent. `actor` is who adds the webhook, for the audit log. Raises Conflict if the owner has too many
        webhooks, and NotFound if there is no such team.
        """
        table = schema.subscriptions
        with transaction(self._engine) as connection:
            if team is not None:
                is_team = sa.select(schema.teams.c.name).where(schema.teams.c.name == team)
                if connection.execute(is_team).scalar() is None:
                    raise NotFound(f"team {team!r:.80}: there is no such team")
            is_other = (table.c.kind == SubscriptionKind.WEBHOOK.value) & _is_owner(owner)
            number = connection.execute(sa.select(sa.func.count()).select_from(table).where(is_other)).scalar_one()
            if number >= MAX_WEBHOOKS:
                raise Conflict(
                    f"webhooks: {owner or 'this server'} has {number}, and may have {MAX_WEBHOOKS}; remove one first"
                )
            record = self._add(connection, SubscriptionKind.WEBHOOK, url, secret, events, owner, covers, team)
            record_change(connection, actor, "webhook.add", f"webhook {record.id}", None, _document(record))
        return record

    def webhooks(self, owner: str | None = None) -> tuple[SubscriptionRecord, ...]:
        """Read the webhooks of one user, or all webhooks if `owner` is None, oldest first."""
        where = schema.subscriptions.c.kind == SubscriptionKind.WEBHOOK.value
        with self._reads.connect() as connection:
            return _subscriptions(connection, where & (sa.true() if owner is None else _is_owner(owner)))

    def webhook(self, webhook_id: str) -> SubscriptionRecord:
        """Read a webhook. Raises NotFound if there is no webhook with this id."""
        with self._reads.connect() as connection:
            return _webhook(connection, webhook_id)

    def remove_webhook(self, webhook_id: str, *, actor: Actor) -> None:
        """Remove a webhook and its unsent deliveries. Raises NotFound if there is no webhook with this id.

        `actor` is who removes the webhook, for the audit log.
        """
        with transaction(self._engine) as connection:
            before = _webhook(connection, webhook_id)
            connection.execute(sa.delete(schema.subscriptions).where(schema.subscriptions.c.id == webhook_id))
            record_change(connection, actor, "webhook.remove", f"webhook {webhook_id}", _document(before), None)

    def mail(self, user: str) -> SubscriptionRecord | None:
        """Read the e-mail address of the user `user`, with the kinds of changes that are sent to it.

        Returns None if the user has no address.
        """
        with self._reads.connect() as connection:
            return next(iter(_subscriptions(connection, _is_mail(user))), None)

    def set_mail(
        self, user: str, address: str | None, *, events: Collection[NoticeKind], actor: Actor
    ) -> SubscriptionRecord | None:
        """Set the e-mail address to which changes of a user's jobs are sent, and return its record.

        `events` has the kinds of changes that are sent. An `address` of None removes the user's address; the result is
        then None. An address that was disabled receives mails again. Mails that were not sent yet are dropped. `actor`
        is named in the audit log.
        """
        with transaction(self._engine) as connection:
            before = next(iter(_subscriptions(connection, _is_mail(user))), None)
            connection.execute(sa.delete(schema.subscriptions).where(_is_mail(user)))
            after = None
            if address is not None:
                after = self._add(connection, SubscriptionKind.MAIL, address, None, events, user, Coverage.OWN, None)
            documents = (None if before is None else _document(before), None if after is None else _document(after))
            if documents[0] != documents[1]:
                record_change(connection, actor, "mail.change", f"user {user}", *documents)
        return after

    def _add(
        self,
        connection: sa.Connection,
        kind: SubscriptionKind,
        target: str,
        secret: str | None,
        events: Collection[NoticeKind],
        owner: str | None,
        covers: Coverage,
        team: str | None,
    ) -> SubscriptionRecord:
        row: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "kind": kind.value,
            "target": target,
            "secret": secret,
            "owner": owner,
        }
        named = [event.value for event in NoticeKind if event in events]
        row |= {"covers": covers.value, "team": team, "events": named, "created_at": clock(connection)}
        connection.execute(sa.insert(schema.subscriptions).values(**row))
        return _subscriptions(connection, schema.subscriptions.c.id == row["id"])[0]

    # -- deliveries --------------------------------------------------------------------------------------------------

    def add_test(self, subscription_id: str, body: Callable[[float], str]) -> DeliveryRecord:
        """Store a delivery of a test message to a webhook, and return it; it is due at once, and tried only once.

        If an earlier test message of the webhook waits to be sent, its delivery is returned instead. `body` computes
        the message from the current time, in seconds since the epoch. Raises NotFound if there is no webhook with the
        id `subscription_id`.
        """
        table = schema.deliveries
        with transaction(self._engine) as connection:
            _webhook(connection, subscription_id)
            is_test = (table.c.subscription == subscription_id) & (table.c.event == TEST)
            if found := _deliveries(connection, is_test & (table.c.state == DeliveryState.WAITING.value)):
                return found[0]
            now = clock_time(connection)
            row = _delivery_row(subscription_id, None, TEST, body(now), now)
            connection.execute(sa.insert(table).values(row))
            return _deliveries(connection, table.c.id == row["id"])[0]

    def deliveries(self, subscription_id: str, *, limit: int) -> tuple[DeliveryRecord, ...]:
        """Read the last `limit` deliveries to a subscription (a webhook or an e-mail address), newest first."""
        table = schema.deliveries
        with self._reads.connect() as connection:
            newest = (table.c.created_at.desc(), table.c.id)
            return _deliveries(connection, table.c.subscription == subscription_id, *newest, limit=limit)

    def expand(self, body: Callable[[JobRecord, Notice], str]) -> int:
        """Make deliveries, messages to be sent, from stored notices, and return the number of new deliveries.

        A notice is a change of a job of which users may want to be notified. A delivery is made for each subscription
        (webhook or e-mail address) that covers the job and this kind of change; then the notice is deleted. A call
        handles a limited number of notices. `body` makes the text that is sent. This method does not check whether a
        subscription's owner may read the job; this right is checked when the delivery is sent. Notices of jobs that are
        being deleted are left out.
        """
        table = schema.notices
        with self._reads.connect() as connection:
            if connection.execute(sa.select(table.c.id).limit(1)).scalar() is None:
                return 0
        rows: list[dict[str, Any]] = []
        with transaction(self._engine) as connection:
            oldest = sa.select(table.c.study).order_by(table.c.id).limit(BATCH)
            is_kept = table.c.study.in_(_keep(connection, connection.execute(oldest).scalars().all()))
            query = sa.select(table).where(is_kept).order_by(table.c.id).limit(BATCH).with_for_update(skip_locked=True)
            found = connection.execute(query).mappings().all()
            subscriptions = _subscriptions(connection, schema.subscriptions.c.disabled_at.is_(None))
            now = clock_time(connection)
            for row in found:
                notice = Notice(
                    row["study"], NoticeKind(row["kind"]), JobState(row["state"]), row["reason"], row["time"]
                )
                stored = sa.select(schema.studies).where(schema.studies.c.id == notice.study)
                job = job_record(connection.execute(stored).mappings().one())
                covering = [each for each in subscriptions if notice.kind in each.events and _covers(each, job)]
                text = body(job, notice) if covering else ""
                rows += (_delivery_row(each.id, job.id, notice.kind.value, text, now) for each in covering)
            connection.execute(sa.delete(table).where(table.c.id.in_([row["id"] for row in found])))
            if rows:
                connection.execute(sa.insert(schema.deliveries), rows)
        return len(rows)

    def due(self, *, without: Collection[str], limit: int) -> tuple[DeliveryRecord, ...]:
        """Read the deliveries to send now: one for each of at most `limit` subscriptions, the earliest due first.

        A subscription is a webhook or an e-mail address. `without` has the ids of subscriptions that are left out,
        because something is being sent to them.
        """
        table = schema.deliveries
        with self._reads.connect() as connection:
            is_due = (table.c.state == DeliveryState.WAITING.value) & (table.c.next_at <= clock(connection))
            if without:
                is_due &= table.c.subscription.not_in(without)
            first = sa.func.min(table.c.next_at)
            query = sa.select(table.c.subscription, first).where(is_due).group_by(table.c.subscription)
            found: list[DeliveryRecord] = []
            for subscription, _ in connection.execute(query.order_by(first).limit(limit)).all():
                this = is_due & (table.c.subscription == subscription)
                found += _deliveries(connection, this, table.c.next_at, table.c.id, limit=1)
            return tuple(found)

    def begin(self, delivery: DeliveryRecord, *, pause_s: float) -> SubscriptionRecord | None:
        """Store that this server begins to send a delivery, and return the subscription of the receiver.

        A delivery is a message, and a subscription is a webhook or an e-mail address. The next try is due in `pause_s`
        seconds, so that the delivery is sent even if the server is killed during this try. Returns None if another
        server has begun the try, or if the subscription was removed.
        """
        table = schema.deliveries
        with transaction(self._engine) as connection:
            is_same = (table.c.id == delivery.id) & (table.c.attempts == delivery.attempts)
            changed = connection.execute(
                sa.update(table)
                .where(is_same & (table.c.state == DeliveryState.WAITING.value))
                .values(attempts=delivery.attempts + 1, next_at=clock(connection) + pause_s)
            )
            if changed.rowcount != 1:
                return None
            return _subscriptions(connection, schema.subscriptions.c.id == delivery.subscription)[0]

    def succeed(self, delivery: DeliveryRecord, *, status: int | None) -> None:
        """Store that a delivery arrived. If its subscription (webhook or mail address) was disabled, it is enabled.

        `status` is the HTTP status of the response; None for an e-mail.
        """
        table = schema.subscriptions
        with transaction(self._engine) as connection:
            _end(connection, delivery, DeliveryState.DELIVERED, status, None)
            enabled = {"failing_since": None, "disabled_at": None, "disabled_reason": None}
            connection.execute(sa.update(table).where(table.c.id == delivery.subscription).values(enabled))

    def fail(
        self,
        delivery: DeliveryRecord,
        *,
        status: int | None,
        error: str,
        is_last: bool,
        disables_after_s: float,
    ) -> SubscriptionRecord | None:
        """Store that a try to send a delivery failed, for the reason `error`.

        `status` is the HTTP status of the response, or None without a response. If `is_last` is True, no further try
        follows. The subscription (the webhook or mail address) is then disabled if no try to reach it has succeeded for
        `disables_after_s` seconds; its waiting deliveries are deleted.

        Returns:
            The subscription if it was disabled now, else None.
        """
        table, subscriptions = schema.deliveries, schema.subscriptions
        this = subscriptions.c.id == delivery.subscription
        with transaction(self._engine) as connection:
            now = clock_time(connection)
            if is_last:
                _end(connection, delivery, DeliveryState.FAILED, status, error)
            else:
                changes = {"status": status, "error": error}
                connection.execute(sa.update(table).where(table.c.id == delivery.id).values(changes))
            first = sa.func.coalesce(subscriptions.c.failing_since, now)
            connection.execute(sa.update(subscriptions).where(this).values(failing_since=first))
            found = _subscriptions(connection, this)
            if not is_last or not found or found[0].disabled_at is not None:
                return None
            since = found[0].failing_since
            if since is None or now - since < disables_after_s:
                return None
            reason = f"nothing arrived for {(now - since) / 86_400:.1f} days; the last error: {error}"
            connection.execute(sa.update(subscriptions).where(this).values(disabled_at=now, disabled_reason=reason))
            is_waiting = table.c.state == DeliveryState.WAITING.value
            connection.execute(sa.delete(table).where((table.c.subscription == delivery.subscription) & is_waiting))
            return _subscriptions(connection, this)[0]

    def drop(self, delivery: DeliveryRecord) -> None:
        """Delete a delivery (a message to a webhook or mail address) whose receiver may no longer read the job."""
        with transaction(self._engine) as connection:
            connection.execute(sa.delete(schema.deliveries).where(schema.deliveries.c.id == delivery.id))

    def forget(self) -> None:
        """Delete the deliveries (messages to users) that ended, by success or failure, more than seven days ago."""
        table = schema.deliveries
        with transaction(self._engine) as connection:
            connection.execute(sa.delete(table).where(table.c.finished_at < clock(connection) - KEPT_S))

    # -- jobs that wait ----------------------------------------------------------------------------------------------

    def record_waits(
        self, waiting: Mapping[str, str | None], *, notify_after_s: float, works_after_s: float, passing: str
    ) -> int:
        """Store the reasons why jobs wait, make notices of jobs that wait too long, and return the number of notices.

        A notice is a stored change of a job, from which messages to users are made later. A job waits too long if it
        has waited for one unchanged reason for `notify_after_s` seconds. A job that has a notice gets another notice
        only after it has stopped waiting: a driver (a process that works on the job) has worked on it for
        `works_after_s` seconds, or it was paused, or it has ended.

        `waiting` maps the id of each unfinished job that is not paused to the reason why it waits; None if a driver
        works on the job. `passing` is the text of the reason that a driver is being started, which lasts only for a
        short time. While a job has this reason, its earlier reason stays stored. Jobs that are being deleted are left
        out.
        """
        table = schema.waits
        with self._reads.connect() as connection:
            stored = {row.study: row for row in connection.execute(sa.select(table))}
            now = clock_time(connection)
        changes: list[tuple[str, dict[str, Any] | None]] = [(study, None) for study in stored if study not in waiting]
        due: list[str] = []
        for study, reason in waiting.items():
            before = stored.get(study)
            if before is None:
                if reason is not None:
                    row = {"reason": reason, "since": now, "working_since": None, "is_notified": False}
                    changes.append((study, row))
            elif reason is None:
                if before.working_since is None:
                    changes.append((study, {"working_since": now}))
                elif now - before.working_since >= works_after_s:
                    changes.append((study, None))
            elif reason != passing and _NUMBER.sub("#", reason) != _NUMBER.sub("#", before.reason):
                changes.append((study, {"reason": reason, "since": now, "working_since": None}))
            else:
                if before.working_since is not None:
                    changes.append((study, {"working_since": None}))
                if not before.is_notified and now - before.since >= notify_after_s:
                    due.append(study)
        if not changes and not due:
            return 0
        with transaction(self._engine) as connection:
            kept = _keep(connection, [*due, *(study for study, _ in changes)])
            for study, values in changes:
                if study not in kept:
                    continue
                this = table.c.study == study
                if values is None:
                    connection.execute(sa.delete(table).where(this))
                elif study in stored:
                    connection.execute(sa.update(table).where(this).values(values))
                else:
                    connection.execute(sa.insert(table).values(study=study, **values))
            return sum(self._notify(connection, study) for study in due if study in kept)

    def _notify(self, connection: sa.Connection, study: str) -> bool:
        """Store a notice that a job has waited for too long, for later notifications; return whether it is new.

        `study` is the job's id; the reason of the wait is stored already. The result is False if another server has
        stored the notice, or the job was deleted.
        """
        table = schema.waits
        is_new = (table.c.study == study) & ~table.c.is_notified
        changed = connection.execute(sa.update(table).where(is_new).values(is_notified=True).returning(table.c.reason))
        reason, state = changed.scalar(), _state_of(connection, study)
        if reason is None or state is None:
            return False
        row = {"study": study, "kind": NoticeKind.WAITING.value, "state": state, "reason": reason}
        connection.execute(sa.insert(schema.notices).values(**row, time=clock(connection)))
        return True


def _is_owner(owner: str | None) -> sa.ColumnElement[bool]:
    column = schema.subscriptions.c.owner
    return column.is_(None) if owner is None else column == owner


def _is_mail(user: str) -> sa.ColumnElement[bool]:
    return (schema.subscriptions.c.kind == SubscriptionKind.MAIL.value) & (schema.subscriptions.c.owner == user)


def _covers(subscription: SubscriptionRecord, job: JobRecord) -> bool:
    if subscription.covers is Coverage.ALL:
        return True
    if subscription.covers is Coverage.TEAM:
        return job.team is not None and job.team == subscription.team
    return job.owner is not None and job.owner == subscription.owner


def _subscriptions(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[SubscriptionRecord, ...]:
    table = schema.subscriptions
    rows = connection.execute(sa.select(table).where(where).order_by(table.c.created_at, table.c.id)).mappings()
    return tuple(
        SubscriptionRecord(
            **{
                **row,
                "kind": SubscriptionKind(row["kind"]),
                "covers": Coverage(row["covers"]),
                "events": tuple(NoticeKind(event) for event in row["events"]),
            }
        )
        for row in rows
    )


def _webhook(connection: sa.Connection, webhook_id: str) -> SubscriptionRecord:
    table = schema.subscriptions
    is_this = (table.c.id == webhook_id) & (table.c.kind == SubscriptionKind.WEBHOOK.value)
    found = _subscriptions(connection, is_this)
    if not found:
        raise NotFound(f"webhook {webhook_id!r:.80}: there is no such webhook")
    return found[0]


def _document(subscription: SubscriptionRecord) -> dict[str, Any]:
    """Describe a subscription (a webhook or mail address) for the audit log, without its secret.

    The description has only the host of a webhook's URL, because the path may be a secret.
    """
    is_webhook = subscription.kind is SubscriptionKind.WEBHOOK
    target = {"host": urlsplit(subscription.target).hostname} if is_webhook else {"address": subscription.target}
    coverage = {"covers": subscription.covers.value, "team": subscription.team} if is_webhook else {}
    return {**target, **coverage, "events": [event.value for event in subscription.events]}


def _delivery_row(subscription: str, study: str | None, event: str, body: str, now: float) -> dict[str, Any]:
    row = {"id": uuid.uuid4().hex, "subscription": subscription, "study": study, "event": event, "body": body}
    return row | {"state": DeliveryState.WAITING.value, "attempts": 0, "created_at": now, "next_at": now}


def _deliveries(
    connection: sa.Connection,
    where: sa.ColumnElement[bool],
    *order: sa.ColumnElement[Any],
    limit: int | None = None,
) -> tuple[DeliveryRecord, ...]:
    rows = connection.execute(sa.select(schema.deliveries).where(where).order_by(*order).limit(limit)).mappings()
    return tuple(DeliveryRecord(**{**row, "state": DeliveryState(row["state"])}) for row in rows)


def _end(
    connection: sa.Connection, delivery: DeliveryRecord, state: DeliveryState, status: int | None, error: str | None
) -> None:
    table = schema.deliveries
    changes = {"state": state.value, "status": status, "error": error, "next_at": None}
    this = sa.update(table).where(table.c.id == delivery.id)
    connection.execute(this.values(**changes, finished_at=clock(connection)))


def _keep(connection: sa.Connection, jobs: Collection[str]) -> frozenset[str]:
    """Protect jobs from deletion until the transaction ends, and return the ids of the protected jobs.

    Jobs that do not exist, or that another transaction is deleting, are left out of the result. Callers must not change
    rows of these jobs: if a caller and a deletion waited for each other's rows, this would be a deadlock.
    """
    table = schema.studies
    query = sa.select(table.c.id).where(table.c.id.in_(set(jobs)))
    return frozenset(connection.execute(query.with_for_update(read=True, key_share=True, skip_locked=True)).scalars())


def _state_of(connection: sa.Connection, job_id: str) -> str | None:
    """The state of a job; None if the job was deleted."""
    return connection.execute(sa.select(schema.studies.c.state).where(schema.studies.c.id == job_id)).scalar()
