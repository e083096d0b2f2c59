"""The real preflight in a process beside the server: its messages are those of the command line, for any request."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import Study, load_study, parse_study
from service.api.preflight_process import PreflightProcess, check_request
from service.api.problems import Unavailable
from service.jobs.base import Accepted, RequestContext
from service.jobs.search.kind import SEARCH
from service.jobs.search.request import read_study
from service.resolved_study import ResolvedStudy
from service.studies.preflight.examine import examine
from service.types import Account
from tests.service.api.harness import FAMILY, ApiServer, ask_vllm, document
from workers.file_access import FileAccess


@pytest.fixture(scope="module", autouse=True)
def _vllms_answer() -> None:
    ask_vllm()


@pytest.fixture(scope="module")
def preflight() -> PreflightProcess:
    return PreflightProcess()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, preflight: PreflightProcess) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api"), preflight=preflight) as server:
        yield server


@pytest.fixture
def http(server: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.mark.slow
def test_resolution_equals_the_command_lines(http: httpx.Client, server: ApiServer) -> None:
    """A posted study has the document and resolution of the command line."""
    file = FAMILY / "study.yaml"
    study = load_study(file)
    answer = http.post("/v1/studies", json=study.canonical())
    assert answer.status_code == 201, answer.text
    record = server.store.job(answer.json()["id"])
    assert record.document == study.canonical()
    assert answer.json()["algorithm"] == "gradient"
    assert answer.json()["algorithm_reason"].startswith("merges in this space have gradients")
    assert ResolvedStudy.of(record) == examine(study).resolved()
    assert Study.model_validate(record.document) == study


@pytest.mark.slow
def test_problems_are_those_of_the_command_line_all_together(http: httpx.Client) -> None:
    wrong = document(fidelity={"scheduler": "hyperband", "min_samples": 30, "max_samples": 27000, "eta": 3})
    wrong["models"]["experts"]["math"] = "/nowhere/math"
    wrong["objectives"][1]["task"]["file"] = "/nowhere/text.jsonl"
    with pytest.raises(InvalidStudy) as caught:
        examine(Study.model_validate(wrong))
    answer = http.post("/v1/studies", json=wrong)
    assert answer.status_code == 422
    problems = answer.json()["problems"]
    assert problems == [{"field": p.field, "message": p.message} for p in caught.value.problems]
    assert {p["field"] for p in problems} >= {"models", "objectives.1.task", "fidelity.max_samples"}


@pytest.mark.slow
def test_the_server_answers_at_once_while_a_study_is_examined(http: httpx.Client, server: ApiServer) -> None:
    async def scenario() -> tuple[list[float], list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            posts = [asyncio.create_task(client.post("/v1/studies", json=document(f"s{i}"))) for i in range(5)]
            seconds = []
            while not all(post.done() for post in posts):
                started = time.perf_counter()
                assert (await client.get("/healthz")).status_code == 200
                seconds.append(time.perf_counter() - started)
                await asyncio.sleep(0.01)
            return seconds, [post.result().status_code for post in posts]

    seconds, statuses = asyncio.run(scenario())
    assert statuses == [201] * 5
    assert sorted(seconds)[len(seconds) * 9 // 10] < 0.5


@pytest.mark.slow
def test_models_of_other_jobs_are_not_listed(tmp_path: Path) -> None:
    """Users see no models in the data directory, where other jobs' files are; without accounts all are seen."""
    data, free = tmp_path / "data", tmp_path / "free"
    for place in (data / "exports" / "model", free):
        shutil.copytree(FAMILY / "base", place)
    access = FileAccess((str(tmp_path), str(data)))
    preflight = PreflightProcess(RequestContext(access, data_dir=data))

    async def listed(reader: Account | None) -> list[str]:
        found = await preflight.find_models(under=None, text=None, limit=10, reader=reader)
        return [model.directory for model in found.models]

    try:
        assert asyncio.run(listed(Account("ann"))) == [str(free.resolve())]
        assert len(asyncio.run(listed(None))) == 2
    finally:
        preflight.stop()


@pytest.mark.slow
def test_a_killed_preflight_is_begun_again_once() -> None:
    preflight = PreflightProcess()

    async def killed(num_kills: int) -> Accepted:
        call = asyncio.create_task(preflight.accept(json.dumps(document()).encode(), is_json=True, kind=SEARCH))
        for _ in range(num_kills):
            pid = await running(preflight)
            os.kill(pid, signal.SIGKILL)
            while preflight.pid == pid and not call.done():
                await asyncio.sleep(0.01)
        return await call

    with pytest.raises(Unavailable, match=r"could not be checked .* try again"):
        asyncio.run(killed(2))
    assert asyncio.run(killed(1)).name == "math-text-lookup"
    preflight.stop()


async def running(preflight: PreflightProcess) -> int:
    while (pid := preflight.pid) is None or not psutil.pid_exists(pid):
        await asyncio.sleep(0.01)
    return pid


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (("models", "base"), "models.base"),
        (("models", "experts", "math"), "models.experts.math"),
        (("objectives", 0, "task", "file"), "objectives.0.task.file"),
        (("holdout", 2, "task", "file"), "holdout.2.task.file"),
    ],
)
@pytest.mark.parametrize("value", ["./x", "../../etc/passwd", "~/model", "a/b/c", "dir/"])
def test_relative_paths_are_refused_by_name(path: tuple[Any, ...], field: str, value: str) -> None:
    body = document()
    place: Any = body
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(InvalidStudy) as caught:
        read_study(body, RequestContext())
    (problem,) = caught.value.problems
    assert problem.field == field
    assert problem.message == f"{value}: is relative; give an absolute path on the server"


def test_hub_ids_pass_and_directories_of_the_server_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = document(models={"base": "owner/name", "experts": {"math": "name"}})
    assert read_study(body, RequestContext()).models.base == "owner/name"
    (tmp_path / "name").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidStudy, match=r"models\.experts\.math: name: is relative"):
        read_study(body, RequestContext())


@pytest.mark.parametrize("task", ["tasks/a.yaml", "a.yml"])
def test_relative_task_files_are_refused(task: str) -> None:
    body = document()
    body["objectives"][0]["task"] = task
    with pytest.raises(InvalidStudy, match=f"objectives.0.task: {task}: is relative"):
        read_study(body, RequestContext())


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        body = document()
        body["objectives"][0]["task"]["file"] = file
        with pytest.raises(InvalidStudy, match=f"objectives.0.task.file: {file}: is not a file"):
            read_study(body, RequestContext())


def test_broken_preflight_refuses_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that ends the preflight process is refused with what happened."""

    def broken(study: Study, **_: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("service.jobs.search.prepare.examine", broken)
    with pytest.raises(InvalidStudy, match=r"^the study could not be checked: ZeroDivisionError: by nothing$"):
        check_request(json.dumps(document()).encode(), "study", SEARCH.accept, RequestContext(), is_json=True)


def test_requests_may_name_files_at_allowed_urls() -> None:
    """A server accepts data and task files below its --allow-url; nothing is read for that."""
    document = {
        "name": "remote",
        "models": {"base": "s3://b/base", "experts": {"a": "s3://b/a"}},
        "fidelity": {"scheduler": "none"},
        "objectives": [
            {"name": "sums", "task": {"file": "s3://data/sums.jsonl"}, "metric": "exact_match"},
            {"name": "choices", "task": "s3://data/choices/choices.yaml", "metric": "acc"},
        ],
    }
    study = read_study(document, RequestContext(FileAccess((), urls=("s3://b", "s3://data"))))
    assert study == parse_study(document, Path("/anywhere")), "URLs are relative to nothing"
    with pytest.raises(InvalidStudy) as refused:
        read_study(document, RequestContext(FileAccess((), urls=("s3://b", "s3://data/choices"))))
    assert [problem.field for problem in refused.value.problems] == ["objectives.0.task.file"]
