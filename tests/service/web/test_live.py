"""What changes while a page is open is shown without a reload, in any number of tabs."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect

from service.store import JobWriter
from service.types import EventKind, JobState
from tests.service.api.harness import ApiServer, snapshot, stored_study, write_trial
from tests.service.synthetic_run import run_record
from tests.service.web.driving import visit

# A browser opens six connections to a server: with one stream for each tab, the seventh would not load.
NUM_TABS = 10


def begun(server: ApiServer) -> JobWriter:
    """A driver's writer of a study that runs and has its baselines."""
    record = stored_study(server.store)
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    for trial in run_record(num_trials=40).whole_trials[:9]:
        write_trial(writer, trial)
    return writer


def figure(page: Page, term: str) -> Locator:
    return page.locator("dl.figures div").filter(has=page.get_by_text(term, exact=True)).locator("dd")


def test_tabs_follow_a_study(browser: Browser, tmp_path: Path) -> None:
    """Ten tabs on one study show its progress, its trials and its end as they happen."""
    made = run_record(num_trials=40)
    with ApiServer(tmp_path) as server, visit(browser, server.url) as opened:
        writer = begun(server)
        tabs = [opened.page, *(opened.context.new_page() for _ in range(NUM_TABS - 1))]
        for number, tab in enumerate(tabs):
            writer.add_event(
                EventKind.SEARCH_NOTE, {"text": f"before tab {number}"}
            )  # each tab begins at another event
            tab.goto(f"{server.url}/studies/{writer.job_id}")
            expect(tab.get_by_label("Connection")).to_have_text("live")
        for tab in tabs:
            expect(figure(tab, "trials")).to_contain_text("9")
        writer.heartbeat(wall_clock_s=1.0, progress={**snapshot(made).to_json(), "samples_scored": 4321})
        for tab in tabs:
            expect(figure(tab, "samples scored")).to_contain_text("4,321")
        for trial in made.whole_trials[9:14]:
            write_trial(writer, trial)
        for tab in tabs:
            expect(figure(tab, "trials")).to_contain_text("14", timeout=15_000)
        writer.set_state(JobState.COMPLETE)
        for tab in tabs:
            expect(tab.get_by_label("Connection")).to_have_text("no more changes")
            expect(tab.locator("main .state").first).to_contain_text("complete", timeout=15_000)


def test_a_closed_tab_leaves_the_others_live(browser: Browser, tmp_path: Path) -> None:
    """The stream that tabs share goes on when the tab that began it is closed."""
    with ApiServer(tmp_path) as server, visit(browser, server.url) as opened:
        writer = begun(server)
        first, second = opened.page, opened.context.new_page()
        for tab in (first, second):
            tab.goto(f"{server.url}/studies/{writer.job_id}")
            expect(tab.get_by_label("Connection")).to_have_text("live")
        first.close()
        progress = snapshot(run_record(num_trials=4)).to_json()
        writer.heartbeat(wall_clock_s=1.0, progress={**progress, "samples_scored": 9876})
        expect(figure(second, "samples scored")).to_contain_text("9,876")
