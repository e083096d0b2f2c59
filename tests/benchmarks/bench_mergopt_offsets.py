"""Quality of merges of experts that were trained with MergOPT's noise, with offsets of real task vectors, and without.

The comparison asks for the use of MergOPT's noise. Its arms differ only in the offset of weights at which gradients are
computed:

- `adamw`: none
- `mergopt`: the paper's Laplace noise, (K alpha - 1) z
- `task_vectors`: the same with z resampled from real task vectors, those of the pilot's AdamW experts
- `merges`: the offset of a real merge (equation 5) with AdamW's experts of the same seed on the other skills: an
  oracle, because a training knows no other experts

The protocol was fixed before any judge item was read, but for the three smallest learning rates:

- Families: `five`, a base that the shipped family's script trains on five skills (math, text, lookup, shift, order),
  seed 3; and `shipped`, the shipped base with its three skills, which takes a fifth of the time.
- Experts: one for each skill, all layers, 200 updates of 12 rows, AdamW, linear schedule, as the shipped pipeline. Each
  expert has a seed of its own, for its batches and draws; arms have the same batches. Learning rate and b are the same
  in all arms: the rate, one of six, is the one at which the tuned task arithmetic of AdamW's experts is the best on
  search items of the pilot, which has another seed than the judged ones. b is the Laplace scale of the pilot's task
  vectors at that rate, in bfloat16 as they are written. `shipped-0.00025` is the shipped family at twice the best rate,
  which was the best of three at first.
- Merges of all experts at a fixed alpha (task arithmetic with 0.3, the value that the paper calls common, and weight
  averaging), and by each method at its coefficient that is the best on 200 search items a skill.
- Judgment: merges are judged on 1,000 held-out items a skill. Differences from AdamW are paired by seed and item.

The pilot also measures whether the noise resembles a merge: the loss of each expert on its own skill at a merge, at
noise of the same norm, and at resampled task vectors of the same norm.

Further parts count experts (merges of two and four, tables 3, 20 and 21 of the paper), and mix the arms' experts in
pairs (table 19).

    make bench ONLY=mergopt_offsets
    MERGOPT_OFFSETS=shipped MERGOPT_OFFSETS_SEEDS=2 MERGOPT_OFFSETS_PARTS=all,mixed make bench ONLY=mergopt_offsets

The run takes hours. Results of each judged arm and seed are kept in `tests/benchmarks/results`, experts in
`.bench/mergopt_offsets`. Tables have the seeds that are on file for all arms.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from search_spaces.recipe import Merge, Source
from tests.benchmarks.arms import NotKept, compared, files_alone, kept, packed, unpacked
from tests.benchmarks.bench_mergopt_quality import DEFAULT_RATES, Fleet, trained
from tests.benchmarks.code_digests import code_digest
from tests.benchmarks.family_training import SKILLS, FamilyPlan, Item, Practice, answer_loss, make_items
from tests.benchmarks.search_families import FAMILIES, TrainedFamily
from tests.benchmarks.search_intervals import interval
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.merge_losses import TASK_ARITHMETIC, Candidate, candidates
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.mergopt.fit import fit, sample_of

BENCHMARK = "mergopt_offsets"
CACHE = Path(".bench/mergopt_offsets")

NUM_SEEDS = 5
PILOT_SEED = 100
TRAINING_ITEMS, VALIDATION_ITEMS, JUDGE_ITEMS = 6000, 200, 1000
STEPS = 200
RATES = (3.125e-5, 6.25e-5, 1.25e-4, *DEFAULT_RATES)
THREADS = 1

ADAMW, LAPLACE, RESAMPLED, ORACLE = "adamw", "mergopt", "task_vectors", "merges"
ARMS = (ADAMW, LAPLACE, RESAMPLED, ORACLE)
FIXED = 0.3  # alpha of task arithmetic
NUMBERS = (2, 4)  # of merged experts
RESEMBLANCE: Mapping[str, Any] = {"alphas": (0.2, 0.3, 0.4), "draws": 3, "items": 200}


def run() -> dict[str, Any]:
    torch.set_num_threads(THREADS)
    experiment = EXPERIMENTS[os.environ.get("MERGOPT_OFFSETS", "five")]
    seeds = range(int(os.environ.get("MERGOPT_OFFSETS_SEEDS", NUM_SEEDS)))
    result: dict[str, Any] = {"experiment": experiment.name, "pilot": experiment.pilot()}
    result["resemblance"] = experiment.resemblance()
    measures: dict[str, Callable[[str, int], Any]] = {
        "all": experiment.judged,
        "numbers": lambda arm, seed: [experiment.judged_sets(arm, seed, number) for number in experiment.numbers],
        "mixed": lambda arm, seed: None if arm == ADAMW else experiment.mixed(arm, seed),
    }
    for part in os.environ.get("MERGOPT_OFFSETS_PARTS", "all").split(","):
        for seed in seeds:
            for arm in ARMS:
                measures[part](arm, seed)
            if part == "all":
                result["arms"] = comparison(experiment, range(seed + 1))
    return result


def show(result: dict[str, Any]) -> None:
    print(result["pilot"])
    experiment = EXPERIMENTS[result["experiment"]]
    for table in (resemblance_table, arms_table, curves_table, numbers_table, mixed_table):
        try:
            with files_alone():
                print(f"{table.__doc__}\n{table(experiment)}\n")
        except NotKept as error:
            print(error)


@dataclass(frozen=True)
class Experiment:
    """The arms of one family; missing experts are trained.

    `given_rate` is a learning rate in place of the best one.
    """

    family: TrainedFamily
    given_rate: float | None = None

    @property
    def name(self) -> str:
        return self.family.name if self.given_rate is None else f"{self.family.name}-{self.given_rate:g}"

    @property
    def skills(self) -> tuple[str, ...]:
        return self.family.skills

    @property
    def numbers(self) -> list[int]:
        return [number for number in NUMBERS if number < len(self.skills)]

    # -- experts -------------------------------------------------------------------------------------------------------

    @cached_property
    def directory(self) -> Path:
        """Directory with the family's base and tasks; its training items do not contain judged items."""
        place = self.family.directory()
        plan = FamilyPlan(self.skills, self.family.seed or 0, 2000)
        for skill in self.skills:
            file = place / "tasks" / f"{skill}_train.jsonl"
            if not file.exists():
                held_out = {item.prompt for items in make_items(skill, plan=plan).values() for item in items}
                practice = Practice(SKILLS[skill], held_out=held_out, seed=plan.seed_of(skill, "training"))
                rows = [{"prompt": item.prompt, "answer": item.answer} for item in practice.take(TRAINING_ITEMS)]
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return place

    def document(self, skill: str, rate: float, seed: int, method: Mapping[str, Any]) -> dict[str, Any]:
        """The specification of an expert's fine-tuning."""
        file = str(self.directory / "tasks" / f"{skill}_train.jsonl")
        return {
            "name": skill,
            "base": str(self.directory / "base"),
            "data": {"file": file, "completion": "{{answer}}", "max_length": 64},
            "method": {"betas": [0.9, 0.98], **method},
            "training": {
                "steps": STEPS,
                "batch": 12,
                "micro_batch": 12,
                "learning_rate": rate,
                "schedule": "linear",
                "warmup_steps": 20,
            },
            "seed": 100 * seed + self.skills.index(skill),
        }

    def experts(self, arm: str, seed: int, rate: float | None = None) -> dict[str, FinetuneSpec]:
        """The specifications of an arm's experts, by skill; experts that provide offsets are trained first."""
        rate = self.rate if rate is None else rate

        def method(skill: str) -> dict[str, Any]:
            if arm == ADAMW:
                return {"kind": "adamw"}
            if arm == LAPLACE:
                return {"kind": "mergopt", "scale": self.scale}
            if arm == RESAMPLED:
                sources = list(self.experts(ADAMW, PILOT_SEED).values())
            else:
                sources = [spec for name, spec in self.experts(ADAMW, seed).items() if name != skill]
            places = [str((trained(spec, CACHE) / EXPERT).absolute()) for spec in sources]
            return {"kind": "mergopt", "noise": arm, "fit_to": places}

        return {skill: parse_spec(self.document(skill, rate, seed, method(skill))) for skill in self.skills}

    def fleet(self, arm: str, seed: int, rate: float | None = None) -> Fleet:
        return Fleet(self.experts(arm, seed, rate), self.directory, CACHE)

    def arm(self, name: str, settings: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Figures of an arm, from its file or measured now."""
        shared = {
            "family": self.family.name,
            "steps": STEPS,
            "training_items": TRAINING_ITEMS,
            "validation_items": VALIDATION_ITEMS,
            "judge_items": JUDGE_ITEMS,
        }
        return kept(
            BENCHMARK,
            f"{self.name}/{name}",
            {**shared, **settings},
            measure,
            depends=lambda: {
                "code": code_digest("workers.training.finetuning.trainer", "workers.training.mergopt.fit"),
                "family": self.family.digest,
            },
        )

    # -- the pilot -----------------------------------------------------------------------------------------------------

    def pilot(self) -> dict[str, Any]:
        """Figures of the pilot by learning rate: own skills and task arithmetic on search items, vectors' scale."""

        def of_rate(rate: float) -> dict[str, Any]:
            fleet = self.fleet(ADAMW, PILOT_SEED, rate)

            def accuracy(lambda_: float) -> float:
                return float(fleet.answers(self.arithmetic(lambda_), self.skills, "search", VALIDATION_ITEMS).mean())

            own = np.mean([fleet.own(skill, "search", VALIDATION_ITEMS).mean() for skill in self.skills])
            scale = fit(sample_of(self.directory / "base", [place / EXPERT for place in fleet.places.values()])).scale
            merged = {str(lambda_): accuracy(lambda_) for lambda_ in TASK_ARITHMETIC}
            return {"rate": rate, "own": float(own), "merged": merged, "b": float(f"{scale:.2g}")}

        if self.given_rate is not None:
            return Experiment(self.family).pilot()
        settings = {"rates": RATES, "seed": PILOT_SEED}
        return self.arm("pilot", settings, lambda: {"rates": [of_rate(rate) for rate in RATES]})

    def _chosen(self) -> dict[str, Any]:
        rates: list[dict[str, Any]] = self.pilot()["rates"]
        if self.given_rate is not None:
            return next(each for each in rates if each["rate"] == self.given_rate)
        return max(rates, key=lambda each: max(each["merged"].values()))

    @cached_property
    def rate(self) -> float:
        return float(self._chosen()["rate"])

    @cached_property
    def scale(self) -> float:
        return float(self._chosen()["b"])

    def settings(self, arm: str, seed: int, **others: Any) -> dict[str, Any]:
        return {"rate": self.rate, "b": self.scale, "arm": arm, "seed": seed, **others}

    def resemblance(self) -> dict[str, Any]:
        """Losses of the pilot's experts on their skills' search items, at merges and at other offsets of equal norm."""
        return self.arm("resemblance", self.settings(ADAMW, PILOT_SEED, **RESEMBLANCE), self._resemblance)

    @torch.no_grad()
    def _resemblance(self) -> dict[str, Any]:
        model = AutoModelForCausalLM.from_pretrained(self.directory / "base", dtype=torch.float32).eval()
        named = dict(model.named_parameters())
        base = {name: p.clone() for name, p in named.items()}
        vectors, items = {}, {}
        for skill, spec in self.experts(ADAMW, PILOT_SEED).items():
            expert = AutoModelForCausalLM.from_pretrained(trained(spec, CACHE) / EXPERT, dtype=torch.float32)
            vectors[skill] = {name: p - base[name] for name, p in expert.named_parameters()}
            lines = (self.directory / "tasks" / f"{skill}_search.jsonl").read_text().splitlines()
            items[skill] = [Item(**json.loads(line)) for line in lines[: RESEMBLANCE["items"]]]
        generator = torch.Generator().manual_seed(0)

        def loss_at(skill: str, offset: Vector | None, norm: float = 1.0) -> float:
            factor = 0.0 if offset is None else norm / norm_of(offset)
            for name, parameter in named.items():
                parameter.copy_(base[name] + vectors[skill][name])
                if offset is not None:
                    parameter.add_(offset[name], alpha=factor)
            return float(answer_loss(model, items[skill]))

        def laplace() -> Vector:
            found = {}
            for name, like in base.items():
                sign = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
                found[name] = sign * torch.empty_like(like).exponential_(generator=generator)
            return found

        def resampled() -> Vector:
            of = list(vectors.values())
            return {name: of[int(torch.randint(len(of), (), generator=generator))][name] for name in base}

        rows = []
        for alpha in RESEMBLANCE["alphas"]:
            for skill in self.skills:
                sums = {name: sum(v[name] for v in vectors.values()) for name in base}
                merged = {name: alpha * total - vectors[skill][name] for name, total in sums.items()}
                size, draws = norm_of(merged), range(RESEMBLANCE["draws"])
                rows.append(
                    {
                        "alpha": alpha,
                        "skill": skill,
                        "expert": loss_at(skill, None),
                        "merge": loss_at(skill, merged, size),
                        "laplace": [loss_at(skill, laplace(), size) for _ in draws],
                        "resampled": [loss_at(skill, resampled(), size) for _ in draws],
                    }
                )
        return {"rows": rows}

    # -- judged merges -------------------------------------------------------------------------------------------------

    def arithmetic(self, lambda_: float) -> Merge:
        return Merge("task_arithmetic", tuple(map(Source, self.skills)), {"lambda": lambda_})

    def judged(self, arm: str, seed: int) -> dict[str, Any]:
        """Answers to judge items by merges of all experts of an arm, with a fixed coefficient and with tuned ones."""

        def measure() -> dict[str, Any]:
            fleet = self.fleet(arm, seed)
            tuned = best(fleet, self.skills, self.skills, seed)

            def answers(merge: Merge) -> NDArray[np.bool_]:
                return fleet.answers(merge, self.skills, "holdout", JUDGE_ITEMS)

            curve = {lambda_: answers(self.arithmetic(lambda_)) for lambda_ in TASK_ARITHMETIC}
            return {
                "own": [float(fleet.own(skill, "holdout", JUDGE_ITEMS).mean()) for skill in self.skills],
                "seconds": round(fleet.seconds, 1),
                "curve": {str(lambda_): float(found.mean()) for lambda_, found in curve.items()},
                "coefficients": {method: candidate.coefficient for method, candidate in tuned.items()},
                "answers": {
                    f"alpha {FIXED:g}": packed(curve[FIXED]),
                    **{method: packed(answers(candidate.merge)) for method, candidate in tuned.items()},
                },
            }

        found = self.arm(f"seed{seed}-{arm}", self.settings(arm, seed), measure)
        return {**found, "answers": {name: unpacked(each) for name, each in found["answers"].items()}}

    def judged_sets(self, arm: str, seed: int, number: int) -> dict[str, float]:
        """Mean accuracy of tuned merges of every set of `number` experts on these experts' skills, by method."""

        def measure() -> dict[str, Any]:
            fleet = self.fleet(arm, seed)
            return mean_of([judged_by_method(fleet, s, s, seed) for s in combinations(self.skills, number)])

        return self.arm(f"{number}experts/seed{seed}-{arm}", self.settings(arm, seed, merged=number), measure)

    def mixed(self, arm: str, seed: int) -> dict[str, float]:
        """Mean accuracy of merges of one AdamW expert and one expert of the arm, over all pairs in both orders."""

        def measure() -> dict[str, Any]:
            other = {f"{skill}-{arm}": spec for skill, spec in self.experts(arm, seed).items()}
            fleet = Fleet({**self.experts(ADAMW, seed), **other}, self.directory, CACHE)
            pairs = [pair for both in combinations(self.skills, 2) for pair in (both, both[::-1])]
            return mean_of([judged_by_method(fleet, (one, f"{two}-{arm}"), (one, two), seed) for one, two in pairs])

        return self.arm(f"mixed/seed{seed}-{arm}", self.settings(arm, seed), measure)


Vector = Mapping[str, torch.Tensor]
TWICE = "shipped-0.00025"
EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(FAMILIES["shipped"]),
        Experiment(FAMILIES["shipped"], given_rate=2.5e-4),
        Experiment(TrainedFamily("five", tuple(SKILLS), seed=3)),
    )
}


def norm_of(vector: Vector) -> float:
    return float(torch.stack([value.norm() for value in vector.values()]).norm())


def best(fleet: Fleet, experts: Sequence[str], skills: Sequence[str], seed: int) -> dict[str, Candidate]:
    """The candidate of each method with the most correct answers to search items of the skills."""
    found: dict[str, tuple[float, Candidate]] = {}
    for candidate in candidates(experts, seed=seed, wudi=True):
        value = float(fleet.answers(candidate.merge, skills, "search", VALIDATION_ITEMS).mean())
        if candidate.method not in found or value > found[candidate.method][0]:
            found[candidate.method] = value, candidate
    return {method: candidate for method, (_, candidate) in found.items()}


def judged_by_method(fleet: Fleet, experts: Sequence[str], skills: Sequence[str], seed: int) -> dict[str, float]:
    return {
        method: float(fleet.answers(candidate.merge, skills, "holdout", JUDGE_ITEMS).mean())
        for method, candidate in best(fleet, experts, skills, seed).items()
    }


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {method: float(np.mean([row[method] for row in rows])) for method in rows[0]}


# -- tables ------------------------------------------------------------------------------------------------------------

NAMES = {
    ADAMW: "AdamW",
    LAPLACE: "MergOPT, Laplace noise",
    RESAMPLED: "`noise: task_vectors`",
    ORACLE: "`noise: merges`, oracle",
}


def seeds_on_file(measure: Callable[[str, int], Any], arms: Sequence[str] = ARMS) -> list[int]:
    """The first seeds for which every arm is on file. Raises NotKept if the first seed is missing."""
    found: list[int] = []
    for seed in range(NUM_SEEDS):
        try:
            for arm in arms:
                measure(arm, seed)
        except NotKept:
            if not found:
                raise
            break
        found.append(seed)
    return found


def comparison(
    experiment: Experiment, seeds: Sequence[int], *, baseline: Experiment | None = None
) -> dict[str, dict[str, Any]]:
    """For each arm, the accuracy of experts and merges, and differences from AdamW's merges with intervals.

    AdamW's merges are those of `baseline` if it is given, with a learning rate of its own, else of `experiment`.
    """
    runs = {arm: [experiment.judged(arm, seed) for seed in seeds] for arm in ARMS}
    theirs = runs[ADAMW] if baseline is None else [baseline.judged(ADAMW, seed) for seed in seeds]
    place = experiment.name if baseline is None else f"{experiment.name}-minus-{baseline.name}"

    def gain(arm: str, name: str) -> dict[str, float]:
        pair = ([np.stack([each["answers"][name] for each in of])] for of in (runs[arm], theirs))
        return compared(BENCHMARK, f"{place}/{arm}-{name.replace(' ', '-')}", interval, *pair)

    names = list(runs[ADAMW][0]["answers"])
    return {
        arm: {
            "own": float(np.mean([each["own"] for each in own])),
            "seconds": float(np.mean([each["seconds"] for each in own])),
            "values": {name: float(np.mean([each["answers"][name] for each in own])) for name in names},
            "gains": {name: gain(arm, name) for name in names} if arm != ADAMW or baseline is not None else {},
        }
        for arm, own in runs.items()
    }


def head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


def cells_of(row: Mapping[str, float]) -> str:
    return " | ".join(f"{value:.3f}" for value in row.values())


def arms_table(experiment: Experiment, *, baseline: Experiment | None = None) -> str:
    """Table of judge accuracy of experts and of merges of all experts, with differences from AdamW's merges."""
    seeds = seeds_on_file(experiment.judged)
    rows = comparison(experiment, seeds, baseline=baseline)

    def cell(row: Mapping[str, Any], name: str) -> str:
        gain = row["gains"].get(name)
        beside = f" ({gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}])" if gain else ""
        return f"{row['values'][name]:.3f}{beside}"

    names = list(rows[ADAMW]["values"])
    lines = head(f"experts ({len(seeds)} of {NUM_SEEDS} seeds)", "own skill", *names)
    lines += [
        f"| {NAMES[arm]} | {row['own']:.3f} | {' | '.join(cell(row, name) for name in names)} |"
        for arm, row in rows.items()
    ]
    return "\n".join(lines)


def curves_table(experiment: Experiment) -> str:
    """Table of judge accuracy of task arithmetic of all experts, by coefficient."""
    seeds = seeds_on_file(experiment.judged)
    rows = {arm: mean_of([experiment.judged(arm, seed)["curve"] for seed in seeds]) for arm in ARMS}
    lines = head(f"experts ({len(seeds)} of {NUM_SEEDS} seeds)", *rows[ADAMW])
    return "\n".join([*lines, *(f"| {NAMES[arm]} | {cells_of(row)} |" for arm, row in rows.items())])


def numbers_table(experiment: Experiment) -> str:
    """Table of judge accuracy of merges of fewer experts, as means over the sets of experts."""
    lines: list[str] = []
    for number in experiment.numbers:
        measure = partial(experiment.judged_sets, number=number)
        seeds = seeds_on_file(measure)
        for arm in ARMS:
            row = mean_of([measure(arm, seed) for seed in seeds])
            lines = lines or head("experts", "merged", "seeds", *row)
            lines.append(f"| {NAMES[arm]} | {number} | {len(seeds)} | {cells_of(row)} |")
    return "\n".join(lines)


def mixed_table(experiment: Experiment) -> str:
    """Table of judge accuracy of merges of an AdamW expert and an expert of another arm, and of two of the same arm."""
    arms = ARMS[1:]
    pairs = partial(experiment.judged_sets, number=2)
    seeds = seeds_on_file(lambda arm, seed: (experiment.mixed(arm, seed), pairs(arm, seed), pairs(ADAMW, seed)), arms)
    rows = {f"{NAMES[ADAMW]} and {NAMES[ADAMW]}": mean_of([pairs(ADAMW, seed) for seed in seeds])}
    for arm in arms:
        rows[f"{NAMES[ADAMW]} and {NAMES[arm]}"] = mean_of([experiment.mixed(arm, seed) for seed in seeds])
        rows[f"{NAMES[arm]} and {NAMES[arm]}"] = mean_of([pairs(arm, seed) for seed in seeds])
    lines = head(f"experts of a pair ({len(seeds)} of {NUM_SEEDS} seeds)", *next(iter(rows.values())))
    return "\n".join([*lines, *(f"| {name} | {cells_of(row)} |" for name, row in rows.items())])


def resemblance_table(experiment: Experiment) -> str:
    """Table of the increase of experts' losses on their own skills by a merge and by other offsets, by coefficient."""
    rows = experiment.resemblance()["rows"]
    lines = head("alpha", "merge", "Laplace noise of equal norm", "resampled task vectors of equal norm")
    for alpha in RESEMBLANCE["alphas"]:
        cells = []
        for key in ("merge", "laplace", "resampled"):
            rises = [float(np.mean(row[key])) - row["expert"] for row in rows if row["alpha"] == alpha]
            cells.append(f"{min(rises):.3f} to {max(rises):.3f}")
        lines.append(f"| {alpha:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


# Parts that were not measured yet have no table in docs.
TABLES: dict[str, Callable[[], str]] = {
    **{f"{name}-resemblance": partial(resemblance_table, EXPERIMENTS[name]) for name in ("shipped", "five")},
    **{f"{name}-arms": partial(arms_table, EXPERIMENTS[name]) for name in ("shipped", "five")},
    **{f"{name}-curves": partial(curves_table, EXPERIMENTS[name]) for name in ("shipped", "five")},
    # AdamW has its best learning rate, the other arms twice this rate.
    "shipped-twice-the-rate": partial(arms_table, EXPERIMENTS[TWICE], baseline=EXPERIMENTS["shipped"]),
}
