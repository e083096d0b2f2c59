"""A (1+1) evolution strategy: random mutations of the best trial, with a step size that depends on their success.

Rechenberg's one-fifth rule in the form of Kern et al., "Learning probability distributions in continuous evolutionary
algorithms" (Natural Computing 3, 2004), section 4. In a mutant, each number moves with probability 0.5. The trials are
replayed in their order for every proposal, each with its result at the highest rung that it has reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.encoding import Encoding
from service.tune.searchers.history import by_trial, merit

__all__ = ["SEARCHER", "EvolutionStrategy"]

# Mutants drawn for a proposal; the first whose configuration is new is proposed.
_NUM_MUTANTS = 16


@dataclass(frozen=True)
class EvolutionStrategy:
    """The searcher by a (1+1) evolution strategy, for one objective.

    Each proposal is a random change of the best trial. A number changes with the probability `rate`; the step size is
    the standard deviation of the change, as a share of the parameter's range. The step size begins at `first_step`, is
    multiplied by `success_factor` after a success and falls after a failure, within `smallest_step` and `largest_step`.
    A choice changes with a probability equal to the step size, so choices rarely change once steps are small.
    """

    rate: float = 0.5  # the probability that a number moves
    first_step: float = 0.15  # standard deviation of a move, as a share of the parameter's range
    smallest_step: float = 0.005
    largest_step: float = 0.5
    success_factor: float = math.exp(0.8)  # one success in five keeps the step: four failures undo it

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        rng = context.generator()
        parent, step = self._replay(by_trial(context.observations))
        if parent is not None:
            encoding = Encoding(context.parameters)
            rate = np.where(encoding.is_categorical, step, self.rate)
            row = encoding.encode_parents([parent.configuration], version=context.setting.version)
            mutants = encoding.mutate(np.repeat(row, _NUM_MUTANTS, axis=0), rng, rate=rate, step=step)
            if (mutant := encoding.first_unknown(mutants, context.known_configurations())) is not None:
                return encoding.decode(mutant)
        return context.sample_unseen(rng)

    def _replay(self, trials: Iterable[Observation]) -> tuple[Observation | None, float]:
        """Find the best of `trials`, which the next proposal changes, and the step size of this change.

        The best trial is None if all have failed. The step size is computed from `trials` in order. The step size is
        multiplied by `success_factor` when a proposed trial is better than all earlier trials; otherwise it is divided
        by the fourth root of `success_factor`. The step size stays between the smallest and the largest step.
        """
        parent: Observation | None = None
        step = self.first_step
        for trial in trials:
            is_better = trial.costs is not None and (parent is None or merit(trial) < merit(parent))
            if parent is not None and trial.is_proposed:
                step *= self.success_factor if is_better else self.success_factor**-0.25
                step = min(max(step, self.smallest_step), self.largest_step)
            if is_better:
                parent = trial
        return parent, step


SEARCHER = EvolutionStrategy()
