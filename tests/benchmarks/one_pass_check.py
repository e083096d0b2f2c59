"""Whether a vLLM engine gives the values that `one_pass` gives: the first step of the search benchmark."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from search_spaces.study.sections import EngineOptions
from tests.benchmarks import one_pass
from tests.benchmarks.search_families import FULL
from tests.benchmarks.search_runs import CACHE, Bench, SearchSpec
from workers.engines.vllm.environment import engine_environment
from workers.types import ScoreRequest, Span

__all__ = ["check_against_engine"]

NUM_RANDOM = 4


def check_against_engine(name: str, space: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How many samples a vLLM engine scores otherwise, for a few recipes of the space (None: a study's default); from
    its file if it is there. The bench's own values are compared in a process of its own, which starts the engine."""
    bench = Bench.of(name)
    section = json.dumps(space, sort_keys=True)
    file = CACHE / "engine" / f"{bench.fingerprint[:16]}-{_code(section)}.json"
    if not file.exists():
        command = [sys.executable, "-m", __name__, name, section]
        # As in a replica: vLLM reads it before torch is imported.
        environment = {**os.environ, **engine_environment(EngineOptions())}
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(output.splitlines()[-1])
    found: dict[str, Any] = json.loads(file.read_text())
    if found["differing"]:
        raise AssertionError(f"{name}: the engine scores {found['differing']} of {found['compared']} samples otherwise")
    return found


def _code(section: str) -> str:
    return hashlib.sha256(Path(one_pass.__file__).read_bytes() + section.encode()).hexdigest()[:8]


def compare_with_engine(name: str, space: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of the source and published recipes and some random merges, on the samples of a full evaluation."""
    from workers.serving.engine_worker import EngineWorker

    bench = Bench.of(name)
    preflight = bench.preflight(SearchSpec(name, "skills", "", 0, {}, space, {"scheduler": "none"}))
    draw = np.random.default_rng(0)
    recipes = [recipe for _, _, recipe in preflight.baselines()]
    recipes += [preflight.space.to_recipe(preflight.space.parameters.sample(draw)) for _ in range(NUM_RANDOM)]
    worker = EngineWorker(preflight.family, preflight.engine_options)
    worker.describe(tuple(preflight.tasks.values()))
    spans = tuple(Span(objective, task, 0, FULL) for objective, task in preflight.tasks.items())
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
