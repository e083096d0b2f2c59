"""Commands that use a server, called by people and by programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from service.cli.remote import DEFAULT_SERVER, SERVER_VARIABLE
from service.client import requests
from service.cluster.queue import Choice, Reason, Waiting
from service.cluster.reconciler import QueueState
from service.results.documents import pareto, trial_document
from service.results.load import run_record
from service.store.exports import ExportStore
from service.store.schema import REVISION
from service.store.steering import SteeringStore
from service.types import JobState, Origin, TrialRecord, TrialState
from tests.service.api.harness import ApiServer
from tests.service.api.ray_dashboard.upstream import upstream
from tests.service.api.test_cluster import node
from tests.service.cli.terminals import ServerTerminal
from tests.service.site import PROGRESS, Site

pytestmark = pytest.mark.slow  # each starts an HTTP server


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


# Submitting.


def test_submit_says_what_it_made_and_how_to_watch_it(site: Site, terminal: ServerTerminal) -> None:
    name = site.new_name()
    out = terminal.shown("submit", site.study_file(name))
    (study,) = [study for study in site.store.jobs() if study.name == name]
    assert out == (f"study {name}: {study.id}, CREATED\nfollow it with `mergesearch watch {study.id[:8]}`\n")
    assert terminal.document("submit", site.study_file(name))["name"] == name


def test_submit_with_a_key_makes_one_study(site: Site, terminal: ServerTerminal) -> None:
    name = site.new_name()
    file = site.study_file(name)
    first = terminal.document("submit", file, "--name-key", name)
    assert terminal.document("submit", file, "--name-key", name)["id"] == first["id"]
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    assert f"Idempotency-Key '{name}' was sent before with another body" in terminal.refused(
        "submit", file, "--name-key", name
    )
    assert "visible ASCII" in terminal.refused("submit", file, "--name-key", "ü")


def test_what_is_wrong_with_a_study_is_told_as_run_tells_it(
    site: Site, terminal: ServerTerminal, tmp_path: Path
) -> None:
    file = site.study_file(site.new_name())
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


def test_studies_are_listed(site: Site, finished: str, terminal: ServerTerminal) -> None:
    created = site.create(site.new_name())
    out = terminal.shown("studies")
    (line,) = [words(line) for line in out.splitlines() if finished[:8] in line]
    assert line.startswith(f"{finished[:8]} finished complete 9/14 12m34s 20")
    assert line.endswith("sums 0.7")
    (line,) = [words(line) for line in out.splitlines() if created[:8] in line]
    assert " created 0 0s 20" in line
    listed = terminal.document("studies")
    assert [study["id"] for study in listed] == [job.id for job in site.store.jobs() if job.kind == "search"]


def test_a_server_without_studies_says_so(terminal: ServerTerminal, tmp_path: Path) -> None:
    with ApiServer(tmp_path) as server:
        code, out, _ = terminal.run("studies", "--server", server.url)
        assert (code, out.splitlines()[0].strip()) == (0, "Studies")
        assert terminal.run("studies", "--server", server.url, "--json")[1] == "[]\n"
        code, _, err = terminal.run("show", "abc", "--server", server.url)
    assert (code, err) == (2, "mergesearch: job 'abc': the server has no job of that id or name\n")


def test_show_tells_all_of_a_study(site: Site, finished: str, terminal: ServerTerminal) -> None:
    out = words(terminal.shown("show", finished))
    for told in (
        "study finished",
        f"id {finished}",
        "state complete",
        "worked 12m34s, by ",
        "trials 9 of 14 8 complete 1 fail",
        "samples 300 of 900",
        "sample limit 360 of 5,000 used by the search (7%)",
        "best so far trial 7: sums 0.7",
        "Ray job finished-1",
        f"dashboard {site.url}/ray/#/jobs/finished-1",
        f"report {site.url}/v1/studies/{finished}/report",
        f"log {site.url}/v1/studies/{finished}/log",
    ):
        assert told in out
    assert terminal.document("show", finished)["id"] == finished


def test_show_tells_of_steps_where_there_are_some(site: Site, finished: str, terminal: ServerTerminal) -> None:
    """A searcher without steps has no row of them, nor has a study of an earlier version, which reported none."""
    writer = site.begin(site.new_name())
    writer.heartbeat(wall_clock_s=1.0, progress={**PROGRESS, "steps": 1200, "steps_planned": 6000})
    assert "steps 1,200 of 6,000" in words(terminal.shown("show", writer.job_id))
    writer.heartbeat(wall_clock_s=1.0, progress={k: v for k, v in PROGRESS.items() if not k.startswith("steps")})
    for study in (writer.job_id, finished):
        assert "steps" not in words(terminal.shown("show", study))


def test_show_of_a_study_that_has_failed_says_why(site: Site, terminal: ServerTerminal) -> None:
    writer = site.begin(site.new_name())
    writer.set_state(JobState.FAILED, "no trial was scored at the full budget")
    out = words(terminal.shown("show", writer.job_id))
    assert "state failed: no trial was scored at the full budget" in out
    assert "samples" not in out


def test_a_study_is_meant_by_the_beginning_of_its_id_or_its_name(site: Site, terminal: ServerTerminal) -> None:
    name = site.new_name()
    first = site.create(name)
    assert terminal.document("show", name)["id"] == first
    assert terminal.document("show", first[:10])["id"] == first
    second = site.create(name)
    message = terminal.refused("show", name)
    assert message.startswith(f"job {name!r}: 2 jobs match, give a longer id: ")
    assert first in message
    assert second in message
    for verb in (["watch"], ["cancel"], ["delete"], ["log"], ["trials"], ["pareto"]):
        assert terminal.refused(*verb, name) == message
        assert terminal.refused(*verb, "nobody").startswith("job 'nobody': the server has no job of that id or name")


# Results.


def test_trials_and_front_are_shown_as_those_of_a_run(site: Site, finished: str, terminal: ServerTerminal) -> None:
    record = run_record(site.store, finished)
    assert terminal.document("trials", "finished") == json.loads(
        json.dumps([trial_document(trial) for trial in record.whole_trials])
    )
    assert terminal.document("pareto", "finished") == json.loads(json.dumps(pareto(record)))
    lines = [words(line) for line in terminal.shown("trials", finished).splitlines()]
    assert "trial label state samples sums" in lines
    assert "2 expert:text complete 36 0.2" in lines
    assert "8 trial:8 fail: NaN logits 0" in lines
    assert "7 task arithmetic 0.7 0.7 ±0.01" in [
        words(line) for line in terminal.shown("pareto", finished).splitlines()
    ]


def test_reasons_are_shown_as_they_are(site: Site, terminal: ServerTerminal) -> None:
    writer, reason = site.begin(site.new_name()), "[/tmp/x] is [red]broken"
    trial = TrialRecord(0, Origin.SEARCH, "trial:0", TrialState.WAITING, site.preflight.baselines()[0][2])
    writer.add_trial(trial)
    writer.finish_trials([0], TrialState.FAIL, reason)
    writer.set_state(JobState.FAILED, reason)
    assert f"fail: {reason}" in terminal.shown("trials", writer.job_id)
    assert f"failed: {reason}" in terminal.shown("show", writer.job_id)
    code, _, err = terminal.run("watch", writer.job_id, "--server", site.url)
    assert code == 1
    assert f"trial 0 failed: {reason}" in err


def test_a_study_that_has_not_begun_has_no_trials_and_no_front(site: Site, terminal: ServerTerminal) -> None:
    study = site.create(site.new_name())
    assert terminal.document("trials", study) == []
    assert terminal.document("pareto", study)["front"] == []
    assert "Trials" in terminal.shown("trials", study)


def test_the_log_is_printed(
    site: Site, finished: str, terminal: ServerTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert terminal.shown("log", "finished") == "==> driver <==\nscored ü\n"
    assert terminal.document("log", finished) == {"log": "==> driver <==\nscored ü\n"}
    monkeypatch.setattr(site.cluster, "reason", "Ray is being started")
    monkeypatch.setattr(requests, "RETRY_PAUSES_S", (0.01,))  # less than the server asks to wait
    assert terminal.refused("log", finished, code=1) == "Ray is being started"


def test_export_fetches_the_model(site: Site, finished: str, terminal: ServerTerminal, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    assert terminal.shown("export", "finished", "1", "--out", out) == f"merged model: {out}\n"
    merged, expert = load_file(out / "model.safetensors"), load_file(site.models / "math" / "model.safetensors")
    assert all(torch.equal(merged[name], expert[name]) for name in expert)
    assert terminal.refused("export", "finished", "1", "--out", out) == (
        f"{out}: exists already; give a directory that does not"
    )
    other = tmp_path / "other"
    assert terminal.document("export", finished, "1", "--out", other) == {"directory": str(other)}


def test_weights_pick_the_trial_on_the_server(
    site: Site, finished: str, terminal: ServerTerminal, tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    told, place = terminal.shown("export", finished, "best", "--prefer", "sums=1", "--out", out).splitlines()
    assert told.startswith("preferred by sums=1: trial 7, task arithmetic 0.7, sums ")
    assert told.endswith(" on held-out data")
    assert place == f"merged model: {out}"
    assert ExportStore(site.store).exports(finished)[-1].trial == 7
    assert terminal.document("pareto", finished, "--prefer", "sums=1")["preferred"]["trial"] == 7
    assert "prefer: sums=0.5 sum to 0.5, not to 1" in terminal.refused(
        "export", finished, "best", "--prefer", "sums=0.5", "--out", tmp_path / "other"
    )
    both = terminal.refused("export", finished, "3", "--prefer", "sums=1", "--out", tmp_path / "other")
    assert both == "preference: weights choose the trial; give \"best\", not '3'"


def test_a_recipe_is_printed_or_written_for_mergekit(site: Site, finished: str, terminal: ServerTerminal) -> None:
    """The recipe is JSON, mergekit's file YAML; `--json` wraps it."""
    trial = next(trial for trial in site.store.trials(finished) if trial.label == "uniform average")
    recipe = {**trial.read_recipe().to_json(), "dtype": "float32"}
    assert terminal.document("recipe", finished, trial.number) == recipe
    shown = terminal.shown("recipe", finished, trial.number, "--mergekit")
    assert shown.startswith("# math, text: put the directory of the model in place of each name,\n")
    assert "\nmerge_method: linear\n" in shown
    assert str(site.models) not in shown
    assert terminal.document("recipe", finished, trial.number, "--mergekit") == {"mergekit": shown}
    writer = site.begin(site.new_name())
    ties = next(recipe for _, label, recipe in site.preflight.baselines() if "TIES" in label)
    writer.add_trial(TrialRecord(0, Origin.PUBLISHED, "ties", TrialState.RUNNING, ties))
    assert "ties differs in mergekit" in terminal.refused("recipe", writer.job_id, 0, "--mergekit")


def test_what_cannot_be_exported_is_refused(
    site: Site, terminal: ServerTerminal, finished: str, tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    for trial in ("99", "bset", "1.5", "٣٣"):
        assert "is not accepted; give" in terminal.refused("export", finished, trial, "--out", out)
    running = site.begin(site.new_name()).job_id
    assert "models are exported once it is COMPLETE" in terminal.refused("export", running, "best", "--out", out)
    assert list(tmp_path.iterdir()) == []


def test_cancel_ends_a_study(site: Site, finished: str, terminal: ServerTerminal) -> None:
    name = site.new_name()
    study = site.create(name)
    assert terminal.shown("cancel", name) == f"study {name}: {study}, CANCELLED\n"
    assert terminal.document("cancel", study)["state"] == "CANCELLED"
    assert site.store.job(study).state is JobState.CANCELLED
    assert "is already COMPLETE" in terminal.refused("cancel", finished)


def test_resume_lets_a_failed_study_go_on(site: Site, finished: str, terminal: ServerTerminal) -> None:
    writer = site.begin(site.new_name())
    writer.set_state(JobState.FAILED, "the hub cannot be reached")
    study = site.store.job(writer.job_id)
    assert terminal.shown("resume", study.name) == f"study {study.name}: {study.id}, STOPPED\n"
    assert terminal.document("resume", study.id)["state"] == "STOPPED"
    assert "is COMPLETE" in terminal.refused("resume", finished)


def test_pause_and_stop_steer_a_study(site: Site, finished: str, terminal: ServerTerminal) -> None:
    name = site.new_name()
    study = site.create(name)
    assert terminal.shown("pause", name, "--reason", "noon") == f"study {name}: {study}, PAUSED\n"
    assert site.store.job(study).reason == "paused by request: noon"
    assert terminal.document("resume", name)["state"] == "STOPPED"
    assert terminal.document("stop", name, "--reason", "good enough")["state"] == "STOPPED"
    assert site.store.job(study).stop_reason == "stopped by request: good enough"
    steered = [dict(event.payload) for event in site.store.events(study) if event.kind == "steered"]
    assert [(each["action"], each["reason"]) for each in steered] == [
        ("pause", "noon"),
        ("resume", None),
        ("stop", "good enough"),
    ]
    for verb in ("pause", "stop"):
        assert "is already COMPLETE" in terminal.refused(verb, finished)


def test_the_queue_is_shown_and_changed(
    site: Site, finished: str, terminal: ServerTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order, what a job waits for and when it may start are shown; a move has a reason."""
    first, second = (site.create(site.new_name()) for _ in range(2))
    name = site.store.job(second).name
    waiting = Choice(waiting={first: Waiting(1, Reason.PLACE), second: Waiting(2, Reason.PLACE)})
    monkeypatch.setattr(site.cluster, "state", QueueState(4, ("0" * 32,), waiting, {second: 1e9}))
    out = words(terminal.shown("queue"))
    assert "Queue: 1 of 4 places are taken" in out
    assert "runs a job that you may not read" in out
    assert re.search(rf"2 {second[:4]}\w* {name} 0 2001-09-0\d \d\d:46", out)
    shown = words(terminal.shown("show", name))
    assert re.search(r"queue 2 of 2, expected to start 2001-09-0\d \d\d:46", shown)
    document = terminal.document("move", name, "--before", first, "--reason", "a deadline")
    assert [entry["position"] for entry in document["waiting"]] == [1, 2]
    assert site.store.job(second).moved_before == first
    assert site.store.events(second)[-1].payload["reason"] == "a deadline"
    terminal.shown("move", name)
    assert site.store.job(second).moved_before == ""
    assert "does not wait" in terminal.refused("move", name, "--before", finished)


def test_the_cluster_is_shown(site: Site, terminal: ServerTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes have what is used of each part; where they are unknown, the reason is shown."""
    monkeypatch.setattr(site.cluster, "ray", None)
    out = words(terminal.shown("cluster"))
    assert "nodes: not known: the server is not connected to Ray" in out
    assert f"database: {site.store.engine.dialect.name}, revision {REVISION}" in out
    told = [node("head", is_head=True), node("gone", state="DEAD", mem=None, disk=None, gpus=None)]
    with upstream({"/nodes": {"data": {"summary": told}}}) as ray:
        monkeypatch.setattr(site.cluster, "ray", ray.dashboard)
        monkeypatch.setattr(site.cluster, "reason", "Ray starts anew")
        out = words(terminal.shown("cluster"))
        document = terminal.document("cluster")
    assert re.search(r"head 10\.0\.0\.4 head 16, 12 % 24\.0 of 64\.0 GiB 30\.0 of 100\.0 GiB NVIDIA H100: 71 %", out)
    assert "gone 10.0.0.4 dead 16, 12 %" in out
    assert "no job continues: Ray starts anew" in out
    assert [each["is_alive"] for each in document["nodes"]] == [True, False]


def test_edit_and_clone_change_a_study(site: Site, terminal: ServerTerminal) -> None:
    name = site.new_name()
    study = site.create(name)
    edited = terminal.document("edit", name, "--tag", "a", "--tag", "b", "--max-samples", "5000", "--max-trials", "99")
    assert (edited["tags"], edited["version"]) == (["a", "b"], 1)
    assert site.store.job(study).document["limits"]["max_samples"] == 5000
    terminal.document("edit", name, "--max-samples", "none", "--reason", "a deadline")
    steered = [event.payload for event in site.store.events(study) if event.kind == "steered"]
    assert [each["reason"] for each in steered] == [None, "a deadline"]
    assert site.store.job(study).document["limits"]["max_samples"] is None
    assert "nothing to edit" in terminal.refused("edit", name)
    copy = terminal.document(
        "clone", name, "--name", "copy", "--set", "search.seed=5", "--set", "search.algorithm=random"
    )
    search = site.store.job(copy["id"]).document["search"]
    assert (copy["name"], search["seed"], search["algorithm"], search["max_trials"]) == ("copy", 5, "random", 99)
    code, _, err = terminal.run("clone", name, "--set", "search.seed", "--server", site.url)
    assert (code, "give OPTION=VALUE" in err) == (2, True), err


def test_clone_makes_changes_in_their_order(site: Site, terminal: ServerTerminal) -> None:
    """An option can be set below one that an earlier change removed, but not below a value that is no object."""
    name = site.new_name()
    site.create(name)
    terminal.document("edit", name, "--max-samples", "5000", "--max-gpu-hours", "3")
    copy = terminal.document(
        "clone", name, "--name", "a", "--set", "limits=null", "--set", "limits.max_samples=7000", "--set", "name=b"
    )
    limits = site.store.job(copy["id"]).document["limits"]
    assert (copy["name"], limits["max_samples"], limits["max_gpu_hours"]) == ("b", 7000, None)
    copy = terminal.document("clone", name, "--set", 'limits={"max_samples": 8000}', "--set", "limits.max_gpu_hours=4")
    limits = site.store.job(copy["id"]).document["limits"]
    assert (limits["max_samples"], limits["max_gpu_hours"]) == (8000, 4)
    for value in ("1", '"one"', "[1]"):
        assert terminal.refused("clone", name, "--set", f"search.seed={value}", "--set", "search.seed.x=2") == (
            f"--set search.seed.x=2: search.seed has no keys after --set search.seed={value}; leave one of them out"
        )


def test_invalidate_marks_a_trial(site: Site, finished: str, terminal: ServerTerminal) -> None:
    name = site.store.job(finished).name
    assert (
        terminal.shown("invalidate", finished, "0", "--reason", "cut off") == f"trial 0 of {name}: invalid: cut off\n"
    )
    assert "invalid: cut off" in words(terminal.shown("trials", finished))
    assert terminal.document("invalidate", finished, "0", "--undo")["invalid"] is None
    assert "--reason is missing" in terminal.refused("invalidate", finished, "0")
    assert "only a trial that is PRUNED or has failed" in terminal.refused("reevaluate", finished, "0")
    site.store.open_attempt(finished).set_state(JobState.COMPLETE)


def test_trials_are_written_to_files(finished: str, terminal: ServerTerminal, tmp_path: Path) -> None:
    told = terminal.shown("trials", finished, "--out", str(tmp_path / "trials.csv"))
    assert told.endswith(f"trials: {tmp_path / 'trials.csv'}\n")
    assert (tmp_path / "trials.csv").read_text().startswith("number,state,origin,label")
    assert "in sqlite:///" in terminal.shown("trials", finished, "--optuna", f"sqlite:///{tmp_path / 'trials.db'}")
    assert "written as .csv or .parquet" in terminal.refused("trials", finished, "--out", str(tmp_path / "trials"))


def test_enqueue_sends_a_file(site: Site, terminal: ServerTerminal, tmp_path: Path) -> None:
    study = site.create(site.new_name())
    (tmp_path / "values.yaml").write_text("x: 0.5\n")
    (tmp_path / "recipe.json").write_text('{"format": "f"}')
    terminal.shown("enqueue", study, "values", "--configuration", str(tmp_path / "values.yaml"))
    terminal.shown("enqueue", study, "recipe", "--recipe", str(tmp_path / "recipe.json"), "--reason", "why not")
    first, second = SteeringStore(site.store).evaluation_requests(study)[-2:]
    assert (first.label, first.configuration, first.recipe) == ("values", {"x": 0.5}, None)
    assert (second.label, second.configuration, second.recipe) == ("recipe", None, {"format": "f"})
    assert "missing.json" in terminal.refused("enqueue", study, "a", "--recipe", str(tmp_path / "missing.json"))


def test_show_and_watch_say_what_a_study_waits_for(
    site: Site, terminal: ServerTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = site.begin(site.new_name())
    writer.set_waiting("models: /mnt/base: does not exist")
    monkeypatch.setattr(site.cluster, "reason", "its next driver, in 12 s: /mnt/base: does not exist")
    assert "waits for its next driver, in 12 s: /mnt/base: does not exist" in words(
        terminal.shown("show", writer.job_id)
    )
    writer.set_state(JobState.FAILED, "x")
    _, _, err = terminal.run("watch", writer.job_id, "--server", site.url)
    assert "the study is STOPPED: models: /mnt/base: does not exist" in err
    assert "the study waits; the server tries again automatically" in err


def test_delete_removes_a_study_that_has_ended(site: Site, terminal: ServerTerminal) -> None:
    name = site.new_name()
    study = site.create(name)
    assert "only a study that has ended can be deleted: cancel it first" in terminal.refused("delete", name)
    terminal.shown("cancel", name)
    assert terminal.shown("delete", name) == f"deleted: {name}: {study}\n"
    assert "the server has no job of that id or name" in terminal.refused("show", study)
    second = site.create(name)
    terminal.shown("cancel", name)
    assert terminal.document("delete", name) == {"deleted": second}


# Which server, which directory.


def test_server_option_precedes_environment(
    site: Site, finished: str, terminal: ServerTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option names the server; without it, the environment does."""
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
        "mergesearch: server 'ftp://x': is not an address; write http://HOST:PORT\n",
    )


def test_default_server_is_named(terminal: ServerTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without option and variable, the default server is tried, and the message says so."""
    assert DEFAULT_SERVER == "http://127.0.0.1:8080"
    monkeypatch.setattr("service.cli.remote.DEFAULT_SERVER", "http://127.0.0.1:1")
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


def test_directory_precedes_server(
    site: Site, terminal: ServerTerminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An existing directory is used unless a server is named."""
    monkeypatch.chdir(tmp_path)
    name = site.new_name()
    study = site.create(name)
    (tmp_path / name).mkdir()
    monkeypatch.setenv(SERVER_VARIABLE, site.url)
    assert "no run here (no study.db)" in terminal.run("trials", name)[2]
    assert "no run here (no study.db)" in terminal.run("trials", f"./{study}")[2]
    assert terminal.run("trials", study, "--json")[:2] == (0, "[]\n")
    assert terminal.run("trials", name, "--json", "--server", site.url)[:2] == (0, "[]\n")


@pytest.mark.parametrize(
    "verb", ["submit", "studies", "show", "watch", "trials", "pareto", "export", "cancel", "resume", "delete", "log"]
)
def test_every_verb_has_its_help(terminal: ServerTerminal, verb: str) -> None:
    code, out, _ = terminal.run(verb, "--help")
    assert code == 0
    assert "--server URL" in out
    assert "--json" in out
