"""Options of SMAC's forest, above all the results from which it learns: those of all rungs or of the highest budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from smac.acquisition.function.expected_improvement import EI
from smac.model.random_forest.random_forest import RandomForest
from smac.runhistory.encoder.log_scaled_encoder import RunHistoryLogScaledEncoder

from search_spaces.parameters import Float, Parameters
from search_spaces.study.search import Search, SmacOptions
from service.store.steps import NoteRequest, NoteResult, NoteStep, Step, step_of
from service.tune.proposing.searcher_state import SearcherState
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from service.tune.searchers.gradient import SEARCHER as GRADIENT
from service.tune.searchers.loss_comparison import NOT_USED
from service.tune.searchers.rung_choice import MIN_RESULTS, chosen, highest_rung
from service.tune.searchers.smac import SEARCHER as SMAC
from service.tune.searchers.smac import SmacSearcher, _columns, _log_scaled
from tests.service.tune.harness import propose

PARAMETERS = Parameters([Float(f"x{i}", 0.0, 1.0) for i in range(4)])
BEST, ELSEWHERE = np.full(4, 0.3), np.full(4, 0.8)
NUMBER = 1000  # of the proposal; no trial has it


def setting(**options: Any) -> SearchSetting:
    smac = SmacOptions(**{"random_share": 0.0, "surrogate": "auto", **options})
    return SearchSetting(objectives=("a",), options=Search(smac=smac))


def trials(num_full: int, num_low: int = 40, *, low: Any = BEST, seed: int = 0) -> list[Observation]:
    """Results at the full budget, best at BEST, and more at a lower rung, best at `low`; costs have no noise."""
    rng = np.random.default_rng(seed)
    found = []
    for number, best in enumerate([BEST] * num_full + [low] * num_low):
        point, rung = rng.random(4), int(number < num_full)
        cost = float(((point - best) ** 2).mean())
        configuration = dict(zip(PARAMETERS.names, point.tolist(), strict=True))
        found.append(Observation(configuration, (1 / 9, 1.0)[rung], (cost,), number=number, rung=rung))
    return found


def answer_of(known: Sequence[Observation], steps: Sequence[Step] = (), **given: Any) -> Any:
    context = ProposalContext(PARAMETERS, number=NUMBER, seed=1, observations=known, steps=steps)
    return SMAC.advance(replace(context, setting=given.get("setting", setting())))


def noted(*requests: NoteRequest) -> list[Step]:
    return [step_of(number, NUMBER, request, NoteResult()) for number, request in enumerate(requests)]


@pytest.mark.parametrize(("low", "choice"), [(BEST, "all_rungs"), (ELSEWHERE, "highest_budget")])
def test_rungs_are_used_if_they_help(low: Any, choice: str) -> None:
    """The forest learns from lower rungs where they help to predict the full budget, and the note says so."""
    note = answer_of(trials(32, low=low))
    assert note.decision == f"{choice} 32"
    words = {"all_rungs": "from all rungs (", "highest_budget": "from the full budget alone ("}
    assert note.label.startswith(f"smac learns {words[choice]}rank correlation of predictions with 32 results at the")
    assert chosen(noted(note)) == (choice, 32)


def test_choice_is_made_again_at_twice_the_results() -> None:
    """The first note says what is awaited; a choice is due at MIN_RESULTS results and whenever they have doubled."""
    first = answer_of(trials(MIN_RESULTS - 1))
    assert (first.decision, first.label) == (
        "all_rungs 0",
        "smac learns from all rungs until 16 results at the full budget are known",
    )
    steps = noted(first)
    assert isinstance(answer_of(trials(MIN_RESULTS - 1), steps), dict)
    second = answer_of(trials(MIN_RESULTS), steps)
    assert isinstance(second, NoteRequest)
    steps = noted(first, second)
    assert isinstance(answer_of(trials(2 * MIN_RESULTS - 1, low=ELSEWHERE), steps), dict)
    third = answer_of(trials(2 * MIN_RESULTS, low=ELSEWHERE), steps)
    assert third.decision == "highest_budget 32"
    assert chosen(noted(first, second, third)) == ("highest_budget", 32)


def test_a_choice_holds_until_the_next() -> None:
    """A stored choice decides what is learned from, not what would be chosen now."""
    known = trials(32, low=ELSEWHERE)
    proposals = [
        answer_of(known, noted(NoteRequest(label="", decision=f"{choice} 32")))
        for choice in ("all_rungs", "highest_budget")
    ]
    fixed = [
        propose(SMAC, PARAMETERS, number=NUMBER, seed=1, observations=known, setting=setting(surrogate=choice))
        for choice in ("all_rungs", "highest_budget")
    ]
    assert proposals == fixed
    assert proposals[0] != proposals[1]


def test_highest_budget_ignores_lower_rungs() -> None:
    """With highest_budget, results at lower rungs change no proposal; with all_rungs they do."""

    def proposal(surrogate: str, low: Any) -> Any:
        return propose(
            SMAC,
            PARAMETERS,
            number=NUMBER,
            seed=1,
            observations=trials(20, low=low),
            setting=setting(surrogate=surrogate),
        )

    # The configurations of the lower rung are the same, so the candidates are too.
    assert proposal("highest_budget", BEST) == proposal("highest_budget", ELSEWHERE)
    assert proposal("all_rungs", BEST) != proposal("all_rungs", ELSEWHERE)


def test_the_highest_rung_has_enough_results() -> None:
    """The highest rung with enough results counts; failures are no results."""
    fidelities = np.array([1 / 9] * 9 + [1 / 3] * 8 + [1.0] * 8)
    is_scored = np.ones(25, dtype=bool)
    assert highest_rung(fidelities, is_scored, min_results=8) == 1.0
    is_scored[-1] = False
    assert highest_rung(fidelities, is_scored, min_results=8) == 1 / 3
    assert highest_rung(fidelities, is_scored, min_results=9) == 1 / 9
    assert highest_rung(fidelities, is_scored, min_results=10) is None


def test_the_option_is_noted_once() -> None:
    """A study says what it learns from also where its file says so; one with a single rung has nothing to say."""
    given = setting(surrogate="highest_budget")
    note = answer_of(trials(20), setting=given)
    assert note.label == "smac learns from the highest rung with enough results: search.smac.surrogate=highest_budget"
    assert isinstance(answer_of(trials(20), noted(note), setting=given), dict)
    assert isinstance(answer_of(trials(20, 0)), dict)


def test_all_rungs_are_the_default() -> None:
    """A study file without the option, as in earlier versions, learns from all rungs and notes nothing."""
    known = trials(32, low=ELSEWHERE)
    default = SearchSetting(objectives=("a",), options=Search(smac=SmacOptions(random_share=0.0)))
    before = answer_of(known, setting=default)
    assert before == answer_of(known, setting=setting(surrogate="all_rungs"))
    assert before != propose(SMAC, PARAMETERS, number=NUMBER, seed=1, observations=known, setting=setting())


def test_smac_in_place_of_gradients_chooses_too() -> None:
    """Where gradients are not used, SMAC notes its choice after the decision on gradients."""
    known = trials(32, low=ELSEWHERE)
    steps = noted(NoteRequest(label="", decision=NOT_USED))
    context = ProposalContext(PARAMETERS, number=NUMBER, seed=1, observations=known, steps=steps, setting=setting())
    note = GRADIENT.advance(context)
    assert isinstance(note, NoteRequest)
    assert note.decision == "highest_budget 32"
    again = replace(context, steps=noted(*(step.request for step in steps if isinstance(step, NoteStep)), note))
    assert isinstance(GRADIENT.advance(again), dict)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_share_of_random_proposals(share: float) -> None:
    """random_share is the share of proposals that ignore all results."""
    contexts = [
        ProposalContext(PARAMETERS, number=n, seed=1, observations=trials(20, 0), setting=setting(random_share=share))
        for n in range(30, 40)
    ]
    drawn = []
    for context in contexts:
        rng = context.generator()
        rng.random()
        drawn.append(SmacSearcher().advance(context) == context.sample_unseen(rng))
    assert drawn == [share == 1.0] * 10


def test_logarithms_are_smacs() -> None:
    """Costs are scaled before their logarithm as SMAC's encoder does, and the forest and function are SMAC's for it."""
    known = trials(40, 0)
    costs = np.array([observation.costs for observation in known])[:, 0]
    shares = (costs - costs.min()) / np.ptp(costs)
    encoder = RunHistoryLogScaledEncoder.__new__(RunHistoryLogScaledEncoder)
    encoder._min_y, encoder._max_y = np.array([shares.min()]), np.array([shares.max()])
    encoder._percentile = np.array([np.percentile(shares, 5)])
    np.testing.assert_allclose(_log_scaled(shares), encoder.transform_response_values(shares), rtol=1e-9)

    rows = np.array([list(observation.configuration.values()) for observation in known])
    found = SMAC._fit(rows, np.ones(40), _log_scaled(shares), is_log=True, seed=3)
    with_fidelity = np.column_stack([rows, np.ones(40)])
    forest = RandomForest(
        _columns(5), log_y=True, seed=3, n_trees=10, ratio_features=1.0, min_samples_leaf=1, min_samples_split=2,
        max_leaf_nodes=None, n_jobs=1,
    )  # fmt: skip
    forest.train(with_fidelity, _log_scaled(shares)[:, None])
    function = EI(log=True)
    function.update(model=forest, eta=float(forest.predict_marginalized(with_fidelity)[0].min()))
    further = np.random.default_rng(5).random((200, 4))
    np.testing.assert_allclose(found(further), function._compute(np.column_stack([further, np.ones(200)]))[:, 0])
    plain = SMAC._fit(rows, np.ones(40), shares, is_log=False, seed=3)
    assert not np.array_equal(np.argsort(plain(further)), np.argsort(found(further)))


def test_log_improvement_proposes_near_the_best() -> None:
    """Proposals by log_ei differ from those by ei, and are near the best."""
    known = trials(60, 0)
    found = {
        name: [
            propose(SMAC, PARAMETERS, number=n, seed=1, observations=known, setting=setting(acquisition=name))
            for n in range(60, 66)
        ]
        for name in ("ei", "log_ei")
    }
    assert found["ei"] != found["log_ei"]
    distances = [np.mean((np.array(list(p.values())) - BEST) ** 2) for p in found["log_ei"]]
    assert np.mean(distances) < 0.5 * np.mean([observation.costs for observation in known])


def test_a_batch_waits_for_a_note() -> None:
    """In a batch, the proposals that were computed before a note was stored are the note again."""
    known = trials(32)
    state = SearcherState("smac", PARAMETERS, replace(setting(), batch=3), (), {})
    call: dict[str, Any] = {"number": NUMBER, "seed": 1, "observations": known, "pending": ()}
    note = state.propose(**call)
    assert isinstance(note, NoteRequest)
    assert state.propose_next() == note
    (step,) = noted(note)
    first = state.propose_after(step, **call)
    assert isinstance(first, dict)
    assert isinstance(state.propose_next(), dict)
