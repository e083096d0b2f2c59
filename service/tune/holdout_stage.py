"""The held-out stage: after the search, it scores the Pareto front and the baselines on the holdout data."""

from __future__ import annotations

from service.results.selection import held_out
from service.store import JobWriter
from service.tune.plan import Plan
from service.tune.samples.sample_cache import SampleCache
from service.tune.trials import Trials
from service.types import EventKind
from workers.types import Split

__all__ = ["HoldoutStage"]


class HoldoutStage:
    """The held-out stage: after the search, it scores the Pareto front and the baselines on the holdout data.

    Holdout data are data that the search has not used. In a study without them, the stage is finished at once. `plan`
    has the holdout data, `trials` has the trials of the study, and `samples` caches the scored samples. `writer` stores
    events in the database.
    """

    def __init__(self, plan: Plan, *, trials: Trials, samples: SampleCache, writer: JobWriter) -> None:
        self.is_started = False
        self._plan = plan
        self._trials = trials
        self._samples = samples
        self._writer = writer
        self._left: list[int] = []

    @property
    def is_finished(self) -> bool:
        return not self._plan.holdout_samples or (self.is_started and not self._left)

    @property
    def left(self) -> tuple[int, ...]:
        """Numbers of the trials that still lack scores on holdout data, in the order of starting."""
        return tuple(self._left)

    def start(self) -> None:
        """Choose the trials that are scored on holdout data.

        The chosen trials are the best of the Pareto front, the baselines, and the recipes that the study file lists.
        The method is called when the search has finished. A second call changes nothing.
        """
        if self.is_started or not self._plan.holdout_samples:
            return
        self.is_started = True
        self._left = [
            trial.number
            for trial in held_out(tuple(self._trials.values()), self._plan.objectives)
            if self._samples.missing(trial.recipe.digest, 0, Split.HOLDOUT)
        ]
        self._writer.add_event(EventKind.HOLDOUT_STARTED, {"trials": list(self._left)})

    def finish(self, number: int) -> None:
        """Record that all holdout samples of trial `number` are stored."""
        self._left.remove(number)
        self._writer.add_event(EventKind.HOLDOUT_SCORED, {"trial": number})

    def fail(self, number: int, reason: str) -> None:
        """Record that trial `number` cannot be scored on the holdout data, with the `reason` for it.

        The trial keeps its results on search data.
        """
        self._left.remove(number)
        self._writer.add_event(EventKind.HOLDOUT_FAILED, {"trial": number, "reason": reason})
