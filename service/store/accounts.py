"""Users, teams, tokens, sessions and the audit log of a server, in its database.

A change and its entry in the audit log are stored in one transaction. A change that would leave the server without an
administrator is refused.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import sqlalchemy as sa

from service.errors import Conflict, NotFound
from service.store import schema
from service.store.attempt_writer import insert_event, lock_job
from service.store.availability import repeated
from service.store.connection import clock, clock_time, reading, transaction
from service.store.jobs import FINISHED
from service.store.records import job_record
from service.store.sql import Store
from service.types import (
    NO_IDENTITY,
    Account,
    AuditRecord,
    EventKind,
    JobRecord,
    LoginRecord,
    LoginRule,
    Role,
    Scope,
    SessionRecord,
    Sharing,
    Steering,
    TeamLimits,
    TeamRecord,
    TokenRecord,
    UserRecord,
)

__all__ = ["MAX_NAME", "NAME_PATTERN", "AccountStore", "Actor", "name_problem", "record_change"]

# Names of users, teams and tokens; e-mail addresses in lower case are names of users.
MAX_NAME = 64
NAME_PATTERN = r"^[a-z0-9][a-z0-9._@+-]{0,63}$"

# Any number, as long as every process uses the same (PostgreSQL).
ACCOUNTS_LOCK = 0x6D656163


@dataclass(frozen=True)
class Actor:
    """The originator of a change, for the audit log.

    `user` is the name of the user, or None if no user is known, as for a command on the server's machine. `origin` says
    where the change came from, such as a network address. `token` is the beginning of the token with which the change
    was requested, or None.
    """

    user: str | None
    origin: str
    token: str | None = None


def name_problem(name: str) -> str | None:
    """Reason why `name` is not allowed as the name of a user, a team or a token; None if it is allowed."""
    if re.fullmatch(NAME_PATTERN[1:-1], name):
        return None
    return (
        f"{name!r:.80} is not a name; a name has 1 to {MAX_NAME} lower-case letters, digits and any of ._@+-, and "
        "begins with a letter or a digit"
    )


@repeated
class AccountStore:
    """Store of users, teams, tokens, sessions and the audit log in the database of `store`. Thread-safe.

    Methods that change something have the argument `actor`, which says who makes the change, and write the change to
    the audit log. Callers must check names with the function `name_problem` first.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engine = store.engine
        self._reads = reading(self._engine)

    # -- users -----------------------------------------------------------------------------------------------------

    def has_users(self) -> bool:
        """Whether the database has a user; if there is a user, requests to the server need a token."""
        with self._reads.connect() as connection:
            return _has_rows(connection, schema.users)

    def users(self) -> tuple[UserRecord, ...]:
        """Read all users with their roles, ordered by name."""
        with self._reads.connect() as connection:
            return _users(connection, sa.true())

    def user(self, name: str) -> UserRecord:
        """Read the user with the given name. Raises NotFound if there is no such user."""
        with self._reads.connect() as connection:
            return _user(connection, name)

    def add_user(self, name: str, *, is_admin: bool, actor: Actor, login: LoginRule = LoginRule.FIRST) -> UserRecord:
        """Store a new user and return the user. The first user of a server becomes the owner of all existing jobs.

        `is_admin` says whether the user administers the server. `actor` is who adds the user, for the audit log.
        `login` says whether an identity of the identity provider can log in as the user; a new user has none that is
        known. Raises Conflict if the name is taken, or if the first user is not an administrator.
        """
        _check_name(name)
        with transaction(self._engine) as connection:
            _lock(connection)
            if _users(connection, schema.users.c.name == name):
                raise Conflict(f"user {name!r}: exists already")
            is_first = not _has_rows(connection, schema.users)
            if is_first and not is_admin:
                raise Conflict(f"user {name!r}: the first user must be an administrator of the server (--admin)")
            row = {"name": name, "is_admin": is_admin, "is_disabled": False, "created_at": clock(connection)}
            identity = None if login is LoginRule.FIRST else NO_IDENTITY
            connection.execute(sa.insert(schema.users).values(**row, identity=identity))
            user = _user(connection, name)
            record_change(connection, actor, "user.add", f"user {name}", None, _user_document(user))
            if is_first:
                adopted = connection.execute(
                    sa.update(schema.studies).where(schema.studies.c.owner.is_(None)).values(owner=name)
                ).rowcount
                if adopted:
                    record_change(connection, actor, "jobs.adopt", f"user {name}", None, {"jobs": adopted})
        return user

    def change_user(
        self, name: str, *, actor: Actor, is_admin: bool | None = None, is_disabled: bool | None = None
    ) -> UserRecord:
        """Change whether a user is an administrator of the server, or is disabled, and return the user.

        `is_admin` and `is_disabled` are the new values; None leaves a value unchanged. A user who becomes disabled is
        logged out of all sessions. `actor` is who makes the change, for the audit log. Raises NotFound if there is no
        such user, and Conflict if no administrator would be left.
        """
        table = schema.users
        with transaction(self._engine) as connection:
            _lock(connection)
            before = _user(connection, name)
            changed = {
                "is_admin": before.is_admin if is_admin is None else is_admin,
                "is_disabled": before.is_disabled if is_disabled is None else is_disabled,
            }
            connection.execute(sa.update(table).where(table.c.name == name).values(**changed))
            if not _has_rows(connection, table, table.c.is_admin & ~table.c.is_disabled):
                raise Conflict(
                    f"user {name!r}: is the last administrator, who can be neither disabled nor demoted; make "
                    "another user an administrator first"
                )
            if changed["is_disabled"]:
                connection.execute(sa.delete(schema.sessions).where(schema.sessions.c.user == name))
            after = _user(connection, name)
            if after != before:
                record_change(
                    connection, actor, "user.change", f"user {name}", _user_document(before), _user_document(after)
                )
        return after

    def bind_identity(self, name: str, identity: str, *, actor: Actor) -> None:
        """Bind a user to an identity at the identity provider; from then on, only this identity can log in as the user.

        `name` is the user's name. `identity` consists of the provider's issuer and subject, and never changes for a
        person. `actor` is who logs in, for the audit log. Raises NotFound if there is no such user, and Conflict if the
        user is bound to another identity, or if nobody can log in as the user.
        """
        table = schema.users
        with transaction(self._engine) as connection:
            _lock(connection)
            known = _user(connection, name).identity
            if known == identity:
                return
            if known == NO_IDENTITY:
                raise _nobody(name)
            if known is not None:
                raise Conflict(
                    f"user {name!r}: another identity of the identity provider has logged in as this user before; an "
                    "administrator can allow a new one (`mergesearch users unbind`)"
                )
            connection.execute(sa.update(table).where(table.c.name == name).values(identity=identity))
            record_change(connection, actor, "user.bind", f"user {name}", None, {"identity": identity})

    def unbind_identity(self, name: str, *, actor: Actor) -> UserRecord:
        """Unbind a user from an identity at the identity provider, end the user's sessions, and return the user.

        The next identity that logs in under the user's name is bound to the user. `actor` is who makes the change, for
        the audit log. Raises NotFound if there is no such user, and Conflict if nobody can log in as the user.
        """
        table = schema.users
        with transaction(self._engine) as connection:
            _lock(connection)
            before = _user(connection, name)
            if before.identity == NO_IDENTITY:
                raise _nobody(name)
            connection.execute(sa.update(table).where(table.c.name == name).values(identity=None))
            connection.execute(sa.delete(schema.sessions).where(schema.sessions.c.user == name))
            if before.identity is not None:
                record_change(connection, actor, "user.unbind", f"user {name}", {"identity": before.identity}, None)
            return _user(connection, name)

    def set_login(self, name: str, rule: LoginRule, *, actor: Actor) -> UserRecord:
        """Set which identity of the identity provider can log in as a user, and return the user.

        If nobody can any more, the user is unbound from its identity, and its sessions end. `name` is the user's name.
        `actor` is who makes the change, for the audit log. Raises NotFound if there is no such user.
        """
        table = schema.users
        with transaction(self._engine) as connection:
            _lock(connection)
            known = _user(connection, name).identity
            is_bound = known not in (None, NO_IDENTITY)
            if rule is LoginRule.FIRST:
                wanted = known if is_bound else None
            else:
                wanted = known if is_bound and rule is LoginRule.KNOWN else NO_IDENTITY
            if wanted != known:
                connection.execute(sa.update(table).where(table.c.name == name).values(identity=wanted))
                documents = [None if each is None else {"identity": each} for each in (known, wanted)]
                action = "user.unbind" if wanted is None else "user.bind"
                record_change(connection, actor, action, f"user {name}", *documents)
            if is_bound and wanted == NO_IDENTITY:
                connection.execute(sa.delete(schema.sessions).where(schema.sessions.c.user == name))
            return _user(connection, name)

    # -- teams -----------------------------------------------------------------------------------------------------

    def teams(self) -> tuple[TeamRecord, ...]:
        """Read all teams with their members, ordered by name."""
        with self._reads.connect() as connection:
            return _teams(connection, sa.true())

    def team(self, name: str) -> TeamRecord:
        """Read the team with the given name. Raises NotFound if there is no such team."""
        with self._reads.connect() as connection:
            return _team(connection, name)

    def add_team(self, name: str, *, actor: Actor) -> TeamRecord:
        """Store a new team without members and return it. Raises Conflict if the name is taken.

        `actor` is who adds the team, for the audit log.
        """
        _check_name(name)
        with transaction(self._engine) as connection:
            _lock(connection)
            if _teams(connection, schema.teams.c.name == name):
                raise Conflict(f"team {name!r}: exists already")
            connection.execute(sa.insert(schema.teams).values(name=name, created_at=clock(connection)))
            team = _team(connection, name)
            record_change(connection, actor, "team.add", f"team {name}", None, {"members": {}})
        return team

    def remove_team(self, name: str, *, actor: Actor) -> None:
        """Remove a team. Raises NotFound if there is no such team, and Conflict if the team has jobs.

        `actor` is who removes the team, for the audit log.
        """
        # No job is stored for the team, or moved to it, meanwhile.
        with self._store.admission(), transaction(self._engine) as connection:
            _lock(connection)
            before = _team(connection, name)
            if _has_rows(connection, schema.studies, schema.studies.c.team == name):
                raise Conflict(f"team {name!r}: has jobs; delete them, or move them to another team, first")
            connection.execute(sa.delete(schema.memberships).where(schema.memberships.c.team == name))
            connection.execute(sa.delete(schema.teams).where(schema.teams.c.name == name))
            record_change(connection, actor, "team.remove", f"team {name}", _team_document(before), None)

    def set_role(self, team: str, user: str, role: Role | None, *, actor: Actor) -> TeamRecord:
        """Give a user a role in a team, and return the team. If `role` is None, the user is removed from the team.

        `actor` is who makes the change, for the audit log. Raises NotFound if there is no such team or user.
        """
        table = schema.memberships
        with transaction(self._engine) as connection:
            _lock(connection)
            before = _team(connection, team)
            _user(connection, user)
            connection.execute(sa.delete(table).where((table.c.team == team) & (table.c.user == user)))
            if role is not None:
                connection.execute(sa.insert(table).values(team=team, user=user, role=role.value))
            after = _team(connection, team)
            if after != before:
                documents = (_team_document(before), _team_document(after))
                record_change(connection, actor, "team.change", f"team {team}", *documents)
        return after

    def limits(self) -> dict[str, TeamLimits]:
        """Read the weight and the quotas of each team, keyed by the name of the team."""
        with self._reads.connect() as connection:
            return {row["name"]: _limits(row) for row in connection.execute(sa.select(schema.teams)).mappings()}

    def set_limits(self, team: str, changes: Mapping[str, Any], *, actor: Actor) -> TeamRecord:
        """Change the weight and quotas of a team, and return the team.

        `changes` contains the new values, keyed by their names in `TeamLimits`; None lifts a quota. `actor` is who
        makes the change, for the audit log. Raises NotFound if there is no such team.
        """
        with transaction(self._engine) as connection:
            _lock(connection)
            before = _team(connection, team)
            if changes:
                of_team = schema.teams.c.name == team
                connection.execute(sa.update(schema.teams).where(of_team).values(**changes))
            after = _team(connection, team)
            if after != before:
                was, is_now = ({"limits": asdict(record.limits)} for record in (before, after))
                record_change(connection, actor, "team.limit", f"team {team}", was, is_now)
        return after

    # -- tokens ----------------------------------------------------------------------------------------------------

    def tokens(self, user: str | None = None) -> tuple[TokenRecord, ...]:
        """Read the API tokens of one user, or of all users if `user` is None, oldest first."""
        table = schema.tokens
        where = sa.true() if user is None else table.c.user == user
        with self._reads.connect() as connection:
            return _tokens(connection, where)

    def token(self, token_id: str) -> TokenRecord:
        """Read the API token with the id `token_id`. Raises NotFound if there is no such token."""
        with self._reads.connect() as connection:
            return _token(connection, token_id)

    def add_token(
        self,
        user: str,
        *,
        name: str,
        digest: str,
        prefix: str,
        scope: Scope,
        lifetime_s: float | None,
        actor: Actor,
    ) -> TokenRecord:
        """Store a new API token of a user, and return its record. Only a hash of the token is stored.

        `name` is a name for the token that the user has chosen. `digest` is the sha256 of the token, and `prefix` is
        its first characters, which are shown to users. `scope` says for which requests the token can be used. The token
        expires after `lifetime_s` seconds, or never if `lifetime_s` is None. `actor` is who adds the token, for the
        audit log. Raises NotFound if there is no such user, and Conflict if the token is stored already.
        """
        _check_name(name)
        row = {"id": uuid.uuid4().hex, "user": user, "name": name, "digest": digest, "prefix": prefix, "scope": scope}
        with transaction(self._engine) as connection:
            _lock(connection)
            _user(connection, user)
            if _has_rows(connection, schema.tokens, schema.tokens.c.digest == digest):
                raise Conflict(f"token {name!r}: this token is stored already; give another one")
            now = clock(connection)
            expires_at = None if lifetime_s is None else now + lifetime_s
            connection.execute(sa.insert(schema.tokens).values(**row, created_at=now, expires_at=expires_at))
            token = _token(connection, row["id"])
            record_change(connection, actor, "token.add", f"token {token.id}", None, _token_document(token))
        return token

    def revoke_token(self, token_id: str, *, actor: Actor) -> TokenRecord:
        """Revoke an API token, and return its record; a token that was revoked before is not changed.

        `actor` is who revokes the token, for the audit log. Raises NotFound if there is no token with this id.
        """
        table = schema.tokens
        with transaction(self._engine) as connection:
            _lock(connection)
            before = _token(connection, token_id)
            if before.revoked_at is not None:
                return before
            connection.execute(sa.update(table).where(table.c.id == token_id).values(revoked_at=clock(connection)))
            after = _token(connection, token_id)
            documents = (_token_document(before), _token_document(after))
            record_change(connection, actor, "token.revoke", f"token {token_id}", *documents)
        return after

    def find_token(self, digest: str) -> tuple[TokenRecord, Account, float] | None:
        """Find a valid API token by its sha256, `digest`.

        Returns three values: the token's record, the rights of the token's user, and the current time by the database's
        clock (seconds since the epoch). Returns None if there is no such token, if the token is revoked or expired, or
        if its user is disabled.
        """
        tokens, users, members = schema.tokens, schema.users, schema.memberships
        columns = [column for column in tokens.c if column.name != "digest"]
        with self._reads.connect() as connection:
            query = (
                sa.select(
                    *columns,
                    users.c.is_admin.label("user_is_admin"),
                    members.c.team.label("member_of"),
                    members.c.role.label("member_as"),
                    schema.teams.c.requests_per_minute,
                    sa.literal(clock(connection), sa.Float).label("now")
                    if connection.dialect.name == "sqlite"
                    else clock(connection).label("now"),
                )
                .join(users, users.c.name == tokens.c.user)
                .outerjoin(members, members.c.user == tokens.c.user)
                .outerjoin(schema.teams, schema.teams.c.name == members.c.team)
                .where((tokens.c.digest == digest) & ~users.c.is_disabled)
            )
            rows = connection.execute(query).mappings().all()
        if not rows:
            return None
        first, now = rows[0], float(rows[0]["now"])
        token = _token_record({column.name: first[column] for column in columns})
        account = _account(token.user, rows)
        return (token, account, now) if token.is_valid(now=now) else None

    def known_token(self, digest: str) -> TokenRecord | None:
        """Find an API token by its sha256, `digest`, whether or not it is valid; None if there is no such token."""
        table = schema.tokens
        columns = [column for column in table.c if column.name != "digest"]
        with self._reads.connect() as connection:
            row = connection.execute(sa.select(*columns).where(table.c.digest == digest)).mappings().one_or_none()
        return None if row is None else _token_record(row)

    def record_uses(self, used_at: Mapping[str, float]) -> None:
        """Store when API tokens were last used.

        `used_at` has seconds since the epoch, by token id. If a later time is stored for a token already, the stored
        time stays.
        """
        table = schema.tokens
        with transaction(self._engine) as connection:
            for token_id, time in sorted(used_at.items()):
                is_later = table.c.last_used_at.is_(None) | (table.c.last_used_at < time)
                connection.execute(
                    sa.update(table).where((table.c.id == token_id) & is_later).values(last_used_at=time)
                )

    # -- sessions of browsers ----------------------------------------------------------------------------------------

    def add_login(self, login: LoginRecord, *, state: str, browser: str, lifetime_s: float) -> None:
        """Store a login that a browser has begun; the login expires after `lifetime_s` seconds.

        `state` is the sha256 of the login's `state` parameter (OpenID Connect), and `browser` is the sha256 of a random
        value in the browser's cookie. The method `take_login` finds the login by `state` and `browser`. Logins that
        have expired are deleted.
        """
        table = schema.logins
        with transaction(self._engine) as connection:
            now = clock(connection)
            connection.execute(sa.delete(table).where(table.c.expires_at <= now))
            row = {**vars(login), "state": state, "browser": browser}
            connection.execute(sa.insert(table).values(**row, expires_at=now + lifetime_s))

    def take_login(self, *, state: str, browser: str) -> LoginRecord | None:
        """Remove a login that a browser has begun from the database, and return it.

        `state` is the sha256 of the login's `state` parameter (OpenID Connect), and `browser` is the sha256 of the
        value in the browser's cookie. Returns None if there is no such login, or if it has expired. If several calls
        ask for the same login at once, only one of them gets it.
        """
        table = schema.logins
        is_this = (table.c.state == state) & (table.c.browser == browser)
        with transaction(self._engine) as connection:
            found = connection.execute(
                sa.delete(table)
                .where(is_this & (table.c.expires_at > clock(connection)))
                .returning(table.c.nonce, table.c.verifier, table.c.redirect_uri, table.c.next)
            ).one_or_none()
        return None if found is None else LoginRecord(**found._mapping)

    def add_session(
        self,
        user: str,
        *,
        digest: str,
        lifetime_s: float,
        idle_s: float,
        actor: Actor,
        token: TokenRecord | None = None,
    ) -> SessionRecord:
        """Store a new browser session of a user, and return its record. The session ends after `lifetime_s` seconds.

        `digest` is the sha256 of the value in the session's cookie. If the browser logged in with an API `token`, the
        session has the token's scope, and ends when the token is revoked or expires. Sessions of all users that have
        expired, or were unused for `idle_s` seconds, are removed. `actor` is who logs in, for the audit log. Raises
        NotFound if there is no such user, and Conflict if the user is disabled.
        """
        table = schema.sessions
        row: dict[str, Any] = {"id": uuid.uuid4().hex, "user": user, "digest": digest, "token": None}
        if token is not None:
            row |= {"digest": _token_session_digest(digest), "token": token.id}
        with transaction(self._engine) as connection:
            _lock(connection)
            if _user(connection, user).is_disabled:
                raise Conflict(f"user {user!r}: is disabled")
            now = clock_time(connection)
            is_over = (table.c.expires_at <= now) | (table.c.last_used_at + idle_s <= now)
            connection.execute(sa.delete(table).where(is_over))
            ends = [now + lifetime_s] + ([] if token is None or token.expires_at is None else [token.expires_at])
            times = {"created_at": now, "expires_at": min(ends), "last_used_at": now}
            connection.execute(sa.insert(table).values(**row, **times))
            columns = [column for column in table.c if column.name != "digest"]
            stored = connection.execute(sa.select(*columns).where(table.c.id == row["id"])).mappings().one()
            session = SessionRecord(**stored, scope=None if token is None else token.scope)
            actor = replace(actor, token=session.label)
            began = {"expires_at": session.expires_at} | ({} if token is None else {"token": token.prefix})
            record_change(connection, actor, "session.login", f"user {user}", None, began)
        return session

    def find_session(self, digest: str, *, idle_s: float) -> tuple[SessionRecord, Account] | None:
        """Find a valid browser session; return its record and the rights of its user.

        `digest` is the sha256 of the value in the session's cookie. Returns None if there is no such session, or if the
        session is not valid: it has expired or was unused for `idle_s` seconds, its user is disabled, or the token with
        which it was begun is revoked.
        """
        sessions, users, members, tokens = schema.sessions, schema.users, schema.memberships, schema.tokens
        columns = [column for column in sessions.c if column.name != "digest"]
        with self._reads.connect() as connection:
            query = (
                sa.select(
                    *columns,
                    users.c.is_admin.label("user_is_admin"),
                    members.c.team.label("member_of"),
                    members.c.role.label("member_as"),
                    schema.teams.c.requests_per_minute,
                    sa.cast(clock(connection), sa.Float).label("now"),
                    tokens.c.scope,
                )
                .join(users, users.c.name == sessions.c.user)
                .outerjoin(tokens, (tokens.c.id == sessions.c.token) & tokens.c.revoked_at.is_(None))
                .outerjoin(members, members.c.user == sessions.c.user)
                .outerjoin(schema.teams, schema.teams.c.name == members.c.team)
                .where(sessions.c.digest.in_((digest, _token_session_digest(digest))) & ~users.c.is_disabled)
                .where(sessions.c.token.is_(None) | tokens.c.id.is_not(None))
            )
            rows = connection.execute(query).mappings().all()
        if not rows:
            return None
        first = rows[0]
        scope = None if first["scope"] is None else Scope(first["scope"])
        session = SessionRecord(**{column.name: first[column] for column in columns}, scope=scope)
        account = _account(session.user, rows)
        return (session, account) if session.is_valid(now=first["now"], idle_s=idle_s) else None

    def end_session(self, session: SessionRecord, *, actor: Actor) -> bool:
        """End a browser session. Returns True, or False if the session had ended already.

        `actor` is who ends the session, for the audit log.
        """
        table = schema.sessions
        with transaction(self._engine) as connection:
            was_there = connection.execute(sa.delete(table).where(table.c.id == session.id)).rowcount > 0
            if was_there:
                record_change(connection, actor, "session.logout", f"user {session.user}", None, None)
        return was_there

    def record_session_uses(self, session_ids: Collection[str]) -> None:
        """Store that the browser sessions with the given ids were used just now."""
        table = schema.sessions
        with transaction(self._engine) as connection:
            for session_id in sorted(session_ids):
                connection.execute(
                    sa.update(table).where(table.c.id == session_id).values(last_used_at=clock(connection))
                )

    # -- jobs ------------------------------------------------------------------------------------------------------

    def account_of(self, job: JobRecord) -> Account | None:
        """Rights of a job's owner; None if the job has no owner.

        With these rights, the driver (the process that works on the job) reads other jobs that the job uses, such as a
        study whose merge is one of its source models. A disabled owner's jobs continue with the rights that the owner
        had.
        """
        return None if job.owner is None else self.user(job.owner).account

    def share(self, job_id: str, *, actor: Actor, sharing: Sharing, team: str | None) -> JobRecord:
        """Change the team of a job and who may read it, and return the job.

        `team` is the new team, or None for no team. `sharing` says who may read the job besides its owner and
        administrators. `actor` is who makes the change, for the audit log. Raises NotFound if there is no such job or
        team.
        """
        table = schema.studies
        with transaction(self._engine) as connection:
            if team is not None:
                _team(connection, team)
            before = connection.execute(
                sa.select(table.c.team, table.c.sharing).where(table.c.id == job_id).with_for_update()
            ).one_or_none()
            if before is None:
                raise NotFound(f"job {job_id!r}: no such job")
            connection.execute(sa.update(table).where(table.c.id == job_id).values(team=team, sharing=sharing.value))
            after = {"team": team, "sharing": sharing.value}
            if dict(before._mapping) != after:
                record_change(connection, actor, "job.share", f"job {job_id}", dict(before._mapping), after)
            row = connection.execute(sa.select(table).where(table.c.id == job_id)).mappings().one()
            return job_record(row)

    def move_job(self, job_id: str, before: str | None, *, actor: Actor, steering: Steering) -> JobRecord:
        """Move a waiting job to the front of the jobs of its priority, or before another waiting job; return the job.

        `before` is the id of the other job; None is the front. The move holds until the job is started from the queue.
        `actor` is who makes the move, for the audit log. `steering` says who asked, and why; it is stored as an event
        of the job, and the event does not name the other job. Raises NotFound if there is no such job.
        """
        table = schema.studies
        with transaction(self._engine) as connection:
            lock_job(connection, job_id)
            found = connection.execute(sa.select(table).where(table.c.id == job_id)).mappings().one_or_none()
            if found is None:
                raise NotFound(f"job {job_id!r}: no such job")
            values = {"moved_before": before or "", "moved_at": clock(connection)}
            changed = sa.update(table).where(table.c.id == job_id).values(**values).returning(*table.c)
            job = job_record(connection.execute(changed).mappings().one())
            insert_event(connection, job_id, EventKind.STEERED, steering.payload)
            was, is_now = ({"before": place} for place in (found["moved_before"], before or ""))
            record_change(connection, actor, "job.move", f"job {job_id}", was, is_now)
            return job

    def preempt(self, job: JobRecord, because: str, *, actor: Actor, after: Mapping[str, Any]) -> bool:
        """Ask the driver of a running job to end so that the job waits again; return whether the request is new.

        A driver is the process that works on a job. `because` is the reason, such as a job of higher priority. The
        reason is stored with an event that every reader of the job sees, so it must not name other jobs. `actor` is who
        makes the change, and `after` has details of the change, and may name other jobs; `actor` and `after` are for
        the audit log only. Nothing is stored if the driver was asked before, the job has ended, or another driver has
        begun since the job was read as `job`.
        """
        table = schema.studies
        with transaction(self._engine) as connection:
            lock_job(connection, job.id)
            is_new = table.c.yields_after.is_(None) | (table.c.yields_after != table.c.attempt)
            where = (table.c.id == job.id) & (table.c.attempt == job.attempt) & table.c.state.not_in(FINISHED) & is_new
            changed = sa.update(table).where(where).values(yields_after=table.c.attempt)
            if connection.execute(changed).rowcount != 1:
                return False
            insert_event(connection, job.id, EventKind.PREEMPTED, {"reason": because, "priority": job.priority})
            record_change(connection, actor, "job.preempt", f"job {job.id}", None, after)
            return True

    # -- audit log -------------------------------------------------------------------------------------------------

    def record(
        self,
        actor: Actor,
        action: str,
        target: str,
        *,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an entry to the audit log: who made a change, what was changed, and how.

        `actor` is who made the change. `action` names the change, such as "job.cancel". `target` names the changed
        object, such as "job 5f0c...". `before` and `after` describe the object before and after the change, as JSON;
        None if there is nothing to describe.
        """
        with transaction(self._engine) as connection:
            record_change(connection, actor, action, target, before, after)

    def audit(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        user: str | None = None,
        target: str | None = None,
        newest_first: bool = False,
    ) -> tuple[AuditRecord, ...]:
        """Read entries of the audit log with ids above `after` and below `before`, at most `limit` (None: all).

        The entries are in the order of ids, or in the opposite order if `newest_first` is True; the first `limit` of
        this order are read. If `user` is not None, only changes by this user are read. If `target` is not None, only
        changes of this object are read, such as "job 5f0c...".
        """
        table = schema.audit
        where = table.c.id > after
        if before is not None:
            where &= table.c.id < before
        if user is not None:
            where &= table.c.user == user
        if target is not None:
            where &= table.c.target == target
        with self._reads.connect() as connection:
            order = table.c.id.desc() if newest_first else table.c.id
            rows = connection.execute(sa.select(table).where(where).order_by(order).limit(limit))
            return tuple(AuditRecord(**row) for row in rows.mappings())


def _account(user: str, rows: Sequence[sa.RowMapping]) -> Account:
    """Rights of a user, from database rows with one row for each team of the user.

    `rows` are read by the methods `find_token` and `find_session`. For a user without a team, there is one row.
    """
    memberships = [row for row in rows if row["member_of"] is not None]
    roles = {row["member_of"]: Role(row["member_as"]) for row in memberships}
    rates = {row["member_of"]: row["requests_per_minute"] for row in memberships}
    return Account(
        user, rows[0]["user_is_admin"], roles, {team: rate for team, rate in rates.items() if rate is not None}
    )


def _check_name(name: str) -> None:
    if problem := name_problem(name):
        raise ValueError(problem)


def _lock(connection: sa.Connection) -> None:
    """Make other transactions that change accounts wait until this transaction ends.

    On SQLite nothing needs to be done, because the transaction has held the write lock since its beginning.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": ACCOUNTS_LOCK})


def _has_rows(connection: sa.Connection, table: sa.Table, where: sa.ColumnElement[bool] | None = None) -> bool:
    query = sa.select(sa.literal(1)).select_from(table).where(sa.true() if where is None else where).limit(1)
    return connection.execute(query).first() is not None


def record_change(
    connection: sa.Connection,
    actor: Actor,
    action: str,
    target: str,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
) -> None:
    """Add an entry to the audit log in the open transaction of `connection`.

    `actor` is who made the change. `action` names the change, such as "job.cancel". `target` names the changed object,
    such as "job 5f0c...". `before` and `after` describe the object before and after the change; None if there is
    nothing to describe.
    """
    row = {"user": actor.user, "origin": actor.origin, "token": actor.token, "action": action, "target": target}
    documents = {"before": sa.null() if before is None else before, "after": sa.null() if after is None else after}
    connection.execute(sa.insert(schema.audit).values(**row, **documents, time=clock(connection)))


def _users(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[UserRecord, ...]:
    rows = connection.execute(sa.select(schema.users).where(where).order_by(schema.users.c.name)).mappings().all()
    roles: dict[str, dict[str, Role]] = defaultdict(dict)
    members = schema.memberships
    for user, team, role in connection.execute(sa.select(members.c.user, members.c.team, members.c.role)):
        roles[user][team] = Role(role)
    return tuple(UserRecord(**row, roles=dict(roles[row["name"]])) for row in rows)


def _user(connection: sa.Connection, name: str) -> UserRecord:
    found = _users(connection, schema.users.c.name == name)
    if not found:
        raise NotFound(f"user {name!r:.80}: there is no such user")
    return found[0]


def _nobody(name: str) -> Conflict:
    return Conflict(
        f"user {name!r}: nobody can log in as this user with the identity provider; the server's operator can let the "
        f"next identity do so (`mergesearch users add {name} --if-absent --login first`)"
    )


def _user_document(user: UserRecord) -> dict[str, Any]:
    return {"is_admin": user.is_admin, "is_disabled": user.is_disabled}


def _teams(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[TeamRecord, ...]:
    rows = connection.execute(sa.select(schema.teams).where(where).order_by(schema.teams.c.name)).mappings().all()
    members: dict[str, dict[str, Role]] = defaultdict(dict)
    table = schema.memberships
    query = sa.select(table.c.user, table.c.team, table.c.role).order_by(table.c.user)
    for user, team, role in connection.execute(query):
        members[team][user] = Role(role)
    return tuple(TeamRecord(row["name"], row["created_at"], dict(members[row["name"]]), _limits(row)) for row in rows)


def _limits(row: sa.RowMapping) -> TeamLimits:
    return TeamLimits(**{part.name: row[part.name] for part in fields(TeamLimits)})


def _team(connection: sa.Connection, name: str) -> TeamRecord:
    found = _teams(connection, schema.teams.c.name == name)
    if not found:
        raise NotFound(f"team {name!r:.80}: there is no such team")
    return found[0]


def _team_document(team: TeamRecord) -> dict[str, Any]:
    return {"members": {user: role.value for user, role in team.members.items()}}


def _tokens(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[TokenRecord, ...]:
    table = schema.tokens
    columns = [column for column in table.c if column.name != "digest"]
    rows = connection.execute(sa.select(*columns).where(where).order_by(table.c.created_at, table.c.id))
    return tuple(_token_record(row) for row in rows.mappings())


def _token(connection: sa.Connection, token_id: str) -> TokenRecord:
    found = _tokens(connection, schema.tokens.c.id == token_id)
    if not found:
        raise NotFound(f"token {token_id!r:.80}: there is no such token")
    return found[0]


def _token_session_digest(digest: str) -> str:
    """Digest under which a session is stored if it was begun with an API token.

    `digest` is the sha256 of the session's cookie, under which other sessions are stored. Servers from before migration
    0025 would give the session all rights of its user instead of the scope of the token. With the other digest, they do
    not find the session.
    """
    return hashlib.sha256(f"token session {digest}".encode()).hexdigest()


def _token_record(row: Mapping[str, Any] | sa.RowMapping) -> TokenRecord:
    return TokenRecord(**{**row, "scope": Scope(row["scope"])})


def _token_document(token: TokenRecord) -> dict[str, Any]:
    return {
        "user": token.user,
        "name": token.name,
        "prefix": token.prefix,
        "scope": token.scope.value,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
    }
