"""Verification of an export on a free GPU of this machine, in a separate process.

On a CPU in float32, verification of a model with 8B parameters takes a quarter of an hour or more. During this time,
the replica scores nothing. If no GPU is free, the replica verifies on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from workers.types import VerificationReport

__all__ = ["BYTES_PER_PARAMETER", "verify_on_free_gpu"]

log = logging.getLogger(__name__)

# Seconds until a process with a GPU must be ready: it imports torch. A GPU of another machine does not help.
START_S = 120.0

GPU: Mapping[str, Any] = {"num_cpus": 0, "num_gpus": 1}

# Float32 weights, and room for activations and logits.
BYTES_PER_PARAMETER = 5


class GpuVerifier:
    """Ray actor that verifies one export on the device that Ray has assigned to its process.

    `device` is the device, such as "cuda". On "cpu", which tests use, memory is not checked.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def lack(self, num_parameters: int) -> str | None:
        """Reason why a model with `num_parameters` parameters cannot be verified on this device; None if it can be."""
        import torch

        if self._device == "cpu":
            return None
        if not torch.cuda.is_available():
            return "PyTorch finds no GPU in the process that Ray gave one"
        free, _ = torch.cuda.mem_get_info()
        needed = BYTES_PER_PARAMETER * num_parameters
        return (
            None if needed <= free else f"{needed / 2**30:.1f} GiB are needed on the GPU, {free / 2**30:.1f} are free"
        )

    def verify(self, *args: Any, **kwargs: Any) -> VerificationReport:
        """Call the function `verification.verify` with these arguments, on the device of this process."""
        from workers.engines.transformers.verification import verify

        return verify(*args, **kwargs, device=self._device)


def verify_on_free_gpu(
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    num_parameters: int,
    device: str = "cuda",
    start_s: float = START_S,
    resources: Callable[[], Mapping[str, float]] | None = None,
    reserved: Mapping[str, Any] = GPU,
) -> VerificationReport | None:
    """Verify an export in a Ray actor with a free GPU of this machine; return None if that is not possible.

    - `arguments`, `options`: positional and keyword arguments of the function `verification.verify`; the directory of
      the export must be on this machine
    - `num_parameters`: the number of parameters of the exported model
    - `device`: the device on which the actor computes
    - `start_s`: the number of seconds within which the actor must be ready
    - `resources`: a function that returns the free resources of this machine; by default Ray is asked
    - `reserved`: Ray options with the resources that the actor reserves, by default one GPU

    Returns None if Ray is not running, if no GPU of this machine is free or large enough, if the GPU's memory runs out,
    and if the actor dies or cannot be placed. The caller must then verify the export itself. The log has the reason,
    except if no GPU is free. Raises the errors of the function `verification.verify`.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        return None
    if (resources or _free_here)().get("GPU", 0) < 1:
        return None
    # Only a process on this machine can read the export.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    kind: Any = ray.remote(GpuVerifier)
    actor = kind.options(**reserved, max_restarts=0, scheduling_strategy=here).remote(device)
    try:
        asked = actor.lack.remote(num_parameters)
        if not ray.wait([asked], timeout=start_s)[0]:
            log.warning("no GPU of this machine became free for verification in %.0f s; the CPU computes", start_s)
            return None
        if (lack := ray.get(asked)) is not None:
            log.warning("verification is computed on the CPU: %s", lack)
            return None
        log.info("verification runs on a free GPU")
        report: VerificationReport = ray.get(actor.verify.remote(*arguments, **options))
    except RayTaskError as error:
        if _is_of_gpu(error.cause):
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


def _free_here() -> Mapping[str, float]:
    """Free resources of this machine, keyed by name, such as "GPU", as Ray reports them."""
    import ray
    from ray._private.state import available_resources_per_node

    found: Mapping[str, float] = available_resources_per_node().get(ray.get_runtime_context().get_node_id(), {})
    return found


def _is_of_gpu(error: BaseException | None) -> bool:
    """Whether an error of PyTorch comes from a GPU, for example because the GPU's memory is full."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")  # of a library, such as cuBLAS
