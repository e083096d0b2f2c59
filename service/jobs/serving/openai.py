"""HTTP application of the driver of a served study, with routes that are compatible with OpenAI's.

Only the server may use the application: each request has a secret that the driver stored in the database. The server
checks the rights of users before it passes a request on. Fields and errors have the names that OpenAI's API gives them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from search_spaces.recipe import Recipe
from service.errors import NotFound
from service.jobs.completers import Completer
from service.jobs.serving.disconnection import ClientGone, while_connected
from service.jobs.serving.engines import IdleTimer
from service.jobs.serving.errors import openai_error
from service.jobs.serving.trials import ServedTrials
from workers.errors import EngineBusy, EngineUnavailable, InvalidPrompt, WorkerError
from workers.serving.completions import CompletionPart, CompletionRequest

__all__ = ["DIGEST_HEADER", "ChatBody", "Gate", "TextBody", "openai_app"]

# Tokens of a completion whose request does not state a number, as in OpenAI's API.
DEFAULT_MAX_TOKENS = 16

# Seconds after which a client should send a request again.
RETRY_AFTER_S = 5

DIGEST_HEADER = "X-Mergesearch-Recipe"
SEEDS = 2**31


class Gate:
    """Holder of the replicas (`completer`) that complete prompts at the moment; without them, `waits_for` says why.

    The driver changes the replicas while requests are answered. A request ends when its replicas are replaced.
    """

    def __init__(self) -> None:
        self.completer: Completer | None = None
        self.yields = False
        self.waits_for: str | None = "its driver to start an engine"
        self.turn = asyncio.Lock()

    def close(self, waits_for: str) -> None:
        """Stop completions: new requests are refused, and requests that are being answered end with an error.

        `waits_for` says what must happen before requests are answered again; users read it in the refusal.
        """
        self.completer, self.waits_for = None, waits_for

    def open(self, completer: Completer, *, yields: bool) -> None:
        """Let the engines behind `completer` answer the prompts of clients.

        If `yields` is True, these engines belong to searches, and a request ends as soon as a search uses them.
        """
        self.completer, self.yields, self.waits_for = completer, yields, None


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart]

    def rendered(self) -> Mapping[str, str]:
        """Convert the message to the form that chat templates read: a role and a text.

        The role "developer" becomes "system", and the texts of all parts are joined.
        """
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class _TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


Off = Annotated[float | None, Field(ge=0, le=0)]


def _check_off(value: bool | None) -> bool | None:
    if value:
        raise ValueError("is not supported; leave it out")
    return value


# 0 is not false.
No = Annotated[
    bool | None,
    AfterValidator(_check_off),
    WithJsonSchema({"enum": [False, None]}),
]


class _Options(BaseModel):
    """Fields that requests to complete a text and requests to answer a chat have in common.

    The fields `user`, `metadata`, `store` and `service_tier` of OpenAI's API change nothing here, and are accepted with
    any value.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] = 0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: Literal[1, None] = 1
    frequency_penalty: Off = None
    presence_penalty: Off = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    def request(self, recipe: Recipe, **prompt: Any) -> CompletionRequest:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return CompletionRequest(
            recipe,
            stop=stop,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k, 0),
            seed=secrets.randbelow(SEEDS) if self.seed is None else self.seed,
            **prompt,
        )


def _text_alone(value: dict[str, Any]) -> dict[str, Any]:
    """Check a `response_format` and return it. Raises ValueError unless it asks for plain text."""
    if value != {"type": "text"}:
        raise ValueError('only {"type": "text"} is supported')
    return value


class ChatBody(_Options):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: No = None
    response_format: Annotated[dict[str, Any], AfterValidator(_text_alone)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None

    kind: ClassVar[str] = "chat.completion"
    prefix: ClassVar[str] = "chatcmpl"

    def completion(self, recipe: Recipe) -> CompletionRequest:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.request(recipe, messages=tuple(each.rendered() for each in self.messages), max_tokens=max_tokens)

    @staticmethod
    def choice(text: str, finish_reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}

    @staticmethod
    def delta(text: str, finish_reason: str | None, *, is_first: bool) -> dict[str, Any]:
        delta = {**({"role": "assistant"} if is_first else {}), "content": text}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class TextBody(_Options):
    prompt: str | list[int]
    max_tokens: Annotated[int, Field(ge=1)] | None = DEFAULT_MAX_TOKENS
    echo: No = None
    best_of: Literal[1, None] = 1
    logprobs: None = None
    suffix: None = None

    kind: ClassVar[str] = "text_completion"
    prefix: ClassVar[str] = "cmpl"

    def completion(self, recipe: Recipe) -> CompletionRequest:
        prompt = self.prompt if isinstance(self.prompt, str) else tuple(self.prompt)
        return self.request(recipe, prompt=prompt, max_tokens=self.max_tokens)

    @staticmethod
    def choice(text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}

    @classmethod
    def delta(cls, text: str, finish_reason: str | None, *, is_first: bool) -> dict[str, Any]:
        return cls.choice(text, finish_reason)


class _Refused(Exception):
    """Raised if a request is refused, with the HTTP status and the fields of OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status = status
        problem = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": message}
        self.body = {**problem, **openai_error(status, message, param=param, code=code)}


def openai_app(trials: ServedTrials, gate: Gate, *, secret: str, timer: IdleTimer) -> Starlette:
    """Create the web application that completes prompts with the merges of a study, in the form of OpenAI's API.

    Args:
        trials: The trials that requests may name as models.
        gate: Gives the replicas (processes with an engine) that complete prompts now.
        secret: The value that requests must have as their bearer token.
        timer: Measures the time without requests.
    """
    expected = f"Bearer {secret}".encode()

    def guarded(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def guarded_answer(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").encode()
                if not secrets.compare_digest(given, expected):
                    raise _Refused(401, "only the server may send requests here")
                response: Response = await answer(request)
                return response
            except ClientGone:
                return Response(status_code=499)
            except Exception as error:
                return _refusal(error)

        return guarded_answer

    async def models(request: Request) -> Response:
        found = await run_in_threadpool(trials.models)
        data = [
            {"id": each.name, "object": "model", "created": 0, "owned_by": "mergesearch", "label": each.label}
            for each in found
        ]
        return JSONResponse({"object": "list", "data": data})

    def completing(model: type[ChatBody] | type[TextBody]) -> Callable[[Request], Any]:
        async def complete(request: Request) -> Response:
            body = _parsed(await request.body(), model)
            recipe = await run_in_threadpool(trials.recipe, body.model)
            answer = _Answer(body, recipe)
            parts = _parts(body.completion(recipe), gate, timer)
            headers = {DIGEST_HEADER: recipe.digest}
            if not body.stream:
                return JSONResponse(await while_connected(request, answer.whole(parts)), headers=headers)
            first = await while_connected(request, anext(parts))
            stream = answer.events(first, parts)
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

        return complete

    return Starlette(
        routes=[
            Route("/models", guarded(models)),
            Route("/completions", guarded(completing(TextBody)), methods=["POST"]),
            Route("/chat/completions", guarded(completing(ChatBody)), methods=["POST"]),
        ]
    )


class _Answer:
    """The answer to a request for a completion: one document, or a stream of events."""

    def __init__(self, body: ChatBody | TextBody, recipe: Recipe) -> None:
        self._body = body
        self._common = {
            "id": f"{body.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": recipe.digest,
        }

    async def whole(self, parts: AsyncGenerator[CompletionPart]) -> dict[str, Any]:
        """Wait for all `parts` of a completion, and return them as one JSON document in OpenAI's format."""
        async with aclosing(parts):
            found = [part async for part in parts]
        choice = self._body.choice("".join(part.text for part in found), found[-1].finish_reason)
        return {**self._common, "object": self._body.kind, "choices": [choice], "usage": _usage(found)}

    async def events(self, first: CompletionPart, parts: AsyncGenerator[CompletionPart]) -> AsyncGenerator[str]:
        """Yield the answer as server-sent events, each with the text of one part of the completion.

        `first` is the first part, which the caller has read already, and `parts` yields the other parts.
        """
        object_ = self._body.kind if self._body.kind == "text_completion" else f"{self._body.kind}.chunk"
        found = [first]
        try:
            async with aclosing(parts):
                yield self._event(object_, [self._body.delta(first.text, first.finish_reason, is_first=True)])
                async for part in parts:
                    found.append(part)
                    if part.text or part.finish_reason:
                        choice = self._body.delta(part.text, part.finish_reason, is_first=False)
                        yield self._event(object_, [choice])
        except Exception as error:
            yield f"data: {json.dumps({'error': _refused(error).body['error']})}\n\n"
            return
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._event(object_, [], usage=_usage(found))
        yield "data: [DONE]\n\n"

    def _event(self, object_: str, choices: list[Any], **more: Any) -> str:
        return f"data: {json.dumps({**self._common, 'object': object_, 'choices': choices, **more})}\n\n"


async def _parts(request: CompletionRequest, gate: Gate, timer: IdleTimer) -> AsyncGenerator[CompletionPart]:
    """Yield the parts of a completion, which the replicas of `gate` generate.

    Raises _Refused with status 503 if `gate` has no replicas. Raises EngineBusy if `gate` gets other replicas, or
    none, before the completion ends. `timer`, which measures the time without requests, learns that a request is being
    answered.
    """
    with _in_use(timer):
        completer, yields = gate.completer, gate.yields
        if completer is None:
            raise _Refused(503, f"no engine completes prompts now; waiting for {gate.waits_for}", code="no_engine")
        if yields:  # such completions are not generated together, as each takes one of the places for requests
            async with gate.turn, aclosing(completer.complete(_yielding(request, yields=True))) as parts:
                async for part in parts:
                    _check(gate, completer)
                    timer.has_answered = True
                    yield part
            return
        async with aclosing(completer.complete(_yielding(request, yields=False))) as parts:
            async for part in parts:
                _check(gate, completer)
                timer.has_answered = True
                yield part


def _check(gate: Gate, completer: Completer) -> None:
    if gate.completer is not completer:
        raise EngineBusy(f"the engine is needed elsewhere; waiting for {gate.waits_for}")


def _yielding(request: CompletionRequest, *, yields: bool) -> CompletionRequest:
    return replace(request, yields=yields)


@contextmanager
def _in_use(timer: IdleTimer) -> Iterator[None]:
    timer.begin()
    try:
        yield
    finally:
        timer.end()


def _usage(parts: list[CompletionPart]) -> dict[str, int]:
    prompt, completion = parts[-1].prompt_tokens, sum(part.num_tokens for part in parts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _parsed(content: bytes, model: type[Any]) -> Any:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        shown = f"{param}: " if param else ""
        given = "" if first["type"] in ("missing", "json_invalid") else f"; given was {first['input']!r:.60}"
        raise _Refused(400, f"{shown}{first['msg']}{given}", param=param) from error


def _refused(error: Exception) -> _Refused:
    """Convert an error in answering a request to a refusal, which has an HTTP status and OpenAI's fields for errors."""
    match error:
        case _Refused():
            return error
        case NotFound():
            return _Refused(404, str(error), param="model", code="model_not_found")
        case InvalidPrompt():
            return _Refused(400, str(error), param=error.field)
        case EngineBusy():
            return _Refused(503, str(error), code="engine_busy")
        case EngineUnavailable():
            return _Refused(503, f"the replica that completed the prompt has failed: {error}", code="replica_lost")
        case WorkerError():
            return _Refused(400, f"the merge cannot complete prompts: {error}", param="model", code="merge_failed")
        case _:
            raise error


def _refusal(error: Exception) -> Response:
    refused = _refused(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if refused.status == 503 else {}
    return JSONResponse(refused.body, refused.status, headers, media_type="application/problem+json")
