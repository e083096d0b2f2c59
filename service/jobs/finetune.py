"""Fine-tunings on Ray Train: `workers.training.finetuning` on one or several workers, each in one directory.

The directory holds the specification, checkpoints, numbers and at last the expert. A worker that dies is replaced by
Ray Train, a driver that dies by the next call of `run_finetune`; both go on from the last checkpoint. Ray Train's
own checkpoints are not used: those of the directory are complete or absent, whatever is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.cluster.session import ray_session
from service.disk import artifacts_dir, data_dir_of, locked
from service.errors import Conflict, NotFound
from service.jobs.progress_log import ProgressLog
from service.jobs.training_analysis import tell_analysis
from service.jobs.training_events import telling
from service.jobs.training_study import begin_study
from service.store import JobWriter, Store
from service.store.artifacts import ArtifactStore
from service.studies.heartbeat import Heartbeat
from service.studies.preflight.finetune import check_finetune_files, resolved_finetune
from service.types import JobKind, JobRecord, JobState
from workers.errors import InvalidModel, InvalidTask, TrainingFailed
from workers.file_access import FileAccess
from workers.training.finetuning.fleet import EXPERTS, Pipeline, parse_pipeline
from workers.training.finetuning.history import CHECKPOINTS, EXPERT, Report
from workers.training.finetuning.spec import FinetuneSpec, parse_spec

__all__ = [
    "EXPERT_DIR",
    "SPEC_FILE",
    "SUMMARY_FILE",
    "WRITER_LOCK",
    "run_finetune",
    "run_fleet",
    "stored",
    "trained_fleet",
    "work",
    "written_spec",
]

SPEC_FILE, SUMMARY_FILE, FAILURE_FILE = "finetune.json", "summary.json", "failure.json"
EXPERT_DIR, RAY_DIR = EXPERT, "ray"

# Of one worker group after another; a failure of the training itself is not tried again.
MAX_FAILURES = 5

# How long the workers of a driver that was killed may take to end: Ray's processes notice within half a minute.
PREDECESSOR_WAIT_S = 120.0
WRITER_LOCK = ".writer"

# Errors that another attempt would not change: they are stored, not raised in the worker.
FINAL: dict[str, Callable[[str], Exception]] = {
    "InvalidModel": lambda text: InvalidModel((text,)),
    "InvalidTask": InvalidTask,
    "TrainingFailed": TrainingFailed,
}


def run_finetune(
    spec: FinetuneSpec,
    directory: Path,
    *,
    note: Callable[[str], None] = lambda _: None,
    access: FileAccess | None = None,
) -> dict[str, Any]:
    """Train what `spec` says in `directory` to its end, or go on with it there. Returns the summary. `access` limits
    the files that evaluation tasks lead to (None: no limit).

    Raises InvalidModel and InvalidTask (nothing was started, or a worker found it), Conflict (the directory is used by
    another run or specification, or the cluster is too small), ConnectionError (no Ray), TrainingFailed."""
    with locked(directory):
        before = written_spec(directory)
        if before is not None and before != spec:
            raise Conflict(
                f"{directory}: holds another fine-tuning ({before.name!r}), which differs in "
                f"{', '.join(_differences(before, spec))}; give another directory"
            )
        if before is None and (directory / EXPERT_DIR).exists():
            raise Conflict(f"{directory}: holds a model that is not of this fine-tuning; give another directory")
        if (summary := _read(directory / SUMMARY_FILE)) is not None:
            return summary
        note(f"Checking base model and data of {spec.name} ...")
        _check(spec)
        _write(directory / SPEC_FILE, spec.canonical())
        (directory / FAILURE_FILE).unlink(missing_ok=True)
        with _ray(note):
            _fit(spec, directory, access)
        if (failure := _read(directory / FAILURE_FILE)) is not None:
            raise FINAL[failure["error"]](failure["message"])
        summary = _read(directory / SUMMARY_FILE)
        assert summary is not None
        return summary


def run_fleet(
    specs: Mapping[str, FinetuneSpec],
    directories: Mapping[str, Path],
    *,
    note: Callable[[str], None] = lambda _: None,
    finished: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    access: FileAccess | None = None,
) -> dict[str, dict[str, Any]]:
    """Train each expert in its directory, one after the other, on one Ray. Returns the summaries; `finished` is called
    with an alias and its summary as soon as there is one. Everything is checked before the first is started. Raises as
    `run_finetune`."""
    unfinished = [alias for alias in specs if _read(directories[alias] / SUMMARY_FILE) is None]
    if len(unfinished) > 1:
        for alias in unfinished:
            note(f"Checking base model and data of {alias} ...")
            _check(specs[alias])
    summaries = {}
    with _ray(note) if len(unfinished) > 1 else nullcontext():
        for alias, spec in specs.items():
            summaries[alias] = run_finetune(spec, directories[alias], note=note, access=access)
            finished(alias, summaries[alias])
    return summaries


@contextmanager
def _ray(note: Callable[[str], None]) -> Iterator[None]:
    with ray_session() as session:
        if session.dashboard_url:
            note(f"Ray dashboard: {session.dashboard_url}/#/actors")
        yield


def work(store: Store, writer: JobWriter, *, work_dir: Path, heartbeat: Heartbeat, view: ProgressLog) -> None:
    """Train the stored specification, or every expert of a fleet, to its end, and store each expert as an artifact of
    its alias.

    Raises Conflict also for what `run_finetune` finds wrong with models, data and losses: another driver would, too."""

    def note(text: str) -> None:
        heartbeat.progressed()
        view.note(text)

    def keep(alias: str, summary: Mapping[str, Any]) -> None:
        facts = {name: summary[name] for name in ("method", "steps", "loss", "values")}
        artifacts.put(writer.job_id, alias, places[alias] / EXPERT_DIR, facts=facts)
        heartbeat.progressed()

    record = store.job(writer.job_id)
    pipeline = parse_pipeline(record.document)
    check_finetune_files(pipeline, record.resolved.access)
    places = pipeline.places(work_dir)
    artifacts = ArtifactStore(store, artifacts_dir(data_dir_of(work_dir)))
    writer.set_state(JobState.RUNNING)
    try:
        with telling(store, writer, heartbeat, places, spec_file=SPEC_FILE, worker_file=WRITER_LOCK):
            run_fleet(pipeline.experts, places, note=note, finished=keep, access=record.resolved.access)
    except (InvalidModel, InvalidTask, TrainingFailed) as error:
        raise Conflict(str(error)) from error
    tell_analysis(store, writer, heartbeat, pipeline, places, note=note, access=record.resolved.access)
    if pipeline.study is not None:
        note("Checking the study of the experts ...")
        begin_study(store, writer, pipeline, artifacts)
    heartbeat.send()  # the last progress
    writer.set_state(JobState.COMPLETE)
    for place in places.values():  # what the artifacts hold, or nobody needs any more
        for name in (EXPERT_DIR, CHECKPOINTS, RAY_DIR):
            shutil.rmtree(place / name, ignore_errors=True)


def stored(store: Store, pipeline: Pipeline, **request: Any) -> JobRecord:
    """A new study of this kind. `request` is as for `Store.create_job`."""
    return store.create_job(
        name=pipeline.name,
        document=pipeline.canonical(),
        resolved=resolved_finetune(),
        kind=JobKind.FINETUNE,
        **request,
    )


def written_spec(directory: Path) -> FinetuneSpec | None:
    """What is or was trained in `directory`; None if nothing was."""
    document = _read(directory / SPEC_FILE)
    return None if document is None else parse_spec(document)


def trained_fleet(directory: Path) -> tuple[dict[str, FinetuneSpec], dict[str, Path]]:
    """The experts that were trained in `directory`, and where. Raises NotFound if there are none, Conflict if one is
    not finished."""
    places = {place.name: place for place in sorted((directory / EXPERTS).glob("*")) if place.is_dir()}
    experts = {}
    for alias, place in (places or {"": directory}).items():
        spec = written_spec(place)
        if spec is None:
            raise NotFound(f"{place}: holds no fine-tuning")
        if not (place / EXPERT_DIR).is_dir():
            raise Conflict(f"{place}: its training has not ended; the same command as before goes on with it")
        experts[alias or spec.name] = spec
    return experts, places or {next(iter(experts)): directory}


def _check(spec: FinetuneSpec) -> None:
    """What can be known without the model's weights. Raises InvalidModel and InvalidTask."""
    from workers.training.finetuning.trainer import check

    check(spec)


def _fit(spec: FinetuneSpec, directory: Path, access: FileAccess | None) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    resources = ray.cluster_resources()
    has_gpus = resources.get("GPU", 0) >= spec.workers
    cores = int(resources.get("CPU", 0))
    if cores < spec.workers:
        raise Conflict(f"workers: {spec.workers}; the cluster has {cores} CPU cores, and each worker needs one")
    # Of those that replicas and other trainings leave; where they leave none, the workers wait for one each.
    free = int(ray.available_resources().get("CPU", 0))
    trainer = TorchTrainer(
        _in_worker,
        train_loop_config={
            "spec": spec.canonical(),
            "directory": str(directory.resolve()),
            "access": None if access is None else asdict(access),
        },
        scaling_config=ScalingConfig(
            num_workers=spec.workers,
            use_gpu=has_gpus,
            resources_per_worker={"CPU": max(1, free // spec.workers)} | ({"GPU": 1} if has_gpus else {}),
        ),
        # A name that was used before would make Ray Train go on with that run's own state.
        run_config=RunConfig(
            name=f"{spec.name}-{uuid.uuid4().hex[:8]}",
            storage_path=str(directory.resolve() / RAY_DIR),
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    trainer.fit()


def _in_worker(config: Mapping[str, Any]) -> None:
    """The function that Ray Train calls in each worker, in a process group."""
    import ray.train
    from ray.train.torch import get_device

    is_writer = ray.train.get_context().get_world_rank() == 0
    spec, directory = parse_spec(config["spec"]), Path(config["directory"])
    access = None if config["access"] is None else FileAccess(**config["access"])
    # Ray's choice: GPUs may be visible to a worker that was not given one.
    _trained(spec, directory, report=_report, is_writer=is_writer, device=get_device(), access=access)


def _trained(
    spec: FinetuneSpec,
    directory: Path,
    *,
    report: Report,
    is_writer: bool,
    device: Any = None,
    access: FileAccess | None = None,
) -> None:
    """Train on this rank; the writer leaves the summary, or why there is none."""
    from workers.training.finetuning.trainer import train

    if (directory / FAILURE_FILE).exists():
        return
    with _alone(directory) if is_writer else nullcontext():
        try:
            facts = train(spec, directory, report=report, device=device, access=access)
        except (InvalidModel, InvalidTask, TrainingFailed) as error:
            if is_writer:
                _write(directory / FAILURE_FILE, {"error": type(error).__name__, "message": str(error)})
            return
        if is_writer:
            _write(directory / SUMMARY_FILE, {"name": spec.name, "method": spec.method.kind, **facts})


def _report(line: Mapping[str, Any]) -> None:
    """Tell Ray Train of evaluations only: its controller takes one report in two seconds, for which workers wait. Every
    update is in the history."""
    import ray.train

    if "values" in line:
        ray.train.report({**{k: v for k, v in line.items() if k != "values"}, **line["values"]})


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Wait until no worker of an earlier driver writes to `directory` any more. Raises TimeoutError."""
    with (directory / WRITER_LOCK).open("w") as file:
        deadline = time.monotonic() + PREDECESSOR_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{directory}: a worker of an earlier run still writes here") from error
                time.sleep(0.2)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _differences(before: FinetuneSpec, spec: FinetuneSpec) -> list[str]:
    one, other = before.canonical(), spec.canonical()
    return [name for name in one if one[name] != other[name]]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(file.read_text())
        return document
    except FileNotFoundError:
        return None


def _write(file: Path, document: Mapping[str, Any]) -> None:
    """Write the file at once: it is the old one, or the whole new one."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(json.dumps(document, indent=2) + "\n")
    new.replace(file)
