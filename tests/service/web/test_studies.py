"""The list of studies, and a study's overview and trials, compared with the API's answers."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from search_spaces.objectives import Objective
from search_spaces.study.file import Study as StudyFile
from service.resolved_study import ChainedSource, ResolvedStudy
from service.results.preference import Choices
from service.store.documents import CONTAMINATION, Overlap
from service.types import JobRecord, JobState
from tests.service.api.harness import ApiServer, document, snapshot, stored_study
from tests.service.synthetic_run import run_record
from tests.service.web.driving import APP, Visit, expect, press, signed, visit
from tests.service.web.made import searched_study
from workers.types import Split

CASES = json.loads((APP / "src" / "preference.cases.json").read_text())


def test_the_list_leads_to_a_study(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """The list has each study with its state and its number of trials; its name leads to the study."""
    listed = next(each for each in http.get("/v1/studies").json()["studies"] if each["id"] == study.id)
    page = visitor.goto("/")
    row = page.get_by_role("row").filter(has_text=study.name)
    expect(row.get_by_text("complete")).to_be_visible()
    expect(row).to_contain_text(str(sum(listed["trials"].values())))
    row.get_by_role("link", name=study.name).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(study.name)
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    assert page.url == f"{visitor.url}/studies/{study.id}"


def test_the_list_is_searched_by_the_server(
    visitor: Visit, server: ApiServer, study: JobRecord, http: httpx.Client
) -> None:
    """What is searched is in the address; what matches nothing is said."""
    other = stored_study(server.store, name="another")
    page = visitor.goto("/studies")
    box = page.get_by_role("textbox", name="Search by name, description or owner")
    box.fill("anoth")
    expect(page.get_by_role("link", name="another")).to_be_visible()
    expect(page.get_by_role("link", name=study.name)).to_have_count(0)
    assert page.url.endswith("?q=anoth")
    box.fill("no study has this name")
    expect(page.get_by_text("No study matches.")).to_be_visible()
    assert http.post(f"/v1/studies/{other.id}:cancel").status_code == 202


def test_the_overview_says_what_the_summary_says(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """The finding, the best held-out mean and its interval, and the selection bias are those of the summary."""
    summary = http.get(f"/v1/studies/{study.id}/summary").json()
    best = next(row for row in summary["holdout"] if row["trial"] == summary["holdout_reference"])
    page = visitor.goto(f"/studies/{study.id}")
    expect(page.get_by_text(summary["finding"]["text"].replace(" -0.", " −0."))).to_be_visible()
    figures = page.locator("dl.figures")
    expect(figures).to_contain_text(f"{best['mean']['value']:.3f}")
    low, high = best["mean"]["ci95"]
    expect(figures).to_contain_text(f"{low:.3f} to {high:.3f}")
    table = page.get_by_role("region", name="Values on held-out data")
    expect(table.get_by_role("row")).to_have_count(len(summary["holdout"]) + 1)
    bias = summary["selection_bias_against_baselines"]["mean"]
    expect(page.get_by_text("Selection bias")).to_contain_text(f"{abs(bias['value']):.3f}")
    expect(page.get_by_text("Selection bias")).to_contain_text(f"{abs(bias['ci95'][1]):.3f}")


def test_the_history_steps_through_the_best_trials(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Arrow keys step through the trials that were the best so far; Enter opens the one that is reached."""
    history = http.get(f"/v1/studies/{study.id}/plots/history").json()
    last = history["series"][0]["record"][-1]
    page = visitor.goto(f"/studies/{study.id}")
    chart = page.get_by_role("group", name="Mean of the objectives of every trial")
    chart.press("ArrowLeft")
    said = page.get_by_role("region", name="History").get_by_role("status")
    points = http.get(f"/v1/studies/{study.id}/plots/front").json()["points"]
    (low, high) = next(point["mean_interval"] for point in points if point["trial"] == last["trial"])
    mean = rf"mean {last['value']:.3f} ± [0-9.]+ \({low:.3f} to {high:.3f}\)"
    expect(said).to_have_text(re.compile(rf"^trial {last['trial']}.*{mean}"))
    chart.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Trial {last['trial']}")


def test_sliders_pick_the_trial_that_the_server_picks(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """For each position of the sliders, the page picks the trial that the API picks with the same weights."""
    names = [each["name"] for each in http.get(f"/v1/studies/{study.id}/pareto").json()["objectives"]]
    page = visitor.goto(f"/studies/{study.id}")
    page.get_by_test_id("picked").wait_for()
    seen = set()
    for name in names:
        for other in names:
            page.get_by_role("slider", name=f"Importance of {other}").press("End" if other == name else "Home")
        weights = ",".join(f"{other}={int(other == name)}" for other in names)
        wanted = http.get(f"/v1/studies/{study.id}/pareto", params={"prefer": weights}).json()["preferred"]
        expect(page.get_by_test_id("picked")).to_contain_text(re.compile(rf"Trial {wanted['trial']}\b"))
        seen.add(wanted["trial"])
    assert len(seen) > 1, "the weights make a difference"


def test_a_choice_has_its_price(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Moving the sliders says what the new pick costs and gains on held-out data, paired, against the first pick."""
    names = [each["name"] for each in http.get(f"/v1/studies/{study.id}/pareto").json()["objectives"]]
    page = visitor.goto(f"/studies/{study.id}")
    picked = page.get_by_test_id("picked")
    expect(picked).to_contain_text("Move a slider")
    weights = ",".join(f"{name}={1 / len(names)}" for name in names)
    path = f"/v1/studies/{study.id}/pareto"
    first = http.get(path, params={"prefer": weights}).json()["preferred"]["trial"]
    found = {}
    for name in names:
        alone = ",".join(f"{other}={int(other == name)}" for other in names)
        found[name] = http.get(path, params={"prefer": alone}).json()["preferred"]["trial"]
    name = next(name for name, trial in found.items() if trial != first)
    for other in names:
        page.get_by_role("slider", name=f"Importance of {other}").press("End" if other == name else "Home")
    rows = http.get(f"/v1/studies/{study.id}/holdout", params={"reference": first}).json()["rows"]
    wanted = next(row["differences"] for row in rows if row["trial"] == found[name])
    expect(picked).to_contain_text(f"Minus trial {first}")
    for each in (*names, "mean"):
        low, high = wanted[each]["ci95"]
        price = page.get_by_test_id("price").locator("div").filter(has_text=re.compile(f"^{each}"))
        expect(price).to_contain_text(f"{signed(wanted[each]['value'])} {signed(low)} to {signed(high)}")
    press(page.get_by_role("button", name=f"Count from trial {found[name]}"))
    expect(picked).to_contain_text("Move a slider")


def test_the_front_has_intervals_and_pairs(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Points say their intervals; a small front of another pair of objectives is shown large by the keyboard."""
    front = http.get(f"/v1/studies/{study.id}/plots/front").json()
    best = max((point for point in front["points"] if point["is_on_front"]), key=lambda point: point["values"]["math"])
    page = visitor.goto(f"/studies/{study.id}")
    chart = page.get_by_role("group", name="math and text of the trials at full budget")
    chart.press("ArrowRight")
    said = page.get_by_role("region", name="Pareto front").get_by_role("status").filter(has_text="trial")
    low, high = best["intervals"]["math"]
    expect(said).to_contain_text(f"trial {best['trial']}")
    expect(said).to_contain_text(f"math {best['values']['math']:.3f} ({low:.3f} to {high:.3f})")
    pairs = page.get_by_role("group", name="Fronts of each pair of objectives").get_by_role("button")
    expect(pairs).to_have_count(3)
    expect(pairs.first).to_have_attribute("aria-pressed", "true")
    pairs.nth(2).press("Enter")
    expect(page.get_by_role("group", name="text and lookup of the trials at full budget")).to_be_visible()


def test_the_overview_lists_checks(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """Failures with their first reasons, and overlaps with the search data, are those of the summary."""
    study = searched_study(server.store, name="checked")
    overlap = Overlap("holdout", "math", 45, 2, 3, {"math": 3}, ("4",))
    server.store.open_attempt(study.id).set_document_named(CONTAMINATION, [asdict(overlap)])
    failures = http.get(f"/v1/studies/{study.id}/summary").json()["failures"]
    assert failures
    page = visitor.goto(f"/studies/{study.id}")
    checks = page.get_by_role("region", name="Checks")
    expect(checks.get_by_role("link", name=f"{len(failures)} trials failed")).to_be_visible()
    expect(checks).to_contain_text(f"{failures[0]['reason']} ({len(failures)} trials, first {failures[0]['trial']})")
    expect(checks).to_contain_text("Held-out data math: 3 of 45 items (7 %) overlap with the search data, 2 of them")
    expect(page.get_by_role("link", name="⚠ 2 more to look at")).to_have_attribute("href", "#checks")
    checks.get_by_role("link", name=f"{len(failures)} trials failed").click()
    expect(page.get_by_text(f"{len(failures)} trials", exact=True)).to_be_visible()


def test_a_study_says_what_it_continues(visitor: Visit, server: ApiServer, study: JobRecord) -> None:
    """An expert that is a merge of another study is a link to its trial."""
    resolved = ResolvedStudy.of(stored_study(server.store, name="first"))
    source = ChainedSource(study.id, study.name, 5, "0" * 64, "somewhere")
    accepted = replace(resolved, chained={"math": source}).to_json()
    file = StudyFile.model_validate(document("continued"))
    job = server.store.create_job(kind="search", name="continued", document=file.canonical(), accepted=accepted)
    page = visitor.goto(f"/studies/{job.id}")
    lineage = page.get_by_role("region", name="Lineage")
    expect(lineage.get_by_role("listitem")).to_have_text(f"math is trial 5 of {study.name}.")
    lineage.get_by_role("link", name=f"trial 5 of {study.name}").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Trial 5")


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_preferences_of_the_page_are_those_of_the_server(case: dict[str, Any]) -> None:
    """The cases that the page's own tests have give the same trials in the server."""
    objectives = tuple(
        Objective(each["name"], "metric", each["direction"], tuple(each["range"])) for each in case["objectives"]
    )
    names = [objective.name for objective in objectives]
    values = {int(trial): dict(zip(names, given, strict=True)) for trial, given in case["choices"].items()}
    labels = {trial: f"trial {trial}" for trial in values}
    choices = Choices(objectives, Split.SEARCH, labels, values)
    assert choices.preferred(dict(zip(names, case["weights"], strict=True)))["trial"] == case["picked"]


def test_trials_are_sorted_and_filtered(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Sort order and conditions are the server's, and are in the address."""
    page = visitor.goto(f"/studies/{study.id}/trials")
    table = page.get_by_role("region", name="Trials")
    expect(table.get_by_role("row").nth(1)).to_contain_text("base")
    table.get_by_role("button", name="math").click()
    first = http.get(f"/v1/studies/{study.id}/trials", params={"sort": "-value.math", "limit": 1}).json()["trials"][0]
    expect(table.get_by_role("rowheader").first).to_have_text(str(first["number"]))
    expect(table.get_by_role("columnheader", name="math")).to_have_attribute("aria-sort", "descending")
    page.get_by_role("textbox", name="Conditions").fill("rung=1")
    total = http.get(f"/v1/studies/{study.id}/trials", params={"where": "rung=1", "limit": 1}).json()["total"]
    assert 0 < total < 49
    expect(page.get_by_text(f"{total} trials")).to_be_visible()
    assert "where=rung%3D1" in page.url
    assert "sort=-value.math" in page.url


def test_a_condition_that_is_wrong_is_explained(visitor: Visit, study: JobRecord) -> None:
    """The server's words about a wrong condition are shown, and the page goes on."""
    visitor.expected = ("422",)
    page = visitor.goto(f"/studies/{study.id}/trials?where=nonsense")
    expect(page.get_by_role("alert")).to_contain_text("nonsense")


def test_what_is_missing_is_said(visitor: Visit, server: ApiServer) -> None:
    """A study without trials, a study that is not there, and an address without a view each say so."""
    waiting = stored_study(server.store, name="waiting")
    page = visitor.goto(f"/studies/{waiting.id}")
    expect(page.get_by_text("No trial has reached the full budget yet.").first).to_be_visible()
    visitor.expected = ("404",)
    visitor.goto("/studies/0123456789abcdef0123456789abcdef")
    expect(page.get_by_role("alert")).to_contain_text("study")
    visitor.goto("/nowhere")
    expect(page.get_by_role("heading", level=1)).to_have_text("No such page")


def test_the_list_names_the_best_values(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Each best value has its objective and its interval; samples a second are over the time worked."""
    listed = next(each for each in http.get("/v1/studies").json()["studies"] if each["id"] == study.id)
    row = visitor.goto("/studies").get_by_role("row").filter(has_text=study.name).first
    progress = listed["progress"]
    assert progress["best"]
    for name, value in progress["best"].items():
        low, high = progress["best_ci95"][name]
        expect(row).to_contain_text(f"{name} {value:.3f}{low:.3f} to {high:.3f}")
    rate = progress["samples_scored"] / listed["wall_clock_s"]
    expect(row.get_by_role("cell", name=f"{rate:#.3g}", exact=True)).to_be_visible()


def test_steps_are_shown_where_there_are_some(
    visitor: Visit, server: ApiServer, study: JobRecord, http: httpx.Client
) -> None:
    """The list and the overview have the steps of a searcher that makes some, and none for another study."""
    writer = server.store.open_attempt(stored_study(server.store, name="descent").id)
    writer.set_state(JobState.RUNNING)
    steps = {"steps": 1234, "steps_planned": 5000}
    writer.heartbeat(wall_clock_s=9.0, progress={**snapshot(run_record(num_trials=4)).to_json(), **steps})
    page = visitor.goto("/studies")
    rows = page.get_by_role("row")
    expect(rows.filter(has_text="descent")).to_contain_text("1,234 of 5,000 steps")
    expect(rows.filter(has_text=study.name)).not_to_contain_text("steps")
    figures = visitor.goto(f"/studies/{writer.job_id}").locator("dl.figures").first
    expect(figures).to_contain_text("steps1,234of 5,000 expected")
    figures = visitor.goto(f"/studies/{study.id}").locator("dl.figures").first
    expect(figures).to_contain_text("samples scored")
    expect(figures).not_to_contain_text("steps")
    writer.set_state(JobState.COMPLETE)


def test_the_list_follows_its_jobs(browser: Browser, tmp_path: Path, own_port: int) -> None:
    """Without a reload, a new study, its progress and its end appear; the page asks for the list only after events."""
    with (
        ApiServer(tmp_path, port=own_port) as server,
        visit(browser, server.url, is_in_a_hurry=True) as opened,
    ):
        page = opened.goto("/studies")
        expect(page.get_by_text("There are no studies yet.")).to_be_visible()
        examples = page.get_by_role("list", name="Examples").get_by_role("link")
        expect(examples).to_have_count(3)
        writer = server.store.open_attempt(stored_study(server.store, name="fresh").id)
        row = page.get_by_role("row").filter(has_text="fresh")
        expect(row).to_be_visible()
        expect(page.get_by_label("Connection")).to_have_text("live")
        writer.set_state(JobState.RUNNING)
        expect(row).to_contain_text("running")
        progress = {**snapshot(run_record(num_trials=9)).to_json(), "best": {"math": 0.625}, "best_ci95": {}}
        writer.heartbeat(wall_clock_s=10.0, progress=progress)
        expect(row).to_contain_text("math 0.625")
        writer.set_state(JobState.COMPLETE)
        expect(row).to_contain_text("complete")
        assert sum(path.startswith("/v1/studies?") for path in opened.requests) < 20


def test_columns_of_trials_are_chosen(visitor: Visit, study: JobRecord, http: httpx.Client, tmp_path: Path) -> None:
    """Chosen columns are in the address and in the file, which has every trial that the filters leave."""
    page = visitor.goto(f"/studies/{study.id}/trials?where=rung%3D1&sort=-value.math")
    table = page.get_by_role("region", name="Trials")
    menu = page.locator("details").filter(has_text="Shown columns")
    menu.locator("summary").press("Enter")
    press(page.get_by_role("checkbox", name="origin", exact=True), "Space")
    press(page.get_by_role("checkbox", name="recipe", exact=True), "Space")
    page.keyboard.press("Escape")
    expect(menu.locator("summary")).to_be_focused()
    heads = ["trial", "compare", "label", "state", "rung", "samples", "math", "text", "lookup", "recipe"]
    expect(table.get_by_role("columnheader")).to_have_count(len(heads))
    found = [text.rstrip(" ▲▼") for text in table.get_by_role("columnheader").all_inner_texts()]
    assert found == heads
    with page.expect_download() as downloading:
        page.get_by_role("button", name="CSV of what is shown").click()
    with Path(downloading.value.path()).open(newline="") as file:
        rows = list(csv.DictReader(file))
    query: dict[str, Any] = {"where": "rung=1", "sort": "-value.math", "limit": 1000}
    trials = http.get(f"/v1/studies/{study.id}/trials", params=query).json()["trials"]
    assert list(rows[0]) == [head for head in heads if head != "compare"]
    assert [int(row["trial"]) for row in rows] == [trial["number"] for trial in trials]
    assert [float(row["math"]) for row in rows] == [trial["rungs"][-1]["values"]["math"] for trial in trials]
    assert [row["recipe"] for row in rows] == [trial["recipe_digest"] for trial in trials]


def test_a_trial_is_jumped_to_by_its_number(visitor: Visit, study: JobRecord) -> None:
    """The row of the number is scrolled to and its link has the focus; a number that is none is explained."""
    page = visitor.goto(f"/studies/{study.id}/trials?where=rung%3D1")
    page.get_by_role("textbox", name="Number of a trial").fill("37")
    page.get_by_role("button", name="Jump").click()
    link = page.get_by_role("region", name="Trials").get_by_role("link", name="37", exact=True)
    expect(link).to_be_focused()
    expect(page.locator("tr[aria-current=true]").get_by_role("rowheader")).to_have_text("37")
    assert page.url.endswith("/trials?at=37")
    page.get_by_role("textbox", name="Number of a trial").fill("4711")
    page.get_by_role("button", name="Jump").click()
    expect(page.get_by_text("Give a number from 0 to ")).to_be_visible()


def test_selected_trials_are_compared(visitor: Visit, study: JobRecord) -> None:
    """Two selected trials lead to their comparison; a third takes the place of the first."""
    page = visitor.goto(f"/studies/{study.id}/trials")
    said = page.get_by_role("status", name="Selected trials")
    for number in (1, 2, 5):
        page.get_by_role("checkbox", name=f"Compare trial {number}", exact=True).check()
    expect(page.get_by_role("checkbox", name="Compare trial 1", exact=True)).not_to_be_checked()
    said.get_by_role("link", name="Compare trials 2 and 5").click()
    expect(page).to_have_url(re.compile("/compare[?]trials=2%2C5$"))
    expect(page.get_by_role("textbox", name="Against trial")).to_have_value("5")


def test_views_name_the_tab_and_get_the_focus(visitor: Visit, study: JobRecord) -> None:
    """Each view of a study has its own title, and its heading the focus after a click; so has a page."""
    page = visitor.goto(f"/studies/{study.id}")
    expect(page).to_have_title(f"{study.name} · mergesearch")
    views = page.get_by_role("navigation", name="Views of the study")
    for name in ("Trials", "Timeline", "Exports", "Events", "File"):
        views.get_by_role("link", name=name).click()
        expect(page).to_have_title(f"{name} · {study.name} · mergesearch")
        heading = page.locator("main h2").first
        expect(heading).to_be_focused()
    page.get_by_role("link", name="Queue", exact=True).click()
    expect(page).to_have_title("Queue · mergesearch")
    expect(page.get_by_role("heading", level=1)).to_be_focused()


def test_decimals_are_those_of_the_settings(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """The number of decimals that is chosen in the settings holds in other views, and after a reload."""
    page = visitor.goto("/settings")
    page.get_by_role("radiogroup", name="Decimals of values").get_by_text("5", exact=True).click()
    expect(page.get_by_text("A value with its interval: 0.78432")).to_be_visible()
    trial = http.get(f"/v1/studies/{study.id}/trials", params={"sort": "-value.math"}).json()["trials"][0]
    visitor.goto(f"/studies/{study.id}/trials?sort=-value.math")
    row = page.get_by_role("region", name="Trials").get_by_role("row").nth(1)
    expect(row).to_contain_text(f"{trial['rungs'][-1]['values']['math']:.5f}")
