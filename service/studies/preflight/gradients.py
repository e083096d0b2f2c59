"""The device on which a study computes gradients: a GPU that no engine uses, or the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from search_spaces.study.file import Study
from service.disk import gib
from service.engine_machines import EngineMachines
from service.studies.preflight.resources import MemoryPlan, gradient_model_bytes, gradient_value_bytes
from workers.engines.vllm.memory import usable_gpu_bytes
from workers.models.family import ResolvedFamily
from workers.training.memory import activation_bytes

__all__ = ["GradientPlace", "gradient_gpu_bytes", "gradient_place", "reduction_bytes"]

# Tokens of one forward pass (`workers.training.gradients.MAX_TOKENS`); a longer text is read alone.
PASS_TOKENS = 16_384
# Bytes of the float32 copies of a chunk of gradient, base, expert and difference (`workers.training.reduction.CHUNK`).
REDUCTION_CHUNK_BYTES = 6 * 4 * (1 << 22)


@dataclass(frozen=True)
class GradientPlace:
    """The device on which a study computes gradients, and whether activations are recomputed there.

    If it is a GPU, no engine uses it. `recomputes` says whether activations are computed twice to save memory. `reason`
    says in words why this device was chosen; it is "" if no machine has a GPU.
    """

    device: Literal["cuda", "cpu"]
    recomputes: bool = False
    reason: str = ""


def gradient_place(
    study: Study,
    sources: ResolvedFamily,
    machines: Sequence[EngineMachines],
    *,
    plan: Callable[[GradientPlace | None], MemoryPlan],
    max_layers: int = 0,
) -> tuple[GradientPlace | None, str]:
    """Choose the device on which a study computes gradients: a GPU without an engine, else the CPU.

    A GPU is chosen if it has no engine, and if model, gradients and activations fit into its memory. If they fit only
    with recomputed activations, activations are recomputed. Otherwise the CPU is chosen, if the host's memory has room
    for engines and gradients. If the study does not even fit into the host's memory without gradients, the CPU is
    chosen too: another check reports this lack.

    `sources` are the study's models, and `machines` the groups of machines that can run engines. `plan` computes the
    memory of the study with gradients on a device, or without gradients for None. `max_layers` is the number of layers
    of the longest merge if merges have any number of layers, else 0. Returns the choice and "", or None and the reason
    why no device fits.
    """
    has_gpus = any(group.num_gpus for group in machines)
    why = ""
    if has_gpus:
        free = sum(group.num_gpus * group.most for group in machines) - study.engine.num_gpus
        why = f"engines use all {study.engine.num_gpus} GPUs"
        if free > 0:
            place, why = _on_gpu(sources, machines, gradient_value_bytes(study, "cuda"), max_layers)
            if place is not None and plan(place).fits:
                return place, ""
    on_cpu = GradientPlace("cpu", reason=f"the CPU computes them, as {why}" if why else "")
    with_gradients = plan(on_cpu)
    if with_gradients.fits or not plan(None).fits:
        return on_cpu, ""
    lack = (
        f"they need {gib(with_gradients.gradient_bytes)} of memory beside the engines, "
        f"{gib(with_gradients.needed_bytes)} in all, and {gib(with_gradients.available_bytes or 0)} are available"
    )
    return None, lack + (f"; {why}" if why else "")


def _on_gpu(
    sources: ResolvedFamily, machines: Sequence[EngineMachines], value_bytes: int, max_layers: int
) -> tuple[GradientPlace | None, str]:
    """Plan gradients on a GPU that has no engine; return (device, ""), or (None, reason) if they do not fit there.

    `sources` are the study's models. `machines` are the groups of machines, whose smallest GPU counts. `value_bytes` is
    the size of a number in the gradients' dtype. `max_layers` is the number of layers of the longest merge if merges
    have any number of layers, else 0.
    """
    known = [group.gpu_bytes for group in machines if group.num_gpus and group.gpu_bytes is not None]
    if not known:
        reason = "a GPU without an engine computes them; its memory is not known, so activations are computed twice"
        return GradientPlace("cuda", recomputes=True, reason=reason), ""
    total = min(known)  # Ray may place the gradients on any of them
    room = usable_gpu_bytes(total, total)
    needed = 0
    for recomputes in (False, True):
        needed = _bytes_on_gpu(sources, value_bytes, max_layers, recomputes=recomputes)
        if needed <= room:
            twice = ", with activations computed twice" if recomputes else ""
            reason = f"a GPU without an engine computes them in {gib(needed)} of its {gib(total)}{twice}"
            return GradientPlace("cuda", recomputes=recomputes, reason=reason), ""
    return None, f"they need {gib(needed)} of a GPU, which has {gib(total)}"


def gradient_gpu_bytes(study: Study, sources: ResolvedFamily, place: GradientPlace, *, max_layers: int = 0) -> int:
    """Bytes of GPU memory for computing a study's gradients on the device that `place` names; 0 for the CPU.

    `sources` are the study's models. `max_layers` is the number of layers of the longest merge if merges have any
    number of layers, else 0.
    """
    if place.device == "cpu":
        return 0
    return _bytes_on_gpu(sources, gradient_value_bytes(study, "cuda"), max_layers, recomputes=place.recomputes)


def _bytes_on_gpu(sources: ResolvedFamily, value_bytes: int, max_layers: int, *, recomputes: bool) -> int:
    settings = dict(sources.base.settings)
    settings["num_hidden_layers"] = max(int(settings["num_hidden_layers"]), max_layers)
    activations = activation_bytes(settings, PASS_TOKENS, value_bytes, recomputes=recomputes)
    return gradient_model_bytes(sources, value_bytes, max_layers=max_layers) + activations + reduction_bytes(sources)


def reduction_bytes(sources: ResolvedFamily) -> int:
    """Peak GPU memory, in bytes, to convert the gradient of one merged tensor into derivatives of its coefficients.

    The tensors of all `sources` from which the tensor is merged are copied to the GPU, in their stored dtypes; the
    estimate takes the largest tensor of each model. Differences are computed in float32, a part of the tensor at a
    time.
    """
    largest = max((math.prod(header.shape) for header in sources.base.tensors.values()), default=0)
    copied = 0
    for view in sources.views.values():
        # A tensor that an adapter changes is float32, and so is the product of which it is the sum.
        copied += 8 * largest if view.base is not None else max(tensor.num_bytes for tensor in view.own)
    return copied + REDUCTION_CHUNK_BYTES
