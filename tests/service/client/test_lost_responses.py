"""Changes whose responses are lost: the client repeats the request, and finds that the server has done it already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from service.client import requests
from service.errors import RequestRefused
from service.types import JobState
from tests.service.client.asker import Asker
from tests.service.http_server import HttpServer
from tests.service.site import Site

pytestmark = pytest.mark.slow  # each starts an HTTP server

BENCHMARKS = {"benchmarks": [{"name": "piqa", "task": "piqa", "metric": "acc"}]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RETRY_PAUSES_S", (0.01, 0.01))


@contextmanager
def losing(site: Site, method: str, *, forwards: bool = True) -> Iterator[str]:
    """A proxy before the server of `site` that cuts the connection of the first request with `method`.

    With `forwards`, the server gets this request too, and its response is lost. Yields the URL of the proxy.
    """
    lost: list[str] = []

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message["body"]
            if not message.get("more_body"):
                break
        loses = scope["method"] == method and not lost
        answer = httpx.Response(200)
        if forwards or not loses:
            async with httpx.AsyncClient(base_url=site.url) as http:
                target = scope["raw_path"].decode() + "?" + scope["query_string"].decode()
                kept = [(name, value) for name, value in scope["headers"] if name not in (b"host", b"accept-encoding")]
                answer = await http.request(scope["method"], target, headers=kept, content=body)
        headers = [(b"content-type", answer.headers.get("content-type", "").encode())]
        if loses:
            assert answer.is_success, answer.text
            lost.append(scope["path"])
            headers.append((b"content-length", b"1000"))
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        if not loses:
            await send({"type": "http.response.body", "body": answer.content})

    with HttpServer(lambda: proxy) as server:
        yield server.url
    assert lost


def test_edit_that_was_made_is_no_conflict(site: Site, ask: Asker) -> None:
    """A repeated edit of the same job succeeds if the job has all the new values."""
    study = site.create(site.new_name())
    changes = {"tags": ["math"], "notes": None, "max_trials": 99, "replicas": 1, "limits": {"max_samples": 5000}}
    with losing(site, "PATCH") as url:
        edited = ask.at(url)("edit", study, changes, reason="more")
    assert (edited["tags"], edited["version"]) == (["math"], 1)
    assert len([event for event in site.store.events(study) if event.kind == "steered"]) == 1
    with losing(site, "PATCH") as url:
        edited = ask.at(url)("edit", ask("find", study), {"priority": -5})
    assert (edited["kind"], edited["priority"], edited["version"]) == ("search", -5, 2)


def test_edit_by_another_user_stays_a_conflict(site: Site, ask: Asker) -> None:
    for theirs, ours in (
        ({"tags": ["b"]}, {"tags": ["a"]}),
        ({"limits": {"max_samples": 5000}}, {"limits": {"max_samples": 6000}}),
        ({"name": "theirs"}, {"name": "theirs", "max_trials": 99}),
    ):
        study = site.create(site.new_name())
        ask("edit", study, theirs, version=0)
        with losing(site, "PATCH", forwards=False) as url, pytest.raises(RequestRefused, match="was edited meanwhile"):
            ask.at(url)("edit", study, ours, version=0)


def test_what_a_lost_request_deleted_is_deleted(site: Site, ask: Asker) -> None:
    study = site.create(site.new_name())
    ask("cancel", study)
    with losing(site, "DELETE") as url:
        assert ask.at(url)("delete", study) is None
    with pytest.raises(RequestRefused, match="there is no such study"):
        ask("delete", study)


def test_benchmarks_that_were_added_are_no_conflict(site: Site, ask: Asker) -> None:
    """Repeated benchmarks succeed if the study has all of them, and stay refused if it has not."""
    writer = site.begin(site.new_name())
    site.finish(writer)
    study = writer.job_id
    with losing(site, "POST") as url:
        assert ask.at(url)("add_benchmarks", study, BENCHMARKS)["state"] == JobState.STOPPED
    assert [each["name"] for each in site.store.job(study).document["benchmarks"]] == ["piqa"]
    more = {"benchmarks": [{**BENCHMARKS["benchmarks"][0], "trials": [3]}]}
    with losing(site, "POST", forwards=False) as url, pytest.raises(RequestRefused, match="is STOPPED; benchmarks can"):
        ask.at(url)("add_benchmarks", study, more)
