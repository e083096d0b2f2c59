"""Views whose requests fail, or whose study is deleted meanwhile: each says so, and none is blank."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route

from service.types import JobRecord, JobState, Scope
from tests.service.api.accounts import Company, bearer
from tests.service.api.harness import ApiServer, finished_finetune, finished_study, stored_study
from tests.service.jobs.serving.local import served
from tests.service.web.driving import HURRY, Visit, expect, visit
from tests.service.web.test_finetunes import analysis

WORDS = "the disk of the database is full"
PROBLEM = {"type": "about:blank", "title": "Insufficient Storage", "status": 507, "detail": WORDS}

# The address of each view below that of a study, and its heading.
VIEWS = {
    "": "study",
    "/trials": "study",
    "/parameters": "study",
    "/rungs": "study",
    "/timeline": "study",
    "/compare": "study",
    "/benchmarks": "study",
    "/exports": "study",
    "/events": "study",
    "/log": "study",
    "/file": "study",
    "/trials/5": "Trial 5",
    "/trials/0/samples?split=holdout": "Samples",
}


def fail(route: Route) -> None:
    route.fulfill(status=507, content_type="application/problem+json", body=json.dumps(PROBLEM))


def settled(page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_text("Loading", exact=True)).to_have_count(0)


def check_failing(opened: Visit, views: Iterable[tuple[str, str]], headings: Mapping[str, str] | None = None) -> None:
    """Check pairs of a view and an address of the API while requests to the address fail, each view in its own tab.

    Each view has a heading (that in `headings` where the view is named there) and the server's words, and is whole once
    requests succeed again. An address that ends in `/**` is all addresses below it.
    """
    opened.expected = ("507",)

    def check_recovered(tab: Page) -> None:
        expect(tab.get_by_role("alert")).to_have_count(0, timeout=60_000)  # the page tries again by itself
        settled(tab)
        tab.close()

    before = None  # the tab that tries again while the next one is opened
    for view, address in views:
        tab = opened.context.new_page()
        below = address.removesuffix("/**")
        end = r"(\?.*)?" if below == address else "/.*"
        tab.route(re.compile(re.escape(f"{opened.url}/v1/{below}") + f"{end}$"), fail)
        tab.goto(opened.url + view, wait_until="commit")
        if headings is not None and view in headings:
            expect(tab.get_by_role("heading", level=1)).to_have_text(headings[view])
        expect(tab.get_by_role("alert").filter(has_text=WORDS).first).to_be_visible()
        settled(tab)
        tab.unroute_all()
        if before is not None:
            check_recovered(before)
        before = tab
    assert before is not None, "there are views"
    check_recovered(before)


@pytest.mark.slow
def test_a_failing_api_is_said(hurried: Visit, searched: JobRecord) -> None:
    """A view whose requests fail has its heading and the server's words; it is whole once they succeed."""
    headings = {
        f"/studies/{searched.id}{view}": searched.name if heading == "study" else heading
        for view, heading in VIEWS.items()
    }
    check_failing(hurried, [(view, f"studies/{searched.id}/**") for view in headings], headings)


@pytest.mark.slow
def test_a_deleted_study_is_said(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """Each view of a study that somebody else has deleted says that there is no such study, with a heading."""
    study = finished_study(server.store, num_trials=6, name="to-be-deleted")
    tabs = [visitor.context.new_page() for _ in VIEWS]
    for tab, view in zip(tabs, VIEWS, strict=True):
        tab.goto(f"{visitor.url}/studies/{study.id}{view}", wait_until="commit")
    for tab in tabs:
        settled(tab)
    visitor.expected = ("404",)
    http.delete(f"/v1/studies/{study.id}").raise_for_status()
    for tab in tabs:
        tab.reload(wait_until="commit")
    for tab in tabs:
        said = tab.get_by_role("alert").filter(has_text="there is no such study")
        expect(said.first).to_be_visible()
        settled(tab)


@pytest.mark.slow
def test_failing_jobs_are_said(hurried: Visit, server: ApiServer, searched: JobRecord) -> None:
    """A study, a trial, a fine-tuning, a chat and lists of jobs say in the server's words that their requests fail."""
    tuned = finished_finetune(server.store, server.data_dir, analysis=analysis("mergopt", 1.25, 2.5, 3.75, 0.5))
    with served(server.store, searched) as chat:
        check_failing(
            hurried,
            [
                ("/studies", "studies"),
                ("/finetunes", "finetunes"),
                (f"/studies/{searched.id}", f"studies/{searched.id}"),
                (f"/studies/{searched.id}/trials/5", f"studies/{searched.id}"),
                (f"/finetunes/{tuned.id}", f"finetunes/{tuned.id}"),
                (f"/finetunes/{tuned.id}", f"finetunes/{tuned.id}/curves"),
                (f"/finetunes/{tuned.id}", f"finetunes/{tuned.id}/analysis"),
                (f"/served/{chat.job.id}", f"served/{chat.job.id}"),
                (f"/served/{chat.job.id}", f"served/{chat.job.id}/openai/v1/models"),
            ],
        )
    server.store.open_attempt(chat.job.id).set_state(JobState.CANCELLED)


@pytest.mark.slow
def test_failing_views_of_administrators_say_so(browser: Browser, tmp_path: Path, own_port: int) -> None:
    """Users, teams, queue, audit log and cluster say in the server's words that their requests fail."""
    with ApiServer(tmp_path, port=own_port) as server:
        headers = bearer(Company.on(server).tokens["root", Scope.ADMIN])
        with visit(browser, server.url, headers=headers, is_in_a_hurry=True) as opened:
            addresses = {"/admin/users": "users", "/teams": "teams", "/queue": "queue", "/admin/audit": "audit"}
            check_failing(opened, [*addresses.items(), ("/admin/cluster", "cluster")])


@pytest.mark.slow
def test_a_deletion_of_a_followed_study_is_said(hurried: Visit, server: ApiServer) -> None:
    """Views that follow a new or a running study say without a reload that it was ended and deleted."""
    followed = []
    for name, view in (("new", "/trials"), ("running", "/log")):
        writer = server.store.open_attempt(stored_study(server.store, name=name).id)
        if name == "running":
            writer.set_state(JobState.RUNNING)
        tab = hurried.context.new_page()
        tab.goto(f"{hurried.url}/studies/{writer.job_id}{view}")
        followed.append((writer, tab))
    for _, tab in followed:
        expect(tab.get_by_label("Connection")).to_have_text("live")
        tab.wait_for_timeout(4000 / HURRY)  # what the page requests again once it is live
    hurried.expected = ("404",)
    for writer, tab in followed:
        writer.set_state(JobState.CANCELLED)
        server.store.delete_job(writer.job_id)
        said = tab.get_by_role("alert").filter(has_text="there is no such study")
        expect(said.first).to_be_visible()


@pytest.mark.slow
def test_a_deletion_of_a_study_that_has_ended_is_said(browser: Browser, server: ApiServer) -> None:
    """A tab with a study that has ended says that it was deleted when the reader comes back to the tab."""
    study = finished_study(server.store, num_trials=6, name="to-be-deleted")
    with visit(browser, server.url, is_last=True) as opened:
        opened.page.clock.install()
        page = opened.goto(f"/studies/{study.id}/exports")
        expect(page.get_by_label("Connection")).to_have_text("no more changes")
        with page.expect_response(f"**/v1/studies/{study.id}"), page.expect_response("**/exports"):
            page.clock.run_for(3000)  # what the page asks again at the end of the stream
        page.wait_for_timeout(500)
        server.store.delete_job(study.id)
        opened.expected = ("404",)
        page.clock.fast_forward(60_000)
        expect(page.get_by_role("alert")).to_have_count(0)
        page.evaluate("window.dispatchEvent(new Event('visibilitychange'))")
        expect(page.get_by_role("alert").filter(has_text="there is no such study").first).to_be_visible()
