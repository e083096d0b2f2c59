"""The tables of the benchmark stage: values, averages, subtasks, and comparisons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.results.benchmarks import BenchmarkColumn, benchmark_table
from service.results.robustness import performance_drop
from service.results.statistics import estimate, paired_difference
from service.store.documents import AttackResult, BenchmarkFacts
from service.types import Origin, RecipeDigest, TrialResult, TrialState
from workers.evaluation.built_tasks import permutation

ORIGINS = {0: Origin.SOURCE, 1: Origin.SOURCE, 2: Origin.PUBLISHED, 3: Origin.SEARCH, 4: Origin.SEARCH}


def trials() -> list[TrialResult]:
    return [
        TrialResult(number, origin, f"t{number}", TrialState.COMPLETE, RecipeDigest(f"d{number}"))
        for number, origin in ORIGINS.items()
    ]


def column(name: str, *, group: str | None = None, count: int = 200, **facts: Any) -> BenchmarkColumn:
    arguments = {"metric": "acc", "direction": "maximize", "range": None, "task_digest": name, "num_samples": count}
    return BenchmarkColumn(BenchmarkFacts(name=name, **(arguments | facts)), group, name)


def drawn(*names: str, count: int = 200) -> dict[str, dict[str, Any]]:
    """Values of each trial on the benchmarks `names`. Trial 3 is far better than all others."""
    rng = np.random.default_rng(0)
    return {
        f"d{n}": {name: (rng.random(count) < (0.9 if n == 3 else 0.4)).astype(float) for name in names} for n in ORIGINS
    }


def test_rows_have_values_averages_and_paired_differences() -> None:
    values = drawn("arc", "piqa", "math")
    columns = [column("arc", group="sense"), column("piqa", group="sense"), column("math")]
    table = benchmark_table(trials(), columns, values, reference=3)
    row = table.rows[1]
    assert row.values["arc"] == estimate(values["d1"]["arc"], bounds=(0, 1))
    assert row.averages.keys() == {"sense"}
    assert row.averages["sense"].value == pytest.approx((values["d1"]["arc"].mean() + values["d1"]["piqa"].mean()) / 2)
    assert row.differences["math"] == paired_difference(values["d1"]["math"], values["d3"]["math"], bounds=(0, 1))
    assert row.average_differences["sense"].value == pytest.approx(
        row.averages["sense"].value - table.rows[3].averages["sense"].value
    )
    assert table.groups == {"sense": ("arc", "piqa")}


def test_a_row_lacks_what_is_not_scored_whole() -> None:
    """A benchmark of which a sample is missing has no value, its group no average, and a failure is named."""
    values = drawn("arc", "piqa")
    values["d4"]["piqa"] = values["d4"]["piqa"][:-1]
    columns = [column("arc", group="sense"), column("piqa", group="sense")]
    failures = [(4, "piqa", "away"), (3, "piqa", "away, later scored"), (4, "piqa", "away")]
    table = benchmark_table(trials(), columns, values, reference=4, failures=failures)
    assert table.rows[4].values.keys() == {"arc"}
    assert not table.rows[4].averages
    assert table.failures == ((4, "piqa", "away"),)
    assert table.rows[0].differences.keys() == {"arc"}
    assert not table.rows[0].average_differences


def test_subtasks_add_up_to_the_benchmark() -> None:
    """Each sample counts for the subtask that the order of samples names, and for the group that the subtask is in."""
    sizes = {"law": 3, "physics": 5, "biology": 4}
    order = permutation(sizes, seed=7)
    values = np.array([float(subtask) for subtask, _ in order]) / 2  # law 0, physics 0.5, biology 1
    facts: dict[str, Any] = {
        "subtasks": tuple(sizes.items()),
        "categories": {"stem": ("physics", "biology")},
        "seed": 7,
    }
    table = benchmark_table(trials()[:1], [column("mmlu", count=12, **facts)], {"d0": {"mmlu": values}}, reference=None)
    parts = table.rows[0].subtasks["mmlu"]
    assert {name: (e.value, e.samples) for name, e in parts.items()} == {
        "law": (0.0, 3),
        "physics": (0.5, 5),
        "biology": (1.0, 4),
        "stem": (pytest.approx(6.5 / 9), 9),
    }
    assert sum(parts[name].value * count for name, count in sizes.items()) / 12 == pytest.approx(
        table.rows[0].values["mmlu"].value
    )


def test_merges_are_compared_with_the_best_baselines() -> None:
    """The better merge is found, in each benchmark and average, against both kinds; the other one is not."""
    values = drawn("arc", "piqa")
    columns = [column("arc", group="sense"), column("piqa", group="sense")]
    tests = benchmark_table(trials(), columns, values, reference=3).tests
    names = [(test.name, test.is_average, test.origin) for test in tests]
    expected = [("arc", False), ("piqa", False), ("sense", True)]
    assert names == [(*each, origin) for origin in (Origin.SOURCE, Origin.PUBLISHED) for each in expected]
    assert [test.better for test in tests] == [(3,)] * 6
    means = {number: values[f"d{number}"]["arc"].mean() for number in (0, 1)}
    assert tests[0].rival == max(means, key=lambda number: means[number])


def test_invalid_trials_are_not_compared() -> None:
    """A merge or baseline whose values a user has marked as wrong has a row, and is in no comparison."""
    values = drawn("arc")
    marked = [replace(trial, invalid="cut off") if trial.number in (1, 3) else trial for trial in trials()]
    table = benchmark_table(marked, [column("arc")], values, reference=None)
    assert [row.trial for row in table.rows] == [0, 1, 2, 3, 4]
    assert [(test.rival, [*test.differences]) for test in table.tests] == [(0, [4]), (2, [4])]


def test_intervals_are_corrected_for_merges_and_benchmarks() -> None:
    """The interval of one merge on one benchmark has the level of all comparisons against that rival together."""
    values = drawn("arc", "piqa")
    columns = [column("arc", group="sense"), column("piqa", group="sense")]
    test = benchmark_table(trials(), columns, values, reference=3).tests[0]
    rival = values[f"d{test.rival}"]["arc"]
    corrected = paired_difference(values["d3"]["arc"], rival, bounds=(0, 1), level=1 - 0.05 / (2 * 3))
    assert test.differences[3].ci95 == pytest.approx(corrected.ci95)


def test_no_merge_is_claimed_better_by_luck() -> None:
    """If all trials are equally good, at most 5 % of the tables claim a better merge: 1 of 100; uncorrected, 10."""
    columns = [column(name, group="all") for name in ("a", "b", "c")]
    claims = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = {f"d{n}": {c.facts.name: (rng.random(200) < 0.5).astype(float) for c in columns} for n in ORIGINS}
        tests = benchmark_table(trials(), columns, values, reference=3).tests
        claims += any(test.better for test in tests if test.origin is Origin.PUBLISHED)
    assert claims <= 5


def test_less_is_better_where_the_metric_says_so() -> None:
    values = {f"d{n}": {"ter": np.full(50, 10.0) + n + np.arange(50) % 3} for n in ORIGINS}
    values["d3"]["ter"] -= 8
    columns = [column("ter", count=50, direction="minimize", range=(0.0, 100.0))]
    tests = benchmark_table(trials(), columns, values, reference=None).tests
    assert tests[0].rival == 0
    assert [test.better for test in tests] == [(3,), (3,)]


def test_trials_with_equal_recipes_share_values() -> None:
    """Two trials of one recipe both have a row."""
    twins = [*trials(), TrialResult(5, Origin.SEARCH, "t5", TrialState.COMPLETE, RecipeDigest("d3"))]
    table = benchmark_table(twins, [column("arc")], drawn("arc"), reference=3)
    assert table.rows[5].values == table.rows[3].values


def attacked(name: str, digest: str, *, samples: str = "@worst", queries: int = 7) -> AttackResult:
    return AttackResult(name, digest, "Cassify: {{text}}", samples, queries, is_cut=False)


def test_attacked_values_stand_beside_the_original() -> None:
    """A row has the value with the worst template and the drop rate, paired with the original samples."""
    values = drawn("sst2")
    for number in ORIGINS:
        values[f"d{number}"]["@worst"] = values[f"d{number}"]["sst2"] * (np.arange(200) % 4 > 0)
    columns = [column("sst2", attack={"kind": "stress"}, template="Classify: {{text}}")]
    attacks = [attacked("sst2", "d1"), attacked("sst2", "d3", samples="sst2", queries=0)]
    rows = benchmark_table(trials(), columns, values, reference=3, attacks=attacks).rows
    found = rows[1].attacks["sst2"]
    assert found.value == estimate(values["d1"]["@worst"], bounds=(0, 1))
    assert found.drop == performance_drop(values["d1"]["sst2"], values["d1"]["@worst"])
    assert found.drop is not None
    assert 0.1 < found.drop.ci95[0] < found.drop.value < found.drop.ci95[1] < 0.5
    assert (found.found.template, found.found.num_queries) == ("Cassify: {{text}}", 7)
    same = rows[3].attacks["sst2"].drop
    assert same is not None
    assert (same.value, same.ci95) == (0.0, (0.0, 0.0))
    assert not rows[0].attacks
    assert rows[1].values.keys() == {"sst2"}


def test_an_attack_without_all_samples_has_no_value() -> None:
    """Samples of the worst template that were removed leave no value, and a failed attack is named."""
    values = drawn("sst2")
    values["d1"]["@worst"] = values["d1"]["sst2"][:-1]
    columns = [column("sst2", attack={"kind": "stress"})]
    table = benchmark_table(
        trials(),
        columns,
        values,
        reference=3,
        attacks=[attacked("sst2", "d1")],
        failures=[(0, "sst2", "no fill-mask model"), (1, "sst2", "later attacked")],
    )
    assert not table.rows[1].attacks
    assert table.failures == ((0, "sst2", "no fill-mask model"),)
