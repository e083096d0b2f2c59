"""HTTP requests that the client's generators yield, and functions that read the responses.

A request is sent again if its connection was lost, unless the repetition could make a change twice. Submissions have an
idempotency key, so they can be repeated. A request is also sent again if the server asks for it with Retry-After.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from urllib.parse import quote

from search_spaces.errors import InvalidStudy, Problem
from service.errors import InvalidAnswer, NotFound, RequestRefused, ServerUnreachable

if TYPE_CHECKING:
    from service.schemas.api import JobDocument, ProblemDocument

__all__ = [
    "TOO_MANY_REQUESTS",
    "AskedWaits",
    "Attempts",
    "Call",
    "Flow",
    "Reference",
    "Response",
    "TransportError",
    "delete_of",
    "document_of",
    "no_server",
    "path_of",
    "path_of_link",
    "refusal",
    "respond",
    "submitted",
    "text_of",
]

T = TypeVar("T")

NOT_FOUND, TOO_MANY_REQUESTS, UNAVAILABLE, GATEWAY_TIMEOUT = 404, 429, 503, 504

# Pauses before the retries of a request whose connection was lost: in total long enough for a server to restart.
RETRY_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)

# Seconds for which a submission is sent again, with its idempotency key, while its response takes too long for the
# client or for a proxy, and the pause before it is. The server checks a study for at most half an hour.
CHECKS_S = 3600.0
CHECK_PAUSE_S = 1.0

# Seconds for which a request may wait because its sender has sent too many: quotas are numbers of requests a minute.
QUOTA_WAIT_S = 60.0


@dataclass(frozen=True)
class Call:
    """HTTP request that the client has not sent to the server yet.

    `method` is the HTTP method. `path` starts with a slash and is percent-encoded. `query` has the parameters of the
    URL's query. `content` is the body; None sends none.
    """

    method: str
    path: str
    query: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None


@dataclass(frozen=True)
class Response:
    """HTTP response of a server to a request of the client.

    `content` is the body. `headers` contains the headers, keyed by name; the names are in lower case.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True)
class TransportError:
    """Failure of a request to the address `url`: no complete response came, for the given `reason`.

    If `was_cut` is True, a connection was made and then lost. If `is_late` is True, the response took longer than the
    client waits for one. Otherwise no connection could be made.
    """

    url: str
    reason: str
    was_cut: bool
    is_late: bool = False


@dataclass
class Attempts:
    """Knowledge about the attempts to send a request.

    If `may_have_arrived` is True, the response to an attempt was lost: the server may have done what the request asks.
    """

    may_have_arrived: bool = False


class AskedWaits:
    """Waits before a refused request `call` is sent again, as the server asks for them with Retry-After.

    A request is sent again after status 429, because the server refuses it before it acts on it, and a GET request also
    after 503. All waits together are at most as long as the limit on a user's requests (429) or the restart of a server
    (503) takes, or `patience_s` seconds if that is longer.
    """

    def __init__(self, call: Call, *, patience_s: float = 0.0) -> None:
        self._statuses = {TOO_MANY_REQUESTS, UNAVAILABLE} if call.method == "GET" else {TOO_MANY_REQUESTS}
        self._patience_s = patience_s
        self._waited_s = 0.0

    def next_s(self, error: RequestRefused | InvalidAnswer) -> float:
        """Seconds to wait before the request that was refused with `error` is sent again.

        Raises `error` itself if the refusal is final, or if the waits would be too long.
        """
        if not isinstance(error, RequestRefused) or error.retry_after_s is None or error.status not in self._statuses:
            raise error
        limit_s = QUOTA_WAIT_S if error.status == TOO_MANY_REQUESTS else sum(RETRY_PAUSES_S)
        wait_s = max(error.retry_after_s, RETRY_PAUSES_S[0])  # a server may ask for 0 s without end
        self._waited_s += wait_s
        if self._waited_s > max(limit_s, self._patience_s):
            raise error
        return wait_s


Reference: TypeAlias = "str | JobDocument"
"""Reference to a job: the id of a study, or the server's document of a job of any kind."""

Flow: TypeAlias = Generator[Call | float, Response | TransportError | None, T]
"""Generator that yields requests and pauses in seconds, is sent the outcome of each request, and returns a result."""


def path_of(job: Reference, *rest: str | int) -> str:
    """URL path of a job on the server, or of a resource of the job, such as its trials.

    `rest` has the further segments of the path, such as "trials" and a number.

    Raises:
        NotFound: `job` is an empty id.
    """
    if not job:
        raise NotFound("study '': give the id of a study")
    parts = [quote(str(part), safe="", errors="replace") for part in ((job, *rest) if isinstance(job, str) else rest)]
    return "/".join(["/v1/studies" if isinstance(job, str) else path_of_link(job["links"]["self"]), *parts])


def path_of_link(link: str) -> str:
    """Convert a link in one of the server's documents to a path that can be appended to the server's address.

    If a proxy serves the server below a path prefix, both the link and the address have this prefix. The prefix is
    therefore removed from the link.
    """
    found = re.search(r"/v1/[a-z]+/[0-9a-f]{32}(/|$)|/ray/#/", link)
    return link if found is None else link[found.start() :]


def refusal(response: Response) -> RequestRefused | InvalidAnswer:
    """Build the error for a response whose status is not 2xx.

    The error is RequestRefused if the response has a problem document (RFC 9457), else InvalidAnswer.
    """
    problem = _parsed(response) if "problem+json" in response.headers.get("content-type", "") else None
    if isinstance(problem, dict) and isinstance(problem.get("detail"), str):
        after = response.headers.get("retry-after", "")
        known: Any = {"type": "about:blank", "title": "", **problem, "status": response.status}
        return RequestRefused(cast("ProblemDocument", known), float(after) if after.isdecimal() else None)
    if location := response.headers.get("location"):
        return InvalidAnswer(f"{response.url}: is redirected to {location}; give the server's own address")
    return no_server(response, f"status {response.status}")


def no_server(response: Response, why: str) -> InvalidAnswer:
    """Build the error for a response that is not from a mergesearch server; `why` says how it differs."""
    start = repr(response.content[:80].decode("utf-8", errors="replace"))
    return InvalidAnswer(f"{response.url}: no mergesearch server answers there: {why}, {start}")


def document_of(
    call: Call, *, repeats: bool = True, patience_s: float = 0.0, attempts: Attempts | None = None
) -> Flow[dict[str, Any]]:
    """Generator that sends a request and returns the JSON object in the response.

    If `repeats` is True, the request is sent again after a lost connection. For `patience_s` seconds, it is also sent
    again if its response takes too long, or if the server asks for it. What is learned about the attempts is written to
    `attempts`.

    Raises:
        InvalidAnswer: The response is no JSON object, or not from a mergesearch server.
        RequestRefused: The server refused the request.
        ServerUnreachable: No server answered.
    """
    response = yield from respond(call, repeats=repeats, patience_s=patience_s, attempts=attempts)
    document = _parsed(response)
    if not isinstance(document, dict):
        raise no_server(response, "no JSON object")
    return document


def text_of(call: Call) -> Flow[str]:
    """Generator that sends a request and returns the text of the response."""
    return (yield from respond(call)).content.decode("utf-8", errors="replace")


def delete_of(call: Call) -> Flow[None]:
    """Generator that sends a request which deletes a resource.

    If the response to a first attempt was lost, a resource that does not exist (status 404) counts as deleted.

    Raises:
        RequestRefused: The server refused the request.
        ServerUnreachable: No server answered.
        InvalidAnswer: The response is not from a mergesearch server.
    """
    attempts = Attempts()
    try:
        yield from respond(call, attempts=attempts)
    except RequestRefused as error:
        if error.status != NOT_FOUND or not attempts.may_have_arrived:
            raise


def respond(
    call: Call, *, repeats: bool = True, patience_s: float = 0.0, attempts: Attempts | None = None
) -> Flow[Response]:
    """Generator that sends a request, repeats it after a lost connection, and returns the response (status 2xx).

    The request is sent again if the connection was lost or a proxy could not reach the server. A server that is
    unreachable at the first attempt is reported immediately. If `repeats` is False, the request is never sent again,
    because a second request would change the server a second time. For `patience_s` seconds, the request is also sent
    again if its response took too long for the client or for a proxy (status 504). Refusals with which the server asks
    to wait are waited for as the class AskedWaits describes, whatever `repeats` is. What is learned about the attempts
    is written to `attempts`.

    Raises:
        RequestRefused: The server refused the request.
        ServerUnreachable: No server answered.
        InvalidAnswer: The response is not from a mergesearch server.
    """
    pauses_s = iter(RETRY_PAUSES_S if repeats else ())
    attempts = Attempts() if attempts is None else attempts
    asked_waits = AskedWaits(call, patience_s=patience_s)
    is_first = True
    until = time.monotonic() + patience_s
    while True:
        outcome = yield call
        assert outcome is not None
        if isinstance(outcome, Response):
            if 200 <= outcome.status < 300:
                return outcome
            error: Exception = (refused := refusal(outcome))
            if isinstance(refused, RequestRefused):
                is_first = False
                yield asked_waits.next_s(refused)
                continue
            if outcome.status < 500 and outcome.status != TOO_MANY_REQUESTS:
                raise refused
            is_late = outcome.status == GATEWAY_TIMEOUT
            attempts.may_have_arrived |= outcome.status >= 500
        else:
            error, is_late = ServerUnreachable(f"{outcome.url}: no answer: {outcome.reason}"), outcome.is_late
            attempts.may_have_arrived |= outcome.was_cut or is_late
        if is_late and time.monotonic() < until:
            is_first = False
            yield CHECK_PAUSE_S
            continue
        if is_first and isinstance(outcome, TransportError) and not outcome.was_cut:
            raise error
        pause_s = next(pauses_s, None)
        if pause_s is None:
            raise error
        is_first = False
        yield pause_s


def submitted(
    path: str, document: Mapping[str, Any], idempotency_key: str | None, query: Mapping[str, str]
) -> Flow[dict[str, Any]]:
    """Generator that submits a job to the collection at `path`, and returns the server's document of the job.

    `path` is the path of a kind of job, such as "/v1/studies". `document` is the content of the file that describes the
    job, and `query` has the parameters of the URL's query. With the same `idempotency_key`, a repeated request creates
    no second job. If the key is None, a random key is used, so that the request can be repeated after a lost
    connection, and while the server checks the job for longer than the client, or a proxy, waits for a response.

    Raises:
        InvalidStudy: `document` cannot be written as JSON.
        RequestRefused: The server refused the job, or the key is not 1 to 255 visible ASCII characters.
        ServerUnreachable: No server answered.
        InvalidAnswer: The response is not from a mergesearch server.
    """
    try:
        content = json.dumps(document, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidStudy((Problem("", f"the document is not plain data: {error}"),)) from error
    key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
    if not re.fullmatch("[!-~]{1,255}", key):  # it cannot be sent as a header
        raise RequestRefused(
            {
                "type": "about:blank",
                "title": "Unprocessable Content",
                "status": 422,
                "detail": f"Idempotency-Key {key!r:.80}: give 1 to 255 visible ASCII characters",
            }
        )
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    return (yield from document_of(Call("POST", path, query, headers, content), patience_s=CHECKS_S))


def _parsed(response: Response) -> Any:
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None
