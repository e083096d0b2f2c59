"""The verbs that talk to a server: each sends requests, prints the result, and returns the command's exit code.

A study or fine-tuning is referred to by its id, a unique prefix of its id, or its name if only one has that name.
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

from search_spaces.study.yaml import read_document
from service.cli.finetune import training_text
from service.cli.terminal import console, print_export, print_json, print_json_line, print_results
from service.client import Client, Event
from service.errors import Conflict, ServerUnreachable
from service.studies.progress import ProgressSnapshot
from service.types import JobKind, JobState, TrialState

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from service.schemas.api import FinetuneDocument, StudyDocument

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

    def submit(self, file: Path, *, key: str | None, watch: bool) -> int:
        from workers.training.finetuning.fleet import is_pipeline

        submit = self._client.submit_finetune if is_pipeline(read_document(file)) else self._client.submit
        study = submit(file, idempotency_key=key)
        if watch:
            if self._as_json:
                print_json_line({"kind": "submitted", "id": None, "time": study["created_at"], "payload": study})
            return self._watch(study)
        if self._as_json:
            print_json(study)
        else:
            print(f"{_noun(study)} {study['name']}: {study['id']}, {study['state']}")
            print(f"follow it with `mergesearch watch {_short(study)}`")
        return 0

    def studies(self) -> int:
        from service.cli.tables import studies_table

        studies = self._client.studies()
        print_json(studies) if self._as_json else console().print(studies_table(studies))
        return 0

    def finetunes(self) -> int:
        from service.cli.finetune_tables import finetunes_table

        found = self._client.finetunes()
        print_json(found) if self._as_json else console().print(finetunes_table(found))
        return 0

    def show(self, reference: str) -> int:
        from service.cli.finetune_tables import finetune_table
        from service.cli.tables import study_table

        found = self._client.find(reference)
        if self._as_json:
            print_json(found)
        elif is_finetune(found):
            console().print(finetune_table(found, server=self._client.url))
        else:
            console().print(study_table(found, server=self._client.url))
        return 0

    def trials(self, reference: str) -> int:
        from service.cli.tables import trials_table

        study = self._study(reference)
        documents = self._client.trials(study["id"])
        if self._as_json:
            print_json(documents)
        else:
            objectives = self._client.pareto(study["id"])["objectives"]
            console().print(trials_table(documents, [objective["name"] for objective in objectives]))
        return 0

    def pareto(self, reference: str, *, prefer: Mapping[str, float] | None) -> int:
        from service.cli.tables import pareto_table

        document = self._client.pareto(self._study(reference)["id"], prefer=prefer)
        print_json(document) if self._as_json else console().print(pareto_table(document))
        return 0

    def export(
        self, reference: str, trial: str, out: Path, *, dtype: str | None, prefer: Mapping[str, float] | None
    ) -> int:
        study = self._client.find(reference)
        if is_finetune(study):
            return self._download(study, trial, out, dtype=dtype, prefer=prefer)
        number: int | str = int(trial) if trial.isascii() and trial.isdecimal() else trial
        chosen = None
        if prefer is not None:  # picked first, so that it can be told which trial it is
            chosen = self._client.pareto(study["id"], prefer=prefer)["preferred"]
            number = chosen["trial"]
        with _download_bar() as received:
            directory = self._client.export(study["id"], number, out, dtype=dtype, received=received)
        print_export(directory, chosen, as_json=self._as_json)
        return 0

    def _download(
        self,
        finetune: FinetuneDocument,
        expert: str,
        out: Path,
        *,
        dtype: str | None,
        prefer: Mapping[str, float] | None,
    ) -> int:
        experts = ", ".join(finetune["experts"])
        if dtype is not None or prefer is not None:
            raise Conflict(
                "--dtype and --prefer are for trials of studies; experts are downloaded as they were written"
            )
        if expert == "best" and "best" not in finetune["experts"] and len(finetune["experts"]) > 1:
            raise Conflict(f"fine-tuning {finetune['name']!r} has several experts; give one of {experts}")
        if expert == "best" and "best" not in finetune["experts"]:
            expert = experts
        with _download_bar() as received:
            directory = self._client.download(finetune, expert, out, received=received)
        print_json({"directory": str(directory)}) if self._as_json else print(f"expert: {directory}")
        return 0

    def cancel(self, reference: str) -> int:
        return self._tell_state(self._client.cancel(self._client.find(reference)))

    def resume(self, reference: str) -> int:
        return self._tell_state(self._client.resume(self._client.find(reference)))

    def _tell_state(self, found: StudyDocument | FinetuneDocument) -> int:
        text = f"{_noun(found)} {found['name']}: {found['id']}, {found['state']}"
        print_json(found) if self._as_json else print(text)
        return 0

    def _study(self, reference: str) -> StudyDocument:
        """Raises Conflict if it is a fine-tuning."""
        found = self._client.find(reference)
        if is_finetune(found):
            raise Conflict(
                f"{found['name']}: is a fine-tuning, which has no trials; `mergesearch show` has its experts"
            )
        return found

    def delete(self, reference: str) -> int:
        study = self._client.find(reference)
        self._client.delete(study)
        print_json({"deleted": study["id"]}) if self._as_json else print(f"deleted: {study['name']}: {study['id']}")
        return 0

    def log(self, reference: str) -> int:
        text = self._client.log(self._client.find(reference))
        print_json({"log": text}) if self._as_json else print(text, end="" if text.endswith("\n") else "\n")
        return 0

    def watch(self, reference: str) -> int:
        """Watch until the study ends. Returns 0 if it is COMPLETE, else 1."""
        return self._watch(self._client.find(reference))

    def _watch(self, study: StudyDocument | FinetuneDocument) -> int:
        try:
            if self._as_json:
                self._follow_as_json(study)
            elif is_finetune(study):
                self._follow_training(study)
            else:
                self._follow(study)
        except KeyboardInterrupt:
            print(
                f"{_noun(study)} {study['name']} continues on the server; `mergesearch watch {_short(study)}` shows it "
                f"again, `mergesearch cancel {_short(study)}` ends it",
                file=sys.stderr,
            )
            return INTERRUPTED
        if is_finetune(study):
            return self._tell_experts(self._client.finetune(study))
        ended = self._client.study(study["id"])
        summary = self._client.summary(study["id"])
        if self._as_json:
            print_json_line({"kind": "summary", "id": None, "time": None, "payload": summary})
        elif ended["state"] == JobState.COMPLETE:
            report = self._client.url + ended["links"]["report"]
            print_results(self._client.pareto(study["id"]), summary, report=report)
        else:
            reason = f": {ended['reason']}" if ended["reason"] else ""
            print(f"study {ended['name']}: {ended['state']}{reason}", file=sys.stderr)
        return 0 if ended["state"] == JobState.COMPLETE else 1

    def _tell_experts(self, ended: FinetuneDocument) -> int:
        is_complete = ended["state"] == JobState.COMPLETE
        if self._as_json:
            print_json_line({"kind": "finetune", "id": None, "time": None, "payload": ended})
        elif is_complete:
            for alias in ended["experts"]:
                print(f"{alias}: download it with `mergesearch export {_short(ended)} {alias} --out DIR`")
            print(f"report: {self._client.url}{ended['links']['report']}")
        else:
            reason = f": {ended['reason']}" if ended["reason"] else ""
            print(f"fine-tuning {ended['name']}: {ended['state']}{reason}", file=sys.stderr)
        return 0 if is_complete else 1

    def _follow_as_json(self, study: StudyDocument | FinetuneDocument) -> None:
        for event in self._client.events(study):
            print_json_line(asdict(event))

    def _follow_training(self, finetune: FinetuneDocument) -> None:
        waits = f", waits for {finetune['waiting_for']}" if finetune["waiting_for"] else ""
        print(f"fine-tuning {finetune['name']}: {finetune['id']}, {finetune['state']}{waits}", file=sys.stderr)
        for event in self._client.events(finetune):
            if text := _note(event, _noun(finetune)):
                print(f"{_clock_time(event.time)} {text}", file=sys.stderr, flush=True)

    def _follow(self, study: StudyDocument) -> None:
        from service.cli.progress import ProgressView

        with ProgressView(worked_s=study["wall_clock_s"]) as view:
            waits = f", waits for {study['waiting_for']}" if study["waiting_for"] else ""
            view.note(f"study {study['name']}: {study['id']}, {study['state']}{waits}")
            for event in self._client.events(study["id"]):
                if event.kind == "progress":
                    view.update(ProgressSnapshot.from_json(event.payload))
                elif text := _note(event, _noun(study)):
                    view.note(f"{_clock_time(event.time)} {text}")


def is_finetune(found: StudyDocument | FinetuneDocument) -> TypeIs[FinetuneDocument]:
    return "experts" in found


def _noun(found: StudyDocument | FinetuneDocument) -> str:
    return (JobKind.FINETUNE if is_finetune(found) else JobKind.SEARCH).noun


def _short(study: StudyDocument | FinetuneDocument) -> str:
    """A prefix of the id for people to type; long enough to be unlikely to collide."""
    return study["id"][:8]


def _clock_time(time: str | None) -> str:
    return "" if time is None else f"{datetime.fromisoformat(time).astimezone():%H:%M:%S}"


def _note(event: Event, noun: str) -> str | None:
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
        case "state" if payload["state"] != JobState.RUNNING:
            return f"the {noun} is {payload['state']}" + _because(payload["reason"])
        case "study":
            return f"study {payload['name']}: {payload['study']} merges the experts"
        case "analysis":
            return "the experts are analysed"
        case "training":
            return training_text(payload)
        case "waiting":
            return f"the {noun} waits; the server tries again automatically"
        case "job_refused":
            return f"Ray refused the {noun}'s job" + _because(payload["reason"])
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
