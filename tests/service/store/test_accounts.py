"""Users, teams, tokens and the audit log, on SQLite and PostgreSQL."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import sqlalchemy as sa

from service.auth.tokens import MARK, digest_of, given_token, new_token
from service.errors import Conflict, NotFound
from service.store import Store, schema
from service.store.accounts import AccountStore, Actor, name_problem
from service.store.connection import transaction
from service.types import Account, JobRecord, JobState, LoginRecord, Role, Scope, Sharing, TokenRecord

ACTOR = Actor("ann", "192.0.2.1", "mst_abcdef")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    store = Store(database)
    yield store
    store.close()


@pytest.fixture
def accounts(store: Store) -> AccountStore:
    return AccountStore(store)


def with_token(accounts: AccountStore, user: str, *, lifetime_s: float | None = None) -> tuple[str, TokenRecord]:
    token = new_token()
    record = accounts.add_token(
        user,
        name="laptop",
        digest=token.digest,
        prefix=token.prefix,
        scope=Scope.SUBMIT,
        lifetime_s=lifetime_s,
        actor=ACTOR,
    )
    return token.digest, record


def test_jobs_without_owner_go_to_the_first_admin(store: Store, accounts: AccountStore) -> None:
    """Jobs of a database without accounts belong to the first administrator; later users, also those, get none."""
    jobs = [store.create_job(kind="search", name=name, document={}, accepted={}) for name in ("a", "b")]
    assert {job.owner for job in jobs} == {None}
    with pytest.raises(
        Conflict, match=r"user 'bob': the first user must be an administrator of the server \(--admin\)"
    ):
        accounts.add_user("bob", is_admin=False, actor=ACTOR)
    assert not accounts.has_users()
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    accounts.add_user("bob", is_admin=False, actor=ACTOR)
    later = store.create_job(kind="search", name="c", document={}, accepted={}, owner="bob")
    without = store.create_job(kind="search", name="d", document={}, accepted={})  # of a server with --no-accounts
    accounts.add_user("cia", is_admin=True, actor=ACTOR)
    assert [store.job(job.id).owner for job in (*jobs, later, without)] == ["ann", "ann", "bob", None]
    assert sum(entry.action == "jobs.adopt" for entry in accounts.audit()) == 1
    assert [(entry.action, entry.after) for entry in accounts.audit()][:2] == [
        ("user.add", {"is_admin": True, "is_disabled": False}),
        ("jobs.adopt", {"jobs": 2}),
    ]


@pytest.mark.parametrize("change", [{"is_admin": False}, {"is_disabled": True}], ids=["demoted", "disabled"])
def test_the_last_administrator_stays(change: dict[str, bool], accounts: AccountStore) -> None:
    """The last enabled administrator can be neither demoted nor disabled; one of two can."""
    for name in ("ann", "bob"):
        accounts.add_user(name, is_admin=True, actor=ACTOR)
    accounts.change_user("ann", actor=ACTOR, **change)
    before = accounts.users(), accounts.audit()
    with pytest.raises(Conflict, match=r"user 'bob': is the last administrator"):
        accounts.change_user("bob", actor=ACTOR, **change)
    assert (accounts.users(), accounts.audit()) == before


def test_two_administrators_cannot_remove_each_other(accounts: AccountStore) -> None:
    """Of simultaneous requests that would leave no administrator, one is refused."""
    names = [f"user{number}" for number in range(4)]
    for name in names:
        accounts.add_user(name, is_admin=True, actor=ACTOR)
    refused = []

    def demote(name: str) -> None:
        try:
            accounts.change_user(name, is_admin=False, actor=ACTOR)
        except Conflict:
            refused.append(name)

    threads = [threading.Thread(target=demote, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [user.name for user in accounts.users() if user.is_admin] == refused
    assert len(refused) == 1


def test_a_token_is_found_by_its_hash_alone(store: Store, accounts: AccountStore) -> None:
    """A valid token leads to its user's rights; the database has its hash and its beginning, not the token."""
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    accounts.add_team("red", actor=ACTOR)
    accounts.set_role("red", "ann", Role.VIEWER, actor=ACTOR)
    token = new_token()
    assert len(token.secret) == len(MARK) + 43
    record = accounts.add_token(
        "ann", name="x", digest=token.digest, prefix=token.prefix, scope=Scope.READ, lifetime_s=None, actor=ACTOR
    )
    found = accounts.find_token(digest_of(token.secret))
    assert found is not None
    assert found[:2] == (record, Account("ann", True, {"red": Role.VIEWER}))
    assert accounts.find_token(digest_of(token.secret[:-1])) is None
    with store.reading() as connection:
        for table in schema.metadata.sorted_tables:
            assert token.secret not in str(connection.execute(sa.select(table)).all())


def test_a_token_ends(accounts: AccountStore, store: Store) -> None:
    """A token is refused when it is revoked, has expired, or its user is disabled; an enabled user's works again."""
    for name in ("ann", "bob"):
        accounts.add_user(name, is_admin=True, actor=ACTOR)
    digest, record = with_token(accounts, "bob")
    expired, _ = with_token(accounts, "bob", lifetime_s=-1.0)
    assert accounts.find_token(digest) is not None
    assert accounts.find_token(expired) is None
    accounts.change_user("bob", is_disabled=True, actor=ACTOR)
    assert accounts.find_token(digest) is None
    accounts.change_user("bob", is_disabled=False, actor=ACTOR)
    assert accounts.find_token(digest) is not None
    revoked = accounts.revoke_token(record.id, actor=ACTOR)
    assert revoked.revoked_at is not None
    assert accounts.find_token(digest) is None
    assert accounts.revoke_token(record.id, actor=ACTOR) == revoked
    with pytest.raises(Conflict, match="is stored already"):
        accounts.add_token(
            "ann", name="x", digest=digest, prefix="mst_", scope=Scope.READ, lifetime_s=None, actor=ACTOR
        )


def test_the_last_use_only_grows(accounts: AccountStore) -> None:
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    _, record = with_token(accounts, "ann")
    for time, stored in ((20.0, 20.0), (10.0, 20.0), (30.0, 30.0)):
        accounts.record_uses({record.id: time, "unknown": time})
        assert accounts.token(record.id) == replace(record, last_used_at=stored)


def test_the_audit_log_is_append_only(store: Store, accounts: AccountStore) -> None:
    """The database refuses to change or delete entries; they say who, what, from where, before and after."""
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    accounts.add_team("red", actor=ACTOR)
    accounts.set_role("red", "ann", Role.MEMBER, actor=ACTOR)
    accounts.set_role("red", "ann", Role.MEMBER, actor=ACTOR)
    entries = accounts.audit()
    assert [(entry.action, entry.target) for entry in entries] == [
        ("user.add", "user ann"),
        ("team.add", "team red"),
        ("team.change", "team red"),
    ]
    last = entries[-1]
    assert (last.user, last.origin, last.token) == ("ann", "192.0.2.1", "mst_abcdef")
    assert (last.before, last.after) == ({"members": {}}, {"members": {"ann": "member"}})
    assert accounts.audit(after=entries[0].id, limit=1) == entries[1:2]
    assert accounts.audit(target="team red") == entries[1:]
    assert accounts.audit(newest_first=True, limit=2) == (entries[-1], entries[-2])
    assert accounts.audit(newest_first=True, before=last.id) == tuple(reversed(entries[:-1]))
    changes = (sa.update(schema.audit).values(user="eve"), sa.delete(schema.audit))
    for change in changes:
        with pytest.raises(sa.exc.DBAPIError, match="the audit log is append-only"), transaction(store.engine) as open_:
            open_.execute(change)
    assert accounts.audit() == entries


def test_what_does_not_exist_is_named(accounts: AccountStore) -> None:
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    accounts.add_team("red", actor=ACTOR)
    with pytest.raises(NotFound, match="user 'bob': there is no such user"):
        accounts.set_role("red", "bob", Role.MEMBER, actor=ACTOR)
    with pytest.raises(NotFound, match="team 'blue': there is no such team"):
        accounts.set_role("blue", "ann", Role.MEMBER, actor=ACTOR)
    with pytest.raises(NotFound, match="token 'x': there is no such token"):
        accounts.revoke_token("x", actor=ACTOR)
    with pytest.raises(Conflict, match="team 'red': exists already"):
        accounts.add_team("red", actor=ACTOR)
    assert name_problem("ann@example.org") is None
    for name in ("", "Ann", "-a", "a b", "a" * 65, "ä", "a\n"):
        assert name_problem(name), name


def test_a_team_with_jobs_is_kept(store: Store, accounts: AccountStore) -> None:
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    for team in ("red", "blue"):
        accounts.add_team(team, actor=ACTOR)
    job = store.create_job(kind="search", name="a", document={}, accepted={}, owner="ann", team="red")
    with pytest.raises(Conflict, match="team 'red': has jobs"):
        accounts.remove_team("red", actor=ACTOR)
    shared = accounts.share(job.id, actor=ACTOR, sharing=Sharing.PRIVATE, team="blue")
    assert (shared.team, shared.sharing) == ("blue", Sharing.PRIVATE)
    assert accounts.audit(target=f"job {job.id}")[-1].before == {"team": "red", "sharing": "team"}
    accounts.remove_team("red", actor=ACTOR)
    assert [team.name for team in accounts.teams()] == ["blue"]


def test_lists_have_what_may_be_read(store: Store, accounts: AccountStore) -> None:
    """For every user, the list of jobs has exactly those that `may_read` allows; rights grow with the need."""
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    for team in ("red", "blue"):
        accounts.add_team(team, actor=ACTOR)
    jobs = [
        store.create_job(kind="search", name="a", document={}, accepted={}, owner=owner, team=team, sharing=sharing)
        for owner, team, sharing in itertools.product(("ann", "bob", None), ("red", "blue", None), Sharing)
    ]
    roles = (None, *Role)
    seen = set()
    for user, is_admin, red, blue in itertools.product(("bob", "eve"), (False, True), roles, roles):
        given = {team: role for team, role in (("red", red), ("blue", blue)) if role is not None}
        account = Account(user, is_admin, given)
        listed = {job.id for job in store.jobs(reader=account)}
        assert listed == {job.id for job in jobs if account.may_read(job)}, account
        for job in jobs:
            assert account.may_change(job) <= account.may_use(job) <= account.may_read(job)
        seen.add(len(listed))
    assert len(seen) > 5


def job_of(team: str | None, sharing: Sharing) -> JobRecord:
    return JobRecord("1", "a", JobState.CREATED, {}, {}, 0.0, "search", owner="ann", team=team, sharing=sharing)


@pytest.mark.parametrize(
    ("account", "sharing", "rights"),
    [
        (Account("ann", roles={"red": Role.MEMBER}), Sharing.PRIVATE, "ruc"),
        (Account("ann", roles={"red": Role.VIEWER}), Sharing.PRIVATE, "r"),
        (Account("ann"), Sharing.PRIVATE, "r"),
        (Account("eve"), Sharing.TEAM, ""),
        (Account("eve"), Sharing.ALL, "r"),
        (Account("eve", is_admin=True), Sharing.PRIVATE, "ruc"),
        (Account("eve", roles={"blue": Role.ADMIN}), Sharing.TEAM, ""),
        (Account("eve", roles={"red": Role.VIEWER}), Sharing.TEAM, "r"),
        (Account("eve", roles={"red": Role.VIEWER}), Sharing.PRIVATE, ""),
        (Account("eve", roles={"red": Role.MEMBER}), Sharing.TEAM, "ru"),
        (Account("eve", roles={"red": Role.MEMBER}), Sharing.PRIVATE, ""),
        (Account("eve", roles={"red": Role.ADMIN}), Sharing.PRIVATE, "ruc"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_rights_on_a_job(account: Account, sharing: Sharing, rights: str) -> None:
    """What an owner, strangers, administrators and members may do with a job of the team red."""
    job = job_of("red", sharing)
    may = {"r": account.may_read(job), "u": account.may_use(job), "c": account.may_change(job)}
    assert "".join(right for right, is_given in may.items() if is_given) == rights


def test_given_tokens_are_as_long_as_made_ones() -> None:
    """Tokens that operators make are accepted if they can have 256 random bits; messages do not show them."""
    made = new_token()
    assert given_token(made.secret) == made
    assert made.secret not in repr(made)
    for text in ("", made.secret[:-1], made.secret[1:], made.secret + " ", f"{made.secret}\n"):
        with pytest.raises(ValueError, match="not a token") as refused:
            given_token(text)
        assert not text.strip() or text.strip() not in str(refused.value)


def test_a_login_is_taken_once(accounts: AccountStore) -> None:
    """Only one of simultaneous calls gets a login that has not expired, and only for its state and browser."""
    login = LoginRecord("nonce", "verifier", "https://search.example.org/v1/login/callback", "/docs")
    accounts.add_login(login, state="a" * 64, browser="b" * 64, lifetime_s=60.0)
    accounts.add_login(login, state="c" * 64, browser="b" * 64, lifetime_s=-1.0)
    assert accounts.take_login(state="a" * 64, browser="c" * 64) is None
    assert accounts.take_login(state="c" * 64, browser="b" * 64) is None
    found: list[LoginRecord | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(accounts.take_login(state="a" * 64, browser="b" * 64)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each for each in found if each is not None] == [login]
    assert len(found) == 4


def test_sessions_have_the_rights_of_their_users(accounts: AccountStore) -> None:
    """A session is found by its hash, with its user's present rights, until it ends, expires or is idle."""
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    accounts.add_user("bob", is_admin=False, actor=ACTOR)
    accounts.add_team("red", actor=ACTOR)

    def begin(digest: str, *, lifetime_s: float = 60.0, user: str = "bob") -> None:
        accounts.add_session(user, digest=digest * 64, lifetime_s=lifetime_s, idle_s=30.0, actor=Actor(user, "test"))

    begin("a")
    session, account = accounts.find_session("a" * 64, idle_s=30.0) or pytest.fail("no session")
    assert (account, session.user) == (Account("bob"), "bob")
    assert session.expires_at - session.created_at == pytest.approx(60.0, abs=1.0)
    accounts.set_role("red", "bob", Role.VIEWER, actor=ACTOR)
    assert (accounts.find_session("a" * 64, idle_s=30.0) or pytest.fail("no session"))[1].roles == {"red": Role.VIEWER}
    assert accounts.find_session("b" * 64, idle_s=30.0) is None
    assert accounts.find_session("a" * 64, idle_s=0.0) is None
    accounts.record_session_uses([session.id, "0" * 32])
    later, _ = accounts.find_session("a" * 64, idle_s=30.0) or pytest.fail("no session")
    assert later.last_used_at > session.last_used_at
    assert accounts.end_session(session, actor=ACTOR)
    assert not accounts.end_session(session, actor=ACTOR)
    assert accounts.find_session("a" * 64, idle_s=30.0) is None
    begin("c", lifetime_s=-1.0)
    assert accounts.find_session("c" * 64, idle_s=30.0) is None
    begin("d")
    accounts.change_user("bob", is_disabled=True, actor=ACTOR)
    assert accounts.find_session("d" * 64, idle_s=30.0) is None
    with pytest.raises(Conflict, match="user 'bob': is disabled"):
        begin("e")
    accounts.change_user("bob", is_disabled=False, actor=ACTOR)
    assert accounts.find_session("d" * 64, idle_s=30.0) is None
    with pytest.raises(NotFound, match="user 'eve': there is no such user"):
        begin("f", user="eve")
    actions = [entry.action for entry in accounts.audit() if entry.action.startswith("session")]
    assert actions == ["session.login", "session.logout", "session.login", "session.login"]


def test_a_session_ends_when_its_token_expires(accounts: AccountStore) -> None:
    """A session of a token that expires has the token's end, if it is before the end of the session's lifetime."""
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    for digest, lifetime_s in (("a", 20.0), ("b", 90.0), ("c", None)):
        _, token = with_token(accounts, "ann", lifetime_s=lifetime_s)
        session = accounts.add_session(
            "ann", digest=digest * 64, lifetime_s=60.0, idle_s=30.0, actor=ACTOR, token=token
        )
        assert session.expires_at - session.created_at == pytest.approx(min(60.0, lifetime_s or 60.0), abs=1.0)
        found, _ = accounts.find_session(digest * 64, idle_s=30.0) or pytest.fail("no session")
        assert found == session


def test_old_servers_find_no_session_of_a_token(store: Store, accounts: AccountStore) -> None:
    """A server from before scopes of sessions, which asks for the digest alone, does not find a token's session."""
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    _, token = with_token(accounts, "ann")
    for digest, begun_with in (("a", None), ("b", token)):
        accounts.add_session("ann", digest=digest * 64, lifetime_s=60.0, idle_s=30.0, actor=ACTOR, token=begun_with)
        assert accounts.find_session(digest * 64, idle_s=30.0) is not None
        with store.engine.connect() as connection:
            old = connection.execute(sa.select(schema.sessions).where(schema.sessions.c.digest == digest * 64)).all()
        assert len(old) == (1 if begun_with is None else 0)
