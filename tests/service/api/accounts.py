"""A server with users, tokens and jobs of two teams, for tests of permissions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import sqlalchemy as sa

from service.auth.sessions import IDLE_S, LIFETIME_S, new_session_secret
from service.auth.tokens import digest_of, new_token
from service.store import schema
from service.store.accounts import AccountStore, Actor
from service.store.connection import transaction
from service.store.exports import ExportStore
from service.types import ExportRecord, ExportState, JobRecord, JobState, Role, Scope, Sharing
from tests.service.api.harness import ApiServer, finished_finetune, finished_study, stored_finetune, stored_study

OPERATOR = Actor(None, "tests")
EXPORT = "e" * 32

# The team "red" has a job of "owner"; "stranger" is an administrator of another team.
ROLES: dict[str, tuple[str, Role] | None] = {
    "root": None,
    "owner": ("red", Role.MEMBER),
    "viewer": ("red", Role.VIEWER),
    "member": ("red", Role.MEMBER),
    "manager": ("red", Role.ADMIN),
    "stranger": ("blue", Role.ADMIN),
    "loner": None,
}


@dataclass
class Company:
    """The users, with a token of each scope, and functions that make jobs of "owner" in the team "red"."""

    server: ApiServer
    accounts: AccountStore
    tokens: dict[tuple[str, Scope], str] = field(default_factory=dict)
    expired: str = ""

    @classmethod
    def on(cls, server: ApiServer) -> Self:
        accounts = AccountStore(server.store)
        company = cls(server, accounts)
        accounts.add_user("root", is_admin=True, actor=OPERATOR)
        for team in ("red", "blue"):
            accounts.add_team(team, actor=OPERATOR)
        for user, membership in ROLES.items():
            if user != "root":
                accounts.add_user(user, is_admin=False, actor=OPERATOR)
            if membership is not None:
                accounts.set_role(membership[0], user, membership[1], actor=OPERATOR)
            for scope in Scope:
                company.tokens[user, scope] = company.add_token(user, scope)
        company.expired = company.add_token("owner", Scope.ADMIN, lifetime_s=-1.0)
        return company

    def add_token(self, user: str, scope: Scope, *, lifetime_s: float | None = None) -> str:
        token = new_token()
        self.accounts.add_token(
            user,
            name=f"{user}-{scope}",
            digest=token.digest,
            prefix=token.prefix,
            scope=scope,
            lifetime_s=lifetime_s,
            actor=OPERATOR,
        )
        return token.secret

    def add_session(self, user: str) -> str:
        """Begin a session of a user; returns the value of its cookie."""
        secret = new_session_secret()
        self.accounts.add_session(
            user, digest=digest_of(secret), lifetime_s=LIFETIME_S, idle_s=IDLE_S, actor=Actor(user, "tests")
        )
        return secret

    def own(
        self,
        job: JobRecord,
        *,
        owner: str = "owner",
        team: str | None = "red",
        sharing: Sharing = Sharing.TEAM,
    ) -> JobRecord:
        """Make `owner` the owner of a stored job."""
        with transaction(self.server.store.engine) as connection:
            connection.execute(
                sa.update(schema.studies)
                .where(schema.studies.c.id == job.id)
                .values(owner=owner, team=team, sharing=sharing.value)
            )
        return self.server.store.job(job.id)

    def http(self, user: str, scope: Scope = Scope.ADMIN) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, headers=bearer(self.tokens[user, scope]), timeout=60)

    def ended(self) -> JobRecord:
        """A cancelled study of the owner, to be deleted or resumed."""
        job = stored_study(self.server.store)
        self.server.store.open_attempt(job.id).set_state(JobState.CANCELLED)
        return self.own(job)

    def finished(self) -> JobRecord:
        return self.own(finished_study(self.server.store, num_trials=5))

    def tuned(self, data_dir: Path, **options: Any) -> JobRecord:
        return self.own(finished_finetune(self.server.store, data_dir, **options))

    def begun(self) -> JobRecord:
        return self.own(stored_finetune(self.server.store))

    def exported(self, study: JobRecord, export_id: str = EXPORT) -> ExportRecord:
        export = ExportRecord(export_id, study.id, 1, "float32", ExportState.COMPLETE, created_at=1.0)
        ExportStore(self.server.store).add_export(export)
        directory = self.server.app.state.services.exports.directory(export)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text("{}")
        return export


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}
