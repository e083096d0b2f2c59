"""Trainings on several ranks (gloo), for tests of shards: one process imports the trainer and forks into ranks.

Run as `python -m tests.workers.training.finetuning.ranks DIRECTORY`, where DIRECTORY has a base model, an expert of it,
data, and a ViT and a CLIP model with images. The results of training NAME on N ranks are in the directory NAME-N. No
test is here.
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

import torch
import torch.distributed as dist

from workers.training.finetuning import checkpoints
from workers.training.finetuning.evaluation import Evaluator
from workers.training.finetuning.history import CHECKPOINTS
from workers.training.finetuning.models import check_packing, load_model
from workers.training.finetuning.result import sources_of, write_expert
from workers.training.finetuning.sharding import unread_model
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.finetuning.trainer import check, train
from workers.training.mergopt.optimizer import MergOPT

__all__ = ["KILLED_AT", "OBJECTIVE", "TRAININGS", "spec_of"]

OBJECTIVE = {"name": "sums", "task": {"file": "data.jsonl", "max_tokens": 4}, "metric": "exact_match"}
SHORT = {"steps": 3, "checkpoint_every": 3}
LORA: dict[str, Any] = {"adapter": {"rank": 4}, "training": {**SHORT, "precision": "bfloat16"}}

# Trainings on one and on two ranks, as differences from the document of `spec_of`.
TRAININGS: dict[str, dict[str, Any]] = {
    "mergopt": {"evaluation": {"every": 2, "samples": 4, "objectives": [OBJECTIVE]}},
    "in_layers": {"method": {"in_layers": True}, "training": {**SHORT, "gradient_checkpointing": True}},
    "task_vectors": {"method": {"noise": "task_vectors", "fit_to": ["expert"]}, "training": SHORT},
    "asam": {
        "method": {"kind": "asam", "optimizer": "sgd"},
        "training": {**SHORT, "layers": [1], "learning_rate": 0.05},
    },
    "lora": LORA,
    "tangent": {"method": {"kind": "tangent"}, "training": SHORT},
    "images": {
        "base": "vit",
        "data": {"file": None, "images": "images"},
        "evaluation": {
            "every": 2,
            "samples": 4,
            "objectives": [{"name": "shapes", "task": {"images": "images", "head": "sums"}, "metric": "acc"}],
        },
    },
    "clip": {
        "base": "clip",
        "data": {"file": None, "images": "images"},
        # AdamW would make updates of the rounding in gradients of keys' biases, on which attention does not depend.
        "method": {"optimizer": "sgd"},
        "training": {"learning_rate": 0.1},
        "evaluation": {
            "every": 2,
            "samples": 4,
            "objectives": [{"name": "shapes", "task": {"images": "images", "head": "base"}, "metric": "acc"}],
        },
    },
}

# The step at which a rank of the training "killed" ends by SIGKILL; the last checkpoint is that of step 4.
KILLED_AT = 5


def spec_of(place: Path, **changes: Any) -> FinetuneSpec:
    """A training of 6 updates of 5 rows each, which two ranks cannot share evenly."""
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


def fork(place: Path, size: int, work: Callable[[int], Any], *, fails: bool = False) -> None:
    """Call `work` with the rank in `size` new processes of a process group; if one dies, the others end.

    Raises RuntimeError if a process fails and `fails` is False, or if none fails and it is True.
    """
    meeting = place / f"meeting-{len(list(place.glob('meeting-*')))}"
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            status = 1
            try:
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
    alive, is_failed = set(pids), False
    while alive:
        pid, status = os.wait()
        alive.discard(pid)
        if status:
            is_failed = True
            for other in alive:
                os.kill(other, signal.SIGKILL)
    if is_failed != fails:
        raise RuntimeError("a rank failed" if is_failed else "no rank failed")


def run(place: Path, trainings: Mapping[str, Mapping[str, Any]], size: int, *, killed: bool = False) -> None:
    """Run trainings one after another on `size` ranks; with `killed`, kill the last rank at step KILLED_AT."""

    def work(rank: int) -> None:
        def report(line: Mapping[str, Any]) -> None:
            if killed and rank == size - 1 and line["step"] == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)

        for name, changes in trainings.items():
            out = place / f"{name}-{size}"
            out.mkdir(exist_ok=True)
            facts = train(spec_of(place, **changes), out, report=report)
            (out / f"facts-{rank}.json").write_text(json.dumps(facts))

    fork(place, size, work, fails=killed)


def measure(place: Path, size: int) -> None:
    """Write the bytes of memory that two updates of the model `large` took in each rank.

    The first number is the rank's own memory: weights, gradients and moments. The second number is the peak of all
    memory, with the mapped files of the base model.
    """

    def work(rank: int) -> None:
        before = _memory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak of this process begins anew
        spec = spec_of(place, base="large", method={"kind": "adamw"}, training={"steps": 3, "batch": 2})
        out = place / f"large-{size}"
        out.mkdir(exist_ok=True)

        def report(line: Mapping[str, Any]) -> None:
            if line["step"] == 2:  # moments of AdamW exist since the first update
                now = _memory()
                used = [now["RssAnon"] - before["RssAnon"], now["VmHWM"] - before["VmRSS"]]
                (out / f"memory-{rank}.json").write_text(json.dumps(used))
                os._exit(0)

        train(spec, out, report=report)

    fork(place, size, work)


def _memory() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    return {key: int(status.split(f"{key}:")[1].split()[0]) << 10 for key in ("VmHWM", "VmRSS", "RssAnon")}


def dtypes(place: Path) -> None:
    """Write the dtypes of trained and of other weights, in a LoRA training on two ranks."""

    def work(rank: int) -> None:
        model = load_model(spec_of(place, **LORA), place / "base", torch.device("cpu"), is_sharded=True)
        found: dict[str, set[str]] = {"trained": set(), "frozen": set()}
        for name, parameter in model.module.named_parameters():
            found["trained" if name in model.trained else "frozen"].add(str(parameter.dtype))
        (place / f"dtypes-{rank}.json").write_text(json.dumps({key: sorted(each) for key, each in found.items()}))

    fork(place, 2, work)


def warm_up(place: Path) -> None:
    """Import the modules of trainings once for all ranks, without a backward pass, after which torch cannot fork."""
    import torch._dynamo

    import workers.training.mergopt.kernel  # noqa: F401

    torch.set_num_threads(1)
    spec = spec_of(place, **TRAININGS["mergopt"])
    check(spec)
    model = load_model(spec, place / "base", torch.device("cpu"))
    Evaluator(spec.evaluation, place / "base", model.module, max_length=64, seed=0) if spec.evaluation else None
    load_model(spec_of(place, **LORA), place / "base", torch.device("cpu"))
    unread_model(place / "base", torch.float32)
    optimizer = MergOPT(torch.optim.AdamW(model.trained.values()))
    with optimizer.offset(), torch.no_grad():
        check_packing(model.module)
    checkpoints.save(place / "warm", step=1, trained=model.trained, optimizer=optimizer, loss=0.0)
    write_expert(
        spec,
        place / "base",
        model.module,
        place / "warm" / "model",
        sources=sources_of(spec, place / "base"),
        facts={"steps": 1, "loss": 0.0},
        values={},
    )


def main(place: Path) -> None:
    warm_up(place)
    killed: dict[str, dict[str, Any]] = {"killed": {}}
    for size in (1, 2):
        run(place, TRAININGS, size)
    run(place, killed, 2, killed=True)
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
        run(place, killed, size)
    measure(place, 2)
    measure(place, 1)
    dtypes(place)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(Path(sys.argv[1]))
