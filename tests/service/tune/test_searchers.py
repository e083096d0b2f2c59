"""Requirements of every searcher, and of the encoding that learning searchers use."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import service.tune.searchers
from search_spaces.parameters import Categorical, Condition, Float, Integer, Parameters
from search_spaces.searchers import SEARCHERS as DECLARED
from search_spaces.searchers import Feature, unsupported
from search_spaces.spaces.hm3 import MergedOptions
from search_spaces.spaces.layer_paths import LayerPaths
from search_spaces.study.search import Search
from service.errors import NotFound
from service.tune.searchers import SEARCHERS, get_searcher
from service.tune.searchers.base import Observation, Searcher, SearchSetting
from service.tune.searchers.encoding import INACTIVE, Encoding
from service.tune.searchers.smac import SmacSearcher
from tests.search_spaces.spaces.families import models as family
from tests.search_spaces.spaces.families import space as layer_paths
from tests.service.tune.harness import NO_RANDOM, propose

FLAT = Parameters([Float(f"w{i}", 0.0, 1.0) for i in range(6)])

NUMBERS = Parameters([Float("w", -0.5, 1.5), Integer("repeats", 1, 4), Integer("constant", 7, 7), Float("k", 0.1, 0.9)])

CHOICES = Parameters(
    [Float("w", -0.5, 1.5), Categorical("method", ("ties", "slerp")), Categorical("use", (True, False))]
)

CONDITIONAL = Parameters(
    [
        Categorical("only", ("one",)),
        Categorical("method", ("ties", "slerp", "linear")),
        Categorical("use.math", (True, False), conditions=(Condition("method", ("ties", "linear")),)),
        Categorical("pair", ("a+b", "a+c", "b+c"), conditions=(Condition("method", ("slerp",)),)),
        Float("k", 0.1, 0.99, conditions=(Condition("method", ("ties",)),)),
        Float("weight", -2.0, 3.0, conditions=(Condition("method", ("linear",)), Condition("use.math", (True,)))),
        Integer("repeats", 1, 4),
        Float("scale", 0.5, 1.5, conditions=(Condition("repeats", (2, 3)),)),
        Integer("constant", 7, 7),
    ]
)

PATHS = layer_paths("dis", family(("math", "code"), 2)).parameters

STEPS = layer_paths("hm3", family(("math", "code"), 3)).parameters

SPACES = {
    "paths": PATHS,
    "steps": STEPS,
    "flat": FLAT,
    "numbers": NUMBERS,
    "choices": CHOICES,
    "conditional": CONDITIONAL,
}

# Searchers that need neither steps nor a setting; the others have tests of their own.
ALGORITHMS = [name for name, found in DECLARED.items() if found.proposes_at_once and found.alias_of is None]

# Searchers that load torch, or fit a model for a second.
SLOW = {"gp"}


def named(name: str, *more: Any) -> Any:
    """A parameter of tests about one searcher."""
    return pytest.param(name, *more, marks=[pytest.mark.slow] if name in SLOW else [])


def can(name: str, space: Parameters, num_objectives: int = 1) -> bool:
    return not unsupported(name, space, num_objectives=num_objectives)


# Every searcher with every space and number of objectives that it does not refuse.
CASES = [
    named(name, space, num_objectives)
    for name in ALGORITHMS
    for space, parameters in SPACES.items()
    for num_objectives in (1, 3)
    if can(name, parameters, num_objectives)
]


def hardest_space(name: str) -> Parameters:
    """The last space in SPACES that a searcher can search; later spaces make more demands."""
    found: Parameters = next(space for space in reversed(SPACES.values()) if can(name, space))
    return found


@pytest.fixture(params=[named(name) for name in ALGORITHMS])
def searcher_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def searcher(searcher_name: str) -> Searcher:
    return SEARCHERS[searcher_name]


@pytest.fixture
def space(searcher_name: str) -> Parameters:
    return hardest_space(searcher_name)


def observed(parameters: Parameters, num: int, *, num_objectives: int = 1, seed: int = 0) -> list[Observation]:
    """Random configurations with costs that favour small encoded values, at rungs 1/9, 1/3 and 1 in turn."""
    rng = np.random.default_rng(seed)
    configurations = [parameters.sample(rng) for _ in range(num)]
    rows = Encoding(parameters).encode(configurations)
    return [
        Observation(
            configuration,
            (1 / 9, 1 / 3, 1.0)[i % 3],
            tuple(float(np.mean(row**2)) + o for o in range(num_objectives)),
            number=i,
            rung=i % 3,
        )
        for i, (configuration, row) in enumerate(zip(configurations, rows, strict=True))
    ]


def at_full_budget(
    configuration: Mapping[str, Any], costs: tuple[float, ...] | None, number: int, **known: Any
) -> Observation:
    return Observation(configuration, 1.0, costs, number=number, rung=2, **known)


@pytest.mark.parametrize(("name", "space", "num_objectives"), CASES)
@pytest.mark.parametrize("num_observations", [0, 1, 40])
def test_proposals_lie_in_the_space(name: str, space: str, num_objectives: int, num_observations: int) -> None:
    parameters = SPACES[space]
    observations = observed(parameters, num_observations, num_objectives=num_objectives)
    pending = [parameters.sample(np.random.default_rng(i)) for i in range(3)]
    for number in range(num_observations, num_observations + (1 if name in SLOW else 2)):
        configuration = propose(
            SEARCHERS[name], parameters, number=number, seed=0, observations=observations, pending=pending
        )
        parameters.check(configuration)
        assert tuple(configuration) == parameters.active(configuration)


@pytest.mark.parametrize("name", [named(name) for name in ALGORITHMS if can(name, PATHS)])
@pytest.mark.parametrize("num_observations", [0, 40])
def test_repaired_proposals_are_new(name: str, num_observations: int) -> None:
    """Proposals in a space with structure are new after their repair."""
    observations = observed(PATHS, num_observations)
    for number in range(100, 103):
        proposed = propose(SEARCHERS[name], PATHS, number=number, seed=0, observations=observations)
        assert PATHS.repair(proposed) == proposed
        assert proposed not in [observation.configuration for observation in observations]


def test_grid_of_paths() -> None:
    """The grid of paths holds passthrough merges, those of the fewest blocks first."""
    paths = STEPS.structure
    assert isinstance(paths, LayerPaths)
    found: list[tuple[int, ...]] = []
    observations: list[Observation] = []
    for number in range(60):
        proposal = propose(SEARCHERS["grid"], STEPS, number=number, seed=0, observations=observations)
        found.append(paths.path(proposal))
        observations.append(at_full_budget(proposal, (0.5,), number))
    assert len(set(found)) == 60
    blocks = [1 + sum(b != a + 1 or paths.layer_of(b) == 0 for a, b in itertools.pairwise(path)) for path in found]
    assert blocks == sorted(blocks)
    assert {1, 2} <= set(blocks)


VECTORS = tuple({"math": i / 10, "code": 1 - i / 10} for i in range(1, 9))

POOL = layer_paths("hm3", replace(family(("math", "code"), 3), preferences=VECTORS), merged=MergedOptions()).parameters


@pytest.mark.parametrize(("name", "first_share"), [("es", 0.8), ("de", 0.5), ("moead", 0.15)])
def test_added_merged_layers_have_any_vector(name: str, first_share: float) -> None:
    """Children of paths without merged layers draw a preference vector; version 1 kept the stored one, the first.

    `first_share` is a lower limit of the first vector's share in version 1; with equal shares it would be 1/8. Children
    of `moead` are near their parents, so that few have merged layers that no parent has.
    """
    paths = POOL.structure
    assert isinstance(paths, LayerPaths)

    def share_of_first(version: int | None) -> float:
        """Share of the first preference vector among proposals with merged layers, if the best paths have none."""
        found = []
        for seed in range(2):
            rng = np.random.default_rng(seed)
            results = [
                at_full_budget(drawn, (0.1 if paths.merged_preference(drawn) is None else 0.5,), number)
                for number, drawn in enumerate(POOL.sample(rng) for _ in range(60))
            ]
            proposals = [
                propose(
                    SEARCHERS[name], POOL, number=number, seed=0, observations=results,
                    setting=SearchSetting(version=version),
                )
                for number in range(100, 200)
            ]  # fmt: skip
            found += [vector for vector in map(paths.merged_preference, proposals) if vector is not None]
        assert len(found) > 60
        return found.count(0) / len(found)

    assert share_of_first(1) > max(first_share, share_of_first(None))
    if name != "moead":
        assert share_of_first(None) < 0.2


def test_path_space_refuses_number_searchers() -> None:
    """A space of paths refuses searchers of numbers and gradients."""
    assert {name for name in [*ALGORITHMS, "gradient"] if not can(name, PATHS)} == {"cmaes", "gradient"}


def test_proposals_are_plain_json_values(searcher: Searcher, space: Parameters) -> None:
    configuration = propose(searcher, space, number=43, seed=0, observations=observed(space, 40))
    assert json.loads(json.dumps(configuration)) == configuration
    space.check(json.loads(json.dumps(configuration)))


@pytest.mark.parametrize("num_observations", [0, 40])
def test_proposal_is_a_pure_function(searcher: Searcher, space: Parameters, num_observations: int) -> None:
    """A proposal depends on seed, number and observations only."""
    observations = observed(space, num_observations)

    def proposal(number: int, seed: int) -> dict[str, object]:
        np.random.seed(number)  # a searcher must not look at global state
        return propose(searcher, space, number=number, seed=seed, observations=observations)

    numbers = range(40, 42)
    in_order = [proposal(number, seed=5) for number in numbers]
    assert [proposal(number, seed=5) for number in reversed(numbers)] == in_order[::-1]
    if num_observations == 0:  # results may leave one best proposal, whatever the seed
        assert [proposal(number, seed=6) for number in numbers] != in_order


def test_different_numbers_get_different_proposals(searcher: Searcher) -> None:
    observations = observed(FLAT, 40)
    proposals = [propose(searcher, FLAT, number=number, seed=0, observations=observations) for number in range(40, 44)]
    assert len({tuple(p.items()) for p in proposals}) == 4


def test_negative_and_huge_seeds_are_seeds_too(searcher: Searcher) -> None:
    for seed in (-1, 2**80):
        FLAT.check(propose(searcher, FLAT, number=0, seed=seed, observations=observed(FLAT, 20)))


@pytest.mark.parametrize("num_observations", [1, 40])
def test_failed_candidates_alone_do_not_stop_the_search(
    searcher: Searcher, space: Parameters, num_observations: int
) -> None:
    failed = [replace(o, costs=None) for o in observed(space, num_observations)]
    space.check(propose(searcher, space, number=41, seed=0, observations=failed))


@pytest.mark.parametrize("num_objectives", [1, 2])
def test_failed_candidates_among_others_do_not_stop_the_search(
    searcher_name: str, space: Parameters, num_objectives: int
) -> None:
    if not can(searcher_name, space, num_objectives):
        return
    observations = observed(space, 40, num_objectives=num_objectives)
    mixed = [o if i % 2 else replace(o, costs=None) for i, o in enumerate(observations)]
    for number in (40, 41):
        space.check(propose(SEARCHERS[searcher_name], space, number=number, seed=0, observations=mixed))


def test_equal_costs_everywhere_do_not_stop_the_search(searcher_name: str, space: Parameters) -> None:
    costs = (0.5, 0.5) if can(searcher_name, space, 2) else (0.5,)
    level = [replace(o, costs=costs) for o in observed(space, 40)]
    for number in (40, 41):
        space.check(propose(SEARCHERS[searcher_name], space, number=number, seed=0, observations=level))


def test_constraints_do_not_stop_the_search(searcher_name: str, space: Parameters) -> None:
    if unsupported(searcher_name, space, num_objectives=1, num_constraints=2):
        return
    observations = observed(space, 40)
    values = [(-1.0, -0.5), (0.25, -1.0), (1.0, 2.0)]
    for kinds in ((0, 1, 2), (1, 2), (0,)):  # some are feasible, none is, all are
        mixed = [replace(o, constraints=values[kinds[i % len(kinds)]]) for i, o in enumerate(observations)]
        mixed[7] = replace(mixed[7], costs=None, constraints=())
        space.check(propose(SEARCHERS[searcher_name], space, number=40, seed=0, observations=mixed))


def test_known_is_not_proposed_again(searcher: Searcher) -> None:
    """A known configuration is not proposed again while there is a new one."""
    parameters = Parameters([Integer("i", 0, 4), Integer("j", 0, 1)])
    every = [{"i": i, "j": j} for i in range(5) for j in (0, 1)]
    scored = [at_full_budget(configuration, (configuration["i"] / 5,), i) for i, configuration in enumerate(every[1:9])]
    for number in range(20, 22):
        proposal = propose(searcher, parameters, number=number, seed=0, observations=scored, pending=every[9:])
        assert proposal == every[0]


def test_an_exhausted_space_repeats_itself(searcher: Searcher) -> None:
    parameters = Parameters([Integer("only", 3, 3)])
    observations = [at_full_budget({"only": 3}, (0.5,), number) for number in range(40)]
    assert propose(searcher, parameters, number=43, seed=0, observations=observations) == {"only": 3}


def test_a_search_with_results_that_come_late_repeats_nothing(searcher: Searcher) -> None:
    configurations = [tuple(o.configuration.items()) for o in search(searcher, FLAT, sphere, num_trials=24, lag=7)]
    assert len(set(configurations)) == 24


def test_learning_searchers_come_first() -> None:
    """The list of searchers starts with those that learn."""
    assert [name for name in SEARCHERS if name in ("auto", "grid", "random", "smac")] == [
        "auto",
        "smac",
        "grid",
        "random",
    ]


def test_an_unknown_searcher_is_refused_by_name() -> None:
    with pytest.raises(NotFound, match=f"no algorithm 'smca'; use one of {', '.join(sorted(DECLARED))}"):
        get_searcher("smca")


def test_searchers_match_declarations() -> None:
    """Every searcher is declared, and every declaration has a searcher."""
    modules = {module.name for module in pkgutil.iter_modules(service.tune.searchers.__path__)}
    implemented = {
        name for name in modules if hasattr(importlib.import_module(f"service.tune.searchers.{name}"), "SEARCHER")
    }
    assert implemented == {name for name, declared in DECLARED.items() if declared.alias_of is None}
    assert set(SEARCHERS) == set(DECLARED)


def test_a_study_may_name_every_searcher_and_no_other() -> None:
    assert Search.model_json_schema()["properties"]["algorithm"]["enum"] == list(DECLARED)


def test_unlearning_searcher_ignores_results(searcher_name: str) -> None:
    """A searcher that learns nothing proposes the same, whatever the results."""
    observations = observed(FLAT, 40)
    others = [replace(o, costs=(-1.0 * sum(o.configuration.values()),)) for o in observations]
    proposals = [
        propose(SEARCHERS[searcher_name], FLAT, number=number, seed=0, observations=known)
        for known in (observations, others)
        for number in range(40, 43)
    ]
    assert (proposals[:3] != proposals[3:]) == DECLARED[searcher_name].learns


def test_every_searcher_is_registered_under_its_name() -> None:
    assert {"auto", "smac", "random"} <= set(SEARCHERS)
    assert all(get_searcher(name) is searcher for name, searcher in SEARCHERS.items())


def test_auto_proposes_what_smac_does() -> None:
    observations = observed(CONDITIONAL, 30, num_objectives=2)
    for number in range(3):
        proposals = [
            propose(get_searcher(name), CONDITIONAL, number=number, seed=1, observations=observations)
            for name in ("auto", "smac")
        ]
        assert proposals[0] == proposals[1]


_LIGHT = """
import sys
import service.tune.searchers
loaded = {"smac", "sklearn", "scipy", "ConfigSpace", "optuna", "cmaes", "torch", "ray"} & set(sys.modules)
assert not loaded, f"importing the searchers loads {loaded}"
"""


def in_another_process(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_the_searchers_loads_no_library() -> None:
    in_another_process(_LIGHT)


def proposals_of_all() -> dict[str, dict[str, Any]]:
    found = {}
    for name in ALGORITHMS:
        parameters = hardest_space(name)
        observations = observed(parameters, 60, num_objectives=2 if can(name, parameters, 2) else 1)
        pending = [parameters.sample(np.random.default_rng(i)) for i in range(3)]
        found[name] = propose(
            SEARCHERS[name], parameters, number=60, seed=3, observations=observations, pending=pending
        )
    return found


@pytest.mark.slow
def test_another_process_proposes_the_same() -> None:
    code = "import json; from tests.service.tune import test_searchers as t; print(json.dumps(t.proposals_of_all()))"
    assert json.loads(in_another_process(code)) == proposals_of_all()


def grouped_space(num_groups: int) -> Parameters:
    """A space like LFS: each group has a method with its own numbers."""
    parameters: list[Categorical | Float] = []
    for g in range(num_groups):
        parameters.append(Categorical(f"g{g}.method", ("task_arithmetic", "ties", "slerp")))
        for method, names in {"task_arithmetic": "lm", "ties": "lkm", "slerp": "t"}.items():
            condition = (Condition(f"g{g}.method", (method,)),)
            parameters += [Float(f"g{g}.{method}.{name}", 0.0, 1.0, conditions=condition) for name in names]
    return Parameters(parameters)


def true_cost(configuration: dict[str, object]) -> float:
    """A smooth function of the numbers that differs by method and group; task arithmetic at 0.7 is best."""
    cost = 0.0
    numbers = {name: value for name, value in configuration.items() if isinstance(value, float)}
    for name, value in configuration.items():
        if isinstance(value, str):
            group = name.split(".")[0]
            own = [number for key, number in numbers.items() if key.startswith(f"{group}.")]
            offset = {"task_arithmetic": 0.0, "ties": 0.05, "slerp": 0.15}[value]
            cost += offset + float(np.mean([(number - 0.7) ** 2 for number in own]))
    return cost / 4


def sphere(configuration: Mapping[str, Any]) -> tuple[float, ...]:
    """A cost on the space FLAT: 0 where all numbers are 0.3."""
    return (float(np.mean([(value - 0.3) ** 2 for value in configuration.values()])),)


def two_spheres(configuration: Mapping[str, Any]) -> tuple[float, ...]:
    """Costs of two objectives on the space FLAT: they are best where all numbers are 0.25 or 0.75."""
    values = np.array(list(configuration.values()))
    return tuple(float(4 * np.mean((values - best) ** 2)) for best in (0.25, 0.75))


def search(
    searcher: Searcher,
    parameters: Parameters,
    costs_of: Callable[[Mapping[str, Any]], tuple[float, ...]],
    *,
    num_trials: int,
    seed: int = 0,
    lag: int = 4,
    constraint_of: Callable[[Mapping[str, Any]], tuple[float, ...]] = lambda _: (),
) -> list[Observation]:
    """All trials of a search at full budget. Proposal n knows the results up to trial n - lag."""
    trials: list[Observation] = []
    for number in range(num_trials):
        known = max(0, number - lag)
        configuration = propose(
            searcher,
            parameters,
            number=number,
            seed=seed,
            observations=trials[:known],
            pending=[trial.configuration for trial in trials[known:]],
        )
        constraints = constraint_of(configuration)
        trials.append(at_full_budget(configuration, costs_of(configuration), number, constraints=constraints))
    return trials


LEARNING = [name for name in ALGORITHMS if DECLARED[name].learns]

# A search by one of the others takes seconds.
CHEAP = {"de", "es"}


def searching(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.slow]) for name in names]


# Trials and seeds of a search; those that fit a model for each proposal learn from fewer trials than populations do.
SIZES = {"gp": (36, 1), "smac": (60, 3), "tpe": (60, 3)}


def late_trials(name: str, costs_of: Any, **problem: Any) -> list[list[Observation]]:
    """The last third of a searcher's trials, for each seed; a slow searcher has few trials."""
    num_trials, num_seeds = SIZES.get(name, (102, 3))
    searches = (
        search(SEARCHERS[name], FLAT, costs_of, num_trials=num_trials, seed=seed, **problem)
        for seed in range(num_seeds)
    )
    return [trials[-num_trials // 3 :] for trials in searches]


def mean_cost(trials: Iterable[Observation]) -> float:
    return float(np.mean([trial.costs for trial in trials if trial.costs is not None]))


@pytest.mark.parametrize("name", searching(LEARNING))
def test_a_searcher_that_learns_beats_random_search(name: str) -> None:
    drawn = np.mean([mean_cost(trials) for trials in late_trials("random", sphere)])
    found = [mean_cost(trials) for trials in late_trials(name, sphere)]
    assert max(found) < 0.75 * drawn, (found, drawn)


@pytest.mark.parametrize("name", searching(name for name in LEARNING if can(name, FLAT, 2) and name not in SLOW))
def test_multiobjective_beats_random(name: str) -> None:
    """A searcher of several objectives comes nearer to the front than random search."""
    drawn = np.mean([mean_cost(trials) for trials in late_trials("random", two_spheres)])
    late = late_trials(name, two_spheres)
    assert np.mean([mean_cost(trials) for trials in late]) < 0.9 * drawn
    # Not to one point of it: its ends have values near 0 and 1.
    costs = np.array([trial.costs for trials in late for trial in trials])
    assert (np.ptp(costs[:, 0] - costs[:, 1]) > 0.8).all()


CONSTRAINED = [name for name in LEARNING if Feature.CONSTRAINTS in DECLARED[name].handles]


@pytest.mark.parametrize("name", searching(name for name in CONSTRAINED if name not in SLOW))
def test_a_searcher_that_learns_keeps_to_constraints(name: str) -> None:
    # The best is where the constraint is violated; 0.45 of random draws are feasible.
    late = late_trials(name, sphere, constraint_of=lambda c: (0.5 - c["w0"], c["w1"] - 0.9))
    feasible = [max(trial.constraints) <= 0 for trials in late for trial in trials]
    assert np.mean(feasible) > 0.6


@pytest.mark.slow
def test_gaussian_process_beats_random() -> None:
    """A Gaussian process satisfies constraints and comes nearer to the front."""
    # Its searches would take minutes: here it has learned from random trials.
    drawn = search(SEARCHERS["random"], FLAT, two_spheres, num_trials=40)
    known = [replace(trial, constraints=(0.5 - trial.configuration["w0"],)) for trial in drawn]
    proposals = [propose(SEARCHERS["gp"], FLAT, number=n, seed=0, observations=known) for n in (40, 41)]
    assert all(proposal["w0"] >= 0.45 for proposal in proposals), proposals
    assert np.mean([two_spheres(proposal) for proposal in proposals]) < 0.8 * mean_cost(drawn), proposals


def best_after(searcher: Searcher, *, seed: int, num_trials: int) -> float:
    """The true cost of the configuration with the best of `num_trials` noisy scores at full budget."""
    parameters = grouped_space(4)
    observations: list[Observation] = []
    for number in range(num_trials):
        configuration = propose(searcher, parameters, number=number, seed=seed, observations=observations)
        noise = np.random.default_rng([seed, number]).normal(0.0, 0.02)
        observations.append(at_full_budget(configuration, (true_cost(configuration) + float(noise),), number))
    chosen = min(observations, key=lambda observation: observation.costs or (np.inf,))
    return true_cost(dict(chosen.configuration))


@pytest.mark.parametrize(
    "name", searching(name for name in LEARNING if can(name, grouped_space(2)) and name not in ("es", "de", "moead"))
)
def test_conditional_searcher_beats_random(name: str) -> None:
    """A searcher of conditional spaces beats random search there."""
    seeds = range(3)
    found, drawn = (
        [best_after(SEARCHERS[searcher], seed=seed, num_trials=36) for seed in seeds] for searcher in (name, "random")
    )
    assert all(a < b for a, b in zip(found, drawn, strict=True)), (found, drawn)
    assert np.mean(found) < 0.7 * np.mean(drawn)


def test_low_rungs_do_not_pass_for_the_full_budget() -> None:
    # The low rung is too optimistic and points elsewhere: taken at face value, 0.75 would look best.
    parameters = Parameters([Float("x", 0.0, 1.0)])
    xs = [float(x) for x in np.linspace(0.0, 1.0, 41)]
    low = [Observation({"x": x}, 1 / 9, ((x - 0.75) ** 2,), number=i, rung=0) for i, x in enumerate(xs)]
    full = [at_full_budget({"x": x}, (0.5 + (x - 0.25) ** 2,), i) for i, x in enumerate(xs)]
    smac = SmacSearcher()
    proposals = [
        propose(smac, parameters, number=n, seed=0, observations=low + full, setting=NO_RANDOM)["x"] for n in range(10)
    ]
    assert max(abs(x - 0.25) for x in proposals) < 0.15


def test_cmaes_starts_in_the_middle_without_baselines() -> None:
    """Without a baseline, the first proposals of CMA-ES are around the middle of every range."""
    proposals = [propose(SEARCHERS["cmaes"], FLAT, number=n, seed=n) for n in range(30)]
    values = np.array([list(proposal.values()) for proposal in proposals])
    assert np.abs(values.mean(axis=0) - 0.5).max() < 0.1
    assert values.std() < 0.2


def test_a_failed_region_is_avoided() -> None:
    parameters = Parameters([Float("x", 0.0, 1.0), Float("y", 0.0, 1.0)])
    rng = np.random.default_rng(0)
    points = [parameters.sample(rng) for _ in range(60)]
    observations = [
        at_full_budget(p, None if p["x"] > 0.5 else (float((p["y"] - 0.5) ** 2),), i) for i, p in enumerate(points)
    ]
    smac = SmacSearcher()
    proposals = [
        propose(smac, parameters, number=n, seed=0, observations=observations, setting=NO_RANDOM) for n in range(20)
    ]
    assert sum(p["x"] > 0.6 for p in proposals) == 0


def test_several_objectives_are_weighed_anew_by_each_proposal() -> None:
    # Two minima at opposite ends: proposals must visit both, not one compromise.
    parameters = Parameters([Float("x", 0.0, 1.0)])
    xs = np.linspace(0.0, 1.0, 30)
    observations = [at_full_budget({"x": float(x)}, (float(x), float(1 - x)), i) for i, x in enumerate(xs)]
    smac = SmacSearcher()
    found = [
        propose(smac, parameters, number=n, seed=0, observations=observations, setting=NO_RANDOM)["x"]
        for n in range(16)
    ]
    assert min(found) < 0.3
    assert max(found) > 0.7


def test_a_proposal_with_many_results_takes_less_than_a_second() -> None:
    parameters = grouped_space(8)  # 56 dimensions
    observations = observed(parameters, 200, num_objectives=3)
    smac = SmacSearcher()
    propose(smac, parameters, number=0, seed=0, observations=observations, setting=NO_RANDOM)  # loads the libraries
    seconds = []
    for number in range(1, 6):
        start = time.process_time()
        propose(smac, parameters, number=number, seed=0, observations=observations, setting=NO_RANDOM)
        seconds.append(time.process_time() - start)
    assert max(seconds) < 1.0, seconds


def test_encoding_and_decoding_give_the_configuration_back() -> None:
    encoding = Encoding(CONDITIONAL)
    rng = np.random.default_rng(0)
    configurations = [CONDITIONAL.sample(rng) for _ in range(200)]
    for configuration, row in zip(configurations, encoding.encode(configurations), strict=True):
        assert encoding.decode(row) == pytest.approx(configuration)


@pytest.mark.parametrize("parameters", [CONDITIONAL, grouped_space(8)], ids=["conditional", "large"])
def test_known_configurations_are_found(parameters: Parameters) -> None:
    """A row is known if all its numbers are those of a configuration, even if many agree in their first columns."""
    encoding = Encoding(parameters)
    rng = np.random.default_rng(2)
    known = [parameters.sample(rng) for _ in range(50)]
    rows = encoding.encode(known)
    alike = rows.copy()
    alike[:, -2] = np.where(rows[:, -2] == INACTIVE, INACTIVE, 1 - rows[:, -2])
    alike = encoding.normalise(alike)
    listed = encoding.keys(rows)
    expected = [key in listed for key in encoding.keys(alike)]
    assert encoding.are_known(rows, known) == [True] * 50
    assert encoding.are_known(alike, known) == expected
    assert not all(expected)
    assert encoding.are_known(rows, []) == [False] * 50
    unknown = encoding.first_unknown(np.vstack([rows, alike]), known)
    assert unknown is not None
    assert np.array_equal(unknown, alike[expected.index(False)])
    assert encoding.first_unknown(rows, known) is None


def test_encoded_draws_are_uniform() -> None:
    """Encoded draws are uniform and exist only where conditions hold."""
    encoding = Encoding(CONDITIONAL)
    rows = encoding.sample(3000, np.random.default_rng(0))
    configurations = [encoding.decode(row) for row in rows]
    for configuration in configurations:
        CONDITIONAL.check(configuration)
    methods = [configuration["method"] for configuration in configurations]
    assert all(900 < methods.count(method) < 1100 for method in ("ties", "slerp", "linear"))
    repeats = [configuration["repeats"] for configuration in configurations]
    assert all(650 < repeats.count(number) < 850 for number in (1, 2, 3, 4))


def test_mutants_are_valid_neighbours() -> None:
    encoding = Encoding(CONDITIONAL)
    rng = np.random.default_rng(1)
    rows = encoding.sample(500, rng)
    mutants = encoding.mutate(rows, rng, rate=0.1, step=0.1)
    for row in mutants:
        CONDITIONAL.check(encoding.decode(row))
    both = (rows != INACTIVE) & (mutants != INACTIVE)
    assert 0.5 < np.mean((rows == mutants)[both]) < 0.95
    methods = [[encoding.decode(row)["method"] for row in table] for table in (rows, mutants)]
    assert any(a != b for a, b in zip(*methods, strict=True))
    assert np.any((mutants == 0.0) | (mutants == 1.0)), "the ends of a range, where experts pass through, are reached"


def test_tied_rows_treat_all_places_alike() -> None:
    parameters = grouped_space(3)
    roles = {name: name.split(".", 1)[1] for name in parameters.names}
    encoding = Encoding(Parameters(parameters, roles=roles))
    for row in encoding.sample_tied(50, np.random.default_rng(0)):
        by_role: dict[str, set[object]] = {}
        for name, value in encoding.decode(row).items():
            by_role.setdefault(roles[name], set()).add(value)
        assert all(len(values) == 1 for values in by_role.values()), by_role


def test_a_space_without_shared_roles_has_no_tied_rows() -> None:
    assert len(Encoding(CONDITIONAL).sample_tied(50, np.random.default_rng(0))) == 0
