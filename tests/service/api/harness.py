"""The application with everything real except the cluster, and a study as a driver would have stored it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.objectives import Objective
from search_spaces.study.file import Study
from search_spaces.study.objectives import ObjectiveSpec
from service.api.app import create_app
from service.api.preflight_process import Preflight, check_request
from service.disk import artifacts_dir
from service.jobs.base import Accepted, JobKind, RequestContext
from service.jobs.finetune.request import check_finetune_files, check_server_paths
from service.jobs.registry import KINDS
from service.jobs.search.attempt import values_ci95
from service.jobs.search.progress import ProgressSnapshot
from service.jobs.search.request import read_study
from service.jobs.serving.request import ServingRequest
from service.resolved_study import ResolvedStudy
from service.results.record import RunRecord
from service.results.selection import best_trial, held_out
from service.retention.limits import Limit
from service.schemas.api import (
    FitDocument,
    FleetAnalysisDocument,
    LandscapeDocument,
    MergeLossDocument,
    TaskVectorDocument,
)
from service.store import JobWriter, Store
from service.store.artifacts import ArtifactStore
from service.store.documents import VERIFICATION, TrialVerification, Verification
from service.types import (
    Account,
    EventKind,
    JobRecord,
    JobState,
    RungRecord,
    TrialRecord,
    TrialState,
)
from tests.service.http_server import HttpServer
from tests.service.site import FakeCluster, LocalPreflight
from tests.service.synthetic_run import EXPERTS, FINGERPRINTS, RUNGS, run_record
from workers.engines.vllm.support import CapabilityProbe
from workers.training.finetuning.fleet import parse_pipeline
from workers.types import Evidence, SampleResult, ScoreResult, Split

FAMILY = Path(__file__).parents[3] / "workers" / "tiny_family"
HOLDOUT_SAMPLES = 12


def ask_vllm() -> None:
    """Put vLLM's answers about the shipped family into the cache, so that validators do not each import vLLM."""
    config = json.loads((FAMILY / "base" / "config.json").read_text())
    CapabilityProbe([config]).answers(dtype="float32")


def quick_study(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    study = read_study(document, context)
    return Accepted(study.name, study.canonical(), resolved(study).to_json())


def quick_finetune(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    pipeline = parse_pipeline(document)
    check_server_paths(pipeline)
    check_finetune_files(pipeline, context.access)
    return Accepted(pipeline.name, pipeline.canonical(), {})


def quick_serving(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    try:
        request = ServingRequest.model_validate(dict(document))
    except ValidationError as error:
        raise InvalidStudy((Problem("study", str(error)),)) from error
    return Accepted("chat", request.model_dump(), {})


QUICK = {"search": quick_study, "finetune": quick_finetune, "serving": quick_serving}


class QuickPreflight(LocalPreflight):
    """Preflight that checks only the study file itself."""

    async def accept(
        self, content: bytes, *, is_json: bool, kind: JobKind, client: str = "", reader: Account | None = None
    ) -> Accepted:
        accept = QUICK[kind.name] if kind is KINDS[kind.name] else kind.accept
        return check_request(content, kind.noun, accept, RequestContext(), is_json=is_json)

    async def mergekit_file(self, stored: JobRecord, recipe: Mapping[str, Any], *, client: str = "") -> str:
        return "merge_method: linear\n"  # made-up studies have no models


class ApiServer:
    """The application over real HTTP while the context lasts; its database is in `data_dir` unless given.

    `port` is a free port, any one unless given; `options` are further ones of `create_app`.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        preflight: Preflight | None = None,
        files: str | Path | None = None,
        database: str | None = None,
        retention: Mapping[str, Limit] | None = None,
        prefix: str = "",
        port: int | None = None,
        **options: Any,
    ) -> None:
        self.port = port
        self.options = options
        self.prefix = prefix
        self.retention = retention
        self.data_dir = data_dir
        self.database = database or f"sqlite:///{data_dir / 'mergesearch.db'}"
        self.files = files
        self.cluster = FakeCluster()
        self.preflight = preflight or QuickPreflight()

    def __enter__(self) -> Self:
        self._http = HttpServer(lambda: self.app, grace_s=1, port=self.port)
        self.url = self._http.url
        self.start()
        return self

    def start(self) -> None:
        """Start the server, at its earlier address if it had one."""
        self.store = Store(self.database)
        self.app = create_app(
            self.store,
            cluster=self.cluster,
            data_dir=self.data_dir,
            preflight=self.preflight,
            files=self.files,
            retention=self.retention,
            prefix=self.prefix,
            **self.options,
        )
        self._http.start()

    def stop(self) -> None:
        self._http.stop()
        self.store.close()

    def __exit__(self, *_: object) -> None:
        self.stop()


def resolved(study: Study) -> ResolvedStudy:
    return ResolvedStudy(
        fingerprints=dict(FINGERPRINTS),
        num_layers=8,
        tasks={spec.name: "0" for spec in study.objectives},
        holdout_tasks={},
        rung_samples=tuple(dict.fromkeys((spec.name for spec in study.objectives), size) for size in RUNGS),
        max_staleness=4,
        objectives=tuple(
            Objective(spec.name, spec.metric, "maximize", None)
            for spec in study.objectives
            if isinstance(spec, ObjectiveSpec)
        ),
        version="0.1.0",
    )


def document(name: str = "math-text-lookup", **changes: Any) -> dict[str, Any]:
    """A study of the shipped family, as a client sends it."""

    def tasks(split: str) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "task": {"file": str(FAMILY / "tasks" / f"{name}_{split}.jsonl"), "max_tokens": 8},
                "metric": "exact_match",
            }
            for name in EXPERTS
        ]

    return {
        "name": name,
        "models": {"base": str(FAMILY / "base"), "experts": {n: str(FAMILY / "experts" / n) for n in EXPERTS}},
        "search_space": {"kind": "lfs", "layer_groups": 2},
        "search": {"algorithm": "random", "max_trials": 12},
        "fidelity": {"scheduler": "hyperband", "min_samples": 30, "max_samples": 270, "eta": 3},
        "objectives": tasks("search"),
        "holdout": tasks("holdout"),
        "engine": {"max_model_len": 64},
        **changes,
    }


def stored_study(store: Store, *, name: str = "math-text-lookup", key: str | None = None, **changes: Any) -> JobRecord:
    """A study that was created; `changes` are keys of its study file."""
    study = Study.model_validate(document(name, **changes))
    return store.create_job(
        kind="search", name=name, document=study.canonical(), accepted=resolved(study).to_json(), idempotency_key=key
    )


def finished_study(
    store: Store,
    *,
    num_trials: int = 12,
    name: str = "math-text-lookup",
    score: Callable[[JobWriter, TrialRecord], None] | None = None,
    **changes: Any,
) -> JobRecord:
    """A study with sources, published recipes, trials of every end, a held-out stage and a verification.

    `score` stores the samples of each trial of the held-out stage; by default all trials are equally good there.
    `changes` are keys of the study file.
    """
    made = run_record(num_trials=num_trials)
    record = stored_study(store, name=name, **changes)
    store.record_submission(record.id, 1)
    writer = store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    for trial in made.whole_trials:
        write_trial(writer, trial)
    for trial in held_out(made.whole_trials, made.objectives):
        (score or write_holdout)(writer, trial)
    reports = tuple(TrialVerification(**vars(report), trial=number) for number, report in enumerate(made.verifications))
    writer.set_document_named(VERIFICATION, asdict(Verification(reports)))
    writer.heartbeat(wall_clock_s=312.4, progress=snapshot(made).to_json())
    writer.set_state(JobState.COMPLETE)
    return store.job(record.id)


def write_trial(writer: JobWriter, trial: TrialRecord) -> None:
    begun = replace(trial, state=TrialState.WAITING, rungs=(), reason=None, values={}, standard_errors={})
    writer.add_trial(begun)
    for rung in trial.rungs:
        writer.finish_rung(trial.number, rung, samples_reused=0)
    writer.finish_trials([trial.number], trial.state, trial.reason, rival=trial.rival)


def write_holdout(writer: JobWriter, trial: TrialRecord) -> None:
    samples = tuple(
        SampleResult(name, position, f"d{position}", float((trial.number + position) % 3 > 0), "says")
        for name in EXPERTS
        for position in range(HOLDOUT_SAMPLES)
    )
    prompts = {f"holdout {name}": "0" for name in EXPERTS}
    evidence = Evidence(trial.recipe.digest, "bank", prompts, "sum", "replica-1", trial.number, "fake")
    writer.record_chunk(trial.number, Split.HOLDOUT, ScoreResult(samples, evidence, {"score": 0.5, "swap": 0.02}))
    writer.add_event(EventKind.HOLDOUT_SCORED, {"trial": trial.number})


def rung(number: int, value: float = 0.5) -> RungRecord:
    return RungRecord(number, dict.fromkeys(EXPERTS, 30), dict.fromkeys(EXPERTS, value), dict.fromkeys(EXPERTS, 0.1))


def snapshot(run: RunRecord) -> ProgressSnapshot:
    best = best_trial(run.trials, run.objectives)
    return ProgressSnapshot(
        study=run.study.name,
        stage="held-out",
        best_trial=None if best is None else best.number,
        best={} if best is None else best.values,
        best_ci95={} if best is None else values_ci95(best, run.objectives),
        trials={TrialState.COMPLETE: len(run.trials)},
        max_trials=len(run.trials),
        rungs=RUNGS,
        samples_scored=100,
        samples_planned=100,
    )


def finetuning(name: str = "family", **changes: Any) -> dict[str, Any]:
    """A fine-tuning of two experts, as a client sends it."""
    return {
        "name": name,
        "base": str(FAMILY / "base"),
        "data": {"max_length": 64},
        "training": {"steps": 4, "batch": 2},
        "experts": {n: {"data": {"file": str(FAMILY / "tasks" / f"{n}_search.jsonl")}} for n in ("math", "text")},
        **changes,
    }


def analysed_fleet(name: str, *losses: float) -> FleetAnalysisDocument:
    """The analysis of two experts, with a landscape of 2 x 2."""
    fit: FitDocument = {
        "distribution": "laplace",
        "scale": 0.001,
        "distance": 0.25,
        "log_likelihood": 5.0,
        "zeros": 0.5,
        "num_elements": 9,
    }
    vectors: list[TaskVectorDocument] = [
        {
            "expert": alias,
            "fits": [fit, {**fit, "distribution": "gaussian"}],
            "edges": [-0.002, 0.0, 0.002],
            "density": [100.0, 0.0],
        }
        for alias in ("math", "text")
    ]
    rows: list[list[float | None]] = [[losses[0], losses[1]], [losses[2], losses[3]]]

    def merge(method: str, coefficient: float | None, mean: float) -> MergeLossDocument:
        return {
            "method": method,
            "coefficient": coefficient,
            "losses": {},
            "mean": mean,
            "spread": 0.0,
            "num_experts": 2,
        }

    merges = [merge("weight averaging", None, losses[0]), merge("TIES", 0.5, losses[1])]
    landscape: LandscapeDocument = {"experts": ["math", "text"], "coefficients": [0.0, 1.0], "losses": rows}
    return {"name": name, "task_vectors": vectors, "landscape": landscape, "merges": merges}


def stored_finetune(store: Store, *, name: str = "family", **changes: Any) -> JobRecord:
    pipeline = parse_pipeline(finetuning(name, **changes))
    return store.create_job(kind="finetune", name=name, document=pipeline.canonical(), accepted={})


def finished_finetune(
    store: Store, data_dir: Path, *, name: str = "family", analysis: Mapping[str, Any] | None = None, **changes: Any
) -> JobRecord:
    """A fine-tuning whose experts are trained, with its driver's events and the `analysis` of its experts."""
    if analysis is not None:
        changes["analysis"] = {"samples": analysis["samples"]}
    record = stored_finetune(store, name=name, **changes)
    store.record_submission(record.id, 1)
    writer = store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    artifacts = ArtifactStore(store, artifacts_dir(data_dir))
    progress = {}
    for number, alias in enumerate(("math", "text")):
        update = {"expert": alias, "step": 4, "steps": 4, "loss": 1.0 + number, "seconds": 0.1}
        writer.add_event(EventKind.TRAINING, {**update, "losses": [[2, 3.0], [4, 1.5 + number]]})
        writer.add_event(EventKind.TRAINING, {"expert": alias, "step": 4, "values": {"accuracy": 0.25 * (number + 1)}})
        progress[alias] = {"step": 4, "steps": 4, "loss": 1.0 + number, "seconds": 0.1, "values": {"accuracy": 0.25}}
        expert = data_dir / f"{record.id}-{alias}"
        expert.mkdir()
        (expert / "config.json").write_text("{}")
        (expert / "model.safetensors").write_bytes(alias.encode() * 1000)
        artifacts.put(record.id, alias, expert)
    writer.heartbeat(wall_clock_s=61.0, progress={"experts": progress})
    if analysis is not None:
        writer.add_event(EventKind.ANALYSIS, analysis)
    writer.set_state(JobState.COMPLETE)
    return store.job(record.id)
