"""Placement of a study on machines: where engines, source weights, gradients and verification run, and their memory.

Source weights are placed as the engine places them (`workers.engines.vllm.memory.divide_memory`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from service.disk import gib
from service.studies.planning.profiles import HOST_USABLE, MachineProfile
from service.studies.preflight.resources import OF_SEVERAL, merges_parts, scored_methods, uses_statistics
from workers.engines.kv_cache import value_bytes
from workers.engines.transformers.batches import BATCH, batch_bytes, fitting_batch
from workers.engines.vllm.memory import (
    CONTEXT_BYTES,
    HOST_SHARE,
    MAX_NUM_SEQS,
    TEXT_TOKENS,
    EngineMemory,
    MemoryRequirements,
    divide_memory,
    free_for_engine,
    kv_cache_bytes,
    memory_requirements,
    usable_gpu_bytes,
)
from workers.engines.vllm.paths.sizes import path_requirements
from workers.errors import EngineUnavailable
from workers.models.checkpoints import stored_bytes
from workers.serving.gpu_verification import WEIGHT_BYTES, verification_bytes
from workers.types import Placement

if TYPE_CHECKING:
    from search_spaces.study.file import Study
    from service.studies.preflight.gradients import GradientPlace
    from service.studies.preflight.resources import MemoryPlan
    from workers.models.family import ResolvedFamily

__all__ = ["ON_OWN_GPUS", "Part", "StudyPlacement", "gpus_to_verify", "machines_of_engines", "place_study"]

# Parts whose GPUs have no engine; the others share each GPU of an engine.
ON_OWN_GPUS = frozenset({"gradients", "verification"})
# Their names, if they take a share that an engine leaves.
BESIDE = " beside engines"
# Shares of a GPU are rounded down to 1e-4; more than this share of the memory for merging is all of it.
RESERVED = 0.99
# Copies of a checkpoint that a verification has in memory (`workers.engines.transformers.verification.COPIES`).
VERIFICATION_COPIES = 5


@dataclass(frozen=True)
class Part:
    """A part of a study that takes memory on a machine, such as engine weights.

    `name` describes the part in words, and `place` says where it is kept. `gpu_bytes` and `host_bytes` are the bytes
    that the part takes on each GPU and on each host.
    """

    name: str
    place: str
    gpu_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class StudyPlacement:
    """The placement of a study: where each of its parts is kept on a machine, and how much memory the part takes.

    Attributes:
        parts: The parts with their memory, on the machine with most engines.
        bank: The place where engines keep the source weights: "gpu", "host" (pinned) or "mapped" (memory-mapped files).
        reason: The reason why the source weights are kept there.
        nodes: Number of machines that the study uses.
        engines: Number of engines on the machine with most engines.
        texts: Number of texts that an engine serves at the same time.
        gpu_capacity: Usable bytes of each GPU; 0 without GPUs.
        host_capacity: Usable bytes of each host.
        verification_gpus: Number of GPUs without an engine, on the machine with most engines, that verify merges; 0 if
            the CPU verifies.
        verified_together: Number of samples that a verification completes at once.
        num_parameters: Number of parameters of a merge.
        lacks: Parts of the study that do not fit, with advice that would make them fit; empty if the study fits.
    """

    parts: tuple[Part, ...]
    bank: str
    reason: str
    nodes: int
    engines: int
    texts: int
    gpu_capacity: int
    host_capacity: int
    verification_gpus: int
    verified_together: int
    num_parameters: int
    lacks: tuple[str, ...]

    @property
    def gpu_bytes(self) -> int:
        return sum(part.gpu_bytes for part in self.parts if part.name not in ON_OWN_GPUS)

    @property
    def host_bytes(self) -> int:
        return sum(part.host_bytes for part in self.parts)


def place_study(
    study: Study,
    sources: ResolvedFamily,
    profile: MachineProfile,
    *,
    dtype: str,
    memory: MemoryPlan,
    gradients: GradientPlace | None,
    gradient_gpu_bytes: int = 0,
    gpu_share_left: float = 0.0,
    max_layers: int = 0,
    aligns: bool = False,
    verified: Sequence[tuple[int, int]] = (),
) -> StudyPlacement:
    """Place the engines and the gradients of a study on machines of a profile, and compute the memory that each needs.

    Args:
        study: The study.
        sources: Models of the study.
        profile: The machines.
        dtype: Dtype of the engines.
        memory: Host memory that the study needs, as the checks of the study planned it.
        gradients: Where gradients are computed; None if the study computes none.
        gradient_gpu_bytes: Bytes that gradients need of a GPU.
        gpu_share_left: Share of its GPU's memory that each engine leaves to gradients and verification.
        max_layers: Number of layers of the longest merge if merges have any number of layers, else 0.
        aligns: Whether merges may have alignments between layers.
        verified: Lengths of the samples that a verification completes: tokens of the prompt, and most tokens of the
            answer.
    """
    ranks = study.engine.tensor_parallel_size
    on_gpus = profile.gpus > 0
    nodes, engines = machines_of_engines(study.engine.replicas, ranks, profile)
    is_beside = gradients is not None and gradients.gpu_share > 0
    has_own_gpus = gradients is not None and gradients.device == "cuda" and not is_beside
    own_gpus = gradients.num_gpus if gradients is not None and has_own_gpus else 0
    # The machine with fewest engines has most GPUs for gradients.
    on_last = study.engine.replicas - engines * (nodes - 1)
    if own_gpus and own_gpus > profile.gpus - on_last * ranks and nodes < profile.nodes:
        nodes += 1
    host_capacity = int(HOST_USABLE * profile.host_bytes)
    verification = VERIFICATION_COPIES * sources.num_parameters * value_bytes(dtype)
    verifies = study.engine.verify is not False
    lacks = list(_lack_of_gpus(study, sources, profile))
    parts: list[Part] = []
    if on_gpus:
        capacity = usable_gpu_bytes(profile.gpu_bytes, profile.gpu_bytes)
        processes = engines * ranks
        gpu_free = free_for_engine(profile.gpu_bytes, profile.gpu_bytes, gpu_share_left)
        needs, lack = _requirements(
            study, sources, profile, gpu_free=gpu_free, dtype=dtype, max_layers=max_layers, aligns=aligns
        )
        lacks += lack
        divided, reason, lack = _divided(
            needs, study, sources, profile, gpu_free=gpu_free, dtype=dtype, processes=processes
        )
        lacks += lack
        methods = scored_methods(study, sources)
        statistics = needs.statistics - needs.recent if uses_statistics(methods, {"magnitudes"}) else 0
        if uses_statistics(methods, OF_SEVERAL):  # they have the memory that the sources leave
            statistics += needs.recent if divided is None else divided.recent
        kept = divided.placements[0] if divided is not None else Placement.MAPPED
        banked = needs.bank if kept is Placement.GPU else 0
        # vLLM reserves the engine's share of a GPU, and fills it with keys and values.
        held = needs.engine(1) if divided is None else int(divided.gpu_share * profile.gpu_bytes)
        texts = _texts(needs, held - replace(needs, kv_token=0).engine(1))
        usable = usable_gpu_bytes(gpu_free, profile.gpu_bytes)
        beside = needs.beside if divided is None else min(needs.beside, max(0, usable - held - banked))
        where_merged = "each GPU" if beside >= RESERVED * needs.scratch else "each GPU; larger ones on the CPU"
        weights = f"{_on(ranks, engines)}, a pool of layers" if max_layers else _on(ranks, engines)
        parts += [
            Part("engine weights", weights, gpu_bytes=needs.weights),
            Part("activations, graphs, one text", "each GPU", gpu_bytes=needs.engine(1) - needs.weights),
            Part("merging one tensor, or log-probabilities", where_merged, gpu_bytes=beside),
            Part(
                "KV cache beyond one text",
                f"each GPU, {texts} texts at once",
                gpu_bytes=max(0, held - needs.engine(1)),
            ),
        ]
        where = {
            Placement.GPU: Part("source weights", "GPU memory, a copy in each GPU", gpu_bytes=needs.bank),
            Placement.HOST: Part("source weights", "pinned host memory, shared", host_bytes=needs.bank),
            Placement.MAPPED: Part("source weights", "files mapped into memory, shared"),
        }
        parts += [
            where[kept],
            Part("statistics of sources", f"host, {processes} copies", host_bytes=processes * statistics),
            Part(
                "processes of engines",
                f"host, {processes}",
                host_bytes=engines * (memory.engine_bytes - memory.statistics_bytes),
            ),
        ]
        bank = kept.value
    else:
        capacity, bank, reason = 0, "mapped", "engines on a CPU read mapped files"
        longest = {**sources.base.settings, "num_hidden_layers": max_layers} if max_layers else sources.base.settings
        kv = kv_cache_bytes(longest, study.engine.max_model_len, dtype)
        needs = memory_requirements(sources, config=longest, dtype=dtype, max_length=study.engine.max_model_len)
        texts = _texts(needs, kv)
        parts += [
            Part("source weights", "files mapped into memory, shared", host_bytes=memory.bank_bytes),
            Part("engines", f"host, {engines}", host_bytes=engines * memory.engine_bytes),
        ]
    left_bytes = int(gpu_share_left * profile.gpu_bytes)
    if gradients is not None:
        on_cpu = gradients.device == "cpu"
        twice = ", activations recomputed" if gradients.recomputes else ""
        own = "a GPU of their own" if gradients.num_gpus == 1 else f"{gradients.num_gpus} GPUs of their own"
        on_gpu = _on_share(gradient_gpu_bytes, gpu_share_left) if is_beside else own
        place = f"{'host CPU' if on_cpu else on_gpu}{twice}"
        name = f"gradients{BESIDE}" if is_beside else "gradients"
        taken = left_bytes if is_beside else gradient_gpu_bytes
        parts.append(Part(name, place, 0 if on_cpu else taken, memory.gradient_bytes))
    # After the search, when GPUs and memory of gradients are free again.
    batch = batch_bytes(sources.base.settings, verified)
    least, enough = (gpus_to_verify(sources.num_parameters, profile, size) for size in (0, batch))
    unused = profile.gpus - engines * ranks
    # As the program does at run time: rather fewer samples at once than the CPU.
    verifying = enough if enough <= unused else unused if least <= unused else 0
    room = verifying * (profile.gpu_bytes - CONTEXT_BYTES)
    # Merges with alignments are verified by the engine's process, on the CPU.
    is_on_share = False
    if not verifies or aligns or not verifying:
        room = left_bytes - CONTEXT_BYTES
        is_on_share = verifies and not aligns and room >= verification_bytes(sources.num_parameters)
        verifying = 1 if is_on_share else 0
    room_beside = room - WEIGHT_BYTES * sources.num_parameters
    together = fitting_batch(sources.base.settings, verified, room_beside) if verifying else BATCH
    if verifies:
        held = memory.gradient_bytes if gradients is not None else 0
        free = "a GPU without an engine" if verifying == 1 else f"{verifying} GPUs without an engine"
        taken = min(room, verification_bytes(sources.num_parameters, batch))
        on_each = math.ceil(taken / verifying) if verifying else 0
        name = "verification"
        if is_on_share and is_beside:
            free = "one engine's GPU, in the memory of gradients"
        elif is_on_share:
            free, on_each, name = _on_share(on_each, gpu_share_left), left_bytes, f"verification{BESIDE}"
        place = f"{free if verifying else 'host CPU'}, after the search"
        parts.append(Part(name, place, on_each, max(0, verification - held)))
    placement = StudyPlacement(
        tuple(parts),
        bank,
        reason,
        nodes,
        engines,
        texts,
        capacity,
        host_capacity,
        verifying,
        together,
        sources.num_parameters,
        (),
    )
    return replace(
        placement,
        lacks=(
            *lacks,
            *_lack_of_host(
                placement, study, sources, profile, dtype=dtype, verification=verification if verifies else 0
            ),
        ),
    )


def _on_share(num_bytes: int, share: float) -> str:
    return f"one engine's GPU: {gib(num_bytes)} of the {100 * share:.0f} % of its GPU that each engine leaves"


def machines_of_engines(replicas: int, ranks: int, profile: MachineProfile) -> tuple[int, int]:
    """Number of machines that run `replicas` engines of `ranks` GPUs, and number of engines on the fullest of them.

    Engines use as few machines with GPUs of `profile` as possible; those on the CPU are spread over all machines.
    """
    each = max(1, profile.gpus // ranks) if profile.gpus else 1
    nodes = min(profile.nodes, math.ceil(replicas / each))
    return nodes, math.ceil(replicas / nodes)


def gpus_to_verify(num_parameters: int, profile: MachineProfile, batch_bytes: int = 0) -> int:
    """Number of GPUs of `profile` that verify a merge of `num_parameters` parameters together; 1 if it has no GPUs.

    `batch_bytes` is the memory of the samples that are completed at once. Without it, the result is the least number.
    """
    usable = profile.gpu_bytes - CONTEXT_BYTES
    return math.ceil(verification_bytes(num_parameters, batch_bytes) / usable) if usable > 0 else 1


def _requirements(
    study: Study,
    sources: ResolvedFamily,
    profile: MachineProfile,
    *,
    gpu_free: int,
    dtype: str,
    max_layers: int,
    aligns: bool,
) -> tuple[MemoryRequirements, list[str]]:
    """The memory that an engine needs on each GPU of a machine that `profile` describes, and what does not fit.

    `gpu_free` bytes of each GPU are free for an engine. The other arguments are as in `place_study`. If merges have any
    number of layers, the engine has a pool of layers, which takes the memory that is left; a longest merge that does
    not fit is a lack.
    """
    engine = study.engine
    options: dict[str, Any] = {
        "config": sources.base.settings,
        "dtype": dtype,
        "max_length": engine.max_model_len,
        "ranks": engine.tensor_parallel_size,
        "merges_parts": merges_parts(study, sources),
    }
    if not max_layers:
        return memory_requirements(sources, **options), []
    gpu: dict[str, Any] = {"gpu_free": gpu_free, "gpu_total": profile.gpu_bytes}
    try:
        return path_requirements(sources, **options, **gpu, max_layers=max_layers, aligns=aligns)[0], []
    except EngineUnavailable as error:
        return memory_requirements(sources, **options), [f"{error} (of {profile.name}'s)"]


def _divided(
    needs: MemoryRequirements,
    study: Study,
    sources: ResolvedFamily,
    profile: MachineProfile,
    *,
    gpu_free: int,
    dtype: str,
    processes: int,
) -> tuple[EngineMemory | None, str, list[str]]:
    """Divide the memory of a machine with GPUs, which `profile` describes, between engines and source weights.

    `needs` is the memory that the study needs, `gpu_free` bytes of each GPU are free for an engine, and `processes` is
    the number of engine processes that share the source weights on the machine. The other arguments are as in
    `place_study`. Returns the division, its reason, and reasons why the engines do not fit. The division is None if the
    engines do not fit.
    """
    try:
        found = divide_memory(
            needs,
            gpu_free=gpu_free,
            gpu_total=profile.gpu_bytes,
            host_free=profile.host_bytes,
            processes=processes,
            is_shared=True,
        )
    except EngineUnavailable:
        ways = ", or ".join(_smaller_engines(study, sources, profile, gpu_free=gpu_free, dtype=dtype))
        lack = (
            f"an engine needs {gib(needs.engine(1))} of each GPU, {gib(needs.weights)} of them for weights; "
            f"{gib(_room_for_engine(needs, profile, gpu_free))} of {profile.name}'s are usable; use "
            f"{ways or 'larger GPUs'}"
        )
        return None, "the model does not fit into a GPU", [lack]
    return found, found.reason, []


def _room_for_engine(needs: MemoryRequirements, profile: MachineProfile, gpu_free: int) -> int:
    """Bytes of a GPU that an engine may use if tensors are merged on the CPU, as `divide_memory` computes them."""
    usable = usable_gpu_bytes(gpu_free, profile.gpu_bytes)
    return max(0, min(usable, gpu_free - CONTEXT_BYTES - needs.logprobs))


def _smaller_engines(
    study: Study, sources: ResolvedFamily, profile: MachineProfile, *, gpu_free: int, dtype: str
) -> Iterator[str]:
    """Options of the study file, one at a time, with each of which an engine would fit on its GPUs."""
    config, engine = sources.base.settings, study.engine
    now: dict[str, Any] = {"dtype": dtype, "max_length": engine.max_model_len, "ranks": engine.tensor_parallel_size}

    def fits(**changes: Any) -> bool:
        needs = memory_requirements(sources, config=config, **(now | changes))
        return needs.engine(1) <= _room_for_engine(needs, profile, gpu_free)

    heads = int(config.get("num_attention_heads") or 1)
    possible = (2, 4, 8, 16) if sources.modality.runs_on_vllm else ()
    for ranks in possible:
        if ranks > engine.tensor_parallel_size and heads % ranks == 0 and fits(ranks=ranks):
            most = profile.gpus // ranks * profile.nodes
            fewer = f" with engine.replicas: {most}" if engine.replicas > most else ""
            yield f"engine.tensor_parallel_size: {ranks}{fewer if most else f' on machines of {ranks} GPUs'}"
            break
    if dtype == "float32" and fits(dtype="bfloat16"):
        yield "engine.dtype: bfloat16"
    for halved in range(1, 5):
        length = engine.max_model_len >> halved
        if length and fits(max_length=length):
            yield f"engine.max_model_len: {length}"
            break


def _lack_of_gpus(study: Study, sources: ResolvedFamily, profile: MachineProfile) -> Iterator[str]:
    ranks, replicas = study.engine.tensor_parallel_size, study.engine.replicas
    if not profile.gpus:
        if ranks > 1:
            yield f"engine.tensor_parallel_size: {ranks} needs GPUs, and {profile.name} has none; use 1"
        return
    if ranks > profile.gpus:
        yield (
            f"engine.tensor_parallel_size: {ranks} GPUs of one engine must be in one machine, and {profile.name} has "
            f"{profile.gpus}; use at most {profile.gpus}"
        )
        return
    most = profile.gpus // ranks * profile.nodes
    if replicas > most:
        nodes = math.ceil(replicas / (profile.gpus // ranks))
        yield (
            f"engine.replicas: {replicas} engines of {ranks} GPUs do not fit on {profile.nodes} x {profile.name}; use "
            f"at most {most}, or --nodes {nodes}"
        )


@dataclass(frozen=True)
class _Change:
    """A change of a study, in words, with the host memory that it frees.

    `freed` are the bytes that it frees of engines and source weights. Shares of the memory of gradients and of
    verification remain.
    """

    text: str
    freed: int = 0
    gradients: float = 1.0
    verification: float = 1.0


def _lack_of_host(
    placement: StudyPlacement,
    study: Study,
    sources: ResolvedFamily,
    profile: MachineProfile,
    *,
    dtype: str,
    verification: int,
) -> Iterator[str]:
    """Yield a message if the hosts have too little memory, with changes that suffice: single ones, else two together.

    `verification` is the memory of a verification on its own: it comes after the gradients, and takes their memory.
    """
    if placement.host_bytes <= placement.host_capacity:
        return
    of = {part.name.removesuffix(BESIDE): part.host_bytes for part in placement.parts}
    gradients = of.get("gradients", 0)
    rest = placement.host_bytes - gradients - of.get("verification", 0)
    changes = list(_changes_of_host(placement, study, sources, profile, of=of, dtype=dtype, verification=verification))

    def suffice(chosen: Sequence[_Change]) -> bool:
        computed = gradients * math.prod(change.gradients for change in chosen)
        verified = verification * math.prod(change.verification for change in chosen)
        needed = rest - sum(change.freed for change in chosen) + max(computed, verified)
        return needed <= placement.host_capacity

    ways = [[change] for change in changes if suffice([change])]
    ways = ways or [list(pair) for pair in itertools.combinations(changes, 2) if suffice(pair)]
    advice = [" with ".join(change.text for change in way) for way in ways]
    parts = ", ".join(f"{part.name} {gib(part.host_bytes)}" for part in placement.parts if part.host_bytes)
    larger = math.ceil(placement.host_bytes / HOST_USABLE)
    if placement.bank == Placement.MAPPED.value and profile.gpus and sources.stored_bytes <= HOST_SHARE * larger:
        larger += math.ceil(sources.stored_bytes / HOST_USABLE)  # so much memory would have a copy of the sources
    advice.append(f"machines with {gib(larger)} of memory")
    yield (
        f"a host needs {gib(placement.host_bytes)} ({parts}), and {gib(placement.host_capacity)} of {profile.name}'s "
        f"are usable; use {'; or '.join(advice)}"
    )


def _changes_of_host(
    placement: StudyPlacement,
    study: Study,
    sources: ResolvedFamily,
    profile: MachineProfile,
    *,
    of: Mapping[str, int],
    dtype: str,
    verification: int,
) -> Iterator[_Change]:
    """Changes that free host memory, of which `of` has the bytes of each part; others are as in `_lack_of_host`."""
    replicas, ranks = study.engine.replicas, study.engine.tensor_parallel_size
    by_engines = of.get("engines", 0) + of.get("processes of engines", 0) + of.get("statistics of sources", 0)
    each = by_engines // placement.engines
    for number in range(placement.engines - 1, 0, -1):
        fewer = (n for n in range(replicas - 1, 0, -1) if machines_of_engines(n, ranks, profile)[1] <= number)
        spread = "" if profile.gpus else f" (or --nodes {math.ceil(replicas / number)})"
        freed = each * (placement.engines - number)
        text = f"engine.replicas: {next(fewer, 1)}{spread}"
        if number == 1 or placement.host_bytes - freed <= placement.host_capacity:
            yield _Change(text, freed)
            break
    if of.get("gradients"):
        is_refined = study.search.refinement is not None
        yield _Change("no search.refinement" if is_refined else "search.algorithm: smac", gradients=0.0)
    if verification:
        yield _Change("engine.verify: false", verification=0.0)
    if not profile.gpus and dtype == "float32":
        weights = placement.engines * sources.num_parameters * sources.modality.copies_on_cpu
        freed = weights * (value_bytes("float32") - value_bytes("bfloat16"))
        yield _Change("engine.dtype: bfloat16", freed, verification=0.5)
    kept = of.get("source weights", 0)
    experts = [view for view in sources.views.values() if view is not sources.base]
    if kept and any(view.base is None for view in experts):
        full = stored_bytes([sources.checkpoints[sources.base_alias]])
        yield _Change("LoRA adapters in place of full experts", kept - full)


def _texts(needs: MemoryRequirements, kv_bytes: int) -> int:
    """The number of texts that an engine can serve at the same time with `kv_bytes` bytes for keys and values.

    A text is assumed to have TEXT_TOKENS tokens, but not more than the engine's largest length. `needs` has this
    length, and the bytes of keys and values for one token. The number is at least 1 and at most MAX_NUM_SEQS.
    """
    each = min(TEXT_TOKENS, needs.max_length) * needs.kv_token
    return max(1, min(MAX_NUM_SEQS, kv_bytes // each if each else MAX_NUM_SEQS))


def _on(ranks: int, engines: int) -> str:
    return f"{engines} engine(s) of {ranks} GPU(s) a machine"
