"""Tests of whether a merge found by the search is better than the best source model and published recipe.

Every finalist that the search proposed is compared with the best source model and the best published recipe, sample by
sample, by the value that selects the best trial. With more finalists, it is likelier that one of them is only lucky.
Therefore the intervals of their differences hold jointly: each is at the level 1 - 0.05 / finalists. A merge counts as
better if its interval is above 0. If no merge is better than a rival, the probability that a merge counts as better is
at most 5 %.

Sources:
    Dunn 1961, "Multiple comparisons among means", JASA 56 (Bonferroni's correction of intervals).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import Objective
from service.results.selection import accuracy_objectives
from service.results.statistics import LEVEL, Bounds, correlations, mean_of, paired_difference
from service.types import Estimate, Origin, TrialResult

__all__ = ["RivalTest", "criterion", "finding_text", "rival_tests"]

Samples = Mapping[str, NDArray[np.float64]]

RIVALS = {Origin.SOURCE: "single model", Origin.PUBLISHED: "published recipe"}


@dataclass(frozen=True)
class RivalTest:
    """Comparison of the search's finalists (best trials) with the best baseline of one kind, on holdout data.

    The rival is the baseline of this kind with the best value on the holdout data. Part of its lead over the other
    baselines may be chance, so the comparison tends to underestimate the finalists.

    Attributes:
        origin: Kind of baseline: source model or published recipe.
        rival: Trial number of the rival.
        label: Name of the rival.
        differences: By how much each finalist is better than the rival, negative if it is worse, keyed by trial number,
            the best on search data first. The intervals together contain the true differences with a probability of 95
            %.
    """

    origin: Origin
    rival: int
    label: str
    differences: Mapping[int, Estimate]

    @property
    def better(self) -> tuple[int, ...]:
        """Trial numbers of the finalists (best trials) that are better than the best baseline of the comparison.

        The best on search data comes first.
        """
        return tuple(number for number, difference in self.differences.items() if difference.ci95[0] > 0)


def criterion(objectives: Sequence[Objective]) -> str:
    """Name, for users, of the value that ranks the best trials and the baselines.

    The name is the name of an objective, or text such as "mean of ..." for a mean of objectives.
    """
    names = accuracy_objectives(objectives)
    if len(objectives) == 1 or len(names) == 1:
        return names[0] if names else objectives[0].name
    return f"the mean of {', '.join(names)}" if names else "the mean over all objectives, as shares of their ranges"


def rival_tests(
    finalists: Sequence[TrialResult],
    trials: Sequence[TrialResult],
    objectives: Sequence[Objective],
    rows: Mapping[int, Samples],
    *,
    documents: Mapping[str, str],
    bounds: Mapping[str, Bounds],
) -> tuple[RivalTest, ...]:
    """Compare the finalists that the search proposed with the best source model and the best published recipe.

    Finalists are the trials of the Pareto front that are scored on holdout data. Each comparison estimates the mean of
    the paired differences over the accuracy objectives (values in [0, 1], larger is better). Without accuracy
    objectives it estimates the mean over all objectives, each divided by the width of its range. Objectives without
    holdout data are left out.

    Args:
        finalists: The finalists, the best on search data first.
        trials: Trials of the study, or at least its baselines.
        objectives: Objectives that are scored on samples.
        rows: Values on the holdout data, keyed by trial number and objective; all trials have the same samples.
        documents: Identifier of the documents on which each objective was scored. If two identifiers are equal, samples
            at the same position are of the same document.
        bounds: Lowest and highest value that a sample can have, keyed by objective; objectives without known bounds are
            left out.

    Returns:
        One test for each kind of baseline that was scored; none if no finalist was proposed by the search.
    """
    objectives = [o for o in objectives if all(o.name in samples for samples in rows.values())]
    proposed = [t.number for t in finalists if (t.origin.is_searched or t.origin is Origin.USER) and t.number in rows]
    ranked = [o for o in objectives if o.name in accuracy_objectives(objectives)] or list(objectives)
    factors = {o.name: _factor(o, is_share=len(ranked) > 1) for o in ranked}
    merits = {number: {name: f * samples[name] for name, f in factors.items()} for number, samples in rows.items()}
    limits = {name: _ordered(f * bounds[name][0], f * bounds[name][1]) for name, f in factors.items() if name in bounds}
    tests = []
    for origin in RIVALS:
        rivals = [trial for trial in trials if trial.origin is origin and trial.number in merits]
        if not proposed or not rivals:
            continue
        rival = max(rivals, key=lambda trial: float(np.mean([v.mean() for v in merits[trial.number].values()])))
        level = 1 - (1 - LEVEL) / len(proposed)
        differences = {
            number: _difference(merits[number], merits[rival.number], documents, limits, level) for number in proposed
        }
        tests.append(RivalTest(origin, rival.number, rival.label, differences))
    return tuple(tests)


def finding_text(
    tests: Sequence[RivalTest], objectives: Sequence[Objective], *, best: TrialResult | None, was_scored: bool
) -> str:
    """State in one sentence whether a merge is better than the best baselines on held-out data.

    Args:
        tests: Comparisons of the search's best trials (the finalists) with the best baselines; the comparison with
            source models comes first.
        objectives: Objectives for which all compared trials have holdout data.
        best: The best trial on search data; None before a trial was scored on all samples.
        was_scored: Whether any trial was scored on holdout data. If no trial was scored there, the sentence says that
            nothing was tested.
    """
    if best is None or not was_scored:
        return "Whether a merge is better than the baselines was not tested on held-out data."
    if not tests and (best.origin.is_searched or best.origin is Origin.USER):
        return "Whether a merge is better than its source models was not tested: the study scored no baselines."
    if not tests:
        return f"No merge found is better than {best.label}: no trial that the search proposed is among the finalists."
    clauses: list[tuple[str | None, str, str]] = []
    for test in tests:
        rival = f"the best {RIVALS[test.origin]}, {test.label}"
        subject = next(iter(test.better or test.differences))
        name = f"trial {subject}"
        shown = _shown(test.differences[subject])
        if not test.better:
            clauses.append((None, rival, f"({name}: {shown})"))
        else:
            clauses.append((name, rival, f"({shown})"))
    text = ""
    before: str | None = ""
    for subject_name, rival, shown in clauses:
        if subject_name == before:
            text += f" {'and' if subject_name else 'nor'} than {rival} {shown}"
        else:
            joint = "" if before == "" else " but " if (subject_name is None) != (before is None) else " and "
            text += f"{joint}{subject_name or 'no merge found'} is better than {rival} {shown}"
        before = subject_name
    count = len(tests[0].differences)
    corrected = f" and corrected for {count} finalists" if count > 1 else ""
    text += f", in {criterion(objectives)} on held-out data; intervals are paired by document{corrected}."
    return text[0].upper() + text[1:]


def _ordered(one: float, other: float) -> Bounds:
    return min(one, other), max(one, other)


def _factor(objective: Objective, *, is_share: bool) -> float:
    """Compute the factor by which values of an objective are multiplied so that larger values are better.

    The factor is 1 if the objective is maximised, and -1 if it is minimised. If `is_share` is True, the factor is also
    divided by the width of the objective's range, so that objectives with different ranges can be averaged.
    """
    low, high = objective.bounds
    return (1 if objective.direction == "maximize" else -1) / (high - low if is_share else 1)


def _difference(
    first: Samples, second: Samples, documents: Mapping[str, str], bounds: Mapping[str, Bounds], level: float
) -> Estimate:
    names = list(first)
    estimates = [paired_difference(first[n], second[n], bounds=bounds.get(n), level=level) for n in names]
    data = [documents.get(name, name) for name in names]
    return mean_of(estimates, correlation=correlations([first[n] - second[n] for n in names], data))


def _shown(difference: Estimate) -> str:
    low, high = difference.ci95
    return f"difference {difference.value:+.3f}, 95 % interval {low:.3f} to {high:.3f}"
