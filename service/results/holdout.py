"""Held-out results computed from single samples: estimates of trials, selection bias, and hypervolume."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import Objective, hypervolume
from service.results.comparison import compare
from service.results.finding import RivalTest, rival_tests
from service.results.selection import accuracy_objectives, best_trial, compared_with, costs_of_values, finalists
from service.results.statistics import (
    bootstrap,
    correlations,
    estimate,
    independent_difference,
    mean_of,
    paired_difference,
)
from service.types import Comparison, Estimate, Origin, TrialResult
from workers.types import Split

__all__ = ["FrontVolume", "HeldOut", "Samples", "Scored", "held_out_results", "held_out_rows", "sample_bounds"]

# Values of one recipe's samples by objective, in the order of their positions.
Samples = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Scored:
    """Values of the samples of all recipes on one kind of data: the search data or the holdout data.

    `samples` are the values of samples, keyed by recipe digest and objective. `documents` has, for each objective, an
    identifier of the documents on which it was scored. If two objectives have equal identifiers, their samples at the
    same position are of the same document.
    """

    samples: Mapping[str, Samples] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scored):
            return NotImplemented
        return (
            self.documents == other.documents
            and self.samples.keys() == other.samples.keys()
            and all(_are_equal(samples, other.samples[digest]) for digest, samples in self.samples.items())
        )

    __hash__ = None  # type: ignore[assignment]  # it has arrays


@dataclass(frozen=True)
class FrontVolume:
    """Hypervolume of the finalists on holdout data, and for comparison on search data.

    Finalists are the trials of the Pareto front that are scored on holdout data; `trials` has their numbers. `holdout`
    is the estimate on holdout data, and `search` is the value of the same trials on search data.
    """

    holdout: Estimate
    search: float
    trials: tuple[int, ...]


@dataclass(frozen=True)
class HeldOut:
    """Results of scoring finalists and baselines on the holdout data.

    Finalists are the best trials of the Pareto front. The best trial's value on search data minus its value on holdout
    data is the sum of `selection_bias` and `split_difference`. These two fields have a number for each objective and,
    as "mean", for the mean of the accuracy objectives (values in [0, 1], larger is better). The two fields are empty
    without baselines.

    Attributes:
        rows: Every finalist and baseline that was scored, with differences "this row minus `reference`".
        reference: Trial number of the best trial, or of the next finalist if the best trial failed on holdout data.
        failures: Trial numbers with the reason why they failed on holdout data.
        tests: Comparisons of the proposed finalists with the best source model and the best published recipe.
        selection_bias: Lead of the best trial over the baselines on search data, minus its lead on holdout data.
        split_difference: Mean of the baselines on search data minus their mean on holdout data, which shows how much
            easier the search data are; it has no selection bias, because baselines are not selected.
        volume: Hypervolume of the finalists.
    """

    rows: tuple[Comparison, ...] = ()
    reference: int | None = None
    failures: tuple[tuple[int, str], ...] = ()
    tests: tuple[RivalTest, ...] = ()
    selection_bias: Mapping[str, Estimate] = field(default_factory=dict)
    split_difference: Mapping[str, Estimate] = field(default_factory=dict)
    volume: FrontVolume | None = None


def held_out_results(
    trials: Sequence[TrialResult],
    objectives: Sequence[Objective],
    *,
    search: Scored,
    holdout: Scored,
    failures: Mapping[int, str] | None = None,
    seed: int = 0,
) -> HeldOut:
    """Compute the results of finalists (the best trials of the Pareto front) and baselines on the holdout data.

    The results have no rows until the best trial has been scored on holdout data or has failed there.

    Args:
        trials: Trials of the study.
        objectives: Objectives of the study. Objectives that count the recipe's layers or parameters have no samples;
            the results have their exact value.
        search: Scores on search data; only the scores of the best trial and of the baselines are needed.
        holdout: Scores on holdout data.
        failures: Reasons of trials that failed on holdout data, keyed by trial number.
        seed: Seed of the hypervolume's bootstrap.
    """
    scored = [objective for objective in objectives if objective.cost_of_recipe is None]
    final = finalists(trials, objectives)
    compared = compared_with(final, trials)
    rows = _complete(compared, holdout.samples, [objective.name for objective in objectives])
    failed = {number: reason for number, reason in (failures or {}).items() if number not in rows}
    reference = next((trial.number for trial in final if trial.number not in failed), None)
    if not rows or (reference is not None and reference not in rows):
        return HeldOut(failures=tuple(sorted(failed.items())))
    bounds = sample_bounds(objectives, rows.values())
    best = best_trial(trials, objectives)
    bias, difference = _selection_bias(best, compared, objectives, rows, search=search, holdout=holdout)
    return HeldOut(
        rows=held_out_rows(compared, objectives, holdout, reference=reference),
        reference=reference,
        failures=tuple(sorted(failed.items())),
        tests=rival_tests(final, trials, scored, rows, documents=holdout.documents, bounds=bounds),
        selection_bias=bias,
        split_difference=difference,
        volume=_front_volume(final, objectives, rows, documents=holdout.documents, seed=seed),
    )


def held_out_rows(
    compared: Sequence[TrialResult], objectives: Sequence[Objective], holdout: Scored, *, reference: int | None
) -> tuple[Comparison, ...]:
    """Describe the trials `compared` that were scored on all held-out samples, with differences from a reference trial.

    The differences are paired, sample by sample. There are no differences if `reference` is None, or if it is the
    number of a trial that was not scored on held-out data. `holdout` has the values of the held-out samples.
    """
    exact = _exact_values(compared, objectives)
    rows = _complete(compared, holdout.samples, [objective.name for objective in objectives])
    labels = {trial.number: trial.label for trial in compared}
    if reference not in rows:
        reference = None
    bounds = sample_bounds(objectives, rows.values())
    described = (
        compare(
            labels[number],
            number,
            samples,
            reference=None if reference is None else rows[reference],
            mean_over=accuracy_objectives(objectives),
            documents=holdout.documents,
            bounds=bounds,
        )
        for number, samples in rows.items()
    )
    return tuple(_with_exact(row, exact, reference) for row in described)


def _exact_values(trials: Iterable[TrialResult], objectives: Sequence[Objective]) -> dict[int, dict[str, float]]:
    """Values of the objectives that count layers or parameters, as trial number -> objective -> value.

    These values follow from the recipe alone, and are exact.
    """
    costs = [objective.name for objective in objectives if objective.cost_of_recipe is not None]
    return {trial.number: {name: trial.values[name] for name in costs if name in trial.values} for trial in trials}


def _with_exact(row: Comparison, exact: Mapping[int, Mapping[str, float]], reference: int | None) -> Comparison:
    """Add the values of objectives that need no samples, such as the number of layers, to a trial's held-out results.

    Such objectives are properties of the recipe and have exact values. `row` has the results of the trial and their
    differences from a reference trial, whose number is `reference`. `exact` contains the values of the objectives
    without samples, keyed by trial number and objective. The trial's difference from the reference trial is added for
    each of these objectives too, unless `reference` is None or `row` has no differences.
    """
    own = exact[row.trial]
    others = {} if reference is None or not row.differences else exact[reference]
    differences = {name: _exactly(value - others[name]) for name, value in own.items() if name in others}
    return replace(
        row,
        values={**row.values, **{name: _exactly(value) for name, value in own.items()}},
        differences={**row.differences, **differences},
    )


def _exactly(value: float) -> Estimate:
    return Estimate(value, 0.0, 0, (value, value))


def _complete(
    trials: Iterable[TrialResult], samples: Mapping[str, Samples], names: Sequence[str]
) -> dict[int, Samples]:
    """Collect the sample values of the trials that are scored on all samples, as trial number -> objective -> values.

    `samples` contains the values, keyed by recipe digest and objective, and `names` are the objectives. A trial is left
    out if it has fewer samples of an objective than another trial: it is not scored yet, or has failed.
    """
    found = {}
    for trial in trials:
        if of_recipe := samples.get(trial.recipe.digest):
            found[trial.number] = {name: of_recipe[name] for name in names if name in of_recipe}
    most: dict[str, int] = {}
    for of_trial in found.values():
        for name, values in of_trial.items():
            most[name] = max(most.get(name, 0), len(values))
    return {number: values for number, values in found.items() if {n: len(v) for n, v in values.items()} == most}


def _are_equal(samples: Samples, others: Samples) -> bool:
    return samples.keys() == others.keys() and all(np.array_equal(each, others[name]) for name, each in samples.items())


def sample_bounds(objectives: Sequence[Objective], samples: Collection[Samples]) -> dict[str, tuple[float, float]]:
    """Find the lowest and highest possible sample value of each objective, for confidence intervals.

    `samples` contains the sample values of each trial, keyed by objective. There are three cases:

    - All values of the objective are in its range: the bounds are this range.
    - A value is outside the range, and every trial has several values: the true bounds are not known, and the objective
      is left out.
    - A value is outside the range, and a trial has a single value, whose interval needs bounds: the bounds are
      estimated as the smallest interval that contains the range and all values. This interval is extended at both ends
      by its own length.
    """
    found = {}
    for objective in objectives:
        values = [of_recipe[objective.name] for of_recipe in samples if objective.name in of_recipe]
        low = min([objective.bounds[0], *(float(array.min()) for array in values)])
        high = max([objective.bounds[1], *(float(array.max()) for array in values)])
        if (low, high) == objective.bounds:
            found[objective.name] = (low, high)
        elif any(len(array) == 1 for array in values):
            found[objective.name] = (2 * low - high, 2 * high - low)
    return found


def _selection_bias(
    best: TrialResult | None,
    compared: Sequence[TrialResult],
    objectives: Sequence[Objective],
    rows: Mapping[int, Samples],
    *,
    search: Scored,
    holdout: Scored,
) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
    """Estimate the best trial's selection bias, and how much easier the search data are than the holdout data.

    The selection bias is the best trial's lead on search data minus its lead on holdout data. A lead is the difference
    from the mean of the baselines. The second result is the mean of the baselines on search data minus their mean on
    holdout data.

    `compared` are the trials that are compared on holdout data. The baselines among them are used, except a baseline
    with the same recipe as the best trial. `rows` has the trials' values on holdout data. `search` and `holdout` have
    the values on both kinds of data. Leads are computed sample by sample, so that samples that are easy for all merges
    do not change them. Both results have an estimate for each of the `objectives`. Both results are empty if the best
    trial or the baselines lack samples.
    """
    if best is None or best.number not in rows:
        return {}, {}
    baselines = [
        trial
        for trial in compared
        if trial.number in rows
        and trial.origin in (Origin.SOURCE, Origin.PUBLISHED)
        and trial.recipe.digest != best.recipe.digest
    ]
    digests = [best.recipe.digest, *(trial.recipe.digest for trial in baselines)]
    names = list(rows[best.number])
    sizes = {digest: [len(search.samples.get(digest, {}).get(name, ())) for name in names] for digest in digests}
    if not baselines or any(size != sizes[digests[0]] or not all(size) for size in sizes.values()):
        return {}, {}
    lead: dict[Split, dict[str, Estimate]] = {}
    level: dict[Split, dict[str, Estimate]] = {}
    averaged = accuracy_objectives(objectives)
    for split, scored in ((Split.SEARCH, search), (Split.HOLDOUT, holdout)):
        bounds = sample_bounds(objectives, [scored.samples[digest] for digest in digests])
        own = {name: scored.samples[digests[0]][name] for name in names}
        others = {name: np.mean([scored.samples[digest][name] for digest in digests[1:]], axis=0) for name in names}
        leads = {name: paired_difference(own[name], others[name], bounds=bounds.get(name)) for name in names}
        levels = {name: estimate(others[name], bounds=bounds.get(name)) for name in names}
        minus = {name: own[name] - others[name] for name in names}
        lead[split] = _with_mean(leads, minus, averaged, scored.documents)
        level[split] = _with_mean(levels, others, averaged, scored.documents)
    return _between(lead), _between(level)


def _with_mean(
    estimates: Mapping[str, Estimate], samples: Samples, averaged: Collection[str], documents: Mapping[str, str]
) -> dict[str, Estimate]:
    names = [name for name in averaged if name in estimates]
    if not names:
        return dict(estimates)
    correlation = correlations([samples[name] for name in names], [documents.get(name, name) for name in names])
    return {**estimates, "mean": mean_of([estimates[name] for name in names], correlation=correlation)}


def _between(by_split: Mapping[Split, Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Estimate, for each objective, the value on search data minus the value on holdout data.

    `by_split` contains the estimates on search data and on holdout data, keyed by objective. The two estimates of an
    objective are independent, because they are of different samples.
    """
    search, holdout = by_split[Split.SEARCH], by_split[Split.HOLDOUT]
    return {name: independent_difference(search[name], holdout[name]) for name in search}


def _front_volume(
    finalists: Sequence[TrialResult],
    objectives: Sequence[Objective],
    rows: Mapping[int, Samples],
    *,
    documents: Mapping[str, str],
    seed: int,
) -> FrontVolume | None:
    final = [trial for trial in finalists if trial.number in rows]
    names = [objective.name for objective in objectives if objective.cost_of_recipe is None]
    exact = [_exact_values([trial], objectives)[trial.number] for trial in final]
    if not final or any(set(rows[trial.number]) != set(names) for trial in final):
        return None

    def volume(means: Mapping[str, NDArray[np.float64]]) -> float:
        candidates = [dict(zip(names, values, strict=True)) for values in zip(*(means[n] for n in names), strict=True)]
        whole = [values | costs for values, costs in zip(candidates, exact, strict=True)]
        return hypervolume([costs_of_values(values, objectives) for values in whole])

    samples = {name: np.stack([rows[trial.number][name] for trial in final]) for name in names}
    return FrontVolume(
        holdout=bootstrap(volume, samples, {name: documents.get(name, name) for name in names}, seed=seed),
        search=hypervolume([costs_of_values(trial.values, objectives) for trial in final]),
        trials=tuple(trial.number for trial in final),
    )
