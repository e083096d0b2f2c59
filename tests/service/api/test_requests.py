"""Malformed bodies of requests: the server refuses each with a reason, and continues."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import yaml

from service.api.requests import MAX_BODY_BYTES
from tests.service.api.harness import ApiServer, document, finished_study

JSON = "application/json"
YAML = "application/yaml"
HTTP = "HTTP/1.1\r\nHost: localhost\r\n"
TEXT = json.dumps(document())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for all malformed requests, because none of them may harm it."""
    with ApiServer(tmp_path_factory.mktemp("api")) as server:
        yield server
        assert 'status="500"' not in httpx.get(f"{server.url}/metrics").text


@pytest.fixture(scope="module")
def finished(server: ApiServer) -> str:
    return f"/v1/studies/{finished_study(server.store, num_trials=3).id}"


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/problem+json"
    told: dict[str, Any] = answer.json()
    assert told["status"] == status
    assert told["title"]
    assert len(answer.content) < 20_000
    return told


def post(http: httpx.Client, content: bytes | str, media_type: str = JSON) -> httpx.Response:
    return http.post("/v1/studies", content=content, headers={"Content-Type": media_type})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the request's body: line 1, column 1: not JSON: Expecting value"),
        (b'{"name": "a",\n "models": }', "the request's body: line 2, column 12: not JSON: Expecting value"),
        (b"[]", "the request's body: is a list, not a mapping"),
        (b"[" * 900_000, "the request's body: is nested too deeply"),
        (b'{"a":' * 100_000, "the request's body: is nested too deeply"),
        (b'{"name": "a", "name": "b"}', "line 1, column 15: key 'name' is given twice"),
        (TEXT.encode("utf-16"), "the request's body: is not UTF-8 text (byte 0)"),
        (TEXT.encode("utf-16-le"), "not JSON"),
        ('{"name": "h\xe9"}'.encode("latin-1"), "the request's body: is not UTF-8 text (byte 11)"),
        (b"\0" * 1000, "not JSON"),
        (b"9" * 100_000, "Exceeds the limit"),
        (b"null", "is empty, not a mapping"),
    ],
)
def test_malformed_json_is_refused_with_its_place(http: httpx.Client, content: bytes, message: str) -> None:
    (problem,) = refused(post(http, content), 422)["problems"]
    assert message in problem["message"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, not a mapping"),
        (b"name: a\nname: b\n", "line 2, column 1: key 'name' is given twice"),
        (b"a: &a [x]\nb: *a\n", "line 2, column 4: aliases (*name) are not accepted"),
        (b"[" * 200_000, "the request's body: is nested too deeply"),
        (b"- a\n" * 1000, "is a list, not a mapping"),
        (b"name: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        (b"a: 1\n---\nb: 2\n", "found another document"),
        (b"\xff\xfea\0", "is not UTF-8 text"),
        (b"a: \x01", "is not allowed in YAML"),
        (b"1: a\n", "key '1' is not text"),
        (b"a: 1e999999\nb: .inf\n", "models"),
    ],
)
def test_malformed_yaml_is_refused_with_its_place(http: httpx.Client, content: bytes, message: str) -> None:
    told = refused(post(http, content, YAML), 422)
    assert message in str(told["problems"])


def test_a_byte_order_mark_is_read_over(http: httpx.Client) -> None:
    assert post(http, TEXT.encode("utf-8-sig")).status_code == 201


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("place", ["search.max_trials", "limits.max_wall_clock_s", "objectives.0.range.1"])
def test_numbers_that_are_none_are_refused_with_their_place(http: httpx.Client, number: str, place: str) -> None:
    body = document(limits={})
    body["objectives"][0]["range"] = [0, 1]
    *parents, last = place.split(".")
    inner: Any = body
    for part in parents:
        inner = inner[int(part)] if part.isdigit() else inner[part]
    inner[int(last) if last.isdigit() else last] = "NUMBER"
    told = refused(post(http, json.dumps(body).replace('"NUMBER"', number)), 422)
    assert place in [problem["field"] for problem in told["problems"]]


@pytest.mark.parametrize("value", [None, True, 3, -1, 1.5, "", "x", [], {}, [[]], {"a": {"b": []}}, "\ud800", "\0"])
@pytest.mark.parametrize("key", list(document()))
def test_wrong_types_are_refused_or_right(http: httpx.Client, key: str, value: Any) -> None:
    answer = post(http, json.dumps({**document(), key: value}))
    if answer.status_code != 201:
        problems = refused(answer, 422)["problems"]
        assert all(problem["message"] for problem in problems)


def test_deep_values_inside_a_study_are_refused(http: httpx.Client) -> None:
    for depth in (50, 150, 300, 900):
        deep: Any = "x"
        for _ in range(depth):
            deep = [deep]
        told = refused(post(http, json.dumps(document(objectives=deep))), 422)
        assert told["problems"]


@pytest.mark.parametrize("media_type", ["text/plain", "application/xml", "", "json", "application/json5", "*/*"])
def test_other_media_types_are_refused_with_those_accepted(http: httpx.Client, media_type: str) -> None:
    told = refused(post(http, TEXT, media_type), 415)
    assert "send application/json or application/yaml" in told["detail"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": JSON, "Content-Encoding": "gzip"},
    ],
)
def test_other_encodings_are_refused(http: httpx.Client, headers: dict[str, str]) -> None:
    refused(http.post("/v1/studies", content=TEXT, headers=headers), 415)


def test_large_json_is_compressed(http: httpx.Client, finished: str) -> None:
    """Documents are compressed for clients that accept it; small ones and event streams are sent as they are."""
    plain = http.get(f"{finished}/trials", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with http.stream("GET", f"{finished}/trials", headers={"Accept-Encoding": "gzip"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) == len(raw) < len(plain.content) / 2
    assert gzip.decompress(raw) == plain.content
    assert answer.headers["ETag"] == plain.headers["ETag"]
    assert "content-encoding" not in http.get("/healthz").headers
    events = http.get(f"{finished}/events")
    assert events.headers["content-type"].startswith("text/event-stream")
    assert len(events.content) > 1000
    assert "content-encoding" not in events.headers


def test_a_body_of_50_mb_is_refused_before_it_was_read(server: ApiServer) -> None:
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:  # type: ignore[arg-type]
        head = f"POST /v1/studies {HTTP}Content-Type: {JSON}\r\nContent-Length: {50 * 2**20}\r\n\r\n"
        connection.sendall(head.encode() + b"[" * 1000)
        connection.settimeout(30)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body has 52428800 bytes or more; send at most 1048576" in answer


def test_large_chunked_body_is_refused(server: ApiServer) -> None:
    """A body of unknown length is refused once it is too large."""
    memory = psutil.Process()
    before = memory.memory_info().rss

    def endless() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 2**20

    with httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post("/v1/studies", content=endless(), headers={"Content-Type": JSON})
        told = refused(answer, 413)
        assert f"send at most {MAX_BODY_BYTES}" in told["detail"]
        assert http.get("/healthz").status_code == 200
    assert memory.memory_info().rss - before < 30 * 2**20


def test_aborted_body_leaves_nothing(server: ApiServer, http: httpx.Client) -> None:
    """A client that disconnects within its body leaves nothing behind."""
    for _ in range(5):
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:  # type: ignore[arg-type]
            head = f"POST /v1/studies {HTTP}Content-Type: {JSON}\r\nContent-Length: 500\r\n\r\n"
            connection.sendall(head.encode() + b'{"name"')
    time.sleep(0.2)
    assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/studies/../../etc/passwd",
        "/v1/studies/%2e%2e/%2e%2e/etc/passwd",
        "/v1/studies//",
        "/v1/studies/",
        "/v1//studies",
        "//v1/studies",
        "/v1/studies/%",
        "/v1/studies/%ff%fe",
        "/v1/studies/a%0d%0aX: y",
        "/v1/studies/" + "a" * 60_000,
        "/docs/../healthz/x",
        "/static/../../x",
    ],
)
def test_path_tricks_lead_nowhere(server: ApiServer, path: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET {path.replace(' ', '%20')} {HTTP}Connection: close\r\n\r\n".encode())
        connection.settimeout(30)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ")), answer[:200]
    assert b"root:" not in answer


@pytest.mark.parametrize(
    "path",
    [
        "/trials/-1",
        "/trials/2147483648",
        "/trials/99999999999999999999999",
        "/trials/1.5",
        "/trials/%00",
        "/plots/../x",
    ],
)
def test_what_is_no_number_is_not_found(http: httpx.Client, finished: str, path: str) -> None:
    refused(http.get(f"{finished}{path}"), 404)


@pytest.mark.parametrize(
    "query", ["after=-1", "after=9223372036854775808", "after=x", "limit=0", "limit=99999999999", "after=NaN", "limit="]
)
@pytest.mark.parametrize("rest", ["trials", "events"])
def test_parameters_out_of_range_are_refused_by_name(http: httpx.Client, finished: str, rest: str, query: str) -> None:
    told = refused(http.get(f"{finished}/{rest}?{query}"), 422)
    assert told["problems"][0]["field"] == query.partition("=")[0]


@pytest.mark.parametrize("value", ["x", "-1", "1e3", "99999999999999999999"])
def test_a_last_event_id_that_is_none_is_refused(http: httpx.Client, finished: str, value: str) -> None:
    told = refused(http.get(f"{finished}/events", headers={"Last-Event-ID": value}), 422)
    assert told["problems"][0]["field"] == "Last-Event-ID"


def test_large_but_right_documents_are_read_in_reasonable_time(http: httpx.Client) -> None:
    experts = {f"expert{i}": f"/models/{'x' * 100}/{i}" for i in range(1500)}
    body = yaml.safe_dump(document(models={"base": "/models/base", "experts": experts}))
    started = time.perf_counter()
    assert post(http, body, YAML).status_code == 201
    assert time.perf_counter() - started < 30
