"""Resources that a study needs: GPUs and host memory."""

from __future__ import annotations

import bisect
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from search_spaces.baselines import all_baselines
from search_spaces.errors import Problem
from search_spaces.methods import METHODS
from search_spaces.study.file import Study
from service.disk import gib
from service.engine_machines import EngineMachines, runs_on_gpus, stated_machines
from service.studies.preflight.dtype import DTYPE_BYTES, engine_dtype
from workers.engines.host_memory import total_host_bytes
from workers.engines.vllm.memory import HOST_SHARE, kv_cache_bytes
from workers.engines.vllm.paths.sizes import alignment_bytes, outside_bytes, widest_layer_bytes
from workers.engines.vllm.startup.gpus import smallest_gpu_bytes
from workers.merging.recent import recent_bytes
from workers.models.checkpoints import stored_bytes
from workers.models.family import ResolvedFamily
from workers.training.memory import pass_bytes, reduction_bytes

__all__ = [
    "ENGINE_OVERHEAD_BYTES",
    "GRADIENT_OVERHEAD_BYTES",
    "OF_SEVERAL",
    "PASS_TOKENS",
    "RANK_BYTES",
    "GradientPlace",
    "MemoryPlan",
    "check_devices",
    "check_memory",
    "gradient_activation_bytes",
    "gradient_model_bytes",
    "gradient_value_bytes",
    "machines_for",
    "merges_parts",
    "plan_memory",
    "scored_methods",
    "uses_statistics",
]

# Bytes of an engine's process besides weights, keys and values: interpreter, torch, vLLM and its caches on CPU.
ENGINE_OVERHEAD_BYTES = 2 * 2**30

# Bytes of the gradient actor's process besides its model and its activations: interpreter, torch, transformers.
GRADIENT_OVERHEAD_BYTES = 2**30

# Tokens of one forward pass (`workers.training.gradients.MAX_TOKENS`); a longer text is read alone.
PASS_TOKENS = 16_384

# Statistics of several sources; a bank caches them in a share of its memory (`workers.merging.recent`).
OF_SEVERAL = frozenset({"importance", "variances"})

# Bytes of the rank of each element of an expert, with `engine.rank_cache`.
RANK_BYTES = 2


@dataclass(frozen=True)
class GradientPlace:
    """The device on which a study computes gradients, and whether activations are recomputed there.

    `recomputes` says whether activations are computed twice to save memory. `reason` says in words why this device, and
    these passes, were chosen; it is "" if no machine has a GPU and the CPU's memory limits nothing. `num_gpus` is the
    number of GPUs of one machine over which the layers of the model are divided; it is not used for the CPU. `tokens`
    is the number of tokens of a pass for which memory is planned. `gpu_share` is the share of the GPU's memory that
    gradients take if an engine uses the same GPU; it is 0 if no engine does.
    """

    device: Literal["cuda", "cpu"]
    recomputes: bool = False
    reason: str = ""
    num_gpus: int = 1
    tokens: int = PASS_TOKENS
    gpu_share: float = 0.0


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that a study needs on one machine, and the memory that this machine has available, in bytes.

    `bank_bytes` is host memory for the bank (the source weights), which all engines share. `engine_bytes` is host
    memory of each engine. `replicas` is the number of engines on the machine. `available_bytes` is the available host
    memory; None if it is not known.
    """

    bank_bytes: int
    engine_bytes: int
    replicas: int
    available_bytes: int | None
    """Available host memory in bytes; None if it is not known."""
    gradient_bytes: int = 0
    """Bytes of host memory of the gradient actor; 0 if there is none."""
    statistics_bytes: int = 0
    """The part of `engine_bytes` that holds statistics over several source models, which some merge methods need."""
    gpu_weight_bytes: int = 0
    """Bytes of one merge's weights on each GPU; 0 if the engine has no GPU, or merges have any number of layers."""
    gpu_bytes: int | None = None
    """Memory of each GPU in bytes; None if it is not known."""

    @property
    def needed_bytes(self) -> int:
        # Replicas on one machine map the same files.
        return self.bank_bytes + self.replicas * self.engine_bytes + self.gradient_bytes

    @property
    def has_host_memory(self) -> bool:
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes

    @property
    def has_gpu_memory(self) -> bool:
        return self.gpu_bytes is None or self.gpu_weight_bytes <= self.gpu_bytes

    @property
    def fits(self) -> bool:
        """Whether the study fits into the available memory; True also if the available memory is not known."""
        return self.has_host_memory and self.has_gpu_memory


def check_devices(study: Study, sources: ResolvedFamily | None, problems: list[Problem]) -> None:
    """Check that the models `sources` can be split between GPUs, and that this machine has enough GPUs for a study.

    `sources` is None if the models cannot be read. Each reason why the models cannot be split, and a lack of GPUs, is
    added to `problems`. The number of GPUs is checked only if the study runs on this machine: not on a Ray cluster
    (`RAY_ADDRESS` is set), and not if the machines that run engines are stated (function `stated_machines`).
    """
    import torch

    engine = study.engine
    num_heads = sources.base.settings.get("num_attention_heads") if sources else None
    if num_heads and num_heads % engine.tensor_parallel_size:
        fitting = [str(number) for number in range(1, num_heads + 1) if num_heads % number == 0]
        problems.append(
            Problem(
                "engine.tensor_parallel_size",
                f"{engine.tensor_parallel_size} does not divide the models' {num_heads} attention heads; "
                f"use one of {', '.join(fitting)}",
            )
        )
    if sources and not sources.modality.runs_on_vllm and engine.tensor_parallel_size > 1:
        message = f"{engine.tensor_parallel_size}: engines of the modality {sources.modality.name} use one GPU; use 1"
        problems.append(Problem("engine.tensor_parallel_size", message))
        return
    num_needed = engine.num_gpus
    if "RAY_ADDRESS" in os.environ or stated_machines():
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus and num_needed > num_gpus:
        problems.append(
            Problem(
                "engine",
                f"{engine.replicas} replicas of {engine.tensor_parallel_size} GPUs need {num_needed}; "
                f"this machine has {num_gpus}",
            )
        )
    if not num_gpus and engine.tensor_parallel_size > 1:
        problems.append(
            Problem(
                "engine.tensor_parallel_size",
                f"{engine.tensor_parallel_size} needs as many GPUs, this machine has none; use 1",
            )
        )


def machines_for(
    study: Study, *, known: Sequence[EngineMachines] = (), available_bytes: int | None = None
) -> tuple[EngineMachines, ...]:
    """Groups of machines that can run a study's engines.

    The result contains the groups that are stated for this installation. If no groups are stated, the result contains
    the groups `known`. If no groups are known either, the result is this machine. If some groups have GPUs, groups
    without GPUs are left out. If engines need GPUs and no group has any, the result is one machine with one GPU and
    unknown memory. If `available_bytes` is given, each machine has this memory.
    """
    import torch

    found = stated_machines() or tuple(known)
    if not found:
        num_gpus = torch.cuda.device_count()
        found = (EngineMachines(num_gpus, total_host_bytes(), smallest_gpu_bytes() if num_gpus else None),)
    if available_bytes is not None:
        found = tuple(replace(group, memory_bytes=available_bytes) for group in found)
    with_gpus = tuple(machines for machines in found if machines.num_gpus)
    needs_gpus = runs_on_gpus(on_vllm=study.engine.backend == "vllm") or study.engine.tensor_parallel_size > 1
    if with_gpus or available_bytes is not None or not needs_gpus:
        return with_gpus or found
    return (EngineMachines(num_gpus=1),)


def plan_memory(
    study: Study,
    sources: ResolvedFamily,
    machines: Sequence[EngineMachines],
    *,
    gradients: GradientPlace | None = None,
    max_layers: int = 0,
    aligns: bool = False,
) -> MemoryPlan:
    """Plan the memory of one machine for the source weights (the bank), its engines and the gradient actor.

    Every machine gets the same number of the study's engines. The plan is for the first kind of machine that has room
    for this number of engines; if no machine has room, the plan is for the machine with the most memory, and says how
    much is missing.

    - `sources`: the study's models
    - `machines`: the kinds of machines that can run engines, each with the number of machines
    - `gradients`: the device of the gradient actor and its passes; None if the study computes no gradients
    - `max_layers`: the largest number of layers of a merge if merges may have any number of layers, else 0
    - `aligns`: whether merges may have alignments (matrices that map the output of one model's layer to the input of
      another model's layer), which take memory of their own
    """
    replicas = math.ceil(study.engine.replicas / sum(group.most for group in machines))
    plans = [
        _plan_on(
            group,
            study,
            sources,
            replicas=replicas,
            gradients=gradients,
            max_layers=max_layers,
            aligns=aligns,
        )
        for group in machines
    ]
    fitting = [plan for plan in plans if plan.fits]
    return fitting[0] if fitting else max(plans, key=lambda plan: (plan.available_bytes or 0, plan.gpu_bytes or 0))


def _plan_on(
    machines: EngineMachines,
    study: Study,
    sources: ResolvedFamily,
    *,
    replicas: int,
    gradients: GradientPlace | None,
    max_layers: int,
    aligns: bool,
) -> MemoryPlan:
    modality = sources.modality
    copies = 0 if machines.num_gpus else modality.copies_on_cpu  # in host memory
    element_bytes = DTYPE_BYTES[engine_dtype(study)]
    keys_and_values = 0
    if modality.runs_on_vllm and not machines.num_gpus:
        longest = {**sources.base.settings, "num_hidden_layers": max_layers} if max_layers else sources.base.settings
        keys_and_values = kv_cache_bytes(longest, study.engine.max_model_len, engine_dtype(study))
    held = sources.num_parameters
    if max_layers:
        aligned = alignment_bytes(sources.base.config, max_layers, 1) if aligns else 0
        available = sys.maxsize if machines.memory_bytes is None else machines.memory_bytes
        num_held = max_layers
        if modality.runs_on_vllm:
            num_held = _pool_size(sources, max_layers, available, copies * element_bytes, beside=keys_and_values)
        held = outside_bytes(sources, 1) + aligned + widest_layer_bytes(sources, 1) * num_held
    ranks = RANK_BYTES * len(study.models.experts) if study.engine.rank_cache else 0
    weights = held * copies * element_bytes + sources.num_parameters * ranks
    statistics = recent_bytes(sources) if uses_statistics(study.search_space.merge_methods, OF_SEVERAL) else 0
    computed = 0
    if gradients is not None and gradients.device == "cpu":
        computed = gradient_model_bytes(sources, gradient_value_bytes(study, "cpu"), max_layers=max_layers)
        computed += gradient_activation_bytes(study, sources, gradients, max_layers=max_layers)
        computed += reduction_bytes(sources, study.search_space.merge_methods, on_gpu=False)
    on_gpu = sources.num_parameters * element_bytes // study.engine.tensor_parallel_size
    processes = study.engine.tensor_parallel_size if machines.num_gpus else 1
    return MemoryPlan(
        bank_bytes=stored_bytes(sources.checkpoints.values()),
        engine_bytes=weights
        + keys_and_values
        + processes * (statistics + ENGINE_OVERHEAD_BYTES)
        + modality.cache_bytes,
        replicas=replicas,
        available_bytes=machines.memory_bytes,
        gradient_bytes=computed + GRADIENT_OVERHEAD_BYTES + modality.cache_bytes if gradients is not None else 0,
        statistics_bytes=processes * statistics,
        gpu_weight_bytes=on_gpu if machines.num_gpus and not max_layers else 0,
        gpu_bytes=machines.gpu_bytes,
    )


def uses_statistics(methods: Iterable[str], names: Collection[str]) -> bool:
    """Whether any of the merge methods `methods` uses one of the statistics `names`, such as "magnitudes"."""
    from workers.merging.methods.plain import PLAIN

    return any(not PLAIN[method].uses.isdisjoint(names) for method in methods)


def scored_methods(study: Study, sources: ResolvedFamily) -> frozenset[str]:
    """The merge methods that a study's merges may use: those of its search space and of its baselines.

    `sources` are the study's models. If the study file lists recipes, the result contains all merge methods, because a
    recipe may use any of them.
    """
    if study.search.recipes:
        return frozenset(METHODS)
    base, *experts = sources.checkpoints
    baselines = all_baselines(
        base=base,
        experts=experts,
        fingerprints={alias: alias for alias in sources.checkpoints},
        num_layers=sources.layout.num_layers,
        chosen=study.search.baselines,
    )
    merges = (merge for baseline in baselines for merge in baseline.recipe.merges())
    return frozenset(study.search_space.merge_methods).union(merge.method for merge in merges)


def merges_parts(study: Study, sources: ResolvedFamily) -> bool:
    """Whether an engine on several GPUs computes all merges of a study in parts: on each GPU, the part that it holds.

    This requires a CUDA kernel for each merge method. Methods are excluded that need statistics which a GPU computes
    from whole tensors; those of magnitudes are computed on the CPU. Adapters among the models `sources` are excluded
    too, because their tensors are computed as a whole.
    """
    from workers.merging.kernels.lowering import ON_CUDA
    from workers.merging.methods.plain import PLAIN

    is_whole = getattr(study.search_space, "trim", "tensor") == "model"  # thresholds of whole models
    if study.engine.tensor_parallel_size == 1 or is_whole or any(view.base for view in sources.views.values()):
        return False
    return all(name in ON_CUDA and PLAIN[name].uses <= {"magnitudes"} for name in scored_methods(study, sources))


def gradient_model_bytes(sources: ResolvedFamily, value_bytes: int, *, max_layers: int = 0) -> int:
    """Bytes of a merge whose gradients are computed, together with the gradient of its largest tensor.

    `sources` are the models that are merged. A value has `value_bytes` bytes. `max_layers` is the number of layers of
    the longest merge if merges have any number of layers, else 0.
    """
    largest = max((math.prod(header.shape) for header in sources.base.tensors.values()), default=0)
    held = sources.num_parameters
    if max_layers:
        held = max(held, outside_bytes(sources, 1) + widest_layer_bytes(sources, 1) * max_layers)
    return (held + largest) * value_bytes


def gradient_activation_bytes(
    study: Study, sources: ResolvedFamily, place: GradientPlace, *, max_layers: int = 0
) -> int:
    """Bytes of the activations and logits of one pass of gradients on the CPU, with the passes that `place` plans.

    `sources` are the study's models. `max_layers` is the number of layers of the longest merge if merges have any
    number of layers, else 0. A modality may limit the activations itself (`Modality.pass_bytes`).
    """
    if sources.modality.pass_bytes:
        return sources.modality.pass_bytes
    settings = dict(sources.base.settings)
    layers = max(int(settings["num_hidden_layers"]), max_layers)
    size = gradient_value_bytes(study, "cpu")
    return pass_bytes(settings, place.tokens, size, recomputes=place.recomputes, layers=layers)


def gradient_value_bytes(study: Study, device: Literal["cuda", "cpu"]) -> int:
    """Bytes of each number in the gradients of a study: 2 for bfloat16, 4 for float32.

    Gradients are computed in bfloat16 if the study's dtype is bfloat16, or "auto" with the device "cuda". They are
    computed in float32 in all other cases, also if the study's dtype is float16.
    """
    return 2 if study.engine.dtype == "bfloat16" or (study.engine.dtype == "auto" and device == "cuda") else 4


def _pool_size(sources: ResolvedFamily, max_layers: int, available: int, bytes_of_value: int, *, beside: int) -> int:
    """Size of an engine's pool: the number of source layers that stay in host memory for building layer paths.

    A layer path is the sequence of source models' layers of which a merge consists; the longest has `max_layers`
    layers. If there is room, the pool holds all layers of all sources and `max_layers` further layers. Otherwise it
    holds the largest number of layers that fits, together with the tensors outside layers and the `beside` bytes of
    keys and values, into HOST_SHARE of the `available` bytes, but at least `max_layers`. Each element of a tensor takes
    `bytes_of_value` bytes. If `bytes_of_value` is 0, the pool takes no host memory, so all layers fit.
    """
    every = len(sources.checkpoints) * sources.layout.num_layers + max_layers
    if not bytes_of_value:
        return every
    room = int(HOST_SHARE * available) - beside - outside_bytes(sources, bytes_of_value)
    return max(max_layers, min(every, room // widest_layer_bytes(sources, bytes_of_value)))


def check_memory(
    memory: MemoryPlan,
    problems: list[Problem],
    *,
    shorter: range = range(0),
    plan: Callable[[int], MemoryPlan] | None = None,
) -> None:
    """Check that the planned memory is available; if not, suggest a lower limit of layers that would suffice.

    A lack of memory is added to `problems`. `shorter` are the numbers of layers to which `limits.max_layers` could be
    lowered, ascending. `plan` computes the memory for a number of layers; the memory must grow with this number.
    """
    if not memory.has_gpu_memory and memory.gpu_bytes is not None:
        problems.append(
            Problem(
                "engine",
                f"the weights of a merge need {gib(memory.gpu_weight_bytes)} of each GPU, which has "
                f"{gib(memory.gpu_bytes)}; use a larger tensor_parallel_size, a smaller dtype or larger GPUs",
            )
        )
    if memory.available_bytes is not None and not memory.has_host_memory:
        layers = ""
        if plan is not None:
            fitting = shorter[: bisect.bisect_left(shorter, True, key=lambda n: not plan(n).has_host_memory)]
            layers = f", limits.max_layers of at most {fitting[-1]}" if fitting else ""
        gradients = f" + {gib(memory.gradient_bytes)} for gradients" if memory.gradient_bytes else ""
        problems.append(
            Problem(
                "engine",
                f"needs {gib(memory.needed_bytes)} of memory, {gib(memory.available_bytes)} are available: "
                f"source weights {gib(memory.bank_bytes)} + {memory.replicas} engine(s) of "
                f"{gib(memory.engine_bytes)}{gradients}; use fewer replicas, a smaller dtype{layers} or a larger "
                "machine",
            )
        )
