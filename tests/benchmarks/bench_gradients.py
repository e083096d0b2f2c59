"""Time and memory of a step of coefficient gradients, compared with bare passes of transformers over a minibatch.

A step writes the merge into the model, reads the references, goes back, and reduces each tensor's gradient to one
number per expert. Steps and bare passes take turns in one process with two threads, on the shipped family and on the
family of `merge_family`. Every step has new coefficients, one per tensor and expert.

Memory is the anonymous memory of a separate process, from before the sources are opened to the peak of a step. It is
divided by the size of one merged model, its largest gradient, and the activations (the memory that a forward pass alone
adds). There are few samples, so that a second model of gradients would be noticed.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks import merge_family, process_memory

SAMPLES = 48
SAMPLES_IN_MEMORY = 2
REPEATS = {"shipped": 15, "110M": 4}
TIME = (1.3, 1.1)  # must, goal: times the bare passes
MEMORY = 1.1  # must: times model, largest gradient and activations


def run() -> dict[str, Any]:
    with merge_family.ram_disk() as directory:
        merge_family.output("tests.benchmarks.bench_merge", "make", str(directory))
        rows = [json.loads(merge_family.output(__name__, "time", name, str(directory))) for name in REPEATS]
        memory = measure_memory(directory)
    return {
        "met": memory["ratio"] <= MEMORY,
        "threads": merge_family.THREADS,
        "samples": SAMPLES,
        "time": dict(zip(("must", "goal"), TIME, strict=True)),
        "memory_must": MEMORY,
        "families": rows,
        "memory": memory,
    }


def show(result: dict[str, Any]) -> None:
    print("family    parameters  tokens   step s   bare s   ratio (quartiles)")
    for row in result["families"]:
        print(
            f"{row['family']:<9} {row['parameters'] / 1e6:9.1f}M {row['tokens']:7d} {row['step_s']:8.3f} "
            f"{row['bare_s']:8.3f} {row['ratio']:7.2f} ({row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f})"
        )
    print(f"ratio: must {result['time']['must']}, goal {result['time']['goal']}")
    memory = result["memory"]
    print(
        f"memory: peak {memory['peak'] / 1e6:.0f} MB, model {memory['model'] / 1e6:.0f} MB + largest gradient "
        f"{memory['gradient'] / 1e6:.0f} MB + activations {memory['activations'] / 1e6:.0f} MB: "
        f"{memory['ratio']:.3f}, must {result['memory_must']}"
    )


def measure_memory(directory: Path) -> dict[str, Any]:
    """Memory of a step, measured by `measure_memory_here` in a separate process."""
    found: dict[str, Any] = json.loads(process_memory.output(__name__, "memory", str(directory)))
    return found


def measure_time_here(name: str, directory: str) -> dict[str, Any]:
    import torch

    family = shipped_family(Path(directory)) if name == "shipped" else merge_family.open_made(Path(directory))
    trained = opened(family, Path(directory))
    batch = {"sums": range(SAMPLES)}
    readings = [target.readings[0] for target in tuple(trained._of_tasks["sums"].at.values())[:SAMPLES]]
    tokens = torch.zeros(len(readings), max(len(reading.tokens) for reading in readings), dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, reading in enumerate(readings):
        length, start = len(reading.tokens), reading.num_context
        tokens[row, :length] = torch.tensor(reading.tokens)
        labels[row, start:length] = tokens[row, start:length]
    bare = bare_model(family)

    def bare_step() -> float:
        started = time.perf_counter()
        bare.zero_grad()
        bare(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
        return time.perf_counter() - started

    def step(seed: int) -> float:
        result = trained.loss_and_gradient(per_tensor(trained, seed), batch, {"sums": 1.0})
        seconds: float = result.seconds
        return seconds

    bare_step(), step(0)
    pairs = [(step(seed), bare_step()) for seed in range(1, REPEATS[name] + 1)]
    ratios = [ours / theirs for ours, theirs in pairs]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return {
        "family": name,
        "parameters": sum(parameter.numel() for parameter in bare.parameters()),
        "tokens": tokens.numel(),
        "step_s": statistics.median(ours for ours, _ in pairs),
        "bare_s": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "quartiles": (lower, upper),
    }


def measure_memory_here(directory: str) -> dict[str, Any]:
    """Memory of a step, for the family that `merge_family.make` left in `directory`."""
    from workers.training.losses import sample_losses

    family = merge_family.open_made(Path(directory))
    batch, weights = {"sums": range(SAMPLES_IN_MEMORY)}, {"sums": 1.0}
    trained = opened(family, Path(directory))
    trained.loss_and_gradient(per_tensor(trained, 0), batch, weights)  # compiles
    del trained
    gc.collect()
    before = process_memory.status("RssAnon")
    trained = opened(family, Path(directory))
    recipe, targets = per_tensor(trained, 1), tuple(trained._of_tasks["sums"].at.values())[:SAMPLES_IN_MEMORY]
    held = process_memory.status("RssAnon")
    with process_memory.Highest() as forward:
        losses = sample_losses(trained.model, targets)
    del losses
    with process_memory.Highest() as peak:
        trained.loss_and_gradient(recipe, batch, weights)
    sizes = {name: 4 * math.prod(info.shape) for name, info in trained.bank.base.tensors.items()}
    parts = {"model": sum(sizes.values()), "gradient": max(sizes.values()), "activations": forward.bytes - held}
    return {**parts, "peak": peak.bytes - before, "ratio": (peak.bytes - before) / sum(parts.values())}


def opened(family: Any, directory: Path) -> Any:
    from search_spaces.study.engine import EngineOptions
    from workers.training.gradients import CoefficientGradients
    from workers.types import TaskSpec

    file = directory / "sums.jsonl"
    rows = [{"prompt": f"{i} and {7 * i} make ", "answer": f"{8 * i}"} for i in range(100, 100 + SAMPLES)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = TaskSpec({"file": str(file), "max_tokens": 8}, "exact_match")
    options = EngineOptions(max_model_len=64, dtype="float32")
    return CoefficientGradients(family, options, {"sums": task}, cache=directory / "cache")


def shipped_family(directory: Path) -> Any:
    import workers.tiny_family
    from workers.models.family import open_family

    root = Path(workers.tiny_family.__file__).parent
    experts = {path.name: path for path in sorted((root / "experts").iterdir())}
    return open_family(root / "base", experts, cache=directory / "cache")


def bare_model(family: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(family.base.directory, dtype=torch.float32)


def per_tensor(trained: Any, seed: int) -> Any:
    """Task arithmetic with separate coefficients for every tensor."""
    import random

    from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source

    family, layout = trained.bank.family, trained.bank.layout
    draw = random.Random(seed)

    def merge(layer: int | None) -> Merge:
        numbers = tuple(round(draw.uniform(0.1, 0.5), 6) for _ in family.experts)
        return Merge(
            "task_arithmetic", tuple(Source(expert.alias, layer) for expert in family.experts), {"lambda": numbers}
        )

    layers = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(layout.num_layers))
    tensors = {name: merge(place.layer) for name, place in layout.places.items()}
    return Recipe(family.fingerprints, family.base.alias, layers, merge(None), merge(None), tensors)


if __name__ == "__main__":
    measures: dict[str, Callable[..., Any]] = {"time": measure_time_here, "memory": measure_memory_here}
    print(json.dumps(measures[sys.argv[1]](*sys.argv[2:])))
