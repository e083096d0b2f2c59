"""Interfaces of the replicas that complete prompts with the merges of a study."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Protocol

from workers.serving.completions import CompletionPart, CompletionRequest

__all__ = ["Completer", "Completers", "Place"]


class Completer(Protocol):
    """Interface of replicas that complete prompts (`workers.serving.serve_completer.ServeCompleter`)."""

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionPart]: ...


class Place(StrEnum):
    """Replicas that complete the prompts of a served study.

    - `SCORER`: the replicas that also score samples for searches
    - `OWN`: a replica for the served study alone
    """

    SCORER = "scorer"
    OWN = "own"


class Completers(Protocol):
    """The replicas that can complete prompts with the merges of one study."""

    def running(self) -> Sequence[Place]:
        """Return which replicas run now: the ones that searches use too (SCORER), and the served study's own (OWN)."""
        ...

    def num_gpus(self) -> tuple[float, float]:
        """The numbers of the cluster's GPUs and of its free GPUs."""
        ...

    def open(self, place: Place) -> Completer:
        """Wait until a replica can complete prompts, and return the client that sends prompts to it.

        `place` is SCORER for a replica that also scores samples for searches, or OWN for the served study's own
        replica. If no such replica runs, one is started. Raises EngineUnavailable if the replica does not become ready.
        """
        ...

    def close(self, place: Place) -> None:
        """Stop the replicas that searches use too (`place` SCORER), or the served study's own replica (OWN)."""
        ...
