"""Comparisons of stopped trials with their rivals: the paired differences at each rung, on the samples of the rung."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from search_spaces.objectives import Objective
from service.results.comparison import compare
from service.results.documents import estimate_documents
from service.results.holdout import Samples, sample_bounds
from service.results.selection import accuracy_objectives
from service.schemas.files import EstimateDocument, Number
from service.types import RungRecord, TrialResult

__all__ = ["TITLE", "StopLook", "StoppedTrial", "StopsPlot", "stopped_trials", "stops_json"]

TITLE = "Paired differences between stopped trials and their rivals at each rung."


@dataclass(frozen=True)
class StopLook:
    """Comparison of a trial with its rival at one rung (a number of samples at which trials are compared)."""

    rung: Number
    samples: Annotated[int, Field(description="Samples of each objective.")]
    differences: Annotated[
        dict[str, EstimateDocument],
        Field(
            description='The trial minus its rival on the rung\'s samples, paired, by objective and as "mean" of the '
            "accuracy objectives. Objectives of which a sample is not stored for both are left out."
        ),
    ]


@dataclass(frozen=True)
class StoppedTrial:
    """Trial with the rival against which it was stopped, and their comparisons at the rungs that the trial finished."""

    trial: Number
    rival: Annotated[int | None, Field(description="Null if no scheduler stopped the trial, or an early version did.")]
    rung: Annotated[int | None, Field(description="Highest rung that the trial has finished.")]
    reason: str | None
    looks: tuple[StopLook, ...]


@dataclass(frozen=True)
class StopsPlot:
    """Trials that were stopped early, each with its comparisons with the rival that was ahead of it.

    `total` is the number of trials that the request selects. `trials` contains these trials or, if there are very many,
    only the first of them.
    """

    plot: Literal["stops"]
    total: int
    trials: tuple[StoppedTrial, ...]


_ADAPTER: TypeAdapter[StopsPlot] = TypeAdapter(StopsPlot)


def stops_json(plot: StopsPlot) -> bytes:
    """Encode `plot`, the comparisons of stopped trials with their rivals, as JSON text in UTF-8."""
    return _ADAPTER.dump_json(plot)


def stopped_trials(
    chosen: Sequence[TrialResult],
    rivals: Mapping[int, TrialResult],
    objectives: Sequence[Objective],
    *,
    documents: Mapping[str, str],
    read: Callable[[Iterable[str]], Mapping[str, Samples]],
) -> tuple[StoppedTrial, ...]:
    """Compare each of the trials `chosen` with its rival at the rungs that the trial has finished.

    Args:
        chosen: Trials to compare.
        rivals: Maps the number of a trial to the trial that it is compared with; trials without a rival have no
            comparisons.
        objectives: Objectives of the study.
        documents: Identifier of the documents on which each objective was scored.
        read: Returns the values of search samples, keyed by recipe digest and objective, in the order of their
            positions. A value is NaN where no sample is stored. Called once, with the digests of all trials that are
            compared.
    """
    compared = [trial for trial in chosen if trial.number in rivals]
    digests = {each.recipe.digest for trial in compared for each in (trial, rivals[trial.number])}
    values = read(digests) if digests else {}

    def looks(trial: TrialResult) -> tuple[StopLook, ...]:
        rival = rivals.get(trial.number)
        if rival is None:
            return ()
        own, others = values.get(trial.recipe.digest, {}), values.get(rival.recipe.digest, {})
        return tuple(_look(rung, own, others, objectives, documents) for rung in trial.rungs)

    return tuple(
        StoppedTrial(
            trial=trial.number,
            rival=rivals[trial.number].number if trial.number in rivals else None,
            rung=trial.rungs[-1].rung if trial.rungs else None,
            reason=trial.reason,
            looks=looks(trial),
        )
        for trial in chosen
    )


def _look(
    rung: RungRecord,
    own: Samples,
    others: Samples,
    objectives: Sequence[Objective],
    documents: Mapping[str, str],
) -> StopLook:
    """Compare the samples `own` of a trial with the samples `others` of its rival at one rung."""
    sizes = {name: size for name, size in rung.num_samples.items() if size > 0}

    def at_rung(values: Samples) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        found = {name: values[name][:size] for name, size in sizes.items() if name in values}
        return {name: array for name, array in found.items() if len(array) == sizes[name] and not np.isnan(array).any()}

    ours, theirs = at_rung(own), at_rung(others)
    both = [objective.name for objective in objectives if objective.name in ours and objective.name in theirs]
    ours, theirs = ({name: values[name] for name in both} for values in (ours, theirs))
    averaged = accuracy_objectives(objectives)
    found = compare(
        "",
        0,
        ours,
        reference=theirs,
        # A mean over fewer objectives than elsewhere would be another number.
        mean_over=averaged if set(averaged) <= set(both) else (),
        documents=documents,
        bounds=sample_bounds(objectives, (ours, theirs)),
    )
    return StopLook(rung.rung, max(sizes.values(), default=0), dict(estimate_documents(found.differences)))
