"""Trainings on several ranks (gloo), for tests of shards: one process imports the trainer, and forks into ranks.

Run as `python -m tests.workers.training.finetuning.ranks DIRECTORY`, where DIRECTORY has a base model, an expert of it
and data. The results of training NAME on N ranks are in the directory NAME-N. No test is here.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from workers.training.finetuning import checkpoints
from workers.training.finetuning.history import CHECKPOINTS
from workers.training.finetuning.models import load_model
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.finetuning.trainer import train

__all__ = ["KILLED_AT", "OBJECTIVE", "TRAININGS", "spec_of"]

OBJECTIVE = {"name": "sums", "task": {"file": "data.jsonl", "max_tokens": 4}, "metric": "exact_match"}
LORA: dict[str, Any] = {"adapter": {"rank": 4}, "training": {"precision": "bfloat16"}}

# What is trained on one and on two ranks, as differences from `spec_of`'s document.
TRAININGS: dict[str, dict[str, Any]] = {
    "mergopt": {"evaluation": {"every": 2, "samples": 4, "objectives": [OBJECTIVE]}},
    "in_layers": {"method": {"in_layers": True}, "training": {"gradient_checkpointing": True}},
    "task_vectors": {"method": {"noise": "task_vectors", "fit_to": ["expert"]}},
    "asam": {"method": {"kind": "asam", "optimizer": "sgd"}, "training": {"layers": [1]}},
    "lora": LORA,
    "tangent": {"method": {"kind": "tangent"}},
}

# The step at which a rank of the training "killed" ends by SIGKILL; the last checkpoint is that of step 4.
KILLED_AT = 5


def spec_of(place: Path, **changes: Any) -> FinetuneSpec:
    """A training of 6 updates of 5 rows each, which are not divided evenly over two ranks."""
    document: dict[str, Any] = {
        "name": "sums",
        "base": "base",
        "data": {"file": "data.jsonl", "max_length": 64},
        "method": {"kind": "mergopt", "scale": 0.01},
        "training": {"steps": 6, "batch": 5, "micro_batch": 2, "learning_rate": 0.003, "checkpoint_every": 2},
        "dtype": "float32",
    }
    for key, value in changes.items():
        document[key] = {**document.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_spec(document, place)


def fork(place: Path, size: int, work: Callable[[int], Any]) -> None:
    """Call `work` with the rank in `size` new processes of a process group; one that dies ends the others."""
    meeting = place / f"meeting-{len(list(place.glob('meeting-*')))}"
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                if size > 1:
                    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
                else:
                    meeting.touch()
                work(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        pids.append(pid)
    alive = set(pids)
    while alive:
        pid, status = os.wait()
        alive.discard(pid)
        if status:
            for other in alive:
                os.kill(other, signal.SIGKILL)
            if not os.WIFSIGNALED(status):
                raise RuntimeError("a rank failed")


def run(place: Path, name: str, size: int, *, killed: bool = False, **changes: Any) -> None:
    out = place / f"{name}-{size}"
    out.mkdir(exist_ok=True)

    def work(rank: int) -> None:
        def report(line: Mapping[str, Any]) -> None:
            if killed and rank == size - 1 and line["step"] == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)

        facts = train(spec_of(place, **changes), out, report=report)
        (out / f"facts-{rank}.json").write_text(json.dumps(facts))

    fork(place, size, work)


def measure(place: Path, size: int) -> None:
    """Write the bytes by which training the model `large` raised each rank's memory at most, without evaluation."""

    def work(rank: int) -> None:
        before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # the peak of this process begins anew
        spec = spec_of(place, base="large", method={"kind": "adamw"}, training={"steps": 2})
        out = place / f"large-{size}"
        out.mkdir(exist_ok=True)
        peaks = []
        train(spec, out, report=lambda line: peaks.append(_peak()) if line["step"] == 2 else None)
        (out / f"peak-{rank}").write_text(str(peaks[0] - before))

    fork(place, size, work)


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def dtypes(place: Path) -> None:
    """Write the dtypes of the weights of a LoRA training on two ranks: of trained ones, and of the others."""

    def work(rank: int) -> None:
        model = load_model(spec_of(place, **LORA), place / "base", torch.device("cpu"), is_sharded=True)
        found: dict[str, set[str]] = {"trained": set(), "frozen": set()}
        for name, parameter in model.module.named_parameters():
            found["trained" if name in model.trained else "frozen"].add(str(parameter.dtype))
        (place / f"dtypes-{rank}.json").write_text(json.dumps({key: sorted(each) for key, each in found.items()}))

    fork(place, 2, work)


def main(place: Path) -> None:
    for name, changes in TRAININGS.items():
        for size in (1, 2):
            run(place, name, size, **changes)
    run(place, "killed", 2, killed=True)
    newest = checkpoints.latest(place / "killed-2" / CHECKPOINTS)
    assert checkpoints.step_of(newest) == 4
    # What a killed writer of the next checkpoint leaves must not become a part of it.
    partial = place / "killed-2" / CHECKPOINTS / ".step-00000006.checkpoint.partial" / "model"
    shutil.copytree(newest or place, partial)
    for source in (partial.parent, place / "killed-2" / CHECKPOINTS / "step-00000004"):
        for file in source.rglob("shard-00002*"):
            shutil.copyfile(file, partial / "shard-00003-model-00001-of-00001.safetensors")
    for size in (1, 3):
        shutil.copytree(place / "killed-2", place / f"killed-{size}")
    for size in (1, 2, 3):
        run(place, "killed", size)
    measure(place, 2)
    measure(place, 1)
    dtypes(place)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(Path(sys.argv[1]))
