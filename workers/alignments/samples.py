"""The search samples from which alignments are learned, and the prompts of these samples.

The samples are the first tenth of the search samples, as in HM3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from search_spaces.study.engine import EngineOptions
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.types import TaskSpec

__all__ = ["MIN_SAMPLES", "SHARE", "lack_of_samples", "positions_of", "prompts_of"]

SHARE = 0.1

# Eight samples to learn from and two held out.
MIN_SAMPLES = 10


def positions_of(num_samples: Mapping[str, int]) -> dict[str, range]:
    """Positions of the search samples from which alignments are learned: the first tenth of each objective's samples.

    An alignment is a map of the residual stream between two layers. Search samples are the samples on which a study
    scores its trials. `num_samples` is each objective's number of search samples.
    """
    return {name: range(math.ceil(SHARE * num)) for name, num in num_samples.items()}


def lack_of_samples(num_samples: Mapping[str, int]) -> str | None:
    """Reason why a study has too few search samples for learning alignments; None if it has enough.

    An alignment is a map of the residual stream between two layers. Search samples are the samples on which a study
    scores its trials. `num_samples` is each objective's number of search samples. Alignments are learned from a tenth
    of the search samples; this tenth must be at least MIN_SAMPLES samples over all objectives.
    """
    found = sum(len(positions) for positions in positions_of(num_samples).values())
    if found >= MIN_SAMPLES:
        return None
    total = sum(num_samples.values())
    needed = math.ceil(MIN_SAMPLES / SHARE)
    return (
        f"alignments are learned from {SHARE:.0%} of the search samples, here {found} of {total}; they need at least "
        f"{MIN_SAMPLES}: give {needed} search samples or more, or alignment: none"
    )


def prompts_of(
    family_dir: str, options: EngineOptions, tasks: Mapping[str, TaskSpec], positions: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token ids of one prompt for each sample of every objective, for learning alignments between layers.

    `tasks` has the task of each objective, and `positions` has the positions of its samples. `family_dir` is the
    directory of the models' tokenizer and configuration, and `options` has the settings that prompts depend on, such as
    the chat template. For multiple choice, the prompt of the first option is used. Raises InvalidTask if a task cannot
    be built.
    """
    evaluator = TaskEvaluator(None, Prompts(family_dir, options))
    return tuple(evaluator.requests(tasks[name], at)[0].tokens for name, each in positions.items() for at in each)
