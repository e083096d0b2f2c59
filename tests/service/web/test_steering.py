"""Actions on a study from the page, and its events, log and file."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
import yaml
from playwright.sync_api import Browser, Locator, Page

from service.store import schema
from service.store.connection import transaction
from service.store.steering import SteeringStore
from service.types import EventKind, JobRecord, JobState, Scope, Steering
from tests.service.api.accounts import Company, bearer
from tests.service.api.harness import ApiServer, stored_study
from tests.service.web.driving import SCHEMES, Visit, axe_violations, expect, visit

NUM_EVENTS = 10_000


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory, own_port: int) -> Iterator[Company]:
    """A server with accounts."""
    with ApiServer(Path(tmp_path_factory.mktemp("company")), port=own_port) as server:
        yield Company.on(server)


def opened_menu(page: Page, study: JobRecord) -> list[str]:
    """Open the menu of a study, and return the names of its actions."""
    page.get_by_role("button", name=f"Actions on {study.name}", exact=True).click()
    items = page.get_by_role("menuitem")
    expect(items.first).to_be_visible()
    return items.all_inner_texts()


def choose(page: Page, study: JobRecord, action: str) -> Locator:
    """Choose an action in the menu of a study; returns its dialog."""
    opened_menu(page, study)
    page.get_by_role("menuitem", name=action).click()
    return page.get_by_role("dialog", name=f"{action} {study.name}")


def steered(server: ApiServer, study: JobRecord) -> list[tuple[str, str | None]]:
    events = server.store.events(study.id, kinds=[EventKind.STEERED])
    return [(event.payload["action"], event.payload["reason"]) for event in events]


@pytest.mark.parametrize(
    ("verb", "says"),
    [("pause", "continues when it is resumed"), ("stop", "ends early"), ("cancel", "does not continue")],
)
def test_a_verb_reaches_the_server_with_its_reason(visitor: Visit, server: ApiServer, verb: str, says: str) -> None:
    """A dialog says what the verb does; the server gets the verb and the reason."""
    study = stored_study(server.store, name=f"to-{verb}")
    page = visitor.goto(f"/studies/{study.id}/events")
    dialog = choose(page, study, verb.capitalize())
    expect(dialog).to_contain_text(says)
    dialog.get_by_role("textbox", name="reason").fill("it is enough")
    dialog.get_by_role("button", name=verb.capitalize()).click()
    expect(dialog).to_have_count(0)
    assert steered(server, study) == [(verb, "it is enough")]
    expect(page.get_by_role("region", name="Events")).to_contain_text("A request")


def test_a_paused_study_is_resumed_from_the_list(visitor: Visit, server: ApiServer) -> None:
    """The list has the same menu, which works by keyboard; without a reason, none is sent."""
    study = stored_study(server.store, name="to-resume")
    SteeringStore(server.store).pause(study.id, steering=Steering("pause"))
    page = visitor.goto("/studies?q=to-resume")
    page.get_by_role("button", name="Actions on to-resume").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menu").locator("[data-autofocus]")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("menuitem", name="Resume")).to_be_focused()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Resume to-resume")
    expect(dialog.get_by_role("textbox", name="reason")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("row").filter(has_text="to-resume").get_by_text("paused")).to_have_count(0)
    expect(page.get_by_role("button", name="Actions on to-resume")).to_be_focused()
    assert steered(server, study) == [("pause", None), ("resume", None)]


def test_only_permitted_verbs_are_offered(visitor: Visit, server: ApiServer, study: JobRecord) -> None:
    """A study that has ended is not paused or cancelled; one that has not is not deleted or resumed."""
    page = visitor.goto(f"/studies/{study.id}/events")
    assert opened_menu(page, study) == ["Edit", "Clone", "Delete"]
    running = stored_study(server.store, name="running")
    server.store.open_attempt(running.id).set_state(JobState.RUNNING)
    page = visitor.goto(f"/studies/{running.id}/events")
    assert opened_menu(page, running) == ["Pause", "Stop", "Cancel", "Edit", "Clone"]
    page.get_by_role("menuitem", name="Clone").click()
    page.wait_for_url(f"**/studies/new?from={running.id}")


def test_a_verb_that_came_too_late_is_explained(visitor: Visit, server: ApiServer) -> None:
    """If the study ends while the dialog is open, the server's refusal is shown."""
    visitor.expected = ("409",)
    study = stored_study(server.store, name="too-late")
    page = visitor.goto(f"/studies/{study.id}/events")
    dialog = choose(page, study, "Pause")
    server.store.open_attempt(study.id).set_state(JobState.FAILED, "the end")
    dialog.get_by_role("button", name="Pause").click()
    expect(dialog.get_by_role("alert")).to_contain_text("only a study that has not ended can be paused")


def test_a_study_is_deleted_by_its_name(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """The dialog deletes only when the name of the study is typed, and leads to the list."""
    study = stored_study(server.store, name="to-delete")
    server.store.open_attempt(study.id).set_state(JobState.CANCELLED)
    page = visitor.goto(f"/studies/{study.id}/events")
    dialog = choose(page, study, "Delete")
    button = dialog.get_by_role("button", name="Delete")
    name = dialog.get_by_role("textbox", name="Type the name")
    name.fill("to-del")
    expect(button).to_be_disabled()
    name.press("Enter")
    name.fill("to-delete")
    button.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Studies")
    assert http.get(f"/v1/studies/{study.id}").status_code == 404


def test_an_edit_sends_what_was_changed(visitor: Visit, server: ApiServer) -> None:
    """Labels, priority, trials, replicas and limits are edited; the rest keeps its values."""
    study = stored_study(server.store, name="to-edit")
    page = visitor.goto(f"/studies/{study.id}/events")
    dialog = choose(page, study, "Edit")
    expect(dialog.get_by_role("textbox", name="max_trials")).to_have_value("12")
    expect(dialog.get_by_role("button", name="Edit")).to_be_disabled()
    dialog.get_by_role("textbox", name="description").fill("with two experts")
    dialog.get_by_role("textbox", name="max_trials").fill("20")
    dialog.get_by_role("textbox", name="max_gpu_hours").fill("1.5")
    dialog.get_by_role("combobox", name="tags").or_(dialog.get_by_label("tags")).first.fill("math")
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Edit").click()
    expect(dialog).to_have_count(0)
    now = server.store.job(study.id)
    assert (now.description, now.tags, now.priority) == ("with two experts", ("math",), 0)
    assert now.document["search"]["max_trials"] == 20
    assert now.document["limits"] == {**study.document["limits"], "max_gpu_hours": 1.5}
    (event,) = server.store.events(study.id, kinds=[EventKind.STEERED])
    assert set(event.payload["changes"]) == {"description", "tags", "search.max_trials", "limits.max_gpu_hours"}


def test_a_refused_edit_says_why(visitor: Visit, server: ApiServer) -> None:
    """A value that the server does not accept has its message at the field, and nothing is stored."""
    visitor.expected = ("422",)
    study = stored_study(server.store, name="wrong-edit")
    page = visitor.goto(f"/studies/{study.id}/events")
    dialog = choose(page, study, "Edit")
    field = dialog.get_by_role("textbox", name="max_trials")
    field.fill("0")
    dialog.get_by_role("button", name="Edit").click()
    expect(field).to_have_accessible_description(re.compile("greater than or equal to 1"))
    assert server.store.job(study.id).version == 0


def test_no_edit_is_overwritten(browser: Browser, company: Company) -> None:
    """An edit of a study that somebody else has edited meanwhile is refused, with who did what; it can be repeated."""
    server = company.server
    study = company.own(stored_study(server.store, name="contested"))
    token = company.tokens["owner", Scope.SUBMIT]
    with visit(browser, server.url, headers=bearer(token)) as opened:
        opened.expected = ("412",)
        page = opened.goto(f"/studies/{study.id}/events")
        dialog = choose(page, study, "Edit")
        dialog.get_by_role("textbox", name="priority").fill("-1")
        headers = {**bearer(company.tokens["manager", Scope.SUBMIT]), "If-Match": "*"}
        httpx.patch(f"{server.url}/v1/studies/{study.id}", json={"priority": -7}, headers=headers).raise_for_status()
        dialog.get_by_role("button", name="Edit").click()
        expect(dialog.get_by_role("alert")).to_contain_text("manager edited the study: priority from 0 to -7.")
        assert server.store.job(study.id).priority == -7
        dialog.get_by_role("button", name="Read it again").click()
        expect(dialog.get_by_role("textbox", name="priority")).to_have_value("-7")
        dialog.get_by_role("textbox", name="priority").fill("-1")
        dialog.get_by_role("button", name="Edit").click()
        expect(dialog).to_have_count(0)
    assert server.store.job(study.id).priority == -1


def test_a_study_is_shared(browser: Browser, company: Company) -> None:
    """The owner changes who may read the study; a member of the team has no menu entry for it, and may clone."""
    server = company.server
    study = company.own(stored_study(server.store, name="to-share"))
    with visit(browser, server.url, headers=bearer(company.tokens["owner", Scope.SUBMIT])) as opened:
        page = opened.goto(f"/studies/{study.id}/events")
        dialog = choose(page, study, "Share")
        expect(dialog.get_by_role("combobox", name="team")).to_have_value("red")
        dialog.get_by_role("radio", name="all").check()
        dialog.get_by_role("button", name="Share").click()
        expect(dialog).to_have_count(0)
    assert server.store.job(study.id).sharing.value == "all"
    with visit(browser, server.url, headers=bearer(company.tokens["stranger", Scope.SUBMIT])) as opened:
        page = opened.goto(f"/studies/{study.id}/events")
        assert opened_menu(page, study) == ["Clone"]
    with visit(browser, server.url, headers=bearer(company.tokens["owner", Scope.READ])) as opened:
        page = opened.goto(f"/studies/{study.id}/events")
        expect(page.get_by_role("region", name="Events").get_by_role("row").nth(1)).to_be_visible()
        expect(page.get_by_role("button", name="Actions on")).to_have_count(0)


def test_dialogs_are_accessible(browser: Browser, server: ApiServer) -> None:
    """A dialog violates no rule of axe in either colour scheme, and fits into 320 px."""
    study = stored_study(server.store, name="accessible")
    with visit(browser, server.url, width=320) as opened:
        page = opened.goto(f"/studies/{study.id}/events")
        expect(choose(page, study, "Edit").get_by_role("button", name="Edit")).to_be_visible()
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", scheme)
            assert axe_violations(page) == []
            assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_events_are_filtered_by_the_server(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """The number of events is that of the API; a kind is in the address; trials are links."""
    url, headers = f"/v1/studies/{study.id}/events", {"Accept": "application/json"}
    every = http.get(url, headers=headers).json()["total"]
    failed = http.get(url, params={"kind": "trial_state"}, headers=headers).json()
    page = visitor.goto(f"/studies/{study.id}/events")
    table = page.get_by_role("region", name="Events")
    expect(page.get_by_text(f"{every} events")).to_be_visible()
    expect(table.get_by_role("row").nth(1)).to_contain_text("The study is complete.")
    page.get_by_role("combobox", name="Kind").select_option("trial_state")
    expect(page.get_by_text(f"{failed['total']} events")).to_be_visible()
    assert page.url.endswith("kind=trial_state")
    table.get_by_role("button", name="time").click()
    first = failed["events"][0]["payload"]
    expect(table.get_by_role("row").nth(1)).to_contain_text(f"Trial {first['trial']} is {first['state'].lower()}")
    table.get_by_role("link", name=f"Trial {first['trial']}", exact=True).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Trial {first['trial']}")


def test_ten_thousand_events_are_paged(visitor: Visit, server: ApiServer) -> None:
    """Of many events only those in view are in the document, and the last is reached by one key."""
    study = stored_study(server.store, name="eventful")
    with transaction(server.store.engine) as connection:
        row = {"study": study.id, "time": time.time(), "kind": "search_note"}
        rows = [{**row, "payload": {"text": f"note {number}."}} for number in range(NUM_EVENTS)]
        connection.execute(sa.insert(schema.events), rows)
    page = visitor.goto(f"/studies/{study.id}/events")
    table = page.get_by_role("region", name="Events")
    expect(page.get_by_text(f"{NUM_EVENTS + 1:,} events")).to_be_visible()
    expect(table.get_by_role("row").nth(1)).to_contain_text(f"note {NUM_EVENTS - 1}.")
    assert table.get_by_role("row").count() < 100
    table.focus()
    page.keyboard.press("End")
    expect(table.get_by_role("row").last).to_contain_text("The study was created")


def test_events_are_live(hurried: Visit, server: ApiServer) -> None:
    """A new event is in the table without a click."""
    study = stored_study(server.store, name="live")
    writer = server.store.open_attempt(study.id)
    page = hurried.goto(f"/studies/{study.id}/events")
    expect(page.get_by_label("Connection")).to_have_text("live")
    writer.add_event(EventKind.SEARCH_NOTE, {"text": "Something new."})
    expect(page.get_by_role("region", name="Events").get_by_role("row").nth(1)).to_contain_text("Something new.")


def test_the_log_is_what_the_drivers_printed(hurried: Visit, server: ApiServer, study: JobRecord) -> None:
    """The log shows its end, says when it is empty, and has the server's words when Ray does not answer."""
    before = server.cluster.log_text
    try:
        server.cluster.log_text = "".join(f"line {number}\n" for number in range(500))
        page = hurried.goto(f"/studies/{study.id}/log")
        box = page.get_by_role("region", name="Log of the drivers")
        expect(box).to_contain_text("line 499")
        expect(page.get_by_text("500 lines")).to_be_visible()
        assert box.evaluate("box => box.scrollTop + box.clientHeight >= box.scrollHeight - 2")
        server.cluster.log_text = ""
        page.reload()
        expect(page.get_by_text("The drivers have printed nothing.")).to_be_visible()
        hurried.expected = ("503",)
        server.cluster.reason = "Ray does not answer"
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text("Ray does not answer")
    finally:
        server.cluster.reason, server.cluster.log_text = None, before


def test_the_study_file_is_that_of_the_api(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """The file with its defaults is shown, copied and downloaded, and begins another study."""
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    document = http.get(f"/v1/studies/{study.id}/study").json()
    page = visitor.goto(f"/studies/{study.id}/file")
    assert yaml.safe_load(page.get_by_role("textbox", name="Study file").input_value()) == document
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_text("Copied")).to_be_visible()
    assert yaml.safe_load(page.evaluate("navigator.clipboard.readText()")) == document
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == f"{study.name}.yaml"
    assert yaml.safe_load(Path(download.value.path()).read_text()) == document
    page.get_by_role("link", name="Use as a new study").click()
    page.wait_for_url(f"**/studies/new?from={study.id}")
