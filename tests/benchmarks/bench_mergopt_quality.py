"""Quality of merges of experts that were trained with MergOPT, AdamW, SGD, SAM and ASAM, on the shipped skills.

For each optimizer and seed, the experts of the tiny family's retraining are trained with the same base, data, batches
and number of steps. SAM and ASAM are also trained with half as many steps, which take as long as AdamW's. A pilot with
another seed chooses the learning rate of each optimizer: the one whose experts are best on their own skill's search
items. MergOPT is also compared at AdamW's learning rate. MergOPT's b is the Laplace scale of the task vectors of the
pilot's AdamW experts. A merge method's coefficient is chosen on search items, and the merge judged on 1,000 held-out
items a skill. No training or merge looks at these. All three experts are merged, and each pair of them, which is judged
on its own two skills.

The pilot's seed also shows the effects of b and of the learning rate (the paper's D.4.3): MergOPT with b halved and
doubled up to twice, and AdamW and MergOPT with each learning rate of the pilot.

The run takes hours. The judged merges of each optimizer and seed are an arm, kept in `tests/benchmarks/results`; the
experts stay in `.bench/mergopt_quality`. With the environment variable MERGOPT_QUALITY_SEEDS=1 only the first seed is
compared; a later run with more seeds continues the comparison.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from search_spaces.recipe import Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from search_spaces.study.objectives import ObjectiveSpec
from tests.benchmarks.arms import compared, kept, packed, unpacked
from tests.benchmarks.code_digests import code_digest
from tests.benchmarks.one_pass import OnePass
from tests.benchmarks.search_families import FAMILIES
from tests.benchmarks.search_intervals import interval
from workers.models.family import open_family
from workers.tiny_family import RETRAIN_FILE, family_dir
from workers.training.finetuning.fleet import load_pipeline
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.merge_losses import Candidate, candidates
from workers.training.finetuning.spec import FinetuneSpec, task_of
from workers.training.finetuning.trainer import train
from workers.training.mergopt.fit import fit, sample_of
from workers.types import TaskSpec, digest_of

BENCHMARK = "mergopt_quality"
CACHE = Path(".bench/mergopt_quality")
NUM_SEEDS = 5
PILOT_SEED = 100
VALIDATION_ITEMS = 150  # of each skill, for learning rates and coefficients
THREADS = 1

RATES = {"sgd": (0.02, 0.05, 0.1)}
DEFAULT_RATES = (2.5e-4, 5e-4, 1e-3)
MOMENTUM = 0.9
OURS = "mergopt"
B_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
ALL, PAIR = 3, 2  # experts of a merge


@dataclass(frozen=True)
class Variant:
    """An optimizer to compare; `half` halves the steps, and `rate_of` names an optimizer whose rate it has."""

    kind: str
    half: bool = False
    rate_of: str | None = None

    @property
    def name(self) -> str:
        changed = "half the steps" if self.half else f"learning rate of {self.rate_of}" if self.rate_of else None
        return f"{self.kind}, {changed}" if changed else self.kind


LABELS = {"adamw": "AdamW", "sgd": "SGD", "sam": "SAM", "asam": "ASAM", "mergopt": "MergOPT"}
BASELINE = "adamw"
VARIANTS = (
    *map(Variant, (BASELINE, "sgd", "sam", "asam", OURS)),
    Variant("sam", half=True),
    Variant("asam", half=True),
    Variant(OURS, rate_of=BASELINE),
)


def run() -> dict[str, Any]:
    torch.set_num_threads(THREADS)
    return comparison(int(os.environ.get("MERGOPT_QUALITY_SEEDS", NUM_SEEDS)))


def comparison(num_seeds: int) -> dict[str, Any]:
    seeds = range(num_seeds)
    scale = pilot_scale()
    rates = {kind: best_rate(kind, scale) for kind in dict.fromkeys(variant.kind for variant in VARIANTS)}

    def of_merges(num_experts: int) -> dict[str, Any]:
        judged = {
            variant.name: [
                judged_merges(variant, rates[variant.rate_of or variant.kind], scale, seed, num_experts)
                for seed in seeds
            ]
            for variant in VARIANTS
        }
        at_equal_rates = VARIANTS[-1].name
        pairs = [(OURS, name) for name in judged if name not in (OURS, at_equal_rates)] + [(at_equal_rates, BASELINE)]
        return {
            "rows": [row_of(name, runs) for name, runs in judged.items()],
            "gains": [
                {
                    "of": of,
                    "against": name,
                    **gains(f"{num_experts}experts-{len(seeds)}seeds-{of}-{name}", judged[of], judged[name]),
                }
                for of, name in pairs
            ],
        }

    return {
        "seeds": len(seeds),
        "b": scale,
        "learning_rates": rates,
        **of_merges(ALL),
        "pairs": of_merges(PAIR),
        "sensitivity": sensitivity(scale, rates[OURS]),
    }


def table(result: Mapping[str, Any]) -> str:
    """Table of held-out accuracy of experts and of their merges by each method; the last column has merges of two."""
    methods = list(result["rows"][0]["methods"])
    lines = [
        f"| optimizer | expert | {' | '.join(methods)} | mean | pairs |",
        f"|---|---|{'---|' * len(methods)}---|---|",
    ]
    for row, pair in zip(result["rows"], result["pairs"]["rows"], strict=True):
        cells = (row["own"], *row["methods"].values(), row["mean"], pair["mean"])
        label = re.sub(r"\w+", lambda word: LABELS.get(word[0], word[0]), row["optimizer"])
        lines.append(f"| {label} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    return "\n".join(lines)


def show(result: dict[str, Any]) -> None:
    print(f"{result['seeds']} seeds; b {result['b']:.2e}; learning rates {result['learning_rates']}")
    for title, part in (("three experts, held out", result), ("pairs, held out", result["pairs"])):
        show_rows(title, part["rows"])
        for gain in part["gains"]:
            value, low, high = (gain["mean"][key] for key in ("value", "low", "high"))
            print(f"{gain['of']}, against {gain['against']}: {value:+.3f} [{low:+.3f}, {high:+.3f}]")
    show_rows("sensitivity, held out", result["sensitivity"])


def show_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    heads = ("expert", *rows[0]["methods"], "mean")
    print(f"{title:<32}" + "".join(f"{head:>18}" for head in heads) + "   CPU s")
    for row in rows:
        cells = (row["own"], *row["methods"].values(), row["mean"])
        print(f"{row['optimizer']:<32}" + "".join(f"{cell:18.3f}" for cell in cells) + f"{row['seconds']:8.0f}")


def sensitivity(scale: float, rate: float) -> list[dict[str, Any]]:
    """Rows for different scales b at MergOPT's learning rate, and for different learning rates at the pilot's b.

    Merged are all experts of the pilot's seed.
    """
    ours, plain = Variant(OURS), Variant(BASELINE)
    tried = [(f"{OURS}, b {b:.2g}", ours, rate, b) for b in (factor * scale for factor in B_FACTORS)]
    for variant in (plain, ours):
        tried += [(f"{variant.kind}, learning rate {each:g}", variant, each, scale) for each in DEFAULT_RATES]
    return [row_of(name, [judged_merges(variant, r, b, PILOT_SEED)]) for name, variant, r, b in tried]


def specs(variant: Variant, rate: float, scale: float, seed: int) -> dict[str, FinetuneSpec]:
    """The specifications of the shipped family's experts, with another optimizer."""
    found = {}
    for alias, spec in load_pipeline(family_dir() / RETRAIN_FILE).experts.items():
        own: dict[str, Any] = {"kind": variant.kind}
        own |= {"scale": scale} if variant.kind == OURS else {}
        own |= {"momentum": MOMENTUM} if variant.kind == "sgd" else {}
        steps = spec.training.steps or 0
        update = {"learning_rate": rate, "steps": steps // 2 if variant.half else steps}
        found[alias] = spec.model_copy(
            update={
                "method": spec.method.model_copy(update=own),
                "training": spec.training.model_copy(update=update),
                "evaluation": None,
                "seed": seed,
            }
        )
    return found


def trained(spec: FinetuneSpec, cache: Path = CACHE) -> Path:
    """The directory of a trained expert; training begins, or continues from its last checkpoint, if it is missing."""
    place = cache / "experts" / digest_of(spec.canonical())[:24]
    if not (place / "seconds.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        train(spec, place)
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
        (place / "seconds.json").write_text(json.dumps(time.process_time() - started))
        print(f"{time.strftime('%H:%M:%S')} {spec.method.kind} {spec.name} seed {spec.seed}", flush=True)
    return place


def pilot_scale() -> float:
    """MergOPT's b, fitted to experts that AdamW has trained with the pipeline's own learning rate."""
    rate = next(iter(load_pipeline(family_dir() / RETRAIN_FILE).experts.values())).training.learning_rate
    experts = specs(Variant(BASELINE), rate, 1.0, PILOT_SEED)

    def measure() -> dict[str, Any]:
        places = [trained(spec) / EXPERT for spec in experts.values()]
        return {"value": float(f"{fit(sample_of(family_dir() / 'base', places)).scale:.2g}")}

    return float(arm("pilot-scale", experts, {}, measure)["value"])


def best_rate(kind: str, scale: float) -> float:
    """The learning rate whose experts have the most correct answers to validation items of their own skills."""
    return max(RATES.get(kind, DEFAULT_RATES), key=lambda rate: own_skill(Variant(kind), rate, scale))


def own_skill(variant: Variant, rate: float, scale: float) -> float:
    experts = specs(variant, rate, scale, PILOT_SEED)

    def measure() -> dict[str, Any]:
        fleet = Fleet(experts)
        own = [fleet.own(alias, "search", VALIDATION_ITEMS).mean() for alias in fleet.places]
        return {"value": float(np.mean(own))}

    settings = {"items": VALIDATION_ITEMS}
    return float(arm(f"pilot-{variant.kind}-{rate:g}-{scale:g}", experts, settings, measure)["value"])


def judged_merges(variant: Variant, rate: float, scale: float, seed: int, num_experts: int = ALL) -> dict[str, Any]:
    """Answers to held-out items by the best merge of each method, for the experts of one seed.

    By method [sets * skills, items]: of every set of `num_experts` experts, for each of its skills.
    """
    prefix = "" if num_experts == ALL else f"{num_experts}experts-"
    half = "-half" if variant.half else ""
    experts = specs(variant, rate, scale, seed)

    def measure() -> dict[str, Any]:
        fleet = Fleet(experts)
        together = list(combinations(fleet.places, num_experts))
        best = [fleet.best(names, seed=seed) for names in together]
        return {
            "own": float(np.mean([fleet.own(alias, "holdout").mean() for alias in fleet.places])),
            "seconds": round(fleet.seconds, 1),
            "coefficients": {method: [each[method].coefficient for each in best] for method in best[0]},
            "methods": {
                method: packed(
                    np.concatenate([
                        fleet.answers(each[method].merge, names, "holdout")
                        for names, each in zip(together, best, strict=True)
                    ])
                )
                for method in best[0]
            },
        }  # fmt: skip

    name = f"{prefix}seed{seed}-{variant.kind}{half}-{rate:g}-{scale:g}"
    found = arm(name, experts, {"merged": num_experts, "validation": VALIDATION_ITEMS}, measure)
    return {**found, "methods": {method: unpacked(each) for method, each in found["methods"].items()}}


def arm(
    name: str, experts: Mapping[str, FinetuneSpec], settings: Mapping[str, Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Figures of an arm; its settings contain the experts' specifications without the places of their files."""
    canonical = json.dumps({alias: spec.canonical() for alias, spec in experts.items()})
    first = next(iter(experts.values()))
    settings = {
        "seed": first.seed,
        "optimizer": first.method.kind,
        "learning_rate": first.training.learning_rate,
        "steps": {alias: spec.training.steps for alias, spec in experts.items()},
        "experts": digest_of(json.loads(canonical.replace(str(family_dir()), "tiny_family")))[:24],
        **settings,
    }
    return kept(
        BENCHMARK,
        name,
        settings,
        measure,
        depends=lambda: {
            "code": code_digest("workers.training.finetuning.trainer", "workers.training.mergopt.fit"),
            "family": FAMILIES["shipped"].digest,
        },
    )


class Fleet:
    """Trained experts of the family in a directory, with its base and tasks, and the answers of their merges."""

    def __init__(self, experts: Mapping[str, FinetuneSpec], directory: Path | None = None, cache: Path = CACHE) -> None:
        directory = family_dir() if directory is None else directory
        self.places = {alias: trained(spec, cache) for alias, spec in experts.items()}
        self.seconds = sum(json.loads((place / "seconds.json").read_text()) for place in self.places.values())
        family = open_family(directory / "base", {alias: place / EXPERT for alias, place in self.places.items()})
        self._scorer = OnePass(family, EngineOptions(max_model_len=64), memory=cache / "scores")
        self._fingerprints = {model.alias: model.fingerprint for model in family.models}
        self._tasks = {
            split: {alias: task(experts[alias].name, split, directory) for alias in self.places}
            for split in ("search", "holdout")
        }

    def own(self, alias: str, split: str, num_items: int | None = None) -> NDArray[np.bool_]:
        return self._answers(Merge("passthrough", (Source(alias),)), self._tasks[split][alias], num_items)

    def answers(
        self, merge: Merge, skills: Sequence[str], split: str, num_items: int | None = None
    ) -> NDArray[np.bool_]:
        """Answers of a merge to a split's items, [skills, items]."""
        return np.stack([self._answers(merge, self._tasks[split][skill], num_items) for skill in skills])

    def best(self, experts: Sequence[str], *, seed: int) -> dict[str, Candidate]:
        """The candidate of each method with the most correct answers to search items of the experts' skills."""
        found: dict[str, tuple[float, Candidate]] = {}
        for candidate in candidates(experts, seed=seed):
            value = float(self.answers(candidate.merge, experts, "search", VALIDATION_ITEMS).mean())
            if candidate.method not in found or value > found[candidate.method][0]:
                found[candidate.method] = value, candidate
        return {method: candidate for method, (_, candidate) in found.items()}

    def _answers(self, merge: Merge, of: TaskSpec, num_items: int | None) -> NDArray[np.bool_]:
        recipe = Recipe.uniform(merge, models=self._fingerprints, base="base", num_layers=8).canonical()
        return self._scorer.exact_matches(recipe, of, 0, num_items or self._scorer.num_samples(of))


def task(skill: str, split: str, directory: Path) -> TaskSpec:
    file = str(directory / "tasks" / f"{skill}_{split}.jsonl")
    document = {"name": skill, "task": {"file": file, "max_tokens": 9}, "metric": "exact_match"}
    return task_of(ObjectiveSpec.model_validate_json(json.dumps(document)), seed=0)


def row_of(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    methods = {m: float(np.mean([each["methods"][m].mean() for each in runs])) for m in runs[0]["methods"]}
    return {
        "optimizer": name,
        "own": float(np.mean([each["own"] for each in runs])),
        "methods": methods,
        "mean": float(np.mean(list(methods.values()))),
        "seconds": float(np.mean([each["seconds"] for each in runs])),
    }


def gains(name: str, ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Paired differences by method and in the mean of all methods, with bootstrap intervals over seeds and items."""

    def difference(methods: Sequence[str], of: str) -> dict[str, float]:
        def stacked(runs: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
            return np.stack([np.mean([run["methods"][method] for method in methods], axis=0) for run in runs])

        arm_name = re.sub(r"[^\w.]+", "-", f"{name}-{of}")
        return compared(BENCHMARK, arm_name, interval, [stacked(ours)], [stacked(theirs)])

    names = list(ours[0]["methods"])
    return {"mean": difference(names, "mean"), "methods": {name: difference([name], name) for name in names}}


TABLES = {"merges": lambda: table(comparison(NUM_SEEDS))}
