"""The page of a trial, compared with the API's answers; the test also runs the commands offered for copying."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page

from service.jobs.base import RequestContext
from service.jobs.search.request import accept
from service.merges.series import check_merges
from service.types import JobRecord, Scope
from tests.service.api.accounts import Company, bearer
from tests.service.api.family import family_study
from tests.service.api.harness import ApiServer, finished_study
from tests.service.paths_study import plain_study
from tests.service.site import LocalPreflight
from tests.service.web.driving import Visit, axe_violations, check_view, expect, signed, visit

BIN = Path(sys.executable).parent
# Trials of the shipped family's study: an average, which mergekit can compute, and TIES, which it computes differently.
AVERAGE, TIES = 4, 11
ALL_VERBS = ("Export", "Serve", "Evaluate at full budget", "Invalidate", "Mark as valid")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiServer, JobRecord]]:
    """A server that opens models, and a study of the shipped family on it."""
    with ApiServer(tmp_path_factory.mktemp("real"), preflight=LocalPreflight()) as server:
        yield server, family_study(server.store)


def trial_of(http: httpx.Client, study: JobRecord, state: str) -> int:
    found = http.get(f"/v1/studies/{study.id}/trials", params={"state": state, "origin": "search"}).json()["trials"]
    return int(found[0]["number"])


def copied(page: Page, form: str) -> str:
    """The text that the page offers for copying in a format."""
    page.get_by_role("combobox", name="Copy as").select_option(label=form)
    return page.get_by_role("textbox", name=form).input_value()


def test_values_are_those_of_the_api(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Search and held-out values, their samples, intervals and the paired difference are those of trial and summary."""
    summary = http.get(f"/v1/studies/{study.id}/summary").json()
    row = next(row for row in summary["holdout"] if row["trial"] != summary["holdout_reference"])
    trial = http.get(f"/v1/studies/{study.id}/trials/{row['trial']}").json()
    page = visitor.goto(f"/studies/{study.id}/trials/{row['trial']}")
    table = page.get_by_role("region", name="Values on search and held-out data")
    last, held = trial["rungs"][-1], row["values"]["math"]
    line = table.get_by_role("row").filter(has_text="math")
    expect(line).to_contain_text(f"{last['values']['math']:.3f}± {last['standard_errors']['math']:.3f}")
    expect(line.get_by_role("cell").nth(1)).to_have_text(str(last["samples"]["math"]))
    expect(line).to_contain_text(f"{held['value']:.3f} {held['ci95'][0]:.3f} to {held['ci95'][1]:.3f}")
    expect(line.get_by_role("cell").nth(3)).to_have_text(str(held["samples"]))
    mean = row["differences"]["mean"]
    signed = f"{mean['value']:+.3f} {mean['ci95'][0]:+.3f} to {mean['ci95'][1]:+.3f}".replace("-", "−")
    expect(table.get_by_role("row").filter(has_text="mean")).to_contain_text(signed)
    rungs = page.get_by_role("region", name="Values by rung")
    expect(rungs.get_by_role("row")).to_have_count(len(trial["rungs"]) + 1)


def test_cost_and_provenance_are_those_of_the_api(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Samples, seconds, digest, replica, fingerprints and the result of the verification are those of the trial."""
    trial = http.get(f"/v1/studies/{study.id}/trials/0").json()
    models = http.get(f"/v1/studies/{study.id}/trials/0/recipe").json()["models"]
    page = visitor.goto(f"/studies/{study.id}/trials/0")
    figures = page.get_by_role("region", name="Cost")
    expect(figures).to_contain_text(f"{trial['samples_scored']:,}")
    expect(figures).to_contain_text(f"{sum(trial['timings_s'].values()):.2f}s")
    facts = page.get_by_role("region", name="Provenance")
    expect(facts).to_contain_text(trial["recipe_digest"])
    (replica,) = trial["provenance"]["replicas"].items()
    expect(facts).to_contain_text(f"{replica[0]}: {replica[1]}")
    expect(facts).to_contain_text(models["math"])
    verification = trial["provenance"]["verification"]
    expect(facts).to_contain_text(f"{verification['samples']} samples of 1 trial were scored again")


def test_why_a_trial_was_stopped(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """A stopped trial names its rival, with the paired difference and its interval at every rung."""
    every = http.get(f"/v1/studies/{searched.id}/plots/stops").json()["trials"]
    stop = next(each for each in every if len(each["looks"]) == 2)
    page = visitor.goto(f"/studies/{searched.id}/trials/{stop['trial']}")
    section = page.get_by_role("region", name="Why it was stopped")
    expect(section.get_by_role("link", name=f"trial {stop['rival']}")).to_be_visible()
    for look in stop["looks"]:
        lead = look["differences"]["mean"]
        figure = section.get_by_role("figure", name=f"Difference from trial {stop['rival']} at each rung: mean")
        if look is stop["looks"][0]:
            figure.get_by_text("Show as table").press("Enter")
        row = figure.get_by_role("row").filter(has=page.get_by_role("cell", name=str(look["samples"]), exact=True))
        low, high = lead["ci95"]
        expect(row).to_contain_text(signed(lead["value"]))
        expect(row).to_contain_text(f"{signed(low)} to {signed(high)}")
    expect(section.get_by_test_id("lead")).to_contain_text(signed(stop["looks"][-1]["differences"]["mean"]["value"]))
    section.get_by_text("text", exact=True).click()
    figure = section.get_by_role("figure", name=f"Difference from trial {stop['rival']} at each rung: text")
    expect(figure).to_contain_text(signed(stop["looks"][0]["differences"]["text"]["value"]))
    section.get_by_role("link", name="answers of both, side by side").click()
    expect(page).to_have_url(re.compile(rf"/trials/{stop['trial']}/samples\?against={stop['rival']}"))


def test_the_page_of_a_stopped_trial_is_accessible(
    browser: Browser, server: ApiServer, searched: JobRecord, http: httpx.Client
) -> None:
    """Light, dark and at 320 px."""
    (stop, *_) = http.get(f"/v1/studies/{searched.id}/plots/stops?rung=1").json()["trials"]
    check_view(browser, server.url, f"/studies/{searched.id}/trials/{stop['trial']}")


def test_a_trial_that_was_not_stopped_has_no_rival(visitor: Visit, searched: JobRecord) -> None:
    page = visitor.goto(f"/studies/{searched.id}/trials/1")
    expect(page.get_by_role("heading", name="Scores")).to_be_visible()
    expect(page.get_by_role("heading", name="Why it was stopped")).to_have_count(0)


def test_the_recipe_has_runs_of_layers(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Each run of layers is a row with the method and the coefficients of its merges."""
    number = trial_of(http, study, "COMPLETE")
    plot = http.get(f"/v1/studies/{study.id}/trials/{number}/plots/recipe").json()
    page = visitor.goto(f"/studies/{study.id}/trials/{number}")
    table = page.get_by_role("region", name="Recipe by layers and components")
    expect(table.get_by_role("row")).to_have_count(len(plot["layers"]) + 3)
    run = plot["layers"][0]
    row = table.get_by_role("row").filter(has_text=f"layers {run['first']} to {run['last']}")
    expect(row.get_by_role("cell")).to_have_count(3)
    for component, cell in zip(("attention", "mlp", "norm"), row.get_by_role("cell").all(), strict=True):
        merge = run["components"][component]
        expect(cell).to_contain_text(merge["method"].replace("_", " "))
        for values in merge["coefficients"].values():
            expect(cell).to_contain_text(f"{values[0] if isinstance(values, list) else values:.3f}")


def test_arrow_keys_step_through_the_coefficients(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Each expert has a heat map; the arrow keys say each of its coefficients, which its table has too."""
    number = trial_of(http, study, "COMPLETE")
    plot = http.get(f"/v1/studies/{study.id}/trials/{number}/plots/coefficients").json()
    own = [each for each in plot["values"] if each["expert"] == "text" and each["layer"] is not None]
    page = visitor.goto(f"/studies/{study.id}/trials/{number}")
    panels = page.get_by_role("region", name="Coefficients").get_by_role("figure")
    expect(panels).to_have_count(len({each["expert"] for each in plot["values"]}))
    panel = page.get_by_role("figure", name="text")
    chart = panel.get_by_role("group", name="text: arrow keys")
    status = panel.get_by_role("status")
    said = f"text, layer {own[0]['layer']} {own[0]['part']}: {own[0]['value']:.3f}"
    for _ in range(12):  # parts before the layers are first
        chart.press("ArrowRight")
        if status.inner_text() == said:
            break
    expect(status).to_have_text(said)
    panel.get_by_text("Show as table").click()
    data = panel.get_by_role("region", name="Data of text")
    expect(data.get_by_role("row")).to_have_count(sum(each["expert"] == "text" for each in plot["values"]) + 1)


def test_a_layer_path_is_drawn(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """In a space of layer paths the page has the model and layer at each position; axe finds nothing there."""
    study = plain_study(server.store, "dis")
    trials = http.get(f"/v1/studies/{study}/trials", params={"origin": "search"}).json()["trials"]
    number = trials[-1]["number"]
    steps = http.get(f"/v1/studies/{study}/trials/{number}/plots/path").json()["steps"]
    page = visitor.goto(f"/studies/{study}/trials/{number}")
    path = page.get_by_role("region", name="Layer path")
    path.get_by_text("Show as table").click()
    rows = path.get_by_role("row")
    expect(rows).to_have_count(len(steps) + 1)
    for k, step in enumerate(steps):
        expect(rows.nth(k + 1)).to_contain_text(f"{step['position']}{step['model']}{step['layer']}")
    expect(page.get_by_text("The merge has no factor of each expert's task vector")).to_be_visible()
    assert axe_violations(page) == []


def test_links_lead_to_the_neighbours(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """A trial links to the one before and the one after, its samples, and the comparison with the best trial."""
    best = http.get(f"/v1/studies/{study.id}/summary").json()["best"]["trial"]
    page = visitor.goto(f"/studies/{study.id}/trials/0")
    links = page.get_by_role("navigation", name="Trials")
    expect(links.get_by_role("link", name="←")).to_have_count(0)
    expect(links.get_by_role("link", name="Compare")).to_have_attribute(
        "href", f"/studies/{study.id}/compare?trials={best}%2C0"
    )
    links.get_by_role("link", name="Trial 1 →").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Trial 1")
    expect(links.get_by_role("link", name="Samples")).to_have_attribute("href", f"/studies/{study.id}/trials/1/samples")
    last = sum(http.get(f"/v1/studies/{study.id}").json()["trials"].values()) - 1
    visitor.goto(f"/studies/{study.id}/trials/{last}")
    expect(links.get_by_role("link", name=f"← Trial {last - 1}")).to_be_visible()
    expect(links.get_by_role("link", name="→")).to_have_count(0)


def test_a_trial_is_invalidated_with_a_reason(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """`Invalidate` needs a reason, which the page then shows; `Mark as valid` takes it back."""
    study = finished_study(server.store, num_trials=9, name="invalid")
    page = visitor.goto(f"/studies/{study.id}/trials/3")
    reason = page.get_by_role("textbox", name="Reason")
    button = page.get_by_role("button", name="Invalidate")
    button.click()
    expect(reason).to_be_focused()
    assert http.get(f"/v1/studies/{study.id}/trials/3").json()["invalid"] is None
    reason.fill("answers were cut off")
    reason.press("Enter")
    expect(page.get_by_text("Invalid: answers were cut off")).to_be_visible()
    assert http.get(f"/v1/studies/{study.id}/trials/3").json()["invalid"] == "answers were cut off"
    page.get_by_role("button", name="Mark as valid").click()
    expect(page.get_by_role("button", name="Invalidate")).to_be_visible()
    expect(page.get_by_text("Invalid: answers were cut off")).to_have_count(0)
    assert http.get(f"/v1/studies/{study.id}/trials/3").json()["invalid"] is None


def test_a_pruned_trial_is_evaluated_and_served(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """`Evaluate at full budget` is there for pruned and failed trials alone; `Serve` leads to the served study."""
    study = finished_study(server.store, num_trials=12, name="steered")
    number = trial_of(http, study, "PRUNED")
    page = visitor.goto(f"/studies/{study.id}/trials/0")
    expect(page.get_by_role("button", name="Serve")).to_be_visible()
    evaluate = page.get_by_role("button", name="Evaluate at full budget")
    expect(evaluate).to_have_count(0)
    visitor.goto(f"/studies/{study.id}/trials/{number}")
    evaluate.click()
    expect(page.get_by_text("Requested: a new trial")).to_be_visible()
    events = http.get(f"/v1/studies/{study.id}/events", headers={"Accept": "application/json"}).json()["events"]
    steered = [each["payload"] for each in events if each["kind"] == "steered"]
    assert [(each["action"], each["trial"]) for each in steered] == [("evaluate", number)]
    page.get_by_role("button", name="Serve").click()
    page.get_by_role("link", name=f"Chat with trial {number}").click()
    page.wait_for_url("**/served/**")
    (served,) = http.get("/v1/served").json()["served"]
    assert page.url == f"{server.url}/served/{served['id']}?trials={number}"
    assert served["study"] == study.id


def test_an_export_of_the_trial_begins(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """`Export` begins an export of this trial in the chosen dtype."""
    study = finished_study(server.store, num_trials=9, name="exported")
    page = visitor.goto(f"/studies/{study.id}/trials/2")
    page.get_by_role("combobox", name="dtype of the export").select_option("float16")
    page.get_by_role("button", name="Export", exact=True).click()
    expect(page.get_by_text("Export of trial 2 has begun")).to_be_visible()
    (export,) = http.get(f"/v1/studies/{study.id}/exports").json()["exports"]
    assert (export["trial"], export["dtype"]) == (2, "float16")


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory, own_port: int) -> Iterator[tuple[Company, JobRecord]]:
    """A server with accounts, and a study of "owner" that is shared with the team."""
    with ApiServer(tmp_path_factory.mktemp("company"), port=own_port) as server:
        company = Company.on(server)
        yield company, company.finished()


@pytest.mark.parametrize(
    ("user", "scope", "verbs"),
    [
        ("viewer", Scope.SUBMIT, []),
        ("member", Scope.SUBMIT, ["Export", "Serve"]),
        ("owner", Scope.SUBMIT, ["Export", "Serve", "Invalidate"]),
        ("owner", Scope.READ, []),
    ],
)
def test_only_what_is_allowed_is_shown(
    browser: Browser, owned: tuple[Company, JobRecord], user: str, scope: Scope, verbs: list[str]
) -> None:
    """Actions that the server would refuse to a user, or to a token with a smaller scope, are absent."""
    company, study = owned
    with visit(browser, company.server.url, headers=bearer(company.tokens[user, scope])) as opened:
        page = opened.goto(f"/studies/{study.id}/trials/0")
        expect(page.get_by_role("link", name="Enqueue in a study")).to_have_count(int(scope is Scope.SUBMIT))
        expect(page.get_by_role("heading", name="Copy as")).to_be_visible()
        shown = [name for name in page.get_by_role("button").all_inner_texts() if name in ALL_VERBS]
        assert shown == verbs


def test_a_text_is_copied_or_selected(visitor: Visit, study: JobRecord) -> None:
    """`Copy` writes to the clipboard; where the browser gives a page no clipboard, the text is selected instead."""
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visitor.goto(f"/studies/{study.id}/trials/5")
    text = copied(page, "curl")
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == text
    # What a page has over HTTP from another machine.
    page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', { value: undefined })")
    visitor.goto(f"/studies/{study.id}/trials/5")
    copied(page, "curl")
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_text("The text is selected")).to_be_visible()
    selected = (
        "document.activeElement.value.slice(document.activeElement.selectionStart, document.activeElement.selectionEnd)"
    )
    assert page.evaluate(selected) == text


@pytest.mark.slow
def test_copied_texts_work(browser: Browser, real: tuple[ApiServer, JobRecord], tmp_path: Path) -> None:
    """Both commands run and merge the trial, mergekit's file can be merged, and the study file is accepted."""
    server, study = real
    with visit(browser, server.url) as opened:
        page = opened.goto(f"/studies/{study.id}/trials/{AVERAGE}")
        curl = copied(page, "curl")
        merge = copied(page, "mergesearch merge")
        mergekit = copied(page, "mergekit configuration (YAML)")
        continuing = copied(page, "study file that continues from this merge")
    recipe = tmp_path / f"trial-{AVERAGE}.json"
    run(curl, tmp_path)
    fetched = json.loads(recipe.read_text())
    assert fetched == httpx.get(f"{server.url}/v1/studies/{study.id}/trials/{AVERAGE}/recipe").json()
    run(merge, tmp_path)
    assert json.loads(recipe.read_text()) == fetched
    merged = tmp_path / f"trial-{AVERAGE}"
    assert (merged / "model.safetensors").stat().st_size > 10**5
    written = json.loads((merged / "recipe.json").read_text())
    assert written["digest"] == server.store.trial(study.id, AVERAGE).recipe.digest
    assert written["dtype"] == fetched["dtype"]
    (tmp_path / "mergekit.yml").write_text(mergekit)
    models = study.document["models"]
    places = {name: Path(place) for name, place in models["experts"].items()}
    assert not any(str(place) in mergekit for place in (*places.values(), models["base"])), "paths of the server"
    assert f"# {', '.join(sorted(places))}: put the directory of the model in place of each name" in mergekit
    plans = check_merges(
        tmp_path / "mergekit.yml", places, tmp_path / "other", dtype=None, strict=True, note=pytest.fail
    )
    assert list(plans) == [""]
    accepted = accept(json.loads(continuing), RequestContext(store_url=server.database, data_dir=server.data_dir))
    assert accepted.document["models"]["experts"][f"trial-{AVERAGE}"] == {
        "from_study": {"dir": None, "id": study.id, "trial": AVERAGE}
    }


def run(command: str, directory: Path) -> None:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", command], cwd=directory, check=True, env={**os.environ, "PATH": path}, timeout=120)


def test_what_mergekit_cannot_express_is_listed(browser: Browser, real: tuple[ApiServer, JobRecord]) -> None:
    """In place of a mergekit file, the page has every reason why there is none."""
    server, study = real
    path = f"/studies/{study.id}/trials/{TIES}"
    with visit(browser, server.url) as opened:
        opened.expected = ("409",)
        page = opened.goto(path)
        page.get_by_role("combobox", name="Copy as").select_option("mergekit")
        alert = page.get_by_role("alert")
        expect(alert).to_be_visible()
        problems = httpx.get(f"{server.url}/v1{path}/mergekit", timeout=60).json()["problems"]
        assert problems
        for problem in problems:
            expect(alert).to_contain_text(problem["message"])
