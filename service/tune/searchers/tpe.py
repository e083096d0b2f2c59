"""Optuna's TPE: configurations that are likely under the good trials and unlikely under the other trials.

Sources: Bergstra et al., "Algorithms for hyper-parameter optimization" (NeurIPS 2011); Watanabe, arXiv 2304.11127
(2023), for multivariate TPE; Ozaki et al., GECCO 2020, for several objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.tune.searchers.base import ProposalContext

__all__ = ["SEARCHER", "TpeSearcher"]


@dataclass(frozen=True)
class TpeSearcher:
    """The searcher TPE: Optuna's multivariate TPE, with a group for each set of parameters that exist together.

    The searcher draws configurations at random until `num_initial` trials have results. It learns from all results
    while (number of results) x (number of parameters) is at most `max_numbers`, and otherwise from the results of the
    best and the newest trials.
    """

    num_initial: int = 10  # trials with results before the estimators are used
    max_numbers: int = 160_000  # numbers in the table of observations and parameters: as in SMAC

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        from optuna.samplers import TPESampler

        from service.tune.searchers.optuna_study import propose

        def sampler_of(seed: int) -> TPESampler:
            return TPESampler(n_startup_trials=self.num_initial, multivariate=True, group=True, seed=seed)

        return propose(sampler_of, context, num_initial=self.num_initial, max_numbers=self.max_numbers)


SEARCHER = TpeSearcher()
