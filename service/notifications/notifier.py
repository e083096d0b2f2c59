"""Thread that sends messages about changes of jobs to webhooks and by e-mail.

A notice is a stored change of a job. The thread makes a delivery, one message to one receiver, for each receiver of a
notice. Everything that must survive a kill is in the database: notices, deliveries, the number of tries, and the time
of the next try. Each receiver has at most one try at a time, and the tries of different receivers run at the same time,
so that a slow receiver delays only its own deliveries.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import httpx
from sqlalchemy.exc import SQLAlchemyError

from service.cluster.reconciler import STARTING
from service.errors import NotFound
from service.notifications.documents import message_id, notification
from service.notifications.mail import send_mail
from service.notifications.reachable import PublicNetwork, url_problem
from service.notifications.retries import DISABLES_AFTER_S, MAX_TRIES, pause_s
from service.notifications.settings import NotificationSettings
from service.notifications.signatures import signed_headers
from service.notifications.webhooks import Outcome, send_webhook
from service.store import Store
from service.store.accounts import AccountStore
from service.store.notifications import TEST, Notice, NotificationStore
from service.types import (
    Account,
    Coverage,
    DeliveryRecord,
    JobRecord,
    Role,
    SubscriptionKind,
    SubscriptionRecord,
)

__all__ = ["Notifier", "may_receive"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 1.0

# Seconds between looks at what jobs wait for, and between removals of old deliveries.
WAITS_S, FORGET_S = 15.0, 3600.0

# Seconds that a driver must work on a waiting job before the job counts as running again. A driver that only finds out
# that something is still missing ends sooner.
WORKS_AFTER_S = 60.0

# Tries at once, and threads that resolve names.
MAX_TRIES_AT_ONCE, RESOLVERS = 200, 32

# Reader for whom reasons of waits are written. A notice goes to every subscription that covers the job, also to the
# subscription of an owner who has left the job's team. Only users who may read the team may know the numbers of its
# quotas.
OUTSIDER = Account("")

# An HTTP status of receivers that want nothing any more.
GONE = 410


class Cluster(Protocol):
    """Interface of the Ray cluster for a notifier: what the notifier must know about this server and its jobs."""

    def is_leader(self) -> bool:
        """Whether this server is the leader: the only one of the servers with the same database that starts drivers.

        A driver is a process that works on a job.
        """

    def waiting_for(self, job: JobRecord, *, reader: Account | None = None) -> str | None:
        """Reason why a job waits, as the user `reader` may know it; None if a driver (process) works on the job."""


class Notifier:
    """Thread of a server that notifies users of changes of jobs, while the server is the leader.

    Args:
        store: The database.
        cluster: The cluster of the server.
        settings: Settings of the webhooks and mails.
        has_accounts: Whether the server may have accounts; False if everybody may do everything.
    """

    def __init__(
        self, store: Store, cluster: Cluster, settings: NotificationSettings, *, has_accounts: bool = True
    ) -> None:
        self._store = store
        self._notifications = NotificationStore(store)
        self._accounts = AccountStore(store)
        self._cluster = cluster
        self._settings = settings
        self._has_accounts = has_accounts
        self._generator = random.Random()
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waking: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)

    @property
    def settings(self) -> NotificationSettings:
        return self._settings

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; messages that are being sent are abandoned, and a later try sends them."""
        self._stopping.set()
        self.wake()
        self._thread.join(timeout=30)

    def wake(self) -> None:
        """Make the thread look for messages to send at once, instead of at its next regular time."""
        loop, waking = self._loop, self._waking
        if loop is not None and waking is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(waking.set)
            except RuntimeError:  # closed at this moment
                return

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._waking = asyncio.get_running_loop(), asyncio.Event()
        self._tls = httpx.create_ssl_context()
        self._database = ThreadPoolExecutor(1, thread_name_prefix="notifications-database")
        self._mails = ThreadPoolExecutor(4, thread_name_prefix="notifications-mail")
        resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="notifications-names")
        self._network = PublicNetwork(allowed=self._settings.allowed_hosts, resolvers=resolvers)
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._waits_at = self._forget_at = 0.0
        try:
            while not self._stopping.is_set():
                await self._round()
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._waking.wait()
                except TimeoutError:
                    continue
                self._waking.clear()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._database.shutdown()
            for executor in (self._mails, resolvers):
                executor.shutdown(wait=False, cancel_futures=True)

    async def _round(self) -> None:
        try:
            if not self._cluster.is_leader():
                return
            await self._stored(self._look)
            room = MAX_TRIES_AT_ONCE - len(self._running)
            for delivery in await self._stored(
                lambda: self._notifications.due(without=list(self._running), limit=room)
            ):
                task = asyncio.create_task(self._deliver(delivery), name=f"delivery {delivery.id}")
                self._running[delivery.subscription] = task
                task.add_done_callback(partial(self._done, delivery.subscription))
        except SQLAlchemyError:
            if self._store.problem() is None:  # else the availability has logged it
                logger.exception("notifications: a round failed")
        except Exception:  # the next round starts from the stored state
            logger.exception("notifications: a round failed")

    def _done(self, subscription: str, task: asyncio.Task[bool]) -> None:
        self._running.pop(subscription, None)
        if self._waking is not None and not task.cancelled() and task.result():
            self._waking.set()  # there may be more for the same subscription

    async def _stored(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._database, call)

    def _look(self) -> None:
        """Store notices of the jobs that have waited too long, and make the deliveries of all notices.

        A delivery is a message about a notice to one subscription: a webhook or an e-mail address. Not every call
        examines how long jobs have waited. Deliveries that ended long ago are deleted from time to time.
        """
        now = time.monotonic()
        if now >= self._waits_at:
            self._waits_at = now + min(WAITS_S, max(self._settings.waiting_s / 4, POLL_S))
            self._look_at_waits()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_S
            self._notifications.forget()
        self._notifications.expand(self._body)

    def _look_at_waits(self) -> None:
        jobs = [job for job in self._store.unfinished_jobs() if not job.is_paused]
        waiting = {job.id: self._cluster.waiting_for(job, reader=OUTSIDER) for job in jobs}
        self._notifications.record_waits(
            waiting, notify_after_s=self._settings.waiting_s, works_after_s=WORKS_AFTER_S, passing=STARTING
        )

    def _body(self, job: JobRecord, notice: Notice) -> str:
        return notification(job, notice, public_url=self._settings.public_url)

    # -- one delivery ------------------------------------------------------------------------------------------------

    async def _deliver(self, delivery: DeliveryRecord) -> bool:
        """Try to send a delivery, a message to a webhook or mail address, and store the outcome.

        Returns False if the database did not answer.
        """
        try:
            tries = delivery.attempts + 1
            pause = pause_s(tries, generator=self._generator)
            subscription = await self._stored(lambda: self._notifications.begin(delivery, pause_s=pause))
            if subscription is None:
                return True
            if not await self._stored(lambda: self._may_receive(subscription, delivery)):
                await self._stored(lambda: self._notifications.drop(delivery))
                return True
            try:
                outcome = await self._send(subscription, delivery)
            except Exception as error:  # of this program: the other tries follow, and the last one ends them
                logger.exception("delivery %s: cannot be sent", delivery.id)
                outcome = Outcome(error=f"internal error: {type(error).__name__}")
            await self._stored(lambda: self._store_outcome(subscription, delivery, outcome, tries))
        except SQLAlchemyError:  # the try is repeated
            if self._store.problem() is None:
                logger.exception("delivery %s: cannot be stored", delivery.id)
            return False
        return True

    def _may_receive(self, subscription: SubscriptionRecord, delivery: DeliveryRecord) -> bool:
        try:
            job = None if delivery.study is None else self._store.job(delivery.study)
            user = None if subscription.owner is None else self._accounts.user(subscription.owner)
        except NotFound:  # deleted at this moment
            return False
        if user is None:
            return not self._has_accounts or not self._accounts.has_users()
        return not user.is_disabled and may_receive(user.account, subscription, job)

    async def _send(self, subscription: SubscriptionRecord, delivery: DeliveryRecord) -> Outcome:
        if subscription.kind is SubscriptionKind.MAIL:
            return await self._send_mail(subscription, delivery)
        if url_problem(subscription.target, allowed=self._settings.allowed_hosts) is not None:
            return Outcome(error="the URL is not accepted any more: its host must be named by --webhook-allow")
        body = delivery.body.encode()
        assert subscription.secret is not None, "webhooks have secrets"
        headers = signed_headers(
            subscription.secret, message_id=message_id(delivery), timestamp=int(time.time()), body=body
        )
        return await send_webhook(subscription.target, body, headers=headers, network=self._network, tls=self._tls)

    async def _send_mail(self, subscription: SubscriptionRecord, delivery: DeliveryRecord) -> Outcome:
        mail = self._settings.mail
        if mail is None:
            return Outcome(error="the server has no mail server (--smtp-url)")

        def send() -> Outcome:
            return send_mail(mail, to=subscription.target, message_id=delivery.id, body=delivery.body)

        return await asyncio.get_running_loop().run_in_executor(self._mails, send)

    def _store_outcome(
        self, subscription: SubscriptionRecord, delivery: DeliveryRecord, outcome: Outcome, tries: int
    ) -> None:
        if outcome.error is None:
            self._notifications.succeed(delivery, status=outcome.status)
            return
        is_gone = outcome.status == GONE
        is_last = tries >= MAX_TRIES or delivery.event == TEST or outcome.is_final or is_gone
        disabled = self._notifications.fail(
            delivery,
            status=outcome.status,
            error=outcome.error,
            is_last=is_last,
            disables_after_s=0.0 if is_gone else DISABLES_AFTER_S,
        )
        if disabled is not None:
            logger.warning("%s %s of %s: is disabled, as nothing arrives", *_shown(subscription))
        elif is_last:  # without the error, which may quote the receiver
            logger.warning("%s %s of %s: delivery %s failed", *_shown(subscription), delivery.id)


def _shown(subscription: SubscriptionRecord) -> tuple[Any, ...]:
    return subscription.kind.value, subscription.id, subscription.owner or "nobody"


def may_receive(account: Account, subscription: SubscriptionRecord, job: JobRecord | None) -> bool:
    """Whether a message about `job` may be sent to a subscription (a webhook or mail address).

    The subscription must cover the job. `account` is the subscription's owner with the present rights, which must
    permit the message. For a test message, which is about no job, `job` is None.
    """
    if subscription.covers is Coverage.ALL:
        has_right = account.is_admin
    elif subscription.covers is Coverage.TEAM:
        has_right = account.is_admin or account.roles.get(subscription.team or "") is Role.ADMIN
        has_right = has_right and (job is None or job.team == subscription.team)
    else:
        has_right = job is None or job.owner == account.user
    return has_right and (job is None or account.may_read(job))
