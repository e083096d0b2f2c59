"""Held-out samples with pictures that only one of two merges has right: the chosen merge or a rival.

The chosen merge is the one with which held-out results are compared; its rivals are the best single model and the best
published recipe. The first such samples in the order of scoring are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from search_spaces.objectives import Objective
from search_spaces.study.file import Study
from search_spaces.study.image_suites import ENTROPY
from search_spaces.study.objectives import DescribedTask, ScoredTask
from service.results.finding import RIVALS, RivalTest
from service.results.side_by_side import side_by_side
from service.store import Store
from service.types import TrialResult
from workers.evaluation.image_responses import Response
from workers.models.modalities import modality_of_task
from workers.types import SampleResult, Split

__all__ = [
    "MAX_BYTES",
    "MAX_SHOWN",
    "Contrast",
    "PicturedSample",
    "Prediction",
    "contrasts",
    "has_pictures",
    "has_right_answers",
    "predictions",
    "section_of",
]

# Samples of one objective that are shown for each rival and direction.
MAX_SHOWN = 6
# Bytes of all pictures of a report, before they are encoded for its HTML.
MAX_BYTES = 2**20
NO_VALUES = np.empty(0)


@dataclass(frozen=True)
class Prediction:
    """A class that a model predicts for an image, and its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class PicturedSample:
    """A held-out sample, with its picture, that only one of two merges has right: the chosen merge or its rival.

    Attributes:
        position: Index of the sample in the order of scoring.
        document: Name of the sample in the task's data.
        label: The right class; None if it is not stored.
        chosen: The likeliest class for the chosen merge; None if its response is not stored.
        rival: The likeliest class for the rival; None if its response is not stored.
        picture: A WebP file; None if no picture is shown.
        is_left_out: Whether a stored picture is left out because of the limit MAX_BYTES.
    """

    position: int
    document: str
    label: str | None
    chosen: Prediction | None
    rival: Prediction | None
    picture: bytes | None
    is_left_out: bool = False


@dataclass(frozen=True)
class Contrast:
    """Held-out samples of one objective that only one of two merges has right: the chosen merge or a rival.

    A rival is the best single model or the best published recipe.

    Attributes:
        objective: Name of the objective.
        trial: Number of the chosen merge's trial.
        rival: Number of the rival's trial.
        kind: What the rival is, such as "single model".
        num_chosen, num_rival: Numbers of samples that the chosen merge alone, and the rival alone, has right.
        only_chosen, only_rival: The first samples that the chosen merge alone, and the rival alone, has right; at most
            MAX_SHOWN samples each.
    """

    objective: str
    trial: int
    rival: int
    kind: str
    num_chosen: int
    num_rival: int
    only_chosen: tuple[PicturedSample, ...]
    only_rival: tuple[PicturedSample, ...]


def has_pictures(spec: ScoredTask) -> bool:
    """Whether samples of a task of the study file have pictures."""
    task = spec.task.description() if isinstance(spec.task, DescribedTask) else spec.task
    return modality_of_task(task).has_pictures


def has_right_answers(metric: str, *, are_images: bool) -> bool:
    """Whether the best value of a metric means that the answer to a sample is right.

    The result is False only for the entropy of predictions, which is computed without labels. `are_images` says whether
    the samples are images; only images have the entropy as metric.
    """
    return not (are_images and metric == ENTROPY)


def section_of(file: Study, split: Split) -> Sequence[ScoredTask]:
    """The entries of the study file whose samples belong to `split`: search data, holdout data or benchmarks."""
    return {
        Split.SEARCH: tuple(file.scored_objectives.values()),
        Split.HOLDOUT: file.holdout,
        Split.BENCHMARK: file.benchmarks,
    }[split]


def predictions(response: str) -> tuple[Prediction, ...]:
    """Read the classes in a stored response to an image, the likeliest class first; empty for any other text."""
    try:
        top = Response.from_json(response).top
    except ValueError:
        return ()
    return tuple(Prediction(name, math.exp(logprob)) for name, logprob in top)


def contrasts(
    store: Store,
    study_id: str,
    file: Study,
    trials: Iterable[TrialResult],
    objectives: Iterable[Objective],
    *,
    chosen: int | None,
    tests: Iterable[RivalTest],
) -> tuple[Contrast, ...]:
    """Read the held-out samples on which the chosen merge differs from its rivals, for objectives with pictures.

    Objectives with the metric `entropy` are left out, because the entropy does not depend on the right answers.

    Args:
        store: Store with the study.
        study_id: Id of the study.
        file: Study file.
        trials: Trials of the study.
        objectives: Objectives of the study.
        chosen: Number of the chosen merge's trial; None before there is one.
        tests: Comparisons with the best baseline of each kind; the best baselines are the rivals.
    """
    names = [
        spec.name for spec in file.holdout if has_pictures(spec) and has_right_answers(spec.metric, are_images=True)
    ]
    rivals = [test for test in tests if test.rival != chosen]
    if chosen is None or not names or not rivals:
        return ()
    digests = {trial.number: trial.recipe.digest for trial in trials}
    known = {objective.name: objective for objective in objectives}
    values = store.sample_values(
        study_id,
        Split.HOLDOUT,
        recipes=[digests[n] for n in (chosen, *(test.rival for test in rivals))],
        objectives=names,
    )
    reader = _Reader(store, study_id)
    found = []
    for name in names:
        for test in rivals:
            a, b = (values.get(digests[number], {}).get(name, NO_VALUES) for number in (chosen, test.rival))
            lists = [side_by_side(known[name], a, b, only=only)[0] for only in ("a_only", "b_only")]
            shown = [reader.read(name, each[:MAX_SHOWN], digests[chosen], digests[test.rival]) for each in lists]
            found.append(
                Contrast(
                    name, chosen, test.rival, RIVALS[test.origin], len(lists[0]), len(lists[1]), shown[0], shown[1]
                )
            )
    return tuple(found)


class _Reader:
    """Reader of held-out samples with pictures; all pictures that it reads have together at most MAX_BYTES bytes."""

    def __init__(self, store: Store, study_id: str) -> None:
        self._store = store
        self._study_id = study_id
        self._left = MAX_BYTES

    def read(self, objective: str, positions: Sequence[int], chosen: str, rival: str) -> tuple[PicturedSample, ...]:
        """Read the samples of `objective` at `positions`, with their pictures and the predictions of two merges.

        `chosen` and `rival` are the digests of the two merges' recipes.
        """
        texts = self._store.prompts(self._study_id, Split.HOLDOUT, objective, positions)
        samples = [self._samples(digest, objective, positions) for digest in (chosen, rival)]
        found = []
        for position in positions:
            own, other = (of_recipe[position] for of_recipe in samples)
            picture = self._store.picture(self._study_id, Split.HOLDOUT, objective, position)
            is_left_out = picture is not None and len(picture) > self._left
            if picture is not None and not is_left_out:
                self._left -= len(picture)
            text = texts.get(position)
            found.append(
                PicturedSample(
                    position=position,
                    document=own.document,
                    label=None if text is None else text.reference,
                    chosen=next(iter(predictions(own.response)), None),
                    rival=next(iter(predictions(other.response)), None),
                    picture=None if is_left_out else picture,
                    is_left_out=is_left_out,
                )
            )
        return tuple(found)

    def _samples(self, digest: str, objective: str, positions: Sequence[int]) -> Mapping[int, SampleResult]:
        read = self._store.samples(
            self._study_id, digest, Split.HOLDOUT, objective=objective, positions=set(positions), has_tokens=False
        )
        return {sample.position: sample for sample in read}
