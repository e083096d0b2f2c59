"""Agreement of `one_pass` with a vLLM engine, which the search benchmark checks first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from search_spaces.study.engine import EngineOptions
from tests.benchmarks import one_pass
from tests.benchmarks.arms import kept
from tests.benchmarks.code_digests import code_digest
from tests.benchmarks.search_families import FAMILIES, FULL
from tests.benchmarks.search_runs import Bench, SearchSpec
from workers.engines.vllm.environment import engine_environment
from workers.types import ScoreRequest, Span

__all__ = ["check_against_engine"]

NUM_RANDOM = 4


def check_against_engine(name: str, space: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Count the samples that `one_pass` and a vLLM engine score differently, for a few recipes of a space.

    The bench's own values are compared in a process of its own, which starts the engine. The comparison is an arm.
    """

    def measure() -> dict[str, Any]:
        command = [sys.executable, "-m", __name__, name, json.dumps(space, sort_keys=True)]
        # As in a replica: vLLM reads it before torch is imported.
        environment = {**os.environ, **engine_environment(EngineOptions())}
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found

    found = kept(
        "search",
        f"engine/{name}-{'default' if space is None else space['kind']}",
        {"family": name, "space": space, "random": NUM_RANDOM, "samples": FULL},
        measure,
        depends=lambda: {"code": code_digest(one_pass.__name__), "family": FAMILIES[name].digest},
    )
    if found["differing"]:
        raise AssertionError(f"{name}: the engine scores {found['differing']} of {found['compared']} samples otherwise")
    return found


def compare_with_engine(name: str, space: Mapping[str, Any] | None) -> dict[str, Any]:
    """Count the samples with different scores, over the baselines and some random merges."""
    from workers.serving.engine_worker import EngineWorker

    bench = Bench.of(name)
    preflight = bench.preflight(SearchSpec(name, "skills", "", 0, {}, space, {"scheduler": "none"}))
    draw = np.random.default_rng(0)
    recipes = [recipe for _, _, recipe in preflight.baselines()]
    recipes += [preflight.space.to_recipe(preflight.space.parameters.sample(draw)) for _ in range(NUM_RANDOM)]
    worker = EngineWorker(preflight.models.family, preflight.engine_options)
    worker.describe(tuple(preflight.tasks.search.values()))
    spans = tuple(Span(objective, task, 0, FULL) for objective, task in preflight.tasks.search.items())
    compared = differing = right = 0
    for recipe in recipes:
        request = ScoreRequest("bench", recipe, spans)
        theirs = {(s.objective, s.position): s.value for s in worker.score(request).samples}
        ours = {(s.objective, s.position): s.value for s in bench.scorer.score(request).samples}
        compared += len(ours)
        right += sum(value == 1.0 for value in ours.values())
        differing += sum(theirs[key] != value for key, value in ours.items()) + len(theirs.keys() ^ ours.keys())
    return {"recipes": len(recipes), "compared": compared, "right": right, "differing": differing}


if __name__ == "__main__":
    print(json.dumps(compare_with_engine(sys.argv[1], json.loads(sys.argv[2]))))
