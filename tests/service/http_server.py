"""Applications behind real HTTP, in a thread: uvicorn on a port that is kept from one start to the next; and the
server's own application on a filled store, with nothing behind it that would work on its studies."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from search_spaces.study import Study, parse_study
from service.api import create_app
from service.api.examiner import Examined, read_request
from service.documents import JobDocument
from service.preflight import examine
from service.run_record import run_record
from service.selection import held_out
from service.store import Store, StudyWriter
from service.types import Origin, RungRecord, StudyRecord, StudyState, TrialRecord, TrialState
from tests.builders import tiny_family
from workers.types import Evidence, SampleResult, ScoreResult


class HttpServer:
    """Serves what `make_app` gives, a new one at each start. Use as a context manager."""

    def __init__(self, make_app: Callable[[], Any]) -> None:
        self._make_app = make_app
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        config = uvicorn.Config(self._make_app(), log_level="critical", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class IdleCluster:
    """Where no study is worked on. `away`: why Ray is not there."""

    away: str | None = None

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def not_ready(self) -> str | None:
        return self.away

    def waiting_for(self, study: StudyRecord) -> str | None:
        return None if study.state.is_finished else self.away

    def job(self, study: StudyRecord) -> JobDocument | None:
        return {"submission_id": f"{study.name}-1", "dashboard_url": f"http://dashboard/#/jobs/{study.name}-1"}

    def log(self, study: StudyRecord) -> str:
        if self.away:
            raise ConnectionError(self.away)
        return f"==> {study.name}-1 <==\nscored ü\n"


class Examiner:
    """Examines in this process, which has imported everything already."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    async def examine(self, content: bytes, *, is_json: bool) -> Examined:
        study = read_request(content, is_json=is_json)
        return Examined(study.name, study.canonical(), examine(study).facts())

    async def engine_dtype(self, document: Mapping[str, Any]) -> str:
        return "float32"


@dataclass
class Site:
    """A server with its store and the models that its studies merge; `document` is a study that it accepts."""

    directory: Path
    models: Path
    document: dict[str, Any]
    store: Store
    cluster: IdleCluster = field(default_factory=IdleCluster)

    def __post_init__(self) -> None:
        self.examination = examine(parse_study(self.document))
        self.server = HttpServer(self._app)

    @property
    def url(self) -> str:
        return self.server.url

    def _app(self) -> Any:
        return create_app(self.store, cluster=self.cluster, data_dir=self.directory, examiner=Examiner())

    def study_file(self, name: str) -> Path:
        """A study file whose data files it names relative to itself."""
        document = json.loads(json.dumps(self.document).replace(f"{self.directory}/", ""))
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps({**document, "name": name}))
        return file

    def create(self, name: str) -> str:
        """The id of a new study that nobody works on."""
        study = Study.model_validate({**self.document, "name": name})
        return self.store.create_study(name=name, document=study.canonical(), facts=self.examination.facts()).id

    def begin(self, name: str) -> StudyWriter:
        """A new study's first driver."""
        writer = self.store.open_attempt(self.create(name))
        writer.set_state(StudyState.RUNNING)
        return writer

    def finish(self, writer: StudyWriter) -> None:
        """The sources and published recipes at full budget, one trial that failed, and the held-out stage."""
        for number, (origin, label, recipe) in enumerate(self.examination.extras()):
            writer.add_trial(TrialRecord(number, origin, label, TrialState.RUNNING, recipe))
            rung = RungRecord(2, {"sums": 36}, {"sums": number / 10}, {"sums": 0.01})
            writer.finish_rung(number, rung, samples_reused=0, state=TrialState.COMPLETE)
        writer.add_trial(TrialRecord(number + 1, Origin.SEARCH, "trial:8", TrialState.WAITING, recipe, {"a": 1}, 0))
        writer.finish_trials([number + 1], TrialState.FAIL, "NaN logits")
        record = run_record(self.store, writer.study_id)
        for trial in held_out(record.trials, record.objectives):
            writer.record_chunk(trial.number, "holdout", _holdout_chunk(trial))
        writer.heartbeat(wall_clock_s=754.0, progress=PROGRESS)
        writer.set_state(StudyState.COMPLETE)


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
}


def _holdout_chunk(trial: TrialRecord) -> ScoreResult:
    values = [float(position % 8 < trial.number) for position in range(20)]
    samples = tuple(SampleResult("sums", i, f"doc{i}", value, "says", False) for i, value in enumerate(values))
    evidence = Evidence(trial.recipe.digest, "bank", {"holdout sums": "p"}, "sum", "gpu-box-71", 1, "vllm 0")
    return ScoreResult(samples, evidence, {"score": 0.5, "swap": 0.25})


@contextmanager
def serving(directory: Path) -> Iterator[Site]:
    """A site in `directory`, serving."""
    models = directory / "models"
    tiny_family(models, experts=("math", "text"))
    for name, size in (("search", 40), ("holdout", 20)):
        lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(size)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    def objective(name: str) -> dict[str, Any]:
        task = {"file": str(directory / f"{name}.jsonl"), "max_tokens": 6}
        return {"name": "sums", "task": task, "metric": "exact_match"}

    document = {
        "name": "sums",
        "models": {"base": str(models / "base"), "experts": {a: str(models / a) for a in ("math", "text")}},
        "search_space": {"kind": "lfs", "layer_groups": 2, "component_groups": 3, "methods": ["ties", "linear"]},
        "search": {"algorithm": "random", "max_trials": 6, "seed": 0},
        "fidelity": {"scheduler": "hyperband", "min_samples": 4, "max_samples": 36, "eta": 3},
        "objectives": [objective("search")],
        "holdout": [objective("holdout")],
        "engine": {"max_model_len": 64, "replicas": 1},
    }
    store = Store(f"sqlite:///{directory / 'mergesearch.db'}")
    site = Site(directory, models, document, store)
    try:
        with site.server:
            yield site
    finally:
        store.close()
