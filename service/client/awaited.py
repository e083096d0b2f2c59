"""The asynchronous client of the server, with the same methods as the blocking client, as coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from service.client import finetune_flows, flows, job_flows, notification_flows, transport, views
from service.client.blocking import Client
from service.client.completions import ChunkReader, completion_call
from service.client.download import Received, check_free
from service.client.events import PATIENCE_S, Event, EventReader, JobsEventReader, is_event_stream
from service.client.methods import awaited, named
from service.client.requests import Call, Flow, Reference, Response, TransportError, refusal
from service.errors import ServerUnreachable

if TYPE_CHECKING:
    from service.schemas.api import FinetuneDocument, ServedStudyDocument

__all__ = ["AsyncClient"]

T = TypeVar("T")


@named
class AsyncClient:
    """Asynchronous client of one mergesearch server.

    The client has the methods of `Client`, as coroutines. Events are read with `async for`. The client is an
    asynchronous context manager, which closes its connections at the end. Every call may raise RequestRefused (with the
    server's problem document), ServerUnreachable and InvalidAnswer.

    Args:
        url: Address of the server. An address without a scheme, such as `gpu-box:8080`, means http.
        token: API token. The default is the value of the variable MERGESEARCH_TOKEN, else the token that `mergesearch
            login` stored for this address, else no token.
        timeout_s: Seconds that the response to one request may take.
        patience_s: Seconds for which `events` tries to reconnect to a server that has responded before.

    Raises:
        NotFound: `url` is not an address.
        Conflict: `token` is not printable ASCII, or the file of stored tokens cannot be used.

    Examples:
        >>> async with AsyncClient("http://gpu-box:8080") as client:
        ...     study = await client.submit("study.yaml")
        ...     async for event in client.events(study["id"]):
        ...         print(event.kind, event.payload)
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = transport.TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        import httpx

        self.url = transport.address(url)
        self._token = token
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            timeout=transport.timeout(timeout_s), headers=transport.authorization(self.url, token)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    def _repr_html_(self) -> str:
        return views.overview(self.url, {})

    async def aclose(self) -> None:
        """Close the client's connections."""
        await self._http.aclose()

    submit_job = awaited(job_flows.submit_job)
    jobs = awaited(job_flows.jobs)
    job = awaited(job_flows.job)
    submit = awaited(flows.submit)
    studies = awaited(flows.studies)
    study = awaited(flows.study)
    find = awaited(job_flows.find)
    share = awaited(job_flows.share)
    me = awaited(job_flows.me)
    webhooks = awaited(notification_flows.webhooks)
    add_webhook = awaited(notification_flows.add_webhook)
    remove_webhook = awaited(notification_flows.remove_webhook)
    send_test = awaited(notification_flows.send_test)
    deliveries = awaited(notification_flows.deliveries)
    mail = awaited(notification_flows.mail)
    set_mail = awaited(notification_flows.set_mail)
    cancel = awaited(job_flows.cancel)
    resume = awaited(job_flows.resume)
    pause = awaited(job_flows.pause)
    edit = awaited(job_flows.edit)
    clone = awaited(job_flows.clone)
    stop = awaited(job_flows.stop)
    cluster = awaited(job_flows.cluster)
    queue = awaited(job_flows.queue)
    move = awaited(job_flows.move)
    delete = awaited(job_flows.delete)
    summary = awaited(flows.summary)
    benchmarks = awaited(flows.benchmarks)
    add_benchmarks = awaited(flows.add_benchmarks)
    pareto = awaited(flows.pareto)
    report = awaited(flows.report)
    log = awaited(job_flows.log)
    submit_finetune = awaited(finetune_flows.submit_finetune)
    finetunes = awaited(finetune_flows.finetunes)
    finetune = awaited(finetune_flows.finetune)
    curves = awaited(finetune_flows.curves)
    analysis = awaited(finetune_flows.analysis)
    check_study = awaited(flows.check_study)
    begin_study = awaited(flows.begin_study)
    models = awaited(flows.models)
    trials = awaited(flows.trials)
    trial = awaited(flows.trial)
    trial_columns = awaited(flows.trial_columns)
    plot = awaited(flows.plot)
    importance = awaited(flows.importance)
    samples = awaited(flows.samples)
    enqueue_trial = awaited(flows.enqueue_trial)
    serve = awaited(flows.serve)
    evaluate_trial = awaited(flows.evaluate_trial)
    set_validity = awaited(flows.set_validity)
    recipe = awaited(flows.recipe)
    mergekit = awaited(flows.mergekit)
    exports = awaited(flows.exports)
    delete_export = awaited(flows.delete_export)
    _finished_export = awaited(flows.finished_export)

    async def events(self, study: Reference, *, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events of a job until the job has ended.

        A lost connection is reopened, also to a restarted server. No event is missed or repeated.

        Args:
            study: Id of a study, or a document that the server returned for a job of any kind.
            after: Id of the last event that is already known; 0 starts with the first event.

        Yields:
            Stored events in order of their ids, and "progress" events, which describe the current state. The last
            event has the kind "end".

        Raises:
            RequestRefused: The server has no such job.
            ServerUnreachable: The first connection failed, or no connection was made for the client's
                `patience_s` seconds.
            InvalidAnswer: The response is not an event stream of a mergesearch server.

        Examples:
            >>> async for event in client.events("5f0c..."):
            ...     print(event.kind, event.payload)
        """
        async for event in self._streamed(EventReader(study, after=after, patience_s=self._patience_s)):
            yield event

    async def all_events(self, *, after: int | None = None) -> AsyncIterator[Event]:
        """Yield the state changes and progress of all jobs that you may read, without end.

        A lost connection is reopened, also to a restarted server. No event is missed or repeated.

        Args:
            after: Id of the last event that is already known; None starts with new events.

        Yields:
            Stored events, and events without an id: "progress" of a job, "added" for a job that you may read from now
            on, and "removed" for a job that was deleted or that you may no longer read. Each event names its job.

        Raises:
            ServerUnreachable: The first connection failed, or no connection was made for the client's
                `patience_s` seconds.
            InvalidAnswer: The response is not an event stream of a mergesearch server.

        Examples:
            >>> async for event in client.all_events():
            ...     print(event.job, event.kind, event.payload)
        """
        async for event in self._streamed(JobsEventReader(after=after, patience_s=self._patience_s)):
            yield event

    async def _streamed(self, reader: EventReader) -> AsyncIterator[Event]:
        import httpx

        while not reader.has_ended:
            call = reader.call()
            try:
                async with self._http.stream(
                    **transport.request(self.url, call), timeout=transport.listening()
                ) as response:
                    if response.status_code == 200 and is_event_stream(response.headers):
                        async for data in response.aiter_bytes():
                            for event in reader.feed(data):
                                yield event
                        content = b""
                    else:
                        content = await response.aread()
                    outcome: Response | TransportError = transport.reply(response, content)
            except httpx.RequestError as error:
                outcome = transport.lost(self.url, error)
            if not reader.has_ended:
                await asyncio.sleep(reader.pause_s(outcome))

    async def complete(
        self,
        served: ServedStudyDocument,
        model: str | int,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """Complete a text, or answer a chat, with the merge of a trial, and yield the parts as they are generated.

        Programs may use OpenAI's own client instead, at the link `openai` of `served`.

        Args:
            served: The server's document of the served study, from the method `serve`.
            model: Number of a trial, or label of a baseline, such as "base".
            prompt: Text to complete; only without `messages`.
            messages: Messages of a chat, each with the keys "role" and "content".
            **options: Further fields of the request, such as `max_tokens`, `temperature`, `stop` and `seed`.

        Yields:
            Chunks in the form of OpenAI's API; `system_fingerprint` is the digest of the recipe.

        Raises:
            RequestRefused: A field is wrong, serving has ended (status 410), or there is no engine now (503).
            ServerUnreachable: The connection was lost.
            InvalidAnswer: The stream ended too early.

        Examples:
            >>> served = await client.serve("5f0c...", 12)
            >>> async for chunk in client.complete(served, 12, prompt="2+3=", max_tokens=8):
            ...     print(chunk["choices"][0]["text"], end="")
        """
        import httpx

        call = completion_call(served, model, prompt=prompt, messages=messages, options=options)
        reader = ChunkReader(self.url + call.path)
        try:
            async with self._http.stream(**transport.request(self.url, call)) as response:
                if response.status_code != 200:
                    raise refusal(transport.reply(response, await response.aread()))
                async for data in response.aiter_bytes():
                    for chunk in reader.feed(data):
                        yield chunk
        except httpx.RequestError as error:
            raise ServerUnreachable(f"{self.url}{call.path}: was cut off: {transport.reason_of(error)}") from error
        reader.check_end()

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
        """Export the merged model of a trial on the server, and download it.

        The directory `out` appears complete or not at all. Files are written, and `received` is called, in a separate
        thread.

        Args:
            study: Id of the study.
            trial: Number of the trial, or "best".
            out: New directory for the model.
            dtype: Dtype of the weights, such as "bfloat16"; None means the dtype in which the study scored its merges.
            prefer: Weights of the objectives, which sum to 1. The trial of the Pareto front that is best by these
                weights is exported; `trial` must be "best" then. The method `pareto` with the same `prefer` says which
                trial this is.
            received: Called with the bytes received so far and the total number of bytes (None while unknown).

        Returns:
            `out`.

        Raises:
            Conflict: `out` exists, or its disk is too small.
            ExportFailed: The server could not write the model.
            InvalidAnswer: The download is incomplete.

        Examples:
            >>> await client.export("5f0c...", "best", "merged", dtype="bfloat16")
            >>> await client.export("5f0c...", "best", "merged", prefer={"math": 0.6, "code": 0.4})
        """
        check_free(Path(out))
        document = await self._finished_export(study, trial, dtype=dtype, prefer=prefer)
        return await self._fetched(flows.download(study, document), Path(out), document["bytes"], received)

    async def download(
        self, finetune: str | FinetuneDocument, expert: str, out: Path | str, *, received: Received | None = None
    ) -> Path:
        """Download a trained expert of a fine-tuning, that is, a model that it has trained.

        The directory `out` appears complete or not at all. Files are written, and `received` is called, in a separate
        thread.

        Args:
            finetune: Id of the fine-tuning, or a document that the server returned for it.
            expert: Name (alias) of the expert in the specification of the fine-tuning.
            out: New directory for the expert.
            received: Called with the bytes received so far and the total number of bytes (None while unknown).

        Returns:
            `out`.

        Raises:
            NotFound: The fine-tuning has no such expert.
            Conflict: The expert is not trained yet, `out` exists, or its disk is too small.
            InvalidAnswer: The download is incomplete.

        Examples:
            >>> await client.download("5f0c...", "math", "experts/math")
        """
        check_free(Path(out))
        document = await self.finetune(finetune)
        call, size = finetune_flows.expert_download(document, expert), document["experts"][expert]["bytes"]
        return await self._fetched(call, Path(out), size, received)

    async def _fetched(self, call: Call, out: Path, num_bytes: int | None, received: Received | None) -> Path:
        stop = threading.Event()
        try:
            with Client(self.url, token=self._token, timeout_s=self._timeout_s, patience_s=self._patience_s) as client:
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
            response = await self._http.request(**transport.request(self.url, call))
            return transport.reply(response, response.content)
        except httpx.RequestError as error:
            return transport.lost(self.url, error)
