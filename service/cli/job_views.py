"""Terminal displays of a server's jobs: `JobView` for any kind of job, and subclasses for kinds that show more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.table import Table

from search_spaces.errors import InvalidPreference
from service.cli.finetune import training_text
from service.cli.progress import ProgressView
from service.cli.terminal import print_export, print_json, print_json_line, print_results
from service.client import Client, Event
from service.client.requests import path_of_link
from service.errors import Conflict
from service.jobs.base import JobKind
from service.jobs.finetune.kind import FINETUNE
from service.jobs.registry import kind_of
from service.jobs.search.kind import SEARCH
from service.jobs.search.progress import ProgressSnapshot
from service.types import JobState, TrialState

if TYPE_CHECKING:
    from service.schemas.files import ParetoDocument

__all__ = ["JobView", "short_id", "view_of"]

Job = Mapping[str, Any]
"""A job as the server describes it."""


class JobView:
    """Printer of a server's jobs of one kind: results go to standard output, progress to standard error.

    `kind` is the kind of job, and `client` is the client of the server. If `as_json` is True, results are JSON.
    Subclasses, such as `StudyView`, print more about the jobs of one kind.
    """

    def __init__(self, kind: JobKind, client: Client, *, as_json: bool) -> None:
        self._kind = kind
        self._client = client
        self._as_json = as_json

    def list_table(self, jobs: Sequence[Any]) -> Table:
        """Terminal table of the given jobs, one row each."""
        from service.cli.tables import jobs_table

        return jobs_table(jobs, noun=self._kind.noun, title=self._kind.plural.capitalize())

    def table(self, job: Any) -> Table:
        """Terminal table of one job's fields, such as name, state and links."""
        from service.cli.tables import job_table

        return job_table(job, noun=self._kind.noun, server=self._client.url)

    def follow(self, job: Any) -> None:
        """Print the events of a job as they happen, and return when the job has ended."""
        print(self._begin(job), file=sys.stderr)
        for event in self._client.events(job):
            if text := event_text(event, self._kind.noun):
                print(f"{_clock_time(event.time)} {text}", file=sys.stderr, flush=True)

    def show_end(self, job: Any) -> None:
        """Print how a job has ended, and its results if the job has results."""
        if self._as_json:
            print_json_line({"kind": self._kind.name, "id": None, "time": None, "payload": job})
        else:
            reason = f": {job['reason']}" if job["reason"] else ""
            print(f"{self._kind.noun} {job['name']}: {job['state']}{reason}", file=sys.stderr)

    def export(self, job: Any, name: str, out: Path, *, dtype: str | None, prefer: Mapping[str, float] | None) -> None:
        """Download a merged model or trained expert of a job to the new directory `out`.

        `name` is the trial of a study (a number or "best"), or the alias of a fine-tuning's expert. `dtype` is the
        dtype of a study's merged model; None means the dtype of the study's inference engines. `prefer` contains the
        weight of each objective, keyed by name. If it is not None, the weights choose the trial of a study, and `name`
        must be "best". Raises InvalidPreference if `prefer` is given and `name` is not "best", and Conflict if jobs of
        this kind have no models.
        """
        raise Conflict(f"{job['name']}: is a {self._kind.noun}, which has no models to export")

    def _begin(self, job: Job) -> str:
        waits = f", waits for {job['waiting_for']}" if job["waiting_for"] else ""
        return f"{self._kind.noun} {job['name']}: {job['id']}, {job['state']}{waits}"


class StudyView(JobView):
    """Printer of a server's studies: progress in trials and samples, and held-out results at the end."""

    def list_table(self, jobs: Sequence[Any]) -> Table:
        from service.cli.tables import studies_table

        return studies_table(jobs)

    def table(self, job: Any) -> Table:
        from service.cli.tables import study_table

        return study_table(job, server=self._client.url)

    def follow(self, job: Any) -> None:
        with ProgressView(worked_s=job["wall_clock_s"]) as view:
            view.note(self._begin(job))
            for event in self._client.events(job):
                if event.kind == "progress":
                    view.update(ProgressSnapshot.from_json(event.payload))
                elif text := event_text(event, self._kind.noun):
                    view.note(f"{_clock_time(event.time)} {text}")

    def show_end(self, job: Any) -> None:
        summary = self._client.summary(job["id"])
        if self._as_json:
            print_json_line({"kind": "summary", "id": None, "time": None, "payload": summary})
        elif job["state"] == JobState.COMPLETE:
            report = self._client.url + path_of_link(job["links"]["report"])
            print_results(cast("ParetoDocument", self._client.pareto(job["id"])), summary, report=report)
        else:
            super().show_end(job)

    def export(self, job: Any, name: str, out: Path, *, dtype: str | None, prefer: Mapping[str, float] | None) -> None:
        trial: int | str = int(name) if name.isascii() and name.isdecimal() else name
        chosen = None
        if prefer is not None:  # picked first, so that its number can be shown
            if name != "best":
                raise InvalidPreference(f'preference: weights choose the trial; give "best", not {name!r}')
            chosen = self._client.pareto(job["id"], prefer=prefer)["preferred"]
            trial = chosen["trial"]
        with _download_bar() as received:
            directory = self._client.export(job["id"], trial, out, dtype=dtype, received=received)
        print_export(directory, chosen, as_json=self._as_json)


class FinetuneView(JobView):
    """Printer of a server's fine-tunings.

    It prints the losses of the experts (the models that are trained) and, at the end, how to download the experts.
    """

    def list_table(self, jobs: Sequence[Any]) -> Table:
        from service.cli.finetune_tables import finetunes_table

        return finetunes_table(jobs)

    def table(self, job: Any) -> Table:
        from service.cli.finetune_tables import finetune_table

        return finetune_table(job, server=self._client.url)

    def show_end(self, job: Any) -> None:
        if self._as_json or job["state"] != JobState.COMPLETE:
            super().show_end(job)
            return
        for alias in job["experts"]:
            print(f"{alias}: download it with `mergesearch export {short_id(job)} {alias} --out DIR`")
        print(f"report: {self._client.url}{path_of_link(job['links']['report'])}")

    def export(self, job: Any, name: str, out: Path, *, dtype: str | None, prefer: Mapping[str, float] | None) -> None:
        experts = ", ".join(job["experts"])
        if dtype is not None or prefer is not None:
            raise Conflict(
                "--dtype and --prefer are for trials of studies; experts are downloaded as they were written"
            )
        if name == "best" and "best" not in job["experts"]:
            if len(job["experts"]) > 1:
                raise Conflict(f"fine-tuning {job['name']!r} has several experts; give one of {experts}")
            name = experts
        with _download_bar() as received:
            directory = self._client.download(job, name, out, received=received)
        print_json({"directory": str(directory)}) if self._as_json else print(f"expert: {directory}")


VIEWS: Mapping[str, type[JobView]] = {SEARCH.name: StudyView, FINETUNE.name: FinetuneView}


def view_of(kind: str, client: Client, *, as_json: bool) -> JobView:
    """Create the object that prints the server's jobs of the kind named `kind`; `client` is the client of this server.

    If `as_json` is True, results are printed as JSON.
    """
    return VIEWS.get(kind, JobView)(kind_of(kind), client, as_json=as_json)


def short_id(job: Job) -> str:
    """First 8 digits of a job's id, for people to type; a collision with another job's digits is unlikely."""
    return str(job["id"][:8])


def _clock_time(time: str | None) -> str:
    return "" if time is None else f"{datetime.fromisoformat(time).astimezone():%H:%M:%S}"


def event_text(event: Event, noun: str) -> str | None:
    """Line of text that describes an event of a job; `noun` is the word for the job, such as "study".

    Returns None for events that users do not need, or that the display of progress shows already.
    """
    payload = event.payload
    match event.kind:
        case "attempt":
            return f"attempt {payload['attempt']}" + _because(payload["because"])
        case "replica":
            return f"engine {payload['replica']} ({payload['engine']}) scores for the study"
        case "crash":
            return f"trial {payload['trial']}: its engine crashed" + _because(payload["reason"])
        case "database":
            return f"the server's database did not answer for {payload['away_s']:.0f} s"
        case "steered":
            changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in payload.get("changes", {}).items())
            trial = f" trial {payload['trial']}" if "trial" in payload else ""
            return f"{payload['action']}{trial}: asked by {payload['user'] or 'a request'}" + _because(
                "; ".join(filter(None, (changes, payload["reason"])))
            )
        case "preempted":
            return f"the {noun} gives its place up, and waits" + _because(payload["reason"])
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
        case "benchmarks_started":
            return f"benchmarks: {len(payload['left'])} to score"
        case "benchmark_failed":
            return f"trial {payload['trial']} failed on {payload['benchmark']}" + _because(payload["reason"])
        case "benchmarks_added":
            return f"benchmarks were added: {', '.join(payload['benchmarks'])}"
        case "out_of_range":
            return f"trial {payload['trial']}: {payload['message']}"
        case _:
            return None


def _because(reason: Any) -> str:
    return f": {reason}" if reason else ""


@contextmanager
def _download_bar() -> Iterator[Callable[[int, int | None], None]]:
    """Context that shows the progress bar of a download on standard error, if standard error is a terminal.

    The context yields the function that updates the bar. The function's arguments are the number of bytes received so
    far and their total number, which is None if it is unknown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("the server is writing the model", total=None)

        def received(count: int, total: int | None) -> None:
            # The archive is somewhat larger than the files in it.
            bar.update(task, completed=min(count, total or count), total=total, description="download")

        yield received
