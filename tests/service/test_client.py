"""The Python client against the server's own application over real HTTP, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from search_spaces.errors import InvalidStudy
from search_spaces.study import load_study
from service.client import (
    AsyncClient,
    Client,
    Event,
    ExportFailed,
    InvalidAnswer,
    RequestRefused,
    ServerUnreachable,
    clients,
    routes,
)
from service.errors import Conflict, NotFound
from service.report import render_report
from service.results import pareto, summary, trial_document
from service.run_record import run_record
from service.types import Origin, StudyState
from tests.service.http_server import PROGRESS, HttpServer, Site


class Asker:
    """One kind of client; a new one for each call."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    def __call__(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "blocking":
            with Client(self.url) as client:
                return getattr(client, name)(*args, **kwargs)

        async def ask() -> Any:
            async with AsyncClient(self.url) as client:
                return await getattr(client, name)(*args, **kwargs)

        return asyncio.run(ask())

    def events(self, study: str, *, after: int = 0, patience_s: float = 60.0) -> Iterator[Event]:
        if self.kind == "blocking":
            with Client(self.url, patience_s=patience_s) as client:
                yield from client.events(study, after=after)
            return

        async def listen() -> list[Event]:
            async with AsyncClient(self.url, patience_s=patience_s) as client:
                return [event async for event in client.events(study, after=after)]

        yield from asyncio.run(listen())

    def at(self, url: str) -> Asker:
        return Asker(self.kind, url)


@pytest.fixture(params=["blocking", "awaited"])
def ask(request: pytest.FixtureRequest, site: Site) -> Asker:
    return Asker(request.param, site.url)


names = (f"study-{number}" for number in itertools.count())


# Studies.


def test_a_study_file_is_submitted_with_paths_that_mean_the_same_on_the_server(site: Site, ask: Asker) -> None:
    name = next(names)
    file = site.study_file(name)
    document = ask("submit", file)
    assert (document["name"], document["state"], document["attempt"]) == (name, "CREATED", 0)
    stored = site.store.study(document["id"]).document
    assert stored == load_study(file).canonical()
    assert stored["objectives"][0]["task"]["file"] == str(site.directory / "search.jsonl")
    assert ask("submit", str(file))["id"] != document["id"]


def test_the_same_key_gives_the_same_study_and_no_key_another(site: Site, ask: Asker) -> None:
    content = {**site.document, "name": next(names)}
    first = ask("submit", content, idempotency_key=content["name"])
    assert ask("submit", content, idempotency_key=content["name"]) == first
    assert ask("submit", content)["id"] != first["id"]
    with pytest.raises(RequestRefused, match=f"Idempotency-Key '{content['name']}' was sent before") as refused:
        ask("submit", {**content, "search": {"seed": 7}}, idempotency_key=content["name"])
    assert refused.value.status == 409


@pytest.mark.parametrize("key", ["ü", "two words", "a\nb", "x" * 256])
def test_a_key_that_http_cannot_carry_is_refused(site: Site, ask: Asker, key: str) -> None:
    with pytest.raises(RequestRefused, match=r"Idempotency-Key .*: give 1 to 255 visible ASCII characters"):
        ask("submit", site.document, idempotency_key=key)


def test_what_is_wrong_with_a_study_is_told_all_at_once(site: Site, ask: Asker, tmp_path: Path) -> None:
    broken = {**site.document, "search": {"max_trial": 3}, "engine": {"replicas": 0}}
    file = tmp_path / "study.json"
    file.write_text(json.dumps(broken))
    with pytest.raises(InvalidStudy) as told_here:
        ask("submit", file)
    with pytest.raises(RequestRefused) as told_there:
        ask("submit", broken)
    assert told_there.value.status == 422
    assert len(told_there.value.problems) == 2
    assert str(told_there.value) == str(told_here.value)
    assert [(p["field"], p["message"]) for p in told_there.value.problems] == [
        (problem.field, problem.message) for problem in told_here.value.problems
    ]


def test_a_relative_path_in_a_mapping_is_refused_by_name(site: Site, ask: Asker) -> None:
    with pytest.raises(RequestRefused, match=r"models\.base: \./base: is relative; a path in a request is absolute"):
        ask("submit", {**site.document, "models": {**site.document["models"], "base": "./base"}})


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()])
def test_what_is_not_plain_data_is_not_sent(site: Site, ask: Asker, value: object) -> None:
    with pytest.raises(InvalidStudy, match="the study is not plain data: "):
        ask("submit", {**site.document, "limits": value})


def test_a_missing_study_file_is_told_as_the_command_does(ask: Asker, tmp_path: Path) -> None:
    with pytest.raises(InvalidStudy, match=r"no\.yaml: "):
        ask("submit", tmp_path / "no.yaml")


def test_studies_are_listed_and_sorted_out_by_state_and_name(site: Site, finished: str, ask: Asker) -> None:
    name = next(names)
    first, second = site.create(name), site.create(name)
    everything = [study["id"] for study in ask("studies")]
    assert everything.index(finished) < everything.index(first) < everything.index(second)
    assert [study["id"] for study in ask("studies", name=name)] == [first, second]
    assert finished in [study["id"] for study in ask("studies", state="COMPLETE")]
    assert ask("studies", state="COMPLETE", name=name) == []
    with pytest.raises(RequestRefused, match="state: "):
        ask("studies", state="BUSY")


def test_a_study_is_told_whole(finished: str, ask: Asker) -> None:
    study = ask("study", finished)
    assert (study["id"], study["state"], study["wall_clock_s"]) == (finished, "COMPLETE", 754.0)
    assert study["trials"] == {"COMPLETE": 8, "FAIL": 1}
    assert study["progress"] == PROGRESS
    assert study["job"]["submission_id"] == "finished-1"
    with pytest.raises(RequestRefused, match="there is no such study") as refused:
        ask("study", "f" * 32)
    assert refused.value.status == 404


@pytest.mark.parametrize("odd", ["..", "../../healthz", "a/b", "a?b", "ü", "\udcff", "x" * 3000, " "])
def test_an_odd_id_is_no_study_and_no_other_page(ask: Asker, odd: str) -> None:
    for method in ("study", "summary", "cancel"):
        with pytest.raises(RequestRefused) as refused:
            ask(method, odd)
        assert refused.value.status in (404, 405)


def test_an_empty_id_is_not_the_list_of_studies(ask: Asker) -> None:
    for method in ("study", "trials", "cancel", "pareto"):
        with pytest.raises(NotFound, match="give the id of a study"):
            ask(method, "")


def test_a_study_is_found_by_id_beginning_and_name(site: Site, ask: Asker) -> None:
    name = next(names)
    study = site.create(name)
    for reference in (study, study[:12], name):
        assert ask("find", reference)["id"] == study
    other = site.create(name)
    with pytest.raises(Conflict, match=rf"study '{name}': 2 studies are meant, .*{study} .*{other} "):
        ask("find", name)
    assert ask("find", other)["id"] == other
    for reference in ("nobody", "", "F"):
        with pytest.raises(NotFound, match=f"study '{reference}': the server has no study of that id or name; it has "):
            ask("find", reference)


def test_a_study_is_cancelled_once_and_for_good(site: Site, finished: str, ask: Asker) -> None:
    study = site.create(next(names))
    assert ask("cancel", study)["state"] == "CANCELLED"
    assert ask("cancel", study)["state"] == "CANCELLED"
    assert site.store.study(study).state is StudyState.CANCELLED
    with pytest.raises(RequestRefused, match="COMPLETE already") as refused:
        ask("cancel", finished)
    assert refused.value.status == 409


# Results.


def test_results_are_those_of_a_run(site: Site, finished: str, ask: Asker) -> None:
    record = run_record(site.store, finished)
    assert ask("summary", finished) == json.loads(json.dumps(summary(record)))
    assert ask("pareto", finished) == json.loads(json.dumps(pareto(record)))
    assert ask("report", finished) == render_report(record)


def test_trials_are_told_to_the_last_page(
    site: Site, finished: str, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "PAGE", 2)
    stored = [json.loads(json.dumps(trial_document(trial))) for trial in site.store.trials(finished)]
    assert len(stored) == 9
    assert ask("trials", finished) == stored
    assert ask("trials", finished, state="COMPLETE") == stored[:8]
    assert ask("trials", finished, state="PRUNED") == []
    assert ask("trials", site.create(next(names))) == []


def test_one_trial_and_its_recipe(site: Site, finished: str, ask: Asker) -> None:
    (trial,) = site.store.trials(finished, start=5, stop=6)
    assert ask("trial", finished, 5)["label"] == trial.label
    assert ask("recipe", finished, 5) == trial.recipe.to_json()
    for method in ("trial", "recipe"):
        with pytest.raises(RequestRefused, match="trial 99: study 'finished' has no such trial"):
            ask(method, finished, 99)


def test_the_log_is_text_and_away_with_ray(
    site: Site, finished: str, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("log", finished) == "==> finished-1 <==\nscored ü\n"
    monkeypatch.setattr(site.cluster, "away", "Ray is being started")
    with pytest.raises(RequestRefused, match=r"^Ray is being started$") as refused:
        ask("log", finished)
    assert refused.value.status == 503
    assert refused.value.retry_after_s is not None


# Events.


def test_the_events_of_a_finished_study_are_its_history_and_end(site: Site, finished: str, ask: Asker) -> None:
    stored = site.store.events(finished)
    events = list(ask.events(finished))
    history = [event for event in events if event.id is not None]
    assert [(e.id, e.kind, e.payload) for e in history] == [(e.id, e.kind, dict(e.payload)) for e in stored]
    assert events[-1] == Event("end", None, None, {"state": "COMPLETE", "reason": None})
    assert [event.payload for event in events if event.kind == "progress"] == [PROGRESS]
    later = list(ask.events(finished, after=stored[10].id))
    assert [event.id for event in later if event.id is not None] == [event.id for event in stored[11:]]


def test_events_come_while_they_happen(site: Site) -> None:
    writer = site.begin(next(names))
    with Client(site.url) as client:
        events = client.events(writer.study_id)
        assert [next(events).kind for _ in range(3)] == ["created", "attempt", "state"]
        for number in range(3):
            writer.add_event("note", {"number": number})
            assert next(events).payload == {"number": number}
        writer.heartbeat(wall_clock_s=1.0, progress=PROGRESS)
        assert next(events) == Event("progress", None, None, PROGRESS)
        writer.set_state(StudyState.FAILED, "out of luck")
        assert [event.kind for event in events] == ["state", "end"]


def test_no_event_is_missed_or_told_twice_when_the_server_is_stopped_and_started(site: Site, ask: Asker) -> None:
    writer = site.begin(next(names))
    own = HttpServer(site._app)
    interrupted = threading.Event()

    def work() -> None:
        for number in range(200):
            writer.add_event("note", {"number": number})
            time.sleep(0.01)
        interrupted.wait()
        writer.set_state(StudyState.COMPLETE)

    def interrupt() -> None:
        for _ in range(3):
            time.sleep(0.4)
            own.stop()
            time.sleep(0.2)
            own.start()
        interrupted.set()

    with own:
        threads = [threading.Thread(target=body) for body in (work, interrupt)]
        for thread in threads:
            thread.start()
        events = list(ask.at(own.url).events(writer.study_id))
        for thread in threads:
            thread.join()
    assert [e.id for e in events if e.id is not None] == [e.id for e in site.store.events(writer.study_id)]
    assert sum(event.kind == "note" for event in events) == 200
    assert [event.kind for event in events][-1] == "end"


def test_a_server_that_does_not_come_back_ends_the_reading(site: Site, ask: Asker) -> None:
    writer = site.begin(next(names))
    own = HttpServer(site._app)
    own.start()
    threading.Timer(0.5, own.stop).start()
    with pytest.raises(ServerUnreachable, match=f"^{own.url}: no answer: "):
        list(ask.at(own.url).events(writer.study_id, patience_s=1.5))


def test_events_of_no_study_are_refused(ask: Asker) -> None:
    with pytest.raises(RequestRefused, match="there is no such study"):
        list(ask.events("f" * 32))


# Exports.


def test_an_exported_model_is_the_trial_that_was_named(site: Site, finished: str, ask: Asker, tmp_path: Path) -> None:
    received: list[tuple[int, int | None]] = []
    out = ask("export", finished, 1, tmp_path / "merged", received=lambda *count: received.append(count))
    assert out == tmp_path / "merged"
    assert (site.store.trials(finished)[1].label, site.store.trials(finished)[1].origin) == (
        "expert:math",
        Origin.SOURCE,
    )
    merged, expert = load_file(out / "model.safetensors"), load_file(site.models / "math" / "model.safetensors")
    assert all(torch.equal(merged[name], expert[name]) for name in expert)
    assert {file.name for file in out.iterdir()} >= {"README.md", "config.json", "recipe.json", "tokenizer.json"}
    total = sum(file.stat().st_size for file in out.iterdir())
    assert received[-1][1] == total < received[-1][0]
    with pytest.raises(Conflict, match=f"{out}: exists already"):
        ask("export", finished, 1, out)
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_what_cannot_be_exported_is_refused(site: Site, finished: str, ask: Asker, tmp_path: Path) -> None:
    running = site.begin(next(names)).study_id
    for study, trial, dtype, status, message in (
        (finished, 99, None, 422, "trial: 99 is not accepted"),
        (finished, "bset", None, 422, "trial: 'bset' is not accepted"),
        (finished, -1, None, 422, "trial: -1 is not accepted"),
        (finished, "best", "int8", 422, "dtype: "),
        (running, "best", None, 409, "is RUNNING; models are exported once it is COMPLETE"),
        ("f" * 32, "best", None, 404, "there is no such study"),
    ):
        with pytest.raises(RequestRefused, match=message) as refused:
            ask("export", study, trial, tmp_path / "merged", dtype=dtype)
        assert refused.value.status == status
    assert list(tmp_path.iterdir()) == []


# Servers that misbehave.


class Scripted:
    """An application that answers each request with the next of `answers`: (status, headers, body), the last one for
    ever; `requests` are those it got."""

    def __init__(self, *answers: tuple[int, dict[str, str], bytes]) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["method"], scope["path"], headers))
        status, answered, body = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in answered.items()],
            }
        )
        await send({"type": "http.response.body", "body": body})


JSON = {"content-type": "application/json"}


@contextmanager
def scripted(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[Scripted, str]]:
    app = Scripted(*answers)
    with HttpServer(lambda: app) as server:
        yield app, server.url


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "RETRY_PAUSES_S", (0.01, 0.01))


def test_an_address_where_nobody_listens_is_named(ask: Asker, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    calls: list[Callable[[], Any]] = [
        lambda: ask.at(url)("studies"),
        lambda: list(ask.at(url).events("c0ffee")),
        lambda: ask.at(url)("export", "c0ffee", "best", tmp_path / "merged"),
    ]
    for call in calls:
        started = time.monotonic()
        with pytest.raises(ServerUnreachable, match=f"^{url}: no answer: .*refused|^{url}: no answer: All connection"):
            call()
        assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "address", ["", "http://", "ftp://host", "http://host:99999", "http://host?a=b", "http://[::1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(NotFound, match="is no address; write http://HOST:PORT"):
            kind(address)


def test_an_address_may_leave_out_http_and_end_in_a_slash(site: Site) -> None:
    for address in (site.url.removeprefix("http://"), f"{site.url}/"):
        with Client(address) as client:
            assert client.url == site.url
            assert client.studies() is not None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (404, {"content-type": "text/html"}, b"<html>nothing"),
            "no mergesearch server answers there: status 404, '<html",
        ),
        (
            (200, {"content-type": "text/html"}, b"<html>hello"),
            "no mergesearch server answers there: no JSON object, '<h",
        ),
        ((200, JSON, b"[1]"), "no mergesearch server answers there: no JSON object"),
        ((200, JSON, b"[" * 100_000), "no mergesearch server answers there: no JSON object"),
        ((302, {"location": "https://elsewhere/"}, b""), "is redirected to https://elsewhere/; give the server's own"),
        ((404, {"content-type": "application/problem+json"}, b"{"), "no mergesearch server answers there: status 404"),
    ],
    ids=["missing page", "page", "list", "deep", "redirect", "broken problem"],
)
def test_what_is_no_mergesearch_server_is_told_so(ask: Asker, answer: Any, message: str) -> None:
    with scripted(answer) as (_, url), pytest.raises(InvalidAnswer, match=f"^{url}/v1/studies/c0ffee: {message}"):
        ask.at(url)("study", "c0ffee")


@pytest.mark.usefixtures("quick")
def test_a_proxy_without_a_server_behind_it_is_asked_again(ask: Asker) -> None:
    with scripted((502, {}, b"bad gateway"), (200, JSON, b'{"id": "a"}')) as (app, url):
        assert ask.at(url)("study", "c0ffee") == {"id": "a"}
        assert len(app.requests) == 2
    with (
        scripted((502, {}, b"bad gateway")) as (app, url),
        pytest.raises(InvalidAnswer, match="status 502, 'bad gateway'"),
    ):
        ask.at(url)("study", "c0ffee")
    assert len(app.requests) == 3


@contextmanager
def cutting(*answers: bytes) -> Iterator[tuple[list[bytes], str]]:
    """A server that sends each connection's request the next of `answers` and closes it; what it was sent."""
    requests: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                request = b""
                while b"\r\n\r\n" not in request or (b"POST" in request and b'"name"' not in request):
                    request += connection.recv(65536)
                requests.append(request)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield requests, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join()
        listener.close()


OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"id": "a"}'


@pytest.mark.usefixtures("quick")
def test_a_request_that_was_cut_off_is_sent_again_under_the_same_key(site: Site, ask: Asker) -> None:
    with cutting(b"", OK[:-5], OK) as (requests, url):
        assert ask.at(url)("submit", site.document) == {"id": "a"}
    assert len(requests) == 3
    keys = {line for r in requests for line in r.lower().split(b"\r\n") if line.startswith(b"idempotency-key:")}
    assert len(keys) == 1
    assert len(keys.pop().split(b":")[1].strip()) == 32


@pytest.mark.usefixtures("quick")
def test_a_request_that_is_always_cut_off_is_given_up(ask: Asker) -> None:
    with cutting(b"", b"", b"") as (requests, url), pytest.raises(ServerUnreachable, match=f"^{url}: no answer: "):
        ask.at(url)("studies")
    assert len(requests) == 3


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            Client(url, timeout_s=0.2) as client,
            pytest.raises(ServerUnreachable, match=f"^{url}: no answer: timed out"),
        ):
            client.studies()


def test_a_stream_that_falls_silent_is_taken_up_again(site: Site, ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SILENCE_S", 0.3)
    event = b'id: 4\nevent: note\ndata: {"time": "2031-05-04T12:00:00Z", "payload": {}}\n\n'
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for frames in (event, b"event: end\ndata: {}\n\n"):
                connection, _ = listener.accept()
                held.append(connection)
                asked.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + frames)

        held: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert [event.kind for event in ask.at(url).events("c0ffee")] == ["note", "end"]
        thread.join()
        for connection in held:
            connection.close()
    assert [b"last-event-id: 4" in request.lower() for request in asked] == [False, True]


def export_answers(*members: tuple[str, bytes], num_bytes: int, cut: int | None = None) -> list[Any]:
    """What a server says that was asked for an export and has written it."""
    document = {"id": "e1", "trial": 3, "state": "COMPLETE", "reason": None, "bytes": num_bytes}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    waiting = json.dumps({**document, "state": "RUNNING"}).encode()
    tar = stream.getvalue()[:cut]
    return [(202, JSON, waiting), (200, JSON, json.dumps(document).encode()), (200, {}, tar)]


def test_an_export_is_waited_for_and_then_downloaded(ask: Asker, tmp_path: Path) -> None:
    with scripted(*export_answers(("m/config.json", b"{}"), num_bytes=2)) as (app, url):
        ask.at(url)("export", "c0ffee", 3, tmp_path / "merged")
    assert [(method, path) for method, path, _ in app.requests] == [
        ("POST", "/v1/studies/c0ffee/exports"),
        ("GET", "/v1/studies/c0ffee/exports/e1"),
        ("GET", "/v1/studies/c0ffee/exports/e1/download"),
    ]
    assert (tmp_path / "merged" / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (export_answers(("m/../../evil", b"{}"), num_bytes=2), "leads out of its folder"),
        (export_answers(("m/config.json", b"{}"), num_bytes=3), r"cut off after 0\.0 GiB of 0\.0 GiB \(2 of 3 bytes\)"),
        (export_answers(("m/config.json", bytes(9000)), num_bytes=9000, cut=5000), "cannot be read"),
        ([*export_answers(num_bytes=2)[:2], (200, JSON, b"<html>")], "cannot be read"),
        ([*export_answers(num_bytes=2)[:2], (302, {"location": "http://x"}, b"")], "is redirected to http://x"),
    ],
    ids=["trick", "too short", "cut", "no archive", "redirect"],
)
def test_a_download_that_is_not_as_announced_leaves_nothing(
    ask: Asker, tmp_path: Path, answers: Any, message: str
) -> None:
    with scripted(*answers) as (_, url), pytest.raises(InvalidAnswer, match=message):
        ask.at(url)("export", "c0ffee", 3, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_a_download_whose_connection_breaks_leaves_nothing(ask: Asker, tmp_path: Path) -> None:
    (_, _, begun), (_, _, written), (_, _, tar) = export_answers(("m/config.json", bytes(9000)), num_bytes=9000)

    def http(body: bytes, length: int) -> bytes:
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % length + body

    answers = http(begun, len(begun)), http(written, len(written)), http(tar[:6000], len(tar))
    with cutting_any(*answers) as url, pytest.raises(ServerUnreachable, match="the download was cut off: "):
        ask.at(url)("export", "c0ffee", 3, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def cutting_any(*answers: bytes) -> Iterator[str]:
    """As `cutting`, for requests of any content."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(0.3)
                    try:
                        while connection.recv(65536):
                            pass
                    except TimeoutError:
                        pass
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_an_export_that_the_server_could_not_write(ask: Asker, tmp_path: Path) -> None:
    document = {"id": "e1", "trial": 3, "state": "FAIL", "reason": "models math have changed", "bytes": None}
    with (
        scripted((202, JSON, json.dumps(document).encode())) as (_, url),
        pytest.raises(ExportFailed, match=r"^trial 3 of study c0ffee: models math have changed$"),
    ):
        ask.at(url)("export", "c0ffee", 3, tmp_path / "merged")


def test_an_awaited_export_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    answers = export_answers(("m/config.json", bytes(2**24)), num_bytes=2**24)

    async def cancelled(url: str) -> None:
        async with AsyncClient(url) as client:
            begun = asyncio.Event()
            loop = asyncio.get_running_loop()

            def received(_: int, __: int | None) -> None:
                loop.call_soon_threadsafe(begun.set)
                time.sleep(0.01)

            export = asyncio.create_task(client.export("c0ffee", 3, tmp_path / "merged", received=received))
            await begun.wait()
            export.cancel()
            with pytest.raises(asyncio.CancelledError):
                await export

    with scripted(*answers) as (_, url):
        asyncio.run(cancelled(url))
        deadline = time.monotonic() + 5
        while list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


# Both clients.


def test_both_clients_have_the_same_methods_with_their_documentation() -> None:
    blocking = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    awaited = {name for name in vars(AsyncClient) if not name.startswith("_")} - {"aclose"}
    assert blocking == awaited
    for kind in (Client, AsyncClient):
        for name in blocking:
            assert getattr(kind, name).__doc__, name
            assert getattr(kind, name).__name__ == name


def test_many_threads_may_use_one_client(site: Site, finished: str) -> None:
    with Client(site.url) as client:
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(client.study(finished))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 8
    assert all(study == found[0] for study in found)
