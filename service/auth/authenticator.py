"""Authentication of requests: finds the user of a token or a session, and decides whether requests need a token.

Answers of the database are cached for half a second. Therefore a token that any server has revoked, or a session that
any server has ended, is refused within a second, and most checks do not read the database.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from service.auth.sessions import IDLE_S
from service.auth.tokens import digest_of
from service.store.accounts import AccountStore
from service.types import Account, Scope, SessionRecord, TokenRecord

__all__ = ["REMEMBERED_S", "USES_S", "Authenticated", "Authenticator"]

logger = logging.getLogger(__name__)

# Seconds for which an answer of the database is used again.
REMEMBERED_S = 0.5

# Seconds between the times at which the last uses of tokens and sessions are stored.
USES_S = 10.0

# Answers that are remembered at most; all are forgotten when there are more.
MAX_REMEMBERED = 10_000


# Threads in which the database is asked at the same time.
MAX_THREADS = 4


@dataclass(frozen=True)
class Authenticated:
    """The owner of a valid token or browser session that came with a request, and the owner's rights.

    `account` has the rights. `token` is the record of the API token, and `session` is the record of the browser
    session; one of the two is None.
    """

    account: Account
    token: TokenRecord | None = None
    session: SessionRecord | None = None

    @property
    def id(self) -> str:
        """Id of the stored token or browser session that identified the user."""
        found = self.token or self.session
        assert found is not None
        return found.id

    @property
    def scope(self) -> Scope:
        """Scope of the token or session: the kinds of requests that it permits.

        A session that was begun with a token has the token's scope. Any other session may manage accounts only if its
        user administers the server.
        """
        if self.token is not None:
            return self.token.scope
        if self.session is not None and self.session.scope is not None:
            return self.session.scope
        return Scope.ADMIN if self.account.is_admin else Scope.SUBMIT


@dataclass(frozen=True)
class _Answer:
    found: Authenticated | None
    read_at: float


class _Answers:
    """Cache of the database's answers to the question which user a token or session belongs to.

    The key of an answer is the sha256 of the token or of the session's cookie. An answer is used again for half a
    second. `read` asks the database. `limiter` limits the threads in which `read` is called. `clock` returns seconds
    from a monotonic clock.
    """

    def __init__(
        self,
        read: Callable[[str], Authenticated | None],
        limiter: anyio.CapacityLimiter,
        clock: Callable[[], float],
    ) -> None:
        self._ask = read
        self._limiter = limiter
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._reading: dict[str, asyncio.Task[Authenticated | None]] = {}

    async def find(self, digest: str) -> Authenticated | None:
        answer = self._answers.get(digest)
        if answer is not None and self._clock() - answer.read_at < REMEMBERED_S:
            return answer.found
        reading = self._reading.get(digest)
        if reading is None:  # simultaneous requests read it once
            reading = self._reading[digest] = asyncio.create_task(self._read(digest))
            reading.add_done_callback(lambda _: self._reading.pop(digest, None))
        return await asyncio.shield(reading)

    async def _read(self, digest: str) -> Authenticated | None:
        read_at = self._clock()  # before the answer, which is as old as its transaction
        found = await anyio.to_thread.run_sync(self._ask, digest, limiter=self._limiter)
        if len(self._answers) >= MAX_REMEMBERED:
            self._answers.clear()
        self._answers[digest] = _Answer(found, read_at)
        return found

    def forget(self) -> None:
        self._answers.clear()


class Authenticator:
    """Authenticator of one server: it finds the user of the token or session in a request.

    If `is_on` is False, the server has no accounts, even if the database has users. `clock` returns seconds from a
    monotonic clock; tests replace it. All coroutines must be called in one event loop.
    """

    def __init__(
        self, accounts: AccountStore, *, is_on: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._accounts = accounts
        self._is_on = is_on
        self._clock = clock
        self._used_at: dict[str, float] = {}
        self._used_sessions: set[str] = set()
        self._has_users: bool | None = None
        # Threads of their own: requests that wait in the application's threads do not keep others from being checked.
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        self._tokens = _Answers(self._token, self._threads, clock)
        self._sessions = _Answers(self._session, self._threads, clock)
        self._looked_at = -REMEMBERED_S

    async def needs_token(self) -> bool:
        """Whether requests need a token, which they do if the server has accounts and the database has a user.

        Users are never deleted, so the result stays True once it is True. While the database does not answer, the last
        known result is returned. Raises SQLAlchemyError if the database has not answered yet, because some requests,
        such as those for Ray's dashboard, read no database and would be accepted without a token.
        """
        if not self._is_on:
            return False
        if not self._has_users and self._clock() - self._looked_at >= REMEMBERED_S:
            try:
                self._has_users = await anyio.to_thread.run_sync(self._accounts.has_users, limiter=self._threads)
                self._looked_at = self._clock()
            except SQLAlchemyError:
                if self._has_users is None:
                    raise
        assert self._has_users is not None
        return self._has_users

    async def authenticate(self, secret: str) -> Authenticated | None:
        """Find the user of the API token `secret`.

        Returns None if the token is unknown, revoked or expired, or if its user is disabled.
        """
        found = await self._tokens.find(digest_of(secret))
        if found is not None:
            self._used_at[found.id] = time.time()
        return found

    async def authenticate_session(self, secret: str) -> Authenticated | None:
        """Find the user of the browser session whose cookie is `secret`; None if the session is not valid."""
        found = await self._sessions.find(digest_of(secret))
        if found is not None:
            self._used_sessions.add(found.id)
        return found

    def _token(self, digest: str) -> Authenticated | None:
        answer = self._accounts.find_token(digest)
        return None if answer is None else Authenticated(answer[1], token=answer[0])

    def _session(self, digest: str) -> Authenticated | None:
        answer = self._accounts.find_session(digest, idle_s=IDLE_S)
        return None if answer is None else Authenticated(answer[1], session=answer[0])

    def forget(self) -> None:
        """Empty the cache of answers about tokens and sessions; called after this server has changed accounts."""
        self._tokens.forget()
        self._sessions.forget()

    async def record_uses(self) -> None:
        """Store in the database when tokens and sessions were last used, every 10 s and once more when cancelled.

        The coroutine never returns.
        """
        try:
            while True:
                await asyncio.sleep(USES_S)
                await anyio.to_thread.run_sync(self.store_uses, limiter=self._threads)
        finally:
            self.store_uses()

    def store_uses(self) -> None:
        """Store in the database which tokens and sessions were used since the last call of this method, and when."""
        used_at, self._used_at = self._used_at, {}
        used_sessions, self._used_sessions = self._used_sessions, set()
        for used, store in (
            (used_at, partial(self._accounts.record_uses, used_at)),
            (used_sessions, partial(self._accounts.record_session_uses, used_sessions)),
        ):
            if used:
                try:
                    store()
                except SQLAlchemyError:
                    logger.exception("the last uses of %d tokens or sessions could not be stored", len(used))
