"""The device on which a study computes gradients: a GPU without an engine, a GPU with an engine, or the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from search_spaces.study.file import Study
from service.disk import gib
from service.engine_machines import EngineMachines
from service.studies.preflight.resources import (
    PASS_TOKENS,
    GradientPlace,
    MemoryPlan,
    gradient_activation_bytes,
    gradient_model_bytes,
    gradient_value_bytes,
)
from service.studies.preflight.shared_gpus import SharedGpu
from workers.engines.vllm.memory import FEW_TEXTS, MANY_TEXTS, usable_gpu_bytes
from workers.engines.vllm.paths.sizes import outside_bytes, widest_layer_bytes
from workers.models.family import ResolvedFamily
from workers.training.memory import divided_layers, pass_bytes, reduction_bytes, tokens_within

__all__ = ["GradientPlace", "fits_free_gpus", "gradient_gpu_bytes", "gradient_place", "reduction_bytes"]

# The smallest passes that are planned; smaller ones are computed only if a GPU turns out to be full.
LEAST_PLANNED_TOKENS = 2_048
# The smallest passes that are planned on the CPU (`workers.training.gradients.LEAST_TOKENS`).
LEAST_CPU_TOKENS = 512
# Bytes of the activations of a pass on a CPU whose memory is not known.
UNKNOWN_ROOM_BYTES = 8 << 30


def gradient_place(
    study: Study,
    sources: ResolvedFamily,
    machines: Sequence[EngineMachines],
    *,
    plan: Callable[[GradientPlace | None], MemoryPlan],
    max_layers: int = 0,
    aligns: bool = False,
) -> tuple[GradientPlace | None, str]:
    """Choose the device on which a study computes gradients: a GPU without an engine, a GPU with an engine, or the CPU.

    A GPU is chosen if model, gradients and activations fit into its memory, and the memory of an engine too if the
    GPU has one. If they fit only with recomputed activations, activations are recomputed. Otherwise the CPU is chosen,
    if the host's memory has room for engines and gradients. If the memory limits passes, they have fewer tokens, and
    then activations are recomputed. If the study does not even fit into the host's memory without gradients, the CPU is
    chosen too, and `check_memory` reports the lack of memory.

    `sources` are the study's models, and `machines` are the groups of machines that can run engines. `plan` computes
    the memory of the study with gradients on a given device; the device None means without gradients. `max_layers` is
    the number of layers of the longest merge if merges have any number of layers, else 0. `aligns` says whether merges
    may have alignments. Returns the choice and "", or None and the reason why no device fits.
    """
    has_gpus = any(group.num_gpus for group in machines)
    reasons = []
    if has_gpus:
        of_engines = study.engine.num_gpus
        free = sum(group.num_gpus * group.most for group in machines) - of_engines
        if free > 0:
            place, why = _on_gpu(study, sources, machines, max_layers)
            if place is not None and plan(place).fits:
                return place, ""
            reasons.append(why)
        else:
            reasons.append(f"engines use {'the only GPU' if of_engines == 1 else f'all {of_engines} GPUs'}")
        beside, why = _beside_engine(study, sources, machines, max_layers, aligns=aligns)
        if beside is not None and plan(beside).fits:
            return beside, ""
        reasons.append(why)
    why = ", and ".join(filter(None, reasons))
    place = GradientPlace("cpu")
    for place in _on_cpu(study, sources, why, max_layers):
        with_gradients = plan(place)
        is_known = with_gradients.available_bytes is not None
        activations = 0 if is_known else gradient_activation_bytes(study, sources, place, max_layers=max_layers)
        if with_gradients.fits and activations <= UNKNOWN_ROOM_BYTES:
            return place, ""
    if with_gradients.fits or not plan(None).fits:
        return place, ""
    lack = (
        f"they need {gib(with_gradients.gradient_bytes)} of memory beside the engines, "
        f"{gib(with_gradients.needed_bytes)} in all, and {gib(with_gradients.available_bytes or 0)} are available"
    )
    return None, lack + (f"; {why}" if why else "")


def fits_free_gpus(
    study: Study, sources: ResolvedFamily, machines: Sequence[EngineMachines], *, max_layers: int = 0
) -> bool:
    """Whether GPUs of one machine that have no engine can compute a study's gradients.

    The arguments are as in the function `gradient_place`.
    """
    return _on_gpu(study, sources, machines, max_layers)[0] is not None


def _on_cpu(study: Study, sources: ResolvedFamily, why: str, max_layers: int) -> Iterator[GradientPlace]:
    """Yield the ways to compute gradients on the CPU, in the order of preference.

    Passes of PASS_TOKENS tokens come first. Smaller passes, down to LEAST_PLANNED_TOKENS, are preferred to activations
    that are computed twice, because a pass that is twice as small costs only one more reading of the sources. `why` has
    the reasons against GPUs; it is "" if no machine has a GPU. A modality that limits activations itself
    (`Modality.pass_bytes`) has one way. `sources` and `max_layers` are as in the function `gradient_place`.
    """
    as_why = f", as {why}" if why else ""
    whole = GradientPlace("cpu", reason=f"the CPU computes them{as_why}" if why else "")
    if room := sources.modality.pass_bytes:
        settings, size = dict(sources.base.settings), gradient_value_bytes(study, "cpu")
        layers = max(int(settings["num_hidden_layers"]), max_layers)
        tokens = tokens_within(room, settings, size, recomputes=False, layers=layers)
        yield replace(whole, tokens=max(1, min(PASS_TOKENS, tokens)))
        return
    yield whole
    for recomputes, least in ((False, LEAST_PLANNED_TOKENS), (True, LEAST_CPU_TOKENS)):
        tokens = PASS_TOKENS if recomputes else PASS_TOKENS // 2
        while tokens >= least:
            twice = " with activations computed twice" if recomputes else ""
            smaller = "" if tokens == PASS_TOKENS else f" in passes of {tokens:,} tokens"
            reason = f"the CPU computes them{twice}{smaller}, for lack of memory{as_why}"
            yield replace(whole, recomputes=recomputes, tokens=tokens, reason=reason)
            tokens //= 2


def _on_gpu(
    study: Study,
    sources: ResolvedFamily,
    machines: Sequence[EngineMachines],
    max_layers: int,
) -> tuple[GradientPlace | None, str]:
    """Plan gradients on GPUs of one machine that have no engine; return (place, ""), or (None, reason) if no plan fits.

    The plan uses as few GPUs as possible. For a given number of GPUs, the first choice is passes of PASS_TOKENS tokens.
    The second choice is passes of the same size with activations computed twice. The third choice is smaller passes,
    also with activations computed twice.

    `sources` are the study's models. The plan must fit on the smallest GPU of `machines`, the groups of machines.
    `max_layers` is the number of layers of the longest
    merge if merges have any number of layers, else 0.
    """
    known = [group.gpu_bytes for group in machines if group.num_gpus and group.gpu_bytes is not None]
    if not known:
        reason = "a GPU without an engine computes them; its memory is not known, so activations are computed twice"
        return GradientPlace("cuda", recomputes=True, reason=reason), ""
    total = min(known)  # Ray may place the gradients on any of them
    room = usable_gpu_bytes(total, total)
    needed = 0
    for num_gpus in range(1, _free_on_one_machine(study, machines) + 1):
        for recomputes, least in ((False, PASS_TOKENS), (True, PASS_TOKENS), (True, LEAST_PLANNED_TOKENS)):
            place = GradientPlace("cuda", recomputes=recomputes, num_gpus=num_gpus)
            tokens = _most_tokens(study, sources, max_layers, place, room)
            if tokens >= least:
                place = replace(place, tokens=min(PASS_TOKENS, tokens))
                needed = _bytes_on_gpu(study, sources, max_layers, place)
                twice = ", with activations computed twice" if recomputes else ""
                smaller = "" if tokens >= PASS_TOKENS else f" in passes of {place.tokens:,} tokens"
                gpus = (
                    "a GPU without an engine computes"
                    if num_gpus == 1
                    else f"{num_gpus} GPUs share the layers and compute"
                )
                of = f"{gib(needed)} of {'its' if num_gpus == 1 else 'their'} {gib(total)}{' each' * (num_gpus > 1)}"
                return replace(place, reason=f"{gpus} them in {of}{twice}{smaller}"), ""
        if num_gpus == 1:
            least_place = GradientPlace("cuda", recomputes=True, tokens=LEAST_PLANNED_TOKENS)
            needed = _bytes_on_gpu(study, sources, max_layers, least_place)
    return None, f"they need {gib(needed)} of a GPU, which has {gib(total)}"


def _beside_engine(
    study: Study, sources: ResolvedFamily, machines: Sequence[EngineMachines], max_layers: int, *, aligns: bool
) -> tuple[GradientPlace | None, str]:
    """Plan gradients on the GPU of an engine; return (place, ""), or (None, reason) if engine and gradients do not fit.

    Every engine of the study leaves the same share of its GPU's memory to gradients. Larger passes are preferred, then
    activations that are kept; but an engine that serves many texts at once is preferred to both, and several engines
    always serve many.

    `sources` are the study's models. The plan must fit on the smallest GPU of `machines`, the groups of machines.
    `max_layers` is the number of layers of the longest merge if merges have any number of layers, else 0. `aligns` says
    whether merges may have alignments.
    """
    if not SharedGpu.may_share(study, sources):
        return None, ""
    total = SharedGpu.smallest(machines)
    if total is None:
        return None, "the memory of GPUs is not known"
    gpu = SharedGpu(study, sources, total, max_layers=max_layers, aligns=aligns)
    places = [
        GradientPlace("cuda", recomputes=recomputes, tokens=tokens)
        for recomputes, tokens in ((False, PASS_TOKENS), *((True, PASS_TOKENS >> halved) for halved in range(4)))
    ]
    # One of several engines can be left out to free its GPU, so several engines are not made slow.
    for texts in (MANY_TEXTS, FEW_TEXTS) if study.engine.replicas == 1 else (MANY_TEXTS,):
        for place in places:
            needed = _bytes_on_gpu(study, sources, max_layers, place)
            share = gpu.share_of(needed)
            if gpu.can_leave(share, texts):
                twice = ", with activations computed twice" if place.recomputes else ""
                smaller = "" if place.tokens == PASS_TOKENS else f" in passes of {place.tokens:,} tokens"
                reason = f"gradients share the GPU of an engine, in {gib(needed)} of its {gib(total)}{twice}{smaller}"
                return replace(place, gpu_share=share, reason=reason), ""
    return None, f"beside an engine a GPU has no room for the {gib(needed)} of gradients"


def _free_on_one_machine(study: Study, machines: Sequence[EngineMachines]) -> int:
    """The largest number of GPUs of one machine that have no engine, if engines fill the machines one by one.

    Machines with fewest GPUs are filled first. If an engine needs more GPUs than any machine has, no GPU counts as
    used.
    """
    ranks, left = study.engine.tensor_parallel_size, study.engine.replicas
    most = 0
    for group in sorted(machines, key=lambda group: group.num_gpus):
        each = group.num_gpus // ranks
        used = min(left, each * group.most)
        full, rest = divmod(used, each) if each else (0, 0)
        if full < group.most:
            most = max(most, group.num_gpus - (rest * ranks if full == group.most - 1 else 0))
        left -= used
    return most


def gradient_gpu_bytes(study: Study, sources: ResolvedFamily, place: GradientPlace, *, max_layers: int = 0) -> int:
    """Bytes of memory of each GPU for computing a study's gradients on the device that `place` names; 0 for the CPU.

    `sources` are the study's models. `max_layers` is the number of layers of the longest merge if merges have any
    number of layers, else 0.
    """
    if place.device == "cpu":
        return 0
    return _bytes_on_gpu(study, sources, max_layers, place)


def _bytes_on_gpu(study: Study, sources: ResolvedFamily, max_layers: int, place: GradientPlace) -> int:
    """Bytes of memory that gradients need on a GPU; on the fullest GPU if several GPUs share the model's layers."""
    settings, value_bytes = dict(sources.base.settings), gradient_value_bytes(study, "cuda")
    return max(
        held + pass_bytes(settings, place.tokens, value_bytes, recomputes=place.recomputes, layers=max(1, layers))
        for held, layers in _held_on_gpus(study, sources, max_layers, place.num_gpus)
    )


def _most_tokens(study: Study, sources: ResolvedFamily, max_layers: int, place: GradientPlace, room: int) -> int:
    """The largest number of tokens of one pass that fits into the memory of each GPU of `place`; 0 if no pass fits.

    `room` is the number of usable bytes of each GPU.
    """
    settings, value_bytes = dict(sources.base.settings), gradient_value_bytes(study, "cuda")
    return min(
        tokens_within(room - held, settings, value_bytes, recomputes=place.recomputes, layers=max(1, layers))
        for held, layers in _held_on_gpus(study, sources, max_layers, place.num_gpus)
    )


def _held_on_gpus(study: Study, sources: ResolvedFamily, max_layers: int, num_gpus: int) -> list[tuple[int, int]]:
    """For each GPU with a part of the model: the bytes of this part without activations, and its number of layers.

    The bytes are those of the weights, of one gradient, and of the sources, which are read to compute the derivatives
    with respect to coefficients from the gradient.
    """
    number = max(int(sources.base.settings["num_hidden_layers"]), max_layers)
    passing, value_bytes = (
        reduction_bytes(sources, study.search_space.merge_methods),
        gradient_value_bytes(study, "cuda"),
    )
    whole = gradient_model_bytes(sources, value_bytes, max_layers=max_layers)
    if num_gpus == 1:
        return [(whole + passing, number)]
    outside = outside_bytes(sources, value_bytes)
    layer = widest_layer_bytes(sources, value_bytes)
    gradient = max(0, whole - outside - layer * number)
    counts = divided_layers(layer, number, outside, num_gpus)
    return [(outside * (index == 0) + layer * count + gradient + passing, count) for index, count in enumerate(counts)]
