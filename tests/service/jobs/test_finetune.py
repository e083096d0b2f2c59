"""A stored fine-tuning and its driver: the expert as an artifact, events, and what ends it. Without Ray: one process
trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from service.cluster.session import RaySession
from service.disk import ARTIFACTS, study_dir
from service.errors import Conflict
from service.jobs import finetune
from service.jobs.driver import KINDS, drive
from service.jobs.finetune import EXPERT_DIR, run_finetune
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.types import EventKind, JobKind, StudyState
from tests.builders import tiny_llama
from workers.errors import InvalidTask, TrainingFailed
from workers.training.finetuning.spec import FinetuneSpec, parse_spec


def leave_ray_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process trains, without Ray Train."""

    def fit(spec: FinetuneSpec, directory: Path) -> None:
        finetune._trained(spec, directory, report=lambda _: None, is_writer=True)

    session = RaySession(is_own=True, dashboard_url=None)
    monkeypatch.setattr(finetune, "_fit", fit)
    monkeypatch.setattr(finetune, "ray_session", lambda: nullcontext(session))


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_ray_out(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    yield store
    store.close()


def spec_of(directory: Path, **training: Any) -> FinetuneSpec:
    if not (directory / "base").exists():
        tiny_llama(directory / "base")
        rows = [json.dumps({"prompt": f"{i}=", "completion": str(i)}) for i in range(20)]
        (directory / "data.jsonl").write_text("\n".join(rows) + "\n")
    document = {
        "name": "sums",
        "base": "base",
        "data": {"file": "data.jsonl", "max_length": 64},
        "method": {"scale": 0.002},
        "training": {"steps": 3, "batch": 2, **training},
    }
    return parse_spec(document, directory)


def test_every_kind_of_job_has_its_work() -> None:
    assert KINDS.keys() == set(JobKind)


def test_a_driver_trains_the_expert_and_stores_it(store: Store, tmp_path: Path) -> None:
    record = finetune.stored(store, spec_of(tmp_path))
    work_dir = study_dir(tmp_path, record.id)
    assert drive(store, record.id, work_dir=work_dir) == 0
    after = store.study(record.id)
    assert (after.state, after.kind, after.reason) == (StudyState.COMPLETE, JobKind.FINETUNE, None)
    events = store.events(record.id, kinds=[EventKind.TRAINING])
    assert [event.payload["step"] for event in events] == [3]
    artifacts = ArtifactStore(store, tmp_path / ARTIFACTS)
    found = artifacts.get(record.id, EXPERT_DIR)
    assert found.facts["steps"] == 3
    out = artifacts.write_to(found, tmp_path / "copy")
    written, copied = (load_file(place / "model.safetensors") for place in (work_dir / EXPERT_DIR, out))
    assert written.keys() == copied.keys()


def test_lists_tell_kinds_apart(store: Store, tmp_path: Path) -> None:
    record = finetune.stored(store, spec_of(tmp_path), idempotency_key="a")
    assert [study.id for study in store.studies(JobKind.FINETUNE)] == [record.id]
    assert store.studies(JobKind.SEARCH) == ()
    assert len(store.studies()) == 1


@pytest.mark.parametrize(
    ("damage", "reason"), [("data", "data.jsonl: cannot be read"), ("rate", "the loss is"), ("base", "base: does not")]
)
def test_what_is_wrong_ends_it_with_the_reason(store: Store, tmp_path: Path, damage: str, reason: str) -> None:
    spec = spec_of(tmp_path)
    if damage == "data":
        (tmp_path / "data.jsonl").unlink()
    if damage == "base":
        (tmp_path / "base").rename(tmp_path / "away")
    if damage == "rate":
        changed = {"training": spec.training.model_copy(update={"learning_rate": 1e38, "max_gradient_norm": None})}
        spec = spec.model_copy(update={**changed, "method": spec.method.model_copy(update={"kind": "sgd"})})
    record = finetune.stored(store, spec)
    assert drive(store, record.id, work_dir=study_dir(tmp_path, record.id)) == 0
    after = store.study(record.id)
    assert after.state is StudyState.FAILED
    assert reason in str(after.reason)


def test_a_directory_is_of_one_specification(tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = run_finetune(spec_of(tmp_path), out)
    assert run_finetune(spec_of(tmp_path), out) == summary
    with pytest.raises(Conflict, match=r"holds another fine-tuning \('sums'\), which differs in training"):
        run_finetune(spec_of(tmp_path, steps=4), out)
    (tmp_path / "other" / EXPERT_DIR).mkdir(parents=True)
    with pytest.raises(Conflict, match="holds a model that is not of this fine-tuning"):
        run_finetune(spec_of(tmp_path), tmp_path / "other")


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    from service.disk import locked

    with locked(tmp_path / "out"), pytest.raises(Conflict, match="is at work here"):
        run_finetune(spec_of(tmp_path), tmp_path / "out")


def test_nothing_is_started_for_data_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tmp_path)
    (tmp_path / "data.jsonl").write_text("{\n")
    monkeypatch.setattr(finetune, "_fit", lambda *_: pytest.fail("it was started"))
    with pytest.raises(InvalidTask, match="line 1: not JSON"):
        run_finetune(spec, tmp_path / "out")


def test_a_failed_training_says_so_and_may_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = finetune._fit
    failure = {"error": "TrainingFailed", "message": "step 2: the loss is nan"}
    monkeypatch.setattr(
        finetune, "_fit", lambda _, directory: (directory / finetune.FAILURE_FILE).write_text(json.dumps(failure))
    )
    with pytest.raises(TrainingFailed, match="step 2: the loss is nan"):
        run_finetune(spec_of(tmp_path), tmp_path / "out")
    monkeypatch.setattr(finetune, "_fit", fit)
    assert run_finetune(spec_of(tmp_path), tmp_path / "out")["steps"] == 3


def test_a_worker_of_an_earlier_driver_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "PREDECESSOR_WAIT_S", 0.5)
    late = pytest.raises(TimeoutError, match="still writes here")
    with finetune._alone(tmp_path), late, finetune._alone(tmp_path):
        pass
    with finetune._alone(tmp_path):
        pass
