"""Agreement of engines with transformers after swaps, for every model layout of `tests.layouts`.

For each layout, the bench makes a family with random weights, starts an engine on its base, and writes candidates into
that engine one after another: merges by task arithmetic, by SLERP, and by task arithmetic again in the last layer
alone. Each candidate is exported too; transformers reads the export and computes, in float32 with its plain attention,
the log-probability of every token of three prompts. The column "groups" says whether every tensor has a place, "export"
whether transformers finds exactly the tensors that it needs. The difference is the largest over all candidates, prompts
and tokens. Each engine runs in its own process. A layout that cannot be run has a row with the reason, and fails the
benchmark like a difference beyond the bar.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.layouts import LAYOUTS, layout_family

MUST = 1e-3
PROMPT_TOKENS = (3, 48, 200)  # below and beyond the sliding windows and the cache's blocks


def run() -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="mergesearch-layouts-") as directory:
        for name in LAYOUTS:
            rows.append(_in_a_process(name, Path(directory) / name))
            print(_line(rows[-1]), file=sys.stderr)
    return {"must": MUST, "layouts": rows, "met": all(row["met"] for row in rows)}


def show(result: dict[str, Any]) -> None:
    print(f"{'layout':<12} groups  export  largest difference   swap ms  engine s")
    for row in result["layouts"]:
        print(_line(row))
    missed = [row["layout"] for row in result["layouts"] if not row["met"]]
    print(f"differences must stay below {result['must']}: " + (f"missed by {', '.join(missed)}" if missed else "met"))


def _line(row: dict[str, Any]) -> str:
    if "reason" in row:
        return f"{row['layout']:<12} {row['reason']}"
    return (
        f"{row['layout']:<12} {'yes':<7} {'yes' if row['export'] else 'no':<7} {row['difference']:18.1e} "
        f"{1000 * row['swap_s']:9.0f} {row['start_s']:9.1f}"
    )


def _in_a_process(name: str, directory: Path) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", __name__, name, str(directory)]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if finished.returncode:
        lines = finished.stderr.strip().splitlines()
        return {"layout": name, "met": False, "reason": lines[-1] if lines else f"exit {finished.returncode}"}
    row: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return {**row, "met": row["export"] and row["difference"] < MUST}


def measure(name: str, directory: Path) -> dict[str, Any]:
    """Measure one layout: its row of the table, and the number of tensors of each component."""
    from tests.conftest import HIDDEN, OPTIONS
    from workers.engines.vllm.engine import Engine
    from workers.merging.bank import Bank

    family = layout_family(directory, name, hidden=HIDDEN)
    bank = Bank(family, cache=directory / "cache")
    started = time.perf_counter()
    with Engine(family, OPTIONS) as engine:
        start_s = time.perf_counter() - started
        vocabulary = int(engine.prompts.config["vocab_size"])
        prompts = [[(7919 * i + 11 + count) % vocabulary for i in range(count)] for count in PROMPT_TOKENS]
        differences, whole = [], []
        for number, recipe in enumerate(_candidates(family)):
            engine.swap(recipe)
            ours = engine.logprobs(prompts)
            theirs, is_whole = _by_transformers(recipe, bank, directory / str(number), prompts)
            whole.append(is_whole)
            differences += [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
        swap_s = engine.swap_s[1:]  # the first writes the base
    return {
        "layout": name,
        "groups": dict(Counter(place.component for place in bank.layout.places.values())),
        "export": all(whole),
        "difference": max(differences),
        "swap_s": sum(swap_s) / len(swap_s),
        "start_s": start_s,
    }


def _candidates(family: Any) -> Iterator[Any]:
    from tests.workers.recipes import arithmetic, slerp

    first, other = arithmetic(family, 0.4, 0.9), arithmetic(family, 1.0, -0.5)
    yield first
    yield slerp(family, 0.3)
    yield first
    yield replace(first, layers=(*first.layers[:-1], other.layers[-1]))


def _by_transformers(recipe: Any, bank: Any, out: Path, prompts: list[list[int]]) -> tuple[list[list[float]], bool]:
    """The log-probabilities of the exported model, and whether transformers found exactly the tensors that it needs."""
    from transformers import AutoModelForCausalLM

    from workers.engines.transformers.backend import ATTENTION, logprobs
    from workers.export.checkpoint import export

    model, found = AutoModelForCausalLM.from_pretrained(
        export(recipe, bank, out), attn_implementation=ATTENTION, output_loading_info=True
    )
    return [logprobs(model.eval(), prompt) for prompt in prompts], not any(found.values())


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
