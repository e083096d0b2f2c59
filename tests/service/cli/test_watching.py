"""Watching a study on a server: output, end, and the effect of Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.results.load import run_record
from service.results.summary import summary
from service.store import JobWriter
from service.types import JobState, Origin, TrialRecord, TrialState
from tests.service.cli.terminals import ServerTerminal
from tests.service.http_server import HttpServer
from tests.service.site import PROGRESS, Site

pytestmark = pytest.mark.slow  # each starts an HTTP server


def work(site: Site, writer: JobWriter, *, end: Callable[[], object]) -> None:
    """Store the work of a driver in one second, then call `end`."""
    recipe = site.preflight.baselines()[0][2]
    writer.heartbeat(wall_clock_s=65.0, progress={**PROGRESS, "samples_scored": 100})
    writer.add_event("replica", {"replica": "gpu-box-71", "engine": "vllm 0.32", "trial": 0})
    writer.add_event("crash", {"trial": 0, "replica": "gpu-box-71", "reason": "CUDA error", "crashes": 1})
    writer.add_event("actors", {"running": 1, "wanted": 3, "reason": "1 of 3 trial actors run"})
    writer.add_trial(TrialRecord(40, Origin.SEARCH, "trial:40", TrialState.RUNNING, recipe))
    writer.finish_trials([40], TrialState.FAIL, "NaN in the logits")
    time.sleep(0.5)
    writer.heartbeat(wall_clock_s=66.0, progress={**PROGRESS, "samples_scored": 200})
    writer.add_event("search_ended", {"reason": "16 duplicates in a row"})
    writer.add_event("holdout_started", {"trials": [1, 2]})
    writer.add_event("holdout_failed", {"trial": 2, "reason": "too long"})
    end()


def watched(
    terminal: ServerTerminal, writer: JobWriter, end: Callable[[], object], *arguments: str
) -> tuple[int, str, str]:
    thread = threading.Thread(target=work, args=(terminal.site, writer), kwargs={"end": end})
    thread.start()
    found = terminal.run("watch", writer.job_id, "--server", terminal.site.url, *arguments)
    thread.join()
    return found


def test_watch_tells_what_matters_and_ends_with_the_results(site: Site, terminal: ServerTerminal) -> None:
    writer = site.begin(site.new_name())
    code, out, err = watched(terminal, writer, lambda: site.finish(writer))
    assert code == 0
    told = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in err.splitlines()]
    for line in (
        "attempt 1",
        "engine gpu-box-71 (vllm 0.32) scores for the study",
        "trial 0: its engine crashed: CUDA error",
        "1 of 3 trial actors run",
        "trial 40 failed: NaN in the logits",
        "the search has ended: 16 duplicates in a row",
        "held-out data: 2 trials",
        "trial 2 failed on held-out data: too long",
        "the study is COMPLETE",
    ):
        assert line in told
    (first, *_, last) = [line for line in told if "searching: " in line]
    assert "9/14 trials (1 failed), bracket 1/3 rung 12, best #7: sums 0.7, " in first
    assert "300/900 samples" in last
    assert out.index("Pareto front") < out.index("Held-out data") < out.index("report: ")
    assert out.splitlines()[-1].split() == ["report:", f"{site.url}/v1/studies/{writer.job_id}/report"]


def test_watch_as_json_is_the_stream_and_the_summary(site: Site, terminal: ServerTerminal) -> None:
    writer = site.begin(site.new_name())
    code, out, err = watched(terminal, writer, lambda: site.finish(writer), "--json")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    stored = site.store.events(writer.job_id)
    assert [line["id"] for line in lines if line["id"] is not None] == [event.id for event in stored]
    assert [line["kind"] for line in lines[-2:]] == ["end", "summary"]
    assert lines[-1]["payload"] == json.loads(json.dumps(summary(run_record(site.store, writer.job_id))))
    assert "progress" in {line["kind"] for line in lines}


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_watching_a_study_that_ends_without_a_result(site: Site, terminal: ServerTerminal, state: JobState) -> None:
    writer = site.begin(site.new_name())
    code, out, err = watched(terminal, writer, lambda: writer.set_state(state, "out of luck"))
    assert (code, out) == (1, "")
    name = site.store.job(writer.job_id).name
    assert err.splitlines()[-1] == f"study {name}: {state}: out of luck"
    code, out, _ = terminal.run("watch", name, "--server", site.url, "--json")
    assert code == 1
    assert json.loads(out.splitlines()[-1])["payload"]["state"] == state


def test_watch_goes_on_when_the_server_is_started_anew(site: Site, terminal: ServerTerminal) -> None:
    writer = site.begin(site.new_name())
    own = HttpServer(site.app)

    def restart() -> None:
        own.stop()
        time.sleep(0.3)
        own.start()
        site.finish(writer)

    with own:
        thread = threading.Thread(target=work, args=(site, writer), kwargs={"end": restart})
        thread.start()
        code, out, err = terminal.run("watch", writer.job_id, "--server", own.url)
        thread.join()
    assert code == 0
    assert err.count("trial 40 failed: NaN in the logits") == 1
    assert "Held-out data" in out


def test_submit_may_watch_at_once(site: Site, terminal: ServerTerminal) -> None:
    file = site.study_file(site.new_name())
    before = {study.id for study in site.store.jobs()}

    def drive(number: int) -> None:
        while len(new := [study for study in site.store.jobs() if study.id not in before]) < number:
            time.sleep(0.02)
        site.finish(site.store.open_attempt(new[-1].id))

    for number, arguments in enumerate(((), ("--json",)), 1):
        thread = threading.Thread(target=drive, args=(number,))
        thread.start()
        code, out, err = terminal.run("submit", file, "--watch", "--server", site.url, *arguments)
        thread.join()
        assert code == 0
        if arguments:
            lines = [json.loads(line) for line in out.splitlines()]
            assert (lines[0]["kind"], lines[0]["payload"]["state"]) == ("submitted", "CREATED")
            assert lines[-1]["payload"]["state"] == "COMPLETE"
        else:
            assert "Pareto front" in out
            assert ", CREATED" in err.splitlines()[0]


def test_ctrl_c_leaves_the_study_running_and_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.cluster, "reason", "Ray: Ray is being started")
    writer = site.begin(site.new_name())
    writer.add_event("search_ended", {"reason": "for the test to see"})
    name = site.store.job(writer.job_id).name
    command = [sys.executable, "-m", "service.cli.main", "watch", name, "--server", site.url]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As in a terminal: what runs the tests may itself run in the background, where Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    told = ""
    while "for the test to see" not in told:
        line = process.stderr.readline()
        assert line, told
        told += line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert f"study {name} continues on the server; `mergesearch watch {writer.job_id[:8]}` shows it again" in err
    assert "waits for Ray: Ray is being started" in told
    assert "Traceback" not in err
    assert site.store.job(writer.job_id).state is JobState.RUNNING
    writer.add_event("note", {})  # nobody has taken it over
