"""The gain from refining the front of a search of layer paths, on the shipped family.

A short search of the space `hm3`, with a merged model in the pool, is refined (`search.refinement`). Three fronts are
compared: that of the search alone, that of the search with the refined paths, and that of a longer search, whose
additional paths take as many samples as the refinement. One forward pass replaces engines. Hypervolumes are of search
data and of the judge items, 1,000 other items of each skill. The policy's rewards in each iteration of the longer
search are given with their deviation over seeds, as in figure 6 of the paper. Every seed is an arm that is kept.

    make bench ONLY=hm3_refinement
    HM3_REFINEMENT_SEEDS=0-1 make bench ONLY=hm3_refinement
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from search_spaces.objectives import hypervolume, non_dominated
from search_spaces.recipe import Recipe
from search_spaces.spaces.base import Coefficients
from service.store import Store
from service.store.steps import ChargedRequest, GradientResult, LossesResult, UpdateStep
from service.studies.preflight.examine import examine
from service.tune.coordinator import Coordinator
from service.tune.proposing.completions import SourceCompletions
from service.tune.proposing.gradient_actor import GradientActor
from service.types import Origin
from tests.benchmarks.arms import kept
from tests.benchmarks.bench_search import seeds_of
from tests.benchmarks.code_digests import code_digest
from tests.benchmarks.search_runs import CHUNK_SAMPLES, Bench, InProcess
from workers.types import ScoreRequest

BENCHMARK = "hm3_refinement"
FAMILY = "shipped"
TRIALS, SAMPLES, NUM_SKILLS = 240, 30, 3
REFINEMENT: Mapping[str, Any] = {"paths": 6, "steps": 32, "batch": 48}
# As many paths as the refinement takes samples: gradients, losses at the start and the trials.
MORE_TRIALS = REFINEMENT["paths"] * (REFINEMENT["batch"] * (3 * REFINEMENT["steps"] + 1) + 90) // (SAMPLES * NUM_SKILLS)
SEARCH: Mapping[str, Any] = {
    "algorithm": "hm3",
    "preferences": {"lattice": 7, "interior": True},
    "hm3": {"policy": "conditioned", "episodes": 30, "explored": 6},
    "baselines": "none",
}
SPACE: Mapping[str, Any] = {
    "kind": "hm3",
    "min_path_length": 6,
    "max_path_length": 10,
    "merged": {"method": "dare_ties_l1"},
}
ROWS = {
    "alone": f"search of {TRIALS} paths",
    "refined": "the same, refined",
    "longer": f"search of {TRIALS + MORE_TRIALS} paths, which takes as many samples",
}
# Every second iteration has a column in the table of rewards.
EVERY = 2


@dataclass(frozen=True)
class Scored:
    """A trial with its merge and its values on search data, one for each skill."""

    origin: Origin
    recipe: Recipe
    values: tuple[float, ...]


class InProcessGradients:
    """Implementation of `refinement_stage.Gradients` that computes in the caller's thread."""

    def __init__(self, actor: GradientActor) -> None:
        self._actor = actor
        self._request: ChargedRequest | None = None

    def begin(self, request: ChargedRequest, coefficients: Coefficients | None = None) -> None:
        assert coefficients is not None
        self._actor.use_coefficients(coefficients)
        self._request = request

    def result(self, *, timeout_s: float) -> LossesResult | GradientResult:
        assert self._request is not None
        return self._actor.run(self._request)


def searched(bench: Bench, *, seed: int, trials: int, is_refined: bool) -> tuple[list[Scored], int, list[float]]:
    """Run a search; return its trials, including those that refine its front, and the number of used samples.

    The third result is the mean reward of each of its policy's iterations.
    """
    search = {**SEARCH, "seed": seed, "max_trials": trials, "refinement": REFINEMENT if is_refined else None}
    document = {"search_space": dict(SPACE), "search": search}
    fidelity = {"scheduler": "none", "max_samples": SAMPLES}
    preflight = examine(bench.family.study("skills", fidelity=fidelity, **document))
    inputs = preflight.gradient_inputs()
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        store = Store(f"sqlite:///{directory}/study.db")
        resolved = preflight.resolved()
        study = store.create_job(
            kind="search", name="bench", document=preflight.study.canonical(), accepted=resolved.to_json()
        )
        completions = SourceCompletions(store, study.id, preflight.tasks.objectives)
        coordinator = Coordinator(
            replace(preflight.plan(study.id, resolved), holdout_samples={}, chunk_samples=CHUNK_SAMPLES),
            space=preflight.space,
            store=store,
            writer=store.open_attempt(study.id),
            proposer=InProcess(preflight, None, completions),
            gradients=None if inputs is None else InProcessGradients(GradientActor(inputs)),
        )
        while (evaluation := coordinator.next_evaluation(timeout_s=1.0)) is not None:
            for chunk in evaluation.chunks:
                coordinator.on_outcome(evaluation, bench.scorer.score(ScoreRequest(study.id, evaluation.recipe, chunk)))
        assert coordinator.is_finished
        found = [
            Scored(trial.origin, trial.read_recipe(), tuple(trial.values[name] for name in preflight.tasks.search))
            for trial in coordinator.trials
            if trial.values
        ]
        used = coordinator.num_samples_used
        updates = [step for step in store.steps(study.id) if isinstance(step, UpdateStep)]
        store.close()
    return found, used, [update.result.statistics["outcome"] for update in updates]


def front_figures(bench: Bench, trials: Sequence[Scored]) -> dict[str, Any]:
    """Hypervolumes of the front of `trials` on search data and judge items, and the best mean on judge items."""
    distinct = list({trial.recipe.digest: trial for trial in trials}.values())
    is_best = non_dominated([tuple(1 - value for value in trial.values) for trial in distinct])
    front = [trial for trial, on_front in zip(distinct, is_best, strict=True) if on_front]
    judged = np.stack([bench.judged(trial.recipe).mean(axis=1) for trial in front])
    return {
        "search": volume([trial.values for trial in front]),
        "judge": volume(judged.tolist()),
        "mean": float(judged.mean(axis=1).max()),
        "front": len(front),
    }


def volume(values: Sequence[Sequence[float]]) -> float:
    return hypervolume([tuple(1 - value for value in each) for each in values])


def figures(seed: int) -> dict[str, Any]:
    bench = Bench.of(FAMILY)
    trials, used, _ = searched(bench, seed=seed, trials=TRIALS, is_refined=True)
    longer, used_longer, rewards = searched(bench, seed=seed, trials=TRIALS + MORE_TRIALS, is_refined=False)
    return {
        "alone": front_figures(bench, [trial for trial in trials if trial.origin is Origin.SEARCH]),
        "refined": {**front_figures(bench, trials), "samples": used},
        "longer": {**front_figures(bench, longer), "samples": used_longer},
        "rewards": [round(reward, 4) for reward in rewards],
    }


def arm(seed: int) -> dict[str, Any]:
    settings = {"seed": seed, "search": SEARCH, "space": SPACE, "refinement": REFINEMENT, "samples": SAMPLES}
    modules = ("service.tune.searchers.hm3", "service.tune.refinement_stage", "workers.training.gradients")
    return kept(
        BENCHMARK,
        f"shipped-{seed}",
        {**settings, "trials": [TRIALS, TRIALS + MORE_TRIALS]},
        lambda: figures(seed),
        depends=lambda: {"code": code_digest(*modules)},
    )


def run() -> dict[str, Any]:
    return {"arms": [arm(seed) for seed in seeds_of("HM3_REFINEMENT_SEEDS")]}


def table(arms: Sequence[Mapping[str, Any]]) -> str:
    """Table of means over seeds, and of the mean and range of differences from the search alone on judge items."""
    lines = [
        "| front | search data | judge items | minus the search alone | best mean | merges | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, label in ROWS.items():
        rows = [each[key] for each in arms]
        minus = [own["judge"] - each["alone"]["judge"] for own, each in zip(rows, arms, strict=True)]
        cells = [f"{np.mean([row[name] for row in rows]):.3f}" for name in ("search", "judge")]
        cells.append("" if key == "alone" else f"{np.mean(minus):+.3f} ({min(minus):+.3f} to {max(minus):+.3f})")
        cells += [f"{np.mean([row['mean'] for row in rows]):.3f}", f"{np.mean([row['front'] for row in rows]):.0f}"]
        lines.append(f"| {label} | {' | '.join(cells)} | {len(arms)} |")
    return "\n".join(lines)


def rewards_table(arms: Sequence[Mapping[str, Any]]) -> str:
    """Table of the mean reward in each iteration, and its standard deviation over seeds."""
    curves = np.array([each["rewards"] for each in arms])  # [seeds, iterations]
    places = range(0, curves.shape[1], EVERY)
    deviations = curves.std(axis=0, ddof=1) if len(arms) > 1 else np.zeros(curves.shape[1])
    rows = {
        "iteration": [str(place + 1) for place in places],
        "reward": [f"{curves[:, place].mean():.3f} ± {deviations[place]:.3f}" for place in places],
    }
    head, *others = (f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())
    return "\n".join((head, f"|{'---|' * (len(places) + 1)}", *others))


def show(result: dict[str, Any]) -> None:
    print(table(result["arms"]))
    print(rewards_table(result["arms"]))
