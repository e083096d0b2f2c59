"""Errors of verification with an engine in bfloat16: right merges that fail, and wrong merges that pass.

A live engine on CPU holds merges of the shipped family and scores samples; verification then compares them with
transformers in float32 on the right merge. In a right row, the engine held that merge. In a wrong row, the engine held
the merge with one layer of the base model instead of the merged layer, as after a write that omitted a layer. The
constant tolerance that does not depend on the model is judged on the same samples and log-probabilities, for
comparison. `BENCH_DTYPE=float16` measures the other dtype of 16 bits.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

ROWS = 20  # of each kind
SAMPLES = 8  # of each of three tasks; a study verifies 16 by default
OPTIONS: dict[str, Any] = {"max_model_len": 64, "threads": 1}


def run() -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.bench_verification"]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return {**result, "met": result["measured"] == {"failed": 0, "found": ROWS}}


def show(result: dict[str, Any]) -> None:
    print(f"{result['dtype']}, {ROWS} right and {ROWS} wrong merges, {SAMPLES} samples of each of three tasks")
    print("tolerance                false failures  wrong merges found")
    for name, text in (("measured", "measured on the merge"), ("constant", "constant")):
        print(f"{text:<24} {result[name]['failed']:>14}  {result[name]['found']:>18}")
    for kind in ("right", "wrong"):
        ratios = [row["difference"] / row["tolerance"] for row in result["rows"] if row["kind"] == kind]
        print(f"{kind}: largest difference of a sample / tolerance: {min(ratios):.2f} to {max(ratios):.2f}")
    print("must: no false failure, and every wrong merge found")


def measure() -> dict[str, Any]:
    from search_spaces.study.engine import EngineOptions
    from workers.engines.vllm.engine import Engine
    from workers.evaluation.lm_eval import TaskEvaluator
    from workers.models.family import open_family
    from workers.tiny_family import family_dir
    from workers.types import Span, TaskSpec

    root = family_dir()
    experts = {name: root / "experts" / name for name in ("math", "text", "lookup")}
    family = open_family(root / "base", experts)
    dtype = os.environ.get("BENCH_DTYPE", "bfloat16")
    options = EngineOptions(**{**OPTIONS, "dtype": dtype})
    files = {name: str(root / "tasks" / f"{name}_search.jsonl") for name in experts}
    spans = tuple(
        Span(name, TaskSpec({"file": file, "max_tokens": 8}, "exact_match"), 0, SAMPLES) for name, file in files.items()
    )
    counts = {name: {"failed": 0, "found": 0} for name in ("measured", "constant")}
    rows = []
    with Engine(family, options) as engine:
        evaluator = TaskEvaluator(engine, engine.prompts)
        for number in range(ROWS):
            right, wrong, layer = merges(family, number)
            for kind, held in (("right", right), ("wrong", wrong)):
                row = compared(engine, evaluator, right, held, spans)
                rows.append({"kind": kind, "seed": number, "layer": layer, **row})
                outcome = "failed" if kind == "right" else "found"
                counts["measured"][outcome] += row["beyond"] > 0
                counts["constant"][outcome] += row["beyond_constant"] > 0
                print(rows[-1], file=sys.stderr)
    return {"dtype": dtype, "rows": rows, **counts}


def merges(family: Any, number: int) -> tuple[Any, Any, int]:
    """A merge with coefficients drawn by `number`, the same merge with one layer of the base, and the layer's index."""
    from dataclasses import replace

    from search_spaces.recipe import LayerRecipe
    from tests.workers.recipes import arithmetic, copied

    draw = random.Random(number)
    right = arithmetic(family, *(draw.uniform(0.1, 0.6) for _ in family.experts))
    layer = draw.randrange(len(right.layers))
    base = copied(family.base.alias, layer)
    layers = list(right.layers)
    layers[layer] = LayerRecipe(base, base, base)
    return right, replace(right, layers=tuple(layers)), layer


def compared(engine: Any, evaluator: Any, right: Any, held: Any, spans: Any) -> dict[str, Any]:
    """Verify the merge `right` with samples of an engine that holds the merge `held`."""
    import torch

    from workers.engines.transformers import verification
    from workers.engines.transformers.tolerance import Tolerance
    from workers.engines.transformers.verification import texts_to_read, verify
    from workers.engines.vllm.worker_extension import family_to_json, open_bank
    from workers.export.checkpoint import export

    engine.swap(held)
    samples = evaluator.score(spans).samples
    texts = texts_to_read(evaluator, samples, spans)
    logprobs = dict(zip(texts, engine.logprobs(texts), strict=True))
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        out = Path(directory) / "merge"
        export(right, open_bank(family_to_json(engine.family)), out, dtype=getattr(torch, engine.dtype))

        def judged() -> Any:
            return verify(
                right.digest,
                str(out),
                engine.options,
                samples=samples,
                spans=spans,
                dtype=engine.dtype,
                engine_logprobs=logprobs,
                evaluator=evaluator,
            )

        found = judged()
        with mock.patch.object(verification, "measured_tolerance", lambda model, texts, *, dtype: Tolerance(dtype)):
            constant = judged()
    return {
        "beyond": found.num_beyond,
        "beyond_constant": constant.num_beyond,
        "difference": found.max_logprob_difference,
        "tolerance": found.tolerance,
        "logprobs": found.num_logprobs,
        "unequal": found.num_samples - found.num_equal,
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
