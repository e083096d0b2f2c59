"""Searchers that learn from a part of many results, or draw fewer candidates; and studies of earlier versions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from search_spaces.parameters import Float, Parameters
from search_spaces.searchers import SEARCHERS as DECLARED
from service.errors import Conflict
from service.resolved_study import ResolvedStudy
from service.studies.preflight.models import check_unchanged
from service.tune.searchers import SEARCHERS
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from service.tune.searchers.gp import SEARCHER as GP
from service.tune.searchers.gp import GpSearcher
from service.tune.searchers.history import thinned
from service.types import JobRecord, JobState
from tests.service.resolved import resolved_study
from tests.service.tune.harness import propose

PARAMETERS = Parameters([Float(f"p{number}", 0.0, 1.0) for number in range(4)])
THINNING = sorted(
    name for name, searcher in SEARCHERS.items() if hasattr(searcher, "max_numbers") and not DECLARED[name].alias_of
)


def observations(num_trials: int, *, num_rungs: int = 1) -> tuple[Observation, ...]:
    """Trials with random costs. With several rungs, two of every three trials are stopped at the first rung."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(num_trials):
        configuration = dict(zip(PARAMETERS.names, rng.random(4).tolist(), strict=True))
        for rung in range(num_rungs if number % 3 == 0 else 1):
            costs = tuple(rng.random(2).tolist())
            found.append(Observation(configuration, (rung + 1) / num_rungs, costs, number=number, rung=rung))
    return tuple(found)


def context(num_trials: int, *, version: int | None = None, num_rungs: int = 1, seed: int = 5) -> ProposalContext:
    return ProposalContext(
        PARAMETERS,
        number=num_trials,
        seed=seed,
        observations=observations(num_trials, num_rungs=num_rungs),
        setting=SearchSetting(objectives=("a", "b"), version=version),
    )


def numbers(found: ProposalContext) -> list[int]:
    return sorted({observation.number for observation in found.observations})


def test_few_observations_are_kept_as_they_are() -> None:
    """A table within the limits is not changed, whatever the version."""
    given = context(25)
    assert thinned(given, max_numbers=100) is given
    assert thinned(given, max_numbers=99) is not given
    assert thinned(given, max_numbers=10_000, max_rows=24) is not given
    old = context(25, version=1)
    assert thinned(old, max_numbers=8, max_rows=2) is old


def test_the_newest_and_the_best_trials_are_kept() -> None:
    """Half of the kept trials are the newest, the others the best before them, with all their rungs."""
    given = context(90, num_rungs=3)
    found = thinned(given, max_numbers=40 * 4)
    kept = numbers(found)
    assert len(found.observations) <= 60
    newest = [number for number in kept if number >= 90 - len(kept) // 2]
    assert newest == list(range(90 - len(kept) // 2, 90))
    best = [number for number in kept if number not in newest]
    assert len(best) == len(newest)
    assert {number % 3 for number in best} == {0}  # only these reached the last rung
    assert found.observations == tuple(o for o in given.observations if o.number in set(kept))
    better = min(given.observations, key=lambda o: (-o.rung, o.costs))
    assert better.number in kept


@pytest.mark.parametrize(("version", "has_failures"), [(None, False), (4, False), (3, True), (2, True)])
def test_failed_trials_are_left_out_first(version: int | None, has_failures: bool) -> None:
    """A failure, which is stored with the last rung, is no better than a trial stopped at the first rung."""
    given = context(90, num_rungs=3, version=version)
    completed, failed, stopped = (set(range(first, 60, 3)) for first in range(3))
    found = tuple(replace(o, costs=None, rung=2, fidelity=1.0) if o.number in failed else o for o in given.observations)
    kept = set(numbers(thinned(replace(given, observations=found), max_numbers=100 * 4)))
    assert kept >= completed | set(range(60, 90))
    assert (len(kept & failed), len(kept & stopped)) == ((10, 0) if has_failures else (0, 10))


def test_groups_of_trials_stay_whole() -> None:
    """Generations of 20 begin where they did among the newest trials, and whole ones come before them."""
    kept = numbers(thinned(context(207), max_numbers=90 * 4, group=20))
    newest = [number for number in kept if number >= 160]
    assert newest == list(range(160, 207))
    assert len(kept) - len(newest) == 40


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "gp")) for n in THINNING])
def test_studies_keep_the_rule_they_began_with(name: str) -> None:
    """Version 1 learns from all observations, a new study from a part of many; of few they propose the same."""
    small: Any = replace(SEARCHERS[name], max_numbers=30 * 4)  # type: ignore[type-var]
    unlimited: Any = replace(SEARCHERS[name], max_numbers=10**9)  # type: ignore[type-var]
    seeds = range(1) if name == "gp" else range(8)  # candidates of one seed may all come from trials that are kept

    def proposals(searcher: Any, num_trials: int, version: int | None) -> list[dict[str, Any]]:
        given = [context(num_trials, version=version, seed=seed) for seed in seeds]
        return [propose(searcher, PARAMETERS, **{f: getattr(each, f) for f in FIELDS}) for each in given]

    assert proposals(small, 30, None) == proposals(unlimited, 30, 1)
    old = proposals(small, 70, 1)
    assert old == proposals(unlimited, 70, None)
    assert old != proposals(small, 70, None)


def test_gp_draws_fewer_candidates_in_large_spaces() -> None:
    """A study of the version before keeps the number of candidates; in a small space it is the same."""
    large = replace(GP, max_small=3, num_candidates_in_large=16)

    def proposals(searcher: GpSearcher, version: int | None) -> list[dict[str, Any]]:
        given = [context(12, version=version, seed=seed) for seed in range(3)]  # from some, all lead to one maximum
        return [propose(searcher, PARAMETERS, **{f: getattr(each, f) for f in FIELDS}) for each in given]

    before = proposals(GP, 2)
    assert proposals(GP, None) == before
    assert proposals(large, 2) == before
    assert proposals(large, None) != before


FIELDS = ("number", "seed", "observations", "setting")


def test_a_study_stores_the_version_of_its_searcher() -> None:
    """The version is stored; a study without one, of an earlier program, has version 1."""
    assert THINNING == ["gp", "nsga2", "nsga3", "smac", "tpe"]
    stored = resolved_study(algorithm="smac", searcher_version=2).to_json()
    assert ResolvedStudy.from_json(stored).searcher_version == 2
    del stored["searcher_version"]
    assert ResolvedStudy.from_json(stored).searcher_version == 1


def test_a_later_version_is_refused_by_name() -> None:
    """A study of a searcher that this program has only in an earlier version does not continue."""
    resolved = resolved_study(algorithm="smac", searcher_version=9)
    job = JobRecord("1", "merge-code", JobState.STOPPED, {}, resolved.to_json(), 0.0, "search")
    message = "'merge-code': was created with version 9 of the searcher smac, this program has versions up to 4"
    with pytest.raises(Conflict, match=message):
        check_unchanged(job, resolved)
    known = resolved_study(algorithm="smac", searcher_version=1)
    check_unchanged(replace(job, accepted=known.to_json()), known)
