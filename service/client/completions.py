"""Requests for completions by served studies, and the parser of their streams; neither uses the network itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from service.client.requests import Call, path_of_link
from service.errors import InvalidAnswer, RequestRefused

if TYPE_CHECKING:
    from service.schemas.api import ServedStudyDocument

__all__ = ["ChunkReader", "completion_call"]


def completion_call(
    served: ServedStudyDocument,
    model: str | int,
    *,
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    options: Mapping[str, Any],
) -> Call:
    """Build the HTTP request for a streamed completion by a trial of a served study.

    `served` is the server's document of the served study, and `model` is the number of the trial or its name as a
    model. The trial answers the chat `messages` or, if they are None, continues the text `prompt`. `options` are
    further fields of the request, such as `max_tokens`.
    """
    given: dict[str, Any] = {"prompt": prompt} if messages is None else {"messages": [dict(each) for each in messages]}
    route = "completions" if messages is None else "chat/completions"
    body = {"model": str(model), "stream": True, **given, **options}
    path = f"{path_of_link(served['links']['openai'])}/{route}"
    return Call("POST", path, headers={"Content-Type": "application/json"}, content=json.dumps(body).encode())


class ChunkReader:
    """Parser of a stream of chunks of OpenAI's API; `url` is the address that error messages name."""

    def __init__(self, url: str) -> None:
        self.has_ended = False
        self._url = url
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Parse the received bytes `data`, and yield the chunks that are complete now.

        Raises RequestRefused if the server ended the completion with an error, and InvalidAnswer if the bytes are no
        stream of chunks.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.strip().partition(b":")
            value = value.strip()
            if name != b"data":
                continue
            if value == b"[DONE]":
                self.has_ended = True
                return
            try:
                chunk = json.loads(value)
            except ValueError as error:
                raise InvalidAnswer(f"{self._url}: no stream of chunks: {value[:80]!r}") from error
            if "error" in chunk:
                raise RequestRefused(
                    {"type": "about:blank", "title": "", "status": 503, "detail": str(chunk["error"]["message"])}
                )
            yield chunk

    def check_end(self) -> None:
        """Raise InvalidAnswer if the stream has ended too early."""
        if not self.has_ended:
            raise InvalidAnswer(f"{self._url}: the completion was cut off; send the request again")
