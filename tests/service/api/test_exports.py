"""Merged models over HTTP: the archive contains the files of `export_trial`, and arrives complete."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from service.api.export_queue import Exports, Tar, artifact_name, export_id
from service.api.limits.exports import ExportLimits
from service.disk import alignments_dir, job_dir
from service.results.load import run_record
from service.results.preference import choices
from service.store import Store, blobs
from service.store.artifacts import ArtifactStore
from service.store.blobs import StoredFile
from service.store.exports import ExportStore
from service.studies.export import export_trial
from service.types import (
    ExportRecord,
    ExportState,
    Origin,
    TrialRecord,
    TrialState,
)
from tests.s3_server import S3, failing
from tests.service.api.family import family_preflight, family_study, image_document
from tests.service.api.harness import FAMILY, ApiServer, finished_study, stored_study
from tests.workers.recipes import aligned, path, random_alignment
from workers.alignments.files import write_alignment
from workers.alignments.recipes import unaligned
from workers.engines.transformers.merged_models import merged_model
from workers.merging.bank import Bank

pytestmark = pytest.mark.slow  # exports are written

TIMEOUT_S = 180.0


def wait(http: httpx.Client, path: str) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while (export := http.get(path).json())["state"] in ("WAITING", "RUNNING"):
        assert time.monotonic() < deadline, export
        time.sleep(0.05)
    return dict(export)


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server that is not the leader, so that exports stay WAITING."""
    with ApiServer(tmp_path_factory.mktemp("idle")) as server:
        server.cluster.leads = False
        yield server


@pytest.fixture
def idle_http(idle: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=idle.url, timeout=60) as client:
        yield client


def test_aligned_trial_is_downloaded(
    http: httpx.Client, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial with alignments is downloaded as a checkpoint with its model class."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    record = family_study(server.store)
    place = alignments_dir(job_dir(server.data_dir, record.id))
    family = replace(family_preflight().models.family, alignments_dir=str(place))
    hidden = int(AutoConfig.from_pretrained(FAMILY / "base").hidden_size)
    steps = [("math", 0), ("text", 1), *(("text", layer) for layer in range(2, 8))]
    recipe = aligned(path(family, steps), write_alignment(str(place), random_alignment("projection", hidden)))
    writer = server.store.open_attempt(record.id)
    number = len(server.store.trials(record.id))
    writer.add_trial(TrialRecord(number, Origin.SEARCH, "", TrialState.WAITING, recipe))
    export = wait(http, http.post(f"/v1/studies/{record.id}/exports", json={"trial": number}).json()["links"]["self"])
    assert (export["state"], export["reason"]) == ("COMPLETE", None)
    directory = tmp_path / "model"
    directory.mkdir()
    for name, content in contents(http.get(export["links"]["download"]).content).items():
        (directory / Path(name).name).write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=True).eval()
    tokens = torch.arange(1, 13)[None]
    bank = Bank(family)
    with torch.inference_mode():
        downloaded = model(tokens).logits
        torch.testing.assert_close(downloaded, merged_model(recipe, bank, dtype="float32")(tokens).logits)
        plain = merged_model(unaligned(recipe), bank, dtype="float32")(tokens).logits
    assert (downloaded - plain).abs().max() > 0.01, "the alignment matters"


@pytest.mark.parametrize(("modality", "name"), [("text", "math-text-lookup"), ("image", "images")])
def test_the_best_trial_is_downloaded_as_export_writes_it(
    http: httpx.Client, server: ApiServer, tmp_path: Path, modality: str, name: str
) -> None:
    record = family_study(server.store, image_document(tmp_path) if modality == "image" else None)
    path = f"/v1/studies/{record.id}/exports"
    asked = [http.post(path, json=body) for body in ({"trial": "best"}, {}, {"trial": "best", "dtype": "float32"})]
    assert [answer.status_code for answer in asked] == [202] * 3
    assert len({answer.json()["id"] for answer in asked}) == 1
    export = asked[0].json()
    assert asked[0].headers["location"] == export["links"]["self"] == f"{path}/{export['id']}"
    assert (export["dtype"], export["bytes"], "download" in export["links"]) == ("float32", None, False)
    if export["state"] != "COMPLETE":
        assert http.get(f"{export['links']['self']}/download").status_code == 409

    export = wait(http, export["links"]["self"])
    assert (export["state"], export["reason"]) == ("COMPLETE", None)
    answer = http.get(export["links"]["download"])
    assert "content-encoding" not in answer.headers
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.headers["content-disposition"] == f'attachment; filename="{name}-trial-6.tar"'
    assert int(answer.headers["content-length"]) == len(answer.content)

    written = export_trial(server.store, record, "best", tmp_path / "model", dtype="float32", has_directories=False)
    files = {str(file.relative_to(written)): file.read_bytes() for file in written.rglob("*") if file.is_file()}
    expected = {f"{name}-trial-6/{file}": content for file, content in files.items()}
    assert contents(answer.content) == expected
    assert {file for file in files if file.startswith("heads/")} == {
        "text": set(),
        "image": {"heads/answer.safetensors", "heads/heads.json", "heads/shape.safetensors"},
    }[modality]
    assert export["bytes"] == sum(map(len, expected.values()))
    assert http.get(path).json() == {"exports": [export]}
    assert http.post(path, json={"trial": 6}).json() == export


def test_weights_name_the_trial_that_is_exported(idle_http: httpx.Client, idle: ApiServer) -> None:
    record = finished_study(idle.store, num_trials=6)
    path = f"/v1/studies/{record.id}/exports"
    expected = choices(run_record(idle.store, record.id)).preferred({"math": 0.75, "text": 0.25})
    name = export_id(record.id, expected["trial"], "bfloat16")
    ExportStore(idle.store).add_export(
        ExportRecord(name, record.id, expected["trial"], "bfloat16", ExportState.WAITING, 1.0)
    )
    asked = idle_http.post(path, json={"prefer": {"math": 0.75, "text": 0.25}, "dtype": "bfloat16"})
    assert asked.status_code == 202
    document = asked.json()
    assert (document["id"], document["trial"]) == (name, expected["trial"])
    assert document["preferred"] == json.loads(json.dumps(expected))
    assert "preferred" not in idle_http.get(f"{path}/{name}").json()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prefer": {"math": 0.6}}, "math=0.6 sum to 0.6, not to 1; for the same proportions: math=1"),
        ({"prefer": {"code": 1.0}}, "'code' is not an objective; give weights of math, text, lookup"),
        ({"prefer": {"math": -1, "text": 2}}, "math=-1 is not accepted; give a number from 0 to 1"),
        ({"prefer": {}}, "no weights sum to 0, not to 1"),
        ({"prefer": "math=1"}, """'math=1' is not accepted; give {"OBJECTIVE": WEIGHT}"""),
        ({"prefer": {"math": True}}, """{'math': True} is not accepted; give {"OBJECTIVE": WEIGHT}"""),
        ({"prefer": {"math": 10**400}}, None),
        ({"prefer": {"math": 1.0}, "trial": 3}, "weights choose the trial; leave out trial, which is 3"),
    ],
)
def test_what_are_no_weights_is_refused(
    http: httpx.Client, server: ApiServer, body: dict[str, Any], message: str | None
) -> None:
    record = finished_study(server.store, num_trials=3)
    answer = http.post(f"/v1/studies/{record.id}/exports", json=body)
    assert answer.status_code == 422
    (problem,) = answer.json()["problems"]
    assert problem["field"] == "prefer"
    assert message is None or problem["message"] == message
    assert ExportStore(server.store).exports(record.id) == ()


def test_failed_export_may_be_retried(http: httpx.Client, server: ApiServer) -> None:
    """A failed export says why it failed and may be tried again."""
    record = finished_study(server.store, num_trials=3)  # its fingerprints are of no real files
    name = export_id(record.id, 1, "bfloat16")
    path = f"/v1/studies/{record.id}/exports"
    ExportStore(server.store).add_export(
        ExportRecord(name, record.id, 1, "bfloat16", ExportState.FAIL, 1.0, reason="disk full")
    )
    assert http.get(f"{path}/{name}").json()["reason"] == "disk full"
    asked = http.post(path, json={"trial": 1, "dtype": "bfloat16"}).json()
    assert (asked["id"], asked["reason"]) == (name, None)
    export = wait(http, asked["links"]["self"])
    assert export["state"] == "FAIL"
    assert export["reason"].endswith("have changed since the study; the scored merge cannot be written")
    answer = http.get(f"{path}/{name}/download")
    assert answer.status_code == 409
    assert answer.json()["detail"] == f"export {name} is FAIL; it can be downloaded once it is COMPLETE"


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"trial": "worst"}, "trial", "'worst' is not accepted; give \"best\" or the number of a trial"),
        ({"trial": -1}, "trial", '-1 is not accepted; give "best" or the number of a trial'),
        ({"trial": True}, "trial", 'True is not accepted; give "best" or the number of a trial'),
        ({"trial": 2**70}, "trial", f'{2**70} is not accepted; give "best" or a number from 0 to 11'),
        ({"trial": float("nan")}, "trial", 'nan is not accepted; give "best" or the number of a trial'),
        ({"dtype": "int8"}, "dtype", "'int8' is not known; available: null, float32, bfloat16, float16"),
        ({"dtype": []}, "dtype", "[] is not known; available: null, float32, bfloat16, float16"),
        ({"out": "/etc"}, "out", "unknown key; known keys: trial, dtype, prefer"),
    ],
)
def test_wrong_requests_are_refused_by_field(
    http: httpx.Client, server: ApiServer, body: dict[str, Any], field: str, message: str
) -> None:
    record = finished_study(server.store, num_trials=3)
    headers = {"Content-Type": "application/json"}
    answer = http.post(f"/v1/studies/{record.id}/exports", content=json.dumps(body), headers=headers)
    assert answer.status_code == 422, answer.text
    assert answer.json()["problems"] == [{"field": field, "message": message}]


def test_what_is_not_complete_is_not_exported(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store)
    answer = http.post(f"/v1/studies/{record.id}/exports", json={})
    assert answer.status_code == 409
    assert answer.json()["detail"] == ("study 'math-text-lookup' is CREATED; models are exported once it is COMPLETE")


def test_an_export_belongs_to_its_study(idle_http: httpx.Client, idle: ApiServer) -> None:
    mine, other = (finished_study(idle.store, num_trials=3) for _ in range(2))
    export = idle_http.post(f"/v1/studies/{mine.id}/exports", json={"dtype": "float16"}).json()
    assert idle_http.get(f"/v1/studies/{other.id}/exports/{export['id']}").status_code == 404
    assert idle_http.get(f"/v1/studies/{other.id}/exports").json() == {"exports": []}


def test_removed_export_may_be_repeated(idle_http: httpx.Client, idle: ApiServer) -> None:
    """An export whose files were removed says so and may be requested again."""
    record = finished_study(idle.store, num_trials=3)
    name = export_id(record.id, 1, "float32")
    ExportStore(idle.store).add_export(ExportRecord(name, record.id, 1, "float32", ExportState.COMPLETE, 1.0))
    path = f"/v1/studies/{record.id}/exports"
    answer = idle_http.get(f"{path}/{name}/download")
    assert answer.status_code == 410, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == (
        f"export {name}: its files are no longer on the server; request trial 1 in float32 again "
        "to have it written again"
    )
    shown = idle_http.get(f"{path}/{name}")
    assert shown.status_code == 200
    assert (shown.json()["bytes"], "download" in shown.json()["links"]) == (None, False)
    assert idle_http.get(path).json() == {"exports": [shown.json()]}
    again = idle_http.post(path, json={"trial": 1, "dtype": "float32"})
    assert (again.status_code, again.json()["id"], again.json()["state"]) == (202, name, "WAITING")


def test_an_interrupted_export_is_written_at_the_next_start(tmp_path: Path) -> None:
    name = export_id("s", 0, "float32")
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    record = family_study(store)
    ExportStore(store).add_export(ExportRecord(name, record.id, 1, "float32", ExportState.RUNNING, created_at=1.0))
    store.close()
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert wait(http, f"/v1/studies/{record.id}/exports/{name}")["state"] == "COMPLETE"
        written = {file: file.stat().st_mtime_ns for file in (tmp_path / "exports" / name).glob("*/*")}
        assert any(file.suffix == ".safetensors" for file in written)
        # As if it had ended just before saying so.
        ExportStore(server.store).set_export_state(name, ExportState.RUNNING)
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert wait(http, f"/v1/studies/{record.id}/exports/{name}")["state"] == "COMPLETE"
        assert {file: file.stat().st_mtime_ns for file in (tmp_path / "exports" / name).glob("*/*")} == written


def test_stopping_the_server_leaves_an_export_to_be_begun_again(tmp_path: Path) -> None:
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        record = family_study(server.store)
        asked = http.post(f"/v1/studies/{record.id}/exports", json={}).json()
        while http.get(asked["links"]["self"]).json()["state"] == "WAITING":
            time.sleep(0.01)
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    assert ExportStore(store).export(asked["id"]).state is ExportState.RUNNING
    store.close()


def test_an_object_store_has_the_exports_of_all_servers(tmp_path: Path, s3: S3) -> None:
    """An export that one server wrote is downloaded from another one, which shares no directory with it."""
    files, database = f"{s3.bucket()}/files", f"sqlite:///{tmp_path / 'mergesearch.db'}"
    with (
        ApiServer(tmp_path / "first", files=files, database=database) as first,
        ApiServer(tmp_path / "second", files=files, database=database) as second,
        httpx.Client(base_url=first.url, timeout=60) as http,
        httpx.Client(base_url=second.url, timeout=60) as other,
    ):
        second.cluster.leads = False
        record = family_study(first.store)
        place = other.post(f"/v1/studies/{record.id}/exports", json={"trial": 6}).json()["links"]["self"]
        export = wait(other, place)
        assert (export["state"], export["reason"]) == ("COMPLETE", None)
        answer = other.get(export["links"]["download"])
        written = export_trial(first.store, record, "6", tmp_path / "model", dtype="float32", has_directories=False)
        expected = {f"math-text-lookup-trial-6/{file.name}": file.read_bytes() for file in written.iterdir()}
        assert contents(answer.content) == expected
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert export["bytes"] == sum(map(len, expected.values()))
        assert contents(http.get(export["links"]["download"]).content) == expected
        assert not list(tmp_path.glob("*/exports/*")), "the store has it, no server does"
        assert http.delete(place).status_code == 200
        assert other.get(place).status_code == 404
        assert ArtifactStore(first.store, files).of(record.id) == ()


def test_an_export_continues_after_the_object_store_failed(tmp_path: Path, s3: S3) -> None:
    """Neither the model nor what was stored of it is written again."""
    files = f"{s3.bucket()}/files"
    with ApiServer(tmp_path, files=files) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        record = family_study(server.store)
        path = f"/v1/studies/{record.id}/exports"
        name = export_id(record.id, 6, "float32")
        scratch = tmp_path / "exports" / name / "math-text-lookup-trial-6"
        stored = itertools.count()

        def fault(method: str, _: str) -> tuple[int, str] | None:
            return (403, "AccessDenied") if method == "PUT" and next(stored) >= 3 else None

        with failing(s3, fault):
            export = wait(http, http.post(path, json={"trial": 6}).json()["links"]["self"])
        assert export["state"] == "FAIL"
        assert export["reason"].startswith(f"{files}/blobs/"), export
        assert "cannot write it: " in export["reason"]
        before, num_files = s3.num("PUT"), len(list(scratch.iterdir()))
        modified = {file.name: file.stat().st_mtime for file in scratch.iterdir()}
        seen: list[float] = []

        def look(method: str, _: str) -> None:
            seen.extend([] if method != "PUT" or seen else [(scratch / "model.safetensors").stat().st_mtime])

        with failing(s3, look):
            export = wait(http, http.post(path, json={"trial": 6}).json()["links"]["self"])
        assert (export["state"], export["reason"]) == ("COMPLETE", None)
        assert seen == [modified["model.safetensors"]]
        assert s3.num("PUT") - before == num_files - 3 + 1, "the files that were left, and their list"


def test_the_quota_of_exports_holds_in_an_object_store(tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest exports beyond the quota are removed, and later their files."""
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    study = finished_study(store, num_trials=4)
    artifacts = ArtifactStore(store, f"{s3.bucket()}/files")
    for trial in (1, 2, 3):
        name = export_id(study.id, trial, "float32")
        ExportStore(store).add_export(
            ExportRecord(name, study.id, trial, "float32", ExportState.COMPLETE, float(trial))
        )
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "model.safetensors").write_bytes(bytes([trial]) * 100)
        artifacts.put(study.id, artifact_name(name), tmp_path / "model")
    exports = Exports(store, tmp_path, keep=ExportLimits(quota_bytes=250), artifacts=artifacts)
    exports.sweep()
    kept = ExportStore(store).exports()
    assert [(record.trial, exports.num_bytes(record)) for record in kept] == [(2, 100), (3, 100)]
    assert artifacts.num_bytes() > 300, "another process may be about to use the files"
    monkeypatch.setattr(blobs, "GRACE_S", -1.0)
    exports.sweep()
    assert 200 < artifacts.num_bytes() < 500
    Exports(store, tmp_path, keep=ExportLimits(), artifacts=artifacts).sweep()
    assert len(ExportStore(store).exports()) == 2, "without a quota, an object store has no limit"
    store.close()


@pytest.mark.parametrize("sizes", [[], [0], [1, 511, 512, 513], [3 * 2**20 + 5, 10240]])
def test_an_archive_is_as_long_as_it_said(tmp_path: Path, sizes: list[int]) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    expected: dict[str, Any] = {}
    for index, size in enumerate(sizes):
        name = f"file-{index}-{'long' * 60 if index == 1 else ''}"
        (directory / name).write_bytes(expected.setdefault(f"model/{name}", bytes([index + 65]) * size))
    files = {file.name: StoredFile.of(file) for file in directory.iterdir()}
    archive = Tar(directory.name, files, modified_at=1_760_000_000.7)
    content = b"".join(archive.chunks())
    assert archive.size == len(content)
    assert max(map(len, archive.chunks()), default=0) <= 2**20
    assert contents(content) == expected
    assert content == b"".join(Tar(directory.name, files, modified_at=1_760_000_000.2).chunks())
