"""MergOPT's vision table at a small size: merges of image experts from MergOPT, SAM and AdamW at equal learning rates.

Table 9 of the paper has ten experts of CLIP ViT-B/32, each trained by AdamW, in the tangent space and by MergOPT, and
the accuracy of their merges by weight averaging, task arithmetic, TIES, DARE and WUDI-Merging on each task. Here the
three experts of `image_family` are trained again by each optimizer, from the same base, with the same heads, images,
steps and learning rate (0.001, that of the family); a step of SAM takes twice as long. Training in the tangent space is
left out. MergOPT's b is the Laplace scale of the task vectors of the family's own experts, which AdamW has trained.

The protocol was fixed before a judge image was scored: a merge method's coefficient is the best on 150 search images of
each task, by the mean of the tasks, and its merge is judged on the held-out images (1,000 of MNIST, 1,000 of
Fashion-MNIST, 500 digits). Each seed has its own batches, noise and search images. Differences are paired by seed and
image.

    make bench ONLY=mergopt_images
    MERGOPT_IMAGES_ARMS=adamw,mergopt MERGOPT_IMAGES_SEEDS=0 make bench ONLY=mergopt_images

Each optimizer and seed is an arm in `tests/benchmarks/results/mergopt_images`; the experts stay in
`.bench/mergopt_images`. The table has the first seeds of which all optimizers are on file.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from search_spaces.recipe import Merge, Recipe, Source
from tests.benchmarks.arms import NotKept, files_alone, is_fresh, kept, packed, unpacked
from tests.benchmarks.bench_images import Arm, ImageBench, ImageFamily, difference
from tests.benchmarks.bench_search import seeds_of
from tests.benchmarks.code_digests import code_digest
from tests.benchmarks.image_family import TASKS
from workers.training.finetuning.fleet import load_pipeline
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.merge_losses import Candidate, candidates
from workers.training.finetuning.spec import FinetuneSpec
from workers.training.finetuning.trainer import check, train
from workers.training.mergopt.fit import fit, sample_of

BENCHMARK = "mergopt_images"
CACHE = Path(".bench/mergopt_images")
SEEDS = range(5)
LEARNING_RATE = 1e-3
VALIDATION_IMAGES = 150  # of each task, for coefficients
OPTIMIZERS = {"adamw": "AdamW", "sam": "SAM", "mergopt": "MergOPT"}
BASELINE, OURS = "adamw", "mergopt"
ALONE = "expert, on its own task"


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    names = os.environ.get("MERGOPT_IMAGES_ARMS", ",".join(OPTIMIZERS)).split(",")
    for seed in seeds_of("MERGOPT_IMAGES_SEEDS"):
        for name in names:
            found = judged_merges(name, seed)
            shown = ", ".join(f"{method} {arm.mean:.3f}" for method, arm in found.methods.items())
            print(f"seed {seed} {name}: {shown}", file=sys.stderr, flush=True)
    with files_alone():
        seeds = kept_seeds()
        return {"seeds": len(seeds), "tables": [vision_table(seeds)] if seeds else []}


def show(result: dict[str, Any]) -> None:
    print(f"seeds with all optimizers: {result['seeds']}")
    for table in result["tables"]:
        print(f"\n{table}")


# -- experts -----------------------------------------------------------------------------------------------------------


def scale_of_family() -> float:
    """MergOPT's b, fitted to the experts that the family has."""

    def measure() -> dict[str, Any]:
        root = ImageFamily().directory()
        experts = [root / "training" / "experts" / task / EXPERT for task in TASKS]
        return {"value": float(f"{fit(sample_of(root / 'base', experts)).scale:.2g}")}

    return float(kept(BENCHMARK, "scale", {"distribution": "laplace"}, measure, depends=depends)["value"])


def specs(optimizer: str, seed: int, scale: float) -> dict[str, FinetuneSpec]:
    """The experts of the family with another optimizer and seed; `scale` is MergOPT's b."""
    found = {}
    for alias, spec in load_pipeline(ImageFamily().directory() / "finetune.yaml").experts.items():
        own = {"kind": optimizer, **({"scale": scale} if optimizer == OURS else {})}
        found[alias] = spec.model_copy(
            update={
                "method": spec.method.model_copy(update=own),
                "training": spec.training.model_copy(update={"learning_rate": LEARNING_RATE}),
                "evaluation": None,
                "seed": seed,
            }
        )
    return found


def keep_only(place: Path, key: Mapping[str, Any]) -> None:
    """Remove experts in `place` that were trained with another key, or all of them with FRESH=1.

    `key` is the settings and the digests of code and data, as JSON. Experts with the same key, and trainings that were
    interrupted, stay.
    """
    file, key = place / "key.json", json.loads(json.dumps(key))
    if file.exists() and json.loads(file.read_text()) == key and not is_fresh():
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    file.write_text(json.dumps(key))


def trained(experts: Mapping[str, FinetuneSpec], place: Path) -> float:
    """Train the experts that are not in `place` yet, and return the CPU seconds of all.

    Training continues from its last checkpoint; seconds before it are then not counted.
    """
    total = 0.0
    for alias, spec in experts.items():
        directory, file = place / alias, place / alias / "seconds.json"
        if not file.exists():
            check(spec)
            directory.mkdir(parents=True, exist_ok=True)
            started = time.process_time()
            train(spec, directory)
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
            file.write_text(json.dumps(time.process_time() - started))
            print(f"{time.strftime('%H:%M:%S')} {place.name} {alias}", file=sys.stderr, flush=True)
        total += float(json.loads(file.read_text()))
    return total


# -- merges ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """Merges of one optimizer's experts: the best of each method, and `alone`, each expert on its own task."""

    methods: Mapping[str, Arm]
    alone: Arm
    seconds: float


def judged_merges(optimizer: str, seed: int) -> Judged:
    """The merges of an optimizer's experts with one seed, from their file or measured now."""
    scale = scale_of_family() if optimizer == OURS else 0.0
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "seed": seed,
        "learning_rate": LEARNING_RATE,
        "scale": scale,
        "validation": VALIDATION_IMAGES,
        "tasks": list(TASKS),
    }

    def measure() -> dict[str, Any]:
        place = (CACHE / f"{optimizer}-{seed}").resolve()
        keep_only(place, {**settings, **depends()})
        seconds = trained(specs(optimizer, seed, scale), place)
        bench = ImageBench(ImageFamily(experts=str(place / "{}" / EXPERT)))  # type: ignore[arg-type]
        methods = best_merges(bench, seed)
        alone = {
            task: bench.answers(recipe_of(bench, Merge("passthrough", (Source(task),))), {task: spec})[task]
            for task, spec in bench.judge.tasks.search.items()
        }
        return {
            "methods": {method: figures(arm) for method, arm in methods.items()},
            "alone": figures(Arm(ALONE, 0.0, 0, alone)),
            "seconds": round(seconds, 1),
        }

    found = kept(BENCHMARK, f"{optimizer}-{seed}", settings, measure, depends=depends)
    methods = {method: arm_of(method, each) for method, each in found["methods"].items()}
    return Judged(methods, arm_of(ALONE, found["alone"]), found["seconds"])


def depends() -> dict[str, str]:
    return {
        "family": ImageFamily().digest,
        "code": code_digest(
            "workers.training.finetuning.trainer", "workers.training.finetuning.images", "workers.training.mergopt.fit"
        ),
    }


def best_merges(bench: ImageBench, seed: int) -> dict[str, Arm]:
    """The best candidate of each method on the search images, with its answers to the held-out images."""
    tasks = bench.tasks(seed)
    best: dict[str, tuple[float, Candidate]] = {}
    spent: dict[str, int] = {}
    for candidate in candidates(TASKS, seed=seed, wudi=True):
        answers = bench.answers(recipe_of(bench, candidate.merge), tasks, VALIDATION_IMAGES)
        value = float(np.mean([each.mean() for each in answers.values()]))
        spent[candidate.method] = spent.get(candidate.method, 0) + VALIDATION_IMAGES * len(TASKS)
        if candidate.method not in best or value > best[candidate.method][0]:
            best[candidate.method] = value, candidate
    return {
        method: Arm(
            "" if candidate.coefficient is None else f"{candidate.coefficient:g}",
            value,
            spent[method],
            bench.answers(recipe_of(bench, candidate.merge), bench.judge.tasks.search),
        )
        for method, (value, candidate) in best.items()
    }


def recipe_of(bench: ImageBench, merge: Merge) -> Recipe:
    return Recipe.uniform(
        merge,
        models={model.alias: model.fingerprint for model in bench.judge.models.family.models},
        base="base",
        num_layers=len(bench.scorer.engine.base_recipe.layers),
    ).canonical()


def figures(arm: Arm) -> dict[str, Any]:
    answers = {task: packed(each) for task, each in arm.answers.items()}
    return {"coefficient": arm.label, "search": arm.search, "spent": arm.spent, "answers": answers}


def arm_of(method: str, found: Mapping[str, Any]) -> Arm:
    answers: dict[str, NDArray[np.bool_]] = {task: unpacked(each) for task, each in found["answers"].items()}
    return Arm(method, found["search"], found["spent"], answers)


# -- tables ------------------------------------------------------------------------------------------------------------


def kept_seeds() -> range:
    """The seeds, from 0, of which all optimizers are on file. Called inside `files_alone`."""
    for seed in SEEDS:
        try:
            for optimizer in OPTIMIZERS:
                judged_merges(optimizer, seed)
        except NotKept:
            return range(seed)
    return SEEDS


def vision_table(seeds: range) -> str:
    """Held-out accuracy of merges by method and optimizer, means over seeds, and differences from AdamW's."""
    if not seeds:
        raise NotKept(f"{BENCHMARK}: no seed has all optimizers on file")
    judged = {optimizer: [judged_merges(optimizer, seed) for seed in seeds] for optimizer in OPTIMIZERS}
    rows = {
        method: {optimizer: [run.methods[method] for run in runs] for optimizer, runs in judged.items()}
        for method in judged[BASELINE][0].methods
    }
    rows[ALONE] = {optimizer: [run.alone for run in runs] for optimizer, runs in judged.items()}
    lines = [
        f"| merge (seeds: {len(seeds)}) | optimizer | {' | '.join(TASKS)} | mean | minus {OPTIMIZERS[BASELINE]} |",
        f"|---|---|{'---|' * len(TASKS)}---|---|",
    ]
    for method, by_optimizer in rows.items():
        for optimizer, arms in by_optimizer.items():
            values = [f"{np.mean([arm.values[task] for arm in arms]):.3f}" for task in TASKS]
            mean, minus = f"{np.mean([arm.mean for arm in arms]):.3f}", ""
            if optimizer != BASELINE:
                value, low, high = difference(arms, by_optimizer[BASELINE])
                minus = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
            lines.append(f"| {method} | {OPTIMIZERS[optimizer]} | {' | '.join(values)} | {mean} | {minus} |")
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {"vision": lambda: vision_table(kept_seeds())}
