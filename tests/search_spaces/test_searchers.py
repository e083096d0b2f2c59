"""Declarations of searchers: the studies that they can search, and the searchers that a refusal names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from search_spaces.errors import Problem
from search_spaces.parameters import Categorical, Condition, Float, Integer, Parameters
from search_spaces.searchers import SEARCHERS, Feature, unsupported

NUMBERS = Parameters([Float("w", 0.0, 1.0), Integer("n", 1, 3), Categorical("only", ("one",))])
CHOICES = Parameters([Float("w", 0.0, 1.0), Categorical("method", ("ties", "linear"))])
CONDITIONAL = Parameters([Integer("n", 1, 3), Float("w", 0.0, 1.0, conditions=(Condition("n", (2,)),))])


def names(problems: tuple[Problem, ...]) -> set[str]:
    """The searchers that a refusal names."""
    (problem,) = problems
    return set(problem.message.split("searchers that do: ")[1].split(", "))


@pytest.mark.parametrize("name", SEARCHERS)
def test_every_searcher_handles_numbers_and_one_objective(name: str) -> None:
    assert unsupported(name, NUMBERS, num_objectives=1) == ()


@pytest.mark.parametrize(
    ("parameters", "counts", "feature"),
    [
        (CHOICES, {"num_objectives": 1}, Feature.CHOICES),
        (CONDITIONAL, {"num_objectives": 1}, Feature.CONDITIONS),
        (NUMBERS, {"num_objectives": 2}, Feature.OBJECTIVES),
        (NUMBERS, {"num_objectives": 1, "num_constraints": 1}, Feature.CONSTRAINTS),
    ],
)
@pytest.mark.parametrize("name", SEARCHERS)
def test_exactly_what_a_searcher_does_not_handle_is_refused(
    name: str, parameters: Parameters, counts: dict[str, int], feature: Feature
) -> None:
    problems = unsupported(name, parameters, **counts)
    assert (problems == ()) == (feature in SEARCHERS[name].handles)
    if problems:
        assert f"{name} does not handle {feature}, which this study has" in problems[0].message
        able = {other for other in SEARCHERS if unsupported(other, parameters, **counts) == ()}
        assert names(problems) == able - {name}
        assert able


def test_refusal_lists_everything_lacking() -> None:
    """A refusal lists everything that is lacking and where to change it."""
    parameters = Parameters([*CHOICES, Float("k", 0.0, 1.0, conditions=(Condition("method", ("ties",)),))])
    (problem,) = unsupported("cmaes", parameters, num_objectives=3)
    assert problem.field == "search.algorithm"
    assert "conditional parameters and categorical parameters and several objectives" in problem.message
    assert {"auto", "smac", "random"} <= names((problem,))


@pytest.mark.parametrize("name", SEARCHERS)
def test_an_alias_handles_what_its_searcher_does(name: str) -> None:
    declared = SEARCHERS[name]
    assert declared.handles == SEARCHERS[declared.alias_of or name].handles


def test_searcher_table_of_the_docs() -> None:
    """The docs' table of searchers agrees with the declarations."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "searchers.md").read_text()
    table = page.split("| searcher | conditions |")[1].split("\n\n")[0]
    cells = {row[0].strip("` "): row[1:] for line in table.splitlines()[2:] for row in [line.strip("|").split("|")]}
    shown = {name: [cell.strip() for cell in row[:4]] for name, row in cells.items()}
    features = (Feature.CONDITIONS, Feature.CHOICES, Feature.OBJECTIVES, Feature.CONSTRAINTS)
    algorithms = {name: declared for name, declared in SEARCHERS.items() if declared.alias_of is None}
    assert shown == {
        name: ["yes" if feature in declared.handles else "no" for feature in features]
        for name, declared in algorithms.items()
    }
    assert re.search(rf"all of them .*{Feature.PENDING}", page, re.IGNORECASE)
    assert all(Feature.PENDING in declared.handles for declared in algorithms.values())
