"""Fine-tunings over HTTP: created once, looked at, cancelled, resumed, deleted; their experts downloaded."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from search_spaces.errors import InvalidStudy
from service.disk import artifacts_dir, job_dir
from service.errors import StaleAttempt
from service.jobs.base import RequestContext
from service.jobs.finetune.request import LOCAL_DATA, accept
from service.jobs.finetune.study import collect_sources
from service.jobs.finetune.training import run_finetune
from service.store.artifacts import ArtifactStore
from service.store.blobs import BLOBS, open_blobs
from service.studies.chains import SOURCES
from service.types import EventKind, JobState
from tests.builders import tiny_llama
from tests.service.api.harness import (
    ApiServer,
    analysed_fleet,
    document,
    finetuning,
    finished_finetune,
    stored_finetune,
    stored_study,
)
from tests.vision import CLASSES, image_folder, tiny_vit
from workers.errors import InvalidTask
from workers.file_access import FileAccess
from workers.training.finetuning.spec import parse_spec


def test_a_fleet_is_created_and_found_where_its_location_says(http: httpx.Client, server: ApiServer) -> None:
    answer = http.post("/v1/finetunes", content=yaml.safe_dump(finetuning()), headers={"Content-Type": "text/yaml"})
    assert answer.status_code == 201, answer.text
    created = answer.json()
    assert answer.headers["location"] == created["links"]["self"] == f"/v1/finetunes/{created['id']}"
    assert http.get(answer.headers["location"]).json() == created
    assert (created["name"], created["state"], created["attempt"]) == ("family", "CREATED", 0)
    expert: dict[str, Any] = {"method": "mergopt", "progress": None, "bytes": None, "links": {}}
    assert created["experts"] == {"math": expert, "text": expert}
    assert server.cluster.num_wakes == 1
    for link in set(created["links"]) - {"events"}:
        assert http.get(created["links"][link]).status_code == 200, link
    # What was stored is accepted again, and is the same.
    again = http.post("/v1/finetunes", json=http.get(created["links"]["specification"]).json()).json()
    assert server.store.job(again["id"]).document == server.store.job(created["id"]).document


def test_one_expert_has_the_name_of_its_fine_tuning(http: httpx.Client) -> None:
    fleet = finetuning()
    alone = {**{k: v for k, v in fleet.items() if k != "experts"}, "data": fleet["experts"]["math"]["data"]}
    created = http.post("/v1/finetunes", json=alone).json()
    assert list(created["experts"]) == ["family"]


def test_a_key_names_one_body_of_one_kind(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "one"}
    created = http.post("/v1/finetunes", json=finetuning(), headers=headers)
    again = http.post("/v1/finetunes", json=finetuning(), headers=headers)
    assert (created.status_code, again.status_code) == (201, 200)
    assert created.json()["id"] == again.json()["id"]
    other = http.post("/v1/studies", json=document(), headers=headers)
    assert other.status_code == 409
    assert f"which created fine-tuning {created.json()['id']}; use another key for another study" in other.text


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"base": "./base"}, "experts.math.base", "./base: is relative"),
        ({"experts": {"math": {"data": {"file": "math.jsonl"}}}}, "experts.math.data.file", "math.jsonl: is relative"),
        ({"experts": {"math": {"data": {"file": "/dev/zero"}}}}, "experts.math.data.file", "/dev/zero: is not a file"),
        ({"training": {"steps": 0}}, "experts.math.training.steps", "0 is not accepted"),
        ({"name": ""}, "name", "'' is no name"),
        ({"study": {}}, "study", ""),
        ({"learning_rate": 3}, "experts.math.learning_rate", "unknown"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(
    http: httpx.Client, changes: dict[str, Any], field: str, message: str
) -> None:
    answer = http.post("/v1/finetunes", json=finetuning(**changes))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problems = {problem["field"]: problem["message"] for problem in answer.json()["problems"]}
    assert any(at.startswith(field) and message in told for at, told in problems.items()), problems


def test_pipeline_study_files_are_checked(http: httpx.Client) -> None:
    """The files of a pipeline's study are checked as those of a study."""

    def sent(file: str) -> httpx.Response:
        task = {"name": "math", "task": {"file": file}, "metric": "exact_match"}
        study = {"name": "merge", "fidelity": {"scheduler": "none"}, "objectives": [task]}
        return http.post("/v1/finetunes", json=finetuning(study=study))

    for file, message in (("dev.jsonl", "dev.jsonl: is relative"), ("/dev/zero", "/dev/zero: is not a file")):
        (problem,) = sent(file).json()["problems"]
        assert problem["field"] == "study.objectives.0.task.file"
        assert message in problem["message"]
    accepted = sent("/data/dev.jsonl")
    assert accepted.status_code == 201
    specification = http.get(accepted.json()["links"]["specification"]).json()
    assert specification["study"]["name"] == "merge"
    assert "models" not in specification["study"]


def test_bodies_have_the_limits_of_studies(http: httpx.Client) -> None:
    assert http.post("/v1/finetunes", content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415
    assert http.post("/v1/finetunes", json={"name": "x" * 2**20}).status_code == 413
    assert http.post("/v1/finetunes", json=finetuning(), headers={"Host": "elsewhere"}).status_code == 421
    assert http.post("/v1/finetunes", json=finetuning(), headers={"Origin": "http://elsewhere"}).status_code == 403


def test_data_of_the_head_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server refuses fine-tunings if their workers cannot write to its data directory."""
    monkeypatch.setenv(LOCAL_DATA, "1")
    with pytest.raises(InvalidStudy, match=r"their workers write to .* only the head of Ray has; .*data\.workers"):
        accept(finetuning(), RequestContext())


def test_check_keeps_to_allowed_directories(tmp_path: Path) -> None:
    """The check reads base, data and tasks, and nothing outside the allowed directories."""
    base, data = tmp_path / "models" / "base", tmp_path / "models" / "data.jsonl"
    base.parent.mkdir()
    tiny_llama(base)
    data.write_text(json.dumps({"prompt": "1=", "completion": "1"}) + "\n")
    task = {"name": "math", "task": {"file": str(data), "answer": "{{completion}}"}, "metric": "exact_match"}
    whole: dict[str, Any] = {
        "name": "one",
        "base": str(base),
        "data": {"file": str(data), "max_length": 64},
        "training": {"steps": 1},
        "evaluation": {"objectives": [task]},
    }

    def check(access: FileAccess | None, **changes: Any) -> Any:
        return accept({**whole, **changes}, RequestContext(access))

    def problems(access: FileAccess | None, **changes: Any) -> dict[str, str]:
        with pytest.raises(InvalidStudy) as refused:
            check(access, **changes)
        return {problem.field: problem.message for problem in refused.value.problems}

    allowed = FileAccess((str(base.parent),))
    outcome = check(allowed)
    assert outcome.facts["access"] == asdict(allowed)
    weights = (base / "model.safetensors").stat().st_size
    assert 0.9 * weights < 2 * outcome.artifact_bytes < weights, "float32, and bfloat16 without the header"
    assert outcome.stored_facts()["artifact_bytes"] == outcome.artifact_bytes
    assert check(None, adapter={"rank": 1}).artifact_bytes < outcome.artifact_bytes
    elsewhere = problems(FileAccess((str(tmp_path / "other"),)), method={"scale": "auto", "fit_to": [str(base)]})
    assert set(elsewhere) == {"base", "data.file", "method.fit_to.0", "evaluation.objectives.0.task.file"}
    assert all("is not below a directory that studies may read" in message for message in elsewhere.values())
    (base / "link").symlink_to("/etc/passwd")
    assert "/etc/passwd" not in problems(allowed)["base"]
    (base / "link").unlink()
    for name in ("owner/data", str(base.parent)):
        assert "--trust-dir" in problems(allowed, data={"dataset": name})["data.dataset"]
    experts: dict[str, dict[str, Any]] = {name: {} for name in ("math", "text")}
    fleet = {**{key: value for key, value in whole.items() if key != "evaluation"}, "experts": experts, "analysis": {}}
    with pytest.raises(InvalidStudy, match="has no evaluation; losses of merges") as refused:
        accept(fleet, RequestContext(None))
    assert [problem.field for problem in refused.value.problems] == [f"experts.{name}.evaluation" for name in experts]
    data.write_text("{\n")
    broken = problems(None)
    assert set(broken) == {"data", "evaluation.objectives.0.task"}
    assert "line 1: not JSON" in broken["data"]


def test_evaluations_are_checked(tmp_path: Path) -> None:
    """Tasks that an evaluation during the training would refuse are refused, with their field, before the training."""
    base, data = tiny_llama(tmp_path / "base"), tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "1=", "completion": "1", "answer": "1"}) + "\n")

    def problems(*objectives: Mapping[str, Any], **options: Any) -> dict[str, str]:
        document = {
            "name": "one",
            "base": str(base),
            "data": {"file": str(data), "max_length": 64},
            "training": {"steps": 1},
            "evaluation": {"objectives": objectives, **options},
        }
        with pytest.raises(InvalidStudy) as refused:
            accept(document, RequestContext(None))
        return {problem.field: problem.message for problem in refused.value.problems}

    task = {"name": "math", "task": {"file": str(data)}, "metric": "exact_match"}
    twice = problems(task, task)
    assert twice == {"evaluation.objectives.1.name": "math is the name of two objectives; give another name"}
    assert list(problems(task, chat_template=True)) == ["evaluation.chat_template"]
    arguments = {"do_sample": True, "temperature": 0.8, "max_gen_toks": 4}
    sampled = {
        "task": "sampled",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": arguments,
    }
    (tmp_path / "sampled.yaml").write_text(json.dumps(sampled))
    found = problems(task, {"name": "sampled", "task": str(tmp_path / "sampled.yaml"), "metric": "exact_match"})
    assert list(found) == ["evaluation.objectives.1.task"]
    assert "samples completions at the temperature 0.8" in found["evaluation.objectives.1.task"]


def test_tasks_that_the_base_cannot_read_are_refused(tmp_path: Path) -> None:
    """A text task for a classifier of images passed all checks; training for it would fail at its first evaluation."""
    tiny_vit(tmp_path / "base")
    folder = image_folder(tmp_path / "images", per_class=1)
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    document = {
        "name": "one",
        "base": str(tmp_path / "base"),
        "data": {"images": str(folder)},
        "training": {"steps": 1},
        "evaluation": {
            "objectives": [
                {"name": "shapes", "task": {"images": str(folder), "head": "one"}, "metric": "acc"},
                {"name": "sums", "task": {"file": str(tmp_path / "sums.jsonl")}, "metric": "exact_match"},
            ]
        },
    }
    with pytest.raises(InvalidStudy) as refused:
        accept(document, RequestContext(None))
    assert [problem.field for problem in refused.value.problems] == ["evaluation.objectives.1.task"]
    assert "is a task of text; the base" in str(refused.value)
    with pytest.raises(InvalidTask, match=r"one: evaluation\.objectives\.1\.task: is a task of text"):
        run_finetune(parse_spec(document, tmp_path), tmp_path / "out", resources=None)  # type: ignore[arg-type]


def test_image_data_are_checked(tmp_path: Path) -> None:
    """Folders of images are data; images, heads and tasks outside the allowed directories are refused by field."""
    allowed = tmp_path / "allowed"
    tiny_vit(allowed / "base")
    head, folder = tiny_vit(tmp_path / "elsewhere" / "head", seed=1), image_folder(allowed / "images", per_class=1)
    outside = image_folder(tmp_path / "elsewhere" / "images", per_class=1)

    def whole(images: Path, data: dict[str, Any]) -> dict[str, Any]:
        task = {"name": "shapes", "task": {"images": str(images), "head": "one"}, "metric": "acc"}
        return {
            "name": "one",
            "base": str(allowed / "base"),
            "data": data,
            "training": {"steps": 1},
            "evaluation": {"objectives": [task]},
        }

    access = RequestContext(FileAccess((str(allowed),)))
    assert accept(whole(folder, {"images": str(folder)}), access).artifact_bytes > 0
    with pytest.raises(InvalidStudy) as refused:
        accept(whole(outside, {"images": str(outside), "head": str(head)}), access)
    fields = {problem.field for problem in refused.value.problems}
    assert fields == {"data.images", "data.head", "evaluation.objectives.0.task.images"}
    os.mkfifo(allowed / "data.jsonl")  # reading a pipe would never end
    with pytest.raises(InvalidStudy, match=r"data.jsonl: is not a file"):
        accept(whole(folder, {"images": str(allowed / "data.jsonl")}), access)
    rows = [{"image": f"../elsewhere/images/{name}/000.png", "label": name} for name in CLASSES]
    lines = allowed / "lines.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InvalidStudy, match=r"elsewhere/images") as refused:
        accept(whole(folder, {"images": str(lines)}), access)
    assert [problem.field for problem in refused.value.problems] == ["data"]
    fleet = {key: value for key, value in whole(folder, {"images": str(folder)}).items() if key != "evaluation"}
    own = {
        name: {
            "evaluation": {
                "objectives": [{"name": name, "task": {"images": str(folder), "head": name}, "metric": "acc"}]
            }
        }
        for name in ("left", "right")
    }
    assert accept({**fleet, "experts": own, "analysis": {}}, access).artifact_bytes > 0
    with pytest.raises(InvalidStudy, match="'left' has images: merges of linearized classifiers are not measured"):
        accept({**fleet, "experts": own, "analysis": {}, "method": {"kind": "tangent"}}, access)


def test_kinds_are_told_apart(http: httpx.Client, server: ApiServer) -> None:
    study, tuned = stored_study(server.store), stored_finetune(server.store)
    assert [listed["id"] for listed in http.get("/v1/finetunes").json()["finetunes"]] == [tuned.id]
    assert http.get("/v1/finetunes", params={"name": "other"}).json()["finetunes"] == []
    assert http.get("/v1/finetunes", params={"state": "RUNNING"}).json()["finetunes"] == []
    assert http.get("/v1/finetunes", params={"state": "DONE"}).status_code == 422
    for path in ("", "/events", "/curves", "/analysis", "/report", "/specification", "/experts/math/download"):
        answer = http.get(f"/v1/finetunes/{study.id}{path}")
        assert answer.status_code == 404
        assert answer.json()["detail"] == f"fine-tuning {study.id!r}: is a study, not a fine-tuning"
        assert http.get(f"/v1/finetunes/{'0' * 32}{path}").status_code == 404
    assert http.post(f"/v1/studies/{tuned.id}:cancel").status_code == 404


def test_a_finished_one_has_curves_a_report_and_its_experts(http: httpx.Client, server: ApiServer) -> None:
    record = finished_finetune(server.store, server.data_dir)
    told = http.get(f"/v1/finetunes/{record.id}").json()
    assert (told["state"], told["wall_clock_s"], told["experts"]["text"]["progress"]["loss"]) == ("COMPLETE", 61.0, 2.0)
    curves = http.get(told["links"]["curves"]).json()["experts"]
    assert [curve["expert"] for curve in curves] == ["math", "text"]
    assert curves[1] == {
        "expert": "text",
        "loss": [{"step": 2, "loss": 3.0}, {"step": 4, "loss": 2.5}],
        "loss_at": "weights",
        "weights_loss": [],
        "offset_loss": [],
        "evaluations": [{"step": 4, "values": {"accuracy": 0.5}}],
    }
    page = http.get(told["links"]["report"])
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<h1>family</h1>" in page.text
    assert "math, update 4: 0.250" in page.text
    frames = http.get(told["links"]["events"]).text
    assert frames.count("event: training\n") == 4
    assert frames.count("event: progress\n") == 1
    assert frames.endswith('event: end\ndata: {"state":"COMPLETE","reason":null}\n\n')

    expert = told["experts"]["math"]
    assert expert["bytes"] == 4002
    answer = http.get(expert["links"]["download"])
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.getnames() == ["family-math/config.json", "family-math/model.safetensors"]
        file = archive.extractfile("family-math/model.safetensors")
        assert file is not None
        assert file.read() == b"math" * 1000


def test_analyses_are_served_beside_each_other(http: httpx.Client, server: ApiServer) -> None:
    def finished(*losses: float, samples: int = 7, **changes: Any) -> str:
        analysis = {"samples": samples, "fleets": [analysed_fleet("mergopt", *losses)]}
        return finished_finetune(server.store, server.data_dir, analysis=analysis, **changes).id

    ours, theirs = finished(1, 2, 3, 4), finished(5, 6, 7, 8, method={"kind": "sgd"})
    told = http.get(f"/v1/finetunes/{ours}").json()["links"]
    alone = http.get(told["analysis"]).json()
    assert (alone["samples"], [fleet["name"] for fleet in alone["fleets"]]) == (7, ["mergopt"])
    assert alone["fleets"][0]["landscape"]["losses"] == [[1, 2], [3, 4]]
    both = http.get(told["analysis"], params={"against": [theirs]}).json()
    assert [(fleet["name"], fleet["merges"][0]["mean"]) for fleet in both["fleets"]] == [("mergopt", 1), ("sgd", 5)]
    page = http.get(told["report"], params={"against": theirs}).text
    assert "<h3>math, sgd</h3>" in page
    assert "<h3>math, sgd</h3>" not in http.get(told["report"]).text
    assert http.get(f"/v1/finetunes/{ours}/events").text.count("event: analysis\n") == 1

    bare = finished_finetune(server.store, server.data_dir)
    begun = stored_finetune(server.store, analysis={})
    others = (finished(1, 1, 1, 1, samples=8), finished(1, 1, 1, 1, seed=1), finished(1, 1, 1, 1, base="/other"))
    assert "analysis" not in http.get(f"/v1/finetunes/{bare.id}").json()["links"]
    refused = [http.get(f"/v1/finetunes/{each.id}/analysis") for each in (bare, begun)]
    refused += [http.get(told["analysis"], params={"against": each}) for each in others]
    assert [answer.status_code for answer in refused] == [409] * 5
    details = [answer.json()["detail"] for answer in refused]
    assert details[0].endswith("has no analysis: it is COMPLETE, and its specification has no `analysis`")
    assert details[1].endswith("it is CREATED, and its experts are analysed once all are trained")
    assert "its losses are not those of the samples of fine-tuning" in details[2]
    assert details[2].replace(others[0], others[1]) == details[3]
    assert details[4].endswith("has the experts math, text; to be compared it must have math, text, of the same base")
    assert http.get(told["analysis"], params={"against": "0" * 32}).status_code == 404
    assert http.get(told["analysis"], params={"against": "x"}).status_code == 422


def test_what_cannot_be_downloaded_says_why(http: httpx.Client, server: ApiServer) -> None:
    begun, record = stored_finetune(server.store), finished_finetune(server.store, server.data_dir)
    answers = [
        http.get(f"/v1/finetunes/{name}/experts/{alias}/download")
        for name, alias in ((record.id, "none"), (begun.id, "math"))
    ]
    assert [answer.status_code for answer in answers] == [404, 409]
    assert answers[0].json()["detail"] == "expert 'none': fine-tuning 'family' has math, text"
    assert answers[1].json()["detail"] == "expert 'math' is not trained yet; fine-tuning 'family' is CREATED"
    for blob in (artifacts_dir(server.data_dir) / BLOBS).glob("*/*"):
        blob.unlink()
    assert http.get(f"/v1/finetunes/{record.id}/experts/math/download").status_code == 410


def test_cancelling_and_resuming(http: httpx.Client, server: ApiServer) -> None:
    record = stored_finetune(server.store)
    path = f"/v1/finetunes/{record.id}"
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.FAILED, "step 3: the loss is nan")
    resumed = http.post(f"{path}:resume")
    assert (resumed.status_code, resumed.json()["state"]) == (202, "STOPPED")
    answers = [http.post(f"{path}:cancel") for _ in range(2)]
    assert [(answer.status_code, answer.json()["state"]) for answer in answers] == [(202, "CANCELLED")] * 2
    with pytest.raises(StaleAttempt):
        writer.add_event(EventKind.TRAINING, {})
    refused = http.post(f"{path}:resume")
    assert refused.status_code == 409
    assert refused.json()["detail"] == (
        f"fine-tuning {record.id} is CANCELLED; only a fine-tuning that has FAILED, is PAUSED or waits can be resumed; "
        "to run it again, submit it again"
    )


def test_deleting_removes_what_no_other_has(http: httpx.Client, server: ApiServer) -> None:
    begun = stored_finetune(server.store)
    refused = http.delete(f"/v1/finetunes/{begun.id}")
    assert refused.status_code == 409
    assert f"fine-tuning {begun.id} is CREATED; only a fine-tuning that has ended" in refused.text
    kept, record = (finished_finetune(server.store, server.data_dir, name=name) for name in ("a", "b"))
    artifacts = ArtifactStore(server.store, artifacts_dir(server.data_dir))
    extra = server.data_dir / "extra"
    extra.mkdir()
    (extra / "weights").write_bytes(b"only b")
    (weights,) = artifacts.files(artifacts.put(record.id, "extra", extra)).values()
    job_dir(server.data_dir, record.id).mkdir(parents=True)
    chunks = server.app.state.services.exports.reading(record.id, iter([b"1", b"2"]))
    next(chunks)
    assert "is being downloaded" in http.delete(f"/v1/finetunes/{record.id}").json()["detail"]
    assert list(chunks) == [b"2"]
    assert http.delete(f"/v1/finetunes/{record.id}").json() == {"deleted": record.id}
    assert isinstance(weights.source, Path)
    assert not weights.source.exists()
    assert not job_dir(server.data_dir, record.id).exists()
    assert http.get(f"/v1/finetunes/{kept.id}/experts/math/download").status_code == 200
    assert http.get(f"/v1/finetunes/{record.id}").status_code == 404


def test_copies_of_experts_go_with_the_study_that_reads_them(http: httpx.Client, server: ApiServer) -> None:
    record, sources = finished_finetune(server.store, server.data_dir), server.data_dir / SOURCES
    for name in ("expert-0123", "expert-4567", "89ab-float32"):
        (sources / name).mkdir(parents=True)
    models = {"base": "/base", "experts": {"math": str(sources / ".." / SOURCES / "expert-4567")}}
    study = server.store.create_job(kind="search", name="reader", document={"models": models}, accepted={})
    begun = server.store.create_job(
        kind="finetune", name="pipeline", document={"base": "/base", "study": {}}, accepted={}
    )
    assert http.delete(f"/v1/finetunes/{record.id}").status_code == 200
    assert len(list(sources.iterdir())) == 3, "a pipeline may be about to use them"
    server.store.open_attempt(begun.id).set_state(JobState.CANCELLED, "")
    collect_sources(server.store, server.data_dir)
    assert {place.name for place in sources.iterdir()} == {"expert-4567", "89ab-float32"}
    server.store.open_attempt(study.id).set_state(JobState.CANCELLED, "")
    assert http.delete(f"/v1/studies/{study.id}").status_code == 200
    assert [place.name for place in sources.iterdir()] == ["89ab-float32"]


def test_nothing_is_collected_while_an_artifact_is_stored(server: ApiServer) -> None:
    record = finished_finetune(server.store, server.data_dir)
    artifacts = ArtifactStore(server.store, artifacts_dir(server.data_dir))
    server.store.delete_job(record.id)
    with open_blobs(artifacts_dir(server.data_dir)).storing():
        assert artifacts.collect() == 0
    assert artifacts.collect() > 8000
