"""The Python client against the server's own application over real HTTP."""

from __future__ import annotations

import inspect
import json
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import load_study
from service.client import (
    AsyncClient,
    Client,
    Event,
    RequestRefused,
    ServerUnreachable,
    flows,
    job_flows,
    requests,
)
from service.errors import Conflict, NotFound
from service.results.documents import pareto, trial_document
from service.results.load import run_record
from service.results.report import render_report
from service.results.summary import summary
from service.store.exports import ExportStore
from service.store.steering import SteeringStore
from service.types import ExportRecord, ExportState, JobState, Origin, TrialRecord, TrialState
from tests.service.client.asker import Asker
from tests.service.http_server import HttpServer
from tests.service.site import PROGRESS, Site

pytestmark = pytest.mark.slow  # each starts an HTTP server

# Studies.


def test_submitted_paths_are_absolute(site: Site, ask: Asker) -> None:
    """A study file is submitted with paths that mean the same on the server."""
    name = site.new_name()
    file = site.study_file(name)
    document = ask("submit", file)
    assert (document["name"], document["state"], document["attempt"]) == (name, "CREATED", 0)
    stored = site.store.job(document["id"]).document
    assert stored == load_study(file).canonical()
    assert stored["objectives"][0]["task"]["file"] == str(site.directory / "search.jsonl")
    assert ask("submit", str(file))["id"] != document["id"]


def test_the_same_key_gives_the_same_study_and_no_key_another(site: Site, ask: Asker) -> None:
    content = {**site.document, "name": site.new_name()}
    first = ask("submit", content, idempotency_key=content["name"])
    assert ask("submit", content, idempotency_key=content["name"]) == first
    assert ask("submit", content)["id"] != first["id"]
    with pytest.raises(RequestRefused, match=f"Idempotency-Key '{content['name']}' was sent before") as refused:
        ask("submit", {**content, "search": {"seed": 7}}, idempotency_key=content["name"])
    assert refused.value.status == 409


@pytest.mark.parametrize("key", ["ü", "two words", "a\nb", "x" * 256])
def test_a_key_that_http_cannot_carry_is_refused(site: Site, ask: Asker, key: str) -> None:
    with pytest.raises(RequestRefused, match=r"Idempotency-Key .*: give 1 to 255 visible ASCII characters"):
        ask("submit", site.document, idempotency_key=key)


def test_what_is_wrong_with_a_study_is_told_all_at_once(site: Site, ask: Asker, tmp_path: Path) -> None:
    broken = {**site.document, "search": {"max_trial": 3}, "engine": {"replicas": 0}}
    file = tmp_path / "study.json"
    file.write_text(json.dumps(broken))
    with pytest.raises(InvalidStudy) as told_here:
        ask("submit", file)
    with pytest.raises(RequestRefused) as told_there:
        ask("submit", broken)
    assert told_there.value.status == 422
    assert len(told_there.value.problems) == 2
    assert str(told_there.value) == str(told_here.value)
    assert [(p["field"], p["message"]) for p in told_there.value.problems] == [
        (problem.field, problem.message) for problem in told_here.value.problems
    ]


def test_a_relative_path_in_a_mapping_is_refused_by_name(site: Site, ask: Asker) -> None:
    with pytest.raises(RequestRefused, match=r"models\.base: \./base: is relative; give an absolute path"):
        ask("submit", {**site.document, "models": {**site.document["models"], "base": "./base"}})


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()])
def test_what_is_not_plain_data_is_not_sent(site: Site, ask: Asker, value: object) -> None:
    with pytest.raises(InvalidStudy, match="the document is not plain data: "):
        ask("submit", {**site.document, "limits": value})


def test_a_missing_study_file_is_told_as_the_command_does(ask: Asker, tmp_path: Path) -> None:
    with pytest.raises(InvalidStudy, match=r"no\.yaml: "):
        ask("submit", tmp_path / "no.yaml")


def test_studies_are_listed_and_sorted_out_by_state_and_name(site: Site, finished: str, ask: Asker) -> None:
    name = site.new_name()
    first, second = site.create(name), site.create(name)
    everything = [study["id"] for study in ask("studies")]
    assert everything.index(finished) < everything.index(first) < everything.index(second)
    assert [study["id"] for study in ask("studies", name=name)] == [first, second]
    assert finished in [study["id"] for study in ask("studies", state="COMPLETE")]
    assert ask("studies", state="COMPLETE", name=name) == []
    assert [study["id"] for study in ask("studies", text=name.upper(), sort="-created", limit=1)] == [second]
    with pytest.raises(RequestRefused, match="state: "):
        ask("studies", state="BUSY")


def test_a_study_is_told_whole(finished: str, ask: Asker) -> None:
    study = ask("study", finished)
    assert (study["id"], study["state"], study["wall_clock_s"]) == (finished, "COMPLETE", 754.0)
    assert study["trials"] == {"COMPLETE": 8, "FAIL": 1}
    assert study["progress"] == PROGRESS
    assert study["job"]["submission_id"] == "finished-1"
    with pytest.raises(RequestRefused, match="there is no such study") as refused:
        ask("study", "f" * 32)
    assert refused.value.status == 404


@pytest.mark.parametrize("odd", ["..", "../../healthz", "a/b", "a?b", "ü", "\udcff", "x" * 3000, " "])
def test_an_odd_id_is_no_study_and_no_other_page(ask: Asker, odd: str) -> None:
    for method in ("study", "summary", "cancel", "delete"):
        with pytest.raises(RequestRefused) as refused:
            ask(method, odd)
        assert refused.value.status in (404, 405)


def test_an_empty_id_is_not_the_list_of_studies(ask: Asker) -> None:
    for method in ("study", "trials", "cancel", "delete", "pareto"):
        with pytest.raises(NotFound, match="give the id of a study"):
            ask(method, "")


def test_a_study_is_found_by_id_beginning_and_name(site: Site, ask: Asker) -> None:
    name = site.new_name()
    study = site.create(name)
    for reference in (study, study[:12], name):
        assert ask("find", reference)["id"] == study
    other = site.create(name)
    with pytest.raises(Conflict, match=rf"job '{name}': 2 jobs match, .*{study} .*{other} "):
        ask("find", name)
    assert ask("find", other)["id"] == other
    for reference in ("nobody", "", "F", "%", "\udcff", "x" * 3000):
        with pytest.raises(NotFound, match="the server has no job of that id or name"):
            ask("find", reference)


def test_other_jobs_are_not_downloaded_to_find_one(site: Site, ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded: list[Any] = []
    own = job_flows.jobs

    def jobs(*arguments: Any, **named: Any) -> Any:
        found = yield from own(*arguments, **named)
        downloaded.extend(found)
        return found

    monkeypatch.setattr(job_flows, "jobs", jobs)
    studies = [site.create(site.new_name()) for _ in range(2)]
    assert ask("find", studies[1][:12])["id"] == studies[1]
    assert [found["id"] for found in downloaded] == [studies[1]]


def test_a_study_is_paused_edited_cloned_and_stopped(site: Site, ask: Asker) -> None:
    study = ask("submit", {**site.document, "name": site.new_name()})["id"]
    assert ask("pause", study, reason="noon")["state"] == "PAUSED"
    edited = ask("edit", study, {"tags": ["math"], "max_trials": 99}, reason="more")
    assert (edited["tags"], edited["version"]) == (["math"], 1)
    assert site.store.events(study)[-1].payload["reason"] == "more"
    with pytest.raises(RequestRefused, match="was edited meanwhile"):
        ask("edit", study, {"tags": []}, version=0)
    copy = ask("clone", study, {"name": "copy", "search": {"seed": 5, "max_trials": None}})
    document = ask("study_file", copy["id"]) if hasattr(Client, "study_file") else site.store.job(copy["id"]).document
    assert (document["name"], document["search"]["seed"]) == ("copy", 5)
    assert document["models"] == site.store.job(study).document["models"]
    assert ask("resume", study)["state"] == "STOPPED"
    assert ask("stop", study, reason="good enough")["state"] == "STOPPED"
    assert site.store.job(study).stop_reason == "stopped by request: good enough"


def test_a_waiting_study_is_moved(site: Site, ask: Asker) -> None:
    study, other = (ask("submit", {**site.document, "name": site.new_name()}) for _ in range(2))
    assert ask("queue")["places"] == ask("move", study, before=other["id"], reason="urgent")["places"] == 4
    assert site.store.job(study["id"]).moved_before == other["id"]
    ask("move", study["id"])
    assert site.store.job(study["id"]).moved_before == ""
    with pytest.raises(RequestRefused, match="there is no such job"):
        ask("move", "0" * 32)


def test_the_cluster_is_shown(site: Site, ask: Asker) -> None:
    """While Ray's dashboard is away, the document says so; the database and the disk are the server's."""
    found = ask("cluster")
    assert found["nodes"] == []
    assert "Connection refused" in found["nodes_problem"]
    assert found["database"]["kind"] == site.store.engine.dialect.name
    assert found["disk"]["total"] > found["disk"]["used"] > 0


def test_a_study_begins_with_a_mergekit_file(site: Site, ask: Asker, tmp_path: Path) -> None:
    """A path and a content give the same study, which has the merge among its recipes; another file is refused."""
    configuration = {
        "merge_method": "linear",
        "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("models/base", "models/math")],
    }
    file = tmp_path / "mergekit.yml"
    file.write_text(json.dumps(configuration))
    begun = ask("begin_study", file, name="mine")
    assert begun == ask("begin_study", configuration, name="mine")
    assert begun["study"]["models"] == {"base": "models/base", "experts": {"math": "models/math"}}
    assert [recipe["name"] for recipe in begun["study"]["search"]["recipes"]] == ["mine"]
    assert any("names no base_model" in warning for warning in begun["warnings"])
    with pytest.raises(RequestRefused, match="has no merge_method"):
        ask("begin_study", {"models": []})


def test_a_pruned_trial_is_evaluated_and_another_invalid(site: Site, finished: str, ask: Asker) -> None:
    trials = ask("trials", finished)
    states = {trial["state"]: trial["number"] for trial in trials}
    with pytest.raises(RequestRefused, match="only a trial that is PRUNED"):
        ask("evaluate_trial", finished, states["COMPLETE"])
    marked = ask("set_validity", finished, states["COMPLETE"], is_valid=False, reason="cut off")
    assert marked["invalid"] == "cut off"
    assert ask("set_validity", finished, states["COMPLETE"], is_valid=True)["invalid"] is None
    site.store.open_attempt(finished).set_state(JobState.COMPLETE)


def test_a_study_is_checked_before_it_is_submitted(site: Site, ask: Asker) -> None:
    assert ask("check_study", site.study_file(site.new_name()), level="syntax")["is_valid"]
    wrong = ask("check_study", {**site.document, "name": ""}, level="syntax")
    assert [problem["field"] for problem in wrong["problems"]] == ["name"]


def test_trials_are_sorted_and_filtered(finished: str, ask: Asker) -> None:
    """The client sends conditions as they are, and ends after `limit` trials."""
    every = {trial["number"]: trial for trial in ask("trials", finished)}
    latest = ask("trials", finished, sort="-number", where=["number>=1", "number<3"])
    assert [trial["number"] for trial in latest] == [2, 1]
    assert ask("trials", finished, sort="-number", limit=1) == [every[max(every)]]
    assert ask("trials", finished, text=every[1]["label"], origin=every[1]["origin"])[0]["label"] == every[1]["label"]
    with pytest.raises(RequestRefused, match="'number>' is not FIELD"):
        ask("trials", finished, where=["number>"])


def test_plots_are_of_the_study_or_of_a_trial(finished: str, ask: Asker) -> None:
    assert ask("plot", finished, "rungs")["plot"] == "rungs"
    assert ask("plot", finished, "recipe", trial=1)["trial"] == 1
    with pytest.raises(RequestRefused, match="name: "):
        ask("plot", finished, "history", trial=1)
    assert ask("importance", finished, objective="sums")["parameters"] is None


def test_samples_come_side_by_side(finished: str, ask: Asker) -> None:
    """The client sends the two trials and the filter; the site's study has no samples of held-out data of math."""
    trials = [trial["number"] for trial in ask("trials", finished)][:2]
    found = ask("samples", finished, trials[0], against=trials[1], only="differs", split="search", limit=5)
    assert (found["trial"], found["against"], found["split"]) == (*trials, "search")
    assert found["counts"]["samples"] >= found["total"] == len(found["samples"])
    with pytest.raises(RequestRefused, match="is no objective with samples"):
        ask("samples", finished, trials[0], objective="speed")


def test_trials_come_as_columns(finished: str, ask: Asker) -> None:
    columns = ask("trial_columns", finished, fields=["number", "value.*"])
    assert columns["number"] == [trial["number"] for trial in ask("trials", finished)]
    assert any(name.startswith("value.") for name in columns)
    assert "label" not in columns
    assert ask("trial_columns", finished)["label"]


def test_a_merge_is_enqueued(site: Site, ask: Asker) -> None:
    study, label = site.create(site.new_name()), site.new_name()
    assert ask("enqueue_trial", study, label, configuration={"x": 0.5}, reason="why not")["state"] == "CREATED"
    with pytest.raises(RequestRefused, match="give another label"):
        ask("enqueue_trial", study, label, recipe={"x": 0.5})
    assert label in [request.label for request in SteeringStore(site.store).evaluation_requests(study)]


def test_a_study_is_cancelled_once_and_for_good(site: Site, finished: str, ask: Asker) -> None:
    study = site.create(site.new_name())
    assert ask("cancel", study)["state"] == "CANCELLED"
    assert ask("cancel", study)["state"] == "CANCELLED"
    assert site.store.job(study).state is JobState.CANCELLED
    with pytest.raises(RequestRefused, match="is already COMPLETE") as refused:
        ask("cancel", finished)
    assert refused.value.status == 409


def test_a_study_that_failed_is_resumed(site: Site, finished: str, ask: Asker) -> None:
    writer = site.begin(site.new_name())
    writer.set_state(JobState.FAILED, "the disk was unmounted")
    assert ask("resume", writer.job_id)["state"] == "STOPPED"
    assert site.store.job(writer.job_id).state is JobState.STOPPED
    with pytest.raises(RequestRefused, match="is COMPLETE") as refused:
        ask("resume", finished)
    assert refused.value.status == 409


def test_a_study_that_has_ended_is_deleted(site: Site, ask: Asker) -> None:
    study = site.create(site.new_name())
    with pytest.raises(RequestRefused, match="only a study that has ended can be deleted") as refused:
        ask("delete", study)
    assert refused.value.status == 409
    ask("cancel", study)
    assert ask("delete", study) is None
    with pytest.raises(RequestRefused, match="there is no such study"):
        ask("study", study)


def test_an_export_is_listed_and_deleted(site: Site, ask: Asker) -> None:
    study = site.create(site.new_name())
    name = uuid.uuid4().hex
    ExportStore(site.store).add_export(
        ExportRecord(name, study, 0, "float32", ExportState.FAIL, time.time(), reason="disk full")
    )
    (export,) = ask("exports", study)
    assert (export["id"], export["state"]) == (name, "FAIL")
    assert ask("delete_export", study, name) is None
    assert ask("exports", study) == []
    with pytest.raises(RequestRefused, match="has no such export"):
        ask("delete_export", study, name)


# Results.


def test_results_are_those_of_a_run(site: Site, finished: str, ask: Asker) -> None:
    record = run_record(site.store, finished)
    assert ask("summary", finished) == json.loads(json.dumps(summary(record)))
    assert ask("pareto", finished) == json.loads(json.dumps(pareto(record)))
    assert ask("report", finished) == render_report(record)


def test_trials_are_told_to_the_last_page(
    site: Site, finished: str, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "PAGE", 2)
    stored = [json.loads(json.dumps(trial_document(trial))) for trial in site.store.trials(finished)]
    assert len(stored) == 9
    assert ask("trials", finished) == stored
    assert ask("trials", finished, state="COMPLETE") == stored[:8]
    assert ask("trials", finished, state="PRUNED") == []
    assert ask("trials", site.create(site.new_name())) == []


def test_one_trial_and_its_recipe(site: Site, finished: str, ask: Asker) -> None:
    (trial,) = site.store.trials(finished, start=5, stop=6)
    assert ask("trial", finished, 5)["label"] == trial.label
    assert ask("recipe", finished, 5) == {**trial.read_recipe().to_json(), "dtype": "float32"}
    for method in ("trial", "recipe"):
        with pytest.raises(RequestRefused, match="trial 99: study 'finished' has no such trial"):
            ask(method, finished, 99)


def test_models_are_listed_for_pickers(site: Site, ask: Asker) -> None:
    """The server lists the models that jobs may read, and refuses other directories."""
    found = ask("models")
    assert [model["path"] for model in found["models"]] == [str(site.models / n) for n in ("base", "math", "text")]
    assert {(m["architecture"], m["is_adapter"], m["base"]) for m in found["models"]} == {
        ("LlamaForCausalLM", False, None)
    }
    assert (found["is_complete"], found["directories"]) == (True, [str(site.models)])
    (math,) = ask("models", text="MATH", limit=5)["models"]
    assert math["name"] == str(site.models / "math")
    assert not ask("models", limit=1)["is_complete"]
    assert ask("models", under=str(site.models / "text"))["models"][0]["path"] == str(site.models / "text")
    with pytest.raises(RequestRefused, match="under: /etc: is not below a directory that studies may read") as refused:
        ask("models", under="/etc")
    assert refused.value.status == 422


def test_a_merge_is_written_for_mergekit(site: Site, finished: str, ask: Asker) -> None:
    """A trial's merge comes as mergekit's YAML, or is refused with every reason why mergekit cannot express it."""
    trials = {trial.label: trial.number for trial in site.store.trials(finished)}
    document = yaml.safe_load(ask("mergekit", finished, trials["uniform average"]))
    assert (document["merge_method"], document["out_dtype"]) == ("linear", "float32")
    (slice_,) = document["slices"]
    assert {source["model"] for source in slice_["sources"]} == {"math", "text"}, "no directories of the server"
    writer = site.begin(site.new_name())
    ties = next(recipe for _, label, recipe in site.preflight.baselines() if "TIES" in label)
    scaled = replace(ties, layers=(replace(ties.layers[0], scale=1.5), *ties.layers[1:]))
    writer.add_trial(TrialRecord(0, Origin.SEARCH, "trial:0", TrialState.WAITING, scaled, 0, configuration={"a": 1}))
    with pytest.raises(RequestRefused) as refused:
        ask("mergekit", writer.job_id, 0)
    assert refused.value.status == 409
    assert refused.value.problem["detail"] == (
        "trial 0: there is no mergekit configuration that computes the same merge"
    )
    assert [problem["message"] for problem in refused.value.problems] == [
        "layers are scaled or aligned",
        "ties differs in mergekit where signs cancel and where magnitudes are equal",
    ]


def test_the_log_is_text_and_away_with_ray(
    site: Site, finished: str, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("log", finished) == "==> driver <==\nscored ü\n"
    monkeypatch.setattr(site.cluster, "reason", "Ray is being started")
    monkeypatch.setattr(requests, "RETRY_PAUSES_S", (0.01,))  # less than the server asks to wait
    with pytest.raises(RequestRefused, match=r"^Ray is being started$") as refused:
        ask("log", finished)
    assert refused.value.status == 503
    assert refused.value.retry_after_s is not None


# Events.


def test_the_events_of_a_finished_study_are_its_history_and_end(site: Site, finished: str, ask: Asker) -> None:
    stored = site.store.events(finished)
    events = list(ask.events(finished))
    history = [event for event in events if event.id is not None]
    assert [(e.id, e.kind, e.payload) for e in history] == [(e.id, e.kind, dict(e.payload)) for e in stored]
    assert events[-1] == Event("end", None, None, {"state": "COMPLETE", "reason": None})
    assert [event.payload for event in events if event.kind == "progress"] == [PROGRESS]
    later = list(ask.events(finished, after=stored[10].id))
    assert [event.id for event in later if event.id is not None] == [event.id for event in stored[11:]]


def test_events_come_while_they_happen(site: Site) -> None:
    writer = site.begin(site.new_name())
    with Client(site.url) as client:
        events = client.events(writer.job_id)
        assert [next(events).kind for _ in range(3)] == ["created", "attempt", "state"]
        for number in range(3):
            writer.add_event("note", {"number": number})
            assert next(events).payload == {"number": number}
        writer.heartbeat(wall_clock_s=1.0, progress=PROGRESS)
        assert next(events) == Event("progress", None, None, PROGRESS)
        writer.set_state(JobState.FAILED, "out of luck")
        assert [event.kind for event in events] == ["state", "end"]


def test_restart_loses_and_repeats_no_event(site: Site, ask: Asker) -> None:
    """A restart of the server loses no event and repeats none."""
    writer = site.begin(site.new_name())
    own = HttpServer(site.app)
    interrupted = threading.Event()

    def work() -> None:
        for number in range(200):
            writer.add_event("note", {"number": number})
            time.sleep(0.01)
        interrupted.wait()
        writer.set_state(JobState.COMPLETE)

    def interrupt() -> None:
        for _ in range(3):
            time.sleep(0.4)
            own.stop()
            time.sleep(0.2)
            own.start()
        interrupted.set()

    with own:
        threads = [threading.Thread(target=body) for body in (work, interrupt)]
        for thread in threads:
            thread.start()
        events = list(ask.at(own.url).events(writer.job_id))
        for thread in threads:
            thread.join()
    assert [e.id for e in events if e.id is not None] == [e.id for e in site.store.events(writer.job_id)]
    assert sum(event.kind == "note" for event in events) == 200
    assert [event.kind for event in events][-1] == "end"


def test_a_server_that_does_not_come_back_ends_the_reading(site: Site, ask: Asker) -> None:
    writer = site.begin(site.new_name())
    own = HttpServer(site.app)
    own.start()
    threading.Timer(0.5, own.stop).start()
    with pytest.raises(ServerUnreachable, match=f"^{own.url}: no answer: "):
        list(ask.at(own.url).events(writer.job_id, patience_s=1.5))


def test_events_of_no_study_are_refused(ask: Asker) -> None:
    with pytest.raises(RequestRefused, match="there is no such study"):
        list(ask.events("f" * 32))


# Exports.


def test_an_exported_model_is_the_trial_that_was_named(site: Site, finished: str, ask: Asker, tmp_path: Path) -> None:
    received: list[tuple[int, int | None]] = []
    out = ask("export", finished, 1, tmp_path / "merged", received=lambda *count: received.append(count))
    assert out == tmp_path / "merged"
    assert (site.store.trials(finished)[1].label, site.store.trials(finished)[1].origin) == (
        "expert:math",
        Origin.SOURCE,
    )
    merged, expert = load_file(out / "model.safetensors"), load_file(site.models / "math" / "model.safetensors")
    assert all(torch.equal(merged[name], expert[name]) for name in expert)
    assert {file.name for file in out.iterdir()} >= {"README.md", "config.json", "recipe.json", "tokenizer.json"}
    total = sum(file.stat().st_size for file in out.iterdir())
    assert received[-1][1] == total < received[-1][0]
    with pytest.raises(Conflict, match=f"{out}: exists already"):
        ask("export", finished, 1, out)
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_weights_may_be_numbers_of_numpy(site: Site, finished: str, ask: Asker, tmp_path: Path) -> None:
    for weight in (np.float64(1.0), np.float32(1.0), np.int64(1)):
        assert ask("pareto", finished, prefer={"sums": weight})["preferred"]["trial"] == 7
        out = ask("export", finished, "best", tmp_path / type(weight).__name__, prefer={"sums": weight})
        assert (out / "recipe.json").exists()


def test_weights_pick_the_trial_that_is_exported(site: Site, finished: str, ask: Asker, tmp_path: Path) -> None:
    picked = ask("pareto", finished, prefer={"sums": 1.0})["preferred"]
    assert (picked["trial"], picked["split"]) == (7, "holdout")
    out = ask("export", finished, "best", tmp_path / "merged", prefer={"sums": 1.0})
    assert site.store.trial(finished, 7).recipe.digest in (out / "recipe.json").read_text()
    with pytest.raises(RequestRefused, match=r"prefer: sums=0.5 sum to 0.5, not to 1"):
        ask("export", finished, "best", tmp_path / "other", prefer={"sums": 0.5})


def test_what_cannot_be_exported_is_refused(site: Site, finished: str, ask: Asker, tmp_path: Path) -> None:
    running = site.begin(site.new_name()).job_id
    for study, trial, dtype, status, message in (
        (finished, 99, None, 422, "trial: 99 is not accepted"),
        (finished, "bset", None, 422, "trial: 'bset' is not accepted"),
        (finished, -1, None, 422, "trial: -1 is not accepted"),
        (finished, "best", "int8", 422, "dtype: "),
        (running, "best", None, 409, "is RUNNING; models are exported once it is COMPLETE"),
        ("f" * 32, "best", None, 404, "there is no such study"),
    ):
        with pytest.raises(RequestRefused, match=message) as refused:
            ask("export", study, trial, tmp_path / "merged", dtype=dtype)
        assert refused.value.status == status
    assert list(tmp_path.iterdir()) == []


# Both clients.


def test_clients_have_the_same_methods() -> None:
    """Both clients have the same documented methods."""
    blocking = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    awaited = {name for name in vars(AsyncClient) if not name.startswith("_")} - {"aclose"}
    assert blocking == awaited
    for kind in (Client, AsyncClient):
        for name in blocking:
            method = getattr(kind, name)
            signature = inspect.signature(method)
            assert (method.__module__, method.__qualname__) == (kind.__module__, f"{kind.__name__}.{name}")
            documentation = inspect.getdoc(method) or ""
            assert "\nExamples:\n    >>> " in documentation, name
            for parameter in [*signature.parameters.values()][1:]:
                stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
                assert f"\n    {stars}{parameter.name}: " in documentation, name
                assert parameter.annotation is not inspect.Parameter.empty, name
            assert signature.return_annotation is not inspect.Signature.empty, name


def test_many_threads_may_use_one_client(site: Site, finished: str) -> None:
    with Client(site.url) as client:
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(client.study(finished))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 8
    assert all(study == found[0] for study in found)
