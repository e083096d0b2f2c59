"""Verification of an export on free GPUs of this machine, in a separate process.

On a CPU in float32, verification of a model with 8B parameters takes a quarter of an hour or more. During this time,
the replica scores nothing. A model that is too large for one GPU is divided over several, by layers. If not enough GPUs
are free, the replica verifies on the CPU. If they hold the merge, but not the keys and values of all samples that are
completed at once, fewer samples are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from workers.errors import InvalidModel
from workers.serving.gpu_shares import has_share, on_share
from workers.types import VerificationReport

__all__ = ["WEIGHT_BYTES", "is_of_gpu", "verification_bytes", "verify_on_free_gpus"]

log = logging.getLogger(__name__)

# Seconds until a process with a GPU must be ready: it imports torch. A GPU of another machine does not help.
START_S = 120.0

# Bytes of each parameter of a merge: its weight in float32, and room for activations and logits of single texts.
WEIGHT_BYTES, ROOM_BYTES = 4, 1


def verification_bytes(num_parameters: int, batch_bytes: int = 0) -> int:
    """Bytes of GPU memory in which a merge of `num_parameters` parameters is verified.

    `batch_bytes` is the memory of the largest batch of samples that are completed at once, beside the weights (function
    `batches.batch_bytes`). Without it, the result is the least memory: batches are halved if they do not fit.
    """
    return WEIGHT_BYTES * num_parameters + max(ROOM_BYTES * num_parameters, batch_bytes)


class GpuVerifier:
    """Ray actor that verifies one export on the devices that Ray has assigned to its process.

    `device` is the kind of device, such as "cuda", and `number` is the number of devices. On "cpu", which tests use,
    memory is not checked. If `share` is not 0, an engine uses the same GPU, and the process may take only this share of
    its memory.
    """

    def __init__(self, device: str, number: int, share: float = 0.0) -> None:
        self._device = device
        self._number = number
        self._share = share

    def num_needed(self, num_parameters: int, batch_bytes: int = 0, num_free: int | None = None) -> int | str:
        """Number of devices that a model with `num_parameters` parameters needs, or the reason why none can be used.

        The number is computed from the memory of the devices that this process may take, and is at least their number.
        `batch_bytes` is the memory of the largest batch of samples. If only `num_free` devices are free, and they hold
        the model but not such a batch, the number is `num_free`, because batches can be halved.
        """
        import torch

        if self._device == "cpu":
            return self._number
        if not torch.cuda.is_available():
            return "PyTorch finds no GPU in the process that Ray gave one"
        memory = [torch.cuda.mem_get_info(index) for index in range(self._number)]
        free = min(min(free, int(self._share * total)) if self._share else free for free, total in memory)
        least, enough = (
            max(self._number, math.ceil(verification_bytes(num_parameters, size) / max(free, 1)))
            for size in (0, batch_bytes)
        )
        return enough if num_free is None or enough <= num_free else max(least, num_free)

    def verify(self, *args: Any, **kwargs: Any) -> VerificationReport:
        """Call the function `verification.verify` with these arguments, on the devices of this process.

        Raises InvalidModel if the model cannot be divided over several devices.
        """
        import torch

        from workers.engines.transformers.backend import float32_model
        from workers.engines.transformers.verification import verify
        from workers.training.model import place

        if self._number == 1:
            return verify(*args, **kwargs, device=self._device)
        directory = args[1]
        model = float32_model(directory)
        place(model, [torch.device(self._device, index) for index in range(self._number)])
        return verify(*args, **{**kwargs, "model": model})


def gpus(number: int) -> Mapping[str, Any]:
    """Ray options that reserve this number of GPUs."""
    return {"num_cpus": 0, "num_gpus": number}


def verify_on_free_gpus(
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    num_parameters: int,
    batch_bytes: int = 0,
    share: float = 0.0,
    device: str = "cuda",
    start_s: float = START_S,
    resources: Callable[[], Mapping[str, float]] | None = None,
    reserved: Callable[[int], Mapping[str, Any]] = gpus,
) -> VerificationReport | None:
    """Verify an export in a Ray actor with free GPUs of this machine; return None if that is not possible.

    - `arguments`, `options`: positional and keyword arguments of the function `verification.verify`; the directory of
      the export must be on this machine
    - `num_parameters`: the number of parameters of the exported model
    - `batch_bytes`: the memory of the largest batch of samples that are completed at once, beside the model
    - `share`: the share of its GPU's memory that the engine of this machine leaves free; 0 for none
    - `device`: the kind of device on which the actor computes
    - `start_s`: the number of seconds within which the actor must be ready
    - `resources`: a function that returns the free resources of this machine; by default Ray is asked
    - `reserved`: Ray options that reserve a number of devices, by default GPUs

    The actor has one GPU if the model and a batch fit into its free memory. Otherwise another actor with as many GPUs
    as they need takes its place, or with all free GPUs if these hold at least the model. If no GPU is free, the actor
    has the share that the engine leaves, if no other actor uses it.
    Returns None if Ray is not running, if not enough GPUs of this machine are free, if the model cannot be divided over
    several GPUs, if a GPU's memory runs out, and if the actor dies or cannot be placed. The caller must then verify the
    export itself. The log has the reason, except if no GPU is free. Raises the errors of the function
    `verification.verify`.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    if not ray.is_initialized():
        return None
    free = (resources or _free_here)().get("GPU", 0)
    num_free = int(free)
    if num_free < 1:
        if not (share and has_share(free)):
            return None
        num_free, reserved = 1, lambda _: {"num_cpus": 0, **on_share(share)}
    else:
        share = 0.0
    number = 1
    actor = _started(device, number, reserved, share)
    try:
        while True:
            asked = actor.num_needed.remote(num_parameters, batch_bytes, num_free)
            if not ray.wait([asked], timeout=start_s)[0]:
                log.warning(
                    "verification got no GPUs of this machine (%d) in %.0f s; the CPU computes", number, start_s
                )
                return None
            needed: int | str = ray.get(asked)
            if isinstance(needed, str):
                log.warning("verification is computed on the CPU: %s", needed)
                return None
            if needed > num_free:
                log.warning(
                    "verification is computed on the CPU: it needs %d GPUs of this machine; free: %d",
                    needed,
                    num_free,
                )
                return None
            if needed == number:
                break
            ray.kill(actor)
            number = needed
            actor = _started(device, number, reserved, share)
        where = "in the share that an engine leaves of its GPU" if share else f"on free GPUs of this machine: {number}"
        log.info("verification runs %s", where)
        report: VerificationReport = ray.get(actor.verify.remote(*arguments, **options))
    except RayTaskError as error:
        if is_of_gpu(error.cause) or isinstance(error.cause, InvalidModel):
            log.warning("verification failed on the GPU, and the CPU computes: %s", error.cause)
            return None
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise
    except RayError as error:  # the actor died or was not placed, or its answer was lost
        log.warning("no process on a GPU verified, and the CPU computes: %s", error)
        return None
    finally:
        ray.kill(actor)
    return report


def _started(device: str, number: int, reserved: Callable[[int], Mapping[str, Any]], share: float) -> Any:
    """Start an actor of the class `GpuVerifier` on this machine; return its handle."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Only a process on this machine can read the export.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    kind: Any = ray.remote(GpuVerifier)
    return kind.options(**reserved(number), max_restarts=0, scheduling_strategy=here).remote(device, number, share)


def _free_here() -> Mapping[str, float]:
    """Free resources of this machine, keyed by name, such as "GPU", as Ray reports them."""
    import ray
    from ray._private.state import available_resources_per_node

    found: Mapping[str, float] = available_resources_per_node().get(ray.get_runtime_context().get_node_id(), {})
    return found


def is_of_gpu(error: BaseException | None) -> bool:
    """Whether an error of PyTorch comes from a GPU, for example because the GPU's memory is full."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")  # of a library, such as cuBLAS
