"""The chat with a served study: real answers over HTTP, with the fake scorer as engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page

from service.types import JobRecord, JobState
from tests.service.api.harness import ApiServer
from tests.service.api.test_served import wait_until_free
from tests.service.jobs.serving.local import Served, served
from tests.service.web.driving import Visit, check_view, expect, press

SAID = "how many are two and three"


@pytest.fixture
def chat(server: ApiServer, study: JobRecord) -> Iterator[Served]:
    """The study, served by a driver of its own; serving ends with the test."""
    with served(server.store, study, sample_delay_s=0.02) as chat:
        yield chat
    if not server.store.job(chat.job.id).state.is_finished:
        server.store.open_attempt(chat.job.id).set_state(JobState.CANCELLED)


def digest(server: ApiServer, chat: Served, trial: int) -> str:
    """The word at the beginning of the fake engine's answers for a trial."""
    return server.store.trial(chat.job.document["study"], trial).recipe.digest[:8]


def opened(visitor: Visit, chat: Served, query: str = "") -> Page:
    page = visitor.goto(f"/served/{chat.job.id}{query}")
    expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    return page


def say(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("textbox", name="Message").press("Enter")


def test_the_study_leads_to_the_chat(visitor: Visit, study: JobRecord, server: ApiServer, chat: Served) -> None:
    """A study that is served has a link to the chat, which begins with its best trial; afterwards there is none."""
    page = visitor.goto(f"/studies/{study.id}")
    page.get_by_role("link", name="Chat").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(chat.job.name)
    best = httpx.get(f"{server.url}/v1/studies/{study.id}/summary", timeout=60).json()["best"]["trial"]
    expect(page.get_by_role("heading", level=2)).to_contain_text(f"Trial {best}")
    server.store.open_attempt(chat.job.id).set_state(JobState.CANCELLED)
    visitor.goto(f"/studies/{study.id}")
    expect(page.get_by_role("link", name="Benchmarks")).to_be_visible()
    expect(page.get_by_role("link", name="Chat")).to_have_count(0)


def test_two_trials_answer_side_by_side(visitor: Visit, server: ApiServer, chat: Served) -> None:
    """The answers are those of both trials' merges; a second question has the first and its answer before it."""
    page = opened(visitor, chat, "?trials=0,3")
    for number in (0, 3):
        expect(page.get_by_role("log", name=f"Chat with Trial {number}")).to_contain_text("Nothing was said yet.")
    say(page, SAID)
    for number in (0, 3):
        log = page.get_by_role("log", name=f"Chat with Trial {number}")
        expect(log).to_contain_text(f"{digest(server, chat, number)} {SAID}")
    page.get_by_role("textbox", name="Message").fill("and four")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("log", name="Chat with Trial 3")).to_contain_text(f"{digest(server, chat, 3)} and four")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    asked = [request.messages for request in chat.completer.requests]
    assert all(messages is not None for messages in asked)
    assert sorted(len(messages or ()) for messages in asked) == [1, 1, 3, 3]
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("log", name="Chat with Trial 3")).to_contain_text("Nothing was said yet.")


def test_trials_are_chosen_by_number_or_label(visitor: Visit, server: ApiServer, chat: Served) -> None:
    """A trial of the list is chosen by a click, a baseline by its label; both are in the address."""
    page = opened(visitor, chat, "?trials=3")
    first = page.get_by_role("combobox", name="Trial")
    first.fill("expert:math")
    page.get_by_role("option", name="1 expert:math").click()
    expect(page.get_by_role("heading", level=2)).to_contain_text("Trial 1 expert:math")
    page.get_by_role("combobox", name="Beside it").fill("base")
    page.get_by_role("combobox", name="Beside it").press("Enter")
    expect(page.get_by_role("log")).to_have_count(2)
    assert page.url.endswith("?trials=1%2Cbase")
    say(page, SAID)
    expect(page.get_by_role("log", name="Chat with base")).to_contain_text(f"{digest(server, chat, 0)} {SAID}")


def test_options_are_sent(visitor: Visit, server: ApiServer, chat: Served) -> None:
    """Temperature and the number of tokens are those of the fields."""
    page = opened(visitor, chat, "?trials=3")
    page.get_by_role("spinbutton", name="Temperature").fill("0.5")
    page.get_by_role("spinbutton", name="Tokens at most").fill("3")
    say(page, SAID)
    answer = page.get_by_role("log").get_by_text(f"Trial 3: {digest(server, chat, 3)} how many", exact=True)
    expect(answer).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    (request,) = chat.completer.requests
    assert (request.temperature, request.max_tokens) == (0.5, 3)


def test_an_answer_is_streamed_and_stopped(visitor: Visit, server: ApiServer, chat: Served) -> None:
    """Words appear while the answer is generated; Stop ends it in the engine, and keeps what was said."""
    page = opened(visitor, chat, "?trials=3")
    say(page, "four " * 400)
    log = page.get_by_role("log")
    expect(log).to_contain_text(digest(server, chat, 3))
    expect(log).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(log).to_have_attribute("aria-busy", "false")
    answer = log.get_by_text(re.compile(f"^Trial 3: {digest(server, chat, 3)}"))
    assert answer.inner_text().count("four") < 400
    assert wait_until_free(chat)


def test_errors_are_the_servers(visitor: Visit, chat: Served) -> None:
    """A trial that does not exist, and an engine that is away, are explained in the server's words in the log."""
    visitor.expected = ("404", "503")
    page = opened(visitor, chat, "?trials=4711")
    say(page, SAID)
    expect(page.get_by_role("log")).to_contain_text("4711")
    opened(visitor, chat, "?trials=3")
    chat.gate.close("a free GPU: 4 are in use")
    say(page, SAID)
    expect(page.get_by_role("log")).to_contain_text("waiting for a free GPU: 4 are in use")


def test_progress_and_the_end_are_told(visitor: Visit, chat: Served, http: httpx.Client) -> None:
    """The page says which engine answers and when serving ends; cancelling asks first, and ends the chat."""
    page = opened(visitor, chat, "?trials=3")
    expect(page.get_by_label("Connection")).to_have_text("live")
    chat.writer.heartbeat(wall_clock_s=30, progress={"engine": "own", "requests": 12, "ends_in_s": 1700.0})
    expect(page.get_by_text("An engine of its own answers. 12 requests so far.")).to_contain_text("28m20s")
    page.get_by_role("button", name="Cancel").click()
    press(page.get_by_role("dialog").get_by_role("button", name="Cancel"))
    expect(page.get_by_text("Serving has ended.")).to_be_visible()
    expect(page.get_by_role("textbox", name="Message")).to_have_count(0)
    assert http.get(f"/v1/served/{chat.job.id}").json()["state"] == "CANCELLED"


def test_what_is_waited_for_is_told(hurried: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Before there is a driver, the page says that it waits for one, and asks again by itself."""
    made = http.post(f"/v1/studies/{study.id}/trials/3:serve").json()
    hurried.expected = ("503",)
    page = hurried.goto(f"/served/{made['id']}?trials={made['model']}")
    expect(page.get_by_role("alert")).to_contain_text("waits for its driver")
    http.post(f"/v1/served/{made['id']}:cancel")
    expect(page.get_by_text("Serving has ended.")).to_be_visible()


def test_the_chat_is_accessible(browser: Browser, server: ApiServer, chat: Served) -> None:
    """The chat with two trials violates no rule of axe."""
    check_view(browser, server.url, f"/served/{chat.job.id}?trials=0,3")
