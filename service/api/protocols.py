"""Protocol of the cluster that the API uses, and the class that identifies the sender of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.cluster.dashboard import RayDashboard
from service.cluster.reconciler import QueueState
from service.store.accounts import Actor
from service.types import Account, JobRecord, Scope, SessionRecord, TokenRecord

__all__ = ["Cluster", "Principal"]


class Cluster(Protocol):
    """Interface of the cluster on which drivers (the processes that work on jobs) run.

    The server also answers requests while the cluster is unreachable.
    """

    def start(self) -> None:
        """Start a thread that keeps a driver (a process that works on a job) running for every unfinished job.

        The call returns immediately.
        """

    def stop(self) -> None:
        """Stop the thread that starts drivers, the processes that work on jobs.

        Running drivers continue. No new driver is started, not even for a job whose driver ends. The call may take some
        seconds.
        """

    def not_ready(self) -> str | None:
        """Reason why no job can make progress at the moment; None if jobs can make progress."""

    def waiting_for(self, job: JobRecord, *, reader: Account | None = None) -> str | None:
        """Reason why `job` waits; None if a driver (process) works on the job, or if the job has ended.

        `reader` is the user who gets the text, and the text has only facts that this user may know. None stands for a
        reader who may know everything.
        """

    def queue(self) -> QueueState:
        """The running jobs and the queue of waiting jobs, as of the server's last decision about which jobs run.

        The result also has the number of jobs that may run at the same time. For each waiting job, it says why the job
        waits and when the job is expected to start.
        """

    def ray_job(self, job: JobRecord) -> str | None:
        """Submission id of the Ray Job of the job's last driver; None if no driver was submitted yet."""

    def dashboard(self) -> RayDashboard | None:
        """Dashboard of the Ray cluster; None while the server is not connected to the cluster."""

    def log(self, job: JobRecord) -> str:
        """Output of all drivers (processes) that worked on `job`.

        Raises ConnectionError while the cluster is unreachable.
        """

    def is_leader(self) -> bool:
        """Whether this server is the leader of the servers that share the database.

        Only the leader starts drivers (the processes that work on jobs) and writes exports (merged models for
        download).
        """

    def wake(self) -> None:
        """Make the cluster check at once which jobs need a driver, a process that works on a job.

        The API calls this method after a job was created, cancelled, resumed or otherwise changed.
        """


@dataclass(frozen=True)
class Principal:
    """Sender of a request.

    `name` is the name of the user, or the network address if the server has no accounts. `address` is the network
    address from which the request came. If the server has no accounts, all other fields are None, and the sender may do
    everything. Otherwise `account` has the user's rights. Either `token` or `session` is the record of the token or
    session that identified the sender, and `scope` says for which kinds of requests this token or session may be used.
    """

    name: str
    address: str
    account: Account | None = None
    token: TokenRecord | None = None
    session: SessionRecord | None = None
    scope: Scope | None = None

    @property
    def actor(self) -> Actor:
        """The sender in the form that the audit log stores: user, address, and beginning of the token or session."""
        user = None if self.account is None else self.account.user
        label = None if self.session is None else self.session.label
        return Actor(user, self.address, label if self.token is None else self.token.prefix)
