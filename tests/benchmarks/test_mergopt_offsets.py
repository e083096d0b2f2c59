"""Tests of the comparison of offsets: differences between arms, decisions of the pilot, and the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.recipe import Merge
from tests.benchmarks import arms, search_intervals
from tests.benchmarks import bench_mergopt_offsets as bench
from tests.benchmarks.arms import NotKept, files_alone
from workers.training.mergopt.fit import Fit

SHIPPED = bench.EXPERIMENTS["shipped"]
RATE = 5e-4


class TinyFleet:
    """A fleet with 4 of 8 right answers: one more at coefficient 0.3, two fewer at rates off the pilot's best."""

    seconds = 2.0

    def __init__(self, experts: Any, directory: Path, cache: Path) -> None:
        self.places = {alias: Path(alias) for alias in experts}
        rates = {spec.training.learning_rate for spec in experts.values()}
        self._right = 4 - 2 * (rates != {RATE})

    def own(self, alias: str, split: str, num_items: int | None = None) -> Any:
        return np.ones(8, bool)

    def answers(self, merge: Merge, skills: Any, split: str, num_items: int | None = None) -> Any:
        right = self._right + (merge.coefficients.get("lambda") == 0.3)
        return np.array([[item < right for item in range(8)]] * len(skills))


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bench.Experiment:
    """An experiment whose experts are not trained, and whose arms are kept in a temporary folder."""
    monkeypatch.setattr(arms, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "Fleet", TinyFleet)
    monkeypatch.setattr(bench, "trained", lambda spec, cache: Path(f"/experts/{spec.name}-{spec.seed}"))
    monkeypatch.setattr(bench, "sample_of", lambda base, experts: None)
    monkeypatch.setattr(bench, "fit", lambda sample: Fit("laplace", 0.00234, 0.1, 1.0, 0.0, 9))
    monkeypatch.setattr(search_intervals, "NUM_RESAMPLES", 50)
    return bench.Experiment(SHIPPED.family)


def test_the_pilot_chooses_rate_and_scale(experiment: bench.Experiment) -> None:
    """The rate is that with the best task arithmetic on search items; b is the scale at that rate, of two digits."""
    assert (experiment.rate, experiment.scale) == (RATE, 0.0023)
    assert [each["rate"] for each in experiment.pilot()["rates"]] == list(bench.RATES)


def test_arms_differ_in_the_offset_alone(experiment: bench.Experiment) -> None:
    of = {arm: experiment.experts(arm, 3) for arm in bench.ARMS}
    for skill in experiment.skills:
        specs = {arm: experts[skill] for arm, experts in of.items()}
        plain = specs[bench.ADAMW]
        for spec in specs.values():
            assert spec.model_copy(update={"method": plain.method}) == plain
            assert (spec.training.learning_rate, spec.training.layers, spec.method.betas) == (RATE, None, (0.9, 0.98))
        assert specs[bench.LAPLACE].method.scale == 0.0023
        assert specs[bench.LAPLACE].method.noise == "laplace"
        resampled, merges = specs[bench.RESAMPLED].method, specs[bench.ORACLE].method
        assert (resampled.noise, merges.noise) == ("task_vectors", "merges")
        pilot = [f"/experts/{s}-{100 * bench.PILOT_SEED + n}/model" for n, s in enumerate(experiment.skills)]
        assert list(resampled.fit_to) == pilot
        same_seed = [f"/experts/{s}-{300 + n}/model" for n, s in enumerate(experiment.skills) if s != skill]
        assert list(merges.fit_to) == same_seed
    seeds = {spec.seed for experts in of.values() for spec in experts.values()}
    assert len(seeds) == len(experiment.skills), "each expert has a seed of its own, the same in all arms"


def test_tables_are_of_the_seeds_on_file(experiment: bench.Experiment) -> None:
    for seed in range(2):
        for arm in bench.ARMS:
            experiment.judged(arm, seed)
            experiment.judged_sets(arm, seed, 2)
            if arm != bench.ADAMW:
                experiment.mixed(arm, seed)
    experiment.judged(bench.ADAMW, 2)  # a seed that is not complete
    bench.comparison(experiment, range(2))
    with files_alone():
        head, _, first, second, *_ = bench.arms_table(experiment).splitlines()
        assert head.startswith(
            "| experts (2 of 5 seeds) | own skill | alpha 0.3 | weight averaging | task arithmetic |"
        )
        assert first.startswith("| AdamW | 1.000 | 0.625 | 0.500 | 0.625 |")
        assert second.startswith("| MergOPT, Laplace noise | 1.000 | 0.625 (+0.000 [+0.000, +0.000]) |")
        curve = bench.curves_table(experiment).splitlines()[2]
        assert curve.startswith("| AdamW | 0.500 | 0.500 | 0.625 | 0.500 |")
        assert "| `noise: merges`, oracle | 2 | 2 |" in bench.numbers_table(experiment)
        assert len(bench.mixed_table(experiment).splitlines()) == 2 + 1 + 2 * 3
        with pytest.raises(NotKept):
            bench.resemblance_table(experiment)
