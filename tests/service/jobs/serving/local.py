"""Replicas in this process that complete prompts without models, and a served study with a driver that uses them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from search_spaces.study.engine import EngineOptions
from service.jobs.completers import Completer, Place
from service.jobs.heartbeat import Heartbeat
from service.jobs.serving.engines import IdleTimer
from service.jobs.serving.openai import Gate, openai_app
from service.jobs.serving.trials import ServedTrials
from service.store import JobWriter, Store
from service.store.documents import ENDPOINT
from service.types import JobRecord, JobState
from tests.service.http_server import HttpServer
from workers.serving.completions import CompletionPart, CompletionRequest
from workers.serving.fake import FakeScorer
from workers.serving.replica import ScoringReplica

SECRET = "only the server knows it"


class LocalCompleter:
    """A replica in this process."""

    def __init__(self, **options: Any) -> None:
        self.worker = FakeScorer(**options)
        self.replica = ScoringReplica(lambda: self.worker)
        self.requests: list[CompletionRequest] = []

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionPart]:
        self.requests.append(request)
        async for part in self.replica.complete(request):
            yield part


@dataclass
class LocalCompleters:
    """Replicas in this process, on a cluster whose GPUs and free GPUs `gpus` counts.

    `history` lists what was opened and closed.
    `engine` has the options that the replicas would be started with.
    """

    engine: EngineOptions | None = None
    gpus: tuple[float, float] = (0.0, 0.0)
    options: dict[str, Any] = field(default_factory=dict)
    open_places: list[Place] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def running(self) -> list[Place]:
        return self.open_places

    def num_gpus(self) -> tuple[float, float]:
        return self.gpus

    def open(self, place: Place) -> Completer:
        self.history.append(f"open {place.value}")
        self.open_places.append(place)
        return LocalCompleter(**self.options)

    def close(self, place: Place) -> None:
        self.history.append(f"close {place.value}")
        self.open_places.remove(place)


@dataclass
class Served:
    """A served study with the parts of its driver."""

    job: JobRecord
    gate: Gate
    timer: IdleTimer
    completer: LocalCompleter
    writer: JobWriter


@contextmanager
def served(store: Store, study: JobRecord, **options: Any) -> Iterator[Served]:
    """A study that is served by a driver's application over HTTP; `options` are those of the fake scorer."""
    job = store.create_job(
        kind="serving",
        name=f"{study.name}-served",
        document={"study": study.id, "idle_minutes": 30.0, "shares_engines": False},
        accepted={},
        owner=study.owner,
        team=study.team,
        sharing=study.sharing,
    )
    writer = store.open_attempt(job.id)
    writer.set_state(JobState.RUNNING)
    gate, timer, completer = Gate(), IdleTimer(1800.0), LocalCompleter(**options)
    gate.open(completer, yields=False)
    app = openai_app(ServedTrials(store, study.id), gate, secret=SECRET, timer=timer)
    with Heartbeat(writer, 0.0), HttpServer(lambda: app) as server:
        writer.set_document_named(ENDPOINT, {"url": server.url, "secret": SECRET, "attempt": writer.attempt})
        yield Served(store.job(job.id), gate, timer, completer, writer)
