"""Client methods about studies, as flows: generators that yield HTTP requests and return results.

A flow sends nothing itself. It yields requests, or pauses in seconds, and receives the responses. At the end it returns
a typed document. Therefore the blocking client and the asyncio client run the same flows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, urlsplit

from service.client.job_flows import jobs, submit_job
from service.client.requests import (
    Call,
    Flow,
    Reference,
    document_of,
    path_of,
    respond,
    text_of,
)
from service.errors import ExportFailed
from service.jobs.search.kind import SEARCH

if TYPE_CHECKING:
    from service.schemas.api import (
        ExportDocument,
        ExportsDocument,
        StudyDocument,
        TrialsDocument,
    )
    from service.schemas.files import BenchmarksDocument, ParetoDocument, SummaryDocument, TrialDocument
    from service.schemas.recipe import RecipeDocument

__all__ = [
    "add_benchmarks",
    "benchmarks",
    "delete_export",
    "download",
    "evaluate_trial",
    "exports",
    "finished_export",
    "pareto",
    "recipe",
    "report",
    "set_validity",
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


def submit(
    study: Path | str | Mapping[str, Any],
    *,
    idempotency_key: str | None = None,
    team: str | None = None,
    sharing: str | None = None,
) -> Flow[StudyDocument]:
    """Submit a study.

    The server reads models and data, so their paths must exist on the server's machine.

    Args:
        study: Path of a study file, or the content of one. Relative paths in a file start at the file's directory.
        idempotency_key: 1 to 255 visible ASCII characters. The same key with the same study returns the study that the
            first call created. Without a key, each call creates a new study.
        team: Team that the study belongs to; None is the only team for which you may submit.
        sharing: Who may read the study besides you and administrators: "private", "team" or "all"; None is "team".

    Returns:
        The server's document of the study.

    Raises:
        InvalidStudy: The file is invalid.
        RequestRefused: The server refused the study; the error has every problem.

    Examples:
        >>> client.submit("study.yaml")
        >>> client.submit({"name": "math-text", "models": {...}, ...}, idempotency_key="nightly-2031-05-04")
    """
    submitted = submit_job(SEARCH.name, study, idempotency_key=idempotency_key, team=team, sharing=sharing)
    return cast("StudyDocument", (yield from submitted))


def studies(*, state: str | None = None, name: str | None = None) -> Flow[list[StudyDocument]]:
    """List the studies, oldest first.

    Args:
        state: State of the studies to list, such as "RUNNING"; None lists studies in any state.
        name: Name of the studies to list; None lists studies with any name.

    Returns:
        The server's documents of the studies.

    Examples:
        >>> client.studies(state="RUNNING")
    """
    return cast("list[StudyDocument]", (yield from jobs(SEARCH.name, state=state, name=name)))


def study(study: str) -> Flow[StudyDocument]:
    """Return the current state of a study.

    Args:
        study: Id of the study.

    Returns:
        The server's document of the study.

    Raises:
        RequestRefused: The server has no such study (status 404).

    Examples:
        >>> client.study("5f0c...")["state"]
    """
    return cast("StudyDocument", (yield from document_of(Call("GET", path_of(study)))))


def summary(study: str) -> Flow[SummaryDocument]:
    """Return the summary of a study, the content of `summary.json`.

    Args:
        study: Id of the study.

    Examples:
        >>> client.summary("5f0c...")["best"]
    """
    return cast("SummaryDocument", (yield from document_of(Call("GET", path_of(study, "summary")))))


def benchmarks(study: str) -> Flow[BenchmarksDocument]:
    """Return the results of a study on its benchmarks.

    Args:
        study: Id of the study.

    Examples:
        >>> [row["averages"] for row in client.benchmarks("5f0c...")["rows"]]
    """
    return cast("BenchmarksDocument", (yield from document_of(Call("GET", path_of(study, "benchmarks")))))


def add_benchmarks(study: str, benchmarks: Path | str | Mapping[str, Any]) -> Flow[StudyDocument]:
    """Add benchmarks to a study that is COMPLETE; the study continues, and scores what is not scored yet.

    The server reads the data, so their paths must exist on the server's machine.

    Args:
        study: Id of the study.
        benchmarks: Path of a file with the key `benchmarks`, as in a study file, or the content of one.

    Returns:
        The server's document of the study.

    Raises:
        InvalidStudy: The file is invalid.
        RequestRefused: The server refused the benchmarks, or the study is not COMPLETE (status 409).

    Examples:
        >>> client.add_benchmarks("5f0c...", "benchmarks.yaml")
        >>> client.add_benchmarks("5f0c...", {"benchmarks": [{"name": "piqa", "task": "piqa", "metric": "acc"}]})
    """
    if isinstance(benchmarks, Path | str):
        from search_spaces.study.file import load_benchmarks

        benchmarks = load_benchmarks(Path(benchmarks)).model_dump(mode="json", exclude_unset=True)
    content = json.dumps(dict(benchmarks)).encode()
    call = Call("POST", path_of(study, "benchmarks"), headers={"Content-Type": "application/json"}, content=content)
    return cast("StudyDocument", (yield from document_of(call)))


def pareto(study: str, *, prefer: Mapping[str, float] | None = None) -> Flow[ParetoDocument]:
    """Return the Pareto front of a study, the content of `pareto.json`.

    Args:
        study: Id of the study.
        prefer: Weights of the objectives, which sum to 1.

    Returns:
        The Pareto front. With `prefer`, the key "preferred" has the trial that the weights pick.

    Raises:
        RequestRefused: The weights do not sum to 1, or name objectives that the study does not have.

    Examples:
        >>> [row["trial"] for row in client.pareto("5f0c...")["front"]]
        >>> client.pareto("5f0c...", prefer={"math": 0.6, "code": 0.4})["preferred"]["trial"]
    """
    query = {} if prefer is None else {"prefer": ",".join(f"{name}={weight!r}" for name, weight in prefer.items())}
    return cast("ParetoDocument", (yield from document_of(Call("GET", path_of(study, "pareto"), query))))


def report(study: Reference) -> Flow[str]:
    """Return the report of a job as one self-contained HTML page.

    Args:
        study: Id of a study, or the server's document of a job of any kind.

    Examples:
        >>> Path("report.html").write_text(client.report("5f0c..."))
    """
    return (yield from text_of(Call("GET", path_of(study, "report"))))


# -- trials ------------------------------------------------------------------------------------------------------------


def trials(study: str, *, state: str | None = None) -> Flow[list[TrialDocument]]:
    """List the trials of a study, in the order of their numbers.

    Args:
        study: Id of the study.
        state: State of the trials to list, such as "COMPLETE"; None lists trials in any state.

    Returns:
        All trials in this state. The server's list has several pages, which are all read.

    Examples:
        >>> [trial["values"] for trial in client.trials("5f0c...", state="COMPLETE")]
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
    """Return one trial of a study.

    Args:
        study: Id of the study.
        number: Number of the trial.

    Raises:
        RequestRefused: The study has no such trial (status 404).

    Examples:
        >>> client.trial("5f0c...", 17)["rungs"]
    """
    return cast("TrialDocument", (yield from document_of(Call("GET", path_of(study, "trials", number)))))


def set_validity(study: str, number: int, *, is_valid: bool, reason: str | None = None) -> Flow[TrialDocument]:
    """Mark a trial as invalid, so that nothing selects it, or as valid again.

    The trial keeps its samples. A COMPLETE study continues, so that a finalist that takes its place is scored.

    Args:
        study: Id of the study.
        number: Number of the trial.
        is_valid: Whether the trial is valid.
        reason: Why the trial is invalid; needed if it is.

    Returns:
        The server's document of the trial.

    Raises:
        RequestRefused: The study has no such trial (status 404), or the reason is missing (422).

    Examples:
        >>> client.set_validity("5f0c...", 17, is_valid=False, reason="its answers were cut off")
    """
    content = json.dumps({"is_valid": is_valid, "reason": reason}).encode()
    call = Call("PUT", path_of(study, "trials", number, "validity"), {}, {"Content-Type": "application/json"}, content)
    return cast("TrialDocument", (yield from document_of(call)))


def evaluate_trial(study: str, number: int, *, reason: str | None = None) -> Flow[StudyDocument]:
    """Request that the recipe of a pruned or failed trial is evaluated at the full budget, as a new trial.

    Samples that are stored are not scored again. A COMPLETE study continues.

    Args:
        study: Id of the study.
        number: Number of the trial.
        reason: The reason, which the events of the study show.

    Returns:
        The server's document of the study after the request.

    Raises:
        RequestRefused: The study has no such trial (status 404); the trial is neither PRUNED nor FAIL, the study is
            CANCELLED, or its searcher allows no further trials until the study is COMPLETE (409).

    Examples:
        >>> client.evaluate_trial("5f0c...", 17)
    """
    query = {} if reason is None else {"reason": reason}
    path = f"{path_of(study, 'trials', number)}:evaluate"
    return cast("StudyDocument", (yield from document_of(Call("POST", path, query))))


def recipe(study: str, number: int) -> Flow[RecipeDocument]:
    """Return the recipe of a trial's merge, as in the file `recipe.json` of an exported model.

    Args:
        study: Id of the study.
        number: Number of the trial.

    Raises:
        RequestRefused: The study has no such trial (status 404).

    Examples:
        >>> client.recipe("5f0c...", 17)["layers"][0]
    """
    return cast("RecipeDocument", (yield from document_of(Call("GET", path_of(study, "trials", number, "recipe")))))


# -- exports -----------------------------------------------------------------------------------------------------------


def finished_export(
    study: str, trial: str | int, *, dtype: str | None, prefer: Mapping[str, float] | None
) -> Flow[ExportDocument]:
    """Request the export of a trial's merged model, and wait until the server has written the model.

    Args:
        study: Id of the study.
        trial: Number of the trial, or "best".
        dtype: Dtype of the weights; None is the dtype that the study's engine scored in.
        prefer: Weights of the objectives, which pick a trial of the Pareto front; `trial` must be "best" then.

    Returns:
        The server's document of the complete export.

    Raises:
        ExportFailed: The server could not write the model.
    """
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
    """List the exports of a study that the server keeps, oldest first.

    Args:
        study: Id of the study.

    Examples:
        >>> [export["id"] for export in client.exports("5f0c...")]
    """
    document = cast("ExportsDocument", (yield from document_of(Call("GET", path_of(study, "exports")))))
    return document["exports"]


def delete_export(study: str, export: str) -> Flow[None]:
    """Delete an export and its files from the server.

    Args:
        study: Id of the study.
        export: Id of the export.

    Raises:
        RequestRefused: The export is being written or downloaded.

    Examples:
        >>> client.delete_export("5f0c...", "e91b...")
    """
    yield from respond(Call("DELETE", path_of(study, "exports", export)))


def download(study: str, export: ExportDocument) -> Call:
    """Build the request that downloads the files of an exported model."""
    return Call("GET", path_of(study, "exports", export["id"], "download"), headers={"Accept": "application/x-tar"})
