"""Results on benchmarks: values of trials, averages of groups, and comparisons with the best baselines.

Every merge of the search or the user is compared with the best source model and with the best published recipe, on each
benchmark and each average. The intervals of all comparisons with one kind of baseline hold jointly (Bonferroni).
Results on benchmarks select no trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import Objective
from service.results.finding import RIVALS
from service.results.holdout import Samples, sample_bounds
from service.results.judgments import Judged, judged_recipes
from service.results.robustness import performance_drop
from service.results.statistics import LEVEL, Bounds, correlations, estimate, mean_of, paired_difference
from service.store import JudgmentRecord
from service.store.documents import AttackResult, BenchmarkFacts
from service.types import Estimate, Origin, TrialResult
from workers.evaluation.built_tasks import permutation

__all__ = [
    "AttackedValue",
    "BenchmarkColumn",
    "BenchmarkRow",
    "BenchmarkTable",
    "BenchmarkTest",
    "JudgedValue",
    "benchmark_table",
]


@dataclass(frozen=True)
class BenchmarkColumn:
    """A benchmark as a column of the results table.

    `facts` describes the benchmark's task and samples. `group` is the name of the group of benchmarks that the
    benchmark belongs to, over which averages are computed; None for no group. `data` identifies the benchmark's
    documents: benchmarks with equal `data` are scored on the same documents in the same order.
    """

    facts: BenchmarkFacts
    group: str | None = None
    data: str = ""


@dataclass(frozen=True)
class AttackedValue:
    """Value of one trial on a benchmark with the prompt template that lowers this trial's value most.

    An attack has searched for this template, among templates of the same meaning.

    Attributes:
        value: Estimate with this template.
        drop: Share of the trial's value with the original template that is lost; None if the value with the original
            template is not positive.
        found: The template, and the number of templates that were scored to find it.
    """

    value: Estimate
    drop: Estimate | None
    found: AttackResult


@dataclass(frozen=True)
class JudgedValue:
    """Preferences of a judge (a language model) for one trial's completions on a benchmark, and their mean length.

    Attributes:
        judged: The judge's preference for each completion, and how consistent the judge was.
        length: Mean number of characters of the completions.
    """

    judged: Judged
    length: float


@dataclass(frozen=True)
class BenchmarkRow:
    """Values of one trial on benchmarks. Benchmarks that still lack samples of this trial are left out.

    Attributes:
        trial: Number of the trial.
        label: Name of the trial.
        origin: Where the trial's recipe comes from: a baseline, the search or the user.
        values: Estimates, keyed by benchmark.
        averages: Unweighted means of the benchmarks of a group, keyed by group. A group is left out if the trial lacks
            one of its benchmarks.
        subtasks: For each benchmark that is a group of tasks, the estimates of its tasks and of the groups of tasks
            within it, keyed by name.
        differences: For each benchmark, the value of this trial minus the value of the reference trial (the best trial
            on search data), paired by sample. Benchmarks on which only one of the two trials was scored are left out.
        average_differences: For each group, the average of this trial minus the average of the reference trial.
        attacks: Results with attacked prompts (the template that lowers the trial's value most), keyed by benchmark,
            for benchmarks whose attack on this trial has ended.
        judged: Judgments of completions by a language model, keyed by benchmark, for benchmarks with a judge.
    """

    trial: int
    label: str
    origin: Origin
    values: Mapping[str, Estimate] = field(default_factory=dict)
    averages: Mapping[str, Estimate] = field(default_factory=dict)
    subtasks: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    average_differences: Mapping[str, Estimate] = field(default_factory=dict)
    attacks: Mapping[str, AttackedValue] = field(default_factory=dict)
    judged: Mapping[str, JudgedValue] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchmarkTest:
    """Comparison of all merges with the best baseline of one kind, on one benchmark or on the average of a group.

    The best baseline, or rival, is the best source model or the best published recipe.

    Attributes:
        name: Name of the benchmark or group.
        is_average: Whether the comparison is on the average of a group.
        origin: Kind of the rival: source model or published recipe.
        rival: Trial number of the rival, the best baseline on the data of this comparison.
        label: Name of the rival.
        differences: By how much each merge is better than the rival, negative if it is worse, keyed by trial number.
            All intervals of one kind of rival, over all benchmarks and averages, together contain the true differences
            with a probability of 95 %.
    """

    name: str
    is_average: bool
    origin: Origin
    rival: int
    label: str
    differences: Mapping[int, Estimate]

    @property
    def better(self) -> tuple[int, ...]:
        """Trial numbers of the merges that are better than the baseline of this comparison (the rival)."""
        return tuple(number for number, difference in self.differences.items() if difference.ci95[0] > 0)


@dataclass(frozen=True)
class BenchmarkTable:
    """Results of all trials on the benchmarks of a study.

    - `columns`, `rows`: the benchmarks, and the values of each trial on them
    - `reference`: the number of the trial that differences are relative to, the best trial on search data; None if that
      trial was scored on no benchmark
    - `tests`: comparisons of all merges with the best source model and the best published recipe
    - `failures`: trials that could not be scored, as (trial number, benchmark, reason)
    """

    columns: tuple[BenchmarkColumn, ...] = ()
    rows: tuple[BenchmarkRow, ...] = ()
    reference: int | None = None
    tests: tuple[BenchmarkTest, ...] = ()
    failures: tuple[tuple[int, str, str], ...] = ()

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the benchmarks in each group of benchmarks, keyed by the group's name."""
        return _groups(self.columns)


def benchmark_table(
    trials: Sequence[TrialResult],
    columns: Sequence[BenchmarkColumn],
    samples: Mapping[str, Samples],
    *,
    reference: int | None,
    failures: Iterable[tuple[int, str, str]] = (),
    attacks: Iterable[AttackResult] = (),
    judgments: Iterable[JudgmentRecord] = (),
) -> BenchmarkTable:
    """Compute the results of all trials on the benchmarks of a study.

    Args:
        trials: Trials of the study.
        columns: Benchmarks of the study.
        samples: Values of samples, keyed by recipe digest and benchmark; a benchmark with fewer samples than its data
            have is not scored yet.
        reference: Number of the trial that differences are relative to; None for no differences.
        failures: Trials that could not be scored, as (trial number, benchmark, reason).
        attacks: Results of prompt attacks, each for a recipe and a benchmark: the prompt template that lowers the value
            most. Samples with these templates are in `samples` too, under names of their own.
        judgments: Judgments of completions by language models (judges). For a benchmark with a judge, `samples` has the
            lengths of completions, because the values come from the judge.
    """
    facts = {column.facts.name: column.facts for column in columns}
    judged = _judged(facts.values(), samples, judgments)
    samples = {digest: _with_judged(of_recipe, facts, judged.get(digest, {})) for digest, of_recipe in samples.items()}
    scored: dict[int, dict[str, NDArray[np.float64]]] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        of_recipe = samples.get(trial.recipe.digest, {})
        whole = {n: of_recipe[n] for n, f in facts.items() if n in of_recipe and len(of_recipe[n]) == f.num_samples}
        if whole:
            scored[trial.number] = whole
    by_number = {trial.number: trial for trial in trials}
    objectives = [column.facts.objective for column in columns]
    bounds = sample_bounds(objectives, scored.values())
    reference = reference if reference in scored else None
    found = {(each.recipe, each.benchmark): each for each in attacks}
    rows = []
    for number, own in scored.items():
        digest = by_number[number].recipe.digest
        row = _row(by_number[number], own, None if reference is None else scored[reference], columns, bounds)
        ended = {name: found[digest, name] for name in own if (digest, name) in found}
        attacked = _attacks(ended, samples[digest], own, facts, bounds)
        rows.append(
            replace(row, attacks=attacked, judged={n: j for n, j in judged.get(digest, {}).items() if n in own})
        )
    failed = tuple(
        (number, name, reason)
        for number, name, reason in failures
        if name in facts
        and (name not in scored.get(number, {}) or _lacks_attack(name, by_number[number], facts, found))
    )
    return BenchmarkTable(
        columns=tuple(columns),
        rows=tuple(rows),
        reference=reference,
        tests=_tests(by_number, scored, columns, bounds),
        failures=tuple(dict.fromkeys(failed)),
    )


def _judged(
    facts: Iterable[BenchmarkFacts], samples: Mapping[str, Samples], judgments: Iterable[JudgmentRecord]
) -> dict[str, dict[str, JudgedValue]]:
    """Collect how judges rated the completions of each recipe, as recipe digest -> benchmark -> rating.

    A judge is a language model that compares a completion with a reference answer; `judgments` are its stored answers.
    A rating has the judge's preference for each completion, in [0, 1], and the mean length of the completions. Recipes
    of which a judgment is missing are left out. `facts` describes the benchmarks. `samples` contains the lengths of
    completions, keyed by recipe digest and benchmark.
    """
    by_benchmark: dict[str, list[JudgmentRecord]] = {}
    for judgment in judgments:
        by_benchmark.setdefault(judgment.benchmark, []).append(judgment)
    found: dict[str, dict[str, JudgedValue]] = {}
    for each in facts:
        recipes = judged_recipes(by_benchmark.get(each.name, ()), num_samples=each.num_samples)
        for digest, judged in recipes.items():
            if each.judge is not None and each.name in samples.get(digest, {}):
                value = JudgedValue(judged, float(np.mean(samples[digest][each.name])))
                found.setdefault(digest, {})[each.name] = value
    return found


def _with_judged(of_recipe: Samples, facts: Mapping[str, BenchmarkFacts], judged: Mapping[str, JudgedValue]) -> Samples:
    """Replace a recipe's sample values on judged benchmarks by the judge's preferences.

    A judge is a language model that compares completions with reference answers; its preference for a completion is a
    number in [0, 1]. `of_recipe` contains the stored sample values of the recipe, keyed by benchmark; on a judged
    benchmark, the stored value is the length of the completion. `judged` contains the judge's preferences and `facts`
    contains the description of the benchmarks, keyed by benchmark. A judged benchmark is left out as long as judgments
    are missing, or if the judgments have too few verdicts.
    """
    values = {n: array for n, array in of_recipe.items() if n not in facts or facts[n].judge is None}
    return values | {name: each.judged.values for name, each in judged.items() if each.judged.problem is None}


def _lacks_attack(
    name: str,
    trial: TrialResult,
    facts: Mapping[str, BenchmarkFacts],
    found: Mapping[tuple[str, str], AttackResult],
) -> bool:
    return facts[name].attack is not None and (trial.recipe.digest, name) not in found


def _attacks(
    found: Mapping[str, AttackResult],
    samples: Samples,
    own: Samples,
    facts: Mapping[str, BenchmarkFacts],
    bounds: Mapping[str, Bounds],
) -> dict[str, AttackedValue]:
    """Compute the results of one merge on attacked benchmarks, keyed by benchmark.

    An attack searches for the prompt template with which the merge has its lowest value. `found` contains the result of
    each attack, keyed by benchmark. `samples` has the merge's sample values on all benchmarks with all templates, and
    `own` has the merge's sample values with the original templates. `facts` describes the benchmarks, and `bounds` has
    the lowest and the highest value of a sample. A benchmark is left out until all samples with the attacked template
    are scored.
    """
    values = {}
    for name, each in found.items():
        attacked = samples.get(each.samples)
        if attacked is None or len(attacked) != facts[name].num_samples:
            continue
        values[name] = AttackedValue(
            # Values with an attacked template may be outside the bounds that the others keep.
            value=estimate(attacked, bounds=_bounds_of(attacked, bounds.get(name))),
            drop=performance_drop(own[name], attacked, seed=facts[name].seed),
            found=each,
        )
    return values


def _bounds_of(values: NDArray[np.float64], bounds: Bounds | None) -> Bounds | None:
    return bounds if bounds is not None and bounds[0] <= values.min() and values.max() <= bounds[1] else None


def _groups(columns: Iterable[BenchmarkColumn]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for column in columns:
        if column.group is not None:
            found[column.group] = (*found.get(column.group, ()), column.facts.name)
    return found


def _row(
    trial: TrialResult,
    own: Samples,
    reference: Samples | None,
    columns: Sequence[BenchmarkColumn],
    bounds: Mapping[str, Bounds],
) -> BenchmarkRow:
    data = {column.facts.name: column.data or column.facts.name for column in columns}
    values = {name: estimate(array, bounds=bounds.get(name)) for name, array in own.items()}
    minus: dict[str, NDArray[np.float64]] = {}
    differences: dict[str, Estimate] = {}
    for name, array in own.items():
        if reference is not None and name in reference:
            minus[name] = array - reference[name]
            differences[name] = paired_difference(array, reference[name], bounds=bounds.get(name))
    return BenchmarkRow(
        trial=trial.number,
        label=trial.label,
        origin=trial.origin,
        values=values,
        averages=_averages(columns, values, own, data),
        subtasks={c.facts.name: _subtasks(c.facts, own[c.facts.name]) for c in columns if _has_parts(c, own)},
        differences=differences,
        average_differences=_averages(columns, differences, minus, data),
    )


def _averages(
    columns: Sequence[BenchmarkColumn], estimates: Mapping[str, Estimate], samples: Samples, data: Mapping[str, str]
) -> dict[str, Estimate]:
    return {
        group: _mean(names, estimates, samples, data)
        for group, names in _groups(columns).items()
        if all(name in estimates for name in names)
    }


def _mean(
    names: Sequence[str], estimates: Mapping[str, Estimate], samples: Samples, data: Mapping[str, str]
) -> Estimate:
    correlation = correlations([samples[name] for name in names], [data[name] for name in names])
    return mean_of([estimates[name] for name in names], correlation=correlation)


def _has_parts(column: BenchmarkColumn, own: Samples) -> bool:
    return column.facts.name in own and len(column.facts.subtasks) > 1


def _subtasks(facts: BenchmarkFacts, values: NDArray[np.float64]) -> dict[str, Estimate]:
    """Estimates, keyed by name, for the subtasks of a benchmark and for the benchmark's groups of subtasks.

    `facts` describes the benchmark. `values` are in the order of the benchmark's samples. The value of a group is the
    mean over its samples.
    """
    names = [name for name, _ in facts.subtasks]
    places: dict[str, list[int]] = {name: [] for name in names}
    for position, (index, _) in enumerate(permutation(dict(facts.subtasks), seed=facts.seed)):
        places[names[index]].append(position)
    for category, members in facts.categories.items():
        places[category] = sorted(position for member in members for position in places[member])
    bounds = sample_bounds([facts.objective], [{facts.name: values[at]} for at in places.values()])
    return {name: estimate(values[at], bounds=bounds.get(facts.name)) for name, at in places.items()}


def _tests(
    trials: Mapping[int, TrialResult],
    scored: Mapping[int, Samples],
    columns: Sequence[BenchmarkColumn],
    bounds: Mapping[str, Bounds],
) -> tuple[BenchmarkTest, ...]:
    """Compare all merges with the best source model and the best published recipe.

    There is a test for each benchmark, and for the average of each group of several benchmarks. Trials that a user has
    marked as invalid are left out.

    Args:
        trials: Trials, keyed by number.
        scored: Sample values of the scored trials, as trial number -> benchmark -> values.
        columns: Benchmarks of the study.
        bounds: Lowest and highest value that a sample of a benchmark can have, keyed by benchmark; benchmarks without
            known bounds are left out.
    """
    scored = {number: samples for number, samples in scored.items() if trials[number].invalid is None}
    merges = [number for number in scored if _is_merge(trials[number].origin)]
    objectives = {column.facts.name: column.facts.objective for column in columns}
    data = {column.facts.name: column.data or column.facts.name for column in columns}
    compared: list[tuple[str, bool, tuple[str, ...]]] = [(name, False, (name,)) for name in objectives]
    compared += [(group, True, names) for group, names in _groups(columns).items() if len(names) > 1]
    found: list[BenchmarkTest] = []
    for origin in RIVALS:
        rivals = [number for number in scored if trials[number].origin is origin]
        level = 1 - (1 - LEVEL) / max(1, len(merges) * len(compared))
        for name, is_average, names in compared:
            ours = [number for number in merges if all(n in scored[number] for n in names)]
            theirs = [number for number in rivals if all(n in scored[number] for n in names)]
            if not ours or not theirs:
                continue
            best = max(theirs, key=lambda number: _merit(scored[number], names, objectives))
            differences = {
                number: _difference(scored[number], scored[best], names, objectives, data, bounds, level)
                for number in ours
            }
            found.append(BenchmarkTest(name, is_average, origin, best, trials[best].label, differences))
    return tuple(found)


def _is_merge(origin: Origin) -> bool:
    """Whether trials of this origin (source of their recipe) are merges of the search or of the user.

    Only merges of the search or of the user are tested against the best baselines. The result is False for baselines,
    which are the source models and published recipes.
    """
    return origin.is_searched or origin is Origin.USER


def _sign(objective: Objective) -> int:
    return 1 if objective.direction == "maximize" else -1


def _merit(samples: Samples, names: Sequence[str], objectives: Mapping[str, Objective]) -> float:
    return float(np.mean([_sign(objectives[name]) * samples[name].mean() for name in names]))


def _difference(
    first: Samples,
    second: Samples,
    names: Sequence[str],
    objectives: Mapping[str, Objective],
    data: Mapping[str, str],
    bounds: Mapping[str, Bounds],
    level: float,
) -> Estimate:
    """Estimate how much better `first` is than `second`, on average over the benchmarks `names`.

    `first` and `second` have the sample values of two trials, keyed by benchmark. `objectives` has metric and direction
    of each benchmark. `data` has the id of each benchmark's documents; benchmarks with equal ids have the same
    documents. `bounds` are the lowest and highest value of a sample, and `level` is the coverage of the interval, such
    as 0.95.
    """
    estimates, minus = {}, {}
    for name in names:
        own, other = (first, second) if _sign(objectives[name]) > 0 else (second, first)
        estimates[name] = paired_difference(own[name], other[name], bounds=bounds.get(name), level=level)
        minus[name] = own[name] - other[name]
    return _mean(names, estimates, minus, data)
