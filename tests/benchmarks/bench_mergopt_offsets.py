"""Merges of experts of five skills, trained with MergOPT's noise, with offsets of real task vectors, and with neither.

What is MergOPT's noise for? Arms that differ in nothing but the offset at which gradients are taken:

- `adamw`: none
- `mergopt`: the paper's Laplace noise, (K alpha - 1) z
- `task_vectors`: the same with z resampled from real task vectors, those of the pilot's AdamW experts
- `merges`: the offset of a real merge (equation 5) with AdamW's experts of the same seed on the other four skills: an
  oracle, because a training knows no other experts

The protocol was fixed before any judge item was read:

- Family: a base that the shipped family's script trains on five skills (math, text, lookup, shift, order), seed 3.
- Experts: one for each skill, all layers, 200 updates of 12 rows, AdamW, linear schedule, as the shipped pipeline. Each
  expert has a seed of its own, for its batches and draws; arms have the same batches. Learning rate and b are the same
  in all arms: the rate, one of three, is the one at which the tuned task arithmetic of AdamW's experts is the best on
  search items of the pilot, which has another seed than the judged ones. b is the Laplace scale of the pilot's task
  vectors at that rate, in bfloat16 as they are written.
- Merges of all five experts at a fixed alpha (task arithmetic with 0.3, the value that the paper calls common, and with
  1/5, which is weight averaging), and by each method at its coefficient that is the best on 200 search items a skill.
- Judged on 1,000 held-out items a skill. Differences from AdamW are paired by seed and item.

The pilot also measures whether the noise resembles a merge: the loss of each expert on its own skill at a merge, at
noise of the same norm, and at resampled task vectors of the same norm.

Further parts count experts (merges of two and four, tables 3, 20 and 21 of the paper), and mix the arms' experts in
pairs (table 19).

    make bench ONLY=mergopt_offsets
    MERGOPT_OFFSETS_SEEDS=2 MERGOPT_OFFSETS_PARTS=all,numbers,mixed make bench ONLY=mergopt_offsets

Hours: each judged arm and seed is an arm in `tests/benchmarks/results`; the experts stay in `.bench/mergopt_offsets`.
Tables are of the seeds that are on file in all arms.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
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
from tests.benchmarks.family_training import SKILLS, FamilyPlan, Practice, answer_loss, make_items
from tests.benchmarks.search_families import TrainedFamily
from tests.benchmarks.search_intervals import interval
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.merge_losses import TASK_ARITHMETIC, Candidate, candidates
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.mergopt.fit import fit, sample_of

BENCHMARK = "mergopt_offsets"
CACHE = Path(".bench/mergopt_offsets")
FAMILY = TrainedFamily("five", tuple(SKILLS), seed=3)

NUM_SEEDS = 5
PILOT_SEED = 100
TRAINING_ITEMS, VALIDATION_ITEMS, JUDGE_ITEMS = 6000, 200, 1000
STEPS = 200
THREADS = 1

ADAMW, LAPLACE, RESAMPLED, ORACLE = "adamw", "mergopt", "task_vectors", "merges"
ARMS = (ADAMW, LAPLACE, RESAMPLED, ORACLE)
FIXED = (0.2, 0.3)  # coefficients of task arithmetic
TUNED = "task arithmetic"
ALL = len(SKILLS)
NUMBERS = (2, 4)
PARTS = ("all", "numbers", "mixed")


def run() -> dict[str, Any]:
    torch.set_num_threads(THREADS)
    num_seeds = int(os.environ.get("MERGOPT_OFFSETS_SEEDS", NUM_SEEDS))
    parts = os.environ.get("MERGOPT_OFFSETS_PARTS", "all").split(",")
    measures: dict[str, Callable[[str, int], Any]] = {
        "all": judged,
        "numbers": lambda arm, seed: [judged_sets(arm, seed, number) for number in NUMBERS],
        "mixed": lambda arm, seed: None if arm == ADAMW else mixed(arm, seed),
    }
    for part in parts:
        for seed in range(num_seeds):
            for arm in ARMS:
                measures[part](arm, seed)
    return {
        "pilot": pilot(),
        "resemblance": resemblance(),
        "arms": comparison(range(num_seeds)),
    }


def show(result: dict[str, Any]) -> None:
    print(result["pilot"])
    for table in (resemblance_table, arms_table, curves_table, numbers_table, mixed_table):
        try:
            with files_alone():
                print(f"{table.__doc__}\n{table()}\n")
        except NotKept as error:
            print(error)


# -- experts -----------------------------------------------------------------------------------------------------------


@cache
def directory() -> Path:
    """The family's base and tasks, with training items that are none of the judged ones."""
    place = FAMILY.directory()
    plan = FamilyPlan(FAMILY.skills, FAMILY.seed or 0, 2000)
    for skill in FAMILY.skills:
        file = place / "tasks" / f"{skill}_train.jsonl"
        if not file.exists():
            held_out = {item.prompt for items in make_items(skill, plan=plan).values() for item in items}
            practice = Practice(SKILLS[skill], held_out=held_out, seed=plan.seed_of(skill, "training"))
            rows = [{"prompt": item.prompt, "answer": item.answer} for item in practice.take(TRAINING_ITEMS)]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def document(skill: str, rate: float, seed: int, method: Mapping[str, Any]) -> dict[str, Any]:
    """The specification of an expert."""
    return {
        "name": skill,
        "base": str(directory() / "base"),
        "data": {
            "file": str(directory() / "tasks" / f"{skill}_train.jsonl"),
            "completion": "{{answer}}",
            "max_length": 64,
        },
        "method": {"betas": [0.9, 0.98], **method},
        "training": {
            "steps": STEPS,
            "batch": 12,
            "micro_batch": 12,
            "learning_rate": rate,
            "schedule": "linear",
            "warmup_steps": 20,
        },
        "seed": 100 * seed + FAMILY.skills.index(skill),
    }


def experts_of(arm: str, seed: int, rate: float | None = None) -> dict[str, FinetuneSpec]:
    """The specifications of an arm's experts, by skill. Experts that offsets are made of are trained first."""
    rate = chosen_rate() if rate is None else rate

    def method(skill: str) -> dict[str, Any]:
        if arm == ADAMW:
            return {"kind": "adamw"}
        if arm == LAPLACE:
            return {"kind": "mergopt", "scale": chosen_scale()}
        if arm == RESAMPLED:
            sources = list(experts_of(ADAMW, PILOT_SEED).values())
        else:
            sources = [spec for name, spec in experts_of(ADAMW, seed).items() if name != skill]
        places = [str((trained(spec, CACHE) / EXPERT).absolute()) for spec in sources]
        return {"kind": "mergopt", "noise": arm, "fit_to": places}

    return {skill: parse_spec(document(skill, rate, seed, method(skill))) for skill in FAMILY.skills}


@cache
def fleet_of(arm: str, seed: int, rate: float | None = None) -> Fleet:
    return Fleet(experts_of(arm, seed, rate), directory(), CACHE)


def arm_of(
    name: str, settings: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]], *modules: str
) -> dict[str, Any]:
    """An arm on file, or measured now."""
    shared = {"steps": STEPS, "training_items": TRAINING_ITEMS, "validation_items": VALIDATION_ITEMS}
    return kept(
        BENCHMARK,
        name,
        {**shared, **settings},
        measure,
        depends=lambda: {
            "code": code_digest("workers.training.finetuning.trainer", "workers.training.mergopt.fit", *modules),
            "family": FAMILY.digest,
        },
    )


# -- the pilot ---------------------------------------------------------------------------------------------------------


def pilot() -> dict[str, Any]:
    """By learning rate: own skills and task arithmetic on search items, and the Laplace scale of the task vectors."""

    def measure() -> dict[str, Any]:
        found = []
        for rate in DEFAULT_RATES:
            fleet = fleet_of(ADAMW, PILOT_SEED, rate)
            places = [place / EXPERT for place in fleet.places.values()]
            values = {
                str(lambda_): float(fleet.answers(arithmetic(lambda_), SKILL_NAMES, "search", VALIDATION_ITEMS).mean())
                for lambda_ in TASK_ARITHMETIC
            }
            own = np.mean([fleet.own(skill, "search", VALIDATION_ITEMS).mean() for skill in FAMILY.skills])
            scale = fit(sample_of(directory() / "base", places)).scale
            found.append({"rate": rate, "own": float(own), "merged": values, "b": float(f"{scale:.2g}")})
        return {"rates": found}

    return arm_of("pilot", {"rates": DEFAULT_RATES, "seed": PILOT_SEED}, measure)


@cache
def chosen() -> dict[str, Any]:
    rates: list[dict[str, Any]] = pilot()["rates"]
    return max(rates, key=lambda each: max(each["merged"].values()))


def chosen_rate() -> float:
    return float(chosen()["rate"])


def chosen_scale() -> float:
    return float(chosen()["b"])


def resemblance() -> dict[str, Any]:
    """Losses of the pilot's experts on their own skills' search items, at merges and at other offsets of equal norm."""
    alphas, draws, num_items = (0.2, 0.3, 0.4), 3, 200

    @torch.no_grad()
    def measure() -> dict[str, Any]:
        places = {skill: trained(spec, CACHE) / EXPERT for skill, spec in experts_of(ADAMW, PILOT_SEED).items()}
        model = AutoModelForCausalLM.from_pretrained(directory() / "base", dtype=torch.float32).eval()
        named = dict(model.named_parameters())
        base = {name: p.clone() for name, p in named.items()}
        vectors = {}
        for skill, place in places.items():
            expert = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
            vectors[skill] = {name: p - base[name] for name, p in expert.named_parameters()}
        plan = FamilyPlan(FAMILY.skills, FAMILY.seed or 0, 2000)
        generator = torch.Generator().manual_seed(0)

        def loss_at(skill: str, offset: Mapping[str, torch.Tensor] | None) -> float:
            for name, parameter in named.items():
                parameter.copy_(base[name] + vectors[skill][name] + (0 if offset is None else offset[name]))
            return float(answer_loss(model, make_items(skill, plan=plan)["search"][:num_items]))

        def of_norm(offset: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            factor = norm(like) / norm(offset)
            return {name: factor * value for name, value in offset.items()}

        def laplace() -> dict[str, torch.Tensor]:
            def part(like: torch.Tensor) -> torch.Tensor:
                sign = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
                return sign * torch.empty_like(like).exponential_(generator=generator)

            return {name: part(value) for name, value in base.items()}

        def resampled() -> dict[str, torch.Tensor]:
            names = list(vectors)
            return {
                name: vectors[names[int(torch.randint(len(names), (), generator=generator))]][name] for name in base
            }

        rows = []
        for alpha in alphas:
            for skill in FAMILY.skills:
                merged = {name: alpha * sum(v[name] for v in vectors.values()) - vectors[skill][name] for name in base}
                rows.append(
                    {
                        "alpha": alpha,
                        "skill": skill,
                        "expert": loss_at(skill, None),
                        "merge": loss_at(skill, merged),
                        "laplace": [loss_at(skill, of_norm(laplace(), merged)) for _ in range(draws)],
                        "resampled": [loss_at(skill, of_norm(resampled(), merged)) for _ in range(draws)],
                    }
                )
        return {"rows": rows}

    return arm_of("pilot-resemblance", {"alphas": alphas, "draws": draws, "items": num_items, **given()}, measure)


def norm(vector: Mapping[str, torch.Tensor]) -> float:
    return float(torch.stack([value.norm() for value in vector.values()]).norm())


# -- judged merges -----------------------------------------------------------------------------------------------------

SKILL_NAMES = FAMILY.skills


def given() -> dict[str, Any]:
    """What the pilot decides of all arms."""
    return {"rate": chosen_rate(), "b": chosen_scale()}


def arithmetic(lambda_: float, experts: Sequence[str] = SKILL_NAMES) -> Merge:
    return Merge("task_arithmetic", tuple(map(Source, experts)), {"lambda": lambda_})


def best(fleet: Fleet, experts: Sequence[str], skills: Sequence[str], seed: int) -> dict[str, Candidate]:
    """The candidate of each method that answers the most search items of the skills."""
    found: dict[str, tuple[float, Candidate]] = {}
    for candidate in candidates(experts, seed=seed, wudi=True):
        value = float(fleet.answers(candidate.merge, skills, "search", VALIDATION_ITEMS).mean())
        if candidate.method not in found or value > found[candidate.method][0]:
            found[candidate.method] = value, candidate
    return {method: candidate for method, (_, candidate) in found.items()}


def judged(arm: str, seed: int) -> dict[str, Any]:
    """Answers to judge items of merges of all experts of an arm, at fixed coefficients and at tuned ones."""

    def measure() -> dict[str, Any]:
        fleet = fleet_of(arm, seed)
        chosen_ones = best(fleet, SKILL_NAMES, SKILL_NAMES, seed)

        def answers(merge: Merge) -> NDArray[np.bool_]:
            return fleet.answers(merge, SKILL_NAMES, "holdout", JUDGE_ITEMS)

        curve = {lambda_: answers(arithmetic(lambda_)) for lambda_ in TASK_ARITHMETIC}
        return {
            "own": [float(fleet.own(skill, "holdout", JUDGE_ITEMS).mean()) for skill in FAMILY.skills],
            "seconds": round(fleet.seconds, 1),
            "curve": {str(lambda_): float(found.mean()) for lambda_, found in curve.items()},
            "fixed": {str(alpha): packed(curve[alpha]) for alpha in FIXED},
            "coefficients": {method: candidate.coefficient for method, candidate in chosen_ones.items()},
            "tuned": {method: packed(answers(candidate.merge)) for method, candidate in chosen_ones.items()},
        }

    found = arm_of(f"seed{seed}-{arm}", {**given(), "arm": arm, "seed": seed, "judge_items": JUDGE_ITEMS}, measure)
    return {**found, **{part: {k: unpacked(v) for k, v in found[part].items()} for part in ("fixed", "tuned")}}


def judged_sets(arm: str, seed: int, number: int) -> dict[str, float]:
    """Mean accuracy of merges of every set of `number` experts on their own skills, by method at tuned coefficients."""

    def measure() -> dict[str, Any]:
        fleet = fleet_of(arm, seed)
        return mean_over(
            {
                method: float(fleet.answers(candidate.merge, skills, "holdout", JUDGE_ITEMS).mean())
                for method, candidate in best(fleet, skills, skills, seed).items()
            }
            for skills in combinations(SKILL_NAMES, number)
        )

    settings = {**given(), "arm": arm, "seed": seed, "merged": number, "judge_items": JUDGE_ITEMS}
    return arm_of(f"{number}experts/seed{seed}-{arm}", settings, measure)


def mixed(arm: str, seed: int) -> dict[str, float]:
    """Mean accuracy of merges of two experts, one of AdamW's and one of the arm's, over all pairs in both orders."""

    def measure() -> dict[str, Any]:
        plain, ours = experts_of(ADAMW, seed), experts_of(arm, seed)
        other = {f"{skill}-{arm}": spec for skill, spec in ours.items()}
        fleet = Fleet({**plain, **other}, directory(), CACHE)
        return mean_over(
            {
                method: float(fleet.answers(candidate.merge, (one, two), "holdout", JUDGE_ITEMS).mean())
                for method, candidate in best(fleet, (one, f"{two}-{arm}"), (one, two), seed).items()
            }
            for pair in combinations(SKILL_NAMES, 2)
            for one, two in (pair, pair[::-1])
        )

    settings = {**given(), "arm": arm, "seed": seed, "judge_items": JUDGE_ITEMS}
    return arm_of(f"mixed/seed{seed}-{arm}", settings, measure)


def mean_over(each: Any) -> dict[str, float]:
    rows = list(each)
    return {method: float(np.mean([row[method] for row in rows])) for method in rows[0]}


# -- tables ------------------------------------------------------------------------------------------------------------


def seeds_on_file(measure: Callable[[str, int], Any], arms: Sequence[str] = ARMS) -> list[int]:
    """The first seeds of which every arm is on file. Raises NotKept if the first is not."""
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


def comparison(seeds: Sequence[int]) -> dict[str, Any]:
    """By arm: accuracy of experts and merges, and differences of merges from AdamW's with their intervals."""
    runs = {arm: [judged(arm, seed) for seed in seeds] for arm in ARMS}
    rows = {}
    for arm, own in runs.items():
        columns = [("fixed", str(alpha)) for alpha in FIXED] + [("tuned", method) for method in own[0]["tuned"]]
        rows[arm] = {
            "own": float(np.mean([each["own"] for each in own])),
            "seconds": float(np.mean([each["seconds"] for each in own])),
            "curve": {key: float(np.mean([each["curve"][key] for each in own])) for key in own[0]["curve"]},
            "values": {name: float(np.mean([each[part][name] for each in own])) for part, name in columns},
            "gains": {
                name: compared(
                    BENCHMARK,
                    f"{arm}-{name.replace(' ', '-')}",
                    interval,
                    [np.stack([each[part][name] for each in own])],
                    [np.stack([each[part][name] for each in runs[ADAMW]])],
                )
                for part, name in columns
                if arm != ADAMW
            },
        }
    return {"seeds": len(seeds), "rows": rows}


NAMES = {
    ADAMW: "AdamW",
    LAPLACE: "MergOPT, Laplace noise",
    RESAMPLED: "`task_vectors`",
    ORACLE: "`merges`, oracle",
}


def head(first: str, columns: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]


def text_of(gain: Mapping[str, float] | None) -> str:
    return "" if gain is None else f" ({gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}])"


def arms_table() -> str:
    """Judge accuracy of experts and of merges of all five, with differences from AdamW's at some coefficients."""
    seeds = seeds_on_file(judged)
    rows = comparison(seeds)["rows"]
    names = list(rows[ADAMW]["values"])
    titles = [f"alpha {name}" if name in map(str, FIXED) else name for name in names]
    lines = head(f"experts ({len(seeds)} of {NUM_SEEDS} seeds)", ["own skill", *titles])
    for arm, row in rows.items():
        cells = [f"{row['values'][name]:.3f}{text_of(row['gains'].get(name))}" for name in names]
        lines.append(f"| {NAMES[arm]} | {row['own']:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves_table() -> str:
    """Judge accuracy of task arithmetic of all five experts, by its coefficient."""
    seeds = seeds_on_file(judged)
    lines = head(f"experts ({len(seeds)} of {NUM_SEEDS} seeds)", [f"{lambda_:g}" for lambda_ in TASK_ARITHMETIC])
    for arm in ARMS:
        runs = [judged(arm, seed)["curve"] for seed in seeds]
        cells = [f"{np.mean([run[str(lambda_)] for run in runs]):.3f}" for lambda_ in TASK_ARITHMETIC]
        lines.append(f"| {NAMES[arm]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def numbers_table() -> str:
    """Judge accuracy of merges of two and of four experts, means over their sets."""
    lines: list[str] = []
    for number in NUMBERS:
        seeds = seeds_on_file(lambda arm, seed, number=number: judged_sets(arm, seed, number))  # type: ignore[misc]
        for arm in ARMS:
            row = mean_over(judged_sets(arm, seed, number) for seed in seeds)
            lines = lines or head("experts", ["merged", "seeds", *row])
            lines.append(f"| {NAMES[arm]} | {number} | {len(seeds)} | {cells_of(row)} |")
    return "\n".join(lines)


def mixed_table() -> str:
    """Judge accuracy of merges of an expert of AdamW and one of another arm, and of two of each."""
    arms = ARMS[1:]
    seeds = seeds_on_file(mixed, arms)
    rows = {f"{NAMES[ADAMW]} and {NAMES[ADAMW]}": mean_over(judged_sets(ADAMW, seed, 2) for seed in seeds)}
    for arm in arms:
        rows[f"{NAMES[ADAMW]} and {NAMES[arm]}"] = mean_over(mixed(arm, seed) for seed in seeds)
        rows[f"{NAMES[arm]} and {NAMES[arm]}"] = mean_over(judged_sets(arm, seed, 2) for seed in seeds)
    lines = head(f"experts of a pair ({len(seeds)} of {NUM_SEEDS} seeds)", list(next(iter(rows.values()))))
    return "\n".join([*lines, *(f"| {name} | {cells_of(row)} |" for name, row in rows.items())])


def resemblance_table() -> str:
    """How much a merge raises the loss of its experts on their own skills, and other offsets do; by its coefficient."""
    rows = resemblance()["rows"]
    lines = head("alpha", ["merge", "Laplace noise of equal norm", "resampled task vectors of equal norm"])
    for alpha in dict.fromkeys(row["alpha"] for row in rows):
        cells = []
        for key in ("merge", "laplace", "resampled"):
            rises = [float(np.mean(row[key])) - row["expert"] for row in rows if row["alpha"] == alpha]
            cells.append(f"{min(rises):.3f} to {max(rises):.3f}")
        lines.append(f"| {alpha:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cells_of(row: Mapping[str, float]) -> str:
    return " | ".join(f"{value:.3f}" for value in row.values())


# Of parts that were not measured yet there is no table in docs.
TABLES: dict[str, Callable[[], str]] = {}
