"""A stored fine-tuning and its driver, without Ray: the expert as an artifact, events, and the end."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cluster.session import RaySession
from service.disk import artifacts_dir, job_dir, locked
from service.errors import Conflict
from service.jobs.base import Resources
from service.jobs.driver import drive
from service.jobs.finetune import ray_train
from service.jobs.finetune.directory import EXPERT_DIR, FAILURE_FILE, SPEC_FILE, SUMMARY_FILE
from service.jobs.finetune.events import _HistoryEvents, _is_older
from service.jobs.finetune.study import begin_study
from service.jobs.finetune.training import run_finetune, run_fleet
from service.jobs.heartbeat import Heartbeat
from service.resolved_study import ResolvedStudy
from service.results.training import stored_analysis, stored_curves
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.studies.chains import SOURCES
from service.types import EventKind, JobRecord, JobState
from tests.builders import tiny_llama
from tests.s3_server import S3
from tests.service.api.harness import ApiServer
from tests.vision import image_folder, tiny_vit
from workers.errors import InvalidTask, TrainingFailed
from workers.file_access import FileAccess
from workers.models.remote import fetched, locate
from workers.training.finetuning import trainer
from workers.training.finetuning.fleet import Analysis, Pipeline, parse_pipeline
from workers.training.finetuning.history import CHECKPOINTS, METRICS, History
from workers.training.finetuning.result import TRAINING_FILE
from workers.training.finetuning.spec import Evaluation, FinetuneSpec, Method, parse_spec


def fit(spec: FinetuneSpec, directory: Path, access: FileAccess | None, _: int = 1) -> None:
    """Train in this process, without Ray Train."""
    ray_train.train_here(spec, directory, report=lambda _: None, is_writer=True, access=access)


def no_scorer(*_: Any) -> Any:
    raise AssertionError("fine-tunings score nothing")


def with_fit(fit: Any) -> Resources:
    """Resources without Ray, which train by the function `fit`."""
    session = RaySession(is_own=True, dashboard_url=None)
    return Resources(
        ray=lambda: nullcontext(session), scorer=no_scorer, fit=fit, cluster=lambda: {"CPU": 4.0}, completers=no_scorer
    )


HERE = with_fit(fit)


def stored(store: Store, pipeline: Pipeline, **facts: Any) -> JobRecord:
    return store.create_job(kind="finetune", name=pipeline.name, document=pipeline.canonical(), accepted=facts)


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


def pipeline_of(directory: Path) -> Pipeline:
    spec = spec_of(directory)
    return Pipeline(spec.name, {spec.name: spec}, None, None, is_fleet=False)


def pipeline_of_images(directory: Path) -> Pipeline:
    tiny_vit(directory / "base")
    image_folder(directory / "images", per_class=2)
    document = {
        "name": "sums",
        "base": "base",
        "data": {"images": "images"},
        "method": {"scale": 0.002},
        "training": {"steps": 3, "batch": 2},
    }
    spec = parse_spec(document, directory)
    return Pipeline(spec.name, {spec.name: spec}, None, None, is_fleet=False)


@pytest.mark.parametrize("pipeline", [pipeline_of, pipeline_of_images], ids=["text", "images"])
def test_a_driver_trains_the_expert_and_stores_it(
    store: Store, tmp_path: Path, pipeline: Callable[[Path], Pipeline]
) -> None:
    record = stored(store, replace(pipeline(tmp_path), analysis=Analysis()))
    work_dir = job_dir(tmp_path, record.id)
    assert drive(store, record.id, work_dir=work_dir, resources=HERE) == 0
    after = store.job(record.id)
    analysis = stored_analysis(store, record.id)
    assert analysis is not None
    (fleet,) = analysis["fleets"]
    assert (fleet["name"], [vector["expert"] for vector in fleet["task_vectors"]]) == ("mergopt", ["sums"])
    assert (after.state, after.kind, after.reason) == (JobState.COMPLETE, "finetune", None)
    updates = [event.payload for event in store.events(record.id, kinds=[EventKind.TRAINING])]
    assert {update["expert"] for update in updates} == {"sums"}
    assert [step for update in updates for step, _ in update["losses"]] == [1, 2, 3]
    assert after.progress is not None
    assert after.progress["experts"]["sums"]["steps"] == after.progress["experts"]["sums"]["step"] == 3
    artifacts = ArtifactStore(store, artifacts_dir(tmp_path))
    found = artifacts.get(record.id, "sums")
    assert found.facts["steps"] == 3
    out = artifacts.write_to(found, tmp_path / "copy")
    assert (out / "model.safetensors").exists()
    # The artifact is the only copy; what is needed to go on is not needed any more.
    assert not (work_dir / EXPERT_DIR).exists()
    assert not (work_dir / CHECKPOINTS).exists()


def test_an_object_store_holds_the_expert(store: Store, tmp_path: Path, s3: S3) -> None:
    """A driver stores the trained expert in an object store, and the server sends it from there."""
    record, files = stored(store, pipeline_of(tmp_path)), f"{s3.bucket()}/mergesearch"
    assert drive(store, record.id, work_dir=job_dir(tmp_path, record.id), files=files, resources=HERE) == 0
    assert not artifacts_dir(tmp_path).exists()
    artifacts = ArtifactStore(store, files)
    out = artifacts.write_to(artifacts.get(record.id, "sums"), tmp_path / "copy")
    with ApiServer(tmp_path, files=files) as server, httpx.Client(base_url=server.url) as http:
        expert = http.get(f"/v1/finetunes/{record.id}").json()["experts"]["sums"]
        answer = http.get(expert["links"]["download"])
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        found = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive}
        assert {name: file.read() for name, file in found.items() if file} == {
            file.name: file.read_bytes() for file in out.iterdir()
        }


def test_trained_expert_is_an_artifact(store: Store, tmp_path: Path) -> None:
    """A fleet has an artifact for each expert as soon as it is trained."""
    spec = spec_of(tmp_path).canonical()
    alone = {"data": spec.pop("data")}
    record = stored(store, parse_pipeline({**spec, "experts": {"one": alone, "two": alone}}))
    artifacts = ArtifactStore(store, artifacts_dir(tmp_path))
    begun = []

    def interrupted(spec: FinetuneSpec, directory: Path, access: FileAccess | None, _: int) -> None:
        begun.append(spec.name)
        if begun == ["one", "two"]:
            raise ConnectionError("Ray is gone")
        fit(spec, directory, access)

    work_dir = job_dir(tmp_path, record.id)
    assert drive(store, record.id, work_dir=work_dir, resources=with_fit(interrupted)) == 1
    assert store.job(record.id).state is JobState.STOPPED
    assert [artifact.name for artifact in artifacts.of(record.id)] == ["one"]
    assert drive(store, record.id, work_dir=work_dir, resources=with_fit(interrupted)) == 0
    assert begun == ["one", "two", "two"]
    assert [artifact.name for artifact in artifacts.of(record.id)] == ["one", "two"]
    told = [event.payload["expert"] for event in store.events(record.id, kinds=[EventKind.TRAINING])]
    assert list(dict.fromkeys(told)) == ["one", "two"]


@pytest.mark.parametrize("is_remote", [False, True], ids=["directory", "object store"])
def test_pipeline_study_follows_its_experts(store: Store, tmp_path: Path, s3: S3, is_remote: bool) -> None:
    """A pipeline's study is created once its experts are trained, which it names where every machine can read them."""
    files = s3.bucket() if is_remote else None
    spec = spec_of(tmp_path).canonical()
    alone = {"data": spec.pop("data")}
    task = {"file": str(tmp_path / "data.jsonl"), "answer": "{{completion}}", "max_tokens": 4}
    study = {
        "name": "merge",
        "search_space": {"kind": "lfs", "layer_groups": 1},
        "search": {"algorithm": "random", "max_trials": 2},
        "fidelity": {"scheduler": "none"},
        "objectives": [{"name": "sums", "task": task, "metric": "exact_match"}],
        "engine": {"max_model_len": 32},
    }
    pipeline = parse_pipeline({**spec, "experts": {"one": alone, "two": {**alone, "seed": 1}}, "study": study})
    record = store.create_job(
        kind="finetune",
        name=pipeline.name,
        document=pipeline.canonical(),
        accepted={"access": asdict(FileAccess((str(tmp_path / "base"), str(tmp_path / "data.jsonl"))))},
    )
    assert drive(store, record.id, work_dir=job_dir(tmp_path, record.id), files=files, resources=HERE) == 0
    assert store.job(record.id).reason is None
    (merging,) = store.jobs("search")
    assert (merging.name, merging.state) == ("merge", JobState.CREATED)
    experts = merging.document["models"]["experts"]
    artifacts = ArtifactStore(store, files or artifacts_dir(tmp_path))
    for alias, place in experts.items():
        assert place.startswith(f"{files}/") if files else Path(place).parent == tmp_path / SOURCES
        (found,) = fetched([locate(place)])
        stored_at = artifacts.write_to(artifacts.get(record.id, alias), tmp_path / "copies" / alias)
        assert (found / "model.safetensors").read_bytes() == (stored_at / "model.safetensors").read_bytes()
        assert json.loads((stored_at / TRAINING_FILE).read_text())["specification"]["name"] == alias
    assert (tmp_path / SOURCES).exists() is not is_remote
    readable, places = (str(tmp_path / "base"), str(tmp_path / "data.jsonl")), tuple(experts.values())
    expected = FileAccess(readable, urls=places) if is_remote else FileAccess((*readable, *places))
    assert ResolvedStudy.of(merging).access == expected
    if is_remote:
        kept = {artifact.digest for artifact in artifacts.of(merging.id)}
        assert kept == {artifact.digest for artifact in artifacts.of(record.id)}, "if the fine-tuning is deleted"
    assert begin_study(store, store.open_attempt(record.id), pipeline, artifacts, tmp_path) == merging
    assert [event.payload["study"] for event in store.events(record.id, kinds=[EventKind.STUDY])] == [merging.id]


def test_an_evaluation_is_told_after_its_update(store: Store, tmp_path: Path) -> None:
    """Both have the same step; the evaluation may come any time later, also in another driver."""
    record = stored(store, pipeline_of(tmp_path))
    place = tmp_path / "place"
    place.mkdir()
    history = History(place / METRICS, is_writer=True, report=lambda _: None)
    update = {"steps": 50, "seconds": 0.1}
    for step in range(1, 26):
        history.add({"step": step, "loss": float(step), **update})
    writer = store.open_attempt(record.id)
    _HistoryEvents(store, writer, Heartbeat(writer, 0.0), {"sums": place}).store_new()
    history.add({"step": 25, "values": {"math": 0.5}, "linearized_values": {"math": 0.75}})
    heartbeat = Heartbeat(writer, 0.0)
    later = _HistoryEvents(store, writer, heartbeat, {"sums": place})
    later.store_new()
    later.store_new()
    first, second = [event.payload for event in store.events(record.id, kinds=[EventKind.TRAINING])]
    assert (first["step"], first["loss"], len(first["losses"])) == (25, 25.0, 9)
    assert first["losses"][:2] == [[3, 2.0], [6, 5.0]]
    values = {"values": {"math": 0.5}, "linearized_values": {"math": 0.75}}
    assert second == {"expert": "sums", "step": 25, **values}
    assert heartbeat.progress == {
        "experts": {"sums": {"step": 25, "steps": 50, "loss": 25.0, "seconds": 0.1, **values}}
    }
    history.forget_after(20)  # a worker has died and goes on from a checkpoint
    history.add({"step": 21, "loss": 21.0, **update})
    history.add({"step": 26, "loss": 26.0, **update})
    later.store_new()
    assert store.events(record.id, kinds=[EventKind.TRAINING])[-1].payload["losses"] == [[26, 26.0]]


@pytest.mark.slow
def test_the_values_of_a_linearized_model_are_kept(store: Store, tmp_path: Path) -> None:
    """The stored expert of the method tangent has the values of the model that was trained beside its own."""
    spec_of(tmp_path)  # writes the base and the data
    rows = [json.dumps({"prompt": f"{i}=", "answer": str(i)}) for i in range(8)]
    (tmp_path / "held.jsonl").write_text("\n".join(rows) + "\n")
    objective = {"name": "sums", "task": {"file": "held.jsonl", "max_tokens": 4}, "metric": "exact_match"}
    document = {
        "name": "sums",
        "base": "base",
        "data": {"file": "data.jsonl", "max_length": 64},
        "method": {"kind": "tangent"},
        "training": {"steps": 2, "batch": 2},
        "evaluation": {"objectives": [objective], "every": 2, "samples": 4},
    }
    pipeline = Pipeline("sums", {"sums": parse_spec(document, tmp_path)}, None, None, is_fleet=False)
    record = stored(store, pipeline)
    assert drive(store, record.id, work_dir=job_dir(tmp_path, record.id), resources=HERE) == 0
    facts = ArtifactStore(store, artifacts_dir(tmp_path)).get(record.id, "sums").facts
    assert facts["linearized_values"].keys() == facts["values"].keys()
    progress = store.job(record.id).progress
    assert progress is not None
    assert progress["experts"]["sums"]["linearized_values"] == facts["linearized_values"]


def test_losses_at_the_weights_are_beside_those_at_the_offset(store: Store, tmp_path: Path) -> None:
    """Every loss at the weights is stored, also of updates in the middle of an event; the progress has the last."""
    record = stored(store, pipeline_of(tmp_path))
    place = tmp_path / "place"
    place.mkdir()
    history = History(place / METRICS, is_writer=True, report=lambda _: None)
    for step in range(1, 26):
        at_weights = {"weights_loss": 0.5 * step} if step % 10 == 1 else {}
        history.add({"step": step, "steps": 50, "loss": float(step), "alpha": 0.5, "seconds": 0.1, **at_weights})
    writer = store.open_attempt(record.id)
    heartbeat = Heartbeat(writer, 0.0)
    _HistoryEvents(store, writer, heartbeat, {"sums": place}).store_new()
    (event,) = [event.payload for event in store.events(record.id, kinds=[EventKind.TRAINING])]
    assert event["weights_losses"] == [[1, 0.5], [11, 5.5], [21, 10.5]]
    assert "offset_losses" not in event
    assert heartbeat.progress is not None
    progress = heartbeat.progress["experts"]["sums"]
    assert (progress["loss"], progress["loss_at"], progress["weights_loss"]) == (25.0, "offset", 10.5)
    (curves,) = stored_curves(store, record.id, ["sums"])["experts"]
    assert curves["loss_at"] == "offset"
    assert [point["step"] for point in curves["weights_loss"]] == [1, 11, 21]


def test_a_training_that_waits_for_workers_is_not_stuck(store: Store, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    spec, worker = place / "spec", place / "worker"
    assert not _is_older(worker, spec)
    spec.touch()
    assert _is_older(worker, spec)
    worker.touch()
    os.utime(spec, (1, 1))
    assert not _is_older(worker, spec)


def test_a_driver_waits_for_the_one_before_it(store: Store, tmp_path: Path) -> None:
    record = stored(store, pipeline_of(tmp_path))
    work_dir = job_dir(tmp_path, record.id)
    with locked(work_dir):
        assert drive(store, record.id, work_dir=work_dir, resources=HERE) == 1
    waiting = store.job(record.id)
    assert waiting.state is JobState.STOPPED
    assert "is using this directory" in str(waiting.reason)
    assert drive(store, record.id, work_dir=work_dir, resources=HERE) == 0


def test_driver_reads_accepted_directories(store: Store, tmp_path: Path) -> None:
    """A driver reads only what was allowed when its job was accepted."""
    (tmp_path / "other").mkdir()
    record = store.create_job(
        kind="finetune",
        name="sums",
        document=pipeline_of(tmp_path).canonical(),
        accepted={"access": asdict(FileAccess((str(tmp_path / "other"),)))},
    )
    assert drive(store, record.id, work_dir=job_dir(tmp_path, record.id), resources=HERE) == 0
    after = store.job(record.id)
    assert after.state is JobState.FAILED
    assert "is not below a directory that studies may read" in str(after.reason)


def test_lists_tell_kinds_apart(store: Store, tmp_path: Path) -> None:
    record = stored(store, pipeline_of(tmp_path))
    assert [study.id for study in store.jobs("finetune")] == [record.id]
    assert store.jobs("search") == ()
    assert len(store.jobs()) == 1


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
    record = stored(store, Pipeline(spec.name, {spec.name: spec}, None, None, is_fleet=False))
    assert drive(store, record.id, work_dir=job_dir(tmp_path, record.id), resources=HERE) == 0
    after = store.job(record.id)
    assert after.state is JobState.FAILED
    assert reason in str(after.reason)


def test_a_directory_is_of_one_specification(tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = run_finetune(spec_of(tmp_path), out, resources=HERE)
    assert run_finetune(spec_of(tmp_path), out, resources=HERE) == summary
    with pytest.raises(
        Conflict, match=r"another fine-tuning \('sums'\), which differs in training\.steps \(3 there, 4"
    ):
        run_finetune(spec_of(tmp_path, steps=4), out, resources=HERE)
    (tmp_path / "other" / EXPERT_DIR).mkdir(parents=True)
    with pytest.raises(Conflict, match="holds a model that this fine-tuning did not make"):
        run_finetune(spec_of(tmp_path), tmp_path / "other", resources=HERE)


# `finetune.json` as the version before `method.noise_layers` wrote it, without its directories.
EARLIER_METHOD = {
    "kind": "mergopt",
    "optimizer": "adamw",
    "betas": [0.9, 0.999],
    "momentum": 0.0,
    "weight_decay": 0.0,
    "noise": "laplace",
    "scale": 0.002,
    "fit_to": [],
    "coefficients": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    "max_models": 7,
    "in_layers": False,
    "rho": None,
}
EARLIER_TRAINING = {
    "steps": 3,
    "epochs": None,
    "batch": 2,
    "micro_batch": 8,
    "learning_rate": 2e-05,
    "schedule": "cosine",
    "warmup_steps": 0,
    "max_gradient_norm": 1.0,
    "gradient_checkpointing": False,
    "layers": None,
    "precision": "auto",
    "checkpoint_every": 100,
}


def written_earlier(directory: Path, out: Path, *, layers: tuple[int, ...] | None = None) -> Path:
    """Write what an earlier version stored for `spec_of(directory)`; return the file."""
    data: dict[str, Any] = {
        "file": str(directory / "data.jsonl"),
        "dataset": None,
        "configuration": None,
        "split": "train",
    }
    data |= {"prompt": "{{prompt}}", "completion": "{{completion}}", "max_length": 64, "packing": True}
    document = {
        "name": "sums",
        "base": str(directory / "base"),
        "data": {**data, "pad_token": None},
        "method": EARLIER_METHOD,
        "training": {**EARLIER_TRAINING, "layers": layers},
        "adapter": None,
        "evaluation": None,
        "dtype": "bfloat16",
        "workers": 1,
        "seed": 0,
    }
    out.mkdir(parents=True)
    (out / SPEC_FILE).write_text(json.dumps(document))
    return out / SPEC_FILE


def test_an_earlier_versions_training_keeps_its_defaults(tmp_path: Path) -> None:
    """An unchanged file continues, again and again, with the weight decay of the version that began the training."""
    spec, out = spec_of(tmp_path), tmp_path / "out"
    written_earlier(tmp_path, out)
    notes: list[str] = []
    failure = {"error": "TrainingFailed", "message": "step 2: the loss is nan"}
    failing = with_fit(lambda _, directory, *__: (directory / FAILURE_FILE).write_text(json.dumps(failure)))
    with pytest.raises(TrainingFailed, match="step 2"):
        run_finetune(spec, out, resources=failing, note=notes.append)
    expected = "sums: method.weight_decay stays 0.0, as in the version that began this training; the default is now"
    assert f"{expected} 0.001" in notes
    trained: list[FinetuneSpec] = []

    def fit_it(spec: FinetuneSpec, *rest: Any) -> None:
        trained.append(spec)
        fit(spec, *rest)

    summary = run_finetune(spec, out, resources=with_fit(fit_it))
    assert [each.method.weight_decay for each in trained] == [0.0]
    assert run_finetune(spec, out, resources=HERE) == summary
    stating = spec.model_copy(update={"method": spec.method.model_copy(update={"weight_decay": 0.001})})
    with pytest.raises(Conflict, match=r"differs in method\.weight_decay \(0\.0 there, 0\.001 here\); give these opt"):
        run_finetune(stating, out, resources=HERE)


def test_a_stated_weight_decay_is_not_a_default(tmp_path: Path) -> None:
    """If the present version began a training with a stated 0, a file without it is another specification."""
    spec, out = spec_of(tmp_path), tmp_path / "out"
    run_finetune(spec.model_copy(update={"method": Method(scale=0.002, weight_decay=0.0)}), out, resources=HERE)
    with pytest.raises(Conflict, match=r"method\.weight_decay \(0\.0 there, 0\.001 here\)"):
        run_finetune(spec, out, resources=HERE)


@pytest.mark.parametrize("kind", ["mergopt", "adamw"])
def test_earlier_noise_stays_in_the_trained_layers(tmp_path: Path, kind: str) -> None:
    """Also in a fleet, whose experts now have noise in the layers that any of them trains."""
    document = spec_of(tmp_path).canonical()
    document["method"] = {"kind": kind, "scale": 0.002}
    del document["data"]["chat_bos"]
    own = {"one": {"training": {"layers": [0]}}, "two": {"training": {"layers": [1]}}}
    document["training"] = {"steps": 3, "batch": 2}
    pipeline = parse_pipeline({**document, "experts": own})
    places = pipeline.places(tmp_path / "out")
    for layer, (alias, place) in enumerate(places.items()):
        file = written_earlier(tmp_path, place, layers=(layer,))
        stored = json.loads(file.read_text())
        file.write_text(json.dumps({**stored, "name": alias, "method": {**stored["method"], "kind": kind}}))
    trained: dict[str, Any] = {}

    def fit_it(spec: FinetuneSpec, directory: Path, *_: Any) -> None:
        trained[spec.name] = spec.method.noise_layers
        (directory / SUMMARY_FILE).write_text("{}")

    run_fleet(pipeline.experts, places, resources=with_fit(fit_it))
    assert trained == ({"one": (0,), "two": (1,)} if kind == "mergopt" else {"one": None, "two": None})
    run_fleet(pipeline.experts, places, resources=HERE)
    stated = {alias: {**each, "method": {"noise_layers": [3]}} for alias, each in own.items()}
    other = parse_pipeline({**document, "experts": stated}).experts["one"]
    with pytest.raises(Conflict, match=r"method\.noise_layers \((\[0\]|null) there, \[3\] here\)"):
        run_finetune(other, places["one"], resources=HERE, fleet={"noise_layers": (0, 1)})


def test_earlier_noise_stays_in_what_an_adapter_changes(tmp_path: Path) -> None:
    """Also in a fleet whose adapters change other modules, where a new training has noise in all of them."""
    document = spec_of(tmp_path).canonical()
    document["method"] = {"kind": "mergopt", "scale": 0.002}
    document["training"] = {"steps": 3, "batch": 2}
    experts = {name: {"adapter": {"targets": [name]}} for name in ("q_proj", "down_proj")}
    pipeline = parse_pipeline({**document, "experts": experts})
    trained: dict[str, Any] = {}

    def fit_it(spec: FinetuneSpec, directory: Path, *_: Any) -> None:
        trained[spec.name] = spec.method.noise_targets
        (directory / SUMMARY_FILE).write_text("{}")

    run_fleet(pipeline.experts, pipeline.places(tmp_path / "new"), resources=with_fit(fit_it))
    assert trained == dict.fromkeys(experts, ("down_proj", "q_proj"))
    places = pipeline.places(tmp_path / "earlier")
    for alias, place in places.items():
        stored = pipeline.experts[alias].canonical()
        del stored["method"]["noise_targets"]
        place.mkdir(parents=True)
        (place / SPEC_FILE).write_text(json.dumps(stored))
    notes: list[str] = []
    run_fleet(pipeline.experts, places, resources=with_fit(fit_it), note=notes.append)
    assert trained == dict.fromkeys(experts, None)
    assert any("method.noise_targets stays what the adapter changes" in note for note in notes)
    assert "noise_targets" not in json.loads((places["q_proj"] / SPEC_FILE).read_text())["method"]


def test_earlier_chats_begin_without_bos(tmp_path: Path) -> None:
    """Chats of a training that an earlier version began stay as they were; those of a new training get BOS."""
    spec = spec_of(tmp_path)
    (tmp_path / "base" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    messages = [{"role": "user", "content": "x" * 32}, {"role": "assistant", "content": "y" * 32}]  # with BOS too long
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(InvalidTask, match="65 tokens"):
        run_finetune(spec, tmp_path / "new", resources=HERE)
    specs, places = {"one": spec, "two": spec}, {"one": tmp_path / "one", "two": tmp_path / "two"}
    for place in places.values():
        written_earlier(tmp_path, place)
    trained: list[bool] = []
    notes: list[str] = []

    def fit_it(spec: FinetuneSpec, directory: Path, *_: Any) -> None:
        trained.append(spec.data.chat_bos)
        (directory / SUMMARY_FILE).write_text("{}")

    run_fleet(specs, places, resources=with_fit(fit_it), note=notes.append)
    assert trained == [False, False]
    assert any("sums: data.chat_bos stays false, as in the version that began" in note for note in notes)
    assert "chat_bos" not in json.loads((places["one"] / SPEC_FILE).read_text())["data"]
    run_fleet(specs, places, resources=HERE)
    stating = spec.model_copy(update={"data": spec.data.model_copy(update={"chat_bos": True})})
    with pytest.raises(Conflict, match=r"data\.chat_bos \(false there, true here\)"):
        run_finetune(stating, places["one"], resources=HERE)


def test_other_machines_continue_a_training(tmp_path: Path) -> None:
    """Options that change rounding at most may differ when a training is continued."""
    out = tmp_path / "out"
    summary = run_finetune(spec_of(tmp_path), out, resources=HERE)
    other = spec_of(tmp_path, micro_batch=1, gradient_checkpointing=True).model_copy(update={"workers": 2})
    assert run_finetune(other, out, resources=HERE) == summary


def test_the_evaluation_may_change_until_the_end(tmp_path: Path) -> None:
    """An evaluation does not influence the training; once the training has ended, its values are final."""
    task = {"file": str(tmp_path / "data.jsonl"), "answer": "{{completion}}", "max_tokens": 4}
    sections = [
        Evaluation.model_validate({"objectives": [{"name": name, "task": task, "metric": "exact_match"}]})
        for name in ("first", "second")
    ]
    first, second = (spec_of(tmp_path).model_copy(update={"evaluation": section}) for section in sections)
    out, trained = tmp_path / "out", list[Any]()

    def interrupted(spec: FinetuneSpec, *_: Any) -> None:
        trained.append(spec.evaluation)
        raise ConnectionError("Ray is gone")

    for spec in (first, spec_of(tmp_path), second):
        with pytest.raises(ConnectionError):
            run_finetune(spec, out, resources=with_fit(interrupted))
    assert trained == [sections[0], None, sections[1]]
    assert json.loads((out / SPEC_FILE).read_text())["evaluation"]["objectives"][0]["name"] == "second"
    (out / SUMMARY_FILE).write_text("{}")
    assert run_finetune(second, out, resources=HERE) == {}
    with pytest.raises(Conflict, match=r"which differs in evaluation\.objectives"):
        run_finetune(first, out, resources=HERE)


def test_changed_data_are_refused_before_workers_start(tmp_path: Path) -> None:
    """Before the first checkpoint the data may change; after it, the training does not continue on other data."""
    spec, out = spec_of(tmp_path, checkpoint_every=1), tmp_path / "out"
    data = tmp_path / "data.jsonl"
    rows = data.read_text()

    def killed_at(step: int) -> Resources:
        def report(line: Mapping[str, Any]) -> None:
            if line["step"] == step:
                raise ConnectionError("Ray is gone")

        def fit_some(spec: FinetuneSpec, directory: Path, *_: Any) -> None:
            ray_train.train_here(spec, directory, report=report, is_writer=True)

        return with_fit(fit_some)

    for step in (1, 2):
        data.write_text(f"{rows}\n" * step)
        with pytest.raises(ConnectionError):
            run_finetune(spec, out, resources=killed_at(step))
    data.write_text(rows)
    unused = with_fit(lambda *_: pytest.fail("it was started"))
    message = r"out: data: .*data\.jsonl has changed since the training began; restore it to continue the training, or"
    with pytest.raises(Conflict, match=message):
        run_finetune(spec, out, resources=unused)
    data.write_text(f"{rows}\n" * 2)
    assert run_finetune(spec, out, resources=HERE)["steps"] == 3


def test_experts_train_side_by_side(tmp_path: Path) -> None:
    """With `parallel_experts: 2`, two of three experts train at the same time; a failure starts no further one."""
    specs = {alias: spec_of(tmp_path).model_copy(update={"name": alias}) for alias in ("one", "two", "three")}
    places = {alias: tmp_path / alias for alias in specs}
    both, one = threading.Barrier(2), threading.Lock()
    shares = []

    def fit_two(spec: FinetuneSpec, directory: Path, access: FileAccess | None, side_by_side: int) -> None:
        shares.append(side_by_side)
        if spec.name != "three":
            both.wait(60)  # one after the other would wait for ever
        with one:  # transformers loads one model at a time in a process
            fit(spec, directory, access)

    told: list[str] = []
    found = run_fleet(
        specs, places, resources=with_fit(fit_two), parallel=2, finished=lambda alias, _: told.append(alias)
    )
    assert list(found) == ["one", "two", "three"]
    assert sorted(told) == sorted(specs)
    assert shares == [2, 2, 2]

    begun = []

    def failing(spec: FinetuneSpec, directory: Path, *_: Any) -> None:
        begun.append(spec.name)
        both.wait(60)
        failure = {"error": "TrainingFailed", "message": f"{spec.name} failed"}
        (directory / FAILURE_FILE).write_text(json.dumps(failure))

    others = {alias: tmp_path / f"{alias}-again" for alias in specs}
    with pytest.raises(TrainingFailed, match=r"(one|two) failed"):
        run_fleet(specs, others, resources=with_fit(failing), parallel=2)
    assert sorted(begun) == ["one", "two"]


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "out"), pytest.raises(Conflict, match="is using this directory"):
        run_finetune(spec_of(tmp_path), tmp_path / "out", resources=HERE)


def test_prompts_that_are_cut_are_reported(tmp_path: Path) -> None:
    """The notes before a training say how many prompts of an evaluation task are longer than the model reads."""
    task = {"file": str(tmp_path / "data.jsonl"), "prompt": "{{prompt * 300}}", "answer": "{{completion}}"}
    section = {"objectives": [{"name": "sums", "task": task, "metric": "exact_match"}]}
    spec = spec_of(tmp_path).model_copy(update={"evaluation": Evaluation.model_validate(section)})
    notes: list[str] = []
    fit_nothing = with_fit(lambda _, directory, *__: (directory / SUMMARY_FILE).write_text("{}"))
    run_finetune(spec, tmp_path / "out", resources=fit_nothing, note=notes.append)
    assert any("sums: evaluation.objectives.0: 20 of 20 prompts lose their beginning" in note for note in notes)


def test_nothing_is_started_for_data_that_cannot_be_used(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    (tmp_path / "data.jsonl").write_text("{\n")
    resources = with_fit(lambda *_: pytest.fail("it was started"))
    with pytest.raises(InvalidTask, match="line 1: not JSON"):
        run_finetune(spec, tmp_path / "out", resources=resources)


def test_a_failed_training_says_so_and_may_be_tried_again(tmp_path: Path) -> None:
    failure = {"error": "TrainingFailed", "message": "step 2: the loss is nan"}
    failing = with_fit(lambda _, directory, *__: (directory / FAILURE_FILE).write_text(json.dumps(failure)))
    with pytest.raises(TrainingFailed, match="step 2: the loss is nan"):
        run_finetune(spec_of(tmp_path), tmp_path / "out", resources=failing)
    assert run_finetune(spec_of(tmp_path), tmp_path / "out", resources=HERE)["steps"] == 3


def test_a_worker_of_an_earlier_driver_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_train, "PREDECESSOR_WAIT_S", 0.5)
    late = pytest.raises(TimeoutError, match="still writes here")
    with ray_train._alone(tmp_path), late, ray_train._alone(tmp_path):
        pass
    with ray_train._alone(tmp_path):
        pass


@pytest.mark.parametrize("is_writer", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_failures_of_one_process_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, is_writer: bool
) -> None:
    """A process that cannot read its data says so and ends with an error, so that the others do not wait for it."""
    calls: list[int] = []

    def train_nothing(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise InvalidTask("data.jsonl: cannot be read")

    monkeypatch.setattr(trainer, "train", train_nothing)
    spec = spec_of(tmp_path).model_copy(update={"workers": workers})
    ends = pytest.raises(InvalidTask, match="cannot be read") if workers > 1 else nullcontext()
    with ends:
        ray_train.train_here(spec, tmp_path, report=lambda _: None, is_writer=is_writer)
    failure = {"error": "InvalidTask", "message": "data.jsonl: cannot be read"}
    assert json.loads((tmp_path / FAILURE_FILE).read_text()) == failure
    ray_train.train_here(spec, tmp_path, report=lambda _: None, is_writer=is_writer)  # the one that replaces it
    assert calls == [1]


def test_ray_train_gets_evaluations_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its controller takes one report in two seconds: a training that reports every update has no more updates."""
    import ray.train

    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(ray.train, "report", reported.append)
    for step in (1, 2):
        ray_train._report({"step": step, "loss": 0.5})
    ray_train._report({"step": 2, "values": {"sums": 0.25}})
    assert reported == [{"step": 2, "sums": 0.25}]
