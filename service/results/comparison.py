"""Held-out results of one trial: estimates by objective, and differences from a reference trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from service.results.statistics import Bounds, correlations, estimate, mean_of, paired_difference
from service.types import Comparison, Estimate

__all__ = ["compare"]


def compare(
    label: str,
    trial: int,
    samples: Mapping[str, ArrayLike],
    *,
    reference: Mapping[str, ArrayLike] | None = None,
    mean_over: Sequence[str] = (),
    documents: Mapping[str, str] | None = None,
    bounds: Mapping[str, Bounds] | None = None,
) -> Comparison:
    """Compute the held-out results of a trial from its samples, with the differences from a reference trial.

    Args:
        label: Name of the trial in the table.
        trial: Number of the trial.
        samples: Maps each objective to the trial's values [num_samples], in the metric's unit.
        reference: Values of the reference trial on the same samples in the same order; None for no comparison.
        mean_over: Objectives of which the unweighted mean is computed; objectives without samples are left out.
        documents: Identifier of the documents on which each objective was scored. If two identifiers are equal, samples
            at the same position are of the same document. An objective without an identifier shares its documents with
            no other objective.
        bounds: Lowest and highest value that a sample can have, keyed by objective; objectives without known bounds are
            left out.

    Returns:
        The estimate of each objective, and the mean over the objectives in `mean_over`; the mean is None if there are
        no objectives to average. With `reference`, the result also has the paired differences "this trial minus
        reference", keyed by objective, and the difference of the means under "mean".

    Raises:
        ValueError: The values cannot be estimated or compared (functions `estimate` and `paired_difference`).
    """
    ranges = bounds or {}
    averaged = [name for name in mean_over if name in samples]
    data = [(documents or {}).get(name, name) for name in averaged]

    def mean(estimates: Mapping[str, Estimate], values: Mapping[str, ArrayLike]) -> Estimate:
        correlation = correlations([values[name] for name in averaged], data)
        return mean_of([estimates[name] for name in averaged], correlation=correlation)

    estimates = {name: estimate(values, bounds=ranges.get(name)) for name, values in samples.items()}
    differences = {}
    if reference is not None:
        differences = {
            name: paired_difference(values, reference[name], bounds=ranges.get(name))
            for name, values in samples.items()
        }
        if averaged:
            minus = {name: np.subtract(samples[name], reference[name]) for name in averaged}
            differences["mean"] = mean(differences, minus)
    return Comparison(
        label=label,
        trial=trial,
        values=estimates,
        mean=mean(estimates, samples) if averaged else None,
        differences=differences,
    )
