"""An open page shows changes without a reload, in any number of tabs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from playwright.sync_api import Browser, Locator, Page, Response

from service.store import JobWriter, schema
from service.types import EventKind, JobState, TrialRecord
from tests.service.api.harness import ApiServer, snapshot, stored_study, write_trial
from tests.service.synthetic_run import run_record
from tests.service.web.driving import expect, press, visit

# A browser opens six connections to a server: with one stream for each tab, the seventh would not load.
NUM_TABS = 7

# Studies in tabs of their own: four have streams, and with one for each of them the seventh would not load.
NUM_STUDIES, NUM_STREAMS = 7, 4


def begun(server: ApiServer, name: str = "live", trials: Sequence[TrialRecord] | None = None) -> JobWriter:
    """The writer of the driver of a running study that has `trials`, by default its baselines."""
    record = stored_study(server.store, name=name)
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    for trial in run_record(num_trials=40).whole_trials[:9] if trials is None else trials:
        write_trial(writer, trial)
    return writer


def figure(page: Page, term: str) -> Locator:
    return page.locator("dl.figures div").filter(has=page.get_by_text(term, exact=True)).locator("dd")


def test_tabs_follow_a_study(browser: Browser, server: ApiServer) -> None:
    """Seven tabs on one study show its progress, its trials and its end as they happen."""
    made = run_record(num_trials=40)
    with visit(browser, server.url) as opened:
        writer = begun(server)
        tabs = [opened.page, *(opened.context.new_page() for _ in range(NUM_TABS - 1))]
        for number, tab in enumerate(tabs):
            # Each tab begins at another event.
            writer.add_event(EventKind.SEARCH_NOTE, {"text": f"before tab {number}"})
            with tab.expect_response(f"**/v1/studies/{writer.job_id}"):
                tab.goto(f"{server.url}/studies/{writer.job_id}", wait_until="commit")
        for tab in tabs:
            expect(tab.get_by_label("Connection")).to_have_text("live")
            expect(figure(tab, "trials")).to_contain_text("9")
        writer.heartbeat(wall_clock_s=1.0, progress={**snapshot(made).to_json(), "samples_scored": 4321})
        for tab in tabs:
            expect(figure(tab, "samples scored")).to_contain_text("4,321")
        for trial in made.whole_trials[9:14]:
            write_trial(writer, trial)
        for tab in tabs:
            expect(figure(tab, "trials")).to_contain_text("14")
        writer.set_state(JobState.COMPLETE)
        for tab in tabs:
            expect(tab.get_by_label("Connection")).to_have_text("no more changes")
            expect(tab.locator("main .state").first).to_contain_text("complete")


def test_tabs_follow_many_studies(browser: Browser, server: ApiServer) -> None:
    """Tabs on seven running studies load and show progress: four have streams, the others ask again and again."""
    made = run_record(num_trials=40)
    with visit(browser, server.url, is_in_a_hurry=True) as opened:
        writers = [begun(server, f"study-{number}") for number in range(NUM_STUDIES)]
        tabs = [opened.page, *(opened.context.new_page() for _ in writers[1:])]
        paths = [f"{server.url}/studies/{writer.job_id}" for writer in writers]
        # The next one that gets a stream is the first that waits for one.
        for first, last, words in (
            (0, NUM_STREAMS, "live"),
            (NUM_STREAMS, NUM_STREAMS + 1, "updated every few seconds"),
            (NUM_STREAMS + 1, NUM_STUDIES, "updated every few seconds"),
        ):
            for tab, path in zip(tabs[first:last], paths[first:last], strict=True):
                tab.goto(path, wait_until="commit")
            for tab in tabs[first:last]:
                expect(tab.get_by_label("Connection")).to_have_text(words)
                expect(figure(tab, "trials")).to_contain_text("9")
        for writer in writers:
            writer.heartbeat(wall_clock_s=1.0, progress={**snapshot(made).to_json(), "samples_scored": 4321})
        for tab in tabs:
            expect(figure(tab, "samples scored")).to_contain_text("4,321")
        assert tabs[-1].evaluate("fetch('/v1/studies', {signal: AbortSignal.timeout(5000)}).then(a => a.status)") == 200
        tabs[0].close()
        expect(tabs[NUM_STREAMS].get_by_label("Connection")).to_have_text("live")


def test_a_polled_table_waits_for_the_reader(browser: Browser, server: ApiServer) -> None:
    """A table of a tab without a stream says that trials have changed, and shows them on demand."""
    made = run_record(num_trials=40)
    with visit(browser, server.url, is_in_a_hurry=True) as opened:
        tabs = []
        for number in range(NUM_STREAMS):
            tab = opened.context.new_page()
            tab.goto(f"{server.url}/studies/{begun(server, f'study-{number}').job_id}/file", wait_until="commit")
            tabs.append(tab)
        for tab in tabs:
            expect(tab.get_by_label("Connection")).to_have_text("live")
        writer = begun(server)
        page = opened.goto(f"/studies/{writer.job_id}/trials")
        expect(page.get_by_label("Connection")).to_have_text("updated every few seconds")
        expect(page.get_by_text("9 trials", exact=True)).to_be_visible()
        write_trial(writer, made.whole_trials[9])
        chip = page.get_by_role("button", name="Trials have changed: show")
        expect(chip).to_be_visible(timeout=45_000)
        expect(page.get_by_text("9 trials", exact=True)).to_be_visible()
        press(chip)
        expect(page.get_by_text("10 trials", exact=True)).to_be_visible()


def test_a_closed_tab_leaves_the_others_live(browser: Browser, server: ApiServer) -> None:
    """The stream that tabs share goes on when the tab that began it is closed."""
    with visit(browser, server.url) as opened:
        writer = begun(server)
        first, second = opened.page, opened.context.new_page()
        for tab in (first, second):
            tab.goto(f"{server.url}/studies/{writer.job_id}")
            expect(tab.get_by_label("Connection")).to_have_text("live")
        first.close()
        progress = snapshot(run_record(num_trials=4)).to_json()
        writer.heartbeat(wall_clock_s=1.0, progress={**progress, "samples_scored": 9876})
        expect(figure(second, "samples scored")).to_contain_text("9,876")


def test_a_table_waits_for_the_reader(browser: Browser, server: ApiServer) -> None:
    """Rows of a table do not move while they are read: a button says how many trials are new, and shows them."""
    made = run_record(num_trials=40)
    with visit(browser, server.url, is_in_a_hurry=True) as opened:
        writer = begun(server)
        page = opened.goto(f"/studies/{writer.job_id}/trials")
        expect(page.get_by_text("9 trials", exact=True)).to_be_visible()
        expect(page.get_by_label("Connection")).to_have_text("live")
        for trial in made.whole_trials[9:12]:
            write_trial(writer, trial)
        chip = page.get_by_role("button", name="3 new trials: show")
        expect(chip).to_be_visible()
        expect(page.get_by_text("9 trials", exact=True)).to_be_visible()
        press(chip)
        expect(page.get_by_text("12 trials", exact=True)).to_be_visible()
        expect(chip).to_have_count(0)


def expect_in_history(page: Page, made: Sequence[TrialRecord], num_trials: int) -> None:
    """Wait until the chart of the history has the first `num_trials` of the trials `made`."""
    scored = sum(bool(trial.rungs) for trial in made[:num_trials])
    words = re.compile(rf"of {scored} trials at full budget")
    chart = page.get_by_role("img", name=re.compile("of every trial"))
    expect(chart).to_have_attribute("aria-label", words)


def test_a_chart_waits_for_the_reader(browser: Browser, server: ApiServer) -> None:
    """A chart does not change under the pointer: a button on it says how many trials are new, and shows them.

    They are also shown once the pointer leaves the chart.
    """
    made = run_record(num_trials=40).whole_trials
    with visit(browser, server.url, is_in_a_hurry=True) as opened:
        writer = begun(server)
        page = opened.goto(f"/studies/{writer.job_id}")
        expect(page.get_by_label("Connection")).to_have_text("live")
        shows = partial(expect_in_history, page, made)
        shows(9)
        page.get_by_role("img", name=re.compile("of every trial")).hover()
        for trial in made[9:12]:
            assert trial.rungs
            write_trial(writer, trial)
        figure_of_it = page.get_by_role("figure", name=re.compile("of every trial"))
        expect(figure(page, "trials")).to_contain_text("12")
        chip = figure_of_it.get_by_role("button", name="3 new trials: show")
        expect(chip).to_be_visible()
        shows(9)
        chip.click()
        shows(12)
        write_trial(writer, made[12])
        expect(figure_of_it.get_by_role("button", name="1 new trial: show")).to_be_visible()
        shows(12)
        page.mouse.move(0, 0)
        shows(13)
        expect(figure_of_it.get_by_role("button")).to_have_count(0)


def test_only_changed_trials_are_loaded_again(browser: Browser, server: ApiServer) -> None:
    """A live study costs what has changed: all trials are loaded once, and again only after another driver began."""
    made = run_record(num_trials=240).whole_trials
    num_first, num_later = 200, 4
    with visit(browser, server.url, is_in_a_hurry=True) as opened:
        writer = begun(server, trials=made[:num_first])
        answers: list[Response] = []
        opened.page.on("response", lambda answer: answers.append(answer) if "/trials/columns?" in answer.url else None)
        page = opened.goto(f"/studies/{writer.job_id}")
        expect(page.get_by_label("Connection")).to_have_text("live")
        shows = partial(expect_in_history, page, made)
        shows(num_first)
        for number in range(num_first, num_first + num_later):
            write_trial(writer, made[number])
            shows(number + 1)
        first, *later = read(answers)
        assert first["is_whole"]
        assert len(first["columns"]["number"]) == num_first
        assert not any(answer["is_whole"] for answer in later)
        rows = [number for answer in later for number in answer["columns"]["number"]]
        assert set(rows) == set(range(num_first, num_first + num_later))
        # A trial is sent again if it was being stored when it was sent.
        assert len(rows) <= 3 * num_later
        assert ["since=" in answer.url for answer in answers] == [False, *(True for _ in answers[1:])]
        again = server.store.open_attempt(writer.job_id)
        write_trial(again, made[num_first + num_later])
        shows(num_first + num_later + 1)
        assert any(answer["is_whole"] for answer in read(answers)[len(later) + 1 :])


def read(answers: Sequence[Response]) -> list[Any]:
    """The documents of answers that have one: the browser has those of others already."""
    return [answer.json() for answer in answers if answer.status == 200]


def test_a_silent_driver_is_said(browser: Browser, server: ApiServer) -> None:
    """A running study whose driver has not been heard of for more than 30 s says for how long."""
    with visit(browser, server.url) as opened:
        writer = begun(server)
        writer.heartbeat(wall_clock_s=1.0)
        page = opened.goto(f"/studies/{writer.job_id}")
        expect(page.get_by_label("Connection")).to_have_text("live")
        expect(page.get_by_text("no sign of life")).to_have_count(0)
        with server.store.engine.begin() as connection:
            jobs = schema.studies
            late = sa.update(jobs).where(jobs.c.id == writer.job_id).values(heartbeat_at=jobs.c.heartbeat_at - 190)
            connection.execute(late)
        page.reload()
        said = page.get_by_role("status", name="Driver")
        expect(said).to_contain_text(re.compile(r"no sign of life for 3m1\ds"))


@pytest.mark.slow
def test_a_study_follows_a_server_that_returns(browser: Browser, tmp_path: Path, own_port: int) -> None:
    """An open study says that the server is away, and shows what it then did once the server is back."""
    made = run_record(num_trials=40)
    with ApiServer(tmp_path, port=own_port) as server, visit(browser, server.url) as opened:
        opened.expected = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE")
        writer = begun(server)
        page = opened.goto(f"/studies/{writer.job_id}")
        expect(page.get_by_label("Connection")).to_have_text("live")
        expect(figure(page, "trials")).to_contain_text("9")
        server.stop()
        expect(page.get_by_label("Connection")).to_have_text("reconnecting: what is shown may be old")
        expect(figure(page, "trials")).to_contain_text("9")
        server.start()
        again = server.store.open_attempt(writer.job_id)
        for trial in made.whole_trials[9:14]:
            write_trial(again, trial)
        expect(page.get_by_label("Connection")).to_have_text("live")
        expect(figure(page, "trials")).to_contain_text("14")
        expect(page.get_by_role("status", name="Server")).to_be_empty()
        expect(page.get_by_role("alert")).to_have_count(0)
        again.set_state(JobState.COMPLETE)
        expect(page.get_by_label("Connection")).to_have_text("no more changes")
