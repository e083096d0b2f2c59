"""A study that has ended, with results on benchmarks of every kind: groups, subtasks, attacked prompts, a judge."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from search_spaces.study.file import Study
from service.results.selection import held_out
from service.store import JudgmentRecord, Store
from service.store.documents import ATTACKS, BENCHMARKS, AttackResult, BenchmarkFacts
from service.store.steering import SteeringStore
from service.types import EventKind, JobRecord, JobState
from tests.service.api.harness import FAMILY, finished_study
from tests.service.synthetic_run import run_record
from workers.types import Evidence, SampleResult, ScoreResult, Split

__all__ = ["REASON", "TEMPLATE", "WORST", "benchmarked_study"]

SAMPLES = 24
TEMPLATE = "Classify <it> as good or bad: {{text}}"
WORST = "Classfy <it> as good or bad: {{text}}"
REASON = "<the judge> is away"

JUDGE = {"url": "http://judge:8000/v1", "model": "qwen"}


def _spec(name: str, **changes: Any) -> dict[str, Any]:
    task = {"file": str(FAMILY / "tasks" / "math_holdout.jsonl"), "max_tokens": 8}
    return {"name": name, "task": task, "metric": "exact_match", **changes}


SPECS = (
    _spec("piqa", group="common sense"),
    _spec("siqa", group="common sense"),
    _spec("mmlu"),
    _spec("sst2"),
    _spec("chats"),
)
FACTS = (
    BenchmarkFacts("piqa", "acc", "maximize", None, "p", SAMPLES),
    BenchmarkFacts("siqa", "acc", "maximize", None, "s", SAMPLES),
    BenchmarkFacts(
        *("mmlu", "acc", "maximize", None, "m", SAMPLES),
        subtasks=(("algebra", 8), ("geometry", 8), ("history", 8)),
        categories={"stem": ("algebra", "geometry")},
    ),
    BenchmarkFacts(*("sst2", "acc", "maximize", None, "t", SAMPLES), attack={"kind": "deepwordbug"}, template=TEMPLATE),
    BenchmarkFacts(
        *("chats", "win_rate", "maximize", None, "c", SAMPLES),
        judge={**JUDGE, "prompt": "Which is better? {{question}} {{first}} {{second}}"},
        reference_length=1234.4,
    ),
)


def benchmarked_study(store: Store, *, name: str = "benchmarked") -> JobRecord:
    """A study whose sources, recipes and finalists were scored on five benchmarks, one of them not on every trial."""
    study = finished_study(store, num_trials=12, name=name)
    document = Study.model_validate({**study.document, "benchmarks": list(SPECS)}).canonical()
    SteeringStore(store).add_benchmarks(study, document, names=[spec["name"] for spec in SPECS])
    writer = store.open_attempt(study.id)
    writer.set_state(JobState.RUNNING)
    writer.set_document_named(BENCHMARKS, [asdict(each) for each in FACTS])
    made = run_record(num_trials=12)
    shown = {trial.number for trial in held_out(made.whole_trials, made.objectives)}
    attacks = []
    for trial in store.trials(study.id):
        if trial.number not in shown:
            continue
        digest = trial.recipe.digest
        names = [facts.name for facts in FACTS if trial.number != 1 or facts.name != "siqa"]
        samples = tuple(
            SampleResult(each, p, f"d{p}", float((trial.number * 7 + p * len(each)) % 5 > 1), "says")
            for each in (*names, "@worst")
            for p in range(SAMPLES)
        )
        evidence = Evidence(
            digest, "bank", {f"bench {each}": "0" for each in names}, "sum", "r-1", trial.number, "fake"
        )
        writer.record_chunk(trial.number, Split.BENCHMARK, ScoreResult(samples, evidence, {"score": 0.5}))
        attacks.append(AttackResult("sst2", digest, WORST, "@worst", 1234, is_cut=trial.number == 0))
        writer.add_judgments(
            JudgmentRecord("chats", digest, p, is_swapped, float((p + trial.number) % 3 > 0), "qwen-7b", "p", "...")
            for p in range(SAMPLES)
            for is_swapped in (False, True)
        )
    writer.set_document_named(ATTACKS, [asdict(each) for each in attacks])
    writer.add_event(EventKind.BENCHMARK_FAILED, {"trial": 1, "benchmark": "siqa", "reason": REASON})
    writer.set_state(JobState.COMPLETE)
    return store.job(study.id)
