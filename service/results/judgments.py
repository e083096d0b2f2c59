"""Win rates from the judgments of a benchmark's judge, which is a language model.

A completion is judged twice, as the first and as the second of two answers, because judges tend to prefer the answer at
one of the two positions (Zheng et al., 2023, "Judging LLM-as-a-judge with MT-Bench and Chatbot Arena"). The value of a
sample is the mean of both preferences, and the win rate is the mean over samples. Answers of the judge without a
verdict count as ties. The win rate is AlpacaEval's plain win rate, not its length-controlled win rate. The mean lengths
of completions are shown in addition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.store import JudgmentRecord

__all__ = ["Judged", "judged_recipes"]

# Largest share of the judge's answers without a verdict.
MAX_WITHOUT_VERDICT = 0.1

# Characters of a judge's answer that a message quotes.
QUOTED = 200


@dataclass(frozen=True)
class Judged:
    """A judge's preferences for one recipe's completions, in comparison with reference answers.

    Each completion was judged twice: as the first and as the second of the two answers in the judge's prompt.

    Attributes:
        values: Preference for the completion of each sample, in [0, 1], as an array [num_samples].
        agreement: Share of the samples on which both orders gave the same preference.
        first: Share of the judge's decisions (verdicts that are not ties) for the answer that came first in the prompt.
            The share is 0.5 without decisions. A share far from 0.5 means that the judge prefers a position.
        num_without_verdict: Number of the judge's answers without a verdict.
        models: Names of the models that judged, as the endpoint reported them.
        problem: Reason why the values are not reported; None if the values are reported.
    """

    values: NDArray[np.float64]
    agreement: float
    first: float
    num_without_verdict: int
    models: tuple[str, ...]
    problem: str | None


def judged_recipes(judgments: Iterable[JudgmentRecord], *, num_samples: int) -> Mapping[str, Judged]:
    """Compute a judge's preferences for each recipe's completions on one benchmark, keyed by recipe digest.

    The judge is a language model that compares each completion twice with a reference answer; `judgments` are its
    stored answers. `num_samples` is the number of the benchmark's samples. Recipes of which a judgment is missing are
    left out.
    """
    by_recipe: dict[str, list[JudgmentRecord]] = defaultdict(list)
    for judgment in judgments:
        by_recipe[judgment.recipe_digest].append(judgment)
    return {digest: _judged(found, num_samples) for digest, found in by_recipe.items() if len(found) == 2 * num_samples}


def _judged(judgments: list[JudgmentRecord], num_samples: int) -> Judged:
    preferences = np.full((num_samples, 2), np.nan)
    for judgment in judgments:
        if judgment.preference is not None:
            preferences[judgment.position, int(judgment.is_swapped)] = judgment.preference
    without = [judgment for judgment in judgments if judgment.preference is None]
    verdicts = preferences[~np.isnan(preferences)]
    prefers_first = np.where([True, False], preferences == 1, preferences == 0)
    return Judged(
        values=np.where(np.isnan(preferences), 0.5, preferences).mean(axis=1),
        agreement=float(np.mean(preferences[:, 0] == preferences[:, 1])),
        first=float(prefers_first.sum() / (verdicts != 0.5).sum()) if np.any(verdicts != 0.5) else 0.5,
        num_without_verdict=len(without),
        models=tuple(sorted({judgment.model for judgment in judgments})),
        problem=_problem(without, len(judgments)),
    )


def _problem(without: list[JudgmentRecord], count: int) -> str | None:
    if len(without) <= MAX_WITHOUT_VERDICT * count:
        return None
    first = without[0]
    return (
        f"{len(without)} of {count} answers of the judge {first.model} have no verdict [[1]], [[2]] or [[tie]], such "
        f"as {first.answer[:QUOTED]!r}; use another judge, prompt or max_tokens, in a benchmark of another name"
    )
