"""Tests of the made-up layer paths of the benchmark `hm3_paths`, and of a search of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.benchmarks import bench_hm3_paths as bench
from tests.benchmarks.arms import NotKept


def test_scores_are_a_function_of_the_seed() -> None:
    first, again, other = (bench.MadeUpScores(seed) for seed in (0, 0, 1))
    path = tuple(range(bench.LAYERS))
    np.testing.assert_array_equal(first.of(path)[1], again.of(path)[1])
    assert not np.array_equal(first.of(path)[1], other.of(path)[1])


@pytest.mark.parametrize("seed", range(3))
def test_experts_are_good_at_their_own_objective(seed: int) -> None:
    scores = bench.MadeUpScores(seed)
    for objective in range(len(bench.OBJECTIVES)):
        first = objective * bench.LAYERS
        searched, judged = scores.of(tuple(range(first, first + bench.LAYERS)))
        assert judged[objective] == pytest.approx(0.87, abs=0.05)
        assert searched[objective] == pytest.approx(judged[objective], abs=0.25)


@pytest.mark.parametrize("name", ["random", "es", "moead"])
def test_searchers_propose_paths(name: str) -> None:
    paths = bench.proposed({"algorithm": name}, bench.MadeUpScores(0), seed=0, trials=12)
    assert len(set(paths)) == 12
    assert all(bench.PATHS.contains(path) for path in paths)


@pytest.mark.parametrize("options", [{"version": 2}, {"elite_share": 1.0}, {"scalarisation": "tchebycheff"}])
def test_policies_propose_paths(options: dict[str, Any]) -> None:
    version = {name: options[name] for name in ("version",) if name in options}
    own = {name: value for name, value in options.items() if name not in version}
    section = {**bench.policy(**own, episodes=4, mini_batches=2, epochs=1), **version}
    paths = bench.proposed(section, bench.MadeUpScores(0), seed=0, trials=20)
    assert all(bench.PATHS.contains(path) for path in paths)
    assert len(set(paths)) == 20 or version


def test_the_best_hypervolume_comes_first() -> None:
    def arm(value: float) -> dict[str, float]:
        return {"half": value, "all": value, "judge": value, "last third": value, "different": 900.0}

    rows = {
        "version 2: the policy alone": [arm(0.2), arm(0.4)],
        "`elite_share: 1`": [arm(0.3), arm(0.6)],
        "x": [arm(0.1)],
    }
    _, _, *lines = bench.table(rows).splitlines()
    assert lines == [
        "| `elite_share: 1` | 0.450 | 0.450 | 0.450 | +0.150 (+0.100 to +0.200) | 0.450 | 900 | 2 |",
        "| version 2: the policy alone | 0.300 | 0.300 | 0.300 |  | 0.300 | 900 | 2 |",
        "| x | 0.100 | 0.100 | 0.100 | -0.100 (-0.100 to -0.100) | 0.100 | 900 | 1 |",
    ]


def test_rows_are_compared_on_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(bench.ARMS)
    kept_seeds = dict.fromkeys(names[: bench.NUM_COMPARED], 2) | {names[0]: 4, names[5]: 1, names[6]: 3}

    def arm(name: str, seed: int) -> dict[str, Any]:
        if seed >= kept_seeds.get(name, 0):
            raise NotKept
        return {"seed": seed}

    monkeypatch.setattr(bench, "arm", arm)
    assert {name: len(arms) for name, arms in bench.on_file().items()} == dict.fromkeys(
        [*names[: bench.NUM_COMPARED], names[6]], 2
    )
    kept_seeds[names[3]] = 0
    with pytest.raises(NotKept, match="one of the first 4 rows has no arm on file"):
        bench.on_file()
