"""Choice of a trial on the Pareto front by a user's weights of the objectives.

For each trial and objective, the gap between the trial's value and the best value on the front is divided by the width
of the objective's range (0 to 1 if the study states none). The front's own range is not used: on a front that varies
little, noise would then count as much as a large difference elsewhere. The gaps are combined by the augmented Chebyshev
function, as in ParEGO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from search_spaces.objectives import Objective
from search_spaces.preferences import augmented_chebyshev, preference_vector
from service.errors import NotFound
from service.results.record import RunRecord
from service.results.selection import costs_of_values
from service.schemas.files import PreferredDocument
from service.types import Origin
from workers.types import Split

__all__ = ["Choices", "choices"]


@dataclass(frozen=True)
class Choices:
    """Trials of a study's Pareto front from which a user's weights of the objectives select one.

    `labels` contains the label of each trial, and `values` contains the trial's values of the objectives, keyed by
    trial number. `split` says whether the values are from search data or from holdout data.
    """

    objectives: tuple[Objective, ...]
    split: Split
    labels: Mapping[int, str]
    values: Mapping[int, Mapping[str, float]]

    def preferred(self, weights: Mapping[str, float]) -> PreferredDocument:
        """Select the trial that is best by the user's `weights` of the objectives; if trials are equal, the first one.

        Raises:
            InvalidPreference: A weight is negative, not finite or of an unknown objective, or the weights do not sum to
                one.
            NotFound: No trial has been scored on all samples of the search.
        """
        vector = preference_vector(weights, objectives=[objective.name for objective in self.objectives])
        if not self.values:
            raise NotFound("no trial has reached the full budget yet, so there is none to prefer")
        numbers = sorted(self.values)
        costs = np.array([costs_of_values(self.values[number], self.objectives) for number in numbers])
        gaps = costs - costs.min(axis=0)
        distances = augmented_chebyshev(gaps, vector).round(12).tolist()
        totals = gaps.sum(axis=1).tolist()  # objectives of weight 0 decide between equals
        trial = min(zip(distances, totals, numbers, strict=True))[2]
        return {
            "weights": dict(weights),
            "trial": trial,
            "label": self.labels[trial],
            "values": dict(self.values[trial]),
            "split": "holdout" if self.split is Split.HOLDOUT else "search",
        }


def choices(run: RunRecord) -> Choices:
    """Collect the trials of a run's Pareto front from which a user's weights of the objectives select one.

    The trials' values are their values on holdout data, or on search data if no trial of the front was scored on
    holdout data. If only some trials of the front were scored on holdout data, only these may be selected.
    """
    names = {objective.name for objective in run.objectives}
    rows = {row.trial: {name: e.value for name, e in row.values.items()} for row in run.holdout}
    held_out = {trial.number: rows[trial.number] for trial in run.front if set(rows.get(trial.number, ())) == names}
    on_search: dict[int, Mapping[str, float]] = {trial.number: trial.values for trial in run.front}
    return Choices(
        run.objectives,
        Split.HOLDOUT if held_out else Split.SEARCH,
        {
            trial.number: f"trial {trial.number}" if trial.origin is Origin.SEARCH else trial.label
            for trial in run.front
        },
        held_out or on_search,
    )
