"""Advice on plans that fit, but in which the CPU of the host takes much of the time of gradients or verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from service.studies.planning.placement import StudyPlacement, gpus_to_verify, machines_of_engines
from service.studies.planning.profiles import MachineProfile
from service.studies.planning.schedule import Phase

if TYPE_CHECKING:
    from search_spaces.study.file import Study
    from service.studies.preflight.gradients import GradientPlace

__all__ = ["advice_of"]

# Advice is given for a phase that takes at least this share of a study's time, with short or long answers, and at least
# this time.
LARGE_SHARE, LARGE_S = 0.25, 600.0


def advice_of(
    study: Study,
    profile: MachineProfile,
    placement: StudyPlacement,
    gradients: GradientPlace | None,
    phases: Sequence[Phase],
    *,
    leave_gradients: Callable[[int], bool],
) -> tuple[str, ...]:
    """Advice on a plan in which engines use every GPU, so that the CPU computes gradients or verification for long.

    The plan is given by its study, the machines (`profile`), the placement, the place of gradients (None if the study
    computes none) and its phases. `leave_gradients` says whether a given number of engines leaves GPUs that can compute
    gradients. Machines without GPUs get no advice, because their CPU computes everything.
    """
    if not profile.gpus:
        return ()
    return tuple(_advice(study, profile, placement, gradients, phases, leave_gradients))


def _advice(
    study: Study,
    profile: MachineProfile,
    placement: StudyPlacement,
    gradients: GradientPlace | None,
    phases: Sequence[Phase],
    leave_gradients: Callable[[int], bool],
) -> Iterator[str]:
    least = sum(phase.elapsed_s.least for phase in phases)
    most = sum(phase.elapsed_s.most for phase in phases)
    long = {
        phase.name: f"{phase.elapsed_s.most / 3600:.1f} of at most {most / 3600:.1f} hours"
        for phase in phases
        if phase.elapsed_s.most >= LARGE_S
        and (phase.elapsed_s.most >= LARGE_SHARE * most or phase.elapsed_s.least >= LARGE_SHARE * least)
    }
    replicas, ranks = study.engine.replicas, study.engine.tensor_parallel_size
    is_full = replicas * ranks >= profile.gpus * profile.nodes
    fewer_engines = range(replicas - 1, 0, -1)
    if (times := long.get("gradient step")) and gradients is not None and gradients.device == "cpu" and is_full:
        is_refined = study.search.refinement is not None
        free = next((number for number in fewer_engines if leave_gradients(number)), 0)
        fewer = f"engine.replicas: {free}" if free else "a machine with more GPUs"
        ways = f"{fewer}, or {'no search.refinement' if is_refined else 'search.algorithm: smac'}"
        yield f"gradients take {times} on the CPU, because engines use every GPU: use {ways}"
    if (times := long.get("verification")) and not placement.verification_gpus:
        less = "fewer of engine.verify's trials and samples"
        needed = gpus_to_verify(placement.num_parameters, profile)
        if needed > profile.gpus:
            few = "one GPU is" if profile.gpus == 1 else f"the {profile.gpus} GPUs of a machine are"
            yield f"verification takes {times} on the CPU, because {few} too small for it: use {less}"
        elif placement.engines * ranks + needed > profile.gpus:
            # As many GPUs must be free on the machine with most engines.
            most_engines = (profile.gpus - needed) // ranks
            free = next((n for n in fewer_engines if machines_of_engines(n, ranks, profile)[1] <= most_engines), 0)
            some = f"engine.replicas: {free}" if free else "a machine with more GPUs"
            left = profile.gpus - placement.engines * ranks
            why = "engines use every GPU" if left == 0 else f"it needs {needed} GPUs, and engines leave {left}"
            yield f"verification takes {times} on the CPU, because {why}: use {some}, or {less}"
        else:  # of merges with alignments
            yield f"verification takes {times} on the CPU: use {less}"
