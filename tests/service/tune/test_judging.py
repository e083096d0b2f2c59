"""Judges of benchmarks in a coordinator, with a real HTTP endpoint: asked, stored and reused judgments."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.recipe import Recipe
from search_spaces.study.judge import JudgeSpec
from service.results.judgments import judged_recipes
from service.store import Store
from service.store.documents import BenchmarkFacts
from service.tune.coordinator import Coordinator
from service.tune.plan import Benchmark
from service.types import EventKind
from tests.judge_server import JudgeServer, judge_server
from tests.service.tune.harness import Killed, coordinator_of, drive, new_study
from workers.evaluation.judging import judge_prompt, judged_items, prompt_digest
from workers.serving.fake import FakeScorer
from workers.types import SampleResult, Span, Split, TaskSpec

SMALL: dict[str, Any] = {"scheduler": "none", "max_trials": 1}
NUM_SAMPLES = 6


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with judge_server() as server:
        yield server


class Writer(FakeScorer):
    """A scorer whose models answer questions about chats with texts of different lengths."""

    def _samples(self, recipe: Recipe, span: Span, is_wrong: bool = False) -> list[SampleResult]:
        found = super()._samples(recipe, span, is_wrong)
        if not span.objective.startswith("chats"):
            return found
        return [replace(s, value=float(len(text)), response=text) for s in found for text in (reply(recipe, s),)]


def reply(recipe: Recipe, sample: SampleResult) -> str:
    return "x" * (int(recipe.digest[:8], 16) % 7 + sample.position * 5 % 7)


def benchmark(tmp_path: Path, judge: JudgeServer, name: str = "chats", **options: Any) -> Benchmark:
    file = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"Say {n}.", "answer": "y" * (n + 4)} for n in range(NUM_SAMPLES)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = TaskSpec({"file": str(file)}, "length")
    option = JudgeSpec.model_validate({"url": judge.url, "model": "gpt", "wait_s": 30, **options})
    facts = BenchmarkFacts(
        name, "win_rate", "maximize", None, spec.digest, NUM_SAMPLES, judge=option.model_dump(mode="json")
    )
    return Benchmark(facts, spec, ("sources",), judge=option)


def run(
    coordinator: Coordinator, scorer: FakeScorer | None = None, *, is_killed: Callable[[], bool] = lambda: False
) -> None:
    """Run to the end as Tune does: one evaluation at a time, and waits for the judge when there is none.

    Raises Killed once `is_killed` is true.
    """
    deadline = time.monotonic() + 60
    with closing(coordinator):
        while not coordinator.is_finished:
            drive(coordinator, scorer or Writer())
            assert time.monotonic() < deadline, "judgments do not end"
            if is_killed():
                raise Killed
            assert coordinator.next_evaluation(timeout_s=0.2) is None


def failures(store: Store, study: str) -> list[str]:
    return [e.payload["reason"] for e in store.events(study) if e.kind == EventKind.BENCHMARK_FAILED]


def scored(store: Store, study: str) -> list[Mapping[str, Any]]:
    return [e.payload for e in store.events(study) if e.kind == EventKind.BENCHMARK_SCORED]


def test_each_completion_is_judged_in_both_orders(tmp_path: Path, judge: JudgeServer) -> None:
    """Every prompt is sent once; the stored preferences are those of the judge, and its prompt and model are known."""
    store, study = new_study(tmp_path)
    bench = benchmark(tmp_path, judge)
    run(coordinator_of(store, study, **SMALL, benchmarks=(bench,)))
    judgments = store.judgments(study)
    recipes = {trial.recipe.digest: trial.read_recipe() for trial in store.trials(study)}
    digests = {judgment.recipe_digest for judgment in judgments}
    assert len(digests) == len(scored(store, study)) == 3  # base, math and text
    assert len(judgments) == len(judge.requests) == 2 * NUM_SAMPLES * 3
    assert len({(j.recipe_digest, j.position, j.is_swapped) for j in judgments}) == len(judgments)
    items = judged_items(bench.task)
    assert bench.judge is not None
    for j in judgments:
        text = reply(recipes[j.recipe_digest], SampleResult("chats", j.position, "", 0.0, ""))
        ours, theirs = len(text), len(items[j.position].reference)
        assert j.preference == (1.0 if ours > theirs else 0.0 if ours < theirs else 0.5)
        prompt = judge_prompt(bench.judge.prompt, items[j.position], text, is_swapped=j.is_swapped)
        assert prompt in judge.prompts
        assert (j.prompt_digest, j.model) == (prompt_digest(prompt), "gpt-0613")
        assert j.answer.startswith("The longer one.")
    values = judged_recipes(judgments, num_samples=NUM_SAMPLES)
    assert len({tuple(each.values) for each in values.values()}) > 1, "models differ"
    assert all(each.agreement == 1 and each.problem is None for each in values.values())
    request = judge.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("gpt", 0, 512)
    store.close()


def test_stored_values_are_lengths_without_warnings(tmp_path: Path, judge: JudgeServer) -> None:
    """What engines report about completions that are judged is no value of the metric, and is not out of its range."""
    store, study = new_study(tmp_path)
    run(coordinator_of(store, study, **SMALL, benchmarks=(benchmark(tmp_path, judge),)))
    found = store.sample_values(study, Split.BENCHMARK)
    assert max(values["chats"].max() for values in found.values()) > 1
    assert not [event for event in store.events(study) if event.kind == EventKind.OUT_OF_RANGE]
    store.close()


def test_key_is_sent(tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store, study = new_study(tmp_path)
    monkeypatch.setenv("MERGESEARCH_JUDGE_KEY", "s3cret")
    run(coordinator_of(store, study, **SMALL, benchmarks=(benchmark(tmp_path, judge),)))
    assert {headers["Authorization"] for headers in judge.headers} == {"Bearer s3cret"}
    assert "s3cret" not in repr((store.judgments(study), store.events(study)))
    store.close()


def test_requests_are_limited_and_retried(tmp_path: Path, judge: JudgeServer) -> None:
    """A judge that is busy is asked again, by at most `concurrency` requests at a time."""
    store, study = new_study(tmp_path)
    judge.refusals = [(429, {"Retry-After": "1"}), (503, {}), (500, {})]
    judge.on_request = lambda _: time.sleep(0.02)
    run(coordinator_of(store, study, **SMALL, benchmarks=(benchmark(tmp_path, judge, concurrency=3),)))
    assert len(judge.requests) == 2 * NUM_SAMPLES * 3 + 3
    assert judge.most_at_once == 3
    assert not failures(store, study)
    store.close()


def test_killed_driver_asks_only_what_is_missing(tmp_path: Path, judge: JudgeServer) -> None:
    """A driver that was killed while the judge answered is followed by one that scores nothing and repeats little."""
    store, study = new_study(tmp_path)
    plan = {**SMALL, "benchmarks": (benchmark(tmp_path, judge, concurrency=1),)}
    hang = threading.Event()
    judge.on_request = lambda count: count > 10 and hang.wait(20)
    coordinator = coordinator_of(store, study, **plan)
    with pytest.raises(Killed):
        run(coordinator, is_killed=lambda: len(store.judgments(study)) == 10 and len(judge.requests) > 10)
    hang.set()
    num_stored = len(store.judgments(study))
    assert num_stored == 10
    time.sleep(0.2)
    num_before = len(judge.requests)
    scorer = Writer(log_file=str(tmp_path / "calls.jsonl"))
    run(coordinator_of(store, study, **plan), scorer)
    assert not scorer.calls()
    assert len(judge.requests) - num_before == 2 * NUM_SAMPLES * 3 - num_stored
    assert len(scored(store, study)) == 3
    num_before = len(judge.requests)
    run(coordinator_of(store, study, **plan))  # nothing is left
    assert len(judge.requests) == num_before
    store.close()


def test_judge_that_is_away_fails_the_benchmark_alone(tmp_path: Path) -> None:
    """After `wait_s` the benchmark fails for all trials at once; a later attempt asks a judge that is back."""
    store, study = new_study(tmp_path)
    with judge_server() as away:
        port = int(away.url.split(":")[2].split("/")[0])
    bench = benchmark(tmp_path, away, wait_s=1.5)
    began = time.monotonic()
    run(coordinator_of(store, study, **SMALL, benchmarks=(bench,)))
    assert 1.4 < time.monotonic() - began < 20
    assert len(failures(store, study)) == 3
    for reason in failures(store, study):
        assert f"the judge at {away.url} has answered nothing for" in reason
        assert "ConnectError" in reason
    assert store.sample_values(study, Split.BENCHMARK), "what was generated is kept"
    for thread in threading.enumerate():
        if thread.name == "judge":  # a request of the first attempt may still connect, and would reach the second judge
            thread.join(30)
    with judge_server(port) as back:
        scorer = Writer(log_file=str(tmp_path / "calls.jsonl"))
        run(coordinator_of(store, study, **SMALL, benchmarks=(bench,)), scorer)
        assert not scorer.calls()
        assert len(back.requests) == 2 * NUM_SAMPLES * 3
    assert len(scored(store, study)) == 3
    store.close()


@pytest.mark.parametrize("status", [401, 404, 302])
def test_refused_request_fails_at_once(tmp_path: Path, judge: JudgeServer, status: int) -> None:
    store, study = new_study(tmp_path)
    judge.refusals = [(status, {"Location": "http://127.0.0.1:1/"})] * 500
    run(coordinator_of(store, study, **SMALL, benchmarks=(benchmark(tmp_path, judge),)))
    assert len(failures(store, study)) == 3
    assert f"refused a request with status {status}: not now" in failures(store, study)[0]
    store.close()


def test_answers_without_verdict_fail_the_benchmark(tmp_path: Path, judge: JudgeServer) -> None:
    """A judge that does not follow the prompt gives no win rate of 50 %, neither now nor at a later attempt."""
    store, study = new_study(tmp_path)
    judge.answer = lambda _: "I like both."
    plan = {**SMALL, "benchmarks": (benchmark(tmp_path, judge),)}
    run(coordinator_of(store, study, **plan))
    assert len(failures(store, study)) == 3
    assert "12 of 12 answers of the judge gpt-0613 have no verdict" in failures(store, study)[0]
    assert "'I like both.'" in failures(store, study)[0]
    num_asked = len(judge.requests)
    run(coordinator_of(store, study, **plan))
    assert len(judge.requests) == num_asked
    assert not scored(store, study)
    store.close()


def test_endpoint_without_chat_completions_fails(tmp_path: Path, judge: JudgeServer) -> None:
    store, study = new_study(tmp_path)
    judge.refusals = [(200, {})] * 500  # "not now" is no JSON
    run(coordinator_of(store, study, **SMALL, benchmarks=(benchmark(tmp_path, judge),)))
    assert f"{judge.url}/chat/completions gave no chat completion: 'not now'" in failures(store, study)[0]
    store.close()


def test_removed_completions_are_not_judged(tmp_path: Path, judge: JudgeServer) -> None:
    """Completions that a study no longer stores are not judged as if they were empty."""
    store, study = new_study(tmp_path)
    plain = replace(benchmark(tmp_path, judge), judge=None)
    coordinator = coordinator_of(store, study, **SMALL, benchmarks=(plain,))
    drive(coordinator, Writer())
    store.open_attempt(study).delete_texts(keep=[])
    run(coordinator_of(store, study, **SMALL, benchmarks=(benchmark(tmp_path, judge),)))
    assert not judge.requests
    assert set(failures(store, study)) == {
        "its completions were removed from the study; add a benchmark of another name"
    }
    store.close()


def test_engines_work_while_a_judge_is_slow(tmp_path: Path, judge: JudgeServer) -> None:
    """Another benchmark is scored before the judge has answered anything."""
    store, study = new_study(tmp_path)
    answers = threading.Event()
    judge.on_request = lambda _: answers.wait(20)
    slow = benchmark(tmp_path, judge)
    other = replace(slow, facts=replace(slow.facts, name="other", judge=None), judge=None)
    coordinator = coordinator_of(store, study, **SMALL, benchmarks=(slow, other))
    drive(coordinator, Writer())
    assert {payload["benchmark"] for payload in scored(store, study)} == {"other"}
    assert coordinator.awaited_judges == (judge.url,)
    assert not coordinator.is_finished
    answers.set()
    run(coordinator)
    assert {payload["benchmark"] for payload in scored(store, study)} == {"other", "chats"}
    assert not coordinator.awaited_judges
    store.close()
