"""What a study has found, over HTTP: the same documents as the result files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest

from search_spaces.constraints import parse_constraint
from search_spaces.study.file import Study
from service.results.documents import pareto, trial_document, trial_documents
from service.results.load import run_record
from service.results.preference import choices
from service.results.report import render_report
from service.results.selection import accuracy_objectives, full_budget_trials
from service.results.series import CHARTS
from service.results.summary import summary
from service.schemas.json_schemas import schemas
from service.types import EventKind, JobRecord, JobState, TrialState
from tests.service.api.harness import ApiServer, document, finished_study, resolved, rung, stored_study, write_trial
from tests.service.paths_study import plain_study
from tests.service.synthetic_run import run_record as made_up

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
    for trial in every:
        jsonschema.validate(trial, schemas()["trial"])


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
    assert get("/trials/17") == as_json(trial_document(trial))
    assert get("/trials/17/recipe") == as_json(trial.read_recipe().to_json())
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
    assert http.get(f"/v1/studies/{record.id}/trials/0").json() == expected[0]


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


def test_report_is_the_result_files_page(http: httpx.Client, server: ApiServer, study: JobRecord) -> None:
    """The report is the page of the result files and runs no script."""
    answer = http.get(f"/v1/studies/{study.id}/report")
    assert answer.text == render_report(run_record(server.store, study.id))
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "sandbox" in answer.headers["content-security-policy"]


def test_every_plot_there_is_can_be_had(get: Any, http: httpx.Client) -> None:
    plots = get("/plots")["plots"]
    assert [plot["name"] for plot in plots] == list(CHARTS)
    for plot in plots:
        assert plot["title"]
        assert http.get(plot["link"]).json()["plot"] == plot["name"]


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
    assert http.get(f"{url}/trials/{best.number}/recipe").json() == as_json(best.read_recipe().to_json())
    told = http.get(f"{url}/events", headers={"Accept": "application/json"}).json()["events"]
    assert [event["id"] for event in told] == [event.id for event in server.store.events(study)]
    assert {event["kind"] for event in told} >= {"trial", "rung", EventKind.HOLDOUT_SCORED}
