"""Batches of proposals with the same known results: one fit, and configurations computed in advance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray

from search_spaces.parameters import Float, Parameters
from search_spaces.study.search import Search, SmacOptions
from service.store.steps import NoteStep
from service.tune.proposing.ray_proposer import RayProposer
from service.tune.proposing.searcher_state import SearcherState
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from service.tune.searchers.smac import SmacSearcher
from tests.service.tune.harness import NO_RANDOM

PARAMETERS = Parameters([Float(f"w{i}", 0.0, 1.0) for i in range(4)])
FIRST = 12  # the number of baselines, and the first trial of the first batch
BATCH = replace(NO_RANDOM, num_baselines=FIRST, batch=4)


def observations(num_objectives: int = 1) -> list[Observation]:
    draw = np.random.default_rng(0)
    points = draw.random((FIRST, 4))
    return [
        Observation(
            dict(zip(PARAMETERS.names, point.tolist(), strict=True)),
            1.0,
            tuple(float(((point - best) ** 2).mean()) for best in np.linspace(0.2, 0.8, num_objectives)),
            number=number,
            rung=0,
        )
        for number, point in enumerate(points)
    ]


def context(number: int, pending: Sequence[Mapping[str, Any]], setting: SearchSetting, known: Any) -> ProposalContext:
    return ProposalContext(PARAMETERS, number=number, seed=3, observations=known, pending=pending, setting=setting)


@pytest.mark.parametrize("num_objectives", [1, 2])
def test_smac_fits_once_for_a_batch(num_objectives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMAC fits one forest for the proposals of a batch, and each proposal is a function of what it knows."""
    fits: list[int] = []
    fit = SmacSearcher._fit

    def counted(self: SmacSearcher, *given: Any, seed: int, **options: Any) -> Any:
        fits.append(seed)
        return fit(self, *given, seed=seed, **options)

    monkeypatch.setattr(SmacSearcher, "_fit", counted)
    smac: Any = SmacSearcher()
    known = observations(num_objectives)
    pending: list[dict[str, Any]] = []
    for number in range(FIRST, FIRST + 8):
        pending.append(smac.advance(context(number, pending, BATCH, known)))
    assert len(fits) == 2
    assert fits[0] != fits[1], "each batch has draws of its own"
    assert len({tuple(each.values()) for each in pending}) == 8
    # A process that starts in the middle of a batch.
    for number in (FIRST + 2, FIRST + 4):
        again = SmacSearcher().advance(context(number, pending[: number - FIRST], BATCH, known))
        assert again == pending[number - FIRST]


def test_new_results_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forest is used again for equal results only."""
    smac: Any = SmacSearcher()
    known = observations()
    first = smac.advance(context(FIRST, (), BATCH, known))
    worst = Observation(first, 1.0, (1.0,), number=FIRST, rung=0)
    told = smac.advance(context(FIRST + 1, (), BATCH, [*known, worst]))
    assert told == SmacSearcher().advance(context(FIRST + 1, (), BATCH, [*known, worst]))
    assert told != smac.advance(context(FIRST + 1, (first,), BATCH, known))


@pytest.mark.parametrize("algorithm", ["smac", "random", "tpe"])
def test_next_is_what_would_be_asked(algorithm: str) -> None:
    """The proposal after the last one is that which the driver would ask for, with the last one pending."""
    state = SearcherState(algorithm, PARAMETERS, BATCH, (), {})
    found = [state.propose(number=FIRST, seed=3, observations=observations(), pending=())]
    found += [state.propose_next() for _ in range(3)]
    for i, expected in enumerate(found):
        fresh = SearcherState(algorithm, PARAMETERS, BATCH, (), {})
        call: dict[str, Any] = {"observations": observations(), "pending": tuple(found[:i])}
        assert fresh.propose(number=FIRST + i, seed=3, **call) == expected


def test_ray_computes_a_batch_ahead(ray_cluster: None) -> None:
    """A batch on Ray has the configurations of proposals one by one, also after a note or a death in the middle."""
    setting = replace(BATCH, options=Search(smac=SmacOptions(surrogate="auto", random_share=0.0)))
    alone = SearcherState("smac", PARAMETERS, setting, (), {})
    proposer = RayProposer(algorithm="smac", parameters=PARAMETERS, seed=3, setting=setting)
    low = replace(observations()[0], fidelity=0.5, number=-1)  # with two rungs, SMAC has a choice to note
    known: tuple[Observation, ...] = (low, *observations())
    noted = []
    pending: tuple[Any, ...] = ()
    for number in range(FIRST, FIRST + 8):
        call: dict[str, Any] = {"number": number, "observations": known, "pending": pending}
        proposer.submit(**call)
        if number == FIRST + 5:
            ray.kill(proposer._searcher)
        expected = alone.propose(seed=3, **call)
        if isinstance(step := proposer.result(timeout_s=120.0), NoteStep):
            noted.append(number)
            assert step.request == expected
            proposer.stored(step)
            expected = alone.propose_after(step, seed=3, **call)
            step = proposer.result(timeout_s=120.0)
        answer = step
        assert answer == expected
        pending = (*pending, answer)
        if number == FIRST + 1:  # a result that the process could not know
            known = (*known, Observation(pending[0], 1.0, (0.5,), number=FIRST, rung=0))
    assert proposer._message()["observations"] == list(range(FIRST + 2)), "every result is sent once to a process"
    assert noted == [FIRST], "a note is stored once, also if the process died later"
