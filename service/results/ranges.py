"""Samples whose value is outside their objective's range.

Such values are used without clipping, and the results contain warnings about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from search_spaces.objectives import Objective
from workers.types import Split

__all__ = ["OutOfRange", "out_of_range"]

# Tolerance for rounding errors of a metric, as a share of the range.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class OutOfRange:
    """Warning about samples of one trial whose value is outside the range of an objective.

    `split` names the data with these samples: search, holdout or benchmark data. `message` describes the first such
    sample.
    """

    trial: int
    objective: str
    split: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Convert the warning about samples outside a range to the JSON object that is stored in an event."""
        return asdict(self)

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> Self:
        """Read the warning about samples outside a range from `payload`, the JSON object of its event."""
        return cls(payload["trial"], payload["objective"], payload["split"], payload["message"])


def out_of_range(
    trial: int, objectives: Sequence[Objective], split: Split, values: Mapping[str, Mapping[int, float]]
) -> tuple[OutOfRange, ...]:
    """Find the objectives for which a sample of a trial has a value outside the objective's range.

    Args:
        trial: Number of the trial.
        objectives: Objectives with their ranges.
        split: Data that were scored: search, holdout or benchmark data.
        values: Values, keyed by objective and sample position (index in the order in which samples are scored).

    Returns:
        One warning for each objective that was found, about the objective's first sample outside the range.
    """
    found = []
    for objective in objectives:
        low, high = objective.bounds
        room = TOLERANCE * (high - low)
        for position, value in values.get(objective.name, {}).items():
            if not low - room <= value <= high + room:
                found.append(OutOfRange(trial, objective.name, str(split), _message(objective, split, position, value)))
                break
    return tuple(found)


def _message(objective: Objective, split: Split, position: int, value: float) -> str:
    low, high = objective.bounds
    kind = "range" if objective.range is not None else "default range"
    return (
        f"objective {objective.name!r}: {objective.metric} of sample {position} of the {split} data is {value:g}, "
        f"outside its {kind} [{low:g}, {high:g}]; values are not clipped, and intervals assume no bounds. State a "
        "range that holds every sample"
    )
