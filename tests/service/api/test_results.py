"""Results of a study over HTTP: the same documents as the result files."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response

from search_spaces.constraints import parse_constraint
from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import Study
from service.api.conditional import answer_computed
from service.api.importances import Importances
from service.api.presenters import rfc_3339
from service.api.record_cache import MAX_LARGE_READS, RunRecords
from service.api.routes.samples import NO_PROMPTS, NO_RESPONSES
from service.results.documents import pareto, trial_document, trial_documents
from service.results.load import run_record
from service.results.preference import choices
from service.results.report import render_report
from service.results.selection import accuracy_objectives, full_budget_trials
from service.results.series import CHARTS
from service.results.statistics import paired_difference
from service.results.summary import summary
from service.schemas.json_schemas import schemas
from service.store import SampleText
from service.store.documents import VERIFICATION, read_verification
from service.types import EventKind, JobRecord, JobState, Origin, TrialResult, TrialState
from tests.service.api.harness import ApiServer, document, finished_study, resolved, rung, stored_study, write_trial
from tests.service.paths_study import plain_study
from tests.service.synthetic_run import run_record as made_up
from tests.service.web.made import searched_study as drawn_study
from workers.types import Split

pytestmark = pytest.mark.slow  # whole searches


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture(scope="module")
def study(server: ApiServer) -> JobRecord:
    return finished_study(server.store, num_trials=30)


@pytest.fixture
def get(http: httpx.Client, study: JobRecord) -> Any:
    def get(rest: str) -> Any:
        answer = http.get(f"/v1/studies/{study.id}{rest}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    return get


def as_json(document: Any) -> Any:
    return json.loads(json.dumps(document))


def test_pages_of_trials_are_all_of_them(get: Any, server: ApiServer, study: JobRecord, http: httpx.Client) -> None:
    every = [as_json(trial_document(trial)) for trial in server.store.trials(study.id)]
    assert get("/trials")["trials"] == every
    page = get("/trials?limit=10")
    seen = page["trials"]
    assert len(seen) == 10
    while page["next"] is not None:
        page = http.get(page["next"]).json()
        seen += page["trials"]
    assert seen == every
    assert get("/trials?limit=39")["next"] is None
    schema = schemas()["trial"]
    jsonschema.validate(every[0], schema)
    validator = jsonschema.validators.validator_for(schema)(schema)
    for trial in every:
        validator.validate(trial)


def test_a_sorted_table_is_paged(get: Any, server: ApiServer, study: JobRecord, http: httpx.Client) -> None:
    """Pages of a table follow each other, and `total` counts the trials of all pages."""
    trials = server.store.trial_results(study.id)
    expected = [t.number for t in sorted(trials, key=lambda t: (not t.values, not t.rungs, -last(t), t.number))]
    page = get("/trials?sort=-math&limit=7")
    seen = page["trials"]
    while page["next"] is not None:
        assert page["total"] == len(trials)
        page = http.get(page["next"]).json()
        seen += page["trials"]
    assert [trial["number"] for trial in seen] == expected
    assert seen[0] == as_json(trial_document(server.store.trial(study.id, expected[0])))
    few = get("/trials?where=math>=0.5,rung=2&where=origin=search&q=TRIAL&offset=1&limit=1&state=COMPLETE")
    kept = [t for t in trials if t.origin == "search" and t.rungs and t.rungs[-1].rung == 2 and last(t) >= 0.5]
    assert (few["total"], few["trials"][0]["number"]) == (len(kept), kept[1].number)
    assert few["total"] < len(trials)


def last(trial: TrialResult) -> float:
    return trial.rungs[-1].values["math"] if trial.rungs else 0.0


def test_tables_follow_what_changes(server: ApiServer, http: httpx.Client) -> None:
    """A table has a trial that was added since the last request; an unchanged study answers 304."""
    study = finished_study(server.store)
    path = f"/v1/studies/{study.id}/trials?sort=-number&limit=1"
    first = http.get(path)
    assert http.get(path, headers={"If-None-Match": first.headers["ETag"]}).status_code == 304
    highest = first.json()["trials"][0]["number"]
    assert http.put(
        f"/v1/studies/{study.id}/trials/{highest}/validity", json={"is_valid": False, "reason": "wrong"}
    ).is_success
    assert http.get(path, headers={"If-None-Match": first.headers["ETag"]}).json()["trials"][0]["invalid"] == "wrong"
    writer = server.store.open_attempt(study.id)
    writer.set_state(JobState.RUNNING)
    write_trial(writer, replace(server.store.trial(study.id, highest), number=highest + 1))
    assert http.get(path).json()["trials"][0]["number"] == highest + 1
    assert http.get(f"/v1/studies/{study.id}/summary").is_success


def test_wrong_tables_are_refused(http: httpx.Client, study: JobRecord) -> None:
    """A refusal names the parameter, the expression and what is accepted."""
    for query, field, message in (
        ("where=math>>1", "where", "'math>>1' is not FIELD, one of >= <= != = > < and a value"),
        ("where=speed>1", "where", "'speed>1': the study has no 'speed'; accepted are number, state"),
        ("where=rung<two", "where", "'rung<two': 'two' is not a number, which < needs"),
        ("where=parameter.none=1", "where", "the study has no 'parameter.none'"),
        ("sort=-speed", "sort", "'speed' is no field to sort by; accepted are number, state"),
        ("sort=mean&after=3", "after", "pages through all trials by number"),
        (f"where={'number>0,' * 50}number>1", "where", "has 51 conditions; give at most 50"),
        (f"where=number>0&where={'a' * 2001}", "where.1", "at most 2000 characters"),
        (f"sort={'a' * 2001}", "sort", "at most 2000 characters"),
        (f"sort={'a' * 2000}", "sort", "is no field to sort by"),
    ):
        answer = http.get(f"/v1/studies/{study.id}/trials?{query}")
        assert answer.status_code == 422, query
        (problem,) = answer.json()["problems"]
        assert problem["field"] == field
        assert message in problem["message"]


def test_long_choices_of_columns_are_refused(http: httpx.Client, study: JobRecord) -> None:
    """The length of the choice and the number of its patterns are limited."""
    path = f"/v1/studies/{study.id}/trials/columns"
    for fields, message in (("a" * 2001, "at most 2000 characters"), ("a*," * 50 + "b*", None), ("*", None)):
        answer = http.get(path, params={"fields": fields})
        assert answer.status_code == (200 if message is None else 422)
        assert message is None or message in answer.text
    refused = http.get(path, params={"fields": ",".join(f"a{number}*" for number in range(51))})
    assert refused.json()["problems"] == [{"field": "fields", "message": "has 51 patterns; give at most 50"}]


def test_plots_of_any_trial(server: ApiServer, study: JobRecord, get: Any, http: httpx.Client) -> None:
    """The plots of the best trial are those of its number; other trials have plots of their own."""
    run = run_record(server.store, study.id)
    assert run.best is not None
    worst = next(trial for trial in run.whole_trials if trial.configuration and trial != run.best)
    for name in ("recipe", "coefficients", "path"):
        assert get(f"/trials/{run.best.number}/plots/{name}") == get(f"/plots/{name}")
        found = get(f"/trials/{worst.number}/plots/{name}")
        assert (found["plot"], found["trial"]) == (name, worst.number)
    assert get(f"/trials/{worst.number}/plots/recipe")["models"] == list(worst.read_recipe().models)
    assert http.get(f"/v1/studies/{study.id}/trials/1/plots/history").status_code == 404
    assert http.get(f"/v1/studies/{study.id}/trials/9999/plots/recipe").status_code == 404


def test_the_timeline_has_every_chunk(server: ApiServer, study: JobRecord, get: Any, http: httpx.Client) -> None:
    """Chunks of held-out data were scored by one replica; a time without work is empty."""
    found = get("/plots/timeline?bins=10")
    rows = server.store.evidence(study.id)
    assert (found["plot"], found["replicas"]) == ("timeline", ["replica-1"])
    assert [chunk["end"] for chunk in found["chunks"]] == [row.finished_at for row in rows]
    assert [chunk["trial"] for chunk in found["chunks"]] == [row.trial for row in rows]
    assert [(event["kind"], event["text"]) for event in found["events"]] == [("attempt", "attempt 1")]
    assert len(found["bins"][0]["score"]) == 10
    assert get(f"/plots/timeline?from={found['end'] + 1}")["chunks"] == []
    assert get("/plots/timeline?to=1e9")["replicas"] == []
    refused = http.get(f"/v1/studies/{study.id}/plots/timeline?from=5&to=5")
    assert refused.json()["problems"] == [{"field": "to", "message": "5 is not after from=5; give a later time"}]


def test_stopped_trials_are_compared_with_their_rivals(server: ApiServer, http: httpx.Client) -> None:
    """Each trial that a scheduler stopped has the paired differences from its rival; any pair can be compared."""
    study = drawn_study(server.store, name="raced")
    path = f"/v1/studies/{study.id}"
    stopped = {t.number: t for t in server.store.trials(study.id) if t.rival is not None}
    every = http.get(f"{path}/plots/stops").json()
    assert every["total"] == len(stopped) == len(every["trials"]) > 0
    assert {each["trial"]: each["rival"] for each in every["trials"]} == {n: t.rival for n, t in stopped.items()}
    one = every["trials"][0]
    trial = stopped[one["trial"]]
    assert [look["samples"] for look in one["looks"]] == [rung.num_samples["math"] for rung in trial.rungs]
    for look, own in zip(one["looks"], trial.rungs, strict=True):
        rival = server.store.trial(study.id, one["rival"]).rungs[look["rung"]]
        assert look["differences"]["math"]["value"] == pytest.approx(own.values["math"] - rival.values["math"])
    chosen = http.get(f"{path}/plots/stops", params={"bracket": trial.bracket, "rung": one["rung"]}).json()
    assert {each["rung"] for each in chosen["trials"]} == {one["rung"]}
    assert one in chosen["trials"]
    same = http.get(f"{path}/plots/stops", params={"trial": one["trial"]}).json()["trials"]
    assert same == [one]
    (other,) = http.get(f"{path}/plots/stops", params={"trial": one["trial"], "against": 1}).json()["trials"]
    assert other["rival"] == 1
    refused = http.get(f"{path}/plots/stops?against=1")
    assert refused.json()["problems"] == [
        {"field": "against", "message": "1 is compared with one trial; give the other as trial"}
    ]
    assert http.get(f"{path}/plots/stops?trial=9999").status_code == 404


def test_held_out_differences_are_from_any_trial(server: ApiServer, http: httpx.Client) -> None:
    """From the best trial they are those of the summary; turned around, they change their sign."""
    path = f"/v1/studies/{drawn_study(server.store, name='priced').id}"
    summary = http.get(f"{path}/summary").json()
    best = summary["holdout_reference"]
    found = http.get(f"{path}/holdout", params={"reference": best}).json()
    assert found["reference"] == best
    rows = {row["trial"]: row["differences"] for row in summary["holdout"]}
    assert {row["trial"]: row["differences"] for row in found["rows"]} == rows
    other = next(number for number in rows if number != best)
    turned = http.get(f"{path}/holdout", params={"reference": other}).json()["rows"]
    (back,) = [row["differences"]["mean"] for row in turned if row["trial"] == best]
    assert back["value"] == pytest.approx(-rows[other]["mean"]["value"])
    assert back["ci95"] == pytest.approx([-end for end in reversed(rows[other]["mean"]["ci95"])])
    missing = http.get(f"{path}/holdout", params={"reference": 9999})
    assert missing.status_code == 404
    assert "trial 9999" in missing.json()["detail"]


# Samples side by side.


def test_samples_of_two_trials_are_aligned(server: ApiServer, http: httpx.Client) -> None:
    """Texts, answers and values are of the same position; counts and the difference are over all samples."""
    study = finished_study(server.store)
    first, second = 1, 2  # of 12 samples, sample p of trial t is wrong where t + p is a multiple of 3
    texts = [SampleText(f"question {position}", f"answer {position}") for position in range(10)]
    server.store.open_attempt(study.id).add_prompts(Split.HOLDOUT, "text", texts)
    path = f"/v1/studies/{study.id}/trials/{first}/samples"
    query: dict[str, Any] = {"split": "holdout", "objective": "text", "against": second}
    whole = http.get(path, params=query).json()
    assert whole["counts"] == {"samples": 12, "both_right": 4, "a_only": 4, "b_only": 4, "both_wrong": 0}
    assert [row["position"] for row in whole["samples"]] == list(range(12))
    for row in whole["samples"]:
        position = row["position"]
        assert row["a"]["value"] == float((first + position) % 3 > 0)
        assert row["b"]["value"] == float((second + position) % 3 > 0)
        assert row["a"]["is_right"] is ((first + position) % 3 > 0)
        assert row["document"] == f"d{position}"
        assert row["a"]["response"] == row["b"]["response"] == "says"
        assert row["prompt"] == (texts[position].prompt if position < 10 else None)
        assert row["reference"] == (texts[position].reference if position < 10 else None)
    assert whole["missing"] == [NO_PROMPTS]
    a, b = ([row[name]["value"] for row in whole["samples"]] for name in "ab")
    expected = paired_difference(a, b)
    assert whole["difference"]["value"] == expected.value == 0
    assert whole["difference"]["ci95"] == list(expected.ci95)
    page = http.get(path, params={**query, "only": "a_only", "limit": 3}).json()
    assert (page["total"], page["counts"], page["missing"]) == (4, whole["counts"], [])
    seen = page["samples"] + http.get(page["next"]).json()["samples"]
    assert seen == [row for row in whole["samples"] if row["a"]["value"] > row["b"]["value"]]
    alone = http.get(path, params={"split": "holdout", "objective": "text", "after": 9}).json()
    assert (alone["counts"], alone["difference"], alone["next"]) == (None, None, None)
    assert [(row["position"], row["b"]) for row in alone["samples"]] == [(10, None), (11, None)]
    server.store.open_attempt(study.id).set_state(JobState.COMPLETE)
    server.store.remove_texts(study.id, num_samples=12, num_bytes=1)
    removed = http.get(path, params={**query, "limit": 10}).json()
    assert {row["a"]["response"] for row in removed["samples"]} == {None}
    assert removed["samples"][0]["prompt"] == "question 0"
    assert removed["missing"] == [NO_RESPONSES]


def test_pages_of_long_texts_are_shorter(
    server: ApiServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page ends after the sample that reaches the limit of bytes, and `next` goes on after it."""
    study = finished_study(server.store)
    texts = [SampleText("é" * (10 * position), "answer") for position in range(12)]
    server.store.open_attempt(study.id).add_prompts(Split.HOLDOUT, "text", texts)
    path = f"/v1/studies/{study.id}/trials/1/samples"
    query = {"split": "holdout", "objective": "text"}
    whole = http.get(path, params=query).json()
    assert (len(whole["samples"]), whole["next"]) == (12, None)
    monkeypatch.setattr("service.api.routes.samples.MAX_TEXT_BYTES", 90)
    page = http.get(path, params=query).json()
    pages = [page["samples"]]
    while page["next"] is not None:
        page = http.get(page["next"]).json()
        pages.append(page["samples"])
    assert [row for rows in pages for row in rows] == whole["samples"]
    # 10 bytes of reference and response, and 20 more of the prompt at each position.
    assert [len(rows) for rows in pages] == [3, 2, *[1] * 7]
    assert page["total"] == 12


def test_few_threads_read_samples(
    server: ApiServer, http: httpx.Client, study: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many requests for samples at the same time, MAX_LARGE_READS are answered at a time."""
    lock, running, most = threading.Lock(), 0, 0

    def slow(*_: object, **__: object) -> tuple[list[Any], list[str]]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.3)
        with lock:
            running -= 1
        return [], []

    monkeypatch.setattr("service.api.routes.samples._samples", slow)
    path = f"/v1/studies/{study.id}/trials/1/samples"
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: http.get(path), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert most == MAX_LARGE_READS


def test_wrong_requests_for_samples_are_refused(http: httpx.Client, study: JobRecord) -> None:
    path = f"/v1/studies/{study.id}/trials/1/samples"
    for query, status, message in (
        ("objective=speed", 422, "'speed' is no objective with samples of the study; accepted are math, text, lookup"),
        ("split=bench", 422, "is no benchmark with samples of the study; accepted are none yet"),
        ("only=differs", 422, "differs compares two trials; give the other trial as against"),
        ("against=9999", 404, "trial 9999: study"),
    ):
        answer = http.get(f"{path}?{query}")
        assert answer.status_code == status
        assert message in answer.text
    empty = http.get(f"{path}?split=search").json()
    assert (empty["samples"], empty["total"], empty["missing"], empty["next"]) == ([], 0, [], None)


@pytest.mark.parametrize("state", list(TrialState))
@pytest.mark.parametrize("limit", [1, 4, 1000])
def test_pages_of_one_state_are_all_of_it(
    get: Any, server: ApiServer, study: JobRecord, http: httpx.Client, state: TrialState, limit: int
) -> None:
    expected = [trial.number for trial in server.store.trials(study.id) if trial.state is state]
    page = get(f"/trials?state={state.value}&limit={limit}")
    seen = [trial["number"] for trial in page["trials"]]
    while page["next"] is not None:
        page = http.get(page["next"]).json()
        assert page["trials"]
        seen += [trial["number"] for trial in page["trials"]]
    assert seen == expected


def test_a_trial_and_its_recipe(get: Any, server: ApiServer, study: JobRecord) -> None:
    trial = server.store.trial(study.id, 17)
    shown = get("/trials/17")
    del shown["provenance"]
    assert shown == as_json(trial_document(trial))
    assert get("/trials/17/recipe") == as_json({**trial.read_recipe().to_json(), "dtype": "float32"})
    jsonschema.validate(get("/trials/17/recipe"), schemas()["recipe"])


def test_a_trial_says_which_constraints_it_violates(http: httpx.Client, server: ApiServer) -> None:
    made = made_up(num_trials=3)
    study = Study.model_validate(document("constrained"))
    constraint = parse_constraint("text >= base + 0.05")
    objectives = [replace(o, constraints=(constraint,) * (o.name == "text")) for o in made.objectives]
    record = server.store.create_job(
        kind="search",
        name="constrained",
        document=study.canonical(),
        accepted=replace(resolved(study), objectives=tuple(objectives)).to_json(),
    )
    writer = server.store.open_attempt(record.id)
    for trial in made.whole_trials:
        write_trial(writer, trial)
    expected = as_json(trial_documents(run_record(server.store, record.id)))
    assert expected[0]["violations"] == {"text >= base + 0.05": pytest.approx(0.05)}
    assert http.get(f"/v1/studies/{record.id}/trials").json()["trials"] == expected
    assert http.get(f"/v1/studies/{record.id}/trials?after=3&limit=2").json()["trials"] == expected[4:6]
    assert http.get(f"/v1/studies/{record.id}/trials/0").json().items() >= expected[0].items()


def test_a_trial_says_where_its_samples_come_from(get: Any, server: ApiServer, study: JobRecord) -> None:
    """Provenance has the engines, weights and replicas of the recipe's own samples, and the trial's verification."""
    number = read_verification(server.store.document(study.id, VERIFICATION)).reports[0].trial
    provenance = get(f"/trials/{number}")["provenance"]
    rows = server.store.evidence(study.id, recipe_digest=server.store.trial(study.id, number).recipe.digest)
    others = [row for row in server.store.evidence(study.id) if row not in rows]
    assert rows
    assert others
    assert provenance["replicas"] == {"replica-1": sum(row.num_samples for row in rows)}
    assert provenance["fingerprints"] == ["bank"]
    assert provenance["engines"] == ["fake"]
    assert provenance["finished_at"] == rfc_3339(max(row.finished_at for row in rows))
    assert provenance["verification"]["trials"] == 1
    pruned = server.store.trials(study.id, state=TrialState.PRUNED)[0].number
    assert get(f"/trials/{pruned}")["provenance"] == {
        "fingerprints": [],
        "engines": [],
        "replicas": {},
        "finished_at": None,
        "verification": None,
    }


def test_summary_and_front_are_those_of_the_result_files(get: Any, server: ApiServer, study: JobRecord) -> None:
    run = run_record(server.store, study.id)
    assert get("/summary") == as_json(summary(run))
    assert get("/pareto") == as_json(pareto(run))
    jsonschema.validate(get("/summary"), schemas()["summary"])


def test_weights_pick_a_trial_of_the_front(get: Any, http: httpx.Client, server: ApiServer, study: JobRecord) -> None:
    weights = {"math": 0.5, "text": 0.3, "lookup": 0.2}
    document = get("/pareto?prefer=math%3D0.5,text%3D0.3,lookup%3D0.2")
    expected = choices(run_record(server.store, study.id)).preferred(weights)
    assert document.pop("preferred") == as_json(expected)
    assert expected["trial"] in [row["trial"] for row in document["front"]]
    assert expected["split"] == "holdout"
    assert document == get("/pareto")
    for prefer, message in (
        ("math=0.6", "math=0.6 sum to 0.6, not to 1; for the same proportions: math=1"),
        ("code=1", "'code' is not an objective; give weights of math, text, lookup"),
        ("math", "'math' is not OBJECTIVE=WEIGHT; write math=0.6,code=0.4"),
    ):
        answer = http.get(f"/v1/studies/{study.id}/pareto", params={"prefer": prefer})
        assert (answer.status_code, answer.json()["problems"]) == (422, [{"field": "prefer", "message": message}])


@pytest.mark.parametrize(
    ("field", "status", "detail"),
    [
        ("recipe", 409, "there is no mergekit configuration that computes the same merge"),
        ("models.base", 409, "the models of the study cannot be read, or have changed"),
        ("", 503, "the mergekit configuration cannot be computed within the limits of a request"),
    ],
)
def test_a_missing_mergekit_file_has_its_reason(
    http: httpx.Client,
    server: ApiServer,
    study: JobRecord,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    status: int,
    detail: str,
) -> None:
    """Only a recipe that mergekit cannot express is called so; absent models and limits have their own answers."""

    async def refused(*_: Any, **__: Any) -> str:
        raise InvalidStudy((Problem(field, "why"),))

    monkeypatch.setattr(server.preflight, "mergekit_file", refused)
    answer = http.get(f"/v1/studies/{study.id}/trials/3/mergekit")
    assert (answer.status_code, answer.json()["detail"]) == (status, f"trial 3: {detail}")
    assert answer.json()["problems"] == [{"field": field, "message": "why"}]


def test_report_is_the_result_files_page(http: httpx.Client, server: ApiServer, study: JobRecord) -> None:
    """The report is the page of the result files and runs no script."""
    answer = http.get(f"/v1/studies/{study.id}/report")
    assert answer.text == render_report(run_record(server.store, study.id))
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "sandbox" in answer.headers["content-security-policy"]


def test_every_plot_there_is_can_be_had(get: Any, http: httpx.Client) -> None:
    plots = get("/plots")["plots"]
    assert [plot["name"] for plot in plots] == [*CHARTS, "timeline", "importance", "stops"]
    for plot in plots:
        assert plot["title"]
        assert http.get(plot["link"]).json()["plot"] == plot["name"]


def searched_study(server: ApiServer, num_trials: int) -> JobRecord:
    """A study with `num_trials` trials at full budget, whose value is one of their two parameters."""
    study = stored_study(server.store)
    writer = server.store.open_attempt(study.id)
    known = made_up().whole_trials[0]
    values = np.random.default_rng(0).uniform(size=(num_trials, 2))
    for number, (first, second) in enumerate(values.tolist()):
        configuration = {"g1.mlp.ties.lambda": first, "g2.use.math": second > 0.5}
        rungs = (replace(rung(2), values={"math": first, "text": 0.5}),)
        trial = replace(known, number=number, origin=Origin.SEARCH, label=f"trial:{number}", rungs=rungs)
        write_trial(writer, replace(trial, configuration=configuration, state=TrialState.COMPLETE))
    return study


def test_importances_are_summed_by_part(server: ApiServer, http: httpx.Client) -> None:
    """The plot says which parameter decides, sums by layers, part and expert, and is not computed for the same ETag."""
    path = f"/v1/studies/{searched_study(server, 60).id}/plots/importance"
    answer = http.get(path)
    assert answer.status_code == 200, answer.text
    plot = answer.json()
    assert (plot["plot"], plot["objective"], plot["trials"], plot["used"], plot["reason"]) == (
        *("importance", "math", 60, 60),
        None,
    )
    assert [parameter["name"] for parameter in plot["parameters"]] == ["g1.mlp.ties.lambda", "g2.use.math"]
    assert plot["parameters"][0]["importance"] > 0.9
    assert [(each["name"], each["start"], each["stop"]) for each in plot["layers"]] == [("g1", 0, 4), ("g2", 4, 8)]
    assert ([each["name"] for each in plot["parts"]], [each["name"] for each in plot["experts"]]) == (["mlp"], ["math"])
    assert http.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    equal = http.get(f"{path}?objective=text").json()  # no parameter matters
    assert equal["objective"] == "text"
    refused = http.get(f"{path}?objective=speed")
    assert refused.status_code == 422
    assert refused.json()["problems"][0]["field"] == "objective"


def test_few_trials_have_no_importances(server: ApiServer, http: httpx.Client) -> None:
    """Below 50 trials at full budget the parameters are null, with the reason; one more trial suffices."""
    few = http.get(f"/v1/studies/{searched_study(server, 49).id}/plots/importance").json()
    assert few["parameters"] is None
    assert few["reason"] == "49 trials at full budget have a configuration; importances need 50"
    enough = http.get(f"/v1/studies/{searched_study(server, 50).id}/plots/importance").json()
    assert enough["parameters"]


def test_importances_have_a_limit_of_time(server: ApiServer) -> None:
    """A computation that takes too long is ended; the plot says so, has no ETag, and is computed again."""
    study = searched_study(server, 50)
    objective = resolved(Study.model_validate(study.document)).objectives[0]
    records = RunRecords(server.store)

    async def asked() -> list[Response]:
        computed = Importances(server.store, records, time_s=0.01)
        request = Request({"type": "http", "headers": []})
        answers = []
        try:
            for time_s in (0.01, 60.0, 0.01):
                computed._time_s = time_s
                answers.append(
                    await answer_computed(request, records, study.id, lambda: computed.plot(study, objective))
                )
        finally:
            computed.stop()
        return answers

    slow, done, kept = asyncio.run(asked())
    reason = "the computation takes more than 0.01 s or its limit of memory"
    assert (json.loads(bytes(slow.body))["reason"], json.loads(bytes(slow.body))["trials"]) == (reason, 50)
    assert "etag" not in slow.headers
    assert json.loads(bytes(done.body))["parameters"]
    assert done.headers["etag"]
    assert kept.body is done.body


def test_history_holds_every_rung(get: Any, server: ApiServer, study: JobRecord) -> None:
    """The history holds every finished rung and the best so far."""
    run = run_record(server.store, study.id)
    plot = get("/plots/history")
    assert [series["name"] for series in plot["series"]] == ["mean", "math", "text", "lookup"]
    for series in plot["series"]:
        assert len(series["points"]) == sum(len(trial.rungs) for trial in run.trials)
        values = [point["value"] for point in series["record"]]
        assert values
        assert values == sorted(set(values))
        assert values[-1] == max(point["value"] for point in series["points"] if point["is_full"])
    best = run.best
    assert best is not None
    assert plot["series"][0]["record"][-1]["trial"] == best.number
    assert plot["failed"] == [trial.number for trial in run.trials if trial.state is TrialState.FAIL]


def test_the_front_says_who_is_on_it(get: Any, server: ApiServer, study: JobRecord) -> None:
    run = run_record(server.store, study.id)
    plot, document = get("/plots/front"), get("/pareto")
    assert [point["trial"] for point in plot["points"]] == [t.number for t in full_budget_trials(run.trials)]
    on_front = [point["trial"] for point in plot["points"] if point["is_on_front"]]
    assert on_front == [row["trial"] for row in document["front"]]
    (best,) = (point for point in plot["points"] if point["is_best"])
    means = {
        point["trial"]: sum(point["values"][name] for name in accuracy_objectives(run.objectives))
        for point in plot["points"]
    }
    assert means[best["trial"]] == pytest.approx(max(means.values()))


def test_the_recipe_covers_every_layer_once(get: Any) -> None:
    plot = get("/plots/recipe")
    layers = [number for run in plot["layers"] for number in range(run["first"], run["last"] + 1)]
    assert layers == list(range(8))
    for run in plot["layers"]:
        assert set(run["components"]) == {"attention", "mlp", "norm"}
        for picture in run["components"].values():
            assert sum(picture["shares"].values()) == pytest.approx(1)


def test_held_out_rows_are_those_of_the_summary(get: Any) -> None:
    rows = get("/plots/holdout")["rows"]
    assert rows == get("/summary")["holdout"]
    assert rows


def test_the_budget_counts_searched_trials_by_rung(get: Any, server: ApiServer, study: JobRecord) -> None:
    plot = get("/plots/budget")
    searched = [trial for trial in server.store.trials(study.id) if trial.origin.value == "search"]
    assert [rung["trials"] for rung in plot["rungs"]] == [
        sum(len(trial.rungs) > rung for trial in searched) for rung in range(3)
    ]
    assert [rung["samples"] for rung in plot["rungs"]] == [30, 90, 270]


def test_results_follow_what_is_stored(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store, name="growing")
    path = f"/v1/studies/{record.id}"

    def scored() -> tuple[int, bool]:
        trials = http.get(f"{path}/summary").json()["trials"]
        return sum(trials.values()), "No trial has reached the full budget yet" in http.get(f"{path}/report").text

    for rest in ("", "/trials", "/pareto", "/report", "/plots/history", "/plots/front", "/plots/recipe", "/exports"):
        assert http.get(path + rest).status_code == 200, rest
    assert scored() == (0, True)
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    first, *_ = made_up(num_trials=3).whole_trials
    write_trial(writer, first)
    assert scored() == (1, False)
    writer.finish_rung(0, rung(0), samples_reused=0)
    assert http.get(f"{path}/summary").json()["state"] == "RUNNING"
    writer.set_state(JobState.FAILED, "no engine")
    assert http.get(f"{path}/summary").json()["reason"] == "no engine"


@pytest.mark.parametrize("kind", ["layerwise", "dis", "sfs"])
def test_a_study_of_any_space_is_told_over_http_as_in_its_files(
    server: ApiServer, http: httpx.Client, kind: str
) -> None:
    study = plain_study(server.store, kind)
    run = run_record(server.store, study)
    url = f"/v1/studies/{study}"
    assert http.get(f"{url}/summary").json() == as_json(summary(run))
    assert http.get(f"{url}/pareto").json() == as_json(pareto(run))
    assert http.get(f"{url}/trials", params={"limit": 1000}).json()["trials"] == as_json(trial_documents(run))
    assert http.get(f"{url}/report").text == render_report(run)
    for name in CHARTS:
        assert http.get(f"{url}/plots/{name}").status_code == 200, name
    best = run.best
    assert best is not None
    assert http.get(f"{url}/trials/{best.number}/recipe").json() == as_json(
        {**best.read_recipe().to_json(), "dtype": "float32"}
    )
    told = http.get(f"{url}/events", headers={"Accept": "application/json"}).json()["events"]
    assert [event["id"] for event in told] == [event.id for event in server.store.events(study)]
    assert {event["kind"] for event in told} >= {"trial", "rung", EventKind.HOLDOUT_SCORED}
