"""Measurement of a study's phases on one family, in this process with one thread, for comparison with plans.

Each duration is given twice: CPU seconds of this process, which other work of the machine changes least, and elapsed
seconds. The speeds of products and copies are measured in the same way before and after.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SIZES = (8, 24)  # samples of the two rungs
VERIFIED = 16
ANSWER = 16  # tokens at most
THREADS = 1


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Call a function; return its result, and the seconds that it took as CPU time and as elapsed time."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = call()
    return found, time.process_time() - cpu, time.perf_counter() - wall


def task_of(directory: Path) -> Any:
    """A task whose prompts differ from the first word on, so that vLLM's prefix cache has none of them."""
    from workers.types import TaskSpec

    words = "the sum of two numbers is asked for here and the answer is a number".split()  # noqa: SIM905
    rows = [
        {"prompt": f"{100 + i} and {7 * i}: {' '.join(words[i % 7 :] * 4)} ", "answer": f"{100 + 8 * i} in all"}
        for i in range(max(SIZES))
    ]
    file = directory / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return TaskSpec({"file": str(file), "max_tokens": ANSWER}, "exact_match")


def ties_of(family: Any, k: float) -> Any:
    """The TIES merge of all experts that keeps the share `k` of each task vector."""
    from search_spaces.recipe import Merge, Recipe, Source
    from workers.models.family import open_sources

    merge = Merge("ties", tuple(Source(expert.alias) for expert in family.experts), {"k": k, "lambda": 1.0})
    num_layers = open_sources(family).layout.num_layers
    return Recipe.uniform(merge, models=family.fingerprints, base=family.base.alias, num_layers=num_layers)


def measure(directory: Path) -> dict[str, Any]:
    import torch

    from search_spaces.study.engine import EngineOptions
    from service.studies.planning.here import measured_speeds
    from tests.benchmarks.bench_gradients import per_tensor
    from workers.engines.vllm.environment import engine_environment
    from workers.models.family import open_family

    options = EngineOptions(max_model_len=512, threads=THREADS, dtype="float32")
    os.environ.update(engine_environment(options, os.environ))
    torch.set_num_threads(THREADS)
    speeds = [measured_speeds(THREADS, device="cpu")]
    experts = {path.name: path for path in sorted(directory.iterdir()) if path.name.startswith("e") and path.is_dir()}
    family = open_family(directory / "base", experts, cache=directory / "cache")
    spec = task_of(directory)
    rows: list[dict[str, Any]] = []

    def note(phase: str, cpu_s: float, wall_s: float, **facts: Any) -> None:
        rows.append({"phase": phase, "cpu_s": cpu_s, "wall_s": wall_s, **facts})
        print(phase, round(cpu_s, 3), round(wall_s, 3), facts, file=sys.stderr, flush=True)

    def start() -> Any:
        from workers.serving.engine_worker import EngineWorker

        return EngineWorker(family, options)

    worker, *seconds = timed(start)
    note("start", *seconds)
    from workers.training.gradients import CoefficientGradients
    from workers.types import ScoreRequest, Span

    trained = CoefficientGradients(family, options, {"sums": spec}, cache=directory / "cache")
    recipes = [per_tensor(trained, seed) for seed in range(5)]
    worker.engine.swap(recipes[0])
    worker.score(ScoreRequest("plan", recipes[0], (Span("sums", spec, 0, 1),)))  # builds the task
    swaps = [timed(partial(worker.engine.swap, recipe))[1:] for recipe in recipes[1:4]]
    note("swap", *map(statistics.median, zip(*swaps, strict=True)))
    samples: Any = ()
    for size in SIZES:
        span = Span("sums", spec, 0, size)
        result, *seconds = timed(partial(worker.evaluator.score, (span,)))
        samples = result.samples
        read = sum(len(worker.evaluator.requests(spec, each.position)[0].tokens) for each in samples)
        answered = sum(len(each.tokens[0]) for each in samples)
        note("evaluation", *seconds, samples=size, read=read / size, answered=answered / size)
        worker.engine.swap(recipes[4 if size == SIZES[0] else 0])
    _, *seconds = timed(worker.engine.check)
    note("canary", *seconds)
    made, again = (timed(partial(worker.engine.swap, ties_of(family, k)))[1:] for k in (0.2, 0.3))
    note("statistics", *(max(0.0, first - second) for first, second in zip(made, again, strict=True)))
    worker.engine.swap(recipes[0])
    batch, weights = {"sums": range(SIZES[0])}, {"sums": 1.0}
    trained.loss_and_gradient(recipes[0], batch, weights)
    steps = [timed(partial(trained.loss_and_gradient, recipe, batch, weights))[1:] for recipe in recipes[1:3]]
    readings = [target.readings[0] for target in tuple(trained._of_tasks["sums"].at.values())[: SIZES[0]]]
    tokens = [len(reading.tokens) for reading in readings]
    targets = [len(reading.tokens) - reading.num_context for reading in readings]
    note(
        "gradient step",
        *map(min, zip(*steps, strict=True)),
        samples=SIZES[0],
        tokens=sum(tokens),
        targets=sum(targets) / len(targets),
    )
    held = worker.engine.held_digest
    recipe = next(each for each in recipes if each.digest == held)
    span = Span("sums", spec, 0, VERIFIED)
    samples = worker.evaluator.score((span,)).samples
    report, *seconds = timed(lambda: worker.verify(recipe, samples, (span,)))
    note("verification", *seconds, samples=VERIFIED, equal=report.num_equal)
    worker.engine.close()
    speeds.append(measured_speeds(THREADS, device="cpu"))
    return {"directory": directory.name, "rows": rows, "speeds": speeds}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
