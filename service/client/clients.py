"""The two clients, one blocking and one awaited: they run what `flows`, `events` and `download` describe."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from service.client import finetune_flows, flows
from service.client.download import check_free, unpack
from service.client.events import SILENCE_S, Event, EventReader
from service.client.requests import Call, Flow, Reference, Response, TransportError, refusal
from service.errors import NotFound, ServerUnreachable

if TYPE_CHECKING:
    import httpx

    from service.schemas.api import FinetuneDocument

__all__ = ["AsyncClient", "Client"]

P = ParamSpec("P")
T = TypeVar("T")

CONNECT_S = 10.0

# How long one response may take: a server that checks a study reads the headers of all its models.
TIMEOUT_S = 300.0

# How long `events` tries to reconnect to a server that has responded before.
PATIENCE_S = 600.0

Received = Callable[[int, int | None], None]
"""Called during a download: bytes received so far, and the total of all files, if known."""


def _described(method: T, flow: Callable[..., Any]) -> T:
    """`method`, with the name, signature and docstring of the flow that it runs, so that `help` shows them."""
    signature = inspect.signature(flow)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
    result = str(signature.return_annotation).removeprefix("Flow[").removesuffix("]")
    described: Any = method
    described.__name__ = described.__qualname__ = flow.__name__
    described.__doc__ = flow.__doc__
    described.__signature__ = signature.replace(parameters=parameters, return_annotation=result)
    return method


def _blocking(flow: Callable[P, Flow[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(flow(*args, **kwargs))

    return _described(method, flow)


def _awaited(flow: Callable[P, Flow[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._run(flow(*args, **kwargs))

    return _described(method, flow)


class Client:
    """A blocking client of one server. Thread-safe. Use as a context manager, or close it.

        with Client("http://gpu-box:8080") as client:
            study = client.submit("study.yaml")

    `timeout_s` is how long one response may take, `patience_s` how long `events` tries to reconnect to a lost server.
    Raises NotFound if `url` is not an address. Every call may raise RequestRefused (with the server's problem
    document), ServerUnreachable and InvalidAnswer.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S) -> None:
        import httpx

        self.url = _address(url)
        self._patience_s = patience_s
        self._http = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=CONNECT_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    submit = _blocking(flows.submit)
    studies = _blocking(flows.studies)
    study = _blocking(flows.study)
    find = _blocking(flows.find)
    cancel = _blocking(flows.cancel)
    resume = _blocking(flows.resume)
    delete = _blocking(flows.delete)
    summary = _blocking(flows.summary)
    pareto = _blocking(flows.pareto)
    report = _blocking(flows.report)
    log = _blocking(flows.log)
    submit_finetune = _blocking(finetune_flows.submit_finetune)
    finetunes = _blocking(finetune_flows.finetunes)
    finetune = _blocking(finetune_flows.finetune)
    curves = _blocking(finetune_flows.curves)
    analysis = _blocking(finetune_flows.analysis)
    trials = _blocking(flows.trials)
    trial = _blocking(flows.trial)
    recipe = _blocking(flows.recipe)
    exports = _blocking(flows.exports)
    delete_export = _blocking(flows.delete_export)
    _finished_export = _blocking(flows.finished_export)

    def events(self, study: Reference, *, after: int = 0) -> Iterator[Event]:
        """The events of a study or fine-tuning, from the first or from the one after id `after`, until it has ended.

            for event in client.events("5f0c..."):
                print(event.kind, event.payload)

        A lost connection is reopened, also to a restarted server; no event is missed or repeated.
        """
        import httpx

        reader = EventReader(study, after=after, patience_s=self._patience_s)
        while not reader.has_ended:
            call = reader.call()
            try:
                with self._http.stream(**_request(self.url, call), timeout=_listening()) as response:
                    if response.status_code == 200:
                        for data in response.iter_bytes():
                            yield from reader.feed(data)
                        content = b""
                    else:
                        content = response.read()
                    outcome: Response | TransportError = _reply(response, content)
            except httpx.RequestError as error:
                outcome = _lost(self.url, error)
            if not reader.has_ended:
                time.sleep(reader.pause_s(outcome))

    def export(
        self,
        study: str,
        trial: str | int,
        out: Path | str,
        *,
        dtype: str | None = None,
        prefer: Mapping[str, float] | None = None,
        received: Received | None = None,
    ) -> Path:
        """Export the merged model of a trial ("best" or its number), download it to the new directory `out` and return
        `out`.

            client.export("5f0c...", "best", "merged", dtype="bfloat16")
            client.export("5f0c...", "best", "merged", prefer={"math": 0.6, "code": 0.4})

        `dtype` None is the dtype that the study's engine scored in. `prefer` are weights of the objectives that sum to
        one: they pick a trial of the front (`pareto` says which) in place of the best. The directory appears complete
        or not at all.
        Raises Conflict (`out` exists, its disk is too small), ExportFailed, InvalidAnswer (the download is incomplete).
        """
        check_free(Path(out))
        document = self._finished_export(study, trial, dtype=dtype, prefer=prefer)
        return self._fetch(flows.download(study, document), Path(out), document["bytes"], received, threading.Event())

    def download(
        self, finetune: str | FinetuneDocument, expert: str, out: Path | str, *, received: Received | None = None
    ) -> Path:
        """Download a trained expert of a fine-tuning to the new directory `out` and return `out`.

            client.download("5f0c...", "math", "experts/math")

        The directory appears complete or not at all. Raises NotFound (no such expert), Conflict (it is not trained yet,
        `out` exists, its disk is too small), InvalidAnswer (the download is incomplete).
        """
        check_free(Path(out))
        document = self.finetune(finetune)
        call, size = finetune_flows.expert_download(document, expert), document["experts"][expert]["bytes"]
        return self._fetch(call, Path(out), size, received, threading.Event())

    def _fetch(
        self, call: Call, out: Path, num_bytes: int | None, received: Received | None, stop: threading.Event
    ) -> Path:
        import httpx

        check_free(out, num_bytes)
        try:
            with self._http.stream(**_request(self.url, call)) as response:
                if response.status_code != 200:
                    raise refusal(_reply(response, response.read()))
                return unpack(_counted(response.iter_bytes(), num_bytes, received, stop), out, num_bytes=num_bytes)
        except httpx.RequestError as error:
            raise ServerUnreachable(f"{self.url}{call.path}: the download was cut off: {_why(error)}") from error

    def _run(self, flow: Flow[T]) -> T:
        outcome: Response | TransportError | None = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = None
            if isinstance(step, Call):
                outcome = self._send(step)
            else:
                time.sleep(step)

    def _send(self, call: Call) -> Response | TransportError:
        import httpx

        try:
            response = self._http.request(**_request(self.url, call))
            return _reply(response, response.content)
        except httpx.RequestError as error:
            return _lost(self.url, error)


class AsyncClient:
    """An asynchronous client of one server: the methods of `Client`, each awaited, and `events` with `async for`.

    async with AsyncClient("http://gpu-box:8080") as client:
        study = await client.submit("study.yaml")
        async for event in client.events(study["id"]):
            print(event.kind, event.payload)
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S) -> None:
        import httpx

        self.url = _address(url)
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=CONNECT_S))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    submit = _awaited(flows.submit)
    studies = _awaited(flows.studies)
    study = _awaited(flows.study)
    find = _awaited(flows.find)
    cancel = _awaited(flows.cancel)
    resume = _awaited(flows.resume)
    delete = _awaited(flows.delete)
    summary = _awaited(flows.summary)
    pareto = _awaited(flows.pareto)
    report = _awaited(flows.report)
    log = _awaited(flows.log)
    submit_finetune = _awaited(finetune_flows.submit_finetune)
    finetunes = _awaited(finetune_flows.finetunes)
    finetune = _awaited(finetune_flows.finetune)
    curves = _awaited(finetune_flows.curves)
    analysis = _awaited(finetune_flows.analysis)
    trials = _awaited(flows.trials)
    trial = _awaited(flows.trial)
    recipe = _awaited(flows.recipe)
    exports = _awaited(flows.exports)
    delete_export = _awaited(flows.delete_export)
    _finished_export = _awaited(flows.finished_export)

    async def events(self, study: Reference, *, after: int = 0) -> AsyncIterator[Event]:
        """As `Client.events`.

        async for event in client.events("5f0c..."):
            print(event.kind, event.payload)
        """
        import httpx

        reader = EventReader(study, after=after, patience_s=self._patience_s)
        while not reader.has_ended:
            call = reader.call()
            try:
                async with self._http.stream(**_request(self.url, call), timeout=_listening()) as response:
                    if response.status_code == 200:
                        async for data in response.aiter_bytes():
                            for event in reader.feed(data):
                                yield event
                        content = b""
                    else:
                        content = await response.aread()
                    outcome: Response | TransportError = _reply(response, content)
            except httpx.RequestError as error:
                outcome = _lost(self.url, error)
            if not reader.has_ended:
                await asyncio.sleep(reader.pause_s(outcome))

    async def export(
        self,
        study: str,
        trial: str | int,
        out: Path | str,
        *,
        dtype: str | None = None,
        prefer: Mapping[str, float] | None = None,
        received: Received | None = None,
    ) -> Path:
        """As `Client.export`; files are written, and `received` is called, in a thread."""
        check_free(Path(out))
        document = await self._finished_export(study, trial, dtype=dtype, prefer=prefer)
        return await self._fetched(flows.download(study, document), Path(out), document["bytes"], received)

    async def download(
        self, finetune: str | FinetuneDocument, expert: str, out: Path | str, *, received: Received | None = None
    ) -> Path:
        """As `Client.download`; files are written, and `received` is called, in a thread."""
        check_free(Path(out))
        document = await self.finetune(finetune)
        call, size = finetune_flows.expert_download(document, expert), document["experts"][expert]["bytes"]
        return await self._fetched(call, Path(out), size, received)

    async def _fetched(self, call: Call, out: Path, num_bytes: int | None, received: Received | None) -> Path:
        stop = threading.Event()
        try:
            with Client(self.url, timeout_s=self._timeout_s) as client:
                return await asyncio.to_thread(client._fetch, call, out, num_bytes, received, stop)
        except asyncio.CancelledError:
            stop.set()
            raise

    async def _run(self, flow: Flow[T]) -> T:
        outcome: Response | TransportError | None = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = None
            if isinstance(step, Call):
                outcome = await self._send(step)
            else:
                await asyncio.sleep(step)

    async def _send(self, call: Call) -> Response | TransportError:
        import httpx

        try:
            response = await self._http.request(**_request(self.url, call))
            return _reply(response, response.content)
        except httpx.RequestError as error:
            return _lost(self.url, error)


# -- what both do ------------------------------------------------------------------------------------------------------


def _address(url: str) -> str:
    """The address without a trailing slash, http by default. Raises NotFound if it is not an address."""
    import httpx

    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL:
        parsed = httpx.URL()
    is_whole = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 1) < 2**16
    if not is_whole or parsed.query or parsed.fragment:
        raise NotFound(f"server {url!r}: is not an address; write http://HOST:PORT")
    return str(parsed).rstrip("/")


def _request(url: str, call: Call) -> dict[str, Any]:
    return {
        "method": call.method,
        "url": url + call.path,
        "params": dict(call.query) or None,
        "headers": dict(call.headers),
        "content": call.content,
    }


def _listening() -> httpx.Timeout:
    import httpx

    return httpx.Timeout(SILENCE_S, connect=CONNECT_S)


def _reply(response: httpx.Response, content: bytes) -> Response:
    return Response(str(response.url), response.status_code, response.headers, content)


def _lost(url: str, error: httpx.RequestError) -> TransportError:
    import httpx

    was_there = isinstance(error, httpx.ReadError | httpx.WriteError | httpx.CloseError | httpx.RemoteProtocolError)
    return TransportError(url, _why(error), was_cut=was_there)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _counted(
    chunks: Iterator[bytes], num_bytes: int | None, received: Received | None, stop: threading.Event
) -> Iterator[bytes]:
    count = 0
    for chunk in chunks:
        if stop.is_set():
            raise InterruptedError("the download was cancelled")
        count += len(chunk)
        if received is not None:
            received(count, num_bytes)
        yield chunk
