"""The server's own application on a store of small studies, without a cluster that would work on them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces.study.file import Study, parse_study
from service.api.app import create_app
from service.api.preflight_process import check_request, search_models
from service.cluster.dashboard import RayDashboard
from service.cluster.reconciler import QueueState
from service.jobs.base import Accepted, JobKind, RequestContext
from service.notifications.settings import NotificationSettings
from service.results.load import run_record
from service.results.selection import held_out
from service.store import JobWriter, Store
from service.studies.mergekit import mergekit_file
from service.studies.preflight.examine import examine
from service.types import Account, JobRecord, JobState, TrialRecord
from tests.builders import tiny_family
from tests.service.http_server import HttpServer
from tests.service.sums import score_baselines, sums_study, write_sums
from workers.file_access import FileAccess
from workers.models.listing import FoundModels
from workers.tiny_family import family_dir
from workers.types import Evidence, SampleResult, ScoreResult, Split


class FakeCluster:
    """A cluster that does nothing.

    `reason` says why it is away, `log_text` is every study's log, `ray` is its dashboard.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.log_text = "==> driver <==\nscored ü\n"
        self.num_wakes = 0
        self.is_running = False
        self.leads = True
        self.state = QueueState()
        self.ray: RayDashboard | None = RayDashboard("http://127.0.0.1:1")  # where nobody listens

    def start(self) -> None:
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False

    def not_ready(self) -> str | None:
        return self.reason

    def waiting_for(self, job: JobRecord, *, reader: Account | None = None) -> str | None:
        return None if job.state.is_finished else self.reason

    def queue(self) -> QueueState:
        return self.state

    def ray_job(self, job: JobRecord) -> str | None:
        return f"{job.name}-1" if job.attempt else None

    def dashboard(self) -> RayDashboard | None:
        return self.ray

    def log(self, job: JobRecord) -> str:
        if self.reason is not None:
            raise ConnectionError(self.reason)
        return self.log_text

    def is_leader(self) -> bool:
        return self.leads

    def wake(self) -> None:
        self.num_wakes += 1


class LocalPreflight:
    """Preflight of submitted jobs in this process, which has imported everything already; accepts additions unchecked.

    `access` has the directories in which models are found; None is the directory of the shipped models.
    """

    def __init__(self, access: FileAccess | None = None) -> None:
        self.access = access or FileAccess((str(family_dir()),))

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    async def accept(
        self, content: bytes, *, is_json: bool, kind: JobKind, client: str = "", reader: Account | None = None
    ) -> Accepted:
        return check_request(content, kind.noun, kind.accept, RequestContext(), is_json=is_json)

    async def check_benchmarks(
        self, document: Mapping[str, Any], stored: JobRecord, *, client: str = "", reader: Account | None = None
    ) -> None:
        """Accept every benchmark."""

    async def check_enqueued(
        self,
        stored: JobRecord,
        label: str,
        *,
        recipe: Mapping[str, Any] | None = None,
        configuration: Mapping[str, Any] | None = None,
        client: str = "",
    ) -> Mapping[str, Any] | None:
        return recipe

    async def mergekit_file(self, stored: JobRecord, recipe: Mapping[str, Any], *, client: str = "") -> str:
        return mergekit_file(stored, recipe, has_directories=False)

    async def find_models(
        self, *, under: str | None, text: str | None, limit: int, client: str = "", reader: Account | None = None
    ) -> FoundModels:
        return search_models(self.access, under=under, text=text, limit=limit)

    async def engine_dtype(self, stored: JobRecord, *, client: str = "") -> str:
        return "float32"


@dataclass
class Site:
    """A server with its store and the models of its studies; `document` is a valid study."""

    directory: Path
    models: Path
    document: dict[str, Any]
    store: Store
    cluster: FakeCluster = field(default_factory=FakeCluster)

    def __post_init__(self) -> None:
        self.preflight = examine(parse_study(self.document))
        self.server = HttpServer(self.app)
        self._numbers = itertools.count()

    @property
    def url(self) -> str:
        return self.server.url

    def app(self) -> Any:
        return create_app(
            self.store,
            cluster=self.cluster,
            data_dir=self.directory,
            preflight=LocalPreflight(FileAccess((str(self.models),))),
            notifications=NotificationSettings(frozenset({"127.0.0.1"})),
        )

    def new_name(self) -> str:
        """A name that no study of this site has."""
        return f"study-{next(self._numbers)}"

    def study_file(self, name: str) -> Path:
        """A study file that names its data files by relative paths."""
        document = json.loads(json.dumps(self.document).replace(f"{self.directory}/", ""))
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps({**document, "name": name}))
        return file

    def create(self, name: str) -> str:
        """Create a study on which no driver works, and return its id."""
        study = Study.model_validate({**self.document, "name": name})
        return self.store.create_job(
            kind="search", name=name, document=study.canonical(), accepted=self.preflight.resolved().to_json()
        ).id

    def begin(self, name: str) -> JobWriter:
        """Create a study, and return the writer of its first driver."""
        writer = self.store.open_attempt(self.create(name))
        writer.set_state(JobState.RUNNING)
        return writer

    def finish(self, writer: JobWriter) -> None:
        """Store baselines at full budget, one trial that failed, and the held-out stage."""
        score_baselines(writer, self.preflight.baselines())
        record = run_record(self.store, writer.job_id)
        for trial in held_out(record.whole_trials, record.objectives):
            writer.record_chunk(trial.number, Split.HOLDOUT, _holdout_chunk(trial))
        writer.heartbeat(wall_clock_s=754.0, progress=PROGRESS)
        writer.set_state(JobState.COMPLETE)


PROGRESS = {
    "study": "sums",
    "stage": "searching",
    "trials": {"COMPLETE": 8, "FAIL": 1, "RUNNING": 2},
    "max_trials": 14,
    "bracket": 0,
    "num_brackets": 3,
    "rung": 1,
    "rungs": [4, 12, 36],
    "best_trial": 7,
    "best": {"sums": 0.7},
    "samples_scored": 300,
    "samples_planned": 900,
    "samples_used": 360,
    "max_samples": 5000,
    "steps": 0,
    "steps_planned": 0,
}


def _holdout_chunk(trial: TrialRecord) -> ScoreResult:
    values = [float(position % 8 < trial.number) for position in range(20)]
    samples = tuple(SampleResult("sums", i, f"doc{i}", value, "says", False) for i, value in enumerate(values))
    evidence = Evidence(trial.recipe.digest, "bank", {"holdout sums": "p"}, "sum", "gpu-box-71", 1, "vllm 0")
    return ScoreResult(samples, evidence, {"score": 0.5, "swap": 0.25})


@contextmanager
def serving(directory: Path) -> Iterator[Site]:
    """A running server with its files in `directory`."""
    models = directory / "models"
    tiny_family(models, experts=("math", "text"))
    write_sums(directory)
    store = Store(f"sqlite:///{directory / 'mergesearch.db'}")
    site = Site(directory, models, sums_study(models, data_dir=directory), store)
    try:
        with site.server:
            yield site
    finally:
        store.close()
