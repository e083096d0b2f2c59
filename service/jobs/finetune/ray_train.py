"""Training of one expert on Ray Train, whose workers run `workers.training.finetuning` in one directory.

Ray Train replaces a worker that dies, and the new worker continues from the last checkpoint in the expert's directory.
Ray Train's own checkpoints are not used, because they may be incomplete if processes are killed.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.engine_machines import stated_machines
from service.errors import Conflict
from service.jobs.finetune.directory import FAILURE_FILE, RAY_DIR, SUMMARY_FILE, WRITER_LOCK, write_document
from workers.errors import InvalidModel, InvalidTask, TrainingFailed
from workers.file_access import FileAccess
from workers.telemetry import logs
from workers.training.finetuning.history import Report
from workers.training.finetuning.spec import FinetuneSpec, parse_spec

__all__ = ["cluster", "cores_of_each", "fit", "num_side_by_side", "train_here", "trains_on_gpus"]

# Worker groups that may replace a failed one; a failure of the training itself is not retried.
MAX_FAILURES = 5

# Seconds within which the workers of a killed driver end: Ray's processes notice within half a minute.
PREDECESSOR_WAIT_S = 120.0


def cluster() -> Mapping[str, float]:
    """Resources of the connected Ray cluster: the numbers of CPU cores ("CPU") and GPUs ("GPU").

    GPUs of stated machines count also while the machines are not there, each with one core: Ray's autoscaler adds the
    machines when workers ask for them.
    """
    import ray

    resources: dict[str, float] = ray.cluster_resources()
    stated = float(sum(group.num_gpus * group.most for group in stated_machines()))
    return {**resources, **{kind: max(resources.get(kind, 0.0), stated) for kind in ("CPU", "GPU")}}


def num_side_by_side(specs: Sequence[FinetuneSpec], resources: Mapping[str, float], wanted: int | None = None) -> int:
    """Number of experts that train at the same time on a cluster with `resources` (numbers of "CPU" and "GPU").

    `specs` are the experts, and `wanted` is the number that the user asked for. The result is `wanted`, but at most the
    number of experts. If `wanted` is None, the result is the number of experts for whose workers the cluster has GPUs,
    or 1 if workers train on CPU cores.

    Raises Conflict if the cluster has too few GPUs for `wanted` experts at the same time, or too few CPU cores if the
    experts train on CPU cores. Also raises Conflict if the cluster is too small for the workers of a single expert.
    """
    if len(specs) < 2:
        return len(specs)
    workers = max(spec.workers for spec in specs)
    of_each = [trains_on_gpus(spec.workers, resources, spec.device) for spec in specs]  # each may be refused
    has_gpus = all(of_each)
    kind, name = ("GPU", "GPUs") if has_gpus else ("CPU", "CPU cores")
    there = int(resources.get(kind, 0))
    if wanted is None:
        return min(len(specs), there // workers) if has_gpus else 1
    count = min(wanted, len(specs))
    if count * workers > there:
        raise Conflict(
            f"parallel_experts: {wanted} with {workers} workers each need {count * workers} {name}; the cluster has "
            f"{there}; give at most {max(1, there // workers)}"
        )
    return count


def fit(spec: FinetuneSpec, directory: Path, access: FileAccess | None, side_by_side: int = 1) -> None:
    """Train the expert that `spec` describes on Ray Train's workers, which write to `directory`.

    The workers write the trained expert and a summary or, if the training fails, a file with the reason. `access`
    limits the files that evaluation tasks may read; None is no limit. `side_by_side` experts train at the same time,
    and share the CPU cores. Ray must be connected. Raises Conflict if the cluster has too few CPU cores or GPUs for the
    workers.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    has_gpus = trains_on_gpus(spec.workers, cluster(), spec.device)
    # Cores that replicas and other trainings leave free. Without free cores, each worker waits for a core.
    free = min(int(ray.available_resources().get("CPU", 0)), int(ray.cluster_resources().get("CPU", 0)) // side_by_side)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = cores_of_each(spec.workers, free, nodes, has_gpus=has_gpus)
    trainer = TorchTrainer(
        _in_worker,
        train_loop_config={
            "spec": spec.canonical(),
            "directory": str(directory.resolve()),
            "access": None if access is None else asdict(access),
        },
        scaling_config=ScalingConfig(
            num_workers=spec.workers,
            use_gpu=has_gpus,
            resources_per_worker={"CPU": cores} | ({"GPU": 1} if has_gpus else {}),
        ),
        # With a name that was used before, Ray Train would continue from that run's own state.
        run_config=RunConfig(
            name=f"{spec.name}-{uuid.uuid4().hex[:8]}",
            storage_path=str(directory.resolve() / RAY_DIR),
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    trainer.fit()


def cores_of_each(workers: int, free: int, nodes: Sequence[Mapping[str, float]], *, has_gpus: bool) -> int:
    """Number of CPU cores that Ray reserves for each of `workers` training processes, at least 1.

    The processes share the `free` cores of the cluster, as far as the nodes have room for each process. `nodes` has the
    numbers of CPU cores ("CPU") and GPUs ("GPU") of each node. `has_gpus` says whether each process also gets a GPU.
    While the nodes with GPUs are not there, the result is 1, which every node has.
    """

    def num_places(cores: int) -> int:
        gpus = (int(node.get("GPU", 0)) if has_gpus else workers for node in nodes)
        return sum(min(int(node.get("CPU", 0)) // cores, most) for node, most in zip(nodes, gpus, strict=True))

    return next((cores for cores in range(free // workers, 1, -1) if num_places(cores) >= workers), 1)


def trains_on_gpus(workers: int, resources: Mapping[str, float], device: str = "auto") -> bool:
    """Whether the processes that train an expert run on GPUs, on a cluster with the given `resources`.

    `workers` is the number of these processes. `resources` has the numbers of CPU cores ("CPU") and GPUs ("GPU").
    `device` is the option of the specification: with "cpu" the result is False, and with "auto" it is False if the
    cluster has no GPU. Raises Conflict if the cluster has fewer CPU cores than `workers`, or if the processes train on
    GPUs and the cluster has fewer GPUs than `workers`.
    """
    cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if cores < workers:
        raise Conflict(f"workers: {workers}; the cluster has {cores} CPU cores, and each worker needs one")
    if device == "cpu" or (device == "auto" and gpus == 0):
        return False
    if gpus < workers:
        advice = f"give at most {gpus} workers" if gpus else "give device: cpu to train on CPU cores"
        raise Conflict(f"workers: {workers}; the cluster has {gpus} GPUs, and each worker needs one; {advice}")
    return True


def _in_worker(config: Mapping[str, Any]) -> None:
    """Train an expert; Ray Train calls this function in each worker, one process of a torch process group.

    `config` has the keys "spec" (the expert's specification), "directory", and "access" (the files that may be read;
    None is no limit).
    """
    import ray.train
    from ray.train.torch import get_device

    logs.log_in_worker()
    is_writer = ray.train.get_context().get_world_rank() == 0
    spec, directory = parse_spec(config["spec"]), Path(config["directory"])
    access = None if config["access"] is None else FileAccess.of(config["access"])
    # Ray chooses the device: GPUs may be visible to a worker that did not receive one.
    train_here(spec, directory, report=_report, is_writer=is_writer, device=get_device(), access=access)


def train_here(
    spec: FinetuneSpec,
    directory: Path,
    *,
    report: Report,
    is_writer: bool,
    device: Any = None,
    access: FileAccess | None = None,
) -> None:
    """Train the expert that `spec` describes in the current process, alone or together with other processes.

    All processes that train the expert together call this function. `is_writer` is True in exactly one of these
    processes, the writer. The writer first waits until the workers of an earlier driver have ended. At the end, the
    writer writes the summary to `directory`. `report` is called with the step and the metrics, such as the loss, of
    each update and each evaluation. `device` is the torch device; None is the CPU. `access` limits the files that
    evaluation tasks may read; None is no limit.

    A process whose training fails for good writes the reason itself, also if it is not the writer: the failure may be
    in this process only. If there are other processes, it also raises the error, so that Ray Train ends them; the
    processes that replace them find the reason, and return.
    """
    import torch

    from workers.training.finetuning.trainer import train

    if (directory / FAILURE_FILE).exists():
        return
    with _alone(directory) if is_writer else nullcontext():
        try:
            facts = train(spec, directory, report=report, device=device or torch.device("cpu"), access=access)
        except (InvalidModel, InvalidTask, TrainingFailed, torch.OutOfMemoryError) as error:
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
            _write_failure(directory, TrainingFailed(_out_of_memory(spec, error)) if is_out_of_memory else error)
            if spec.workers > 1:  # the others may wait for this process
                raise
            return
        if is_writer:
            write_document(directory / SUMMARY_FILE, {"name": spec.name, "method": spec.method.kind, **facts})


def _write_failure(directory: Path, error: Exception) -> None:
    write_document(directory / FAILURE_FILE, {"error": type(error).__name__, "message": str(error)})


def _out_of_memory(spec: FinetuneSpec, error: Exception) -> str:
    return (
        f"{spec.name}: the GPU ran out of memory ({str(error).splitlines()[0]}); a smaller training.micro_batch "
        f"(now {spec.training.micro_batch}) or data.max_length ({spec.data.max_length}), "
        f"training.gradient_checkpointing: true, more workers or an adapter take less"
    )


def _report(line: Mapping[str, Any]) -> None:
    """Report a line of the training history to Ray Train if the line is an evaluation.

    Lines of training updates are not reported, but are only in the history file: Ray Train's controller accepts one
    report in two seconds, and the workers would wait for it.
    """
    import ray.train

    if "values" in line:
        ray.train.report({**{k: v for k, v in line.items() if k != "values"}, **line["values"]})


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Context in which no other process writes to the training directory `directory`.

    Entering the context waits until the workers of an earlier driver have ended. Raises TimeoutError if such a worker
    still runs after 120 s.
    """
    with (directory / WRITER_LOCK).open("w") as file:
        deadline = time.monotonic() + PREDECESSOR_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{directory}: a worker of an earlier run still writes here") from error
                time.sleep(0.2)
        file.write(str(os.getpid()))
        file.flush()
        yield
