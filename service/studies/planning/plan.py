"""The plan of a study on machines of a profile: placement, memory, seconds, hours, and missing resources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from search_spaces.methods import METHODS
from search_spaces.spaces.base import AlignedSpace
from search_spaces.study.engine import Engine
from service.studies.planning.advice import advice_of
from service.studies.planning.chart import chart_values
from service.studies.planning.facts import ModelFacts, facts_of
from service.studies.planning.placement import StudyPlacement, machines_of_engines, place_study
from service.studies.planning.profiles import MachineProfile
from service.studies.planning.roofline import (
    CPU,
    GPU,
    PATHS_ON_GPU,
    SORTED_PER_S,
    TRANSFORMERS_ON_GPU,
    Device,
    Speeds,
    statistics_s,
)
from service.studies.planning.schedule import Bounds, Phase, StudyLengths, phases_of, study_lengths, verified_lengths
from service.studies.preflight.gradients import fits_free_gpus, gradient_gpu_bytes
from workers.engines.kv_cache import kv_token_bytes, value_bytes

if TYPE_CHECKING:
    from search_spaces.study.file import Study
    from service.studies.preflight.result import PreflightResult
    from workers.models.family import ResolvedFamily

__all__ = ["StudyPlan", "engine_speeds", "plan_of"]


@dataclass(frozen=True)
class StudyPlan:
    """The plan of a study on machines of a profile.

    Attributes:
        profile: The machines.
        dtype: Dtype of the engines.
        facts: Sizes of the models.
        placement: Where on the machines each part of the study is kept, and how much memory it takes.
        phases: Phases of the study with their seconds.
        hours: Bounds on the hours of the study.
        gpu_hours: Bounds on the hours, times the number of the study's GPUs, or of its machines if the machines have no
            GPUs.
        cost: Bounds on `gpu_hours` times the price; None if no price is known.
        lacks: Parts of the study that do not fit, with advice that would make them fit; empty if the study fits.
        advice: Changes that would make the study much shorter on these machines; empty if none is known, and if the
            study does not fit.
        chart: Values of the Helm chart for the study.
    """

    profile: MachineProfile
    dtype: str
    facts: ModelFacts
    placement: StudyPlacement
    phases: tuple[Phase, ...]
    hours: Bounds
    gpu_hours: Bounds
    cost: Bounds | None
    lacks: tuple[str, ...]
    advice: tuple[str, ...]
    chart: dict[str, Any]

    @property
    def fits(self) -> bool:
        return not self.lacks


def plan_of(
    preflight: PreflightResult,
    sources: ResolvedFamily,
    profile: MachineProfile,
    *,
    dtype: str,
    steps: tuple[int, int],
    lacks: tuple[str, ...] = (),
    lengths: StudyLengths | None = None,
    download_bytes: int = 0,
) -> StudyPlan:
    """Plan a checked study: the memory and the hours that it takes on given machines.

    `preflight` is the checked study, `sources` are its models, `profile` describes the machines, and `dtype` is the
    dtype of the engines. `steps` has the number of gradient steps, and the number of samples of each step. `lacks` has
    the reasons, found by the checks, why the study does not fit the machines. `lengths` are the lengths of the study's
    samples; by default they are measured. `download_bytes` is the size of the weights that must be downloaded first.
    """
    study, gradients = preflight.study, preflight.gradients
    facts = facts_of(sources)
    lengths = study_lengths(preflight, sources.result_dir) if lengths is None else lengths
    # Layers of the longest merge, where merges have any number of layers.
    max_layers = 0 if preflight.models.size is None else preflight.models.size.max_layers
    space = preflight.space
    placement = place_study(
        study,
        sources,
        profile,
        dtype=dtype,
        memory=preflight.memory,
        gradients=gradients,
        gradient_gpu_bytes=(
            gradient_gpu_bytes(study, sources, gradients, max_layers=max_layers) if gradients is not None else 0
        ),
        gpu_share_left=preflight.gpu_share_left,
        max_layers=max_layers if sources.modality.runs_on_vllm else 0,
        aligns=isinstance(space, AlignedSpace) and space.alignment != "none",
        verified=verified_lengths(preflight, lengths),
    )
    of_engine = _threads(profile, study.engine)
    threads = study.engine.tensor_parallel_size if profile.gpus else of_engine
    speeds = engine_speeds(
        facts,
        profile,
        config=sources.base.settings,
        dtype=dtype,
        ranks=study.engine.tensor_parallel_size,
        threads=threads,
        bank=placement.bank,
        texts=placement.texts,
        divides_merges=_divides_merges(study, sources),
    )
    if profile.gpus and max_layers and sources.modality.runs_on_vllm:
        speeds = replace(speeds, device=replace(speeds.device, calibration=PATHS_ON_GPU))
    deepest = replace(speeds, facts=facts.deepened(max_layers) if max_layers else facts)
    all_threads, threads_of_engine = (
        engine_speeds(facts, replace(profile, gpus=0), config=sources.base.settings, dtype="float32", threads=number)
        # An engine verifies with the threads of all its ranks, which wait meanwhile.
        for number in (max(1, profile.cores - 1), of_engine * study.engine.tensor_parallel_size)
    )
    verification_speeds = None
    if placement.verification_gpus:
        on_one = engine_speeds(facts, profile, config=sources.base.settings, dtype="float32")
        verification_speeds = replace(on_one, device=replace(on_one.device, calibration=TRANSFORMERS_ON_GPU))
    gradient_speeds = None
    if gradients is not None:
        on_gpu = gradients.device == "cuda"
        # Gradients read the copy in host memory that engines share, if there is one.
        bank = "host" if placement.bank == "host" else "mapped"
        gradient_speeds = (
            engine_speeds(facts, profile, config=sources.base.settings, dtype=dtype, bank=bank)
            if on_gpu
            else all_threads
        )
    phases = phases_of(
        preflight,
        lengths,
        speeds=speeds,
        deepest=deepest,
        gradient_speeds=gradient_speeds,
        host_speeds=threads_of_engine,
        steps=steps,
        verification_speeds=verification_speeds,
        verified_together=placement.verified_together,
        download_s=download_bytes / profile.network_bandwidth,
        statistics_s=statistics_s(
            facts,
            _sorted_statistics(preflight),
            experts=len(preflight.models.family.experts),
            threads=of_engine * study.engine.tensor_parallel_size,
        ),
        machines=machines_of_engines(study.engine.replicas, study.engine.tensor_parallel_size, profile)[0],
    )
    elapsed = [phase.elapsed_s for phase in phases]
    hours = Bounds(sum(each.least for each in elapsed) / 3600, sum(each.most for each in elapsed) / 3600)
    used = study.engine.num_gpus
    if gradients is not None and gradients.device == "cuda" and not gradients.gpu_share:
        used += gradients.num_gpus
    number = used if profile.gpus else placement.nodes
    gpu_hours = Bounds(hours.least * number, hours.most * number)
    cost = None if profile.price is None else Bounds(gpu_hours.least * profile.price, gpu_hours.most * profile.price)
    every = placement.lacks or lacks  # preflight's reasons are about the same memory, without the parts
    chart = chart_values(study, profile, placement, sources_bytes=facts.bank_bytes)

    def leave_gradients(replicas: int) -> bool:
        fewer = study.model_copy(update={"engine": study.engine.model_copy(update={"replicas": replicas})})
        return fits_free_gpus(fewer, sources, profile.machines, max_layers=max_layers)

    advice = () if every else advice_of(study, profile, placement, gradients, phases, leave_gradients=leave_gradients)
    return StudyPlan(profile, dtype, facts, placement, phases, hours, gpu_hours, cost, every, advice, chart)


def engine_speeds(
    facts: ModelFacts,
    profile: MachineProfile,
    *,
    config: Any,
    dtype: str,
    ranks: int = 1,
    threads: int = 1,
    bank: str = "mapped",
    texts: int = 256,
    divides_merges: bool = False,
) -> Speeds:
    """Speeds of one engine, for computing the seconds of each phase of a study.

    `facts` are the sizes of the models, and `config` is their configuration. `profile` describes the machine, and
    `dtype` is the engine's dtype. The engine has `ranks` GPUs or, on a machine without GPUs, `threads` threads. `bank`
    is where the source weights are kept: "gpu", "host" (pinned memory) or "mapped" (memory-mapped files). `texts` is
    the number of texts that the engine serves at the same time. `divides_merges` says whether each rank on a GPU merges
    only the elements that it holds.
    """
    if profile.gpus:
        products = profile.gpu_flops_float32 if dtype == "float32" else profile.gpu_flops
        shares = ranks if divides_merges else 1
        reading = {
            "gpu": shares * profile.gpu_bandwidth,
            "host": max(profile.link_bandwidth, min(shares * profile.link_bandwidth, profile.host_bandwidth)),
        }.get(bank, profile.mapped_bandwidth)
        device = Device(products * ranks, profile.gpu_bandwidth * ranks, reading, GPU)
    else:
        copied = profile.copied_per_s(threads)
        device = Device(profile.host_flops(threads), copied, copied, CPU.on_core(profile.core_loops))
    return Speeds(
        facts=facts,
        device=device,
        value_bytes=value_bytes(dtype),
        kv_bytes=kv_token_bytes(config, dtype),
        texts=texts,
        disk_bandwidth=profile.disk_bandwidth,
    )


def _sorted_statistics(preflight: PreflightResult) -> frozenset[str]:
    """Names of the statistics that a study's merges use, and for which an engine sorts the sources once.

    The merges of the study are its baselines and, if it proposes merges, those of its search space. Merges that trim
    whole models, or mask task vectors before they trim them, use no table of a tensor's magnitudes. Ranks are kept only
    with the option `engine.rank_cache`.
    """
    from workers.merging.methods.plain import PLAIN

    study, space = preflight.study, preflight.study.search_space
    merges = {
        (merge.method, recipe.trim == "model") for *_, recipe in preflight.baselines() for merge in recipe.merges()
    }
    if study.search.proposes:
        merges |= {(method, getattr(space, "trim", "tensor") == "model") for method in space.merge_methods}
    found: set[str] = set()
    for method, is_whole in merges:
        makes_tables = not METHODS[method].takes_seed and not (is_whole and METHODS[method].trims)
        found |= PLAIN[method].uses - (frozenset() if makes_tables else {"magnitudes"})
    return frozenset(found & SORTED_PER_S.keys() - (frozenset() if study.engine.rank_cache else {"ranks"}))


def _divides_merges(study: Study, sources: ResolvedFamily) -> bool:
    """Whether an engine on several GPUs divides the work of a merge among its ranks (one process for each GPU).

    If so, each rank merges only its own elements of the tensors. This requires a CUDA kernel for every merge method of
    the study's search space. It is not possible if one of the models `sources` is an adapter, because each rank then
    reads whole tensors.
    """
    from workers.merging.kernels import ON_CUDA

    is_whole = any(view.base is not None for view in sources.views.values())
    return not is_whole and ON_CUDA.issuperset(study.search_space.merge_methods)


def _threads(profile: MachineProfile, engine: Engine) -> int:
    """Number of threads for arithmetic on the CPU of each process of the study's engines.

    The engines that may run on one machine get equal shares of its cores, without one core, and so do the ranks of an
    engine (module `workers.serving.cores`).
    """
    ranks = engine.tensor_parallel_size
    engines = min(engine.replicas, profile.gpus // ranks) if profile.gpus else -(-engine.replicas // profile.nodes)
    return max(1, (profile.cores - 1) // (max(1, engines) * ranks))
