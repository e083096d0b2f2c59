"""The API's interface to the cluster, and the sender of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.schemas.api import RayJobDocument
from service.types import JobRecord

__all__ = ["Cluster", "Principal"]


class Cluster(Protocol):
    """The cluster on which drivers work on jobs. The server responds whether or not the cluster is reachable."""

    def start(self) -> None:
        """Begin to keep a driver running for every unfinished job; returns immediately."""

    def stop(self) -> None:
        """Stop keeping drivers running, which may take some seconds."""

    def not_ready(self) -> str | None:
        """Why no job can make progress; None if jobs can."""

    def waiting_for(self, job: JobRecord) -> str | None:
        """Reason why the job waits; None if a driver works on it, or if it has ended."""

    def ray_job(self, job: JobRecord) -> RayJobDocument | None:
        """The Ray Job of the job's last driver; None before the first."""

    def log(self, job: JobRecord) -> str:
        """The output of the job's drivers. Raises ConnectionError while the cluster is unreachable."""

    def wake(self) -> None:
        """Check all jobs now, because one was created, cancelled or resumed."""


@dataclass(frozen=True)
class Principal:
    """The sender of a request."""

    name: str
