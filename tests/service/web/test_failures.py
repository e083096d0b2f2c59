"""Views whose requests fail, or whose study is deleted meanwhile: each says so, and none is blank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page

from service.types import JobRecord, JobState, Scope
from tests.service.api.accounts import Company, bearer
from tests.service.api.harness import ApiServer, finished_finetune, finished_study, stored_study
from tests.service.jobs.serving.local import served
from tests.service.web.driving import HURRY, Visit, answer, expect, navigate, settle, visit
from tests.service.web.test_finetunes import analysis

WORDS = "the disk of the database is full"
PROBLEM = {"type": "about:blank", "title": "Insufficient Storage", "status": 507, "detail": WORDS}

# The address of each view below that of a study, and its title in the browser's tab.
VIEWS = {
    "": "",
    "/trials": "Trials",
    "/parameters": "Parameters",
    "/rungs": "Rungs",
    "/timeline": "Timeline",
    "/compare": "Compare",
    "/benchmarks": "Benchmarks",
    "/exports": "Exports",
    "/events": "Events",
    "/log": "Log",
    "/file": "File",
    "/trials/5": "Trial 5",
    "/trials/0/samples?split=holdout": "Samples",
}


def failing(page: Page, address: str) -> Callable[[], None]:
    """Makes requests of a page to an address fail until the returned function is called.

    An address that ends in `/**` is all addresses below it, others have any query.
    """
    below = address.removesuffix("**")
    patterns = (f"{below}*",) if below != address else (address, rf"{address}\?*")
    return answer(page, *patterns, status=507, content_type="application/problem+json", body=json.dumps(PROBLEM))


def check_failing(opened: Visit, walks: Iterable[Mapping[str, str]], headings: Mapping[str, str] | None = None) -> None:
    """Check views while requests to an address of the API fail; `walks` have the address of each view.

    Each view has a heading (that in `headings` where the view is named there) and the server's words, and is whole once
    requests succeed again. The views of a walk are shown one after the other in one tab, and share no address.
    """
    opened.expected = ("507",)
    for walk in walks:
        tab = opened.context.new_page()
        for number, (view, address) in enumerate(walk.items()):
            succeed = failing(tab, f"{opened.url}/v1/{address}")
            if number == 0:
                tab.goto(opened.url + view, wait_until="commit")
            else:
                tab.evaluate("path => history.pushState({}, '', path)", view)
            if headings is not None and view in headings:
                expect(tab.get_by_role("heading", level=1)).to_have_text(headings[view])
            expect(tab.get_by_role("alert").filter(has_text=WORDS).first).to_be_visible()
            expect(tab.get_by_text("What is shown below is older")).to_have_count(0)
            settle(tab)
            succeed()
            expect(tab.get_by_role("alert")).to_have_count(0, timeout=60_000)  # the page tries again by itself
            settle(tab)
        tab.close()


@pytest.mark.slow
def test_a_failing_api_is_said(hurried: Visit, searched: JobRecord) -> None:
    """A view whose requests fail has its heading and the server's words; it is whole once they succeed."""
    headings = {
        f"/studies/{searched.id}{view}": title if view.startswith("/trials/") else searched.name
        for view, title in VIEWS.items()
    }
    check_failing(hurried, [{view: f"studies/{searched.id}/**"} for view in headings], headings)


@pytest.mark.slow
def test_a_deleted_study_is_said(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """Each view of a study that somebody else has deleted says that there is no such study, with a heading."""
    study = finished_study(server.store, num_trials=6, name="to-be-deleted")
    page = visitor.page
    for view, title in VIEWS.items():  # the browser has then all answers of the server
        address = f"/studies/{study.id}{view}"
        if view == "":
            visitor.goto(address)
        else:
            navigate(page, address, title)
        settle(page)
    visitor.expected = ("404",)
    http.delete(f"/v1/studies/{study.id}").raise_for_status()
    tabs = [visitor.context.new_page() for _ in VIEWS]
    for tab, view in zip(tabs, VIEWS, strict=True):
        tab.goto(f"{visitor.url}/studies/{study.id}{view}", wait_until="commit")
    for tab in tabs:
        said = tab.get_by_role("alert").filter(has_text="there is no such study")
        expect(said.first).to_be_visible()
        settle(tab)


@pytest.mark.slow
def test_failing_jobs_are_said(hurried: Visit, server: ApiServer, searched: JobRecord) -> None:
    """A study, a trial, a fine-tuning, a chat and lists of jobs say in the server's words that their requests fail."""
    tuned = finished_finetune(server.store, server.data_dir, analysis=analysis("mergopt", 1.25, 2.5, 3.75, 0.5))
    with served(server.store, searched) as chat:
        check_failing(
            hurried,
            [
                {
                    "/studies": "studies",
                    "/finetunes": "finetunes",
                    f"/studies/{searched.id}": f"studies/{searched.id}",
                    f"/finetunes/{tuned.id}": f"finetunes/{tuned.id}",
                    f"/served/{chat.job.id}": f"served/{chat.job.id}",
                },
                {
                    f"/studies/{searched.id}/trials/5": f"studies/{searched.id}",
                    f"/finetunes/{tuned.id}": f"finetunes/{tuned.id}/curves",
                    f"/served/{chat.job.id}": f"served/{chat.job.id}/openai/v1/models",
                },
                {f"/finetunes/{tuned.id}": f"finetunes/{tuned.id}/analysis"},
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
            check_failing(opened, [{**addresses, "/admin/cluster": "cluster"}])


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
