"""SIGKILL of a rank of an engine of two ranks, and of one of two replicas while it writes a merge."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import workers.merging.materialize
from search_spaces.study.engine import EngineOptions
from tests.conftest import record_engine_start
from tests.gpu.conftest import Figure, engines_on
from tests.gpu.engines.answers import OPTIONS, answers, check
from tests.gpu.engines.conftest import Engines
from tests.gpu.engines.test_swaps import NUM_SAMPLES, drawn, spans
from tests.workers.recipes import arithmetic, slerp
from workers.engines.vllm.engine import Engine
from workers.errors import EngineCrashed
from workers.serving.application import num_replicas
from workers.serving.deployment import deploy_scorer
from workers.serving.engine_worker import EngineWorker
from workers.types import Family, GpuNeed, ScoreRequest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

NUM_GPUS = 2
START_S = 600.0  # of an engine, on a busy machine
GONE_S = 150.0  # of the ranks of an engine; the product lets them finish their merge for 120 s


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if engines_on() == "cuda" and (count := torch.cuda.device_count()) < NUM_GPUS:
        pytest.skip(f"needs {NUM_GPUS} GPUs, this machine has {count}")


def ranks(engine: Engine) -> list[psutil.Process]:
    """The processes of an engine of several ranks."""
    executor = engine._llm.llm_engine.engine_core.engine_core.model_executor
    return [psutil.Process(worker.proc.pid) for worker in executor.workers]


def test_two_ranks_and_the_kill_of_one(engines: Engines, small_family: Family, figure: Figure) -> None:
    """An engine of two ranks is right; with one killed during swaps it fails, ends, and a new one has its answers."""
    options = OPTIONS.model_copy(update={"tensor_parallel_size": NUM_GPUS})
    recipes = [arithmetic(small_family, 0.4, 0.9), slerp(small_family, 0.3), arithmetic(small_family, 1.0, -0.5)]
    engine = engines.start("small Llama, two ranks", small_family, options)
    before = []
    for recipe in recipes:
        assert engine.swap(recipe).digest == engine.held_digest == recipe.digest
        before.append(answers(engine))
        check(before[-1], recipe, engine)
    assert len(set(before)) == len(recipes), "the merges differ"

    processes = ranks(engine)
    assert len(processes) == NUM_GPUS
    threading.Timer(1.0, processes[1].kill).start()
    started, count = time.monotonic(), engine.swap_count

    def swap_for_ever() -> None:
        for recipe in itertools.cycle(recipes):
            engine.swap(recipe)

    with pytest.raises(EngineCrashed, match="the engine failed"):
        swap_for_ever()
    noticed_s = time.monotonic() - started - 1.0
    assert engine.swap_count > count + 1, "the kill was during swaps"
    started = time.monotonic()
    engines.close()
    _, left = psutil.wait_procs(processes, timeout=GONE_S)
    assert not left
    figure(f"a killed rank: noticed after {noticed_s:.1f} s, all ranks gone {time.monotonic() - started:.1f} s later")

    engine = engines.start("small Llama, two ranks after a kill", small_family, options)
    for recipe, expected in zip(recipes, before, strict=True):
        engine.swap(recipe)
        assert answers(engine) == expected


def dying_worker(family: Family, options: EngineOptions, *, armed: str, killed: str) -> EngineWorker:
    """A worker whose process is killed in the middle of its next merge once the file `armed` exists.

    Only one process is killed: the first that creates the file `killed`, into which it writes its id.
    """
    write = workers.merging.materialize.merge_into

    def merge_into(plan: Any, bank: Any, memory: dict[str, torch.Tensor], *rest: Any) -> Any:
        if Path(armed).exists():
            try:
                file = os.open(killed, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                pass
            else:
                write(plan, bank, dict(itertools.islice(memory.items(), 3)), *rest)
                os.write(file, str(os.getpid()).encode())
                os.kill(os.getpid(), signal.SIGKILL)
        return write(plan, bank, memory, *rest)

    pytest.MonkeyPatch().setattr(workers.merging.materialize, "merge_into", merge_into)
    return EngineWorker(family, options, most_engines=NUM_GPUS)


def test_one_of_two_replicas_is_killed_mid_swap(
    engines: Engines, ray_cluster: None, shipped: Family, tmp_path: Path, figure: Figure
) -> None:
    """Chunks of a replica that is killed while it writes a merge are scored by others, with the right samples."""
    from ray import serve

    engines.close()
    armed, killed = tmp_path / "armed", tmp_path / "killed"
    started = time.monotonic()
    scorer = deploy_scorer(
        shipped,
        OPTIONS,
        name="killed-mid-swap",
        replicas=NUM_GPUS,
        gpus=GpuNeed.NEEDED if engines_on() == "cuda" else GpuNeed.IF_ANY,
        make_worker=partial(dying_worker, shipped, OPTIONS, armed=str(armed), killed=str(killed)),
        health_check_period_s=1.0,
        start_timeout_s=START_S,
    )
    try:
        for _ in range(NUM_GPUS):
            record_engine_start("shipped family, one of two replicas", time.monotonic() - started)
        scorer = replace(scorer, deadline_s=START_S, poll_s=1.0)
        processes = scorer.statistics()["processes"]
        assert len(processes) == NUM_GPUS
        recipes = [drawn(shipped, seed) for seed in range(500, 504)]
        armed.touch()
        with ThreadPoolExecutor(len(recipes)) as pool:
            asked = [ScoreRequest("study", recipe, spans()) for recipe in recipes]
            results = list(pool.map(scorer.score, asked))
        dead = int(killed.read_text())
        assert dead in processes
        assert not [result for result in results if f"-{dead}-" in result.evidence.replica]
        for recipe, result in zip(recipes, results, strict=True):
            assert result.evidence.recipe_digest == recipe.digest
            report = scorer.verify(recipe, result.samples, spans())
            assert (report.reason, report.num_samples, report.num_beyond) == (None, 3 * NUM_SAMPLES, 0)
        assert len({result.evidence.weights_checksum for result in results}) == len(recipes)

        started = time.monotonic()
        while num_replicas(scorer.app_name)["RUNNING"] < NUM_GPUS:
            assert time.monotonic() - started < START_S, "no replica replaces the killed one"
            time.sleep(0.5)
        record_engine_start("shipped family, a replica after a kill", time.monotonic() - started)
        alive = scorer.statistics()["processes"]
        assert len(alive) == NUM_GPUS
        assert len({*processes, *alive}) == NUM_GPUS + 1, "one is new"
        assert dead not in alive
        figure(
            f"two replicas, one killed mid-swap: again two {time.monotonic() - started:.0f} s after all was verified"
        )
        # Whichever replica scores them again, the samples are the same.
        with ThreadPoolExecutor(len(recipes)) as pool:
            assert [each.samples for each in pool.map(scorer.score, asked)] == [each.samples for each in results]
    finally:
        serve.delete(scorer.app_name)
