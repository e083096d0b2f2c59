"""Models for the merge benchmarks: a base and three experts, shaped like a Llama, of 110M random parameters each."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXPERTS = ("math", "text", "code")
SHAPES: dict[str, Any] = {
    "layers": 12,
    "hidden": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "initializer_range": 0.02,
}
THREADS = 2


@contextmanager
def ram_disk() -> Iterator[Path]:
    """Context manager with a temporary directory in memory, if the machine has a memory disk."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-", dir=place) as directory:
        yield Path(directory)


def make(directory: Path, **shapes: int) -> Any:
    """Write the family in float32 to `directory` and return it. `shapes` replaces settings of the configuration."""
    from tests.builders import tiny_family

    return tiny_family(directory, experts=EXPERTS, noise=0.002, **SHAPES | shapes)


def open_made(directory: Path) -> Any:
    from workers.models.family import open_family

    return open_family(directory / "base", {name: directory / name for name in EXPERTS}, cache=directory / "cache")


def output(module: str, *arguments: str) -> str:
    """The last line that `python -m MODULE ARGUMENTS` prints. The process uses the number of threads measured."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", module, *arguments]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return finished.stdout.splitlines()[-1]


def model_bytes(family: Any) -> int:
    from workers.models.checkpoints import open_checkpoint, stored_bytes

    return stored_bytes([open_checkpoint(family.base.directory)])


def models_moved(spec: Any) -> int:
    """Number of models whose bytes a merge reads and writes: its sources, the base if it needs it, the result."""
    moved: int = min(len(EXPERTS), spec.max_sources or len(EXPERTS)) + spec.needs_base + 1
    return moved


def recipe(family: Any, method: str, seed: int) -> Any:
    """A recipe with one merge by `method` for all tensors, with coefficients drawn by `seed`."""
    from search_spaces.methods import METHODS
    from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source

    spec = METHODS[method]
    draw = random.Random(f"{method} {seed}")
    aliases = [expert.alias for expert in family.experts][: spec.max_sources]
    ranges = {
        "k": (0.1, 0.9), "density": (0.3, 0.8), "epsilon": (0.05, 0.15), "gamma": (0.005, 0.02), "t": (0.1, 0.9),
        "weight": (0.2, 1.0), "lambda": (0.2, 1.0), "select_topk": (0.1, 0.9),
        "mask_lambda": (0.2, 0.6), "agreement": (1, 1),
    }  # fmt: skip
    if method == "nearswap":
        ranges["t"] = (0.0005, 0.002)
    coefficients: dict[str, Any] = {}
    for coefficient in spec.coefficients:
        if coefficient.default is None:
            low, high = ranges[coefficient.name]
            is_each = coefficient.name in ("weight", "lambda") and coefficient.per_model
            each = [round(draw.uniform(low, high), 6) for _ in (aliases if is_each else "1")]
            coefficients[coefficient.name] = tuple(each) if is_each else each[0]

    def merge(layer: int | None) -> Merge:
        sources = tuple(Source(alias, layer) for alias in aliases)
        return Merge(method, sources, coefficients, seed if spec.takes_seed else None)

    each_layer = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(SHAPES["layers"]))
    return Recipe(family.fingerprints, family.base.alias, each_layer, merge(None), merge(None))


# mergekit's names of the methods, and the options with which they give the same merge.
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {"normalize": True}),
    "task_arithmetic": ("task_arithmetic", {"normalize": False}),
    "ties_weighted": ("ties", {"normalize": True}),
    "slerp": ("slerp", {}),
    "nuslerp": ("nuslerp", {"nuslerp_flatten": True}),
    "multislerp": ("multislerp", {}),
    "karcher": ("karcher", {}),
    "model_stock": ("model_stock", {}),
    "nearswap": ("nearswap", {}),
    "arcee_fusion": ("arcee_fusion", {}),
    "dare_linear_l1": ("dare_linear", {"normalize": False}),
    "dare_ties_l1": ("dare_ties", {"normalize": False}),
    "breadcrumbs": ("breadcrumbs", {"normalize": False}),
    "breadcrumbs_ties": ("breadcrumbs_ties", {"normalize": False}),
    "sce_mergekit": ("sce", {}),
    "ram": ("ram", {}),
    "ramplus_tl": ("ramplus_tl", {}),
    "della_linear_l1": ("della_linear", {"normalize": False}),
    "della_l1": ("della", {"normalize": True}),
}
# Ours, and the method of mergekit that it is measured against where it has none of its own.
STAND_INS = {"ties": "ties_weighted", "dare_linear": "dare_linear_l1", "dare_ties": "dare_ties_l1"}
# Methods that take the first model for their base.
FIRST_IS_BASE = ("slerp", "nearswap", "arcee_fusion")


def mergekit_config(directory: Path, candidate: Any, method: str) -> dict[str, Any]:
    """Configuration of mergekit for a recipe of this benchmark."""
    from search_spaces.methods import METHODS

    name, settings = PEERS[method]
    merge = candidate.embedding
    spec = METHODS[method]
    models = []
    for i, source in enumerate(merge.sources):
        parameters = {
            ("weight" if key == "lambda" and isinstance(value, tuple) else key): (
                value[i] if isinstance(value, tuple) else value
            )
            for key, value in merge.coefficients.items()
            if isinstance(value, tuple) or key in ("density", "epsilon", "gamma")
        }
        if spec.needs_base and method not in ("model_stock", "sce_mergekit", "ram", "ramplus_tl"):
            parameters.setdefault("weight", 1.0)
        models.append({"model": str(directory / source.model), "parameters": parameters})
    shared = {
        key: value
        for key, value in merge.coefficients.items()
        if not isinstance(value, tuple) and key not in ("density", "epsilon", "gamma", "weight")
    }
    configuration = {
        "merge_method": name,
        "models": models,
        "parameters": settings | shared,
        "dtype": "float32",
    }
    if spec.needs_base:
        configuration["base_model"] = str(directory / "base")
    elif method in FIRST_IS_BASE:
        configuration["base_model"] = models[0]["model"]
    return configuration


def run_mergekit(configuration: dict[str, Any], out: Path) -> float:
    """Seconds of a merge by mergekit to `out`, without its imports."""
    import torch
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    torch.set_num_threads(THREADS)
    options = MergeOptions(quiet=True, copy_tokenizer=True, lazy_unpickle=False, write_model_card=False)
    parsed = MergeConfiguration.model_validate(configuration)
    started = time.perf_counter()
    run_merge(parsed, str(out), options)
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds


if __name__ == "__main__":
    made, first, *asked = Path(sys.argv[1]), *sys.argv[2:]
    seconds = {}
    for method in (first, first, *asked):  # what the first merge of a process takes longer is not counted
        built = recipe(open_made(made), method, 0)
        seconds[method] = run_mergekit(mergekit_config(made, built, method), made / "merged")
    print(json.dumps(seconds))
