"""Swaps in engines of both model runners, run eagerly and with CUDA graphs."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from search_spaces.recipe import Recipe
from tests.gpu.conftest import Figure, engines_on
from tests.gpu.engines.answers import OPTIONS, Answers, answers, check, differences, requests
from tests.gpu.engines.conftest import Engines
from tests.workers.recipes import arithmetic, slerp
from workers.engines.vllm.engine import Engine
from workers.errors import TrialFailed
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Completion
from workers.serving.engine_worker import EngineWorker
from workers.tiny_family import family_dir
from workers.types import Family, SampleResult, Span, TaskSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

CONFIGURATIONS = [("v1", "eager"), ("v1", "graphs"), ("v2", "eager"), ("v2", "graphs")]
NUM_SWAPS = 50
NUM_RIGHT, NUM_WRONG = 20, 4  # verified merges
NUM_SAMPLES = 8  # of each task


@dataclass(frozen=True)
class Warm:
    """An engine, with the addresses of its parameters and its answers to its first merge after the base."""

    engine: Engine
    name: str
    has_graphs: bool
    addresses: dict[str, int]
    first: Recipe
    fresh: Answers


def lack(runner: str, mode: str) -> str | None:
    """Reason why this machine cannot run such an engine; None if it can."""
    if engines_on() == "cuda":
        return None
    if runner == "v2":
        return "needs a CUDA device: vLLM's model runner V2 needs Triton"
    return "needs a CUDA device: there are no CUDA graphs on the CPU" if mode == "graphs" else None


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=" ".join)
def warm(request: pytest.FixtureRequest, engines: Engines, shipped: Family) -> Warm:
    runner, mode = request.param
    if reason := lack(runner, mode):
        pytest.skip(reason)
    name = f"{runner} {mode}"
    options = OPTIONS.model_copy(update={"model_runner": runner})
    engine = engines.start(f"shipped family, {name}", shipped, options, is_eager=mode == "eager")
    before = addresses(engine)
    first = arithmetic(shipped, 0.3, 0.4, 0.2)
    engine.swap(first)
    return Warm(engine, name, mode == "graphs", before, first, answers(engine))


def addresses(engine: Engine) -> dict[str, int]:
    """The address of every parameter of the engine's model, by its name."""

    def read(model: Any) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    (found,) = engine._llm.apply_model(read)
    assert found
    return dict(found)


def drawn(family: Family, seed: int) -> Recipe:
    """A recipe with random coefficients: task arithmetic, or SLERP for every fourth seed."""
    draw = random.Random(seed)
    if seed % 4 == 3:
        return slerp(family, round(draw.uniform(0.2, 0.8), 3))
    return arithmetic(family, *(round(draw.uniform(0.0, 0.6), 3) for _ in family.experts))


def test_the_engine_is_of_the_runner_that_is_named(warm: Warm) -> None:
    """The model runner and the use of graphs are those that the test's name says."""
    config = warm.engine._llm.llm_engine.vllm_config
    assert bool(config.use_v2_model_runner) == warm.name.startswith("v2")
    assert bool(config.model_config.enforce_eager) == warm.name.endswith("eager")
    assert warm.engine.dtype == ("bfloat16" if engines_on() == "cuda" else "float32")


def test_addresses_and_answers_outlast_50_swaps(warm: Warm, figure: Figure) -> None:
    """After 50 swaps every parameter has its address, and a merge the answers of the engine when it was new."""
    engine, family = warm.engine, warm.engine.family
    started, count = time.perf_counter(), engine.swap_count
    for seed in range(NUM_SWAPS - 1):
        engine.swap(drawn(family, seed))
    other = answers(engine)
    report = engine.swap(warm.first)
    seconds = (time.perf_counter() - started) / NUM_SWAPS
    figure(f"{warm.name}: start {engine.start_s:.1f} s, {1000 * seconds:.1f} ms a swap of 0.9M parameters")
    assert report.swap_count == count + NUM_SWAPS
    assert addresses(engine) == warm.addresses
    assert answers(engine) == warm.fresh
    check(warm.fresh, warm.first, engine)
    check(other, drawn(family, NUM_SWAPS - 2), engine)
    apart = differences(other, warm.first, family, dtype=engine.dtype)
    assert min(apart) > 1, f"the answers of another merge are told apart: {apart}"


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of CUDA graphs that were replayed, as the length of a list."""
    seen: list[int] = []
    if engines_on() == "cuda":
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            seen.append(id(graph))
            replay(graph)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return seen


@pytest.mark.parametrize("num_texts", [1, 3, 8])
def test_replayed_graphs_see_new_weights(warm: Warm, replays: list[int], num_texts: int) -> None:
    """Completions of batches of several sizes are those of the new merge at once, also where a graph is replayed."""
    engine, family = warm.engine, warm.engine.family
    asked = requests(seed=num_texts)[-num_texts:]
    seen = []
    for seed in (100, 101, 103):
        engine.swap(drawn(family, seed))
        replays.clear()
        found = answers(engine, asked)
        assert bool(replays) == warm.has_graphs
        check(found, drawn(family, seed), engine, asked=asked)
        seen.append(found)
    assert len(set(seen)) == len(seen), "the merges differ"


def test_prefixes_are_reset_mid_batch(warm: Warm) -> None:
    """A batch that ends in the middle leaves no cached prefixes to the next merge, nor does one that goes on."""
    engine, family = warm.engine, warm.engine.family
    first, second = drawn(family, 200), drawn(family, 201)
    asked = requests(seed=200, num_long=12)
    expected = {}
    for recipe in (second, first):
        engine.swap(recipe)
        expected[recipe.digest] = answers(engine, asked)
        check(expected[recipe.digest], recipe, engine, asked=asked)
    assert expected[first.digest] != expected[second.digest]

    # The engine holds `first`, and the cache has its prefixes. A swap between two steps is refused.
    refused: list[int] = []

    def swap(index: int, completion: Completion) -> None:
        if engine._llm.llm_engine.has_unfinished_requests():
            with pytest.raises(RuntimeError, match="swap while requests are in flight"):
                engine.swap(second)
            refused.append(index)

    found = engine.generate(asked, finished=swap)
    assert refused
    assert tuple(each.tokens for each in found) == expected[first.digest].completions

    def stop(index: int, completion: Completion) -> None:
        raise TrialFailed("stopped in the middle")

    for recipe in (second, first, second):
        with pytest.raises(TrialFailed, match="stopped in the middle"):
            engine.generate(asked, finished=stop)
        engine.swap(recipe)
        assert answers(engine, asked) == expected[recipe.digest]


def test_nan_leaves_no_trace(warm: Warm) -> None:
    """A merge whose logits are NaN fails each time, and the next merge has the answers that it had before."""
    engine, family = warm.engine, warm.engine.family
    good, nan = drawn(family, 300), arithmetic(family, 1e40, 1e40, 1e40)
    asked = requests(seed=300)
    engine.swap(good)
    before = answers(engine, asked)
    check(before, good, engine, asked=asked)
    engine.swap(nan)
    for _ in range(2):
        with pytest.raises(TrialFailed, match=r"logits are NaN \(\d+ rows in \d+ prompts\)"):
            engine.generate(asked)
    engine.swap(good)
    assert answers(engine, asked) == before


def spans() -> tuple[Span, ...]:
    """Samples of each task of the shipped family."""
    tasks = family_dir() / "tasks"
    return tuple(
        Span(
            name,
            TaskSpec({"file": str(tasks / f"{name}_search.jsonl"), "max_tokens": 8}, "exact_match"),
            0,
            NUM_SAMPLES,
        )
        for name in ("math", "text", "lookup")
    )


def test_verification_over_20_seeds(warm: Warm, figure: Figure) -> None:
    """Verification finds nothing in samples of 20 random merges, and something in those of other merges."""
    worker = object.__new__(EngineWorker)  # with the engine that the tests share
    worker.engine, worker.evaluator = warm.engine, TaskEvaluator(warm.engine, warm.engine.prompts)
    family, count, started = warm.engine.family, len(spans()) * NUM_SAMPLES, time.perf_counter()
    unequal, largest = 0, 0.0
    beyond: list[int] = []  # seeds of right merges that verification refuses
    wrong: list[int] = []  # numbers of samples that it refuses of wrong merges
    samples: tuple[SampleResult, ...] = ()
    for seed in range(400, 400 + NUM_RIGHT):
        recipe = drawn(family, seed)
        if samples and len(wrong) < NUM_WRONG:
            wrong.append(worker.verify(recipe, samples, spans()).num_beyond)
        warm.engine.swap(recipe)
        samples = worker.evaluator.score(spans()).samples
        report = worker.verify(recipe, samples, spans())
        assert report.reason is None
        assert (report.num_samples, report.num_without_tokens) == (count, 0)
        assert report.num_logprobs > count
        unequal += report.num_samples - report.num_equal
        beyond += [seed] if report.num_beyond else []
        largest = max(largest, report.max_logprob_difference / report.tolerance)
    figure(
        f"{warm.name}: {NUM_RIGHT - len(beyond)} of {NUM_RIGHT} merges verified; {unequal} of {NUM_RIGHT * count} "
        f"samples unequal; log-probabilities at most {largest:.2f} of the tolerance apart; {sum(map(bool, wrong))} of "
        f"{len(wrong)} wrong merges found; {time.perf_counter() - started:.0f} s"
    )
    assert not beyond, f"seeds whose right merges fail: {beyond}"
    assert all(wrong)
    assert len(wrong) == NUM_WRONG
