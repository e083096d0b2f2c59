"""Flows: each client call as a generator that yields requests and pauses, is sent the responses, and returns a typed
document. A flow does no input or output: the code that runs it may block or await.

A request is retried if its connection was lost: every request may be repeated (submissions carry an idempotency key).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl, quote, urlsplit

from search_spaces.errors import InvalidStudy, Problem
from service.errors import Conflict, ExportFailed, InvalidAnswer, NotFound, RequestRefused, ServerUnreachable

if TYPE_CHECKING:
    from service.schemas.api import (
        ExportDocument,
        ExportsDocument,
        ProblemDocument,
        StudiesDocument,
        StudyDocument,
        TrialsDocument,
    )
    from service.schemas.files import ParetoDocument, RecipeDocument, SummaryDocument, TrialDocument

__all__ = ["Call", "Flow", "Response", "TransportError", "path_of", "refusal"]

T = TypeVar("T")

# Pauses before the retries of a request whose connection was lost: in total long enough for a server to restart.
RETRY_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)

# The longest interval at which an export's state is polled; the first polls follow faster.
MAX_POLL_S = 3.0

PAGE = 500


@dataclass(frozen=True)
class Call:
    """One request; `path` starts with a slash and is percent-encoded."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None


@dataclass(frozen=True)
class Response:
    """A response; header names are in lower case."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True)
class TransportError:
    """No response, and why. `was_cut`: the connection was lost before the response was complete."""

    url: str
    reason: str
    was_cut: bool


Flow: TypeAlias = Generator[Call | float, Response | TransportError | None, T]
"""Yields requests, and pauses in seconds; is sent the outcome of each request; returns the result."""


# -- studies -----------------------------------------------------------------------------------------------------------


def submit(study: Path | str | Mapping[str, Any], *, idempotency_key: str | None = None) -> Flow[StudyDocument]:
    """Submit a study and return the server's document of it.

    `study` is a study file, whose relative paths are taken from its directory, or its content; models and data are
    read by the server, so their paths must exist there. The same `idempotency_key` with the same study again returns
    the study that it created; without a key, each call creates a new study.

        client.submit("study.yaml")
        client.submit({"name": "math-text", "models": {...}, ...}, idempotency_key="nightly-2031-05-04")

    Raises InvalidStudy (the file is invalid) and RequestRefused (with every problem that the server found).
    """
    content = _study_content(study)
    key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
    if not re.fullmatch("[!-~]{1,255}", key):  # it cannot be sent as a header
        raise RequestRefused(
            {
                "type": "about:blank",
                "title": "Unprocessable Content",
                "status": 422,
                "detail": f"Idempotency-Key {key!r:.80}: give 1 to 255 visible ASCII characters",
            }
        )
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    return cast("StudyDocument", (yield from _json(Call("POST", "/v1/studies", {}, headers, content))))


def studies(*, state: str | None = None, name: str | None = None) -> Flow[list[StudyDocument]]:
    """Every study, oldest first, or only those in a state ("RUNNING") or with a name.

    client.studies(state="RUNNING")
    """
    query = {key: value for key, value in (("state", state), ("name", name)) if value is not None}
    document = cast("StudiesDocument", (yield from _json(Call("GET", "/v1/studies", query))))
    return document["studies"]


def study(study: str) -> Flow[StudyDocument]:
    """A study by its id.

    client.study("5f0c...")["state"]
    """
    return cast("StudyDocument", (yield from _json(Call("GET", path_of(study)))))


def find(reference: str) -> Flow[StudyDocument]:
    """The study with this id, id prefix, or name.

        client.find("5f0c")
        client.find("math-text-lookup")

    Raises NotFound, and Conflict if several studies match, with their ids.
    """
    known = yield from studies()
    matches = [found for found in known if found["id"] == reference]
    matches = matches or [found for found in known if found["name"] == reference]
    matches = matches or [found for found in known if reference and found["id"].startswith(reference)]
    if len(matches) > 1:
        ids = ", ".join(f"{found['id']} ({found['name']}, {found['state']})" for found in matches)
        raise Conflict(f"study {reference!r}: {len(matches)} studies match, give a longer id: {ids}")
    if not matches:
        raise NotFound(f"study {reference!r}: the server has no study of that id or name; it has {len(known)}")
    return matches[0]


def cancel(study: str) -> Flow[StudyDocument]:
    """Cancel a study permanently; its results are kept. A study that is already cancelled is returned unchanged.

        client.cancel("5f0c...")

    Raises RequestRefused if it has already ended in another state.
    """
    return cast("StudyDocument", (yield from _json(Call("POST", f"{path_of(study)}:cancel"))))


def resume(study: str) -> Flow[StudyDocument]:
    """Let a study that has FAILED go on from its stored results, and one that waits try again now.

        client.resume("5f0c...")

    Nothing is scored again. Raises RequestRefused if it is COMPLETE or CANCELLED.
    """
    return cast("StudyDocument", (yield from _json(Call("POST", f"{path_of(study)}:resume"))))


def delete(study: str) -> Flow[None]:
    """Delete a study that has ended, with its results and exports.

        client.delete("5f0c...")

    Raises RequestRefused if it has not ended, or if one of its exports is being written or downloaded.
    """
    yield from _respond(Call("DELETE", path_of(study)))


def summary(study: str) -> Flow[SummaryDocument]:
    """The study's summary, as in `summary.json` of a run.

    client.summary("5f0c...")["best"]
    """
    return cast("SummaryDocument", (yield from _json(Call("GET", path_of(study, "summary")))))


def pareto(study: str, *, prefer: Mapping[str, float] | None = None) -> Flow[ParetoDocument]:
    """The Pareto front of the study, as in `pareto.json` of a run. With `prefer`, weights of the objectives that sum to
    one, `preferred` is the trial that they pick.

        [row["trial"] for row in client.pareto("5f0c...")["front"]]
        client.pareto("5f0c...", prefer={"math": 0.6, "code": 0.4})["preferred"]["trial"]

    Raises RequestRefused for other weights.
    """
    query = {} if prefer is None else {"prefer": ",".join(f"{name}={weight!r}" for name, weight in prefer.items())}
    return cast("ParetoDocument", (yield from _json(Call("GET", path_of(study, "pareto"), query))))


def report(study: str) -> Flow[str]:
    """The study's report, one self-contained HTML page.

    Path("report.html").write_text(client.report("5f0c..."))
    """
    return (yield from _text(Call("GET", path_of(study, "report"))))


def log(study: str) -> Flow[str]:
    """The output of the study's drivers.

        print(client.log("5f0c..."))

    Raises RequestRefused (status 503) while Ray, which keeps the logs, is unreachable.
    """
    return (yield from _text(Call("GET", path_of(study, "log"))))


# -- trials ------------------------------------------------------------------------------------------------------------


def trials(study: str, *, state: str | None = None) -> Flow[list[TrialDocument]]:
    """Every trial by number, or only those in a state ("COMPLETE").

    [trial["values"] for trial in client.trials("5f0c...", state="COMPLETE")]
    """
    query = {"limit": str(PAGE), **({} if state is None else {"state": state})}
    found: list[TrialDocument] = []
    while True:
        page = cast("TrialsDocument", (yield from _json(Call("GET", path_of(study, "trials"), query))))
        found += page["trials"]
        if page["next"] is None:
            return found
        query = dict(parse_qsl(urlsplit(page["next"]).query))


def trial(study: str, number: int) -> Flow[TrialDocument]:
    """One trial.

    client.trial("5f0c...", 17)["rungs"]
    """
    return cast("TrialDocument", (yield from _json(Call("GET", path_of(study, "trials", number)))))


def recipe(study: str, number: int) -> Flow[RecipeDocument]:
    """The recipe of a trial's merge, as in `recipe.json` of an export.

    client.recipe("5f0c...", 17)["layers"][0]
    """
    return cast("RecipeDocument", (yield from _json(Call("GET", path_of(study, "trials", number, "recipe")))))


# -- exports -----------------------------------------------------------------------------------------------------------


def finished_export(
    study: str, trial: str | int, *, dtype: str | None, prefer: Mapping[str, float] | None
) -> Flow[ExportDocument]:
    """The export of a trial, or of the one that `prefer` picks, once the server has written it. Raises ExportFailed."""
    asked = {"trial": trial, "dtype": dtype, **({} if prefer is None else {"prefer": dict(prefer)})}
    content = json.dumps(asked).encode()
    call = Call("POST", path_of(study, "exports"), {}, {"Content-Type": "application/json"}, content)
    export = cast("ExportDocument", (yield from _json(call)))
    pause_s = 0.1
    while export["state"] not in ("COMPLETE", "FAIL"):
        yield pause_s
        pause_s = min(1.5 * pause_s, MAX_POLL_S)
        export = cast("ExportDocument", (yield from _json(Call("GET", path_of(study, "exports", export["id"])))))
    if export["state"] == "FAIL":
        raise ExportFailed(f"trial {export['trial']} of study {study}: {export['reason'] or 'no reason was given'}")
    return export


def exports(study: str) -> Flow[list[ExportDocument]]:
    """The exports of a study that the server keeps, oldest first.

    [export["id"] for export in client.exports("5f0c...")]
    """
    document = cast("ExportsDocument", (yield from _json(Call("GET", path_of(study, "exports")))))
    return document["exports"]


def delete_export(study: str, export: str) -> Flow[None]:
    """Delete an export and its files from the server.

        client.delete_export("5f0c...", "e91b...")

    Raises RequestRefused while it is being written or downloaded.
    """
    yield from _respond(Call("DELETE", path_of(study, "exports", export)))


def download(study: str, export: ExportDocument) -> Call:
    """The request for the model's files."""
    return Call("GET", path_of(study, "exports", export["id"], "download"), headers={"Accept": "application/x-tar"})


# -- requests ----------------------------------------------------------------------------------------------------------


def path_of(study: str, *rest: str | int) -> str:
    """The path of a study, or of a resource below it."""
    if not study:
        raise NotFound("study '': give the id of a study")
    return "/".join(["/v1/studies", *(quote(str(part), safe="", errors="replace") for part in (study, *rest))])


def refusal(response: Response) -> RequestRefused | InvalidAnswer:
    """The error that a response other than 2xx stands for."""
    problem = _parsed(response) if "problem+json" in response.headers.get("content-type", "") else None
    if isinstance(problem, dict) and isinstance(problem.get("detail"), str):
        after = response.headers.get("retry-after", "")
        known: Any = {"type": "about:blank", "title": "", **problem, "status": response.status}
        return RequestRefused(cast("ProblemDocument", known), float(after) if after.isdecimal() else None)
    if location := response.headers.get("location"):
        return InvalidAnswer(f"{response.url}: is redirected to {location}; give the server's own address")
    return _no_server(response, f"status {response.status}")


def _no_server(response: Response, why: str) -> InvalidAnswer:
    start = repr(response.content[:80].decode("utf-8", errors="replace"))
    return InvalidAnswer(f"{response.url}: no mergesearch server answers there: {why}, {start}")


def _json(call: Call) -> Flow[dict[str, Any]]:
    response = yield from _respond(call)
    document = _parsed(response)
    if not isinstance(document, dict):
        raise _no_server(response, "no JSON object")
    return document


def _text(call: Call) -> Flow[str]:
    return (yield from _respond(call)).content.decode("utf-8", errors="replace")


def _respond(call: Call) -> Flow[Response]:
    """The response to a request, which is retried if the connection was lost or a proxy could not reach the server.

    A server that is unreachable at the first attempt is reported immediately."""
    pauses_s = iter(RETRY_PAUSES_S)
    is_first = True
    while True:
        outcome = yield call
        assert outcome is not None
        if isinstance(outcome, Response):
            if 200 <= outcome.status < 300:
                return outcome
            error: Exception = refusal(outcome)
            if isinstance(error, RequestRefused) or outcome.status < 500:
                raise error
        else:
            error = ServerUnreachable(f"{outcome.url}: no answer: {outcome.reason}")
            if is_first and not outcome.was_cut:
                raise error
        pause_s = next(pauses_s, None)
        if pause_s is None:
            raise error
        is_first = False
        yield pause_s


def _study_content(study: Path | str | Mapping[str, Any]) -> bytes:
    from search_spaces.study.file import load_study

    document = study if isinstance(study, Mapping) else load_study(study).canonical()
    try:
        return json.dumps(document, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidStudy((Problem("", f"the study is not plain data: {error}"),)) from error


def _parsed(response: Response) -> Any:
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None
