"""`mergesearch finetune` as users start it, with two workers on Ray Train.

One worker is killed, then the driver. The fine-tuning ends as an undisturbed one in one process, and its experts are
merged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from safetensors.torch import load_file

from service.cli.main import main
from service.jobs.finetune.directory import EXPERT_DIR, SUMMARY_FILE, WRITER_LOCK
from service.jobs.search.local_run import read_run
from service.resolved_study import ResolvedStudy
from service.types import JobState
from tests.builders import tiny_llama
from workers.models.family import open_family
from workers.training.finetuning.fleet import EXPERTS, STUDY, load_pipeline
from workers.training.finetuning.history import METRICS, read_history
from workers.training.finetuning.result import TRAINING_FILE
from workers.training.finetuning.trainer import train

STEPS = 60
WAIT_S = 450.0

# Gradients are summed in another order, which AdamW's division enlarges over the steps.
TOLERANCE = 2e-3


def pipeline_file(directory: Path) -> Path:
    """Write a pipeline: an expert that two workers train for a while, a quick one, and the study that merges both."""
    tiny_llama(directory / "base")
    for name, factor in (("sums", 2), ("threes", 3)):
        lines = [json.dumps({"prompt": f"{i}+{i}=", "completion": str(factor * i)}) for i in range(400)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    task = {"file": "sums.jsonl", "answer": "{{completion}}", "max_tokens": 6}
    document: dict[str, Any] = {
        "name": "family",
        "base": "base",
        "data": {"max_length": 256},
        "method": {"kind": "mergopt", "scale": 0.002},
        "training": {"steps": STEPS, "batch": 16, "micro_batch": 4, "learning_rate": 1e-4, "checkpoint_every": 5},
        "dtype": "float32",
        "experts": {
            "sums": {"data": {"file": "sums.jsonl"}, "workers": 2},
            "threes": {
                "data": {"file": "threes.jsonl"},
                "training": {"steps": 2},
                "evaluation": {"samples": 4, "objectives": [{"name": "sums", "task": task, "metric": "exact_match"}]},
            },
        },
        "study": {
            "name": "merge",
            "search_space": {"kind": "lfs", "layer_groups": 1},
            "search": {"algorithm": "random", "max_trials": 2},
            "fidelity": {"scheduler": "none", "max_samples": 8},
            "objectives": [{"name": "sums", "task": task, "metric": "exact_match"}],
            "engine": {"max_model_len": 64},
        },
    }
    file = directory / "pipeline.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(document))))  # written out: YAML would share `task`
    return file


def started(pipeline: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start the command, with the fake scorer for its study."""
    scorer = ["-m", "tests.end_to_end.fake_run", "{}"]
    command = [sys.executable, *scorer, "finetune", str(pipeline), "--out", str(out)]
    with (pipeline.parent / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def wait_for_step(process: subprocess.Popen[bytes], out: Path, step: int, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(line["step"] >= step for line in read_history(out / METRICS)):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def runs_on_the_dashboard(log: Path) -> list[str]:
    """Names of the runs on Ray's dashboard, whose address the command has printed."""
    found = re.search(r"Ray dashboard: (http://[^/]+)", log.read_text())
    assert found is not None
    answer = httpx.get(f"{found[1]}/api/train/v2/runs/v1", timeout=60)
    return [run["name"] for run in answer.raise_for_status().json()["train_runs"]]


@pytest.mark.timeout(900)
def test_pipeline_survives_worker_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipeline survives the death of its worker and of its driver and ends with a merge."""
    pipeline, whole, log = pipeline_file(tmp_path), tmp_path / "out", tmp_path / "log"
    out = whole / EXPERTS / "sums"
    process = started(pipeline, whole)
    wait_for_step(process, out, 8, log)
    first = int((out / WRITER_LOCK).read_text())
    os.kill(first, signal.SIGKILL)
    assert [name.rpartition("-")[0] for name in runs_on_the_dashboard(log)] == ["sums"]
    deadline = time.monotonic() + WAIT_S
    while (out / WRITER_LOCK).read_text() in ("", str(first)):  # Ray Train starts another worker
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    before = len(read_history(out / METRICS))
    wait_for_step(process, out, before + 8, log)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / SUMMARY_FILE).exists()

    again = started(pipeline, whole)
    assert again.wait(timeout=WAIT_S) == 0, log.read_text()
    assert json.loads((out / SUMMARY_FILE).read_text())["steps"] == STEPS
    assert [line["step"] for line in read_history(out / METRICS)] == list(range(1, STEPS + 1))
    check_like_alone(pipeline, out, tmp_path / "alone")
    assert set(json.loads((whole / EXPERTS / "threes" / SUMMARY_FILE).read_text())["values"]) == {"sums"}
    check_lineage(whole, tmp_path)
    assert "<h1>family</h1>" in (whole / "report.html").read_text()

    def ray_session() -> None:
        raise AssertionError("Ray would have been started")

    monkeypatch.setattr("service.jobs.resources.ray_session", ray_session)
    arguments = ["finetune", str(pipeline), "--out", str(whole)]
    assert main(arguments) == 0, "it has ended"
    pipeline.write_text(pipeline.read_text() + "seed: 5\n")
    assert main(arguments) == 2
    assert "holds another fine-tuning ('sums'), which differs in seed" in capsys.readouterr().err


def check_like_alone(pipeline: Path, out: Path, alone: Path) -> None:
    """Check that the expert in `out` equals the expert of an undisturbed training in one process."""
    alone.mkdir()
    train(load_pipeline(pipeline).experts["sums"], alone)
    found, expected = (load_file(place / EXPERT_DIR / "model.safetensors") for place in (out, alone))
    base = load_file(pipeline.parent / "base" / "model.safetensors")
    moved = max(float((expected[name] - base[name]).abs().max()) for name in base)
    apart = max(float((expected[name] - found[name]).abs().max()) for name in base)
    assert moved > 1e-3
    assert apart < TOLERANCE * moved
    losses = [[line["loss"] for line in read_history(place / METRICS)] for place in (out, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def check_lineage(whole: Path, directory: Path) -> None:
    """Check the lineage of the exported merge: experts, base and data, each by the digest of its content."""
    experts = {alias: whole / EXPERTS / alias / EXPERT_DIR for alias in ("sums", "threes")}
    family = open_family(directory / "base", experts)
    prints = {model.alias: model.fingerprint for model in family.models}
    with read_run(whole / STUDY) as (_, study):
        assert study.state is JobState.COMPLETE
        assert ResolvedStudy.of(study).fingerprints == prints
    exported = whole / STUDY / "export"
    assert (exported / "model.safetensors").exists()
    assert json.loads((exported / "recipe.json").read_text())["models"].items() <= prints.items()
    for alias, place in experts.items():
        made = json.loads((place / TRAINING_FILE).read_text())
        data = (directory / f"{alias}.jsonl").read_bytes()
        assert made["sources"] == {"base": prints["base"], "data": hashlib.sha256(data).hexdigest()}
        assert made["specification"]["method"]["kind"] == "mergopt"
