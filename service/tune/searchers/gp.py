"""Optuna's Gaussian process: it proposes the configuration with the largest expected improvement.

With several objectives, it proposes the configuration with the largest expected improvement of the hypervolume. A new
Gaussian process is fitted for every proposal, which takes long with hundreds of parameters.

Sources: Jones et al., J. Global Optimization 13, 1998; Ament et al., "Unexpected improvements to expected improvement"
(NeurIPS 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.tune.searchers.base import ProposalContext

__all__ = ["SEARCHER", "GpSearcher"]


@dataclass(frozen=True)
class GpSearcher:
    """Searcher that models the objectives by Gaussian processes, for spaces without conditions.

    The searcher draws configurations at random until `num_initial` trials have results. The noise of results is fitted
    too; the standard errors of results are not used. In long searches, the process is fitted to the results of the best
    and the newest trials only: at most `max_rows` results, and so few that (number of results) x (number of parameters)
    is at most `max_numbers`. In spaces of more than `max_small` parameters, the maximum of the acquisition function is
    searched from `num_candidates_in_large` candidates, which is fewer than Optuna's default.
    """

    num_initial: int = 10  # trials with results before the process is used
    # The time for fitting grows with the cube of the number of trials. The time for the search for the largest
    # improvement grows with parameters times trials. In larger studies, the process learns from the best and the newest
    # trials only.
    max_numbers: int = 16_000
    max_rows: int = 150
    # The search for the largest improvement starts from the best of many candidates. In spaces of more than `max_small`
    # parameters, Optuna's 2048 candidates would take most of the time of a proposal, and cover the space no better than
    # fewer.
    max_small: int = 200
    num_candidates_in_large: int = 256  # a power of two, for which a Sobol sequence is balanced

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        from optuna.samplers import GPSampler

        from service.tune.searchers.optuna_study import propose

        def sampler_of(seed: int) -> GPSampler:
            sampler = GPSampler(n_startup_trials=self.num_initial, warn_independent_sampling=False, seed=seed)
            if context.setting.version not in (1, 2) and len(context.parameters) > self.max_small:
                sampler._n_preliminary_samples = self.num_candidates_in_large
            return sampler

        return propose(
            sampler_of, context, num_initial=self.num_initial, max_numbers=self.max_numbers, max_rows=self.max_rows
        )


SEARCHER = GpSearcher()
