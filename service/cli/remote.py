"""The verbs that talk to a server: each sends requests, prints the result, and returns the command's exit code.

A study is referred to by its id, a unique prefix of its id, or its name if only one study has that name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.terminal import console, print_export, print_json, print_json_line, print_results
from service.client import Client, Event
from service.errors import ServerUnreachable
from service.studies.progress import ProgressSnapshot
from service.types import StudyState, TrialState

if TYPE_CHECKING:
    from service.schemas.api import StudyDocument

__all__ = ["DEFAULT_SERVER", "SERVER_VARIABLE", "ServerVerbs", "server_verbs"]

DEFAULT_SERVER = "http://127.0.0.1:8080"
SERVER_VARIABLE = "MERGESEARCH_SERVER"

INTERRUPTED = 130


@contextmanager
def server_verbs(server: str | None, *, as_json: bool, no_directory: str | None = None) -> Iterator[ServerVerbs]:
    """The verbs on the server at `server`, else at $MERGESEARCH_SERVER, else at the default address.

    `no_directory` is an argument that could name a run's directory but does not, for the error message. Raises NotFound
    (invalid address) and ServerUnreachable."""
    url = server or os.environ.get(SERVER_VARIABLE)
    with Client(url or DEFAULT_SERVER) as client:
        try:
            yield ServerVerbs(client, as_json=as_json)
        except ServerUnreachable as error:
            hints = [str(error)]
            if url is None:
                hints.append(
                    f"that is the default address: give --server URL or set {SERVER_VARIABLE}, "
                    "or start a server with `mergesearch serve`"
                )
            if no_directory is not None:
                hints.append(f"there is no directory {no_directory!r} either")
            raise ServerUnreachable("; ".join(hints)) from error


class ServerVerbs:
    """One method per verb. Results go to standard output, progress and messages to standard error."""

    def __init__(self, client: Client, *, as_json: bool) -> None:
        self._client = client
        self._as_json = as_json

    def submit(self, study_file: Path, *, key: str | None, watch: bool) -> int:
        study = self._client.submit(study_file, idempotency_key=key)
        if watch:
            if self._as_json:
                print_json_line({"kind": "submitted", "id": None, "time": study["created_at"], "payload": study})
            return self._watch(study)
        if self._as_json:
            print_json(study)
        else:
            print(f"study {study['name']}: {study['id']}, {study['state']}")
            print(f"follow it with `mergesearch watch {_short(study)}`")
        return 0

    def studies(self) -> int:
        from service.cli.tables import studies_table

        studies = self._client.studies()
        print_json(studies) if self._as_json else console().print(studies_table(studies))
        return 0

    def show(self, reference: str) -> int:
        from service.cli.tables import study_table

        study = self._client.find(reference)
        print_json(study) if self._as_json else console().print(study_table(study, server=self._client.url))
        return 0

    def trials(self, reference: str) -> int:
        from service.cli.tables import trials_table

        study = self._client.find(reference)
        documents = self._client.trials(study["id"])
        if self._as_json:
            print_json(documents)
        else:
            objectives = self._client.pareto(study["id"])["objectives"]
            console().print(trials_table(documents, [objective["name"] for objective in objectives]))
        return 0

    def pareto(self, reference: str, *, prefer: Mapping[str, float] | None) -> int:
        from service.cli.tables import pareto_table

        document = self._client.pareto(self._client.find(reference)["id"], prefer=prefer)
        print_json(document) if self._as_json else console().print(pareto_table(document))
        return 0

    def export(
        self, reference: str, trial: str, out: Path, *, dtype: str | None, prefer: Mapping[str, float] | None
    ) -> int:
        study = self._client.find(reference)
        number: int | str = int(trial) if trial.isascii() and trial.isdecimal() else trial
        chosen = None
        if prefer is not None:  # picked first, so that it can be told which trial it is
            chosen = self._client.pareto(study["id"], prefer=prefer)["preferred"]
            number = chosen["trial"]
        with _download_bar() as received:
            directory = self._client.export(study["id"], number, out, dtype=dtype, received=received)
        print_export(directory, chosen, as_json=self._as_json)
        return 0

    def cancel(self, reference: str) -> int:
        return self._tell_state(self._client.cancel(self._client.find(reference)["id"]))

    def resume(self, reference: str) -> int:
        return self._tell_state(self._client.resume(self._client.find(reference)["id"]))

    def _tell_state(self, study: StudyDocument) -> int:
        print_json(study) if self._as_json else print(f"study {study['name']}: {study['id']}, {study['state']}")
        return 0

    def delete(self, reference: str) -> int:
        study = self._client.find(reference)
        self._client.delete(study["id"])
        print_json({"deleted": study["id"]}) if self._as_json else print(f"deleted: {study['name']}: {study['id']}")
        return 0

    def log(self, reference: str) -> int:
        text = self._client.log(self._client.find(reference)["id"])
        print_json({"log": text}) if self._as_json else print(text, end="" if text.endswith("\n") else "\n")
        return 0

    def watch(self, reference: str) -> int:
        """Watch until the study ends. Returns 0 if it is COMPLETE, else 1."""
        return self._watch(self._client.find(reference))

    def _watch(self, study: StudyDocument) -> int:
        try:
            self._follow_as_json(study) if self._as_json else self._follow(study)
        except KeyboardInterrupt:
            print(
                f"study {study['name']} continues on the server; `mergesearch watch {_short(study)}` shows it again, "
                f"`mergesearch cancel {_short(study)}` ends it",
                file=sys.stderr,
            )
            return INTERRUPTED
        ended = self._client.study(study["id"])
        summary = self._client.summary(study["id"])
        if self._as_json:
            print_json_line({"kind": "summary", "id": None, "time": None, "payload": summary})
        elif ended["state"] == StudyState.COMPLETE:
            report = self._client.url + ended["links"]["report"]
            print_results(self._client.pareto(study["id"]), summary, report=report)
        else:
            reason = f": {ended['reason']}" if ended["reason"] else ""
            print(f"study {ended['name']}: {ended['state']}{reason}", file=sys.stderr)
        return 0 if ended["state"] == StudyState.COMPLETE else 1

    def _follow_as_json(self, study: StudyDocument) -> None:
        for event in self._client.events(study["id"]):
            print_json_line(asdict(event))

    def _follow(self, study: StudyDocument) -> None:
        from service.cli.progress import ProgressView

        with ProgressView(worked_s=study["wall_clock_s"]) as view:
            waits = f", waits for {study['waiting_for']}" if study["waiting_for"] else ""
            view.note(f"study {study['name']}: {study['id']}, {study['state']}{waits}")
            for event in self._client.events(study["id"]):
                if event.kind == "progress":
                    view.update(ProgressSnapshot.from_json(event.payload))
                elif text := _note(event):
                    view.note(f"{_clock_time(event.time)} {text}")


def _short(study: StudyDocument) -> str:
    """A prefix of the id for people to type; long enough to be unlikely to collide."""
    return study["id"][:8]


def _clock_time(time: str | None) -> str:
    return "" if time is None else f"{datetime.fromisoformat(time).astimezone():%H:%M:%S}"


def _note(event: Event) -> str | None:
    """The message shown for an event, or None if the progress already shows it or users do not need it."""
    payload = event.payload
    match event.kind:
        case "attempt":
            return f"attempt {payload['attempt']}" + _because(payload["because"])
        case "replica":
            return f"engine {payload['replica']} ({payload['engine']}) scores for the study"
        case "crash":
            return f"trial {payload['trial']}: its engine crashed" + _because(payload["reason"])
        case "actors":
            return str(payload["reason"])
        case "state" if payload["state"] != StudyState.RUNNING:
            return f"the study is {payload['state']}" + _because(payload["reason"])
        case "waiting":
            return "the study waits; the server tries again automatically"
        case "job_refused":
            return "Ray refused the study's job" + _because(payload["reason"])
        case "trial_state" if payload["state"] == TrialState.FAIL:
            return f"trial {payload['trial']} failed" + _because(payload["reason"])
        case "engine_fault":
            return f"{payload['samples']} samples are scored again" + _because("; ".join(payload["replicas"].values()))
        case "search_note":
            return str(payload["text"])
        case "search_ended":
            return "the search has ended" + _because(payload["reason"])
        case "holdout_started":
            return f"held-out data: {len(payload['trials'])} trials"
        case "holdout_failed":
            return f"trial {payload['trial']} failed on held-out data" + _because(payload["reason"])
        case "out_of_range":
            return f"trial {payload['trial']}: {payload['message']}"
        case _:
            return None


def _because(reason: Any) -> str:
    return f": {reason}" if reason else ""


@contextmanager
def _download_bar() -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar on standard error if that is a terminal; yields the callback for bytes received."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("the server is writing the model", total=None)

        def received(count: int, total: int | None) -> None:
            # The archive is somewhat larger than the files in it.
            bar.update(task, completed=min(count, total or count), total=total, description="download")

        yield received
