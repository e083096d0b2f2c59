"""Protocol of the cluster that the API uses, and the class that identifies the sender of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.schemas.api import RayJobDocument
from service.store.accounts import Actor
from service.types import Account, JobRecord, Scope, SessionRecord, TokenRecord

__all__ = ["Cluster", "Principal"]


class Cluster(Protocol):
    """Interface of the cluster on which drivers (the processes that work on jobs) run.

    The server answers requests whether or not the cluster is reachable.
    """

    def start(self) -> None:
        """Start the thread that keeps a driver running for every unfinished job; returns immediately."""

    def stop(self) -> None:
        """Stop starting and replacing drivers (the processes that work on jobs). The call may take some seconds."""

    def not_ready(self) -> str | None:
        """Reason why no job can make progress at the moment; None if jobs can make progress."""

    def waiting_for(self, job: JobRecord) -> str | None:
        """Reason why `job` waits; None if a driver works on the job, or if the job has ended."""

    def ray_job(self, job: JobRecord) -> RayJobDocument | None:
        """Id and dashboard page of the Ray Job of the job's last driver; None if no driver was submitted yet."""

    def log(self, job: JobRecord) -> str:
        """Output of all drivers that worked on `job`. Raises ConnectionError while the cluster is unreachable."""

    def is_leader(self) -> bool:
        """Whether this server is the one that starts drivers, among the servers that use the same database.

        Only the leader starts drivers and writes exports.
        """

    def wake(self) -> None:
        """Check at once which jobs need a driver; called after a job was created, cancelled or resumed."""


@dataclass(frozen=True)
class Principal:
    """Sender of a request.

    `name` is the name of the user, or the address if the server has no accounts. `address` is the address from which
    the request came. If the server has no accounts, all other fields are None, and the sender may do everything.
    Otherwise `account` has the user's rights, and either `token` or `session` is the record of what the request was
    sent with. `scope` says for what kinds of requests the token or session may be used.
    """

    name: str
    address: str
    account: Account | None = None
    token: TokenRecord | None = None
    session: SessionRecord | None = None
    scope: Scope | None = None

    @property
    def actor(self) -> Actor:
        """The sender in the form that the audit log stores: user, address, and prefix of the token or session."""
        user = None if self.account is None else self.account.user
        label = None if self.session is None else self.session.label
        return Actor(user, self.address, label if self.token is None else self.token.prefix)
