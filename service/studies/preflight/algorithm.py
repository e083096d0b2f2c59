"""Which searcher a study has: the one that it names, or what suits its space and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.errors import Problem
from search_spaces.searchers import SEARCHERS, unsupported
from search_spaces.spaces.base import DifferentiableSpace, SearchSpace
from search_spaces.study.file import Study
from workers.errors import InvalidTask
from workers.types import TaskSpec

__all__ = ["AUTO", "GRADIENT", "Algorithm", "algorithm_of"]

AUTO, GRADIENT = "auto", "gradient"


@dataclass(frozen=True)
class Algorithm:
    """A searcher's name, and why it was chosen."""

    name: str
    reason: str


def algorithm_of(
    study: Study,
    space: SearchSpace,
    tasks: Mapping[str, TaskSpec],
    problems: list[Problem],
) -> Algorithm:
    """The study's searcher. `auto` is `gradient` where coefficients have gradients and all objectives have references,
    as tests/benchmarks/bench_search.py shows best, and otherwise the searcher that `auto` is declared to be.
    Preference vectors need one that uses them."""
    found = _algorithm_of(study, space, tasks, problems)
    declared = SEARCHERS[found.name]
    why = f", and auto is {found.name} here as {found.reason}" if study.search.algorithm == AUTO else ""
    if study.search.preferences is not None and not declared.uses_preferences:
        able = ", ".join(name for name, each in SEARCHERS.items() if each.uses_preferences)
        message = f"{found.name} does not use preference vectors{why}; leave them out; searchers that do: {able}"
        problems.append(Problem("search.preferences", message))
    if study.search.fit_share < 1 and not declared.computes_steps:
        able = ", ".join(name for name, each in SEARCHERS.items() if each.computes_steps)
        message = f"{found.name} fits no samples, and would leave a share of them out{why}; searchers that do: {able}"
        problems.append(Problem("search.fit_share", message))
    return found


def _algorithm_of(
    study: Study, space: SearchSpace, tasks: Mapping[str, TaskSpec], problems: list[Problem]
) -> Algorithm:
    named = study.search.algorithm
    problems += unsupported(
        named,
        space.parameters,
        num_objectives=len(study.objectives),
        num_constraints=len(study.search.constraints),
    )
    if named not in (AUTO, GRADIENT):
        return Algorithm(named, "the study names it")
    lack = _lack_of_gradients(study, space, tasks)
    if lack is None:
        reason = "merges in this space have gradients, and all objectives have reference answers"
        return Algorithm(GRADIENT, "the study names it" if named == GRADIENT else reason)
    if named == GRADIENT:
        problems.append(Problem("search.algorithm", f"gradient cannot be used: {lack}; use auto or another searcher"))
    return Algorithm(SEARCHERS[AUTO].alias_of or AUTO, f"gradients cannot be used: {lack}")


def _lack_of_gradients(study: Study, space: SearchSpace, tasks: Mapping[str, TaskSpec]) -> str | None:
    from workers.evaluation.references import lack_of_references

    if space.parameters.structure is not None:
        return "which layers a merge has, and in which order, are discrete choices, which have no gradients"
    if not isinstance(space, DifferentiableSpace):
        return f"coefficients of a space of kind {space.kind} have no gradients, those of layerwise and sfs have"
    for name, spec in tasks.items():
        try:
            lack = lack_of_references(spec)
        except InvalidTask as error:
            lack = str(error)
        if lack is not None:
            return f"objective {name!r} has no reference answers: {lack}"
    return None
