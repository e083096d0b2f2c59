"""The held-out stage computed from stored samples, some of them missing, odd or scored twice.

Studies are in a real database, as a driver would have written them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.objectives import Objective
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from service.results.documents import pareto
from service.results.files import trials_jsonl
from service.results.load import run_record
from service.results.report import render_report
from service.results.selection import criteria
from service.results.summary import summary
from service.store import JobWriter, Store
from service.types import EventKind, Origin, RungRecord, TrialRecord, TrialState
from tests.service.described import check_document
from tests.service.resolved import resolved_study, study_document
from workers.types import Evidence, SampleResult, ScoreResult, Split

pytestmark = pytest.mark.slow  # whole searches

Values = Mapping[str, np.ndarray]
N = 60
MATH = Objective("math", "exact_match", "maximize")
TEXT = Objective("text", "exact_match", "maximize")


def recipe(number: int) -> Recipe:
    merge = Merge("linear", (Source("base"), Source("math")), {"weight": (1 - number / 100, number / 100)})
    part = replace(merge, sources=(Source("base", 0), Source("math", 0)))
    layer = LayerRecipe(part, part, part)
    return Recipe({"base": "b0", "math": "m1"}, "base", (layer,), embedding=merge, head=merge)


class Study:
    """A study in a store. Its trials are at full budget, and the first `num_baselines` of them are sources."""

    def __init__(
        self, store: Store, objectives: tuple[Objective, ...], *, files: Mapping[str, str] | None = None
    ) -> None:
        def section(split: str) -> list[dict[str, Any]]:
            return [
                {
                    "name": o.name,
                    "metric": o.metric,
                    "task": {"file": f"{(files or {}).get(o.name, o.name)}_{split}.jsonl"},
                }
                for o in objectives
            ]

        document = {**study_document(), "objectives": section("search"), "holdout": section("holdout")}
        full = dict.fromkeys((objective.name for objective in objectives), N)
        resolved = resolved_study(objectives=objectives, rung_samples=(full,))
        self.store, self.id = (
            store,
            store.create_job(kind="search", name="test", document=document, accepted=resolved.to_json()).id,
        )
        self.writer: JobWriter = store.open_attempt(self.id)

    def add(self, number: int, search: Values, holdout: Values | None, *, origin: Origin = Origin.SEARCH) -> None:
        self.writer.add_trial(TrialRecord(number, origin, f"t{number}", TrialState.WAITING, recipe(number)))
        self.score(number, Split.SEARCH, search)
        values = {name: float(np.mean(array)) for name, array in search.items()}
        errors = {name: float(np.std(array, ddof=1) / len(array) ** 0.5) for name, array in search.items()}
        sizes = {name: len(array) for name, array in search.items()}
        self.writer.finish_rung(
            number, RungRecord(0, sizes, values, errors), samples_reused=0, state=TrialState.COMPLETE
        )
        if holdout is not None:
            self.score(number, Split.HOLDOUT, holdout)

    def score(self, number: int, split: Split, values: Values) -> None:
        samples = tuple(
            SampleResult(name, position, str(position), float(value), "says")
            for name, array in values.items()
            for position, value in enumerate(array)
        )
        prompts = {f"{split} {name}[0:{len(array)}]": "p" for name, array in values.items()}
        evidence = Evidence(recipe(number).digest, "bank", prompts, "sum", "replica-1", number, "fake")
        self.writer.record_chunk(number, split, ScoreResult(samples, evidence, {"score": 0.5}))

    def documents(self) -> tuple[dict[str, Any], dict[str, Any], str]:
        """summary.json, pareto.json and the report; checks the first two by their schemas."""
        run = run_record(self.store, self.id)
        first, second = (json.loads(json.dumps(document, allow_nan=False)) for document in (summary(run), pareto(run)))
        check_document(first, "summary")
        check_document(second, "pareto")
        for line in trials_jsonl(run).splitlines():
            check_document(json.loads(line), "trial")
        return first, second, render_report(run)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    yield store
    store.close()


def binary(rate: float, seed: int, size: int = N) -> np.ndarray:
    """Values of samples with exactly this share of ones, in random order."""
    return np.random.default_rng(seed).permutation((np.arange(size) < round(rate * size)).astype(float))


def both(math: np.ndarray, text: np.ndarray | None = None) -> dict[str, np.ndarray]:
    return {"math": math, "text": math if text is None else text}


# Two metrics of the same documents.


def test_shared_documents_count_once(store: Store) -> None:
    """Two metrics of the same documents do not count them twice.

    They agree on every sample here, so their mean is known no better than each of them.
    """
    study = Study(store, (MATH, TEXT), files={"math": "data", "text": "data"})
    study.add(0, both(binary(0.5, 1)), both(binary(0.45, 2)), origin=Origin.SOURCE)
    study.add(1, both(binary(0.7, 3)), both(binary(0.6, 4)))
    document, _, _ = study.documents()
    assert [row["trial"] for row in document["holdout"]] == [0, 1]
    for row in document["holdout"]:
        assert row["mean"]["ci95"] == pytest.approx(row["values"]["math"]["ci95"])
        assert row["mean"]["standard_error"] == pytest.approx(row["values"]["math"]["standard_error"])
        assert row["differences"]["mean"]["ci95"] == pytest.approx(row["differences"]["math"]["ci95"])


def test_tasks_on_different_data_stay_independent(store: Store) -> None:
    study = Study(store, (MATH, TEXT))
    study.add(0, both(binary(0.5, 1)), both(binary(0.45, 2)), origin=Origin.SOURCE)
    document, _, _ = study.documents()
    (row,) = document["holdout"]
    of_mean, of_one = (np.ptp(estimate["ci95"]) for estimate in (row["mean"], row["values"]["math"]))
    assert of_mean == pytest.approx(of_one / 2**0.5)


# The table of the held-out stage.


def failed_on_holdout(store: Store) -> Study:
    study = Study(store, (MATH, TEXT))
    study.add(0, both(binary(0.4, 1)), both(binary(0.4, 2)), origin=Origin.SOURCE)
    study.add(1, both(binary(0.6, 3), binary(0.9, 5)), both(binary(0.6, 4)))
    study.add(2, both(binary(0.9, 6), binary(0.8, 7)), None)
    return study


def test_failing_winner_keeps_the_table(store: Store) -> None:
    """A winner that fails on held-out data leaves the other rows of the table."""
    study = failed_on_holdout(store)
    assert study.documents()[0]["holdout"] == []  # it may still be scored
    study.writer.add_event(EventKind.HOLDOUT_FAILED, {"trial": 2, "reason": "NaN in the logits"})
    document, front, report = study.documents()
    assert document["best"]["trial"] == 2
    assert [row["trial"] for row in document["holdout"]] == [0, 1]
    assert (document["holdout_reference"], document["selection_bias"]) == (1, None)
    assert document["holdout_failures"] == [{"trial": 2, "reason": "NaN in the logits"}]
    assert document["holdout"][0]["differences"]["mean"]["value"] == pytest.approx(-0.2)
    assert front["holdout_hypervolume"]["trials"] == [1]
    assert "Trial 2 failed on held-out data: NaN in the logits" in report
    assert "minus trial 1, paired" in report


def test_a_winner_that_was_scored_after_all_is_compared_as_ever(store: Store) -> None:
    study = failed_on_holdout(store)
    study.writer.add_event(EventKind.HOLDOUT_FAILED, {"trial": 2, "reason": "NaN in the logits"})
    study.score(2, Split.HOLDOUT, both(binary(0.85, 8)))
    document, _, report = study.documents()
    assert (document["holdout_reference"], document["holdout_failures"]) == (2, [])
    assert len(document["holdout"]) == 3
    assert "minus best, paired" in report


# Samples outside the range.


@pytest.mark.parametrize("metric", ["score", "word_perplexity"])
@pytest.mark.parametrize("split", [Split.SEARCH, Split.HOLDOUT])
def test_sample_outside_the_range_is_shown(store: Store, split: Split, metric: str) -> None:
    """A sample outside the range is reported at its trial and hides nothing else."""
    odd = Objective("odd", metric, "minimize", (0.0, 10.0))
    study = Study(store, (MATH, odd))
    for number, origin in enumerate((Origin.SOURCE, Origin.SOURCE, Origin.SEARCH)):
        values = {s: {"math": binary((5 + number) / 10, number), "odd": np.linspace(1, 9 - number, N)} for s in Split}
        if number == 1:
            values[split]["odd"][17] = 400.0
        study.add(number, values[Split.SEARCH], values[Split.HOLDOUT], origin=origin)
    document, front, report = study.documents()
    (warning,) = document["warnings"]
    assert (warning["trial"], warning["objective"]) == (1, "odd")
    told = f"objective 'odd': {metric} of sample 17 of the {split} data is 400, outside its range [0, 10]"
    assert told in warning["message"]
    assert told.replace("'", "&#39;") in report
    assert [row["trial"] for row in front["front"]] == [2]
    assert [row["trial"] for row in document["holdout"]] == [0, 1, 2]
    high = document["holdout"][1]["values"]["odd"]["ci95"][1]
    assert (high > 10) == (split is Split.HOLDOUT)  # not cut to the range that it left
    assert document["selection_bias_against_baselines"]["mean"]["samples"] == N


def test_a_mean_outside_the_default_range_hides_nothing_else(store: Store) -> None:
    """As an earlier version may have stored it."""
    study = Study(store, (Objective("score", "score", "maximize"),))
    study.add(0, {"score": np.full(N, 37.0)}, {"score": np.full(N, 36.0)}, origin=Origin.SOURCE)
    document, front, _ = study.documents()
    assert document["best"]["values"] == {"score": 37.0}
    assert "outside its default range [0, 1]" in document["warnings"][0]["message"]
    assert front["front"][0]["trial"] == 0


@pytest.mark.parametrize("value", [0.3, 400.0])
def test_one_sample_has_no_standard_error(store: Store, value: float) -> None:
    """One sample of a metric that is not binary has an interval and no standard error."""
    odd = Objective("odd", "score", "maximize", (0.0, 10.0))
    study = Study(store, (odd,))
    one = {"odd": np.array([value])}
    study.writer.add_trial(TrialRecord(0, Origin.SOURCE, "base", TrialState.WAITING, recipe(0)))
    study.score(0, Split.SEARCH, one)
    study.writer.finish_rung(
        0, RungRecord(0, {"odd": 1}, {"odd": value}, {"odd": None}), samples_reused=0, state=TrialState.COMPLETE
    )
    study.score(0, Split.HOLDOUT, one)
    document, front, report = study.documents()
    assert front["front"][0]["standard_errors"] == {"odd": None}
    assert document["holdout"][0]["values"]["odd"]["ci95"] == ([0, 10] if value < 10 else [-400, 800])
    assert "± n/a" in report


# What selection costs.


def uneven_splits(store: Store, *, luck: float) -> Study:
    """A study with four baselines, and a best trial that is better by `luck` on search data than on holdout data.

    The search data are easier by 0.1 for all.
    """
    study = Study(store, (MATH, TEXT))
    for number in range(4):
        rates = [(0.4 + 0.05 * number + easier, 10 * number + i) for i, easier in enumerate((0.1, 0.0))]
        study.add(number, *(both(binary(r, s), binary(r, s + 5)) for r, s in rates), origin=Origin.SOURCE)
    study.add(4, both(binary(0.8 + luck, 50), binary(0.8 + luck, 51)), both(binary(0.7, 52), binary(0.7, 53)))
    return study


def test_the_difference_between_splits_is_no_selection_bias(store: Store) -> None:
    document, _, report = uneven_splits(store, luck=0.0).documents()
    assert document["selection_bias"] == pytest.approx(0.1)
    mean = document.get("selection_bias_against_baselines", {}).get("mean")
    assert mean is not None, "the gap between the splits is taken for selection bias"
    assert mean["value"] == pytest.approx(0.0, abs=1e-9)
    assert mean["ci95"][0] < 0 < mean["ci95"][1]
    assert document["split_difference"]["mean"]["value"] == pytest.approx(0.1)
    assert "of the baselines" in report


def test_differences_add_up(store: Store) -> None:
    """Selection bias and split difference add up to search minus held-out value."""
    document, _, report = uneven_splits(store, luck=0.15).documents()
    bias, difference = document["selection_bias_against_baselines"], document["split_difference"]
    assert bias["mean"]["value"] == pytest.approx(0.15)
    assert bias["mean"]["value"] + difference["mean"]["value"] == pytest.approx(document["selection_bias"])
    assert set(document["selection_bias_by_objective"]) == {"math", "text"}
    for name, gap in document["selection_bias_by_objective"].items():
        assert bias[name]["value"] + difference[name]["value"] == pytest.approx(gap["value"])
    assert f"+{bias['mean']['value']:.3f}" in report


# The front on held-out data.


def test_front_has_a_holdout_hypervolume(store: Store) -> None:
    """The front has a hypervolume on held-out data beside that on search data."""
    study = Study(store, (MATH, TEXT))
    study.add(0, both(binary(0.3, 1)), both(binary(0.3, 2)), origin=Origin.SOURCE)
    study.add(1, both(binary(0.9, 3), binary(0.5, 4)), both(binary(0.8, 5), binary(0.4, 6)))
    study.add(2, both(binary(0.5, 7), binary(0.9, 8)), both(binary(0.4, 9), binary(0.8, 10)))
    _, front, report = study.documents()
    found = front.get("holdout_hypervolume")
    assert found is not None
    assert found["trials"] == [1, 2]
    # Costs 0.2, 0.6 and the other way around, below 1.1: 0.9 x 0.5 + 0.4 x 0.5 on top of it.
    assert found["value"] == pytest.approx(0.9 * 0.5 + 0.5 * 0.4)
    assert found["search"] == pytest.approx(1.0 * 0.6 + 0.6 * 0.4) == pytest.approx(front["hypervolume"])
    low, high = found["ci95"]
    assert low < found["value"] < high < found["value"] + 0.3
    assert front == study.documents()[1]  # the same draw every time
    assert f"a hypervolume of {found['value']:.3f} (95&nbsp;% {low:.3f} to {high:.3f})" in report


# What promotes, and what is best.


def test_promotion_is_explained(store: Store) -> None:
    """Summary and report say why a promoted trial need not be the best."""
    study = Study(store, (MATH, TEXT))
    study.add(0, both(binary(0.3, 1)), both(binary(0.3, 2)), origin=Origin.SOURCE)
    document, _, report = study.documents()
    rules = document.get("selection", {})
    assert rules.get("best", "").startswith("highest mean of math, text on search data")
    assert "non-dominated rank" in rules["promotion"]
    for text in rules.values():
        assert text in report


def test_with_one_objective_both_criteria_are_its_value() -> None:
    rules = criteria((replace(MATH, direction="minimize", range=(0, 2)),))
    assert rules.promotion == "lowest math"
    assert rules.best.startswith("lowest math on search data")
