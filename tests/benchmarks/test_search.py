"""Tests of the search benchmark's arithmetic: exact match in one pass, charged costs, fronts, paired intervals."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.baselines import all_baselines
from search_spaces.recipe import Recipe
from search_spaces.spaces.layer_paths import MERGED, LayerPaths
from search_spaces.study.engine import EngineOptions
from search_spaces.study.search import Search
from service.tune.searchers.descents import descents_of
from tests.benchmarks import bench_hm3, bench_search, search_arms, search_intervals
from tests.benchmarks.code_digests import closure, statements_of
from tests.benchmarks.family_training import SHIPPED
from tests.benchmarks.one_pass import OnePass
from tests.benchmarks.search_families import FAMILIES
from tests.benchmarks.search_intervals import interval, volume_interval, volume_of
from tests.benchmarks.search_runs import Bench, Run, SearchSpec, Trial, code_of
from workers.engines.transformers.backend import Reference
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.models.family import open_family
from workers.tiny_family import family_dir
from workers.types import ScoreRequest, Span, TaskSpec

SPEC = SearchSpec("shipped", "skills", "test", 0, {"algorithm": "random"})


def trial(number: int, *values: float, spent: int = 0, origin: str = "search") -> Trial:
    return Trial(number, origin, str(number), {}, str(number), {str(i): v for i, v in enumerate(values)}, spent)


def test_best_and_front_are_those_of_what_was_spent_so_far() -> None:
    trials = (trial(0, 0.5, 0.5, origin="source"), trial(1, 0.9, 0.1, spent=10), trial(2, 0.8, 0.6, spent=20))
    run = Run(SPEC, trials, 20, (), 0.0)
    assert [run.best(budget).number for budget in (0, 10, 20)] == [0, 0, 2]
    assert [t.number for t in search_arms.front_of(run.until(10))] == [0, 1]
    assert [t.number for t in search_arms.front_of(run.trials)] == [1, 2]
    reached = search_arms.volume(run.until(10))
    assert bench_search.samples_to_reach(run, reached) == 10
    assert bench_search.samples_to_reach(run, reached + 0.01) == 20
    assert bench_search.samples_to_reach(run, 1.0) is None
    assert [(cut.spent, len(cut.trials)) for cut in (run.cut(15), run.cut(25))] == [(10, 2), (20, 3)]


def test_equal_recipes_are_on_a_front_once() -> None:
    twice = [trial(0, 0.5, 0.5), Trial(1, "search", "1", {}, "0", {"0": 0.5, "1": 0.5}, 1)]
    assert [t.number for t in search_arms.front_of(twice)] == [0]


def test_volume_of_judged_merges_is_that_of_their_means() -> None:
    values = np.zeros((1, 2, 4), dtype=np.bool_)
    values[0, 0, :2] = True  # costs 0.5 and 1.0, reference 1.1
    assert volume_of(values) == pytest.approx(0.6 * 0.1)


def test_intervals_hold_the_difference_and_narrow_with_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_intervals, "NUM_RESAMPLES", 200)
    draw = np.random.default_rng(0)

    def judged(share: float, items: int) -> Any:
        return draw.random((5, 3, items)) < share

    wide = interval([judged(0.6, 50)], [judged(0.5, 50)])
    narrow = interval([judged(0.6, 1000)], [judged(0.5, 1000)])
    for found in (wide, narrow):
        assert found["low"] < 0.1 < found["high"]
    assert narrow["high"] - narrow["low"] < (wide["high"] - wide["low"]) / 2
    same = judged(0.5, 50)
    assert interval([same], [same]) == {"value": 0.0, "low": 0.0, "high": 0.0}
    volumes = volume_interval([list(judged(0.6, 500)[:, None])], [list(judged(0.5, 500)[:, None])])
    assert 0 < volumes["low"] < volumes["value"] < volumes["high"]


def test_intervals_count_the_spread_between_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_intervals, "NUM_RESAMPLES", 200)
    theirs = np.zeros((4, 1, 500), dtype=np.bool_)
    ours = theirs.copy()
    ours[:2] = True  # two of four seeds are right everywhere: no item says otherwise
    found = interval([ours], [theirs])
    assert found["high"] - found["low"] > 0.5


def test_tables_have_auto_first_and_then_the_best_rival() -> None:
    def row(family: str, searcher: str, evaluations: int, judge: float) -> dict[str, Any]:
        found = {"family": family, "searcher": searcher, "evaluations": evaluations, "spread": 0.01}
        return {**found, "judge": judge, "by_seed": [judge]}

    arms = (("es", 40, 0.4), ("gp", 40, 0.5), ("auto", 5, 0.6), ("auto", 8, 0.7))
    rows = [row(family, *arm) for family in ("shipped", "letters") for arm in arms]
    head, _, *lines = bench_search.single_table({"rows": rows}).splitlines()
    assert head == "| searcher | evaluations | shipped | letters |"
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| `auto`", "8"], ["| `auto`", "5"], ["| `gp`", "40"], ["| `es`", "40"]
    ]  # fmt: skip
    assert lines[0] == "| `auto` | 8 | 0.700 ± 0.010 | 0.700 ± 0.010 |"


@pytest.mark.parametrize("name", [f"{name}{pool}" for pool in ("", "_merged") for name in bench_hm3.SEARCHES])
def test_searchers_of_paths_have_the_same_pools(name: str) -> None:
    """Each has the experts' paths and, in the other arm, the merged models of the same 15 vectors."""
    spec = bench_hm3.METHODS[name].spec(name, 0)
    preflight = Bench.of(bench_hm3.FAMILY).preflight(spec)
    paths = preflight.space.parameters.structure
    assert isinstance(paths, LayerPaths)
    assert preflight.algorithm.name == name.removesuffix("_merged")
    is_merged = name.endswith("_merged")
    assert paths.models == ("math", "text", "lookup") + (MERGED,) * is_merged
    assert paths.num_preferences == (15 if is_merged else 1)
    recipe = preflight.space.to_recipe(preflight.space.parameters.sample(np.random.default_rng(0)))
    assert preflight.space.to_recipe(preflight.space.from_recipe(recipe) or {}).digest == recipe.digest
    if is_merged:
        own: Any = Bench.of(bench_hm3.FAMILY).preflight(bench_hm3.METHODS["random_merged"].spec("random_merged", 0))
        of_this: Any = preflight.space
        assert {each.digest for each in of_this.pool.values()} == {each.digest for each in own.space.pool.values()}


@pytest.mark.parametrize(("name", "num_scored"), [("es_merged", 90), ("es_merged_halving", 270)])
def test_fronts_of_the_mean_are_of_the_samples_that_were_scored(
    monkeypatch: pytest.MonkeyPatch, name: str, num_scored: int
) -> None:
    """A searcher of the mean has no samples for its front that its search did not score."""
    bench = Bench.of(bench_hm3.FAMILY)
    spec = bench_hm3.METHODS[name].spec(name, 0)
    preflight = bench.preflight(spec)
    configuration = preflight.space.parameters.sample(np.random.default_rng(0))
    digest = preflight.space.to_recipe(configuration).digest
    trial = Trial(0, "search", "", configuration, digest, {"mean": 0.5}, num_scored)
    asked: list[tuple[Any, int, int]] = []

    def exact_matches(recipe: Any, task: Any, start: int, stop: int) -> Any:
        asked.append((task, start, stop))
        return bench.scorer.documents(task)[start:stop] < 900  # the items of the first skill are right

    monkeypatch.setattr(bench.scorer, "exact_matches", exact_matches)
    found = bench_hm3.with_skills(bench, Run(spec, (trial,), num_scored, (), 0.0))
    assert asked == [(preflight.tasks.search["mean"], 0, num_scored)]
    assert dict(found.trials[0].values) == {"math": 1.0, "text": 0.0, "lookup": 0.0}


@pytest.mark.parametrize("name", ["hm3", "moead", "es", "random"])
def test_successive_halving_takes_as_many_samples(name: str) -> None:
    """With successive halving, a search of layer paths scores as many samples as without."""
    spec = bench_hm3.METHODS[f"{name}_merged_halving"].spec("halving", 0)
    budget = Bench.of(bench_hm3.FAMILY).preflight(spec).budget
    totals = [sum(each.values()) for each in budget.rung_samples]
    trials = bench_hm3.HALVED_TRIALS
    assert trials * totals[0] + trials // bench_hm3.ETA * (totals[1] - totals[0]) == 960 * 90
    assert spec.budget in (None, trials * totals[0] + totals[1] - totals[0])


@pytest.mark.parametrize("name", bench_hm3.ABLATIONS)
def test_ablations_are_studies(name: str) -> None:
    spec = bench_hm3.ABLATIONS[name].spec(bench_hm3.spec_name(name), 0)
    found = FAMILIES[spec.family].study(spec.goal, **spec.document())
    assert found.search.algorithm == "hm3"
    assert (found.search_space.merged is not None) == ("merged models" in name)


def test_differences_table() -> None:
    """The table has a column for each search and a row for each other."""
    half = {"value": 0.5, "low": 0.25, "high": 0.75}
    minus = {"hm3 minus grid": half, "hm3_merged minus hm3": half, "hm3_merged minus grid": half}
    assert bench_hm3.minus_table(minus).splitlines() == [
        "| minus | `hm3` | `hm3`, a merged model in the pool |",
        "|---|---|---|",
        "| `grid` | +0.500 [+0.250, +0.750] | +0.500 [+0.250, +0.750] |",
        "| `hm3` |  | +0.500 [+0.250, +0.750] |",
    ]


def test_auto_keeps_its_budget() -> None:
    """Single-objective searches that `auto` chooses stay within their budget."""
    for evaluations in bench_search.SINGLE_BUDGETS:
        options = bench_search.single_spec("shipped", 0, evaluations).search["gradient"]
        steps = 3 * options["steps"] * options["batch"]
        spent = steps + options["points"] * bench_search.EVALUATION + bench_search.NUM_COMPARED
        assert 0.95 * evaluations <= spent / bench_search.EVALUATION <= evaluations


def test_autos_searches_of_a_front_use_up_their_budgets() -> None:
    for evaluations in bench_search.FRONT_BUDGETS:
        search = Search.model_validate(bench_search.front_spec("shipped", 0, evaluations).search)
        assert search.preferences is not None
        vectors = search.preferences.weights(("math", "text", "lookup"), seed=0)
        descents = descents_of(search.gradient, vectors)
        assert sum(descent.num_points for descent in descents) == len(descents) < search.max_trials, "then midpoints"
        steps = sum(descent.num_steps for descent in descents)
        spent = 3 * search.gradient.batch * steps + search.max_trials * bench_search.EVALUATION
        spent += 3 * bench_search.NUM_COMPARED
        assert 0.95 * evaluations <= spent / bench_search.EVALUATION <= evaluations


def test_stored_searches_are_those_of_the_code_that_runs() -> None:
    paths = {path.stem for path in closure(["service.tune.searchers.gradient"])}
    assert {"gradient", "es", "smac", "history"} <= paths
    assert "coordinator" not in paths
    assert {"successive_halving", "racing", "proposals"} <= {
        path.stem for path in closure(["service.tune.coordinator"])
    }
    assert code_of("random") != code_of("gradient") == code_of("auto")


def test_stored_searches_outlive_a_change_of_prose_alone() -> None:
    function = 'def f(x):\n    """{doc}"""\n    return x + {number}  # {comment}\n'
    before = statements_of('"""Module."""\n' + function.format(doc="Old.", number=1, comment="old"))
    assert before == statements_of(function.format(doc="New.", number=1, comment="new"))
    assert before != statements_of(function.format(doc="Old.", number=2, comment="old"))


def test_judge_items_are_no_search_items() -> None:
    family = FAMILIES["shipped"]
    lines = {
        goal: {line for each in family.objectives(goal) for line in Path(each["task"]["file"]).read_text().splitlines()}
        for goal in ("skills", "judge")
    }
    assert len(lines["judge"]) == 3000
    assert not lines["judge"] & lines["skills"]


@pytest.mark.slow
def test_one_pass_scores_as_greedy_decoding_does(tmp_path: Path) -> None:
    """Sources as they are, decoded by transformers; `bench_search` compares merges with vLLM before it searches."""
    root = family_dir()
    family = open_family(root / "base", {s: root / "experts" / s for s in SHIPPED}, cache=tmp_path)
    known = all_baselines(base="base", experts=SHIPPED, fingerprints=family.fingerprints, num_layers=8)
    options = EngineOptions(max_model_len=64)
    scorer = OnePass(family, options, memory=tmp_path / "scores")
    tasks = {
        skill: TaskSpec({"file": str(root / "tasks" / f"{skill}_search.jsonl"), "max_tokens": 9}, "exact_match")
        for skill in SHIPPED
    }
    spans = tuple(Span(skill, task, 3, 43) for skill, task in tasks.items())
    for label, place in (("base", root / "base"), ("expert:text", root / "experts" / "text")):
        recipe = next(each.recipe for each in known if each.label == label)
        found = scorer.score(ScoreRequest("test", recipe, spans))
        reference = Reference(str(place), options)
        decoded = TaskEvaluator(reference, Prompts(reference.prompts.directory, options)).score(spans)
        assert [(s.objective, s.position, s.value) for s in found.samples] == [
            (s.objective, s.position, s.value) for s in decoded.samples
        ]
        assert 0 < sum(s.value for s in found.samples) < len(found.samples)
    assert scorer.num_swaps == 2
    assert scorer.score(ScoreRequest("test", recipe, spans)).samples == found.samples  # remembered
    again = OnePass(family, options, memory=tmp_path / "scores")
    elsewhere = []  # as in another clone
    for span in spans:
        file = Path(shutil.copy(span.task.task["file"], tmp_path))  # type: ignore[index]
        elsewhere.append(replace(span, task=replace(span.task, task={**span.task.task, "file": str(file)})))  # type: ignore[dict-item]
    assert again.score(ScoreRequest("test", recipe, tuple(elsewhere))).samples == found.samples
    assert again.num_swaps == 0


def test_paths_that_share_a_model_have_their_own_answers(tmp_path: Path) -> None:
    """A path is answered alike after another path of as many layers and by a scorer of its own."""
    bench = Bench.of(bench_hm3.FAMILY)
    preflight = bench.preflight(bench_hm3.METHODS["random_merged"].spec("random_merged", 0))
    task, rng = preflight.tasks.search["math"], np.random.default_rng(0)
    drawn = (preflight.space.parameters.sample(rng) for _ in range(100))
    paths = [preflight.space.to_recipe(each) for each in drawn if each["length"] == 7][:3]

    def answers(name: str, *recipes: Recipe) -> list[list[bool]]:
        scorer = OnePass(preflight.models.family, preflight.engine_options, memory=tmp_path / name)
        return [scorer.exact_matches(recipe, task, 0, 60).tolist() for recipe in recipes]

    together = answers("together", *paths)
    assert together == [answers(str(number), path)[0] for number, path in enumerate(paths)]
    assert len({tuple(each) for each in together}) == len(paths), "the paths differ"
