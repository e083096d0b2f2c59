"""Attacks on the prompts of benchmarks in a coordinator: scored, stored and reused results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.recipe import Recipe
from search_spaces.study.attacks import AttackSpec, BertAttack, DeepWordBugAttack, StressAttack
from service.store import Store
from service.store.documents import ATTACKS, AttackResult, BenchmarkFacts, read_attacks
from service.tune.attacks import samples_name
from service.tune.plan import Benchmark
from service.types import EventKind
from tests.service.tune.harness import Killed, coordinator_of, drive, killer, new_study
from workers.evaluation.attacks.edits import distance
from workers.evaluation.attacks.search import Attacked, PromptAttack, run, search
from workers.evaluation.attacks.templates import Template
from workers.serving.fake import FakeScorer, _draw
from workers.types import SampleResult, Span, Split, TaskSpec

SMALL: dict[str, Any] = {"scheduler": "none", "max_trials": 1}
TEXT = "Classify the sentence as positive or negative: {{sentence}}\nAnswer:"
BUG = DeepWordBugAttack(kind="deepwordbug")
NUM_SAMPLES = 20


def attacked(name: str, option: AttackSpec = BUG) -> Benchmark:
    spec = TaskSpec(task="sst2", metric="acc")
    facts = BenchmarkFacts(name, "acc", "maximize", None, spec.digest, NUM_SAMPLES)
    attack = PromptAttack(option, Template.of(TEXT, labels=["positive", "negative"]))
    return Benchmark(facts, spec, ("sources",), attack)


class Careless(FakeScorer):
    """A scorer whose models make more mistakes the more a template differs from TEXT, and each model other ones."""

    def _samples(self, recipe: Recipe, span: Span, is_wrong: bool = False) -> list[SampleResult]:
        template = span.task.template
        assert (template is not None) == span.objective.startswith("@"), "samples have the task of their name"
        if not str(span.task.task).startswith("sst2"):
            return super()._samples(recipe, span, is_wrong)
        if template is None:  # as the benchmark of the task, whatever its name
            found = super()._samples(recipe, replace(span, objective="sst2"), is_wrong)
            return [replace(each, objective=span.objective) for each in found]
        assert span.objective == samples_name(span.task)
        share = 0.02 * distance(template, TEXT)
        found = super()._samples(recipe, replace(span, objective="sst2"), is_wrong)
        return [
            replace(
                each,
                objective=span.objective,
                value=each.value * (_draw(template, recipe.digest, each.position) > share),
            )
            for each in found
        ]

    def mean(self, recipe: Recipe, template: str | None, name: str) -> float:
        """The value of a recipe on the benchmark, computed without a study."""
        task = TaskSpec("sst2", "acc", template=template)
        span = Span(name if template is None else samples_name(task), task, 0, NUM_SAMPLES)
        return float(np.mean([each.value for each in self._samples(recipe, span)]))


def results(store: Store, study: str) -> dict[tuple[str, str], AttackResult]:
    """Results of the attacks by benchmark and recipe."""
    return {(each.benchmark, each.recipe): each for each in read_attacks(store.document(study, ATTACKS))}


def stored(store: Store, study: str) -> Mapping[str, Mapping[str, Any]]:
    return store.sample_values(study, Split.BENCHMARK)


def num_stored(store: Store, study: str) -> int:
    return sum(int(np.count_nonzero(~np.isnan(v))) for of in stored(store, study).values() for v in of.values())


def num_scored(scorer: FakeScorer, *, attacked_only: bool = False) -> int:
    """Number of samples of benchmarks that were scored, or of attacked templates."""
    names = ("@",) if attacked_only else ("@", "sst2")
    return sum(s[2] - s[1] for call in scorer.calls() for s in call["spans"] if s[0].startswith(names))


def expected(benchmark: Benchmark, scorer: Careless, recipe: Recipe) -> Attacked:
    """The result of an attack on one recipe, computed without a study."""
    assert benchmark.attack is not None
    steps = search(benchmark.attack, clean=scorer.mean(recipe, None, "sst2"), seed=0)
    return run(steps, lambda template: scorer.mean(recipe, template, ""))


@pytest.mark.parametrize("option", [BUG, StressAttack(kind="stress"), BUG.model_copy(update={"max_queries": 9})])
def test_each_model_is_attacked_by_itself(tmp_path: Path, option: AttackSpec) -> None:
    """For each scored recipe the study finds the template that a search with that recipe alone finds."""
    store, study = new_study(tmp_path)
    scorer = Careless(log_file=str(tmp_path / "calls.jsonl"))
    benchmark = attacked("sst2", option)
    drive(coordinator_of(store, study, **SMALL, benchmarks=(benchmark,)), scorer)
    found = results(store, study)
    recipes = {trial.recipe.digest: trial.read_recipe() for trial in store.trials(study)}
    assert len(found) >= 3
    assert len({each.template for each in found.values()}) > 1 or isinstance(option, StressAttack)
    for (_, digest), each in found.items():
        alone = expected(benchmark, scorer, recipes[digest])
        assert (each.template, each.num_queries, each.is_cut) == (alone.template, alone.num_queries, alone.is_cut)
        values = stored(store, study)[digest][each.samples]
        assert values.mean() == pytest.approx(alone.value)
        assert len(values) == NUM_SAMPLES
    store.close()


def test_every_sample_of_a_template_has_evidence(tmp_path: Path) -> None:
    """Templates that were scored are stored by the name of their samples, and evidence names their prompts."""
    store, study = new_study(tmp_path)
    drive(coordinator_of(store, study, **SMALL, benchmarks=(attacked("sst2"),)), Careless())
    templates = store.prompt_templates(study)
    names = {name for of in stored(store, study).values() for name in of if name.startswith("@")}
    assert names == templates.keys()
    for name, (benchmark, template) in templates.items():
        assert benchmark == "sst2"
        assert "{{sentence}}" in template
        assert samples_name(TaskSpec("sst2", "acc", template=template)) == name
    hashed = {key.split()[1].split("[")[0] for row in store.evidence(study) for key in row.prompts}
    assert names <= hashed
    store.close()


def test_kills_lose_no_sample_of_an_attack(tmp_path: Path) -> None:
    """A driver that is killed again and again finds what one finds that is not, and scores nothing twice."""
    whole = {}
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        store, study = new_study(tmp_path / name)
        scorer = Careless(log_file=str(tmp_path / name / "calls.jsonl"))
        plan = {**SMALL, "benchmarks": (attacked("sst2"),)}
        num_kills = 0
        while name == "killed":
            try:
                drive(coordinator_of(store, study, **plan, observer=killer(3 + num_kills % 4)), scorer, concurrency=1)
                break
            except Killed:
                num_kills += 1
        drive(coordinator_of(store, study, **plan), scorer, concurrency=1)
        whole[name] = results(store, study)
        assert num_scored(scorer) - num_stored(store, study) <= 30 * num_kills  # at most the chunk in flight
        store.close()
    assert num_kills > 20
    assert whole["killed"] == whole["undisturbed"]


def test_an_ended_attack_is_not_repeated(tmp_path: Path) -> None:
    """A further attempt scores nothing, and a benchmark with the same task and attack uses the same samples."""
    store, study = new_study(tmp_path)
    scorer = Careless(log_file=str(tmp_path / "calls.jsonl"))
    drive(coordinator_of(store, study, **SMALL, benchmarks=(attacked("sst2"),)), scorer)
    before = num_scored(scorer)
    drive(coordinator_of(store, study, **SMALL, benchmarks=(attacked("sst2"),)), scorer)
    assert num_scored(scorer) == before
    before = num_scored(scorer, attacked_only=True)
    drive(coordinator_of(store, study, **SMALL, benchmarks=(attacked("sst2"), attacked("sst2-again"))), scorer)
    assert num_scored(scorer, attacked_only=True) == before > 0
    assert {name for name, _ in results(store, study)} == {"sst2", "sst2-again"}
    store.close()


def test_void_samples_of_an_attack_are_scored_again(tmp_path: Path) -> None:
    """After a fault of an engine in an attack, another driver scores its samples again, with their templates."""
    store, study = new_study(tmp_path)
    plan = {**SMALL, "benchmarks": (attacked("sst2"),)}
    drive(coordinator_of(store, study, **SMALL), Careless(replica="sound"))
    with pytest.raises(Killed):
        drive(coordinator_of(store, study, **plan, observer=killer(25)), Careless(replica="broken"), concurrency=1)
    names = {name for of in stored(store, study).values() for name in of}
    assert any(name.startswith("@") for name in names)
    store.open_attempt(study).record_engine_fault("broken", 1, "the canary failed")
    num_void = len(store.void_samples(study))
    scorer = Careless(replica="sound")
    drive(coordinator_of(store, study, **plan), scorer)
    again = [e.payload for e in store.events(study) if e.kind == EventKind.SCORED_AGAIN]
    assert again == [{"samples": num_void}]
    assert not store.has_void(study)
    recipes = {trial.recipe.digest: trial.read_recipe() for trial in store.trials(study)}
    found = results(store, study)
    assert len(found) >= 3
    for (_, digest), each in found.items():
        assert each.template == expected(plan["benchmarks"][0], scorer, recipes[digest]).template
    store.close()


def test_a_missing_fill_mask_model_fails_its_benchmark(tmp_path: Path) -> None:
    """A fill-mask model that is gone costs its benchmark the attack, not the study; the values without it stay."""
    store, study = new_study(tmp_path)
    option = BertAttack(kind="bert", model=str(tmp_path / "gone"))
    drive(coordinator_of(store, study, **SMALL, benchmarks=(attacked("sst2", option),)), Careless())
    failed = [e.payload for e in store.events(study) if e.kind == EventKind.BENCHMARK_FAILED]
    assert len(failed) == len(stored(store, study)) >= 3
    assert all(str(tmp_path / "gone") in each["reason"] for each in failed)
    assert not results(store, study)
    store.close()
