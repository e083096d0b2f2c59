import asyncio
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import OPTIONS
from tests.workers.recipes import arithmetic, slerp
from workers.engines.vllm.engine import base_recipe
from workers.errors import EngineUnavailable, InvalidTask, TrialFailed
from workers.serving.fake import FakeScorer
from workers.serving.replica import RecipeLock, ServeScorer, app_name, deploy_scorer
from workers.types import EngineOptions, Family, ScoreRequest, Span, TaskSpec

TASK = TaskSpec("anything", "exact_match")


def in_turn(arrivals: Sequence[str]) -> list[str]:
    """The order in which recipes get their turn when all arrive during the first one's."""

    async def run() -> list[str]:
        turns, served = RecipeLock(), []

        async def chunk(digest: str) -> None:
            async with turns.turn(digest):
                served.append(digest)
                await asyncio.sleep(0.001)

        await asyncio.gather(*map(chunk, arrivals))
        return served

    return asyncio.run(run())


def test_chunks_of_the_recipe_held_go_first_and_others_in_order_of_arrival() -> None:
    assert in_turn(["a", "b", "c", "a", "b", "a"]) == ["a", "a", "a", "b", "b", "c"]
    assert in_turn(["a", "b", "c", "d"]) == ["a", "b", "c", "d"]


def test_a_chunk_that_gives_up_waiting_does_not_block_the_rest() -> None:
    async def run() -> list[str]:
        turns, served = RecipeLock(), []

        async def chunk(digest: str, seconds: float) -> None:
            async with turns.turn(digest):
                await asyncio.sleep(seconds)
                served.append(digest)

        first = asyncio.create_task(chunk("a", 0.02))
        await asyncio.sleep(0)
        second, third = asyncio.create_task(chunk("b", 0)), asyncio.create_task(chunk("c", 0))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, third)
        await chunk("d", 0)
        # Given up in the moment in which the turn was passed on: it must be passed on again.
        fourth = asyncio.create_task(chunk("e", 0.01))
        await asyncio.sleep(0)
        fifth, sixth = asyncio.create_task(chunk("f", 0)), asyncio.create_task(chunk("g", 0))
        await fourth
        fifth.cancel()
        await sixth
        return served

    assert asyncio.run(asyncio.wait_for(run(), 5)) == ["a", "c", "d", "e", "g"]


def request(family: Family, weight: float, stop: int = 20, task: TaskSpec = TASK) -> ScoreRequest:
    return ScoreRequest("study", arithmetic(family, weight, 0.1), (Span("x", task, 0, stop),))


@pytest.fixture(scope="module")
def fake(ray_cluster: None, tied_family: Family) -> Iterator[ServeScorer]:
    """A replica on Serve that does everything but run an engine: 0.1 s a sample, health checks every 0.5 s."""
    from ray import serve

    make_worker = partial(FakeScorer, sample_delay_s=0.1, fails_above=0.9)
    scorer = deploy_scorer(
        tied_family,
        OPTIONS,
        name="fake",
        make_worker=make_worker,
        health_check_period_s=0.5,
        health_check_timeout_s=1.0,
    )
    yield replace(scorer, deadline_s=120.0, poll_s=0.5)
    serve.delete("fake")


def test_errors_of_a_candidate_and_of_a_task_pass_through(fake: ServeScorer, tied_family: Family) -> None:
    with pytest.raises(TrialFailed, match=r"coefficient 0\.95 is above 0\.9"):
        fake.score(request(tied_family, 0.95))
    with pytest.raises(InvalidTask, match="no stored sample"):
        fake.verify(arithmetic(tied_family, 0.1, 0.1), (), (Span("x", TASK, 0, 1),))
    assert fake.score(request(tied_family, 0.5, 2)).samples


def test_health_checks_are_answered_during_a_chunk_longer_than_their_timeout(
    fake: ServeScorer, tied_family: Family
) -> None:
    (process,) = fake.statistics()["processes"]
    result = fake.score(request(tied_family, 0.5, 60))
    assert result.timings_s["score"] >= 6.0, "six times the timeout"
    assert fake.statistics()["processes"] == [process]
    assert result.evidence.replica == f"fake-{process}"


def test_replica_killed_in_a_chunk_is_replaced_and_the_chunk_scored_again(
    fake: ServeScorer, tied_family: Family
) -> None:
    (process,) = fake.statistics()["processes"]
    threading.Timer(1.0, os.kill, (process, signal.SIGKILL)).start()
    result = pickle.loads(pickle.dumps(fake)).score(request(tied_family, 0.5))
    assert result.samples == FakeScorer().score(request(tied_family, 0.5)).samples
    assert result.evidence.replica != f"fake-{process}"
    assert fake.statistics()["processes"] != [process]


def test_replica_that_cannot_start_says_why_and_where_its_log_is(
    ray_cluster: None, tied_family: Family, tmp_path: Path
) -> None:
    from ray import serve

    broken = replace(tied_family, base=replace(tied_family.base, directory=str(tmp_path / "nowhere")))
    with pytest.raises(EngineUnavailable, match=r"vLLM did not start for .*nowhere: .*; its log is .*worker-.*\.out"):
        deploy_scorer(broken, OPTIONS, name="fake-broken")
    with pytest.raises(EngineUnavailable, match="no such application"):
        ServeScorer("fake-none", deadline_s=0.1).describe((TASK,))
    serve.delete("fake-broken")


def test_applications_are_shared_by_equal_families_and_options_only(tied_family: Family) -> None:
    assert app_name(tied_family, OPTIONS) == app_name(tied_family, EngineOptions(max_model_len=256, threads=1))
    assert app_name(tied_family, OPTIONS) != app_name(tied_family, EngineOptions(max_model_len=255, threads=1))


def test_five_recipes_fired_at_one_real_replica_give_no_foreign_result(
    scorer: ServeScorer, tied_family: Family, sums: TaskSpec
) -> None:
    requests = [request(tied_family, weight, 40, sums) for weight in (0.1, 0.4, 0.8, 1.2, 1.6)] * 3
    with ThreadPoolExecutor(len(requests)) as pool:
        results = list(pool.map(scorer.score, requests))
    alone = [scorer.score(each) for each in requests[:5]]
    for each, result, quiet in zip(requests, results, alone * 3, strict=True):
        assert result.evidence.recipe_digest == each.recipe.digest
        assert result.samples == quiet.samples
        assert result.evidence.weights_checksum == quiet.evidence.weights_checksum
        assert result.evidence.prompts == quiet.evidence.prompts
    assert len({result.evidence.weights_checksum for result in results}) == 5
    assert len({tuple(sample.response for sample in result.samples) for result in results}) == 5


def test_real_replica_of_a_tied_model_is_verified_against_transformers(
    scorer: ServeScorer, tied_family: Family, sums: TaskSpec, choices: TaskSpec
) -> None:
    info = scorer.describe((sums, choices))
    assert [each.num_samples for each in info] == [400, 12]
    spans = (Span("sums", sums, 0, 60), Span("choices", choices, 0, 12))
    for recipe in (base_recipe(tied_family), slerp(tied_family, 0.4)):
        samples = scorer.score(ScoreRequest("study", recipe, spans)).samples
        report = scorer.verify(recipe, samples, spans)
        assert report.num_samples == 72
        assert report.num_beyond == 0
        assert report.max_logprob_difference < 1e-3
    statistics = scorer.statistics()
    assert (statistics["starts"], statistics["replicas"]) == (1, 1)
    assert statistics["swaps"] == len(statistics["swap_s"]) > 5
    assert statistics["bank"]["models"] == 3
    with pytest.raises(TrialFailed, match="logits are NaN"):
        scorer.score(ScoreRequest("study", arithmetic(tied_family, 1e40, 1e40), spans))
