"""Live progress: plain lines, JSON lines, and a panel on a terminal."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from service.cli.progress import ProgressStyle, ProgressView
from service.jobs.search.progress import ProgressSnapshot
from service.results.format import duration
from service.types import TrialState


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


SNAPSHOT = ProgressSnapshot(
    study="math-text",
    stage="searching",
    trials={TrialState.COMPLETE: 9, TrialState.PRUNED: 20, TrialState.RUNNING: 2, TrialState.FAIL: 2},
    max_trials=67,
    bracket=1,
    num_brackets=3,
    rung=1,
    rungs=(30, 90, 270),
    best_trial=12,
    best={"math": 0.61, "text": 0.7},
    samples_scored=1000,
    samples_planned=4000,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines(clock: Clock, style: ProgressStyle = ProgressStyle.LINES) -> tuple[ProgressView, io.StringIO]:
    stream = io.StringIO()
    return ProgressView(style, stream=stream, interval_s=10, clock=clock), stream


def test_a_line_appears_every_interval_and_not_more_often(clock: Clock) -> None:
    view, stream = lines(clock)
    for _ in range(100):
        view.update(SNAPSHOT)
        clock.now += 0.35
    assert len(stream.getvalue().splitlines()) == 4


def test_limit_of_samples_is_shown() -> None:
    """A panel shows the samples used if they have a limit; JSON has both always."""
    limited = replace(SNAPSHOT, samples_used=1500, max_samples=5000)
    shown = {}
    for name, snapshot in (("limited", limited), ("plain", SNAPSHOT)):
        for style in (ProgressStyle.PANEL, ProgressStyle.JSON):
            stream = Terminal()
            with ProgressView(style, stream=stream) as view:
                view.update(snapshot)
            shown[name, style] = stream.getvalue()
    assert "1,500 of 5,000 used" in shown["limited", ProgressStyle.PANEL]
    assert "sample limit" not in shown["plain", ProgressStyle.PANEL]
    found = json.loads(shown["limited", ProgressStyle.JSON].splitlines()[0])
    assert (found["samples_used"], found["max_samples"]) == (1500, 5000)


def test_line_says_where_the_search_stands(clock: Clock) -> None:
    view, stream = lines(clock)
    view.update(SNAPSHOT)
    clock.now += 10
    view.update(replace(SNAPSHOT, samples_scored=1500))
    assert stream.getvalue().splitlines()[1] == (
        "[10s] searching: 31/67 trials (2 failed), bracket 2/3 rung 90, best #12: math 0.61 text 0.7, "
        "1500/4000 samples, 50/s, 50s left"
    )


def test_steps_are_shown_while_no_sample_is_scored(clock: Clock) -> None:
    """While a searcher makes gradient steps, their number and speed are shown, and the time left has both kinds."""
    view, stream = lines(clock)
    planned = replace(SNAPSHOT, samples_planned=2000, steps_planned=48)
    view.update(planned)
    clock.now += 10
    view.update(replace(planned, samples_scored=1500))  # 50 samples a second
    for step in range(1, 101):  # the descent: a step each 4 s, and no samples for long
        clock.now += 4
        view.update(replace(planned, samples_scored=1500, steps=min(step, 40)))
        if step == 40:
            during = stream.getvalue().splitlines()[-1]
    # 9 steps of 4 s, and 500 samples at 50 a second.
    assert during.endswith("39/48 steps, 1500/2000 samples, 0.25 steps/s, 46s left")
    after = stream.getvalue().splitlines()[-1]
    assert " steps/s" not in after
    json_view, json_stream = lines(clock, ProgressStyle.JSON)
    json_view.update(replace(planned, steps=40))
    shown = json.loads(json_stream.getvalue())
    assert (shown["steps"], shown["steps_planned"], shown["steps_per_second"]) == (40, 48, None)
    terminal = Terminal()
    with ProgressView(stream=terminal) as panel:
        panel.update(replace(planned, steps=40))
    assert "40 of 48" in terminal.getvalue()


def test_steps_of_the_search_are_none_in_the_held_out_stage(clock: Clock) -> None:
    view, stream = lines(clock)
    held_out = replace(SNAPSHOT, stage="held-out", steps=40, steps_planned=48)
    view.update(held_out)
    clock.now += 10
    view.update(replace(held_out, samples_scored=2000))
    assert stream.getvalue().splitlines()[-1].endswith("100/s, 20s left")


def test_new_stage_is_shown_at_once_and_measured_afresh(clock: Clock) -> None:
    view, stream = lines(clock)
    view.update(replace(SNAPSHOT, stage="starting engines", samples_scored=0))
    clock.now += 3
    view.update(SNAPSHOT)
    shown = stream.getvalue().splitlines()
    assert [line.split("] ")[1].split(":")[0] for line in shown] == ["starting engines", "searching"]
    assert "/s" not in shown[1]  # the 1000 samples of an earlier attempt came in no time


def test_rate_forgets_what_is_older_than_its_window(clock: Clock) -> None:
    view, stream = lines(clock)
    for second in range(200):
        scored = 1000 * min(second, 100) + 10 * max(0, second - 100)
        view.update(replace(SNAPSHOT, samples_scored=scored, samples_planned=200_000))
        clock.now += 1
    assert " 10/s" in stream.getvalue().splitlines()[-1]


def test_last_snapshot_is_shown_when_the_view_closes(clock: Clock) -> None:
    view, stream = lines(clock)
    with view:
        view.update(SNAPSHOT)
        view.update(replace(SNAPSHOT, samples_scored=4000))
    view.close()
    assert [line.rsplit(" ", 2)[1] for line in stream.getvalue().splitlines()] == ["1000/4000", "4000/4000"]


def test_json_lines_hold_the_snapshot_and_notes(clock: Clock) -> None:
    view, stream = lines(clock, ProgressStyle.JSON)
    view.update(SNAPSHOT)
    view.note("trial 7 failed: NaN")
    first, note = map(json.loads, stream.getvalue().splitlines())
    assert first["event"] == "progress"
    assert first["trials"] == {"COMPLETE": 9, "PRUNED": 20, "RUNNING": 2, "FAIL": 2}
    assert (first["rung"], first["best"], first["time_left_s"]) == (1, {"math": 0.61, "text": 0.7}, None)
    assert note == {"event": "note", "elapsed_s": 0.0, "text": "trial 7 failed: NaN"}


def test_style_follows_the_stream() -> None:
    assert ProgressView(stream=io.StringIO()).style is ProgressStyle.LINES
    assert ProgressView(stream=Terminal()).style is ProgressStyle.PANEL


def test_panel_shows_states_rungs_best_and_notes() -> None:
    stream = Terminal()
    with ProgressView(stream=stream) as view:
        for _ in range(200):  # notes and redraws from two threads
            view.update(SNAPSHOT)
            view.note("trial 7 failed: NaN [logits]")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for part in ("math-text", "31/67", "20 pruned", "2 of 3", "30 → 90 → 270", "best #12", "0.61", "1,000 of 4,000"):
        assert part in text
    assert text.count("trial 7 failed: NaN [logits]") == 200


def test_a_search_without_brackets_shows_its_rungs_only(clock: Clock) -> None:
    anywhere = replace(SNAPSHOT, bracket=None, num_brackets=None, rung=None)
    view, stream = lines(clock)
    view.update(anywhere)
    assert "(2 failed), best #12" in stream.getvalue()
    drawn = io.StringIO()
    panel = Console(file=drawn, width=96)
    shown = ProgressView(stream=Terminal())
    shown.update(anywhere)
    panel.print(shown)
    assert re.search(r"rungs +30 → 90 → 270 ", drawn.getvalue())
    assert "bracket" not in drawn.getvalue()


def test_panel_fits_a_narrow_terminal() -> None:
    view = ProgressView(stream=Terminal())
    view.update(SNAPSHOT)
    drawn = io.StringIO()
    Console(file=drawn, width=40).print(view)
    assert max(map(len, drawn.getvalue().splitlines())) == 40


def test_update_is_cheap() -> None:
    view = ProgressView(ProgressStyle.LINES, stream=io.StringIO())
    started = time.perf_counter()
    for _ in range(10_000):
        view.update(SNAPSHOT)
    assert (time.perf_counter() - started) / 10_000 < 200e-6


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (250, "4m10s"), (7500, "2h05m")])
def test_duration_reads_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_snapshot_survives_json_and_keys_of_later_versions() -> None:
    document = json.loads(json.dumps(SNAPSHOT.to_json()))
    assert ProgressSnapshot.from_json({**document, "mood": "good"}) == SNAPSHOT


def test_time_worked_before_counts_as_elapsed(clock: Clock) -> None:
    stream = io.StringIO()
    ProgressView(ProgressStyle.LINES, stream=stream, worked_s=3600, clock=clock).update(SNAPSHOT)
    assert stream.getvalue().startswith("[1h00m] searching: ")
