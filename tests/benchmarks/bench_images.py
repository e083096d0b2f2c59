"""Quality of the merges that `auto` finds on the image family, compared with fixed and tuned recipes and AdaMerging.

The family is that of `image_family` (seed 0), trained into `.bench/images` when it is first needed; its training reads
neither search nor judge images. The protocol was fixed before a judge image was scored:

- Arms: `expert`, the best expert, and `recipe`, the best of the published recipes that every study scores as
  baselines (both by the mean of the three accuracies on search images); `tuned`, task arithmetic with the best of 30
  coefficients; `random`, the best of 60 random points of the space `layerwise`; `auto`, the best of as many trials of
  the default search in that space, baselines apart; `study`, the best trial of that search, baselines included, as a
  study reports it; `adamerging`, layer-wise AdaMerging as published, by the product's searcher `gradient` with
  `loss: entropy`: entropy on the same images without their labels, 500 updates by Adam at 0.001 with 16 images of each
  task, coefficients from 0.3 in [0, 1], one for each tensor and expert. In the paper its images are those of the test;
  here they are the search images.
- Each seed has its own 270 search images of each task, the same for all arms: gradients and scores read no others.
- Judged on the held-out images: 1,000 of MNIST, 1,000 of Fashion-MNIST and 500 digits. Differences are paired by seed
  and image.

    make bench ONLY=images
    IMAGES_SEEDS=2 make bench ONLY=images

Each arm and seed is an arm in `tests/benchmarks/results/images`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from search_spaces.recipe import Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from search_spaces.study.file import parse_study
from service.studies.preflight.examine import examine
from service.studies.preflight.result import PreflightResult
from tests.benchmarks.arms import NotKept, files_alone, kept, packed, unpacked
from tests.benchmarks.code_digests import code_digest, statements_of
from tests.benchmarks.image_family import TASKS, build_family, study_document, train_here
from tests.benchmarks.search_runs import Bench, SearchSpec, Trial
from workers.evaluation.image_tasks import load_image_task
from workers.serving.image_worker import ImageWorker
from workers.types import ScoreRequest, Span, TaskSpec

BENCHMARK = "images"
CACHE = Path(".bench/images")
NUM_SEEDS = 5
FULL = 270
NUM_TRIALS = 60
GRID = tuple(round(0.05 * i, 2) for i in range(1, 31))
NUM_RESAMPLES = 1000

# AdaMerging (Yang et al., ICLR 2024), section 4 and its code: layer-wise coefficients.
ADAMERGING: Mapping[str, Any] = {"updates": 500, "batch": 16, "learning_rate": 1e-3, "initial": 0.3}

ARMS = ("expert", "recipe", "tuned", "random", "adamerging", "auto", "study")
LABELS = {
    "expert": "best expert",
    "recipe": "best published recipe",
    "tuned": "task arithmetic, tuned",
    "random": "random search",
    "adamerging": "AdaMerging",
    "auto": "`auto`, its own trials",
    "study": "`auto`, best of the study",
}


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    for seed in range(int(os.environ.get("IMAGES_SEEDS", NUM_SEEDS))):
        for arm in ARMS:
            found = judged_arm(arm, seed)
            print(f"seed {seed} {arm}: {found.label}, held out {found.mean:.3f}", file=sys.stderr, flush=True)
    return {"seeds": seeds_on_file()}


def show(result: dict[str, Any]) -> None:
    with files_alone():
        print(arms_table())


# -- the family and its searches ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageFamily:
    """The image family, in the form of `search_families.TrainedFamily`.

    `experts` is the place of an expert's model, absolute or in the family's directory, with {} for its task.
    """

    name: str = "images"
    experts: str = "training/experts/{}/model"

    def directory(self) -> Path:
        """The directory of the models and images, which are made first if they are missing."""
        place = (CACHE / "family").resolve()
        if not (place / "family.json").exists():
            build_family(place, train=train_here)
        return place

    @property
    def digest(self) -> str:
        """Digest of the code that makes the models and images, and draws the search images of a seed."""
        drawing = f"{FULL} {statements_of(inspect.getsource(ImageFamily))}"
        return f"{code_digest('tests.benchmarks.image_family')}-{hashlib.sha256(drawing.encode()).hexdigest()[:16]}"

    def study(self, goal: str, **sections: Any) -> Any:
        """A study of the family; with `goal` "judge", its objectives are the held-out images.

        Other studies have the first FULL search images of each task, in the order of the study's seed.
        """
        document = study_document(experts=self.experts)
        del document["holdout"]
        seed = int(sections.get("search", {}).get("seed", 0))
        for objective in document["objectives"]:
            task = objective["task"]
            if goal == "judge":
                task["images"] = task["images"].replace("_search", "_holdout")
            else:
                task["images"] = str(self._drawn(objective["name"], task, seed))
        return parse_study({**document, **sections}, self.directory())

    def _drawn(self, name: str, task: Mapping[str, Any], seed: int) -> Path:
        """A JSONL file with the FULL search images of a task that the arms of a seed may read."""
        whole = {**task, "images": str(self.directory() / task["images"])}
        found = load_image_task(TaskSpec(whole, "acc", permutation_seed=seed))
        samples = [found.images.samples[index] for index in found.order[:FULL]]
        rows = [{"image": str(sample.file), "label": found.images.class_of(sample)} for sample in samples]
        file = (CACHE / "search_images" / f"{name}-{seed}-{FULL}.jsonl").resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file


class ImageBench(Bench):
    """The searches of the image family, scored by the product's image engine in this process."""

    losses = "workers.training.image_losses"

    @cached_property
    def scorer(self) -> Any:
        return ImageWorker(self.judge.models.family, EngineOptions(dtype="float32"), device="cpu")

    @cached_property
    def judge(self) -> PreflightResult:
        return examine(self.family.study("judge", fidelity={"scheduler": "none"}))

    def _key(self, spec: SearchSpec) -> str:
        return f"{super()._key(spec)} {self.family.digest}"

    def tasks(self, seed: int) -> Mapping[str, TaskSpec]:
        """The search tasks in the order of a study with this seed."""
        return self._prepared("skills", _document("random", seed)).tasks.search

    def answers(self, recipe: Recipe, tasks: Mapping[str, TaskSpec], num: int | None = None) -> dict[str, NDArray[Any]]:
        """Whether a merge is right about each of the first `num` images of each task (None: all)."""
        spans = []
        for name, task in tasks.items():
            (info,) = self.scorer.describe((task,))
            spans.append(Span(name, task, 0, info.num_samples if num is None else num))
        samples = self.scorer.score(ScoreRequest("bench", recipe, tuple(spans))).samples
        return {
            name: np.array([sample.value > 0.5 for sample in samples if sample.objective == name]) for name in tasks
        }


@cache
def bench() -> ImageBench:
    return ImageBench(ImageFamily())  # type: ignore[arg-type]


def _spec(algorithm: str, seed: int) -> SearchSpec:
    return SearchSpec(
        "images",
        "skills",
        algorithm,
        seed,
        {"algorithm": algorithm, "max_trials": NUM_TRIALS},
        fidelity={"scheduler": "none", "max_samples": FULL},
    )


def _document(algorithm: str, seed: int) -> str:
    return json.dumps(_spec(algorithm, seed).document(), sort_keys=True)


# -- arms --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """Result of an arm: the chosen recipe, and its `answers` to the held-out images of each task."""

    label: str
    search: float
    spent: int
    answers: Mapping[str, NDArray[np.bool_]]

    @property
    def values(self) -> dict[str, float]:
        return {task: float(each.mean()) for task, each in self.answers.items()}

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.values.values())))


def judged_arm(arm: str, seed: int) -> Arm:
    """Result of an arm with one seed, read from its file or measured now."""
    settings: dict[str, Any] = {"arm": arm, "seed": seed, "samples": FULL, "tasks": list(TASKS)}
    if arm == "tuned":
        settings["grid"] = list(GRID)
    elif arm == "adamerging":
        settings |= ADAMERGING
    else:
        settings["trials"] = NUM_TRIALS

    def measure() -> dict[str, Any]:
        label, search, spent, recipe = CHOICES[arm](seed)
        answers = bench().answers(recipe, bench().judge.tasks.search)
        return {
            "label": label,
            "search": search,
            "spent": spent,
            "answers": {task: packed(each) for task, each in answers.items()},
        }

    def depends() -> dict[str, str]:
        algorithm = {"auto": "auto", "study": "auto", "adamerging": "gradient"}.get(arm, "random")
        return {"family": ImageFamily().digest, f"code of {algorithm}": bench().code_of(algorithm)}

    found = kept(BENCHMARK, f"{arm}-{seed}", settings, measure, depends=depends)
    answers = {task: unpacked(each) for task, each in found["answers"].items()}
    return Arm(found["label"], found["search"], found["spent"], answers)


Choice = tuple[str, float, int, Recipe]


def _of_search(algorithm: str, seed: int, keep: Callable[[Trial], bool]) -> Choice:
    spec = _spec(algorithm, seed)
    found = bench().run(spec)
    best = max(filter(keep, found.trials), key=lambda trial: (round(trial.mean, 12), -trial.number))
    spent = found.spent if best.origin == "search" else 3 * FULL
    return best.label or f"trial {best.number}", best.mean, spent, bench().recipe(spec, best)


def _tuned(seed: int) -> Choice:
    tasks = bench().tasks(seed)
    merges = {scale: _task_arithmetic(scale) for scale in GRID}
    means = {scale: _mean(bench().answers(recipe, tasks, FULL)) for scale, recipe in merges.items()}
    best = max(GRID, key=lambda scale: (means[scale], -scale))
    return f"task arithmetic {best:g}", means[best], len(GRID) * FULL * len(TASKS), merges[best]


def _task_arithmetic(scale: float) -> Recipe:
    family = bench().judge.models.family
    merge = Merge("task_arithmetic", tuple(Source(task) for task in TASKS), {"lambda": scale})
    return Recipe.uniform(
        merge,
        models={model.alias: model.fingerprint for model in family.models},
        base="base",
        num_layers=len(bench().scorer.engine.base_recipe.layers),
    )


def _adamerging(seed: int) -> Choice:
    """The end of the product's descent on the entropy of predictions on the search images."""
    found = bench().run(adamerging_spec(seed))
    (trial,) = found.trials
    return "AdaMerging", trial.mean, found.spent, bench().recipe(found.spec, trial)


def adamerging_spec(seed: int) -> SearchSpec:
    """The study file of AdaMerging as published: one descent, whose end is the only trial."""
    gradient = {
        "loss": "entropy",
        "steps": ADAMERGING["updates"],
        "batch": ADAMERGING["batch"] * len(TASKS),
        "learning_rate": ADAMERGING["learning_rate"],
        "start": ADAMERGING["initial"],
        "points": 1,
    }
    return SearchSpec(
        "images",
        "skills",
        "adamerging",
        seed,
        {"algorithm": "gradient", "max_trials": 1, "baselines": "none", "gradient": gradient},
        space={"kind": "layerwise", "range": [0.0, 1.0]},
        fidelity={"scheduler": "none", "max_samples": FULL},
    )


def _mean(answers: Mapping[str, NDArray[Any]]) -> float:
    return float(np.mean([each.mean() for each in answers.values()]))


CHOICES: Mapping[str, Callable[[int], Choice]] = {
    "expert": lambda seed: _of_search("random", seed, lambda trial: trial.label.startswith("expert:")),
    "recipe": lambda seed: _of_search("random", seed, lambda trial: trial.origin == "published"),
    "tuned": _tuned,
    "random": lambda seed: _of_search("random", seed, lambda trial: trial.origin == "search"),
    "adamerging": _adamerging,
    "auto": lambda seed: _of_search("auto", seed, lambda trial: trial.origin == "search"),
    "study": lambda seed: _of_search("auto", seed, lambda trial: True),
}


# -- tables ------------------------------------------------------------------------------------------------------------


def seeds_on_file() -> list[int]:
    """The seeds, from 0 on, for which all arms are on file."""
    found = []
    for seed in range(NUM_SEEDS):
        try:
            with files_alone():
                for arm in ARMS:
                    judged_arm(arm, seed)
        except NotKept:
            break
        found.append(seed)
    return found


def difference(ours: Sequence[Arm], theirs: Sequence[Arm]) -> tuple[float, float, float]:
    """Mean difference of held-out accuracy with its 95 % interval: a bootstrap over the seeds and over the images."""
    differences = {
        task: np.stack([a.answers[task].astype(float) - b.answers[task] for a, b in zip(ours, theirs, strict=True)])
        for task in TASKS
    }
    draw = np.random.default_rng(0)
    drawn = []
    for _ in range(NUM_RESAMPLES):
        seeds = draw.integers(len(ours), size=len(ours))
        parts = [
            each[seeds][:, draw.integers(each.shape[1], size=each.shape[1])].mean() for each in differences.values()
        ]
        drawn.append(np.mean(parts))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(np.mean([each.mean() for each in differences.values()])), float(low), float(high)


def arms_table() -> str:
    """Table of the held-out accuracy of each arm, and its difference from `auto`: means over seeds."""
    seeds = [seed for seed in range(NUM_SEEDS) if _is_kept(seed)]
    if not seeds:
        raise NotKept(f"{BENCHMARK}: no seed has all arms on file")
    arms = {arm: [judged_arm(arm, seed) for seed in seeds] for arm in ARMS}
    lines = [
        f"| arm (seeds: {len(seeds)}) | {' | '.join(TASKS)} | mean | on search images | `study` minus arm | samples |",
        f"|---|{'---|' * len(TASKS)}---|---|---|---|",
    ]
    for arm, found in arms.items():
        values = " | ".join(f"{np.mean([each.values[task] for each in found]):.3f}" for task in TASKS)
        mean, search = (np.mean([getattr(each, name) for each in found]) for name in ("mean", "search"))
        if arm == "study":
            minus = ""
        else:
            value, low, high = difference(arms["study"], found)
            minus = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
        spent = round(np.mean([each.spent for each in found]))
        lines.append(f"| {LABELS[arm]} | {values} | {mean:.3f} | {search:.3f} | {minus} | {spent:,} |")
    return "\n".join(lines)


def _is_kept(seed: int) -> bool:
    try:
        for arm in ARMS:
            judged_arm(arm, seed)
    except NotKept:
        return False
    return True


TABLES: Mapping[str, Callable[[], str]] = {"arms": arms_table}
