"""`mergesearch finetune` as users start it: two workers on Ray Train, one of them killed, then the driver; it ends as a
training on one process that nothing happened to."""

from __future__ import annotations

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

from service.jobs.finetune import EXPERT_DIR, SUMMARY_FILE, WRITER_LOCK
from tests.builders import tiny_llama
from workers.training.finetuning.history import METRICS, read_history
from workers.training.finetuning.spec import load_spec
from workers.training.finetuning.trainer import train

STEPS = 60
WAIT_S = 300.0

# Gradients are summed in another order, which AdamW's division enlarges over the steps.
TOLERANCE = 2e-3


def specification(directory: Path) -> Path:
    tiny_llama(directory / "base", layers=3, hidden=64)
    lines = [json.dumps({"prompt": f"{i}+{i}=", "completion": str(2 * i)}) for i in range(400)]
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    file = directory / "spec.yaml"
    document: dict[str, Any] = {
        "name": "sums",
        "base": "base",
        "data": {"file": "data.jsonl", "max_length": 256},
        "method": {"kind": "mergopt", "scale": 0.002},
        "training": {"steps": STEPS, "batch": 16, "micro_batch": 4, "learning_rate": 1e-4, "checkpoint_every": 5},
        "dtype": "float32",
        "workers": 2,
    }
    file.write_text(yaml.safe_dump(document))
    return file


def started(spec: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "service.cli.main", "finetune", str(spec), "--out", str(out)]
    with (spec.parent / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def wait_for_step(process: subprocess.Popen[bytes], out: Path, step: int, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(line["step"] >= step for line in read_history(out / METRICS)):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def runs_on_the_dashboard(log: Path) -> list[str]:
    """The names on the Train page of the Ray that the command says it uses."""
    found = re.search(r"Ray dashboard: (http://[^/]+)", log.read_text())
    assert found is not None
    answer = httpx.get(f"{found[1]}/api/train/v2/runs/v1", timeout=60)
    return [run["name"] for run in answer.raise_for_status().json()["train_runs"]]


@pytest.mark.timeout(900)
def test_a_training_survives_its_worker_and_its_driver(tmp_path: Path) -> None:
    spec, out, log = specification(tmp_path), tmp_path / "out", tmp_path / "log"
    process = started(spec, out)
    wait_for_step(process, out, 8, log)
    assert [name.rpartition("-")[0] for name in runs_on_the_dashboard(log)] == ["sums"]
    first = int((out / WRITER_LOCK).read_text())
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while (out / WRITER_LOCK).read_text() in ("", str(first)):  # Ray Train starts another worker
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    before = len(read_history(out / METRICS))
    wait_for_step(process, out, before + 8, log)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / SUMMARY_FILE).exists()

    again = started(spec, out)
    assert again.wait(timeout=WAIT_S) == 0, log.read_text()
    assert json.loads((out / SUMMARY_FILE).read_text())["steps"] == STEPS
    assert [line["step"] for line in read_history(out / METRICS)] == list(range(1, STEPS + 1))

    (tmp_path / "alone").mkdir()
    train(load_spec(spec), tmp_path / "alone")
    found, expected = (load_file(place / EXPERT_DIR / "model.safetensors") for place in (out, tmp_path / "alone"))
    base = load_file(tmp_path / "base" / "model.safetensors")
    moved = max(float((expected[name] - base[name]).abs().max()) for name in base)
    apart = max(float((expected[name] - found[name]).abs().max()) for name in base)
    assert moved > 1e-3
    assert apart < TOLERANCE * moved
    losses = [[line["loss"] for line in read_history(place / METRICS)] for place in (out, tmp_path / "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    done = started(spec, out)  # it has ended: nothing is started
    assert done.wait(timeout=WAIT_S) == 0
    spec.write_text(spec.read_text().replace("seed: 0", "") + "seed: 5\n")
    other = started(spec, out)
    assert other.wait(timeout=WAIT_S) == 2
    assert "holds another fine-tuning ('sums'), which differs in seed" in log.read_text()
