"""HTTP responses with a study's results; their status is 304 if the client has the results already (If-None-Match)."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio.to_thread
from fastapi import Request
from starlette.responses import Response

from service.api.record_cache import RunRecords
from service.results.record import RunRecord
from service.types import TrialResult

__all__ = ["NOT_MODIFIED", "answer", "answer_computed", "answer_from_trials", "tagged", "unchanging"]

# OpenAPI description of the response to a client that has the results already.
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The results are those of the `ETag` that the request sent as `If-None-Match`."}
}


async def answer(
    request: Request,
    records: RunRecords,
    study_id: str,
    function: Callable[[RunRecord], bytes],
    *,
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Respond with the result of `function` for a study, or with status 304 if the client has this result already.

    The client has the result if the request's header If-None-Match names the study's current version. `function`
    computes the body of the response from the study's run record (all its stored data). The cache `records` keeps the
    body until the study changes. `media_type` is the type of the body, and `headers` are further headers of the
    response. Raises NotFound if the study does not exist.
    """
    version = await anyio.to_thread.run_sync(records.version, study_id)
    tag = records.tag(version)
    body = None if _is_known(request, tag) else await records.result(study_id, function, since=version)
    return _response(tag, body, media_type=media_type, headers=headers)


async def tagged(
    request: Request, records: RunRecords, study_id: str, function: Callable[[], bytes], *, is_large: bool = False
) -> Response:
    """Respond with the JSON that `function` reads from the store, or with status 304 if the client has it already.

    The client has the result if the request's header If-None-Match names the study's current version, which the cache
    `records` knows. The function runs in a thread. Its result is not cached. `is_large` says that the function reads
    much data; only a few functions of this kind run at the same time. Raises NotFound if the study does not exist.
    """

    def read() -> tuple[str, bytes | None]:
        tag = records.tag(records.version(study_id))
        return tag, None if _is_known(request, tag) else function()

    tag, body = await (records.large_read(read) if is_large else anyio.to_thread.run_sync(read))
    return _response(tag, body)


async def answer_from_trials(
    request: Request, records: RunRecords, study_id: str, function: Callable[[tuple[TrialResult, ...]], bytes]
) -> Response:
    """Respond with JSON about a study's trials, or with status 304 if the client has this result already.

    `function` computes the JSON from the results of the trials, in a thread. The cache `records` keeps the results of
    the trials, but not the JSON. Raises NotFound if the study does not exist.
    """
    version = await anyio.to_thread.run_sync(records.version, study_id)
    tag = records.tag(version)
    if _is_known(request, tag):
        return _response(tag, None)
    trials = await records.trials(study_id, since=version)
    return _response(tag, await anyio.to_thread.run_sync(function, trials))


async def answer_computed(
    request: Request, records: RunRecords, study_id: str, function: Callable[[], Awaitable[tuple[bytes, bool]]]
) -> Response:
    """Respond with the JSON that the coroutine `function` computes, or with status 304 if the client has it already.

    The function returns the JSON, and whether it is final. If the JSON is not final, the response has no ETag, so that
    the client asks again. The result of the function is not cached. Raises NotFound if the study does not exist.
    """
    tag = records.tag(await anyio.to_thread.run_sync(records.version, study_id))
    if _is_known(request, tag):
        return _response(tag, None)
    body, is_final = await function()
    return _response(tag if is_final else None, body)


def unchanging(request: Request, content: bytes, *, media_type: str) -> Response:
    """Respond with `content`, which never changes at its address, or with status 304 if the client has it already.

    The ETag is a digest of the content. Browsers may keep the content, but must ask the server before each use, so that
    the sender's rights are checked.
    """
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"Cache-Control": "private, no-cache"}
    return _response(tag, None if _is_known(request, tag) else content, media_type=media_type, headers=headers)


def _is_known(request: Request, tag: str) -> bool:
    """Whether the request says, by its header If-None-Match, that the client has the results with the ETag `tag`.

    Callers read the version in `tag` before they read the results. If the study changes in between, the results are
    newer than their ETag, and the client fetches them once more than needed. If the version were read after the
    results, an ETag could be newer than its results, and the client would keep outdated results.
    """
    known = {part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")}
    return bool(known & {tag, "*"})


def _response(
    tag: str | None,
    body: bytes | None,
    *,
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Make a response with the ETag `tag` (None: without an ETag); its status is 304 if `body` is None."""
    sent = {**({} if tag is None else {"ETag": tag}), "Cache-Control": "no-cache", **(headers or {})}
    return (
        Response(status_code=304, headers=sent) if body is None else Response(body, media_type=media_type, headers=sent)
    )
