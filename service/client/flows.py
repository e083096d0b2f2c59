"""Flows: each client call as a generator that yields requests and pauses, is sent the responses, and returns a typed
document. A flow does no input or output: the code that runs it may block or await.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, urlsplit

from service.client.finetune_flows import known_finetunes
from service.client.requests import (
    Call,
    Flow,
    Reference,
    document_of,
    path_of,
    respond,
    submitted,
    text_of,
)
from service.errors import Conflict, ExportFailed, NotFound

if TYPE_CHECKING:
    from service.schemas.api import (
        ExportDocument,
        ExportsDocument,
        FinetuneDocument,
        StudiesDocument,
        StudyDocument,
        TrialsDocument,
    )
    from service.schemas.files import ParetoDocument, SummaryDocument, TrialDocument
    from service.schemas.recipe import RecipeDocument

__all__ = [
    "cancel",
    "delete",
    "delete_export",
    "download",
    "exports",
    "find",
    "finished_export",
    "log",
    "pareto",
    "recipe",
    "report",
    "resume",
    "studies",
    "study",
    "submit",
    "summary",
    "trial",
    "trials",
]

# The longest interval at which an export's state is polled; the first polls follow faster.
MAX_POLL_S = 3.0

PAGE = 500


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
    from search_spaces.study.file import load_study

    document = study if isinstance(study, Mapping) else load_study(study).canonical()
    return cast("StudyDocument", (yield from submitted("/v1/studies", document, idempotency_key)))


def studies(*, state: str | None = None, name: str | None = None) -> Flow[list[StudyDocument]]:
    """Every study, oldest first, or only those in a state ("RUNNING") or with a name.

    client.studies(state="RUNNING")
    """
    query = {key: value for key, value in (("state", state), ("name", name)) if value is not None}
    document = cast("StudiesDocument", (yield from document_of(Call("GET", "/v1/studies", query))))
    return document["studies"]


def study(study: str) -> Flow[StudyDocument]:
    """A study by its id.

    client.study("5f0c...")["state"]
    """
    return cast("StudyDocument", (yield from document_of(Call("GET", path_of(study)))))


def find(reference: str) -> Flow[StudyDocument | FinetuneDocument]:
    """The study or fine-tuning with this id, id prefix, or name. Fine-tunings have "experts".

        client.find("5f0c")
        client.find("math-text-lookup")

    Raises NotFound, and Conflict if several match, with their ids.
    """
    known: list[StudyDocument | FinetuneDocument] = [*(yield from studies()), *(yield from known_finetunes())]
    matches = [found for found in known if found["id"] == reference]
    matches = matches or [found for found in known if found["name"] == reference]
    matches = matches or [found for found in known if reference and found["id"].startswith(reference)]
    if len(matches) > 1:
        ids = ", ".join(f"{found['id']} ({found['name']}, {found['state']})" for found in matches)
        raise Conflict(f"study {reference!r}: {len(matches)} studies match, give a longer id: {ids}")
    if not matches:
        raise NotFound(f"study {reference!r}: the server has no study of that id or name; it has {len(known)}")
    return matches[0]


def cancel(study: Reference) -> Flow[StudyDocument | FinetuneDocument]:
    """Cancel a study or fine-tuning permanently; its results are kept. One that is already cancelled is returned
    unchanged.

        client.cancel("5f0c...")
        client.cancel(client.find("family"))

    Raises RequestRefused if it has already ended in another state.
    """
    return cast("StudyDocument", (yield from document_of(Call("POST", f"{path_of(study)}:cancel"))))


def resume(study: Reference) -> Flow[StudyDocument | FinetuneDocument]:
    """Let a study or fine-tuning that has FAILED go on from its stored results or last checkpoint, and one that waits
    try again now.

        client.resume("5f0c...")

    Nothing is scored again. Raises RequestRefused if it is COMPLETE or CANCELLED.
    """
    return cast("StudyDocument", (yield from document_of(Call("POST", f"{path_of(study)}:resume"))))


def delete(study: Reference) -> Flow[None]:
    """Delete a study or fine-tuning that has ended, with its results and exports.

        client.delete("5f0c...")

    Raises RequestRefused if it has not ended, or if one of its models is being written or downloaded.
    """
    yield from respond(Call("DELETE", path_of(study)))


def summary(study: str) -> Flow[SummaryDocument]:
    """The study's summary, as in `summary.json` of a run.

    client.summary("5f0c...")["best"]
    """
    return cast("SummaryDocument", (yield from document_of(Call("GET", path_of(study, "summary")))))


def pareto(study: str, *, prefer: Mapping[str, float] | None = None) -> Flow[ParetoDocument]:
    """The Pareto front of the study, as in `pareto.json` of a run. With `prefer`, weights of the objectives that sum to
    one, `preferred` is the trial that they pick.

        [row["trial"] for row in client.pareto("5f0c...")["front"]]
        client.pareto("5f0c...", prefer={"math": 0.6, "code": 0.4})["preferred"]["trial"]

    Raises RequestRefused for other weights.
    """
    query = {} if prefer is None else {"prefer": ",".join(f"{name}={weight!r}" for name, weight in prefer.items())}
    return cast("ParetoDocument", (yield from document_of(Call("GET", path_of(study, "pareto"), query))))


def report(study: Reference) -> Flow[str]:
    """The report of a study or fine-tuning, one self-contained HTML page.

    Path("report.html").write_text(client.report("5f0c..."))
    """
    return (yield from text_of(Call("GET", path_of(study, "report"))))


def log(study: Reference) -> Flow[str]:
    """The output of the drivers of a study or fine-tuning.

        print(client.log("5f0c..."))

    Raises RequestRefused (status 503) while Ray, which keeps the logs, is unreachable.
    """
    return (yield from text_of(Call("GET", path_of(study, "log"))))


# -- trials ------------------------------------------------------------------------------------------------------------


def trials(study: str, *, state: str | None = None) -> Flow[list[TrialDocument]]:
    """Every trial by number, or only those in a state ("COMPLETE").

    [trial["values"] for trial in client.trials("5f0c...", state="COMPLETE")]
    """
    query = {"limit": str(PAGE), **({} if state is None else {"state": state})}
    found: list[TrialDocument] = []
    while True:
        page = cast("TrialsDocument", (yield from document_of(Call("GET", path_of(study, "trials"), query))))
        found += page["trials"]
        if page["next"] is None:
            return found
        query = dict(parse_qsl(urlsplit(page["next"]).query))


def trial(study: str, number: int) -> Flow[TrialDocument]:
    """One trial.

    client.trial("5f0c...", 17)["rungs"]
    """
    return cast("TrialDocument", (yield from document_of(Call("GET", path_of(study, "trials", number)))))


def recipe(study: str, number: int) -> Flow[RecipeDocument]:
    """The recipe of a trial's merge, as in `recipe.json` of an export.

    client.recipe("5f0c...", 17)["layers"][0]
    """
    return cast("RecipeDocument", (yield from document_of(Call("GET", path_of(study, "trials", number, "recipe")))))


# -- exports -----------------------------------------------------------------------------------------------------------


def finished_export(
    study: str, trial: str | int, *, dtype: str | None, prefer: Mapping[str, float] | None
) -> Flow[ExportDocument]:
    """The export of a trial, or of the one that `prefer` picks, once the server has written it. Raises ExportFailed."""
    asked = {"trial": trial, "dtype": dtype, **({} if prefer is None else {"prefer": dict(prefer)})}
    content = json.dumps(asked).encode()
    call = Call("POST", path_of(study, "exports"), {}, {"Content-Type": "application/json"}, content)
    export = cast("ExportDocument", (yield from document_of(call)))
    pause_s = 0.1
    while export["state"] not in ("COMPLETE", "FAIL"):
        yield pause_s
        pause_s = min(1.5 * pause_s, MAX_POLL_S)
        export = cast("ExportDocument", (yield from document_of(Call("GET", path_of(study, "exports", export["id"])))))
    if export["state"] == "FAIL":
        raise ExportFailed(f"trial {export['trial']} of study {study}: {export['reason'] or 'no reason was given'}")
    return export


def exports(study: str) -> Flow[list[ExportDocument]]:
    """The exports of a study that the server keeps, oldest first.

    [export["id"] for export in client.exports("5f0c...")]
    """
    document = cast("ExportsDocument", (yield from document_of(Call("GET", path_of(study, "exports")))))
    return document["exports"]


def delete_export(study: str, export: str) -> Flow[None]:
    """Delete an export and its files from the server.

        client.delete_export("5f0c...", "e91b...")

    Raises RequestRefused while it is being written or downloaded.
    """
    yield from respond(Call("DELETE", path_of(study, "exports", export)))


def download(study: str, export: ExportDocument) -> Call:
    """The request for the model's files."""
    return Call("GET", path_of(study, "exports", export["id"], "download"), headers={"Accept": "application/x-tar"})
