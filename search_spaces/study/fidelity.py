"""Section `fidelity` of a study file: the scheduler, and the samples at each rung."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from search_spaces import fidelity as ladders
from search_spaces.section import Section
from search_spaces.study.objectives import ObjectiveSpec, Rungs

__all__ = ["Fidelity"]

DEFAULT_ERROR_RATE = 0.05


class Fidelity(Section):
    scheduler: ladders.Scheduler = "racing"
    """The scheduler, which decides which trials are evaluated further. racing: a trial continues as long as no better
    one is ahead of it on the same samples; hyperband: a bracket promotes when it is full; asha: a rung promotes with
    every result; successive_halving: a rung promotes when all trials are scored there; none: one rung.
    """
    min_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of every objective at the first rung."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of every objective at the last rung, the full budget."""
    eta: Annotated[int, Field(ge=2)] | None = None
    """One configuration in eta is promoted, to about eta times the samples. Default: 3."""
    rungs: Rungs | None = None
    """The number of samples at each rung, instead of min_samples and max_samples."""
    rule: Literal["behind", "bound"] = "behind"
    """The rule by which scheduler: racing stops a trial. behind: as soon as a better one is ahead of it; bound: when it
    is behind by a margin that holds simultaneously at all looks.
    """
    error_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """With rule: bound, the probability that some trial of the study is stopped wrongly. Default: 0.05."""

    @property
    def bound_error_rate(self) -> float | None:
        """The limit on the probability that racing stops any trial wrongly; None unless the racing rule is "bound".

        The limit is the key `error_rate`, or its default.
        """
        if self.rule != "bound":
            return None
        return DEFAULT_ERROR_RATE if self.error_rate is None else self.error_rate

    @property
    def reduction_factor(self) -> int:
        """The reduction factor eta, or its default of 3: one configuration in eta is promoted."""
        return 3 if self.eta is None else self.eta

    @property
    def rung_samples(self) -> tuple[int, ...] | None:
        """The number of samples at each rung, for objectives that do not state their own rungs.

        The result is None if there is a single rung with all samples of the task (`scheduler: none`). Raises ValueError
        if the scheduler needs several rungs and the section does not define them.
        """
        if self.rungs is not None:
            return self.rungs
        if self.scheduler == "none":
            return None if self.max_samples is None else (self.max_samples,)
        if self.min_samples is None or self.max_samples is None:
            raise ValueError(
                f"{self.scheduler} needs min_samples and max_samples, or rungs; "
                "write `scheduler: none` to score every trial on all samples"
            )
        return ladders.rungs(self.min_samples, self.max_samples, self.reduction_factor)

    def rungs_of(self, objective: ObjectiveSpec) -> tuple[int | None, ...]:
        """The number of samples of an objective at each rung.

        The result is (None,) if there is a single rung with all samples of the objective's task. Raises ValueError if
        neither the objective nor the section defines the numbers.
        """
        return objective.rungs or self.rung_samples or (None,)
