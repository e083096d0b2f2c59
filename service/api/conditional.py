"""HTTP responses with a study's results; their status is 304 if the client has the results already (If-None-Match)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response

from service.api.record_cache import RunRecords
from service.results.record import RunRecord

__all__ = ["NOT_MODIFIED", "answer"]

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

    The client has the result if the request's header If-None-Match names the study's current version. The result is
    cached, by study and `function`, until the study changes. `headers` are further headers of the response. Raises
    NotFound if the study does not exist.
    """
    # The tag is read before the result: a study that changes meanwhile makes the tag outdated, never wrong.
    tag = f'"{await records.version(study_id)}"'
    sent = {"ETag": tag, "Cache-Control": "no-cache", **(headers or {})}
    known = {part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")}
    if known & {tag, "*"}:
        return Response(status_code=304, headers=sent)
    return Response(await records.result(study_id, function), media_type=media_type, headers=sent)
