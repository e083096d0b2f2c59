"""A notifier with everything real except the cluster, and functions that create jobs and webhooks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Self

import sqlalchemy as sa

from service.notifications.notifier import Notifier
from service.notifications.settings import NotificationSettings
from service.notifications.signatures import new_webhook_secret
from service.store import JobWriter, Store, schema
from service.store.accounts import AccountStore, Actor
from service.store.connection import transaction
from service.store.notifications import NotificationStore
from service.types import Coverage, DeliveryRecord, JobState, NoticeKind, Role, SubscriptionRecord
from tests.service.site import FakeCluster

ACTOR = Actor(None, "tests")
ALLOWED = NotificationSettings(frozenset({"127.0.0.1"}))


class Office:
    """Runs notifiers. `start` starts another one, as a second or restarted server does."""

    def __init__(self, store: Store, settings: NotificationSettings = ALLOWED) -> None:
        self.store = store
        self.settings = settings
        self.notifications = NotificationStore(store)
        self.accounts = AccountStore(store)
        self.cluster = FakeCluster()
        self._notifiers: list[Notifier] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, settings: NotificationSettings | None = None, **options: Any) -> Notifier:
        notifier = Notifier(self.store, self.cluster, settings or self.settings, **options)
        notifier.start()
        self._notifiers.append(notifier)
        return notifier

    def stop(self) -> None:
        for notifier in self._notifiers:
            notifier.stop()
        self._notifiers.clear()

    def staff(self) -> None:
        """Add an administrator, and the team "red" with a member "ann" and an administrator "max"."""
        self.accounts.add_user("root", is_admin=True, actor=ACTOR)
        self.accounts.add_team("red", actor=ACTOR)
        for user, role in (("ann", Role.MEMBER), ("max", Role.ADMIN)):
            self.accounts.add_user(user, is_admin=False, actor=ACTOR)
            self.accounts.set_role("red", user, role, actor=ACTOR)

    def webhook(
        self,
        url: str,
        *,
        owner: str | None = None,
        covers: Coverage = Coverage.ALL,
        team: str | None = None,
        events: Collection[NoticeKind] = tuple(NoticeKind),
    ) -> SubscriptionRecord:
        return self.notifications.add_webhook(
            url, secret=new_webhook_secret(), events=events, owner=owner, covers=covers, team=team, actor=ACTOR
        )

    def job(self, *, name: str = "sums", owner: str | None = None, team: str | None = None) -> JobWriter:
        job = self.store.create_job(kind="search", name=name, document={}, accepted={}, owner=owner, team=team)
        writer = self.store.open_attempt(job.id)
        writer.set_state(JobState.RUNNING)
        return writer

    def deliveries(self, webhook: SubscriptionRecord) -> tuple[DeliveryRecord, ...]:
        return self.notifications.deliveries(webhook.id, limit=100)

    def notices(self) -> int:
        """Number of notices without deliveries so far."""
        with self.store.reading() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(schema.notices)).scalar_one()

    def shift(self, table: sa.Table, column: str, seconds: float) -> None:
        """Move stored times to the past."""
        with transaction(self.store.engine) as connection:
            connection.execute(sa.update(table).values({column: table.c[column] - seconds}))
