"""The end of a study's driver: it waits after transient problems, and other problems end the study."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.study.engine import EngineOptions
from search_spaces.study.file import parse_study
from service.cluster.session import RaySession
from service.engine_machines import EngineMachines, gpu_need
from service.jobs.base import Resources
from service.jobs.driver import drive
from service.jobs.search import work as search_work
from service.store import Store
from service.store.documents import BENCHMARKS
from service.studies.preflight import tasks
from service.studies.preflight.examine import examine
from service.studies.preflight.result import PreflightResult
from service.types import JobState
from tests.builders import tiny_family
from tests.conftest import write_choices
from tests.service.sums import sums_study, write_sums
from workers.errors import EngineUnavailable
from workers.evaluation.lm_eval_tasks import content_hash
from workers.serving.deployment import runs_on_gpus
from workers.types import Family, GpuNeed


@pytest.fixture
def models(tmp_path: Path) -> Path:
    tiny_family(tmp_path / "models", experts=("math", "text"))
    write_sums(tmp_path)
    return tmp_path / "models"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    yield store
    store.close()


@pytest.fixture
def study(store: Store, models: Path, tmp_path: Path) -> str:
    """A study that was accepted, and on which drivers have worked for 100 s."""
    parsed = parse_study(sums_study(models, data_dir=tmp_path))
    resolved = examine(parsed).resolved()
    record = store.create_job(kind="search", name="sums", document=parsed.canonical(), accepted=resolved.to_json())
    store.open_attempt(record.id).heartbeat(wall_clock_s=100.0)
    return record.id


def with_scorer(scorer: Any) -> Resources:
    """Resources with this scorer and without Ray."""
    session = RaySession(is_own=True, dashboard_url=None)
    return Resources(
        ray=lambda: nullcontext(session), scorer=scorer, fit=lambda *_: None, cluster=dict, completers=scorer
    )


def ends_waiting(store: Store, study: str, tmp_path: Path, resources: Resources | None = None) -> str:
    """Check that the exit code asks for another driver, and no time was used up. Returns the reason for waiting."""
    assert drive(store, study, work_dir=tmp_path / "work", resources=resources) == 1
    record = store.job(study)
    assert record.state is JobState.STOPPED
    assert record.wall_clock_s == 100.0
    assert record.waiting_for == f"its next driver: {record.reason}"
    event = store.events(study)[-1]
    assert (event.kind, event.payload) == ("waiting", {"reason": record.reason})
    return str(record.reason)


def test_absent_model_waits_changed_one_ends(store: Store, study: str, models: Path, tmp_path: Path) -> None:
    """A study waits for an absent model and ends because of a changed one."""
    away = tmp_path / "unmounted"
    shutil.move(models / "math", away)
    for number in (1, 2):
        assert "models/math: does not exist" in ends_waiting(store, study, tmp_path)
        assert store.consecutive_waits(study) == number
    shutil.copytree(models / "text", models / "math")
    assert drive(store, study, work_dir=tmp_path / "work") == 0
    record = store.job(study)
    assert record.state is JobState.FAILED
    assert "fingerprints of math have changed since it was started" in str(record.reason)


@pytest.mark.parametrize("is_earlier", [False, True])
def test_changed_data_of_a_yaml_task_end_a_study(
    store: Store, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    """A study that an earlier version created, with digests of the YAML files alone, continues until these change."""
    (tmp_path / "tasks").mkdir()
    file = write_choices(tmp_path / "tasks")
    spec = {"name": "choices", "task": str(file), "metric": "acc"}
    others = {key: [{**spec, "split": "train"}] for key in ("holdout", "benchmarks")}
    parsed = parse_study({**sums_study(models), "objectives": [spec], **others, "fidelity": {"scheduler": "none"}})
    with monkeypatch.context() as patched:
        if is_earlier:
            patched.setattr(tasks, "yaml_content", lambda task, _: content_hash(task))
        preflight = examine(parsed)
    assert len(str(preflight.tasks.search["choices"].content)) == (64 if is_earlier else 70)
    accepted = preflight.resolved().to_json()
    study = store.create_job(kind="search", name="tasks", document=parsed.canonical(), accepted=accepted).id
    facts = [asdict(benchmark.facts) for benchmark in preflight.tasks.benchmarks]
    store.open_attempt(study).set_document_named(BENCHMARKS, facts)
    seen: list[PreflightResult] = []

    def continued(_: Any, preflight: PreflightResult, **__: Any) -> None:
        seen.append(preflight)
        raise EngineUnavailable("no GPU is free")

    monkeypatch.setattr(search_work, "continue_study", continued)
    assert drive(store, study, work_dir=tmp_path / "work") == 1
    assert seen[-1].tasks == preflight.tasks
    data = tmp_path / "tasks" / "test.jsonl"
    data.write_text(data.read_text().replace('"gold": 1', '"gold": 2'))
    if is_earlier:
        assert drive(store, study, work_dir=tmp_path / "work") == 1
        assert seen[-1].tasks == preflight.tasks
        file.write_text(file.read_text() + "repeats: 1\n")
    assert drive(store, study, work_dir=tmp_path / "work") == 0
    assert store.job(study).state is JobState.FAILED
    reason = str(store.job(study).reason)
    assert "tasks of choices have changed since it was started" in reason
    assert reason.endswith(f"or restore the files: {file} or the files that it reads")


@pytest.mark.parametrize(
    "error", [EngineUnavailable("no GPU is free"), ConnectionError("no Ray"), OSError(5, "Input/output error")]
)
def test_an_engine_ray_or_disk_that_is_away_is_waited_for(
    store: Store, study: str, tmp_path: Path, error: Exception
) -> None:
    def unavailable(*_: Any) -> Any:
        raise error

    resources = with_scorer(unavailable)
    assert ends_waiting(store, study, tmp_path, resources) == str(error)


def test_a_driver_says_that_it_waits_for_an_engine(store: Store, study: str, tmp_path: Path) -> None:
    told: list[str | None] = []

    def starting(*_: Any) -> Any:
        told.append(store.job(study).waiting_for)
        raise EngineUnavailable("no GPU is free")

    resources = with_scorer(starting)
    assert ends_waiting(store, study, tmp_path, resources) == "no GPU is free"
    assert told == ["an engine to start"]


def test_an_error_of_the_program_is_counted(store: Store, study: str, tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("x")

    resources = with_scorer(broken)
    before = store.consecutive_failures(study)
    assert drive(store, study, work_dir=tmp_path / "work", resources=resources) == 1
    assert store.job(study).reason == "KeyError: 'x'"
    assert (store.consecutive_failures(study), store.consecutive_waits(study)) == (before + 1, 0)


@pytest.mark.parametrize(
    ("modality", "checked", "num_gpus", "dtype", "need"),
    [
        # The machines are of the kind for which the study was checked; applications keep their names.
        ("text", "bfloat16", 4, "auto", GpuNeed.NEEDED),
        ("text", "float32", 0, "auto", GpuNeed.IF_ANY),
        ("text", None, 4, "auto", GpuNeed.NEEDED),
        ("text", None, 0, "auto", GpuNeed.IF_ANY),
        # The GPUs are away: the study waits for them. Engines of images run on the CPU in place of them.
        ("text", "bfloat16", 0, "auto", GpuNeed.NEEDED),
        ("image", "bfloat16", 0, "bfloat16", GpuNeed.NEEDED),
        # GPUs came.
        ("text", "float32", 4, "float32", GpuNeed.NEEDED),
        ("image", "float32", 4, "float32", GpuNeed.NEEDED),
    ],
)
def test_engines_compute_in_the_checked_dtype(
    store: Store,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    modality: str,
    checked: str | None,
    num_gpus: int,
    dtype: str,
    need: GpuNeed,
) -> None:
    """Exports have the dtype that was stored, so engines have it too, on other machines than those of the checks."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("workers.serving.deployment._most_gpus", lambda: num_gpus)
    monkeypatch.setattr("service.jobs.search.work.cluster_machines", lambda: (EngineMachines(num_gpus, 2**40),))
    monkeypatch.setattr(
        "service.jobs.search.work.runs_on_gpus",
        lambda family, gpus: runs_on_gpus(replace(family, modality=modality), gpus),
    )
    parsed = parse_study(sums_study(models, data_dir=tmp_path))
    accepted = replace(examine(parsed).resolved(), dtype=checked)
    study = store.create_job(kind="search", name="sums", document=parsed.canonical(), accepted=accepted.to_json()).id
    opened: list[tuple[str, GpuNeed]] = []

    def scorer(_: Family, options: EngineOptions, __: int) -> Any:
        opened.append((options.dtype, gpu_need()))
        raise EngineUnavailable("not opened")

    assert drive(store, study, work_dir=tmp_path / "work", resources=with_scorer(scorer)) == 1
    assert opened == [(dtype, need)], store.job(study).reason
