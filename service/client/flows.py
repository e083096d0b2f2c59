"""Client methods about studies, as flows: generators that yield HTTP requests and return results.

A flow sends nothing itself. It yields requests, or pauses in seconds, and receives the responses. At the end it returns
a typed document. Therefore the blocking client and the asyncio client run the same flows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

from service.client.events import PATIENCE_S
from service.client.job_flows import jobs, submit_job
from service.client.requests import (
    Attempts,
    Call,
    Flow,
    Reference,
    delete_of,
    document_of,
    path_of,
    text_of,
)
from service.client.views import Front, Job, Summary, Trial, TrialList, TrialSamples
from service.errors import ExportFailed, RequestRefused
from service.jobs.search.kind import SEARCH

if TYPE_CHECKING:
    from service.schemas.api import (
        BegunStudyDocument,
        CheckDocument,
        ExportDocument,
        ExportsDocument,
        ServedTrialDocument,
        ShownTrialDocument,
        SourceModelsDocument,
        StudyDocument,
        TrialColumnsDocument,
        TrialsDocument,
    )
    from service.schemas.files import BenchmarksDocument, SummaryDocument, TrialDocument
    from service.schemas.recipe import RecipeDocument

__all__ = [
    "add_benchmarks",
    "begin_study",
    "benchmarks",
    "check_study",
    "delete_export",
    "download",
    "enqueue_trial",
    "evaluate_trial",
    "exports",
    "finished_export",
    "importance",
    "mergekit",
    "models",
    "pareto",
    "plot",
    "recipe",
    "report",
    "samples",
    "serve",
    "set_validity",
    "studies",
    "study",
    "submit",
    "summary",
    "trial",
    "trial_columns",
    "trials",
]

# The longest interval at which an export's state is polled; the first polls follow faster.
MAX_POLL_S = 3.0

PAGE = 500
CONFLICT = 409


# -- studies -----------------------------------------------------------------------------------------------------------


def submit(
    study: Path | str | Mapping[str, Any],
    *,
    idempotency_key: str | None = None,
    team: str | None = None,
    sharing: str | None = None,
) -> Flow[StudyDocument]:
    """Submit a study.

    A study searches for the best merges of models. The server reads models and data, so their paths must exist on the
    server's machine.

    Args:
        study: Path of a study file, or the content of such a file. Relative paths in a file start at the file's
            directory.
        idempotency_key: 1 to 255 visible ASCII characters. The same key with the same study returns the study that the
            first call created. Without a key, each call creates a new study.
        team: Team that the study belongs to; None means the only team for which you may submit jobs.
        sharing: Who may read the study besides you and administrators: "private", "team" or "all"; None is "team".

    Returns:
        The server's JSON document that describes the study.

    Raises:
        InvalidStudy: The file is invalid.
        RequestRefused: The server refused the study; the error has every problem.

    Examples:
        >>> client.submit("study.yaml")
        >>> client.submit({"name": "math-text", "models": {...}, ...}, idempotency_key="nightly-2031-05-04")
    """
    submitted = submit_job(SEARCH.name, study, idempotency_key=idempotency_key, team=team, sharing=sharing)
    return cast("StudyDocument", (yield from submitted))


def check_study(study: Path | str | Mapping[str, Any], *, level: str = "full") -> Flow[CheckDocument]:
    """Check a study on the server without submitting it.

    Args:
        study: Path of a study file, or the content of such a file. Relative paths in a file start at the file's
            directory.
        level: "syntax" checks the file alone; "full" also checks models, tasks and memory, and plans the study.

    Returns:
        Every problem with its field. If there is no problem, and `level` is "full", the document also has the plan:
        samples, hours, memory and disk space.

    Raises:
        InvalidStudy: `study` is the path of an invalid file.

    Examples:
        >>> client.check_study({"name": "math-text", "models": {...}, ...}, level="syntax")["problems"]
    """
    content = study if isinstance(study, Mapping) else SEARCH.load(Path(study))
    headers = {"Content-Type": "application/json"}
    call = Call("POST", "/v1/studies:check", {"level": level}, headers, json.dumps(dict(content)).encode())
    return cast("CheckDocument", (yield from document_of(call)))


def begin_study(configuration: Path | str | Mapping[str, Any], *, name: str = "mergekit") -> Flow[BegunStudyDocument]:
    """Begin a study file with the models of a mergekit configuration and with its merge; nothing is stored.

    The study scores the configuration's merge (`search.recipes`) beside the baselines, and searches for better merges.
    Fill in the objectives, and submit the study.

    Args:
        configuration: Path of a mergekit file, or the content of such a file.
        name: Name of the study and of the merge.

    Returns:
        The content of the study file, whose objectives are empty, and warnings about settings without effect.

    Raises:
        OSError: The file `configuration` cannot be read.
        RequestRefused: `configuration` is no mergekit configuration, or a study cannot have its models (status 422).

    Examples:
        >>> study = client.begin_study("mergekit.yml", name="math-code")["study"]
        >>> client.submit({**study, "objectives": [{"name": "math", "task": "gsm8k", "metric": "exact_match"}]})
    """
    if isinstance(configuration, Mapping):
        kind, content = "application/json", json.dumps(dict(configuration)).encode()
    else:
        kind, content = "application/yaml", Path(configuration).read_bytes()
    headers = {"Content-Type": kind}
    call = Call("POST", "/v1/studies:from_mergekit", {"name": name}, headers, content)
    return cast("BegunStudyDocument", (yield from document_of(call)))


def studies(
    *,
    state: str | None = None,
    name: str | None = None,
    text: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
) -> Flow[list[StudyDocument]]:
    """List the studies, oldest first.

    Args:
        state: State of the studies to list, such as "RUNNING"; None lists studies in any state.
        name: Name of the studies to list; None lists studies with any name.
        text: Lists only studies that have this text in their name, description or owner's name, or whose id begins with
            it. None lists studies with any text.
        sort: Field to sort by: "created", "name", "state", "owner" or "priority". With "-" before the field, as in
            "-name", the largest value is first.
        limit: Maximum number of studies, at most 1000; None lists all.

    Returns:
        The server's JSON documents that describe the studies.

    Examples:
        >>> client.studies(state="RUNNING")
    """
    found = jobs(SEARCH.name, state=state, name=name, text=text, sort=sort, limit=limit)
    return cast("list[StudyDocument]", (yield from found))


def study(study: str) -> Flow[StudyDocument]:
    """Return the current state of a study, with its progress and links to its results.

    Args:
        study: Id of the study.

    Returns:
        The server's JSON document that describes the study.

    Raises:
        RequestRefused: The server has no such study (status 404).

    Examples:
        >>> client.study("5f0c...")["state"]
    """
    return cast("StudyDocument", Job((yield from document_of(Call("GET", path_of(study))))))


def summary(study: str) -> Flow[SummaryDocument]:
    """Return the summary of a study, the content of `summary.json`.

    The summary has the best trial, the results on held-out data and the cost of the search.

    Args:
        study: Id of the study.

    Examples:
        >>> client.summary("5f0c...")["best"]
    """
    return cast("SummaryDocument", Summary((yield from document_of(Call("GET", path_of(study, "summary"))))))


def benchmarks(study: str) -> Flow[BenchmarksDocument]:
    """Return the results of a study on its benchmarks.

    The benchmarks are tasks that the search does not use; chosen trials are scored on them at the end.

    Args:
        study: Id of the study.

    Examples:
        >>> [row["averages"] for row in client.benchmarks("5f0c...")["rows"]]
    """
    return cast("BenchmarksDocument", (yield from document_of(Call("GET", path_of(study, "benchmarks")))))


def add_benchmarks(study: str, benchmarks: Path | str | Mapping[str, Any]) -> Flow[StudyDocument]:
    """Add benchmarks to a study that is COMPLETE; the study then continues, and scores trials on them.

    Benchmarks are tasks that the search does not use. The server reads their data, so their paths must exist on the
    server's machine.

    Args:
        study: Id of the study.
        benchmarks: Path of a file with the key `benchmarks`, as in a study file, or the content of such a file.

    Returns:
        The server's JSON document that describes the study.

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
    attempts = Attempts()
    try:
        found = yield from document_of(call, attempts=attempts)
    except RequestRefused as error:
        if error.status != CONFLICT or not attempts.may_have_arrived:
            raise
        stored = yield from document_of(Call("GET", path_of(study, SEARCH.document_link)))
        if not _has_benchmarks(stored, benchmarks):
            raise
        found = yield from document_of(Call("GET", path_of(study)))
    return cast("StudyDocument", Job(found))


def _has_benchmarks(study: Mapping[str, Any], added: Mapping[str, Any]) -> bool:
    """Whether a study file, the content `study`, has all benchmarks that the file with the content `added` adds."""
    from search_spaces.study.file import Study, parse_benchmarks, with_benchmarks

    try:
        stored = Study.model_validate(study)
        return with_benchmarks(stored, parse_benchmarks(added)).canonical() == stored.canonical()
    except ValueError:  # a server of another version
        return False


def pareto(study: str, *, prefer: Mapping[str, float] | None = None) -> Flow[Front]:
    """Return the Pareto front of a study, the content of `pareto.json`.

    Args:
        study: Id of the study.
        prefer: Weights of the objectives, which sum to 1; None picks no trial.

    Returns:
        The Pareto front; its method `to_dataframe` converts it to a pandas data frame. With `prefer`, the key
        "preferred" has the trial of the front that is best by the weights.

    Raises:
        RequestRefused: The weights do not sum to 1, or name objectives that the study does not have.

    Examples:
        >>> [row["trial"] for row in client.pareto("5f0c...")["front"]]
        >>> client.pareto("5f0c...", prefer={"math": 0.6, "code": 0.4})["preferred"]["trial"]
    """
    weights = None if prefer is None else _plain(prefer)
    query = {} if weights is None else {"prefer": ",".join(f"{name}={weight!r}" for name, weight in weights.items())}
    return Front((yield from document_of(Call("GET", path_of(study, "pareto"), query))))


def _plain(prefer: Mapping[str, float]) -> dict[str, float]:
    """Convert weights of objectives, which may be numbers of NumPy, to Python's floats, keyed by name."""
    return {name: float(weight) for name, weight in prefer.items()}


def report(study: Reference) -> Flow[str]:
    """Return the report on the results of a job as one self-contained HTML page.

    Args:
        study: Id of a study, or a document that the server returned for a job of any kind.

    Examples:
        >>> Path("report.html").write_text(client.report("5f0c..."))
    """
    return (yield from text_of(Call("GET", path_of(study, "report"))))


def plot(study: str, name: str, *, trial: int | None = None) -> Flow[dict[str, Any]]:
    """Return the data series of a plot of a study, as numbers.

    Args:
        study: Id of the study.
        name: Name of the plot, such as "history" or "rungs".
        trial: Number of a trial, for the plots of a single trial: "recipe", "coefficients" and "path". None is the
            best trial.

    Raises:
        RequestRefused: There is no such plot or trial (status 404).

    Examples:
        >>> client.plot("5f0c...", "recipe", trial=17)["layers"]
    """
    place = () if trial is None else ("trials", trial)
    return (yield from document_of(Call("GET", path_of(study, *place, "plots", name))))


def importance(study: str, *, objective: str | None = None) -> Flow[dict[str, Any]]:
    """Return the importance of each parameter for an objective, by PED-ANOVA over the trials at full budget.

    Args:
        study: Id of the study.
        objective: Name of the objective; None is the first objective.

    Returns:
        "parameters" has the importance of each parameter, the most important first. "layers", "parts" and "experts"
        have sums of importances by range of layers, by part of a layer (such as attention), and by expert. Without
        importances, for example below 50 trials, "parameters" is None, and "reason" says why.

    Raises:
        RequestRefused: The study has no such objective (status 422).

    Examples:
        >>> client.importance("5f0c...", objective="math")["experts"]
    """
    query = {} if objective is None else {"objective": objective}
    return (yield from document_of(Call("GET", path_of(study, "plots", "importance"), query)))


def models(
    *, under: str | None = None, text: str | None = None, limit: int | None = None
) -> Flow[SourceModelsDocument]:
    """List the models that jobs on the server may use: checkpoints and LoRA adapters with safetensors files.

    Args:
        under: Absolute directory on the server to search; None means all directories that jobs may read.
        text: Text that the name, directory or architecture has.
        limit: Maximum number of models; None is 200.

    Returns:
        The models, sorted by path; the directories that were searched; and whether the search was complete.

    Raises:
        RequestRefused: Jobs may not read `under`, or `under` is no directory (status 422).

    Examples:
        >>> [model["name"] for model in client.models(text="llama")["models"]]
    """
    given = {"under": under, "q": text, "limit": limit}
    query = {name: str(value) for name, value in given.items() if value is not None}
    return cast("SourceModelsDocument", (yield from document_of(Call("GET", "/v1/models", query))))


# -- trials ------------------------------------------------------------------------------------------------------------


def trials(
    study: str,
    *,
    state: str | None = None,
    origin: str | None = None,
    sort: str | None = None,
    where: Sequence[str] = (),
    text: str | None = None,
    limit: int | None = None,
) -> Flow[TrialList]:
    """List the trials of a study that satisfy every condition, in the order of their numbers or sorted by a field.

    Args:
        study: Id of the study.
        state: State of the trials to list, such as "COMPLETE"; None lists trials in any state.
        origin: Where the recipes of the listed trials are from: "source" (a source model alone), "published", "search",
            "refined" (improved by gradients after the search) or "user"; None lists trials of any origin.
        sort: Field to sort by, such as "value.math", "samples" or "parameter.scale"; with "-" before the field, as in
            "-mean", the largest value is first. If the field is a value of objectives, trials that were scored on all
            samples are first.
        where: Conditions on fields, such as "math>=0.6" or "rung<2".
        text: Lists only trials whose label or number contains this text; None lists all trials.
        limit: Maximum number of trials; None lists all.

    Returns:
        All of these trials, even if the server sends them in several parts. The list's method `to_dataframe` converts
        the trials to a pandas data frame.

    Raises:
        RequestRefused: A condition or the field to sort by is not accepted (status 422).

    Examples:
        >>> [trial["values"] for trial in client.trials("5f0c...", state="COMPLETE")]
        >>> client.trials("5f0c...", sort="-mean", where=["math>=0.6"], limit=10)
    """
    given = {"state": state, "origin": origin, "sort": sort, "where": list(where) or None, "q": text}
    query: dict[str, str | Sequence[str]] = {name: value for name, value in given.items() if value is not None}
    query["limit"] = str(PAGE if limit is None else min(limit, PAGE))
    found: list[TrialDocument] = []
    while limit is None or len(found) < limit:
        page = cast("TrialsDocument", (yield from document_of(Call("GET", path_of(study, "trials"), query))))
        found += [cast("TrialDocument", Trial(each)) for each in page["trials"]]
        if page["next"] is None:
            break
        query = dict(parse_qs(urlsplit(page["next"]).query))
    return TrialList(found[:limit])


def trial_columns(study: str, *, fields: Sequence[str] | None = None) -> Flow[dict[str, list[Any]]]:
    """Return the trials of a study as columns: for each column's name, a list with a value or None for each trial.

    Values are given for the highest rung (number of samples) that a trial has finished.

    Args:
        study: Id of the study.
        fields: Names of columns, such as "number" or "value.*"; None is every column.

    Examples:
        >>> pandas.DataFrame(client.trial_columns("5f0c...", fields=["number", "state", "value.*", "parameter.*"]))
    """
    query = {} if fields is None else {"fields": ",".join(fields)}
    call = Call("GET", path_of(study, "trials", "columns"), query)
    document = cast("TrialColumnsDocument", (yield from document_of(call)))
    return document["columns"]


def trial(study: str, number: int) -> Flow[ShownTrialDocument]:
    """Return one trial of a study: its configuration, its state, its values, and the origin of these values.

    Args:
        study: Id of the study.
        number: Number of the trial.

    Raises:
        RequestRefused: The study has no such trial (status 404).

    Examples:
        >>> client.trial("5f0c...", 17)["rungs"]
    """
    return cast("ShownTrialDocument", Trial((yield from document_of(Call("GET", path_of(study, "trials", number))))))


def samples(
    study: str,
    number: int,
    *,
    objective: str | None = None,
    split: str | None = None,
    against: int | None = None,
    only: str | None = None,
    after: int | None = None,
    limit: int | None = None,
) -> Flow[TrialSamples]:
    """Return samples of a trial, or of two trials side by side: prompts, references, completions and values.

    Args:
        study: Id of the study.
        number: Number of the trial.
        objective: Name of an objective or benchmark of the split; None is the first objective.
        split: "search", "holdout" or "bench" (benchmarks); None is "search".
        against: Number of another trial to compare with.
        only: Samples to return: "differs" (the values differ), "a_only" (only the first trial is right), "b_only" (only
            the second trial is right) or "both_wrong" (neither trial is right); None returns all samples.
        after: Only samples at a larger position in the order of scoring.
        limit: Maximum number of samples; None is 50. Fewer samples are returned if their texts are long.

    Returns:
        The samples, with the link "next" to the samples after them. With `against`, "counts" has the numbers of samples
        that both trials, only one trial, or neither trial has right, and "difference" has the paired difference with
        its 95 % interval. "counts" and "difference" are computed over all samples that both trials have. With the
        metric "entropy" of images, which does not depend on right answers, "counts" is None, and `only` may be
        "differs" alone.

    Raises:
        RequestRefused: The study has no such trial (status 404) or objective (status 422).

    Examples:
        >>> client.samples("5f0c...", 17, objective="math", against=2, only="differs")["difference"]
    """
    given = {"objective": objective, "split": split, "against": against, "only": only, "after": after, "limit": limit}
    query = {name: str(value) for name, value in given.items() if value is not None}
    call = Call("GET", path_of(study, "trials", number, "samples"), query)
    return TrialSamples((yield from document_of(call)))


def set_validity(study: str, number: int, *, is_valid: bool, reason: str | None = None) -> Flow[TrialDocument]:
    """Mark a trial as invalid, so that all results leave it out, or as valid again.

    The trial keeps its scored samples. If other trials are now among the best, they are scored on held-out data; a
    COMPLETE study continues for this.

    Args:
        study: Id of the study.
        number: Number of the trial.
        is_valid: Whether the trial is valid.
        reason: Why the trial is invalid; needed if the trial is invalid.

    Returns:
        The server's JSON document that describes the trial.

    Raises:
        RequestRefused: The study has no such trial (status 404), or the reason is missing (422).

    Examples:
        >>> client.set_validity("5f0c...", 17, is_valid=False, reason="its answers were cut off")
    """
    content = json.dumps({"is_valid": is_valid, "reason": reason}).encode()
    call = Call("PUT", path_of(study, "trials", number, "validity"), {}, {"Content-Type": "application/json"}, content)
    return cast("TrialDocument", Trial((yield from document_of(call))))


def serve(
    study: str, number: int, *, idle_minutes: float | None = None, shares_engines: bool = False
) -> Flow[ServedTrialDocument]:
    """Serve the merge of a trial, so that prompts can be completed with it.

    All trials of the study are served together. Serving begins when the server has an engine, and ends when no request
    has come for `idle_minutes`, or when it is cancelled (`client.cancel(served)`).

    Args:
        study: Id of the study.
        number: Number of the trial.
        idle_minutes: Minutes without a request after which serving ends; None is the server's default.
        shares_engines: Whether engines that a search uses complete the prompts too, which slows the search. Only
            administrators of the server may set it to True.

    Returns:
        The server's document of the served study. Its link `openai` is the base path for clients of OpenAI's API. Its
        key `model` is the name by which requests of such clients choose the trial.

    Raises:
        RequestRefused: The study has no such trial (status 404), its team serves too many studies (409), or you may not
            export models of the study (403).

    Examples:
        >>> served = client.serve("5f0c...", 12)
        >>> openai.OpenAI(base_url=client.url + served["links"]["openai"], api_key=token)
    """
    options = {} if idle_minutes is None else {"idle_minutes": idle_minutes}
    content = json.dumps({**options, "shares_engines": shares_engines}).encode()
    path = f"{path_of(study, 'trials', number)}:serve"
    call = Call("POST", path, {}, {"Content-Type": "application/json"}, content)
    return cast("ServedTrialDocument", Job((yield from document_of(call))))


def evaluate_trial(study: str, number: int, *, reason: str | None = None) -> Flow[StudyDocument]:
    """Request that the recipe of a pruned or failed trial is evaluated at the full budget, as a new trial.

    A recipe says which source models are merged, and how. The full budget is all samples of the study; stored samples
    are not scored again. A COMPLETE study continues.

    Args:
        study: Id of the study.
        number: Number of the trial.
        reason: The reason, which the events of the study show; None states no reason.

    Returns:
        The server's JSON document that describes the study after the request.

    Raises:
        RequestRefused: The study has no such trial (status 404); the trial is neither PRUNED nor FAIL, the study is
            CANCELLED, or its searcher allows no further trials until the study is COMPLETE (409).

    Examples:
        >>> client.evaluate_trial("5f0c...", 17)
    """
    query = {} if reason is None else {"reason": reason}
    path = f"{path_of(study, 'trials', number)}:evaluate"
    return cast("StudyDocument", Job((yield from document_of(Call("POST", path, query)))))


def enqueue_trial(
    study: str,
    label: str,
    *,
    recipe: Mapping[str, Any] | None = None,
    configuration: Mapping[str, Any] | None = None,
    reason: str | None = None,
) -> Flow[StudyDocument]:
    """Request that a given merge is evaluated at the full budget, as a new trial of the study.

    The full budget is all samples of the study's search. A COMPLETE study continues. The same request sent twice
    enqueues one trial.

    Args:
        study: Id of the study.
        label: Label of the new trial.
        recipe: Content of a `recipe.json`, or of a mergekit configuration over the study's models.
        configuration: A value for each parameter of the study's search space, in place of `recipe`.
        reason: The reason, which the events of the study show.

    Returns:
        The server's document of the study after the request.

    Raises:
        RequestRefused: The study cannot evaluate the merge (status 422); another merge has the label, the study is
            CANCELLED, or its searcher allows no further trials until the study is COMPLETE (409).

    Examples:
        >>> client.enqueue_trial("5f0c...", "by hand", configuration={"math.weight": 0.7, "code.weight": 0.3})
    """
    body = {"label": label, "recipe": recipe, "configuration": configuration, "reason": reason}
    content = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    call = Call("POST", path_of(study, "trials"), {}, {"Content-Type": "application/json"}, content)
    return cast("StudyDocument", Job((yield from document_of(call))))


def recipe(study: str, number: int) -> Flow[RecipeDocument]:
    """Return the recipe of a trial's merge, as in the file `recipe.json` of an exported model.

    The recipe says which source models are merged, and how.

    Args:
        study: Id of the study.
        number: Number of the trial.

    Raises:
        RequestRefused: The study has no such trial (status 404).

    Examples:
        >>> client.recipe("5f0c...", 17)["layers"][0]
    """
    return cast("RecipeDocument", (yield from document_of(Call("GET", path_of(study, "trials", number, "recipe")))))


def mergekit(study: str, number: int) -> Flow[str]:
    """Return a mergekit configuration that computes the same merge as a trial, up to float32 rounding.

    Args:
        study: Id of the study.
        number: Number of the trial.

    Returns:
        The configuration, as YAML.

    Raises:
        RequestRefused: The study has no such trial (status 404), or mergekit would compute other tensors (409); the
            document of the error lists the reasons.

    Examples:
        >>> Path("mergekit.yml").write_text(client.mergekit("5f0c...", 17))
    """
    return (yield from text_of(Call("GET", path_of(study, "trials", number, "mergekit"))))


# -- exports -----------------------------------------------------------------------------------------------------------


def finished_export(
    study: str, trial: str | int, *, dtype: str | None, prefer: Mapping[str, float] | None
) -> Flow[ExportDocument]:
    """Request the export of a trial's merged model, and wait until the server has written the model.

    Args:
        study: Id of the study.
        trial: Number of the trial, or "best".
        dtype: Dtype of the weights; None means the dtype in which the study scored its merges.
        prefer: Weights of the objectives. The trial of the Pareto front that is best by these weights is exported, and
            `trial` must be "best". None exports the trial that `trial` names.

    Returns:
        The server's JSON document that describes the complete export.

    Raises:
        ExportFailed: The server could not write the model.
    """
    asked = {"trial": trial, "dtype": dtype, **({} if prefer is None else {"prefer": _plain(prefer)})}
    content = json.dumps(asked).encode()
    call = Call("POST", path_of(study, "exports"), {}, {"Content-Type": "application/json"}, content)
    export = cast("ExportDocument", (yield from document_of(call)))
    pause_s = 0.1
    while export["state"] not in ("COMPLETE", "FAIL"):
        yield pause_s
        pause_s = min(1.5 * pause_s, MAX_POLL_S)
        call = Call("GET", path_of(study, "exports", export["id"]))
        export = cast("ExportDocument", (yield from document_of(call, patience_s=PATIENCE_S)))
    if export["state"] == "FAIL":
        raise ExportFailed(f"trial {export['trial']} of study {study}: {export['reason'] or 'no reason was given'}")
    return export


def exports(study: str) -> Flow[list[ExportDocument]]:
    """List the exports of a study that the server keeps, oldest first.

    An export is the merged model of a trial, written for download.

    Args:
        study: Id of the study.

    Examples:
        >>> [export["id"] for export in client.exports("5f0c...")]
    """
    document = cast("ExportsDocument", (yield from document_of(Call("GET", path_of(study, "exports")))))
    return document["exports"]


def delete_export(study: str, export: str) -> Flow[None]:
    """Delete an export (a merged model for download) and its files from the server.

    Args:
        study: Id of the study.
        export: Id of the export.

    Raises:
        RequestRefused: The export is being written or downloaded.

    Examples:
        >>> client.delete_export("5f0c...", "e91b...")
    """
    yield from delete_of(Call("DELETE", path_of(study, "exports", export)))


def download(study: str, export: ExportDocument) -> Call:
    """Build the request that downloads the files of an exported model from the server.

    `study` is the id of the study, and `export` is the server's document of the export.
    """
    return Call("GET", path_of(study, "exports", export["id"], "download"), headers={"Accept": "application/x-tar"})
