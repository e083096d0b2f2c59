"""Layer paths in a live engine: agreement with transformers, time of a switch, memory, and trials per minute.

The bench has four parts; each engine runs in its own process, on CPU with one thread:

- `layouts`: for every model type, the largest difference in log-probability between the engine and transformers on the
  export, over random paths (any length, foreign layers, repeats, merged layers, scales from 0.5 to 1.5).
- `switch`: four models of 24 layers, paths of up to 36. A switch is all of `Engine.swap` except canaries: the recipe to
  the worker, its digest, the path, the checksum, the prefix cache. Paths consist of sources' layers, first with the
  base's embedding and head, then with those of other models, which are written each time.
- `memory`: the memory of the process before and after 10,000 switches.
- `trials`: the shipped family; a trial is a switch and the completions of 90 prompts, canaries included. The
  alternative is a new engine for every candidate: the merge is written to disk, and vLLM starts on it in a new process
  (few are measured).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MUST_DIFFER_LESS = 1e-3
MUST_SWITCH_MS, GOAL_SWITCH_MS = 5.0, 1.0
MUST_GROW_LESS_MB = 16.0
GOAL_TIMES = 100.0
SWITCHES = 10_000
LAYERS, MAX_LAYERS = 24, 36
PROMPTS, TOKENS = 90, 8
TRIALS, RESTARTS = 60, 3


def run() -> dict[str, Any]:
    from workers.engines.vllm.paths.geometry import PATH_TYPES

    with tempfile.TemporaryDirectory(prefix="mergesearch-paths-") as directory:
        layouts = []
        for name in PATH_TYPES:
            layouts.append(_in_a_process("layout", directory, name))
        switch = _in_a_process("switch", directory)
        warm = _in_a_process("trials", directory)
        started = time.perf_counter()
        for number in range(RESTARTS):
            _in_a_process("restart", directory, str(number))
        restarted = RESTARTS / (time.perf_counter() - started) * 60
    met = all(row["difference"] < MUST_DIFFER_LESS for row in layouts)
    met &= all(median < MUST_SWITCH_MS for median in switch["median_ms"].values())
    met &= switch["growth_mb"] < MUST_GROW_LESS_MB
    return {"layouts": layouts, **switch, **warm, "restarted_per_minute": restarted, "met": met}


def show(result: dict[str, Any]) -> None:
    for row in result["layouts"]:
        print(f"{row['layout']:<10} {row['difference']:.1e} over {row['paths']} paths (must: {MUST_DIFFER_LESS})")
    for what, median in result["median_ms"].items():
        print(
            f"switch, {what}: median {median:.2f} ms, 95 % within {result['p95_ms'][what]:.2f} ms "
            f"(must: {MUST_SWITCH_MS:g}, goal: {GOAL_SWITCH_MS:g})"
        )
    print(f"switch, another embedding and head: median {result['outside_ms']:.2f} ms")
    print(f"memory: {result['growth_mb']:+.1f} MB over {SWITCHES} switches, of {result['resident_mb']:.0f}")
    times = result["warm_per_minute"] / result["restarted_per_minute"]
    print(
        f"trials a minute: {result['warm_per_minute']:.0f}; with a new engine for each: "
        f"{result['restarted_per_minute']:.2f} ({times:.0f}x, goal: {GOAL_TIMES:g}x)"
    )


def _in_a_process(part: str, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", __name__, part, *arguments]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    print(f"{part}: {found}", file=sys.stderr)
    return found


def _options(max_layers: int) -> Any:
    from tests.conftest import OPTIONS

    return OPTIONS.model_copy(update={"max_layers": max_layers})


def _path(family: Any, draw: random.Random, length: int, *, merges: float = 0.0, ends: str = "base") -> Any:
    from dataclasses import replace

    from search_spaces.recipe import Merge, Source
    from tests.workers.recipes import copied, num_layers, path

    steps = []
    for _ in range(length):
        layer, model = draw.randrange(num_layers(family)), draw.choice(family.models).alias
        step = copied(model, layer)
        if draw.random() < merges:
            lambdas = {"lambda": (round(draw.random(), 2), round(draw.random(), 2))}
            step = Merge("task_arithmetic", tuple(Source(each.alias, layer) for each in family.experts[:2]), lambdas)
        steps.append(step)
    recipe = path(family, steps, [round(draw.uniform(0.5, 1.5), 3) for _ in steps])
    return replace(recipe, embedding=copied(ends, None), head=copied(ends, None))


def measure_layout(directory: Path, name: str) -> dict[str, Any]:
    from tests.conftest import HIDDEN
    from tests.layouts import layout_family
    from workers.engines.transformers.backend import Reference, logprobs
    from workers.engines.vllm.engine import Engine
    from workers.export.checkpoint import export
    from workers.merging.bank import Bank

    family = layout_family(directory / name, name, hidden=HIDDEN)
    bank, draw, apart = Bank(family, cache=directory), random.Random(0), 0.0
    with Engine(family, _options(9)) as engine:
        vocabulary = int(engine.prompts.config["vocab_size"])
        prompts = [[(7919 * i + 11 + count) % vocabulary for i in range(count)] for count in (3, 48, 200)]
        for number in range(8):
            recipe = _path(family, draw, draw.randint(1, 9), merges=0.3)
            engine.swap(recipe)
            model = Reference(str(export(recipe, bank, directory / f"{name}-{number}")), engine.options).model
            for prompt, ours in zip(prompts, engine.logprobs(prompts), strict=True):
                apart = max(apart, *(abs(a - b) for a, b in zip(ours, logprobs(model, prompt), strict=True)))
    return {"layout": name, "difference": apart, "paths": 8}


def measure_switch(directory: Path) -> dict[str, Any]:
    import psutil

    from tests.builders import tiny_family
    from workers.engines.vllm.engine import Engine

    family = tiny_family(directory / "deep", layers=LAYERS, hidden=128, tied=False, noise=0.02)
    draw = random.Random(0)
    process = psutil.Process()

    def seconds(engine: Any, recipe: Any) -> float:
        _ = recipe.digest  # the driver has it already
        started = time.perf_counter()
        engine.swap(recipe)
        return time.perf_counter() - started

    median_ms, p95_ms = {}, {}
    with Engine(family, _options(MAX_LAYERS)) as engine:
        engine.canary.is_due = lambda swap_count: False  # type: ignore[method-assign]
        for length in (12, LAYERS, MAX_LAYERS):
            taken = sorted(1e3 * seconds(engine, _path(family, draw, length)) for _ in range(200))
            median_ms[f"{length} layers"], p95_ms[f"{length} layers"] = statistics.median(taken), taken[189]
        paths = [_path(family, draw, draw.randint(1, MAX_LAYERS)) for _ in range(500)]
        for recipe in paths:
            engine.swap(recipe)
        before = process.memory_info().rss
        for number in range(SWITCHES):
            engine.swap(paths[number % len(paths)])
        after = process.memory_info().rss
        others = [_path(family, draw, LAYERS, ends=family.models[i % 4].alias) for i in range(100)]
        outside = [1e3 * seconds(engine, recipe) for recipe in others]
    return {
        "median_ms": median_ms,
        "p95_ms": p95_ms,
        "outside_ms": statistics.median(outside),
        "growth_mb": (after - before) / 1e6,
        "resident_mb": after / 1e6,
    }


def _shipped(directory: Path) -> Any:
    from workers.models.family import open_family

    place = Path(__file__).parents[2] / "workers" / "tiny_family"
    names = ("math", "text", "lookup")
    return open_family(place / "base", {name: place / "experts" / name for name in names}, cache=directory / "cache")


def _prompts() -> list[str]:
    file = Path(__file__).parents[2] / "workers" / "tiny_family" / "tasks" / "math_search.jsonl"
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines()[:PROMPTS]]


def measure_trials(directory: Path) -> dict[str, Any]:
    from workers.engines.vllm.engine import Engine
    from workers.evaluation.prompts import Generation

    family, draw = _shipped(directory), random.Random(0)
    with Engine(family, _options(10)) as engine:
        requests = [Generation(tuple(engine.prompts.encode(text)), TOKENS) for text in _prompts()]
        engine.generate(requests)
        started = time.perf_counter()
        for _ in range(TRIALS):
            engine.swap(_path(family, draw, draw.randint(8, 10)))
            engine.generate(requests)
        return {"warm_per_minute": TRIALS / (time.perf_counter() - started) * 60, "start_s": engine.start_s}


def measure_restart(directory: Path, seed: str) -> dict[str, Any]:
    """Score a candidate without a warm engine: an export, a new process, a new engine."""
    from search_spaces.study.engine import EngineOptions
    from workers.engines.vllm.environment import engine_environment
    from workers.export.checkpoint import export
    from workers.merging.bank import Bank

    family, draw = _shipped(directory), random.Random(int(seed))
    recipe = _path(family, draw, draw.randint(8, 10))
    out = export(recipe, Bank(family, cache=directory / "cache"), directory / f"restart-{seed}")
    os.environ.update(engine_environment(EngineOptions(threads=1), os.environ))
    from vllm import LLM, SamplingParams

    llm = LLM(str(out), dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**28)
    llm.generate(_prompts(), SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
    return {}


if __name__ == "__main__":
    parts: dict[str, Callable[..., Any]] = {
        "layout": measure_layout,
        "switch": measure_switch,
        "trials": measure_trials,
        "restart": measure_restart,
    }
    print(json.dumps(parts[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
