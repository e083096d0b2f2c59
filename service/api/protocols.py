"""What the HTTP side needs of the rest, and what its requests carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.schemas.api import JobDocument
from service.types import StudyRecord

__all__ = ["Cluster", "Principal"]


class Cluster(Protocol):
    """Where studies are worked on. The server responds whether or not it is reachable."""

    def start(self) -> None:
        """Begin to look after studies; returns at once."""

    def stop(self) -> None:
        """Look after them no more; may take some seconds."""

    def not_ready(self) -> str | None:
        """Why studies do not go on; None: they do."""

    def waiting_for(self, study: StudyRecord) -> str | None:
        """What must come before a driver works on the study; None: one does, or the study has ended."""

    def job(self, study: StudyRecord) -> JobDocument | None:
        """The job of the study's last driver; None before the first."""

    def log(self, study: StudyRecord) -> str:
        """What the study's drivers have printed. Raises ConnectionError while the cluster is away."""

    def wake(self) -> None:
        """A study was created or cancelled: look now."""


@dataclass(frozen=True)
class Principal:
    """Who sent a request."""

    name: str
