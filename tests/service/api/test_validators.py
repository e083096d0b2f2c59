"""The real preflight over HTTP: the files that requests may read, and no request that delays other clients."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from search_spaces.errors import InvalidStudy
from service.api.preflight_process import (
    Limits,
    PreflightProcess,
    check_request,
    default_access,
)
from service.jobs.base import Accepted, RequestContext
from service.jobs.driver import drive
from service.jobs.search.kind import SEARCH
from service.resolved_study import ResolvedStudy
from service.studies.export import export_trial
from service.types import JobState
from tests.conftest import write_choices
from tests.service.api.family import family_study
from tests.service.api.harness import FAMILY, ApiServer, QuickPreflight, ask_vllm, document
from workers.file_access import FileAccess

TIMEOUT_S = 300.0

# Seconds of processor time for one request, of which ordinary ones take two.
CPU_S = 5


def place(body: dict[str, Any], path: str) -> tuple[Any, Any]:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner: Any = body
    for part in parents:
        inner = inner[part]
    return inner, last


def changed(path: str, value: Any) -> dict[str, Any]:
    body = document()
    inner, last = place(body, path)
    inner[last] = value
    return body


def refused(body: dict[str, Any], access: FileAccess) -> dict[str, str]:
    """The message for each field that is refused."""
    with pytest.raises(InvalidStudy) as caught:
        check_request(json.dumps(body).encode(), "study", SEARCH.accept, RequestContext(access), is_json=True)
    return {problem.field: problem.message for problem in caught.value.problems}


# What requests may read.


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("models.base", "models.base"),
        ("models.experts.math", "models.experts.math"),
        ("objectives.0.task.file", "objectives.0.task.file"),
        ("holdout.1.task.file", "holdout.1.task.file"),
        ("objectives.2.task", "objectives.2.task"),
    ],
)
@pytest.mark.parametrize("is_linked", [False, True])
def test_files_outside_are_refused_by_path_and_option(tmp_path: Path, path: str, field: str, is_linked: bool) -> None:
    (tmp_path / "outside").mkdir()
    secret = tmp_path / "outside" / "secret.yaml"
    secret.write_text('{"key": "SECRET-0123"}\n')
    target = secret.parent if path.startswith("models") else secret
    (tmp_path / "inside").mkdir()
    if is_linked:
        (tmp_path / "inside" / "link.yaml").symlink_to(target)
        target = tmp_path / "inside" / "link.yaml"
    access = FileAccess((str(FAMILY), str(tmp_path / "inside")))
    problems = refused(changed(path, str(target)), access)
    assert set(problems) == {field}
    assert problems[field].startswith(f"{target}: is not below a directory that studies may read ({FAMILY}, ")
    assert "--allow-dir" in problems[field]


def test_what_does_not_exist_outside_is_refused_alike(tmp_path: Path) -> None:
    access = FileAccess((str(FAMILY),))
    for file in (tmp_path / "none.jsonl", tmp_path):
        problems = refused(changed("objectives.0.task.file", str(file)), access)
        assert problems["objectives.0.task.file"].startswith(f"{file}: is not below")


def test_files_of_a_model_may_not_lead_outside(tmp_path: Path) -> None:
    model = tmp_path / "inside" / "base"
    shutil.copytree(FAMILY / "base", model)
    (tmp_path / "config.json").write_text("{}")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(tmp_path / "config.json")
    access = FileAccess((str(FAMILY), str(tmp_path / "inside")))
    problems = refused(changed("models.base", str(model)), access)
    assert problems["models.base"].startswith(f"{model / 'config.json'}: is not below")


def test_hub_models_need_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    problems = refused(changed("models.base", "owner/name"), FileAccess((str(FAMILY),)))
    assert problems["models.base"].startswith(
        f"owner/name: models of the hub are read from its cache: {tmp_path}/hub: "
    )
    assert "owner/name: neither a directory nor a hub model" in str(
        refused(changed("models.base", "owner/name"), FileAccess((str(FAMILY), str(tmp_path / "hub"))))
    )


def test_default_readable_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, studies may read the data directory and the working directory."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    access = default_access(tmp_path / "data")
    assert access == FileAccess(tuple(str(tmp_path / name) for name in ("data", "work", "hub")))


def test_later_checks_use_the_accepted_rules(server: ApiServer, tmp_path: Path) -> None:
    """Drivers and exports check again by the rules with which the study was accepted.

    The base becomes a link to another place after the study was accepted.
    """
    shutil.copytree(FAMILY / "base", tmp_path / "models" / "base")
    access = FileAccess((str(FAMILY), str(tmp_path / "models")))
    body = changed("models.base", str(tmp_path / "models" / "base"))
    outcome = check_request(json.dumps(body).encode(), "study", SEARCH.accept, RequestContext(access), is_json=True)
    records = [
        server.store.create_job(kind="search", name=outcome.name, document=outcome.document, accepted=facts)
        for facts in (outcome.facts, family_study(server.store).accepted)
    ]
    assert [ResolvedStudy.of(record).access for record in records] == [access, None]
    shutil.move(tmp_path / "models" / "base", tmp_path / "moved")
    (tmp_path / "models" / "base").symlink_to(tmp_path / "moved")
    record = server.store.job(records[0].id)
    assert ResolvedStudy.of(record).access == access
    assert drive(server.store, record.id, work_dir=tmp_path / "work") == 0
    ended = server.store.job(record.id)
    assert ended.state is JobState.FAILED
    message = f"{tmp_path}/models/base: is not below a directory that studies may read"
    assert message in (ended.reason or "")
    with pytest.raises(InvalidStudy, match=message):
        export_trial(server.store, record, "best", tmp_path / "out")


def test_functions_of_task_files_need_trust(tmp_path: Path) -> None:
    file = write_choices(tmp_path)
    (tmp_path / "code.py").write_text("def text(doc):\n    return doc['question']\n")
    file.write_text(file.read_text().replace("'{{question}}'", "!function code.text"))
    body = changed("objectives.0", {"name": "math", "task": str(file), "metric": "acc"})
    body["fidelity"] = {"scheduler": "none"}
    body["holdout"] = body["holdout"][1:]
    problems = refused(body, FileAccess((str(FAMILY), str(tmp_path))))
    assert set(problems) == {"objectives.0.task"}
    assert "--trust-dir" in problems["objectives.0.task"]
    trusted = RequestContext(FileAccess((str(FAMILY),), (str(tmp_path),)))
    check_request(json.dumps(body).encode(), "study", SEARCH.accept, trusted, is_json=True)


# Over HTTP.


def test_only_directories_are_searched_for_models(tmp_path: Path) -> None:
    """A directory to search is used; what is not one is refused (422), also with characters that no path has."""
    (tmp_path / "none").mkdir()
    (tmp_path / "data").mkdir()
    with ApiServer(tmp_path / "data", preflight=QuickPreflight(FileAccess((str(tmp_path),)))) as server:
        found = httpx.get(f"{server.url}/v1/models", params={"under": str(tmp_path / "none")})
        assert found.status_code == 200, found.text
        assert (found.json()["models"], found.json()["is_complete"]) == ([], True)
        for under in ("none", f"{tmp_path}/nowhere", f"{tmp_path}/no\0ne"):
            refused = httpx.get(f"{server.url}/v1/models", params={"under": under})
            assert refused.status_code == 422, under
            assert refused.json()["problems"][0]["field"] == "under"
            assert "directory" in refused.json()["problems"][0]["message"]


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readable")


class CountingPreflight(PreflightProcess):
    """Preflight that counts the requests that have arrived."""

    num_arrived = 0

    async def accept(self, content: bytes, **options: Any) -> Accepted:
        self.num_arrived += 1
        return await super().accept(content, **options)


@pytest.fixture(scope="module")
def preflight(readable: Path) -> CountingPreflight:
    ask_vllm()
    access = FileAccess((str(FAMILY), str(readable)))
    return CountingPreflight(RequestContext(access), limits=Limits(cpu_s=CPU_S, time_s=TIMEOUT_S), num_validators=2)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, preflight: CountingPreflight) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api"), preflight=preflight) as server:
        yield server


def post(server: ApiServer, body: dict[str, Any], *, client: str) -> httpx.Response:
    headers = {"X-Forwarded-For": client}  # uvicorn believes it of a proxy on this machine
    return httpx.post(f"{server.url}/v1/studies", json=body, headers=headers, timeout=2 * TIMEOUT_S)


@pytest.mark.slow
def test_a_request_that_hangs_keeps_only_its_own_client_waiting(
    strict: ApiServer, preflight: CountingPreflight, readable: Path
) -> None:
    shutil.copytree(FAMILY / "base", readable / "hangs")
    (readable / "hangs" / "config.json").unlink()
    os.mkfifo(readable / "hangs" / "config.json")
    hanging = changed("models.base", str(readable / "hangs"))
    with ThreadPoolExecutor(4) as pool:

        def submitted(body: dict[str, Any]) -> Future[httpx.Response]:
            """Send a request, and return when it has arrived: otherwise threads may overtake each other."""
            num_arrived = preflight.num_arrived
            request = pool.submit(post, strict, body, client="10.0.0.1")
            while preflight.num_arrived == num_arrived and not request.done():
                time.sleep(0.01)
            return request

        blocked = [submitted(hanging) for _ in range(2)]
        queued = submitted(document())
        answer = post(strict, document(), client="10.0.0.2")
        assert answer.status_code == 201, answer.text
        assert not any(request.done() for request in (*blocked, queued))
        for _ in blocked:
            release(readable / "hangs" / "config.json", until=blocked)
        assert {request.result().status_code for request in blocked} == {422}
        assert queued.result().status_code == 201


def release(pipe: Path, *, until: list[Any]) -> None:
    """Open the pipe again and again until the requests have ended, so that its readers continue."""
    while not all(request.done() for request in until):
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody reads it at this moment
            time.sleep(0.001)


@pytest.mark.slow
def test_a_request_that_computes_too_long_or_too_much_is_refused(strict: ApiServer, readable: Path) -> None:
    (readable / "one.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    for prompt, limit in ((loops, f"{CPU_S} s of processor time"), ("{{ 'a' * 10 ** 12 }}", "GiB of memory")):
        task = {"file": str(readable / "one.jsonl"), "prompt": prompt}
        answer = post(strict, changed("objectives.0.task", task), client="10.0.0.3")
        assert answer.status_code == 422, answer.text
        (problem,) = answer.json()["problems"]
        assert problem["message"].startswith("checking the job takes more than ")
        assert limit in problem["message"]
    assert post(strict, document(), client="10.0.0.3").status_code == 201


@pytest.mark.slow
def test_a_file_of_the_server_cannot_be_read(strict: ApiServer, tmp_path: Path, readable: Path) -> None:
    for directory, expected in ((tmp_path, "--allow-dir"), (readable, "line 1")):
        (directory / "kaggle.json").write_text('{"username": "someone", "key": "SECRET-0123"}\n')
        task = {"file": str(directory / "kaggle.json"), "prompt": "{{ {}[key] }}", "answer": "x"}
        answer = post(strict, changed("objectives.0.task", task), client="10.0.0.4")
        assert answer.status_code == 422
        assert expected in answer.text
        assert "SECRET" not in answer.text
