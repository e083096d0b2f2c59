"""Forwarding of requests to Ray's dashboard, and of its responses to the user.

Ray gets only the path, the query and its own token, and nothing else from the user's request. The user gets only the
status, the type and the body of the answer: no cookies, redirects or error messages.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import httpx
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.prefix import below_root
from service.api.problems import Refusal, Unavailable
from service.api.protocols import Cluster
from service.api.ray_dashboard.paths import Treatment, target
from service.api.ray_dashboard.redaction import redacted, shown_logs
from service.cluster.dashboard import RayDashboard

__all__ = ["DashboardProxy"]

logger = logging.getLogger(__name__)

CONNECT_S = 5.0

# Seconds without a byte after which an answer is given up.
SILENCE_S = 30.0

# Seconds for a whole answer of JSON, which is read before it is sent.
DATA_S = 60.0

# Bytes of an answer of JSON that are read: 10,000 tasks have 20 MB.
MAX_DATA_BYTES = 64 * 2**20

# Requests to Ray at a time; further ones wait, for CONNECT_S seconds at most.
MAX_REQUESTS = 32

# The names of the dashboard's files change with their content.
KEPT = "private, max-age=86400"

# Characters of Ray's messages that are logged.
MAX_LOGGED = 2000


class DashboardProxy:
    """Proxy that forwards users' read-only requests to the dashboard of the Ray cluster `cluster`.

    `public_url` is the URL under which browsers reach this server, if the operator has given it.
    """

    def __init__(self, cluster: Cluster, *, public_url: str | None = None) -> None:
        self._cluster = cluster
        self._public_url = public_url
        self._http: httpx.AsyncClient | None = None

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    def roots(self, authority: str) -> tuple[str, ...]:
        """Possible addresses of the dashboard for the browser of the current request; each ends with a slash.

        The first address is below `authority`, the value of the request's header Host. The second address is below the
        server's public URL, if this is known.
        """
        own = authority + below_root("/ray/")
        return (own,) if self._public_url is None else (own, f"{self._public_url.rstrip('/')}/ray/")

    async def forward(self, method: str, path: str, parameters: Sequence[tuple[str, str]]) -> Response:
        """Forward a request for the decoded `path` of the dashboard, and return the response for the user.

        `method` is GET or HEAD; `parameters` are the decoded parameters of the query.

        Raises:
            Refusal: The request is not forwarded (403), Ray does not know the requested object (404), does not accept
                the parameters (422), or failed (502).
            Unavailable: Ray does not answer, or not in time.
        """
        asked = target(path, parameters)
        dashboard = self._cluster.dashboard()
        if dashboard is None:
            reason = self._cluster.not_ready() or "the server has not connected to it yet"
            raise Unavailable(f"Ray's dashboard cannot be reached: {reason}")
        answer = await self._send(dashboard, method, asked.place)
        try:
            await _check(answer, path)
            headers = _headers(answer, asked.treatment)
            if asked.treatment not in (Treatment.DATA, Treatment.LOG_LIST):
                return _Streamed(answer, headers)
            body = b"" if method == "HEAD" else await _shown(answer, path, asked.treatment)
        except BaseException:
            await _close(answer)
            raise
        await _close(answer)
        return Response(body, headers=headers)

    async def _send(self, dashboard: RayDashboard, method: str, place: str) -> httpx.Response:
        if self._http is None:
            self._http = httpx.AsyncClient(
                timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S, pool=CONNECT_S),
                limits=httpx.Limits(max_connections=MAX_REQUESTS, max_keepalive_connections=MAX_REQUESTS // 4),
                follow_redirects=False,
                trust_env=False,  # neither a proxy nor credentials of ~/.netrc
            )
        # Ray hides more from browsers, so the request looks like one. Ray must not compress answers: the way to this
        # server is short.
        own = {"User-Agent": "Mozilla/5.0 (mergesearch)", "Accept": "*/*", "Accept-Encoding": "identity"}
        request = httpx.Request(
            method,
            f"{dashboard.url}{place}",
            headers={**own, **dashboard.headers},
            extensions={"timeout": self._http.timeout.as_dict()},
        )
        with _unavailable():
            return await self._http.send(request, stream=True)


class _Streamed(StreamingResponse):
    """Response that passes Ray's answer on while it arrives, and closes the connection to Ray at its end.

    The connection is closed too if the user's connection ends early.
    """

    def __init__(self, answer: httpx.Response, headers: dict[str, str]) -> None:
        super().__init__(answer.aiter_raw(), headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except httpx.HTTPError as error:  # the status was sent: the connection ends before the answer is whole
            logger.warning("Ray's dashboard: an answer broke off: %s", _reason(error))
        finally:
            await _close(self._answer)


async def _close(answer: httpx.Response) -> None:
    with anyio.CancelScope(shield=True):
        await answer.aclose()


@contextmanager
def _unavailable() -> Iterator[None]:
    """Context manager that raises Unavailable in place of errors of the HTTP connection to Ray's dashboard."""
    try:
        yield
    except httpx.HTTPError as error:
        raise Unavailable(f"Ray's dashboard does not answer: {_reason(error)}") from error


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.PoolTimeout):
        return f"it is busy with {MAX_REQUESTS} other requests of this server"
    if isinstance(error, httpx.ReadTimeout):
        return f"nothing arrived for {SILENCE_S:g} s"
    return str(error) or type(error).__name__


async def _check(answer: httpx.Response, path: str) -> None:
    """Raise Refusal or Unavailable unless Ray's answer has the status 200.

    Messages of Ray may have tracebacks, so they are only logged.
    """
    status = answer.status_code
    if status == 200:
        return
    message = b""
    with _unavailable():
        async for chunk in answer.aiter_raw():
            message += chunk
            if len(message) > MAX_LOGGED:
                break
    logger.warning("Ray's dashboard: %s: status %d: %r", path, status, message[:MAX_LOGGED])
    if status in (401, 403):
        raise Unavailable("Ray's dashboard does not accept this server's token; the server and Ray must have the same")
    if status == 404:
        raise Refusal(404, f"/ray{path!r:.200}: Ray's dashboard has no such page or object")
    if 400 <= status < 500:
        raise Refusal(422, f"/ray{path!r:.200}: Ray's dashboard refuses the query, with the status {status}")
    raise Refusal(
        502, f"/ray{path!r:.200}: Ray's dashboard answered with the status {status}; the server's log says why"
    )


def _headers(answer: httpx.Response, how: Treatment) -> dict[str, str]:
    """Make the headers of the response to the user, from Ray's response `answer` and its kind of treatment `how`.

    No header of Ray is copied except the type and length of a page or file, so that Ray sets neither cookies nor
    policies.
    """
    if how in (Treatment.DATA, Treatment.LOG_LIST):
        headers = {"Content-Type": "application/json"}
    elif how is Treatment.LOG:
        headers = {"Content-Type": "text/plain; charset=utf-8"}
    else:
        headers = {"Content-Type": answer.headers.get("content-type", "application/octet-stream")}
    if how is Treatment.FILE:
        headers["Cache-Control"] = KEPT
    if how in (Treatment.PAGE, Treatment.FILE) and "content-length" in answer.headers:
        headers["Content-Length"] = answer.headers["content-length"]
    return headers


async def _shown(answer: httpx.Response, path: str, how: Treatment) -> bytes:
    """Read the JSON body of a response of Ray's dashboard, and remove secrets from it.

    `path` is the requested path, which error messages name. `how` is the treatment of the answer: if it is LOG_LIST,
    logs that users may not read are removed too. Raises Refusal (502) if the body is too large or not JSON, and
    Unavailable if the body does not arrive in time.
    """
    body = bytearray()
    try:
        with _unavailable(), anyio.fail_after(DATA_S):
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > MAX_DATA_BYTES:
                    size = MAX_DATA_BYTES // 2**20
                    raise Refusal(502, f"/ray{path!r:.200}: Ray's answer has more than {size} MiB, which are not sent")
    except TimeoutError:
        raise Unavailable(f"Ray's dashboard does not answer: no whole answer in {DATA_S:g} s") from None
    return await run_in_threadpool(_without_secrets, bytes(body), path, how)


def _without_secrets(body: bytes, path: str, how: Treatment) -> bytes:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(502, f"/ray{path!r:.200}: Ray's answer is not JSON, so that it is not sent") from None
    return json.dumps(redacted(shown_logs(document) if how is Treatment.LOG_LIST else document)).encode("ascii")
