"""Optuna's Gaussian process with expected improvement; of the hypervolume where there are several objectives.

Jones et al., J. Global Optimization 13, 1998; Ament et al., "Unexpected improvements to expected improvement" (NeurIPS
2023). A process is fitted for every proposal, which takes long with hundreds of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from service.tune.searchers.base import ProposalContext

__all__ = ["SEARCHER", "GpSearcher"]


@dataclass(frozen=True)
class GpSearcher:
    """The searcher by a Gaussian process, for spaces without conditions.

    The noise of results is fitted too; their standard errors are not used.
    """

    num_initial: int = 10  # trials with results before the process is used
    # Fitting takes a time that grows with the cube of the trials, and the search for the largest improvement one that
    # grows with parameters times trials. With more, the process learns from the best and the newest trials.
    max_numbers: int = 16_000
    max_rows: int = 150
    # Numbers in the table of candidates and parameters, from the best of which the search for the largest improvement
    # starts. Optuna's 2048 candidates take most of the time of a proposal in spaces of hundreds of parameters.
    max_candidate_numbers: int = 409_600

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        from optuna.samplers import GPSampler

        from service.tune.searchers.optuna_study import propose

        def sampler_of(seed: int) -> GPSampler:
            sampler = GPSampler(n_startup_trials=self.num_initial, warn_independent_sampling=False, seed=seed)
            if context.setting.version not in (1, 2):
                most = self.max_candidate_numbers // len(context.parameters)
                # A Sobol sequence is balanced if its length is a power of two.
                sampler._n_preliminary_samples = min(sampler._n_preliminary_samples, 2 ** int(math.log2(max(16, most))))
            return sampler

        return propose(
            sampler_of, context, num_initial=self.num_initial, max_numbers=self.max_numbers, max_rows=self.max_rows
        )


SEARCHER = GpSearcher()
