"""The blocking client of the server: it sends the HTTP requests that generators in other modules yield."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from service.client import finetune_flows, flows, job_flows, notification_flows, transport
from service.client.completions import ChunkReader, completion_call
from service.client.download import Received, check_free, counted, unpack
from service.client.events import PATIENCE_S, Event, EventReader, JobsEventReader, is_event_stream
from service.client.methods import blocking, named
from service.client.requests import AskedWaits, Call, Flow, Reference, Response, TransportError, refusal
from service.errors import ServerUnreachable

if TYPE_CHECKING:
    from service.schemas.api import FinetuneDocument, ServedStudyDocument

__all__ = ["Client"]

T = TypeVar("T")


@named
class Client:
    """Blocking client of one mergesearch server.

    A client is thread-safe. It is a context manager, which closes its connections at the end. Every call may raise
    RequestRefused (with the server's problem document), ServerUnreachable and InvalidAnswer.

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
        >>> with Client("http://gpu-box:8080") as client:
        ...     study = client.submit("study.yaml")
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
        self._patience_s = patience_s
        self._http = httpx.Client(
            timeout=transport.timeout(timeout_s), headers=transport.authorization(self.url, token)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def _repr_html_(self) -> str:
        return self._run(job_flows.overview(self.url))

    def close(self) -> None:
        """Close the client's connections."""
        self._http.close()

    submit_job = blocking(job_flows.submit_job)
    jobs = blocking(job_flows.jobs)
    job = blocking(job_flows.job)
    submit = blocking(flows.submit)
    studies = blocking(flows.studies)
    study = blocking(flows.study)
    find = blocking(job_flows.find)
    share = blocking(job_flows.share)
    me = blocking(job_flows.me)
    webhooks = blocking(notification_flows.webhooks)
    add_webhook = blocking(notification_flows.add_webhook)
    remove_webhook = blocking(notification_flows.remove_webhook)
    send_test = blocking(notification_flows.send_test)
    deliveries = blocking(notification_flows.deliveries)
    mail = blocking(notification_flows.mail)
    set_mail = blocking(notification_flows.set_mail)
    cancel = blocking(job_flows.cancel)
    resume = blocking(job_flows.resume)
    pause = blocking(job_flows.pause)
    edit = blocking(job_flows.edit)
    clone = blocking(job_flows.clone)
    stop = blocking(job_flows.stop)
    cluster = blocking(job_flows.cluster)
    queue = blocking(job_flows.queue)
    move = blocking(job_flows.move)
    delete = blocking(job_flows.delete)
    summary = blocking(flows.summary)
    benchmarks = blocking(flows.benchmarks)
    add_benchmarks = blocking(flows.add_benchmarks)
    pareto = blocking(flows.pareto)
    report = blocking(flows.report)
    log = blocking(job_flows.log)
    submit_finetune = blocking(finetune_flows.submit_finetune)
    finetunes = blocking(finetune_flows.finetunes)
    finetune = blocking(finetune_flows.finetune)
    curves = blocking(finetune_flows.curves)
    analysis = blocking(finetune_flows.analysis)
    check_study = blocking(flows.check_study)
    begin_study = blocking(flows.begin_study)
    models = blocking(flows.models)
    trials = blocking(flows.trials)
    trial = blocking(flows.trial)
    trial_columns = blocking(flows.trial_columns)
    plot = blocking(flows.plot)
    importance = blocking(flows.importance)
    samples = blocking(flows.samples)
    enqueue_trial = blocking(flows.enqueue_trial)
    serve = blocking(flows.serve)
    evaluate_trial = blocking(flows.evaluate_trial)
    set_validity = blocking(flows.set_validity)
    recipe = blocking(flows.recipe)
    mergekit = blocking(flows.mergekit)
    exports = blocking(flows.exports)
    delete_export = blocking(flows.delete_export)
    _finished_export = blocking(flows.finished_export)

    def events(self, study: Reference, *, after: int = 0) -> Iterator[Event]:
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
            >>> for event in client.events("5f0c..."):
            ...     print(event.kind, event.payload)
        """
        return self._streamed(EventReader(study, after=after, patience_s=self._patience_s))

    def all_events(self, *, after: int | None = None) -> Iterator[Event]:
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
            >>> for event in client.all_events():
            ...     print(event.job, event.kind, event.payload)
        """
        return self._streamed(JobsEventReader(after=after, patience_s=self._patience_s))

    def _streamed(self, reader: EventReader) -> Iterator[Event]:
        import httpx

        while not reader.has_ended:
            call = reader.call()
            try:
                with self._http.stream(**transport.request(self.url, call), timeout=transport.listening()) as response:
                    if response.status_code == 200 and is_event_stream(response.headers):
                        for data in response.iter_bytes():
                            yield from reader.feed(data)
                        content = b""
                    else:
                        content = response.read()
                    outcome: Response | TransportError = transport.reply(response, content)
            except httpx.RequestError as error:
                outcome = transport.lost(self.url, error)
            if not reader.has_ended:
                time.sleep(reader.pause_s(outcome))

    def complete(
        self,
        served: ServedStudyDocument,
        model: str | int,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
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
            >>> served = client.serve("5f0c...", 12)
            >>> for chunk in client.complete(served, 12, prompt="2+3=", max_tokens=8):
            ...     print(chunk["choices"][0]["text"], end="")
        """
        import httpx

        call = completion_call(served, model, prompt=prompt, messages=messages, options=options)
        reader = ChunkReader(self.url + call.path)
        try:
            with self._http.stream(**transport.request(self.url, call)) as response:
                if response.status_code != 200:
                    raise refusal(transport.reply(response, response.read()))
                for data in response.iter_bytes():
                    yield from reader.feed(data)
        except httpx.RequestError as error:
            raise ServerUnreachable(f"{self.url}{call.path}: was cut off: {transport.reason_of(error)}") from error
        reader.check_end()

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
        """Export the merged model of a trial on the server, and download it.

        The directory `out` appears complete or not at all.

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
            >>> client.export("5f0c...", "best", "merged", dtype="bfloat16")
            >>> client.export("5f0c...", "best", "merged", prefer={"math": 0.6, "code": 0.4})
        """
        check_free(Path(out))
        document = self._finished_export(study, trial, dtype=dtype, prefer=prefer)
        return self._fetch(flows.download(study, document), Path(out), document["bytes"], received, threading.Event())

    def download(
        self, finetune: str | FinetuneDocument, expert: str, out: Path | str, *, received: Received | None = None
    ) -> Path:
        """Download a trained expert of a fine-tuning, that is, a model that it has trained.

        The directory `out` appears complete or not at all.

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
            >>> client.download("5f0c...", "math", "experts/math")
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
        waits = AskedWaits(call, patience_s=PATIENCE_S)
        while True:
            try:
                with self._http.stream(**transport.request(self.url, call)) as response:
                    if response.status_code == 200:
                        chunks = counted(response.iter_bytes(), num_bytes, received, stop)
                        return unpack(chunks, out, num_bytes=num_bytes)
                    refused = refusal(transport.reply(response, response.read()))
            except httpx.RequestError as error:
                raise ServerUnreachable(
                    f"{self.url}{call.path}: the download was cut off: {transport.reason_of(error)}"
                ) from error
            if stop.wait(waits.next_s(refused)):
                raise InterruptedError("the download was cancelled")

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
            response = self._http.request(**transport.request(self.url, call))
            return transport.reply(response, response.content)
        except httpx.RequestError as error:
            return transport.lost(self.url, error)
