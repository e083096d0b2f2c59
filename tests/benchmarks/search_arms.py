"""Arms for searches of trained families: chosen trial, front, and answers to judge items.

Figures come from the arms on file; a search is run, and merges are judged, only for an arm that is not there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import hypervolume, non_dominated
from tests.benchmarks.arms import kept, packed, unpacked
from tests.benchmarks.search_families import FAMILIES
from tests.benchmarks.search_runs import Bench, Run, SearchSpec, Trial, code_of

__all__ = ["Best", "Front", "best_of", "depends_on", "done", "front_in", "front_of", "judged", "slug", "volume"]


@dataclass(frozen=True)
class Best:
    """The trial of a search with the best mean on search data: this mean, its origin and its `answers` [skills, items].

    `spent` is the search's cost in samples' worth, and `proposed` the number of trials it scored in full.
    """

    search: float
    origin: str
    spent: int
    proposed: int
    seconds: float
    answers: NDArray[np.bool_]


@dataclass(frozen=True)
class Front:
    """The non-dominated merges of a search: their hypervolume on search data, and `answers` [merges, skills, items]."""

    search: float
    answers: NDArray[np.bool_]


def best_of(spec: SearchSpec, *, cut: int | None = None, proposed: bool = False) -> Best:
    """Best trial of a search; with `cut`, the best trial among those that the first `cut` samples' worth paid for.

    With `proposed` baselines do not count.
    """

    def measure() -> dict[str, Any]:
        bench = Bench.of(spec.family)
        run = done(bench, spec)
        run = run if cut is None else run.cut(cut)
        best = (run.proposed() if proposed else run).best()
        return {
            "search": best.mean,
            "origin": best.origin,
            "spent": run.spent,
            "proposed": len(run.proposed().trials),
            "seconds": round(run.seconds, 1),
            "answers": packed(judged(bench, run, best)),
        }

    name = f"best/{slug(spec)}" + ("" if cut is None else f"-after-{cut}") + ("-proposed" if proposed else "")
    settings = {"spec": asdict(spec), "cut": cut, **({"proposed": True} if proposed else {})}
    found = kept("search", name, settings, measure, depends=depends_on(spec))
    return Best(**{**found, "answers": unpacked(found["answers"])})


def front_in(spec: SearchSpec, budget: int) -> Front:
    """Front of all trials, baselines included, that a search had scored after `budget` samples' worth."""

    def measure() -> dict[str, Any]:
        bench = Bench.of(spec.family)
        run = done(bench, spec)
        front = front_of(run.until(budget))
        return {"search": volume(front), "answers": packed(np.stack([judged(bench, run, trial) for trial in front]))}

    settings = {"spec": asdict(spec), "budget": budget}
    found = kept("search", f"front/{slug(spec)}-after-{budget}", settings, measure, depends=depends_on(spec))
    return Front(found["search"], unpacked(found["answers"]))


def slug(spec: SearchSpec) -> str:
    return f"{spec.family}-{spec.goal}-{spec.name}-{spec.seed}"


def depends_on(*specs: SearchSpec) -> Callable[[], Mapping[str, str]]:
    """Make a function that computes digests of the families and the code of these searches."""

    def digests() -> dict[str, str]:
        algorithms = sorted({spec.search["algorithm"] for spec in specs})
        families = sorted({spec.family for spec in specs})
        return {f"code of {algorithm}": code_of(algorithm) for algorithm in algorithms} | {
            f"family {name}": FAMILIES[name].digest for name in families
        }

    return digests


# -- searches and what they found --------------------------------------------------------------------------------------


def done(bench: Bench, spec: SearchSpec) -> Run:
    """A finished search; it is run if its file is missing in `.bench`."""
    started = time.perf_counter()
    run = bench.run(spec)
    if (seconds := time.perf_counter() - started) > 2:
        best = run.best()
        print(f"{spec.family} {spec.goal} {spec.name} seed {spec.seed}: {best.mean:.3f} on search data after "
              f"{run.spent} samples' worth, {seconds:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    return run


def judged(bench: Bench, run: Run, trial: Trial) -> NDArray[np.bool_]:
    """Answers of a trial's merge to judge items, [skills, items]."""
    return bench.judged(bench.recipe(run.spec, trial))


def front_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other trial dominates on search data; among equal recipes, the first one."""
    first = {trial.digest: trial for trial in reversed(trials)}
    unique = sorted(first.values(), key=lambda trial: trial.number)
    is_best = non_dominated([costs(trial) for trial in unique])
    return [trial for trial, is_on_front in zip(unique, is_best, strict=True) if is_on_front]


def costs(trial: Trial) -> tuple[float, ...]:
    return tuple(1 - value for value in trial.values.values())


def volume(trials: Sequence[Trial]) -> float:
    """Hypervolume of trials on search data."""
    return hypervolume([costs(trial) for trial in trials])
