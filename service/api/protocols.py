"""The API's interface to the cluster, and the sender of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.schemas.api import JobDocument
from service.types import JobRecord

__all__ = ["Cluster", "Principal"]


class Cluster(Protocol):
    """The cluster on which drivers work on studies. The server responds whether or not the cluster is reachable."""

    def start(self) -> None:
        """Start to keep drivers running; returns immediately."""

    def stop(self) -> None:
        """Stop keeping drivers running; may take some seconds."""

    def not_ready(self) -> str | None:
        """Why no study can make progress; None if studies can."""

    def waiting_for(self, study: JobRecord) -> str | None:
        """What must happen before the study goes on; None if a driver works on it, or if it has ended."""

    def job(self, study: JobRecord) -> JobDocument | None:
        """The job of the study's last driver; None before the first."""

    def log(self, study: JobRecord) -> str:
        """The output of the study's drivers. Raises ConnectionError while the cluster is unreachable."""

    def wake(self) -> None:
        """Check all studies now, because one was created, cancelled or resumed."""


@dataclass(frozen=True)
class Principal:
    """The sender of a request."""

    name: str
