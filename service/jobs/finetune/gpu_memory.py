"""Check before a training starts that it fits into the memory of the GPUs on which its workers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from service.engine_machines import stated_machines
from service.errors import Conflict
from workers.engines.vllm.startup.gpus import smallest_gpu_bytes
from workers.models.checkpoints import open_checkpoint
from workers.models.remote import locate
from workers.training.finetuning.memory_plan import GIB, USABLE, WORKERS, TrainingMemory, training_memory
from workers.training.finetuning.spec import Adapter, FinetuneSpec

__all__ = ["check_gpu_memory", "largest_gpu_bytes"]


def largest_gpu_bytes(num_gpus: int) -> int | None:
    """Memory in bytes of the largest GPU that a worker may get in a cluster of `num_gpus` GPUs; None if it is unknown.

    The memory is that of the stated machines. Without stated machines with GPUs, it is that of this machine's GPUs,
    if the cluster has no others.
    """
    if groups := [group for group in stated_machines() if group.num_gpus]:
        sizes = [group.gpu_bytes for group in groups if group.gpu_bytes is not None]
        return max(sizes) if len(sizes) == len(groups) else None
    import torch

    return smallest_gpu_bytes() if 0 < num_gpus <= torch.cuda.device_count() else None


def check_gpu_memory(spec: FinetuneSpec, capacity: int) -> None:
    """Check that the training `spec` fits into the usable part of GPUs with `capacity` bytes, one for each worker.

    Activations count as computed twice where the training may do so. Raises Conflict with the planned memory, and with
    changes of the specification that fit.
    """
    base = open_checkpoint(locate(spec.base))

    def plan(spec: FinetuneSpec) -> TrainingMemory:
        recomputes = spec.training.gradient_checkpointing is not False and spec.method.kind != "tangent"
        is_bfloat16 = spec.training.precision != "float32"
        return training_memory(spec, base, is_bfloat16=is_bfloat16, recomputes=recomputes)

    def fits(spec: FinetuneSpec) -> bool:
        return plan(spec).total <= USABLE * capacity

    if not fits(spec):
        ways = " or ".join(_ways(spec, fits))
        raise Conflict(
            f"{spec.name}: training takes {plan(spec).text()} on each of {spec.workers} GPUs, and may use "
            f"{USABLE * capacity / GIB:.1f} of {capacity / GIB:.1f} GiB" + (f"; what fits is {ways}" if ways else "")
        )


def _ways(spec: FinetuneSpec, fits: Callable[[FinetuneSpec], bool]) -> Iterator[str]:
    """Yield single changes of the specification with which the training fits, as `fits` says."""
    training, kind, adapter = spec.training, spec.method.kind, spec.adapter

    def with_training(**options: int | str) -> FinetuneSpec:
        return spec.model_copy(update={"training": training.model_copy(update=options)})

    if training.gradient_checkpointing is False and fits(with_training(gradient_checkpointing="auto")):
        yield "training.gradient_checkpointing: auto"
    rows = next(
        (rows for rows in (4, 2, 1) if rows < training.micro_batch and fits(with_training(micro_batch=rows))), 0
    )
    if rows:
        yield f"training.micro_batch: {rows}"
    if kind != "tangent" and (adapter is None or adapter.base_precision != "nf4"):
        more = (count for count in WORKERS if spec.workers < count <= training.batch)
        if workers := next((count for count in more if fits(spec.model_copy(update={"workers": count}))), 0):
            yield f"workers: {workers}"
    if kind == "tangent" or training.layers is not None:
        return
    if adapter is None and fits(spec.model_copy(update={"adapter": Adapter()})):
        yield "an adapter"
    elif kind in ("adamw", "sgd") and spec.workers == 1:
        coarse = (adapter or Adapter()).model_copy(update={"base_precision": "nf4"})
        if coarse != adapter and fits(spec.model_copy(update={"adapter": coarse})):
            yield "an adapter with base_precision: nf4"
