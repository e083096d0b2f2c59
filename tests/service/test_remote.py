"""The verbs that talk to a server, as people and programs meet them."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from service.cli import main
from service.remote import DEFAULT_SERVER, SERVER_VARIABLE
from service.results import pareto, summary, trial_document
from service.run_record import run_record
from service.store import StudyWriter
from service.types import Origin, StudyState, TrialRecord, TrialState
from tests.service.http_server import PROGRESS, HttpServer, Site


@dataclass
class Terminal:
    site: Site
    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: Any) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of one command."""
        self.capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    def shown(self, *arguments: Any) -> str:
        """What a command prints that has nothing to complain about."""
        code, out, err = self.run(*arguments, "--server", self.site.url)
        assert (code, err) == (0, "")
        return out

    def document(self, *arguments: Any) -> Any:
        return json.loads(self.shown(*arguments, "--json"))

    def refused(self, *arguments: Any, code: int = 2) -> str:
        """What a refused command says; the same as JSON for programs."""
        found, out, err = self.run(*arguments, "--server", self.site.url)
        assert (found, out) == (code, ""), err
        told = "\n".join(line.removeprefix("mergesearch: ") for line in err.splitlines())
        assert err.count("mergesearch: ") == len(err.splitlines())
        found, out, err = self.run(*arguments, "--server", self.site.url, "--json")
        assert (found, out) == (code, "")
        problems = json.loads(err)["problems"]
        assert "\n".join(f"{p['field']}: {p['message']}" if p["field"] else p["message"] for p in problems) == told
        return told


@pytest.fixture
def terminal(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    monkeypatch.chdir(site.directory)
    return Terminal(site, capsys)


names = (f"remote-{number}" for number in itertools.count())


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


# Submitting.


def test_submit_says_what_it_made_and_how_to_watch_it(site: Site, terminal: Terminal) -> None:
    name = next(names)
    out = terminal.shown("submit", site.study_file(name))
    (study,) = [study for study in site.store.studies() if study.name == name]
    assert out == (f"study {name}: {study.id}, CREATED\n`mergesearch watch {study.id[:8]}` shows how it goes on\n")
    assert terminal.document("submit", site.study_file(name))["name"] == name


def test_submit_with_a_key_makes_one_study(site: Site, terminal: Terminal) -> None:
    name = next(names)
    file = site.study_file(name)
    first = terminal.document("submit", file, "--name-key", name)
    assert terminal.document("submit", file, "--name-key", name)["id"] == first["id"]
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    assert f"Idempotency-Key '{name}' was sent before with another body" in terminal.refused(
        "submit", file, "--name-key", name
    )
    assert "visible ASCII" in terminal.refused("submit", file, "--name-key", "ü")


def test_what_is_wrong_with_a_study_is_told_as_run_tells_it(site: Site, terminal: Terminal, tmp_path: Path) -> None:
    file = site.study_file(next(names))
    document = json.loads(file.read_text())
    documents: list[dict[str, Any]] = [
        {**document, "search": {"max_trial": 3}, "engine": {"replicas": 0}},
        {**document, "models": {**document["models"], "base": str(tmp_path / "nowhere")}},
        {**document, "fidelity": {"scheduler": "none", "max_samples": 4000}},
    ]
    for broken in documents:
        file.write_text(json.dumps(broken))
        code, _, err = terminal.run("run", file, "--out", tmp_path / "run", "--check")
        assert code == 2
        assert terminal.refused("submit", file) == err.replace("mergesearch: ", "").rstrip("\n")
    assert "no.yaml" in terminal.refused("submit", tmp_path / "no.yaml")


# Looking at studies.


def test_studies_are_listed(site: Site, finished: str, terminal: Terminal) -> None:
    created = site.create(next(names))
    out = terminal.shown("studies")
    (line,) = [words(line) for line in out.splitlines() if finished[:8] in line]
    assert line.startswith(f"{finished[:8]} finished complete 9/14 12m34s 20")
    assert line.endswith("sums 0.7")
    (line,) = [words(line) for line in out.splitlines() if created[:8] in line]
    assert " created 0 0s 20" in line
    listed = terminal.document("studies")
    assert [study["id"] for study in listed] == [study.id for study in site.store.studies()]


def test_a_server_without_studies_says_so(terminal: Terminal, tmp_path: Path) -> None:
    from service.api import create_app
    from service.store import Store
    from tests.service.http_server import Examiner, IdleCluster

    store = Store(f"sqlite:///{tmp_path / 'empty.db'}")

    def app() -> Any:
        return create_app(store, cluster=IdleCluster(), data_dir=tmp_path, examiner=Examiner())

    with HttpServer(app) as server:
        code, out, _ = terminal.run("studies", "--server", server.url)
        assert (code, out.splitlines()[0].strip()) == (0, "Studies")
        assert terminal.run("studies", "--server", server.url, "--json")[1] == "[]\n"
        code, _, err = terminal.run("show", "abc", "--server", server.url)
    assert (code, err) == (2, "mergesearch: study 'abc': the server has no study of that id or name; it has 0\n")
    store.close()


def test_show_tells_all_of_a_study(site: Site, finished: str, terminal: Terminal) -> None:
    out = words(terminal.shown("show", finished))
    for told in (
        "study finished",
        f"id {finished}",
        "state complete",
        "worked 12m34s, by 1 driver",
        "trials 9 of 14 8 complete 1 fail",
        "samples 300 of 900",
        "best so far trial 7: sums 0.7",
        "Ray job finished-1",
        "dashboard http://dashboard/#/jobs/finished-1",
        f"report {site.url}/v1/studies/{finished}/report",
        f"log {site.url}/v1/studies/{finished}/log",
    ):
        assert told in out
    assert terminal.document("show", finished)["id"] == finished


def test_show_of_a_study_that_has_failed_says_why(site: Site, terminal: Terminal) -> None:
    writer = site.begin(next(names))
    writer.set_state(StudyState.FAILED, "no trial was scored at the full budget")
    out = words(terminal.shown("show", writer.study_id))
    assert "state failed: no trial was scored at the full budget" in out
    assert "samples" not in out


def test_a_study_is_meant_by_the_beginning_of_its_id_or_its_name(site: Site, terminal: Terminal) -> None:
    name = next(names)
    first = site.create(name)
    assert terminal.document("show", name)["id"] == first
    assert terminal.document("show", first[:10])["id"] == first
    second = site.create(name)
    message = terminal.refused("show", name)
    assert message.startswith(f"study {name!r}: 2 studies are meant, give more of an id: ")
    assert first in message
    assert second in message
    for verb in (["watch"], ["cancel"], ["log"], ["trials"], ["pareto"]):
        assert terminal.refused(*verb, name) == message
        assert terminal.refused(*verb, "nobody").startswith(
            "study 'nobody': the server has no study of that id or name"
        )


# Results.


def test_trials_and_front_are_shown_as_those_of_a_run(site: Site, finished: str, terminal: Terminal) -> None:
    record = run_record(site.store, finished)
    assert terminal.document("trials", "finished") == json.loads(
        json.dumps([trial_document(trial) for trial in record.trials])
    )
    assert terminal.document("pareto", "finished") == json.loads(json.dumps(pareto(record)))
    lines = [words(line) for line in terminal.shown("trials", finished).splitlines()]
    assert "trial label state samples sums" in lines
    assert "2 expert:text complete 36 0.2" in lines
    assert "8 trial:8 fail: NaN logits 0" in lines
    assert "7 TIES k 0.2 lambda 1.0 0.7 ±0.01" in [
        words(line) for line in terminal.shown("pareto", finished).splitlines()
    ]


def test_reasons_are_shown_as_they_are(site: Site, terminal: Terminal) -> None:
    writer, reason = site.begin(next(names)), "[/tmp/x] is [red]broken"
    trial = TrialRecord(0, Origin.SEARCH, "trial:0", TrialState.WAITING, site.examination.extras()[0][2])
    writer.add_trial(trial)
    writer.finish_trials([0], TrialState.FAIL, reason)
    writer.set_state(StudyState.FAILED, reason)
    assert f"fail: {reason}" in terminal.shown("trials", writer.study_id)
    assert f"failed: {reason}" in terminal.shown("show", writer.study_id)
    code, _, err = terminal.run("watch", writer.study_id, "--server", site.url)
    assert code == 1
    assert f"trial 0 failed: {reason}" in err


def test_a_study_that_has_not_begun_has_no_trials_and_no_front(site: Site, terminal: Terminal) -> None:
    study = site.create(next(names))
    assert terminal.document("trials", study) == []
    assert terminal.document("pareto", study)["front"] == []
    assert "Trials" in terminal.shown("trials", study)


def test_the_log_is_printed(site: Site, finished: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal.shown("log", "finished") == "==> finished-1 <==\nscored ü\n"
    assert terminal.document("log", finished) == {"log": "==> finished-1 <==\nscored ü\n"}
    monkeypatch.setattr(site.cluster, "away", "Ray is being started")
    assert terminal.refused("log", finished, code=1) == "Ray is being started"


def test_export_fetches_the_model(site: Site, finished: str, terminal: Terminal, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    assert terminal.shown("export", "finished", "1", "--out", out) == f"merged model: {out}\n"
    merged, expert = load_file(out / "model.safetensors"), load_file(site.models / "math" / "model.safetensors")
    assert all(torch.equal(merged[name], expert[name]) for name in expert)
    assert terminal.refused("export", "finished", "1", "--out", out) == (
        f"{out}: exists already; give a directory that does not"
    )
    other = tmp_path / "other"
    assert terminal.document("export", finished, "1", "--out", other) == {"directory": str(other)}


def test_what_cannot_be_exported_is_refused(site: Site, terminal: Terminal, finished: str, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    for trial in ("99", "bset", "1.5", "٣٣"):
        assert "is not accepted; give" in terminal.refused("export", finished, trial, "--out", out)
    running = site.begin(next(names)).study_id
    assert "models are exported once it is COMPLETE" in terminal.refused("export", running, "best", "--out", out)
    assert list(tmp_path.iterdir()) == []


def test_cancel_ends_a_study(site: Site, finished: str, terminal: Terminal) -> None:
    name = next(names)
    study = site.create(name)
    assert terminal.shown("cancel", name) == f"study {name}: {study}, CANCELLED\n"
    assert terminal.document("cancel", study)["state"] == "CANCELLED"
    assert site.store.study(study).state is StudyState.CANCELLED
    assert "COMPLETE already" in terminal.refused("cancel", finished)


# Watching.


def work(site: Site, writer: StudyWriter, *, end: Callable[[], object]) -> None:
    """What a driver writes in a second."""
    recipe = site.examination.extras()[0][2]
    writer.heartbeat(wall_clock_s=65.0, progress={**PROGRESS, "samples_scored": 100})
    writer.add_event("replica", {"replica": "gpu-box-71", "engine": "vllm 0.32", "trial": 0})
    writer.add_trial(TrialRecord(40, Origin.SEARCH, "trial:40", TrialState.RUNNING, recipe))
    writer.finish_trials([40], TrialState.FAIL, "NaN in the logits")
    time.sleep(0.5)
    writer.heartbeat(wall_clock_s=66.0, progress={**PROGRESS, "samples_scored": 200})
    writer.add_event("search_ended", {"reason": "16 duplicates in a row"})
    writer.add_event("holdout_started", {"trials": [1, 2]})
    writer.add_event("holdout_failed", {"trial": 2, "reason": "too long"})
    end()


def watched(
    terminal: Terminal, writer: StudyWriter, end: Callable[[], object], *arguments: str
) -> tuple[int, str, str]:
    thread = threading.Thread(target=work, args=(terminal.site, writer), kwargs={"end": end})
    thread.start()
    found = terminal.run("watch", writer.study_id, "--server", terminal.site.url, *arguments)
    thread.join()
    return found


def test_watch_tells_what_matters_and_ends_with_the_results(site: Site, terminal: Terminal) -> None:
    writer = site.begin(next(names))
    code, out, err = watched(terminal, writer, lambda: site.finish(writer))
    assert code == 0
    told = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in err.splitlines()]
    for line in (
        "attempt 1",
        "engine gpu-box-71 (vllm 0.32) scores for the study",
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
    assert out.splitlines()[-1].split() == ["report:", f"{site.url}/v1/studies/{writer.study_id}/report"]


def test_watch_as_json_is_the_stream_and_the_summary(site: Site, terminal: Terminal) -> None:
    writer = site.begin(next(names))
    code, out, err = watched(terminal, writer, lambda: site.finish(writer), "--json")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    stored = site.store.events(writer.study_id)
    assert [line["id"] for line in lines if line["id"] is not None] == [event.id for event in stored]
    assert [line["kind"] for line in lines[-2:]] == ["end", "summary"]
    assert lines[-1]["payload"] == json.loads(json.dumps(summary(run_record(site.store, writer.study_id))))
    assert "progress" in {line["kind"] for line in lines}


@pytest.mark.parametrize("state", [StudyState.FAILED, StudyState.CANCELLED])
def test_watching_a_study_that_ends_without_a_result(site: Site, terminal: Terminal, state: StudyState) -> None:
    writer = site.begin(next(names))
    code, out, err = watched(terminal, writer, lambda: writer.set_state(state, "out of luck"))
    assert (code, out) == (1, "")
    name = site.store.study(writer.study_id).name
    assert err.splitlines()[-1] == f"study {name}: {state}: out of luck"
    code, out, _ = terminal.run("watch", name, "--server", site.url, "--json")
    assert code == 1
    assert json.loads(out.splitlines()[-1])["payload"]["state"] == state


def test_watch_goes_on_when_the_server_is_started_anew(site: Site, terminal: Terminal) -> None:
    writer = site.begin(next(names))
    own = HttpServer(site._app)

    def restart() -> None:
        own.stop()
        time.sleep(0.3)
        own.start()
        site.finish(writer)

    with own:
        thread = threading.Thread(target=work, args=(site, writer), kwargs={"end": restart})
        thread.start()
        code, out, err = terminal.run("watch", writer.study_id, "--server", own.url)
        thread.join()
    assert code == 0
    assert err.count("trial 40 failed: NaN in the logits") == 1
    assert "Held-out data" in out


def test_submit_may_watch_at_once(site: Site, terminal: Terminal) -> None:
    file = site.study_file(next(names))
    before = {study.id for study in site.store.studies()}

    def drive(number: int) -> None:
        while len(new := [study for study in site.store.studies() if study.id not in before]) < number:
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
    monkeypatch.setattr(site.cluster, "away", "Ray: Ray is being started")
    writer = site.begin(next(names))
    writer.add_event("search_ended", {"reason": "for the test to see"})
    name = site.store.study(writer.study_id).name
    command = [sys.executable, "-m", "service.cli", "watch", name, "--server", site.url]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
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
    assert (
        f"study {name} goes on without being watched; `mergesearch watch {writer.study_id[:8]}` shows it again" in err
    )
    assert "waits for Ray: Ray is being started" in told
    assert "Traceback" not in err
    assert site.store.study(writer.study_id).state is StudyState.RUNNING
    writer.add_event("note", {})  # nobody has taken it over


# Which server, which directory.


def test_the_server_is_that_of_the_option_then_of_the_environment(
    site: Site, finished: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVER_VARIABLE, site.url)
    assert terminal.run("show", finished)[0] == 0
    monkeypatch.setenv(SERVER_VARIABLE, "http://127.0.0.1:1")
    assert terminal.run("show", finished, "--server", site.url)[0] == 0
    code, out, err = terminal.run("show", finished)
    assert (code, out) == (1, "")
    assert err.startswith("mergesearch: http://127.0.0.1:1: no answer: ")
    assert "default" not in err
    assert terminal.run("studies", "--server", "ftp://x")[::2] == (
        2,
        "mergesearch: server 'ftp://x': is no address; write http://HOST:PORT\n",
    )


def test_without_either_the_default_is_tried_and_the_message_says_so(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEFAULT_SERVER == "http://127.0.0.1:8080"
    monkeypatch.setattr("service.remote.DEFAULT_SERVER", "http://127.0.0.1:1")
    hint = (
        "; that is the default address: give --server URL or set MERGESEARCH_SERVER, "
        "or start a server with `mergesearch serve`"
    )
    code, out, err = terminal.run("studies")
    assert (code, out) == (1, "")
    assert err.startswith("mergesearch: http://127.0.0.1:1: no answer: ")
    assert err.endswith(f"{hint}\n")
    for verb in (["trials"], ["pareto"], ["export", "best", "--out", "x"]):
        name, *rest = verb
        code, _, err = terminal.run(name, "my-run", *rest)
        assert code == 1
        assert err.endswith(f"{hint}; there is no directory 'my-run' either\n")
    code, _, err = terminal.run("trials", "my-run", "--json")
    assert (code, json.loads(err)["error"]) == (1, "ServerUnreachable")


def test_a_directory_is_meant_where_there_is_one_unless_a_server_is_named(
    site: Site, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    name = next(names)
    study = site.create(name)
    (tmp_path / name).mkdir()
    monkeypatch.setenv(SERVER_VARIABLE, site.url)
    assert "no run here (no study.db)" in terminal.run("trials", name)[2]
    assert "no run here (no study.db)" in terminal.run("trials", f"./{study}")[2]
    assert terminal.run("trials", study, "--json")[:2] == (0, "[]\n")
    assert terminal.run("trials", name, "--json", "--server", site.url)[:2] == (0, "[]\n")


@pytest.mark.parametrize("verb", ["submit", "studies", "show", "watch", "trials", "pareto", "export", "cancel", "log"])
def test_every_verb_has_its_help(terminal: Terminal, verb: str) -> None:
    code, out, _ = terminal.run(verb, "--help")
    assert code == 0
    assert "--server URL" in out
    assert "--json" in out
