"""The choice of the results from which a surrogate model learns: results at all rungs, or at the highest rung alone.

Lower rungs have many results at little cost. These results help if they order configurations in the same way as results
at the full budget (all samples); otherwise they mislead. Therefore the two choices are compared by cross-validation:
for each choice, a model predicts the full-budget results of trials that it was not fitted to. A choice is stored as a
step of the search, and is made again whenever the number of trials with results at the full budget has doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from service.store.steps import NoteRequest, NoteStep, Step
from service.tune.searchers.encoding import Rows
from service.tune.searchers.loss_comparison import rank_correlation

__all__ = ["MIN_RESULTS", "RungChoice", "choice_of", "chosen", "highest_rung"]

RungChoice: TypeAlias = Literal["all_rungs", "highest_budget"]

# With fewer results at the full budget than this, the choices are not compared, and the model learns from all rungs.
MIN_RESULTS = 16

NUM_FOLDS = 5

# From rows, fidelities and costs that a model learns from, and further rows: their predicted costs at the full budget.
Predict: TypeAlias = Callable[[Rows, Rows, Rows, Rows], Rows]


def chosen(steps: Sequence[Step]) -> tuple[RungChoice, int] | None:
    """The last stored choice of the results from which the searcher's surrogate model learns; None if there is none.

    The choice is "all_rungs" (results on any number of samples) or "highest_budget" (only results on all samples). The
    second value is the number of results on all samples that were known when the choice was made. `steps` are the
    searcher's stored steps, among which are its choices.
    """
    for step in reversed(steps):
        if isinstance(step, NoteStep):
            name, _, count = step.request.decision.partition(" ")
            for choice in get_args(RungChoice):
                if name == choice:
                    return choice, int(count)
    return None


def choice_of(
    numbers: Rows, rows: Rows, fidelities: Rows, costs: Rows, *, last: int | None, predict: Predict
) -> NoteRequest | None:
    """Choose whether the surrogate model learns from results at all rungs, or only from results at the full budget.

    A rung is a number of samples at which trials are compared; the full budget is the last rung, which has all samples.
    Returns a request to store the choice, or None if no new choice is due. Below MIN_RESULTS results at the full
    budget, the model learns from all rungs. The first comparison is made when MIN_RESULTS such results are known, and
    the next comparison is made whenever their number has doubled. In a comparison, a model is fitted to each of the two
    choices of results, and predicts results that it was not fitted to. The choice with the larger rank correlation of
    predictions and results is chosen. If the two correlations are equal, the model learns from all rungs.

    - `numbers`, `rows`, `fidelities`, `costs`: trial number, encoded configuration, fidelity (share of the full budget)
      and cost of each result
    - `last`: the number of results at the full budget that the last choice was made from; None before the first choice
    - `predict`: fits a model and predicts costs with it
    """
    is_full = fidelities == 1.0
    count = int(is_full.sum())
    if count < MIN_RESULTS:
        text = f"until {MIN_RESULTS} results at the full budget are known"
        return _note("all_rungs", 0, f"from all rungs {text}") if last is None else None
    if last is not None and count < max(MIN_RESULTS, 2 * last):
        return None
    indices = np.flatnonzero(is_full)
    folds = np.arange(count) % NUM_FOLDS
    predicted = np.empty((2, count))
    for fold in range(NUM_FOLDS):
        left_out = indices[folds == fold]
        is_kept = ~np.isin(numbers, numbers[left_out])
        for choice, is_used in enumerate((is_kept, is_kept & is_full)):
            known = (rows[is_used], fidelities[is_used], costs[is_used])
            predicted[choice, folds == fold] = predict(*known, rows[left_out])
    results = costs[indices].tolist()
    of_all, of_full = (rank_correlation(each.tolist(), results) for each in predicted)
    text = f"rank correlation of predictions with {count} results at the full budget"
    if of_full > of_all:
        text += f": {of_full:.2f}, and {of_all:.2f} with lower rungs"
        return _note("highest_budget", count, f"from the full budget alone ({text})")
    return _note("all_rungs", count, f"from all rungs ({text}: {of_all:.2f}, and {of_full:.2f} without lower rungs)")


def highest_rung(fidelities: Rows, is_scored: Rows, *, min_results: int) -> float | None:
    """Fidelity of the highest rung with results of at least `min_results` trials; None if no rung has them.

    A rung is a number of samples at which trials are compared, and its fidelity is the share of all samples.
    `fidelities` has the fidelity of each result, and `is_scored` is False for a trial that failed.
    """
    known = fidelities[is_scored]
    enough = [fidelity for fidelity in np.unique(known) if np.count_nonzero(known == fidelity) >= min_results]
    return max(enough, default=None)


def _note(choice: RungChoice, count: int, text: str) -> NoteRequest:
    return NoteRequest(label=f"smac learns {text}", decision=f"{choice} {count}")
