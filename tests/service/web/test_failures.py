"""Views of a study whose requests fail, or that is deleted meanwhile: each says so, and none is blank."""

from __future__ import annotations

import json

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from service.types import JobRecord
from tests.service.api.harness import ApiServer, finished_study
from tests.service.web.driving import Visit

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


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_a_failing_api_is_said(visitor: Visit, searched: JobRecord, view: str) -> None:
    """A view whose requests fail has its heading and the server's words; it is whole once they succeed."""
    visitor.expected = ("507",)
    of_study = f"{visitor.url}/v1/studies/{searched.id}/**"
    visitor.page.route(of_study, fail)
    page = visitor.goto(f"/studies/{searched.id}{view}")
    heading = searched.name if VIEWS[view] == "study" else VIEWS[view]
    expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    failure = page.get_by_role("alert").filter(has_text=WORDS)
    expect(failure.first).to_be_visible()
    settled(page)
    page.unroute(of_study)
    expect(failure).to_have_count(0)  # the page tries again by itself
    settled(page)


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_a_deleted_study_is_said(visitor: Visit, server: ApiServer, http: httpx.Client, view: str) -> None:
    """A view of a study that somebody else has deleted says that there is no such study, with a heading."""
    study = finished_study(server.store, num_trials=6, name="to-be-deleted")
    page = visitor.goto(f"/studies/{study.id}{view}")
    settled(page)
    http.delete(f"/v1/studies/{study.id}").raise_for_status()
    visitor.expected = ("404",)
    page.reload()
    expect(page.get_by_role("alert").filter(has_text="there is no such study").first).to_be_visible()
    settled(page)
