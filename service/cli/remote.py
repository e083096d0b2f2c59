"""Commands of `mergesearch` that use a server: each sends requests, prints the result, and returns the exit code.

Users refer to a job by its id, a unique prefix of its id, or its name if no other job has the same name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from search_spaces.study.yaml import read_document
from service.cli.chat import Chat, ChatOptions
from service.cli.job_views import JobView, short_id, view_of
from service.cli.terminal import console, print_json, print_json_line
from service.cli.trial_files import write_trials
from service.client import Client
from service.errors import Conflict, ServerUnreachable
from service.jobs.registry import KINDS, kind_of
from service.jobs.search.kind import SEARCH
from service.types import JobState

if TYPE_CHECKING:
    from search_spaces.study.benchmarks import AddedBenchmarks
    from service.schemas.api import JobDocument, QueueDocument
    from service.schemas.files import ParetoDocument

__all__ = ["DEFAULT_SERVER", "SERVER_VARIABLE", "ServerVerbs", "server_client", "server_url", "server_verbs"]

DEFAULT_SERVER = "http://127.0.0.1:8080"
SERVER_VARIABLE = "MERGESEARCH_SERVER"

INTERRUPTED = 130


def server_url(server: str | None) -> str:
    """Address of the server that a command uses.

    The address is `server` if this is not None, else the value of the environment variable MERGESEARCH_SERVER, else
    http://127.0.0.1:8080.
    """
    return server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER


@contextmanager
def server_client(server: str | None, *, no_directory: str | None = None) -> Iterator[Client]:
    """Context with a client of the server that a command uses.

    `server` is the server's address. If it is None, the address is the value of the environment variable
    MERGESEARCH_SERVER, or http://127.0.0.1:8080 if the variable is not set. `no_directory` is the command's argument if
    the user may have meant a directory that does not exist; if no server answers, the error message then mentions the
    missing directory too.

    Raises NotFound if the address is invalid, and ServerUnreachable if no server answers.
    """
    url = server or os.environ.get(SERVER_VARIABLE)
    with Client(url or DEFAULT_SERVER) as client:
        try:
            yield client
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


@contextmanager
def server_verbs(server: str | None, *, as_json: bool, no_directory: str | None = None) -> Iterator[ServerVerbs]:
    """Context with the commands that use a server, as an object with one method for each command.

    If `as_json` is True, the commands print JSON. `server` is the server's address; None means the address of the
    environment variable MERGESEARCH_SERVER, or the default. `no_directory` is the command's argument if the user may
    have meant a directory that does not exist; if no server answers, the error message then mentions the missing
    directory too.

    Raises NotFound if the address is invalid, and ServerUnreachable if no server answers.
    """
    with server_client(server, no_directory=no_directory) as client:
        yield ServerVerbs(client, as_json=as_json)


class ServerVerbs:
    """Commands of `mergesearch` that use a server, as methods; each method returns the exit code.

    Results go to standard output (as JSON if `as_json` is True), progress and messages to standard error. The argument
    `reference` of a method names a job by its id, a prefix of its id, or its name.
    """

    def __init__(self, client: Client, *, as_json: bool) -> None:
        self._client = client
        self._as_json = as_json

    def submit(self, file: Path, *, key: str | None, team: str | None, sharing: str | None, watch: bool) -> int:
        document = read_document(file)
        kind = next((kind for kind in KINDS.values() if kind.is_document(document)), SEARCH)
        job = self._client.submit_job(kind.name, file, idempotency_key=key, team=team, sharing=sharing)
        if watch:
            if self._as_json:
                print_json_line({"kind": "submitted", "id": None, "time": job["created_at"], "payload": job})
            return self._watch(job)
        if self._as_json:
            print_json(job)
        else:
            self._print_state(job)
            print(f"follow it with `mergesearch watch {short_id(job)}`")
        return 0

    def share(self, reference: str, sharing: str, *, team: str | None) -> int:
        job = self._client.share(self._client.find(reference), sharing, team=team)
        if self._as_json:
            print_json(job)
        else:
            place = f"team {job['team']}" if job["team"] else "no team"
            print(f"{_noun(job)} {job['name']}: {job['id']}, {place}, shared: {job['sharing']}")
        return 0

    def list_jobs(self, kind: str) -> int:
        """Print the server's jobs of the kind named `kind`, such as "search" for studies, and return the exit code."""
        jobs = self._client.jobs(kind)
        print_json(jobs) if self._as_json else console().print(self._view(kind).list_table(jobs))
        return 0

    def show(self, reference: str) -> int:
        job = self._client.find(reference)
        print_json(job) if self._as_json else console().print(self._view(job["kind"]).table(job))
        return 0

    def trials(self, reference: str, *, out: Path | None, optuna: str | None) -> int:
        """Print the trials of a study, or write them to the file `out` or to the Optuna storage with the URL `optuna`.

        `reference` names the study: its id, a prefix of its id, or its name. Returns the exit code.
        """
        from service.cli.tables import trials_table

        study = self._study(reference)
        if out is not None or optuna is not None:
            objectives = self._client.pareto(study["id"])["objectives"]
            directions = {objective["name"]: objective["direction"] for objective in objectives}
            columns = self._client.trial_columns(study["id"])
            trials = [] if optuna is None else self._client.trials(study["id"])
            return write_trials(columns, study["name"], directions, trials, out=out, optuna=optuna)
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
        print_json(document) if self._as_json else console().print(pareto_table(cast("ParetoDocument", document)))
        return 0

    def evaluate(self, reference: str, added: AddedBenchmarks, *, watch: bool) -> int:
        study = self._study(reference)
        changed = self._client.add_benchmarks(study["id"], added.model_dump(mode="json", exclude_unset=True))
        job = cast("JobDocument", {"kind": SEARCH.name, **changed})
        if watch:
            return self._watch(job)
        if self._as_json:
            print_json(changed)
        else:
            self._print_state(job)
            print(f"follow it with `mergesearch watch {short_id(job)}`")
        return 0

    def export(
        self, reference: str, name: str, out: Path, *, dtype: str | None, prefer: Mapping[str, float] | None
    ) -> int:
        job = self._client.find(reference)
        self._view(job["kind"]).export(job, name, out, dtype=dtype, prefer=prefer)
        return 0

    def chat(self, reference: str, trials: Sequence[str], prompt: str | None, options: ChatOptions) -> int:
        """Print answers of a study's trials to `prompt`; if `prompt` is None, ask for prompts on the terminal.

        `reference` names the study: its id, a prefix of its id, or its name. `trials` has the numbers or labels of the
        trials, or "best". `options` are the settings of the chat, such as a system message. Returns the exit code.
        """
        chat = Chat(self._client, self._study(reference), trials, options)
        try:
            if prompt is None:
                chat.converse()
            else:
                chat.answer(prompt, as_json=self._as_json)
        except KeyboardInterrupt:
            return INTERRUPTED
        return 0

    def edit(self, reference: str, changes: Mapping[str, Any], *, reason: str | None) -> int:
        return self._show_state(self._client.edit(self._client.find(reference), changes, reason=reason))

    def set_validity(self, reference: str, number: int, *, is_valid: bool, reason: str | None) -> int:
        study = self._study(reference)
        trial = self._client.set_validity(study["id"], number, is_valid=is_valid, reason=reason)
        if self._as_json:
            print_json(trial)
        else:
            print(f"trial {number} of {study['name']}: {'valid' if is_valid else f'invalid: {reason}'}")
        return 0

    def recipe(self, reference: str, number: int, *, is_mergekit: bool) -> int:
        """Print the recipe of a trial or, if `is_mergekit`, its mergekit configuration; return the exit code."""
        study = self._study(reference)["id"]
        if is_mergekit:
            content = self._client.mergekit(study, number)
            print_json({"mergekit": content}) if self._as_json else print(content, end="")
        else:
            print_json(self._client.recipe(study, number))
        return 0

    def evaluate_trial(self, reference: str, number: int, *, reason: str | None) -> int:
        study = self._client.evaluate_trial(self._study(reference)["id"], number, reason=reason)
        return self._show_state(cast("JobDocument", {"kind": SEARCH.name, **study}))

    def enqueue(self, reference: str, label: str, file: Path, *, is_recipe: bool, reason: str | None) -> int:
        """Ask the server to evaluate the merge in `file` as a new trial of a study, and return the exit code.

        `reference` names the study: its id, a prefix of its id, or its name. `label` is the label of the new trial. The
        file is a recipe if `is_recipe` is True, else a configuration of the search space. `reason` is shown in the
        study's events; None states no reason.
        """
        given = {"recipe" if is_recipe else "configuration": read_document(file)}
        study = self._client.enqueue_trial(self._study(reference)["id"], label, reason=reason, **given)
        return self._show_state(cast("JobDocument", {"kind": SEARCH.name, **study}))

    def clone(
        self, reference: str, changes: Sequence[Mapping[str, Any]], *, team: str | None, sharing: str | None
    ) -> int:
        return self._show_state(self._client.clone(self._client.find(reference), changes, team=team, sharing=sharing))

    def cancel(self, reference: str, *, reason: str | None) -> int:
        return self._show_state(self._client.cancel(self._client.find(reference), reason=reason))

    def pause(self, reference: str, *, reason: str | None) -> int:
        return self._show_state(self._client.pause(self._client.find(reference), reason=reason))

    def resume(self, reference: str, *, reason: str | None) -> int:
        return self._show_state(self._client.resume(self._client.find(reference), reason=reason))

    def queue(self) -> int:
        return self._show_queue(self._client.queue())

    def move(self, reference: str, *, before: str | None, reason: str | None) -> int:
        other = None if before is None else self._client.find(before)
        return self._show_queue(self._client.move(self._client.find(reference), before=other, reason=reason))

    def cluster(self) -> int:
        """Print the nodes of the server's Ray cluster and the use of their resources, and return the exit code."""
        from service.cli.tables import cluster_table, used_text

        document = self._client.cluster()
        if self._as_json:
            print_json(document)
            return 0
        if document["nodes"]:
            console().print(cluster_table(document["nodes"]))
        else:
            print(f"nodes: not known: {document['nodes_problem']}")
        if reason := document["not_ready"]:
            print(f"no job continues: {reason}")
        database = document["database"]
        print(f"disk: {used_text(document['disk'])} used")
        print(f"database: {database['kind']}, revision {database['revision']}")
        print("versions: " + ", ".join(f"{name} {version}" for name, version in document["versions"].items()))
        return 0

    def _show_queue(self, document: QueueDocument) -> int:
        from service.cli.tables import queue_table

        print_json(document) if self._as_json else console().print(queue_table(document))
        return 0

    def stop(self, reference: str, *, reason: str | None) -> int:
        """Ask the server to stop the search of a study early, and return the exit code.

        `reference` names the study: its id, a prefix of its id, or its name. `reason` is shown in the study's events;
        None states no reason. Raises Conflict if the job is not a study.
        """
        return self._show_state(self._client.stop(self._study(reference), reason=reason))

    def delete(self, reference: str) -> int:
        job = self._client.find(reference)
        self._client.delete(job)
        print_json({"deleted": job["id"]}) if self._as_json else print(f"deleted: {job['name']}: {job['id']}")
        return 0

    def log(self, reference: str) -> int:
        text = self._client.log(self._client.find(reference))
        print_json({"log": text}) if self._as_json else print(text, end="" if text.endswith("\n") else "\n")
        return 0

    def watch(self, reference: str) -> int:
        """Show the events of a job until it has ended, and then its results.

        `reference` names the job: its id, a prefix of its id, or its name. Returns the exit code: 0 if the job is
        COMPLETE, 130 if the user has interrupted the command, else 1.
        """
        return self._watch(self._client.find(reference))

    def _watch(self, job: JobDocument) -> int:
        view = self._view(job["kind"])
        try:
            if self._as_json:
                for event in self._client.events(job):
                    print_json_line(asdict(event))
            else:
                view.follow(job)
        except KeyboardInterrupt:
            print(
                f"{_noun(job)} {job['name']} continues on the server; `mergesearch watch {short_id(job)}` shows it "
                f"again, `mergesearch cancel {short_id(job)}` ends it",
                file=sys.stderr,
            )
            return INTERRUPTED
        ended = self._client.job(job)
        view.show_end(ended)
        return 0 if ended["state"] == JobState.COMPLETE else 1

    def _study(self, reference: str) -> JobDocument:
        """Find a study of the server by its id, a prefix of its id, or its name.

        Raises Conflict if the job that is found is not a study.
        """
        found = self._client.find(reference)
        if not kind_of(found["kind"]).has_search:
            raise Conflict(f"{found['name']}: is a {_noun(found)}, which has no trials; see `mergesearch show`")
        return found

    def _show_state(self, job: JobDocument) -> int:
        print_json(job) if self._as_json else self._print_state(job)
        return 0

    def _print_state(self, job: JobDocument) -> None:
        print(f"{_noun(job)} {job['name']}: {job['id']}, {job['state']}")

    def _view(self, kind: str) -> JobView:
        return view_of(kind, self._client, as_json=self._as_json)


def _noun(job: JobDocument) -> str:
    return kind_of(job["kind"]).noun
