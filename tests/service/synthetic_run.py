"""A made-up study as the store has it: 9 baselines, 60 proposed trials, 3 rungs, failures, a held-out stage.

Values are drawn per sample from skills that follow from the recipe, so that figures are consistent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import Objective
from search_spaces.recipe import COMPONENTS, LayerRecipe, Merge, Recipe, Source
from service.results.holdout import Scored, held_out_results
from service.results.record import EngineFigures, RunRecord
from service.results.selection import best_trial, finalists, held_out
from service.store.steps import GradientRequest, GradientResult, GradientStep
from service.types import JobRecord, JobState, Origin, RungRecord, TrialRecord, TrialState
from tests.service.resolved import resolved_study
from workers.types import SampleDifference, VerificationReport

EXPERTS = ("math", "text", "lookup")
NUM_LAYERS, NUM_GROUPS = 8, 4
RUNGS = (30, 90, 270)
ETA = 3
HOLDOUT_SAMPLES = 400
FINGERPRINTS = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("base", *EXPERTS)}


@cache  # resampling its held-out stage takes 0.15 s
def run_record(
    *, num_trials: int = 60, num_objectives: int = 3, num_layers: int = NUM_LAYERS, seed: int = 0
) -> RunRecord:
    """The RunRecord of a finished run. With one objective, it is the first expert's skill."""
    rng = np.random.default_rng(seed)
    names = EXPERTS[:num_objectives]
    objectives = tuple(Objective(name, "exact_match", "maximize") for name in names)
    full = RUNGS[-1]

    trials, skills, searched = [], {}, {}
    for number, (label, origin, recipe) in enumerate(fixed_recipes(num_layers)):
        skills[number] = skill(recipe)
        samples = searched[number] = draw(skills[number], names, full, rng)
        trials.append(scored_trial(number, origin, label, recipe, samples, reached=3, bracket=None))

    candidates = []
    for number in range(len(trials), len(trials) + num_trials):
        recipe = random_recipe(rng, num_layers, progress=(number - len(trials)) / num_trials)
        candidates.append((number, recipe, draw(skill(recipe), names, full, rng)))
        skills[number], searched[number] = skill(recipe), candidates[-1][2]
    failed = {candidate[0] for candidate in candidates[7 :: max(1, num_trials // 3)]}
    alive = [candidate for candidate in candidates if candidate[0] not in failed]
    reached = dict.fromkeys((number for number, _, _ in alive), 1)
    for rung in (1, 2):
        ranked = sorted(
            (c for c in alive if reached[c[0]] == rung),
            key=lambda c: -np.mean([v[: RUNGS[rung - 1]].mean() for v in c[2].values()]),
        )
        for number, _, _ in ranked[: max(1, len(ranked) // ETA)]:
            reached[number] = rung + 1
    for index, (number, recipe, samples) in enumerate(candidates):
        label, bracket = f"trial:{number}", index * 3 // num_trials
        if number in failed:
            trials.append(
                TrialRecord(
                    number=number,
                    origin=Origin.SEARCH,
                    label=label,
                    state=TrialState.FAIL,
                    recipe=recipe,
                    configuration={"g0.method": "ties"},
                    bracket=bracket,
                    reason=f"NaN in the logits of objective {names[0]!r}, sample 3; <merge diverged>",
                )
            )
        else:
            trials.append(scored_trial(number, Origin.SEARCH, label, recipe, samples, reached[number], bracket))

    run = RunRecord(
        study=JobRecord(
            id="c0ffee",
            name="math-text-lookup",
            state=JobState.COMPLETE,
            document={
                "name": "math-text-lookup",
                "models": {"base": "base", "experts": dict.fromkeys(EXPERTS, "somewhere")},
                "search_space": {"kind": "lfs", "layer_groups": NUM_GROUPS, "component_groups": 3},
                "search": {"algorithm": "smac", "max_trials": num_trials, "seed": seed},
                "fidelity": {"scheduler": "hyperband", "min_samples": 30, "max_samples": 270, "eta": 3},
            },
            accepted=resolved_study(num_layers=num_layers).to_json(),
            kind="search",
            created_at=1_760_000_000.0,
        ),
        objectives=objectives,
        trials=tuple(trials),
        full_budget=dict.fromkeys(names, full),
        engine=EngineFigures(
            starts=1,
            kinds=("vllm, float32, 1.75 GB of sources in mapped files",),
            swap_s=tuple(rng.gamma(9, 0.002, 120)),
            busy_fraction=0.87,
        ),
        wall_clock_s=312.4,
        samples_per_second=131.8,
        version="0.1.0",
    )
    found = holdout(run, skills, searched, rng)
    return replace(
        run,
        holdout=found.rows,
        holdout_reference=found.reference,
        holdout_volume=found.volume,
        rival_tests=found.tests,
        selection_bias=found.selection_bias,
        split_difference=found.split_difference,
        verifications=verifications(run),
    )


def gradients(*, num_descents: int = 1, first_trial: int = 9, seed: int = 0) -> tuple[GradientStep, ...]:
    """Gradient steps whose losses fall, with the noise of batches.

    The first descent has 48 gradients and 4 trials, later ones 12 and 1; the last of them is for the first expert
    alone.
    """
    rng = np.random.default_rng(seed)
    level, scales = dict.fromkeys(EXPERTS, 1.3), dict(zip(EXPERTS, (1.4, 0.6, 2.1), strict=True))
    found: list[GradientStep] = []
    trial = first_trial
    for number in range(num_descents):
        shares = (1.0, 0.0, 0.0) if 0 < number == num_descents - 1 else rng.dirichlet((3.0, 3.0, 3.0))
        preference = dict(zip(EXPERTS, shares if num_descents > 1 else (1 / 3,) * 3, strict=True))
        for step in range(48 if number == 0 else 12):
            level = {
                name: of - 0.12 * preference[name] * (of - 0.2) + 0.01 * (number > 0) for name, of in level.items()
            }
            used = [name for name in EXPERTS if preference[name] > 0]
            request = GradientRequest(
                label=f"descent {number}",
                descent=number,
                point=(),
                positions={},
                weights={name: preference[name] / scales[name] for name in used},
                preference=preference if num_descents > 1 else {},
            )
            losses = {name: scales[name] * level[name] * rng.lognormal(0, 0.15) for name in used}
            found.append(GradientStep(len(found), trial, request, GradientResult(losses=losses)))
            trial += step % 12 == 11
    return tuple(found)


def holdout(
    run: RunRecord,
    skills: Mapping[int, Mapping[str, float]],
    searched: Mapping[int, Mapping[str, NDArray[np.float64]]],
    rng: np.random.Generator,
) -> Any:
    """Comparisons of finalists and all baselines, on the same samples, so that neighbours are correlated."""
    names = [objective.name for objective in run.objectives]
    luck = {name: rng.random(HOLDOUT_SAMPLES) for name in names}
    rows = held_out(run.whole_trials, run.objectives)

    def samples(trial: TrialRecord) -> dict[str, NDArray[np.float64]]:
        noise = np.random.default_rng(trial.number)
        return {
            name: ((0.8 * luck[name] + 0.2 * noise.random(HOLDOUT_SAMPLES)) < skills[trial.number][name]).astype(float)
            for name in names
        }

    return held_out_results(
        run.trials,
        run.objectives,
        search=Scored({trial.recipe.digest: searched[trial.number] for trial in rows}),
        holdout=Scored({trial.recipe.digest: samples(trial) for trial in rows}),
    )


def verifications(run: RunRecord) -> tuple[VerificationReport, ...]:
    return tuple(
        VerificationReport(
            recipe_digest=trial.recipe.digest,
            num_samples=48,
            num_equal=48 - number,
            max_logprob_difference=3.1e-5,
            tolerance=1e-3,
            differences=tuple(
                SampleDifference(
                    "text", 17 + i, engine=0.0, reference=1.0, top2_gap=2.4e-5, what="tokens", is_beyond=False
                )
                for i in range(number)
            ),
            num_beyond=0,
            num_tokens=310,
            num_logprobs=700,
        )
        for number, trial in enumerate(finalists(run.whole_trials, run.objectives)[:3])
    )


def scored_trial(
    number: int,
    origin: Origin,
    label: str,
    recipe: Recipe,
    samples: Mapping[str, NDArray[np.float64]],
    reached: int,
    bracket: int | None,
) -> TrialRecord:
    rungs = tuple(
        RungRecord(
            rung=rung,
            num_samples=dict.fromkeys(samples, count),
            values={name: float(values[:count].mean()) for name, values in samples.items()},
            standard_errors={name: float(values[:count].std(ddof=1) / count**0.5) for name, values in samples.items()},
        )
        for rung, count in enumerate(RUNGS[:reached])
    )
    if origin is not Origin.SEARCH:
        rungs = rungs[-1:]
    is_full = reached == len(RUNGS)
    return TrialRecord(
        number=number,
        origin=origin,
        label=label,
        state=TrialState.COMPLETE if is_full else TrialState.PRUNED,
        recipe=recipe,
        configuration={"g0.method": "task_arithmetic"} if origin is Origin.SEARCH else None,
        bracket=bracket,
        rungs=rungs,
        samples_scored=RUNGS[reached - 1] * len(samples),
        timings_s={"ask": 0.4, "materialise": 0.01, "swap": 0.02, "score": 2.0, "wait": 0.1},
        values=rungs[-1].values if is_full else {},
        standard_errors=rungs[-1].standard_errors if is_full else {},
    )


def draw(
    skills: Mapping[str, float], names: Sequence[str], count: int, rng: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    return {name: (rng.random(count) < skills[name]).astype(float) for name in names}


def skill(recipe: Recipe) -> dict[str, float]:
    """Made-up true skills of a recipe.

    A skill grows with its expert's share, most where that expert learned it (math in attention, text in the mlp, lookup
    in norms), saturates, and suffers from the other experts' steps.
    """
    shares = dict.fromkeys(EXPERTS, 0.0)
    layers = len(recipe.layers)
    for layer in recipe.layers:
        for component, favourite in zip(COMPONENTS, EXPERTS, strict=True):
            for name, share in influence(layer.component(component)).items():
                if name in shares:
                    shares[name] += share * (0.6 if name == favourite else 0.2) / layers
    step = sum(shares.values())
    return {
        name: float(np.clip(0.30 + 0.66 * min(share, 1.0) ** 0.7 - 0.10 * (step - share), 0.02, 0.98))
        for name, share in shares.items()
    }


def best_of(run: RunRecord) -> TrialRecord:
    """The best trial of a run that has one."""
    best = best_trial(run.whole_trials, run.objectives)
    assert best is not None
    return best


def influence(merge: Merge) -> dict[str, float]:
    names = [source.model for source in merge.sources]
    if merge.method == "passthrough":
        return {names[0]: 1.0}
    if merge.method == "slerp":
        return {names[0]: 1 - merge.number("t"), names[1]: merge.number("t")}
    weights = merge.per_source("weight" if merge.method == "linear" else "lambda")
    return dict(zip(names, weights, strict=True))


# A function that makes the merge of a layer, or of the embedding and the head for None.
Maker = Callable[[int | None], Merge]


def fixed_recipes(num_layers: int) -> Iterator[tuple[str, Origin, Recipe]]:
    def whole(make: Maker) -> Recipe:
        return Recipe(FINGERPRINTS, "base", tuple(layer_of(make, i) for i in range(num_layers)), make(None), make(None))

    def sources(layer: int | None) -> tuple[Source, ...]:
        return tuple(Source(name, layer) for name in EXPERTS)

    yield "base", Origin.SOURCE, whole(lambda i: Merge("passthrough", (Source("base", i),)))

    def passing(name: str) -> Maker:
        return lambda layer: Merge("passthrough", (Source(name, layer),))

    def adding(value: float) -> Maker:
        return lambda layer: Merge("task_arithmetic", sources(layer), {"lambda": value})

    for name in EXPERTS:
        yield f"expert:{name}", Origin.SOURCE, whole(passing(name))
    yield "average", Origin.PUBLISHED, whole(lambda i: Merge("linear", sources(i), {"weight": 1 / 3}))
    for value in (1 / 3, 0.3, 0.4):
        label = "1/n" if value == 1 / 3 else f"{value}"
        yield (
            f"task_arithmetic:{label}",
            Origin.PUBLISHED,
            whole(adding(value)),
        )
    yield "ties:1.0:0.2", Origin.PUBLISHED, whole(lambda i: Merge("ties", sources(i), {"lambda": 0.45, "k": 0.2}))


def layer_of(make: Maker, layer: int) -> LayerRecipe:
    return LayerRecipe(attention=make(layer), mlp=make(layer), norm=make(layer))


def random_recipe(rng: np.random.Generator, num_layers: int, *, progress: float) -> Recipe:
    """A random layer-wise recipe. Later recipes have more balanced coefficients, as in a search that learns."""
    layers = []
    spread = 1.2 - progress
    for start in range(0, num_layers, max(1, num_layers // NUM_GROUPS)):
        makers = [random_maker(rng, spread, favourite) for favourite in range(3)]
        for layer in range(start, min(start + max(1, num_layers // NUM_GROUPS), num_layers)):
            attention, mlp, norm = (make(layer) for make in makers)
            layers.append(LayerRecipe(attention, mlp, norm))
    ends = random_maker(rng, spread, 0), random_maker(rng, spread, 2)
    return Recipe(FINGERPRINTS, "base", tuple(layers), ends[0](None), ends[1](None))


def random_maker(rng: np.random.Generator, spread: float, favourite: int) -> Maker:
    lean = np.where(np.arange(3) == favourite, 0.5 * (1.2 - spread), 0.0)
    method = rng.choice(["task_arithmetic", "ties", "slerp", "linear", "passthrough"], p=[0.42, 0.2, 0.14, 0.2, 0.04])
    if method == "task_arithmetic":
        values = tuple(float(v) for v in np.clip(0.35 + lean + spread * rng.normal(0, 0.3, 3), 0, 1))
        return lambda i: Merge(method, tuple(Source(n, i) for n in EXPERTS), {"lambda": values})
    if method == "ties":
        numbers = {"lambda": float(np.clip(0.5 + spread * rng.normal(0, 0.2), 0, 1)), "k": float(rng.uniform(0.1, 0.9))}
        return lambda i: Merge(method, tuple(Source(n, i) for n in EXPERTS), numbers)
    if method == "slerp":
        pair, t = rng.permutation(EXPERTS)[:2], float(np.clip(0.5 + spread * rng.normal(0, 0.2), 0, 1))
        return lambda i: Merge(method, tuple(Source(str(n), i) for n in pair), {"t": t})
    if method == "linear":
        weights = tuple(float(v) for v in rng.dirichlet((1 + 5 * lean) * 3 / spread))
        return lambda i: Merge(method, tuple(Source(n, i) for n in EXPERTS), {"weight": weights})
    name = str(rng.choice(EXPERTS))
    return lambda i: Merge("passthrough", (Source(name, i),))
