"""`mergesearch run` from a study file to an exported model, and its end when it cannot continue."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from search_spaces.study.file import load_study
from service.cli.main import main
from service.jobs.search.local_run import DATABASE, read_run
from service.resolved_study import ResolvedStudy
from service.results.load import held_out_estimates
from service.studies.export import export_trial
from service.studies.preflight.examine import examine
from service.types import JobState, Origin, TrialState
from tests.conftest import record_engine_start
from tests.end_to_end.processes import ALL_GONE_S, WORKING_GONE_S, check_gone, num_chunks, started
from tests.end_to_end.studies import SHIPPED_SAMPLES, undisturbed
from tests.hub_server import Hub, only_hub
from tests.service.tune.harness import trial_list
from workers.engines.transformers.verification import verify
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.tiny_family import family_dir
from workers.types import SampleDifference, Span, Split

START_S = 300.0

# -- real engine ---------------------------------------------------------------------------------------------------


def test_run_leaves_its_files_and_the_best_merge(shipped: Path) -> None:
    summary = json.loads((shipped / "summary.json").read_text())
    assert summary["state"] == "COMPLETE"
    assert summary["engine"]["starts"] == 1
    plain, confined = sorted(summary["engine"]["kinds"])
    assert re.fullmatch(r"vllm, float32, \d+\.\d\d GB of sources in mapped files", plain)
    # One benchmark executes completions.
    assert re.fullmatch(re.escape(plain) + ", code of tasks confined by .+", confined)
    assert {file.name for file in shipped.iterdir()} >= {"trials.jsonl", "pareto.json", "report.html", DATABASE}
    recipe = json.loads((shipped / "export" / "recipe.json").read_text())
    with read_run(shipped) as (store, study):
        best = next(trial for trial in store.trials(study.id) if trial.number == summary["best"]["trial"])
    assert recipe.items() >= best.read_recipe().to_json().items()
    assert recipe["digest"] == best.recipe.digest


def test_a_quantised_export_is_scored_and_pushed(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """VLLM loads the quantised best merge, and its held-out scores are beside those of the merge."""
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    command = ["export", str(shipped), "best", "--out", str(tmp_path / "q"), "--quantize", "int8", "--json"]
    began = time.monotonic()
    with only_hub(hub, monkeypatch, tmp_path / "hub"):
        assert main([*command, "--push", "owner/best"]) == 0
    record_engine_start("a quantised export", time.monotonic() - began)
    found = json.loads(capsys.readouterr().out)
    with read_run(shipped) as (store, study):
        best = held_out_estimates(
            store,
            study.id,
            json.loads((shipped / "summary.json").read_text())["best"]["trial"],
            trials=store.trials(study.id),
            objectives=ResolvedStudy.of(study).objectives,
        )
    assert best is not None
    assert found["holdout"].keys() == {name for name in best if name in found["holdout"]} != set()
    for name, scores in found["holdout"].items():
        assert scores["merge"]["value"] == pytest.approx(best[name].value)
        assert scores["quantised"]["samples"] == scores["merge"]["samples"] == best[name].samples
        difference = scores["quantised"]["value"] - scores["merge"]["value"]
        assert scores["difference"]["value"] == pytest.approx(difference)
        # Kernels round differently on other CPUs: of 20 samples, a few more or less are right. A model that computes
        # nothing would have 0.6 to 0.9 less.
        low, high = scores["difference"]["ci95"]
        assert low <= 0 <= high, "not told apart from the merge"
        assert abs(difference) < 0.25
    assert any(scores["difference"]["ci95"] != [0, 0] for scores in found["holdout"].values())
    document = json.loads((tmp_path / "q" / "recipe.json").read_text())
    assert document["quantisation"]["holdout"] == found["holdout"]
    assert document["digest"] == json.loads((shipped / "export" / "recipe.json").read_text())["digest"]
    card = (tmp_path / "q" / "README.md").read_text()
    assert all(f"| {name} | {scores['merge']['value']:.4f} [" in card for name, scores in found["holdout"].items())
    assert not list(tmp_path.glob(".q.*")), "the model in full was removed"
    repository = hub.repositories["owner/best"]
    assert repository.commits[repository.head] == {each.name: each.read_bytes() for each in (tmp_path / "q").iterdir()}
    assert main([*command]) == 2, "the directory is not empty"


def test_export_gives_stored_samples(shipped: Path, tmp_path: Path) -> None:
    """Transformers gives the stored samples on an export, whose tensors are the merged ones bit for bit."""
    with read_run(shipped) as (store, study):
        preflight = examine(load_study(shipped.parent / "study.json"))
        searched = [trial for trial in store.trials(study.id) if trial.origin is Origin.SEARCH]
        stored = {trial.number: store.samples(study.id, trial.recipe.digest, Split.SEARCH) for trial in searched}
        exports = {n: export_trial(store, study, str(n), tmp_path / str(n)) for n in stored}
    methods = {merge.method for trial in searched for merge in trial.read_recipe().merges()}
    assert methods >= {"task_arithmetic", "ties", "slerp", "linear"}
    bank = Bank(preflight.models.family)
    spans = tuple(Span(name, task, 0, SHIPPED_SAMPLES) for name, task in preflight.tasks.search.items())
    num_samples = 0
    differences: list[SampleDifference] = []
    for trial in searched:
        out = exports[trial.number]
        written = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for name, tensor in merged_tensors(trial.read_recipe(), bank, torch.float32):
            assert torch.equal(written.pop(name), tensor), name
        assert not written
        report = verify(
            trial.recipe.digest,
            str(out),
            preflight.engine_options,
            samples=stored[trial.number],
            spans=spans,
            dtype="float32",
            engine_logprobs={},
        )
        num_samples += report.num_samples
        differences += report.differences
    print(f"\n{num_samples - len(differences)} of {num_samples} samples are equal; the others: {differences}")
    assert num_samples >= 1200
    assert len(differences) <= 0.005 * num_samples
    assert not any(difference.is_beyond for difference in differences)


# -- fake scorer, real Ray -----------------------------------------------------------------------------------------


def fake(study: Path, out: Path, **settings: Any) -> list[str | Path]:
    """Command line of `mergesearch` with the fake scorer."""
    return [sys.executable, "-m", "tests.end_to_end.fake_run", json.dumps(settings), "run", study, "--out", out]


def test_a_run_resumes_after_ctrl_c_and_after_a_kill(small: Path, tmp_path: Path, ray_address: str) -> None:
    """Neither Ctrl-C nor SIGKILL of the process group changes the trials, and no process survives the kill."""
    out = tmp_path / "run"
    slow = fake(small, out, sample_delay_s=0.01, in_flight=3)
    with started(slow, directory=out) as run:
        run.wait_for_rows(9, timeout_s=START_S)
        run.interrupt()
        assert run.wait(timeout_s=60) == 130, run.log
    assert f"interrupted; the same command resumes the study in {out}" in run.log
    assert "Traceback" not in run.log
    assert json.loads((out / "summary.json").read_text())["state"] == "STOPPED"
    interrupted = num_chunks(out)
    assert 9 <= interrupted < 30

    with started(slow, directory=out) as run:
        run.wait_for_rows(interrupted + 5, timeout_s=START_S)
        processes = run.processes()
        run.kill_group()
    check_gone(processes, since=time.monotonic(), timeout_s=WORKING_GONE_S, working_only=True)

    killed = num_chunks(out)
    with started(fake(small, out), directory=out, ray_address=ray_address) as run:
        assert run.wait(timeout_s=START_S) == 0, run.log
    assert killed < num_chunks(out), "the kill came too late to matter"
    with read_run(out) as (store, study):
        assert study.state is JobState.COMPLETE
        assert trial_list(store, study.id) == undisturbed(small, tmp_path / "undisturbed")
    check_gone(processes, since=time.monotonic(), timeout_s=ALL_GONE_S)


def test_run_begins_with_the_results_of_an_earlier_run(small: Path, tmp_path: Path, ray_address: str) -> None:
    """A run with a warm start receives the earlier run's results, and has only its own trials, here no baselines."""
    first, out = tmp_path / "first", tmp_path / "second"
    with started(fake(small, first), directory=first, ray_address=ray_address) as run:
        assert run.wait(timeout_s=START_S) == 0, run.log
    document = load_study(small).canonical()
    document["search"] = {"algorithm": "es", "max_trials": 3, "baselines": "none", "warm_start": {"dir": str(first)}}
    file = tmp_path / "second.json"
    file.write_text(json.dumps(document))
    with started([*fake(file, out), "--export", "best"], directory=out, ray_address=ray_address) as run:
        assert run.wait(timeout_s=START_S) == 0, run.log
    summary = json.loads((out / "summary.json").read_text())
    with read_run(first) as (store, study):
        told = [trial for trial in store.trials(study.id) if trial.origin is Origin.SEARCH]
        earlier = study.id
    begun = summary["search"]["warm_start"]
    assert (begun["study"], begun["trials"]) == (earlier, len(told))
    assert begun["observations"] == sum(len(trial.rungs) for trial in told)
    report = (out / "report.html").read_text().replace("&#39;", "'")
    assert f"of {len(told)} trials of study 'small' ({earlier})" in report
    with read_run(out) as (store, study):
        assert [trial.origin for trial in store.trials(study.id)] == [Origin.SEARCH] * 3
    assert summary["finding"]["text"].endswith("was not tested: the study scored no baselines.")
    assert (out / "export" / "recipe.json").exists()


def test_model_is_scored_without_a_search(tmp_path: Path, ray_address: str) -> None:
    """`evaluate` scores a single model; the same command with more benchmarks scores what is missing."""
    data, file, out = tmp_path / "data.jsonl", tmp_path / "more.json", tmp_path / "run"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(20)))
    spec = {"task": {"file": str(data)}, "metric": "exact_match"}
    model = family_dir() / "experts" / "math"
    command: list[str | Path] = [sys.executable, "-m", "tests.end_to_end.fake_run", "{}", "evaluate", model]
    for names in (["sums"], ["sums", "others"]):
        file.write_text(json.dumps({"benchmarks": [{"name": name, **spec} for name in names]}))
        words = [*command, "--benchmarks", file, "--out", out]
        with started(words, directory=out, ray_address=ray_address) as run:
            assert run.wait(timeout_s=START_S) == 0, run.log
        assert "Traceback" not in run.log, run.log
        summary = json.loads((out / "summary.json").read_text())
        (row,) = summary["benchmarks"]["rows"]
        assert sorted(row["values"]) == sorted(names)
        with read_run(out) as (store, study):
            assert [trial.origin for trial in store.trials(study.id)] == [Origin.USER]
            assert sum(chunk.num_samples for chunk in store.evidence(study.id)) == 20 * len(names)


def test_study_of_failing_candidates_fails(small: Path, tmp_path: Path, ray_address: str) -> None:
    """A study whose candidates all fail ends as failed and says why."""
    out = tmp_path / "run"
    with started(fake(small, out, fails_above=-1.0), directory=out, ray_address=ray_address) as run:
        assert run.wait(timeout_s=START_S) == 1, run.log
    reason = "no trial was scored at the full budget"
    assert f"mergesearch: {reason}" in run.log
    assert "Traceback" not in run.log
    summary = json.loads((out / "summary.json").read_text())
    assert summary["state"] == JobState.FAILED
    assert summary["reason"].startswith(reason)
    assert "fake: coefficient" in summary["reason"]
    assert set(summary["trials"]) == {TrialState.FAIL}
    assert summary["best"] is None


def test_disagreement_fails_every_run(small: Path, tmp_path: Path, ray_address: str) -> None:
    """A study whose stored answers differ from those of transformers fails whenever it is run."""
    out = tmp_path / "run"
    for attempt in (1, 2):
        with started(fake(small, out, garbles=attempt == 1), directory=out, ray_address=ray_address) as run:
            assert run.wait(timeout_s=START_S) == 1, run.log
        assert "Traceback" not in run.log, run.log
        summary = json.loads((out / "summary.json").read_text())
        assert summary["state"] == JobState.FAILED
        assert summary["verification"]["status"] == "disagreement"
        best = summary["best"]["trial"]
        reason = f"verification: trial {best}: 16 of 16 samples differ between the engine and transformers"
        assert summary["reason"].startswith(reason)
        assert run.log.count(f"mergesearch: {reason}") == attempt
        assert f"Verifying trial {best} with transformers" in run.log
        with read_run(out) as (_, study):
            assert (study.state, study.attempt) == (JobState.FAILED, attempt)
