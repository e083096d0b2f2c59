"""Seconds that each phase of a search took."""

from __future__ import annotations

from service.results.record import RunRecord

__all__ = ["phases"]


def phases(run: RunRecord) -> dict[str, float]:
    """Seconds of each phase of a search, keyed by the phase's name; phases that took no time are left out.

    - `alignments`: learning the alignments (maps between layers) of layer paths (sequences of layers), before the first
      trial
    - `updates`: learning of policies from trials
    - `gradients`: computing losses and their gradients
    - `merging`: computing merges and writing them into engines, added up over engines
    - `scoring`: scoring samples, added up over engines

    Updates, gradients and engines run at the same time, so the sum can be longer than the search.
    """
    seconds = {
        "alignments": run.alignment_s,
        "updates": sum(step.result.seconds for step in run.updates),
        "gradients": sum(step.result.seconds for step in run.gradients),
        "merging": sum(run.engine.swap_s),
        "scoring": run.engine.score_s,
    }
    return {phase: value for phase, value in seconds.items() if value > 0}
