"""The limit of a study's samples (`limits.max_samples`): used samples, and trials and steps that may still start.

Each sample that is scored in the search, also for a baseline, counts as one. A step of the searcher, such as a
gradient, counts as the number of samples that its request states (property `num_charged`). Samples of the held-out
stage and of the verification are not counted. The search leaves unused the samples that the refinement (gradient
descent on coefficients, after the search) may take.

No trial or step starts that could exceed the limit. A trial starts if the limit still allows it when all earlier trials
have ended. Therefore the decision is the same with any number of replicas and after any interruption. If the limit
allows the trial even when every earlier trial takes its largest possible number of samples, the trial starts without
waiting for the earlier trials.
"""

from __future__ import annotations

from service.tune.plan import Plan
from service.tune.samples.sample_cache import SampleCache
from service.tune.schedulers.base import Proposal, RungTable

__all__ = ["SampleLimit"]


class SampleLimit:
    """The samples that a study has used, compared with the limit `max_samples` of its plan.

    `table` is the scheduler, from which the samples that trials can still take are computed. `samples` has the scored
    samples. `num_charged` is the charge, in samples, for the searcher's stored computations, such as gradients.
    """

    def __init__(self, plan: Plan, *, table: RungTable, samples: SampleCache, num_charged: int) -> None:
        self.num_charged = num_charged
        self._max_samples = plan.max_samples
        self._kept = plan.most_refined_samples
        self._totals = tuple(sum(rung.values()) for rung in plan.rung_samples)
        self._table = table
        self._samples = samples

    @property
    def num_used(self) -> int:
        """Number of samples that count towards the study's limit `limits.max_samples`.

        Every sample that is scored in the search counts. In addition, each computation of the searcher, such as a
        gradient, counts as the number of samples that its request states.
        """
        return self._samples.num_searched + self.num_charged

    def admits(self, proposal: Proposal, *, num_charged: int = 0) -> bool | None:
        """Whether the limit of samples allows the trial of `proposal`, or a computation that the trial needs, to start.

        If `num_charged` is 0, the question is about the trial. Otherwise the question is about a computation, such as a
        gradient, that counts as `num_charged` samples. The worst case is the sum of four numbers of samples: the
        samples used so far, the samples kept for the refinement (gradient descent after the search), the most samples
        that existing trials can still take, and the most samples that the new trial and the computation can take.

        - True: the worst case is within the limit.
        - None: the worst case is not within the limit, but evaluations are left, which may use fewer samples.
        - False: the worst case is not within the limit, and no evaluation is left.
        """
        return self._admits(self._needed(proposal, num_charged) + self._kept)

    def admits_refinement(self, num_samples: int) -> bool | None:
        """Whether the limit allows the refinement of one layer path, which takes at most `num_samples` samples.

        A layer path is the sequence of layers of a merge; the refinement improves the path's coefficients after the
        search. The samples that the search leaves for the refinement may be used. The result is None as long as the
        answer depends on running evaluations.
        """
        return self._admits(num_samples)

    def _admits(self, num_samples: int) -> bool | None:
        if self._max_samples is None:
            return True
        if self.num_used + self._table.most_samples_left(self._totals) + num_samples <= self._max_samples:
            return True
        return None if next(self._table.ready(), None) is not None else False

    def reason(self, proposal: Proposal, *, num_charged: int = 0) -> str:
        """The reason why the limit of samples ends the search, as a text for users.

        Call this after `admits` has returned False, with the same arguments. `proposal` is the trial that cannot start.
        If `num_charged` is above 0, the trial needs a computation that counts as `num_charged` samples, and this
        computation cannot start.
        """
        needed = self._needed(proposal, num_charged) + self._table.most_samples_left(self._totals)
        kept = f", {self._kept:,} are kept for the refinement" if self._kept else ""
        return (
            f"limits.max_samples: {self.num_used:,} of {self._max_samples:,} samples are used{kept}, and what would "
            f"start next may take {needed:,}"
        )

    def _needed(self, proposal: Proposal, num_charged: int) -> int:
        return num_charged + self._table.most_samples_of(proposal, self._totals)
