"""The Python client with servers that misbehave, break off, or do not exist."""

from __future__ import annotations

import asyncio
import io
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

from service.client import (
    AsyncClient,
    Client,
    Event,
    ExportFailed,
    InvalidAnswer,
    ServerUnreachable,
    requests,
    transport,
)
from service.errors import NotFound, RequestRefused
from tests.service.client.asker import Asker
from tests.service.http_server import HttpServer
from tests.service.site import Site

pytestmark = pytest.mark.slow  # each starts an HTTP server


class Scripted:
    """An application that answers each request with the next of `answers`: (status, headers, body).

    The last answer is repeated. `requests` are those received.
    """

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
    monkeypatch.setattr(requests, "RETRY_PAUSES_S", (0.01, 0.01))


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
        assert time.monotonic() - started < 5  # it is not asked again and again


@pytest.mark.parametrize(
    "address", ["", "http://", "ftp://host", "http://host:99999", "http://host?a=b", "http://[::1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(NotFound, match="is not an address; write http://HOST:PORT"):
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


def test_page_is_no_stream_of_events(ask: Asker) -> None:
    """An address that responds to every request with a page raises an error, and is not asked again and again."""

    async def awaited(url: str) -> list[Event]:
        async with AsyncClient(url) as client:
            return [event async for event in client.all_events()]

    def all_events(url: str) -> list[Event]:
        if ask.kind == "awaited":
            return asyncio.run(awaited(url))
        with Client(url) as client:
            return list(client.all_events())

    page = (200, {"content-type": "text/html"}, b"<html>hello")
    with scripted(page) as (app, url), pytest.raises(InvalidAnswer, match="no event stream, '<html>hello'"):
        list(ask.at(url).events("c0ffee"))
    assert len(app.requests) == 1
    with scripted(page) as (app, url), pytest.raises(InvalidAnswer, match="no event stream, '<html>hello'"):
        all_events(url)
    assert len(app.requests) == 1


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


PROBLEM = {"content-type": "application/problem+json"}


def busy(status: int, retry_after: str = "0") -> tuple[int, dict[str, str], bytes]:
    """A server's refusal that asks for a request some seconds later."""
    problem = {"type": "about:blank", "title": "", "status": status, "detail": f"busy {status}"}
    return status, {**PROBLEM, "retry-after": retry_after}, json.dumps(problem).encode()


@pytest.mark.usefixtures("quick")
def test_refusal_with_retry_after_is_waited_for(ask: Asker) -> None:
    """Reading waits for 429 and 503; a change waits for 429, which is refused before the server acts on it."""
    found = (200, JSON, b'{"id": "a"}')
    for refused in (busy(429), busy(503), (429, {}, b"too many for the proxy")):
        with scripted(refused, found) as (app, url):
            assert ask.at(url)("study", "c0ffee") == {"id": "a"}
            assert len(app.requests) == 2
    with scripted(busy(429), found) as (app, url):
        assert ask.at(url)("cancel", "c0ffee") == {"id": "a"}
        assert len(app.requests) == 2
    with scripted(busy(503), found) as (app, url), pytest.raises(RequestRefused, match="busy 503"):
        ask.at(url)("cancel", "c0ffee")
    assert len(app.requests) == 1


def test_waits_that_a_server_asks_for_have_an_end(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RETRY_PAUSES_S", (1 / 64, 3 / 64))
    monkeypatch.setattr(requests, "QUOTA_WAIT_S", 6 / 64)
    for status, num_requests in ((429, 7), (503, 5)):
        with scripted(busy(status)) as (app, url), pytest.raises(RequestRefused, match=f"busy {status}"):
            ask.at(url)("study", "c0ffee")
        assert len(app.requests) == num_requests
        with scripted(busy(status, "3600")) as (app, url), pytest.raises(RequestRefused, match=f"busy {status}"):
            ask.at(url)("study", "c0ffee")
        assert len(app.requests) == 1


@pytest.mark.usefixtures("quick")
def test_export_outlasts_refusals_for_a_time(ask: Asker, tmp_path: Path) -> None:
    """Neither too many requests nor a database that is away for a moment ends an export, wherever they meet it."""
    begun, written, tar = export_answers(("m/config.json", b"{}"), num_bytes=2)
    answers = [busy(429), begun, busy(429), busy(503), busy(503), busy(503), written, busy(503), busy(429), tar]
    with scripted(*answers) as (app, url):
        ask.at(url)("export", "c0ffee", 3, tmp_path / "merged")
        assert len(app.requests) == len(answers)
    assert (tmp_path / "merged" / "config.json").read_bytes() == b"{}"


@contextmanager
def cutting(*answers: bytes) -> Iterator[tuple[list[bytes], str]]:
    """A server that answers each connection with the next of `answers` and closes it; yields its requests and URL."""
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
def test_cut_request_keeps_its_key(site: Site, ask: Asker) -> None:
    """A request that was cut off is sent again under the same key."""
    with cutting(b"", OK[:-5], OK) as (requests, url):
        assert ask.at(url)("submit", site.document) == {"kind": "search", "id": "a"}
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


def test_a_long_check_is_one_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that takes too long for a proxy, and then for the client, is asked for again with the same key."""
    monkeypatch.setattr(requests, "CHECK_PAUSE_S", 0.01)
    keys: list[str] = []

    async def checks(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        keys.append(dict(scope["headers"])[b"idempotency-key"].decode())
        if len(keys) == 2:
            await asyncio.sleep(1.0)
        status, body = (504, b"<html>upstream timed out") if len(keys) == 1 else (201, b'{"id": "c0ffee"}')
        headers = [(b"content-type", b"application/json" if status == 201 else b"text/html")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with HttpServer(lambda: checks) as server, Client(server.url, timeout_s=0.3) as client:
        assert client.submit({"name": "a"})["id"] == "c0ffee"
        assert len(keys) == 3
        assert len(set(keys)) == 1
        monkeypatch.setattr(requests, "CHECKS_S", 0.0)
        keys.clear()
        keys.append("")
        with pytest.raises(ServerUnreachable, match="no answer: timed out"):
            client.submit({"name": "a"})


def test_a_stream_that_falls_silent_is_taken_up_again(site: Site, ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SILENCE_S", 0.3)
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
    """A server's answers to a request for an export that it has written."""
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


def test_every_request_of_an_export_has_the_token(tmp_path: Path) -> None:
    """The token that a client was given is sent with the download too."""

    async def awaited(url: str) -> None:
        async with AsyncClient(url, token="mst_given") as client:
            await client.export("c0ffee", 3, tmp_path / "awaited")

    with scripted(*export_answers(("m/config.json", b"{}"), num_bytes=2)) as (app, url):
        asyncio.run(awaited(url))
        assert [headers.get("authorization") for _, _, headers in app.requests] == ["Bearer mst_given"] * 3
    with scripted(*export_answers(("m/config.json", b"{}"), num_bytes=2)) as (app, url):
        with Client(url, token="mst_given") as client:
            client.export("c0ffee", 3, tmp_path / "blocking")
        assert [headers.get("authorization") for _, _, headers in app.requests] == ["Bearer mst_given"] * 3


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
    """Like `cutting`, for requests with any content; yields the URL."""
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
