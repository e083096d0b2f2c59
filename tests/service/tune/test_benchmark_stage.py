"""The benchmark stage of a coordinator: scored samples, reused samples, and the state after failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.results.selection import held_out
from service.store import Store
from service.store.documents import BenchmarkFacts
from service.tune.plan import Benchmark
from service.types import EventKind, Origin
from tests.service.tune.harness import Killed, coordinator_of, drive, killer, make_plan, new_study, trial_list
from workers.errors import MetricFailed
from workers.serving.fake import FakeScorer
from workers.types import ScoreRequest, ScoreResult, Split, TaskSpec

SMALL: dict[str, Any] = {"scheduler": "none", "max_trials": 2}


def benchmark(name: str, *, num_samples: int = 25, **changes: Any) -> Benchmark:
    task = TaskSpec(task=name, metric="acc")
    facts = BenchmarkFacts(name, "acc", "maximize", None, task.digest, num_samples)
    return replace(Benchmark(facts, task, ("finalists", "sources", "published", "recipes")), **changes)


def scored(store: Store, study: str) -> dict[str, dict[str, list[float]]]:
    """Values of benchmarks, by benchmark and recipe digest."""
    found: dict[str, dict[str, list[float]]] = {}
    for digest, of_recipe in store.sample_values(study, Split.BENCHMARK).items():
        for name, values in of_recipe.items():
            found.setdefault(name, {})[digest] = values.tolist()
    return found


def calls(scorer: FakeScorer, *names: str) -> list[Any]:
    """Spans of the named benchmarks that were scored, each with its recipe."""
    return [(call["recipe"], *span) for call in scorer.calls() for span in call["spans"] if span[0] in names]


def logged(directory: Path) -> FakeScorer:
    return FakeScorer(log_file=str(directory / "calls.jsonl"))


def test_chosen_trials_are_scored_whole_after_the_search(tmp_path: Path) -> None:
    """Each benchmark is scored with all its samples on the trials that it names, once everything else is done."""
    store, study = new_study(tmp_path)
    scorer = logged(tmp_path)
    plan = (benchmark("arc"), benchmark("piqa", num_samples=70, trials=("best", 0)))
    drive(coordinator_of(store, study, **SMALL, benchmarks=plan), scorer)
    found = scored(store, study)
    trials = store.trials(study)
    baselines = {t.recipe.digest for t in trials if t.origin is not Origin.SEARCH}
    finalists = {t.recipe.digest for t in held_out(trials, make_plan(study).objectives)}
    assert found["arc"].keys() == baselines | finalists
    assert {len(values) for values in found["arc"].values()} == {25}
    assert trials[0].recipe.digest in found["piqa"]
    assert len(found["piqa"]) == 2
    assert {len(values) for values in found["piqa"].values()} == {70}
    names = [span[0] for call in scorer.calls() for span in call["spans"]]
    first = min(names.index("arc"), names.index("piqa"))
    assert set(names[first:]) == {"arc", "piqa"}
    store.close()


def test_benchmarks_change_nothing_else(tmp_path: Path) -> None:
    """The trials of a study with benchmarks are those of one without."""
    lists = []
    for name, plan in (("with", (benchmark("arc"),)), ("without", ())):
        (tmp_path / name).mkdir()
        store, study = new_study(tmp_path / name)
        drive(coordinator_of(store, study, **SMALL, benchmarks=plan), FakeScorer())
        lists.append(trial_list(store, study))
        store.close()
    assert lists[0] == lists[1]


def test_an_added_benchmark_scores_only_what_is_missing(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    scorer = logged(tmp_path)
    drive(coordinator_of(store, study, **SMALL, benchmarks=(benchmark("arc"),)), scorer)
    before = len(scorer.calls())
    drive(coordinator_of(store, study, **SMALL, benchmarks=(benchmark("arc"), benchmark("piqa"))), scorer)
    names = {span[0] for call in scorer.calls()[before:] for span in call["spans"]}
    assert names == {"piqa"}
    again = len(scorer.calls())
    drive(coordinator_of(store, study, **SMALL, benchmarks=(benchmark("arc"), benchmark("piqa"))), scorer)
    assert len(scorer.calls()) == again
    store.close()


def test_kills_in_the_stage_lose_no_finished_sample(tmp_path: Path) -> None:
    """However often the driver is killed, no sample of a benchmark is scored twice once it is stored."""
    store, study = new_study(tmp_path)
    scorer, plan = logged(tmp_path), (benchmark("arc", num_samples=70), benchmark("piqa"))
    drive(coordinator_of(store, study, **SMALL), scorer)  # the search
    num_kills = 0
    for at in range(60):
        before = sum(len(v) for of in scored(store, study).values() for v in of.values())
        try:
            drive(
                coordinator_of(store, study, **SMALL, benchmarks=plan, observer=killer(2 + at % 3)),
                scorer,
                concurrency=1,
            )
            break
        except Killed:
            num_kills += 1
        assert sum(len(v) for of in scored(store, study).values() for v in of.values()) >= before
    assert num_kills > 5
    spans = calls(scorer, "arc", "piqa")
    num_scored = sum(stop - start for _, _, start, stop in spans)
    num_stored = sum(len(v) for of in scored(store, study).values() for v in of.values())
    assert num_scored - num_stored <= 30 * num_kills  # at most the chunk in flight
    assert {len(v) for v in scored(store, study)["arc"].values()} == {70}
    store.close()


class NoMetric(FakeScorer):
    """A scorer whose metric of the benchmark "judged" fails."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        if any(span.objective == "judged" for span in request.spans):
            raise MetricFailed("the judge does not answer")
        return super().score(request)


def test_a_failing_benchmark_fails_alone(tmp_path: Path) -> None:
    """A benchmark whose metric fails, for the base model too, costs neither the study nor the other benchmarks."""
    store, study = new_study(tmp_path)
    drive(coordinator_of(store, study, **SMALL, benchmarks=(benchmark("judged"), benchmark("arc"))), NoMetric())
    failed = [e.payload for e in store.events(study) if e.kind == EventKind.BENCHMARK_FAILED]
    found = scored(store, study)
    assert found.keys() == {"arc"}
    assert len(failed) == len(found["arc"])
    assert {(each["benchmark"], each["reason"]) for each in failed} == {("judged", "the judge does not answer")}
    store.close()


@pytest.mark.parametrize("trials", [("sources",), ("published",), (3,)])
def test_benchmarks_are_scored_on_chosen_trials(tmp_path: Path, trials: tuple[Any, ...]) -> None:
    store, study = new_study(tmp_path)
    drive(coordinator_of(store, study, **SMALL, benchmarks=(benchmark("arc", trials=trials),)), FakeScorer())
    origins = {"sources": Origin.SOURCE, "published": Origin.PUBLISHED}
    expected = {
        trial.recipe.digest
        for trial in store.trials(study)
        if trial.number in trials or trial.origin in {origins.get(choice) for choice in trials}
    }
    assert scored(store, study)["arc"].keys() == expected
    store.close()


def test_given_recipes_are_scored_without_a_search(tmp_path: Path) -> None:
    """Nothing is proposed; each given recipe is scored on all data and benchmarks, like a baseline."""
    store, study = new_study(tmp_path)
    known = make_plan(study).baselines
    given = (*known[:2], (Origin.USER, "mine", known[4][2]), (Origin.USER, "yours", known[5][2]))
    plan = {**SMALL, "max_trials": 0, "baselines": given, "benchmarks": (benchmark("arc"),)}
    drive(coordinator_of(store, study, **plan), FakeScorer())
    trials = store.trials(study)
    assert [(trial.label, trial.origin) for trial in trials] == [(label, origin) for origin, label, _ in given]
    digests = {trial.recipe.digest for trial in trials}
    assert store.sample_values(study, Split.HOLDOUT).keys() == digests
    assert scored(store, study)["arc"].keys() == digests
    drive(coordinator_of(store, study, **plan), FakeScorer())
    assert len(store.trials(study)) == len(given)
    store.close()


def test_given_recipes_are_scored_before_a_search(tmp_path: Path) -> None:
    """A given recipe is scored on all data, like a baseline, and the search proposes its merges after it."""
    store, study = new_study(tmp_path)
    known = make_plan(study).baselines
    given = (known[0], (Origin.USER, "mine", known[4][2]))
    drive(coordinator_of(store, study, **{**SMALL, "baselines": given}), FakeScorer())
    first, second, *proposed = store.trials(study)
    assert [(trial.label, trial.origin) for trial in (first, second)] == [(label, origin) for origin, label, _ in given]
    assert [trial.origin for trial in proposed] == [Origin.SEARCH] * SMALL["max_trials"]
    assert second.recipe is not None
    assert second.recipe.digest in store.sample_values(study, Split.HOLDOUT)
    store.close()
