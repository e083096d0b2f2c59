"""The losses of merges of trained experts.

Paper: "MergOPT: A merge-aware optimizer for robust model merging", figure 2 (the joint loss over two coefficients),
table 1 (merge methods by optimizer). Losses are computed on the reference answers of the experts' evaluation tasks, in
nats per token of an answer, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from search_spaces.recipe import Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.evaluation.references import References, Target, lack_of_references
from workers.file_access import FileAccess
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into
from workers.models.family import open_family
from workers.models.remote import locate
from workers.training.finetuning.data import writes_chats
from workers.training.finetuning.spec import FinetuneSpec, task_of
from workers.training.losses import minibatches, sample_losses
from workers.training.model import TrainableModel
from workers.types import Placement, TaskSpec

__all__ = [
    "Candidate",
    "Landscape",
    "MergeLoss",
    "MergeLosses",
    "candidates",
    "lack_of_losses",
    "landscape",
    "losses_of_experts",
    "merge_table",
]

# The coefficients of both experts in figure 2.
GRID = tuple(round(0.1 * i, 1) for i in range(11))
TASK_ARITHMETIC = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TIES_SCALES = (0.3, 0.5, 0.7, 1.0)
TIES_KEEP = 0.2
DARE_DENSITY = 0.5
WUDI_SCALE = 1.0

# The number of a fleet's first experts of which all pairs are merged too.
IN_PAIRS = 4

MAX_TOKENS = 4096  # in one forward pass


@dataclass(frozen=True)
class Landscape:
    """The sum of two experts' losses for merges with a grid of coefficients.

    The merge of losses[i][j] is the base plus `coefficients`[i] times the first expert's task vector and
    `coefficients`[j] times the second's. An expert's loss is the loss on this expert's tasks.
    """

    experts: tuple[str, str]
    coefficients: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]


class Candidate(NamedTuple):
    """A merge of experts by a published method, with one of the coefficients that are compared.

    `method` is the method's name in tables. `coefficient` is None for a method without a coefficient.
    """

    method: str
    coefficient: float | None
    merge: Merge


@dataclass(frozen=True)
class MergeLoss:
    """The losses of merges of `num_experts` experts by one method, at the method's best coefficient.

    The losses are means over all sets of this number of experts that are merged. The best coefficient is the one with
    the lowest mean loss over the merged experts' tasks.

    - `losses`: the loss on each expert's evaluation tasks, by the expert's alias
    - `mean`: the mean of `losses`
    - `spread`: the standard deviation of `mean` over the coefficients that were tried for the method
    - `coefficient`: the best coefficient, or None for a method without a coefficient
    """

    method: str
    num_experts: int
    coefficient: float | None
    losses: Mapping[str, float]
    mean: float
    spread: float


class MergeLosses:
    """Measures the losses of merges of trained experts, on each expert's tasks.

    The first `samples` samples of each task are used. `directories` and `tasks` have each expert's directory and tasks,
    by alias. `chats` are the aliases of the experts on whose tasks prompts are formatted with the chat template.
    `max_length` is the largest number of tokens in a text. Raises InvalidModel if a model cannot be used, and
    InvalidTask for a sample without a reference answer.
    """

    def __init__(
        self,
        base: Path,
        directories: Mapping[str, Path],
        tasks: Mapping[str, Sequence[TaskSpec]],
        *,
        samples: int,
        max_length: int,
        chats: Container[str] = (),
    ) -> None:
        family = open_family(base, directories)
        self._bank = Bank(family, Placement.MAPPED)
        self._model = TrainableModel(self._bank, torch.float32, device=self._bank.device)
        self._base = self._bank.sources.base_alias
        self._num_layers = self._bank.view(self._base).layout.num_layers
        self._fingerprints = {model.alias: model.fingerprint for model in family.models}
        self._targets: dict[str, list[tuple[Target, ...]]] = {}
        self._units = {}
        for alias, own in tasks.items():
            options = EngineOptions(max_model_len=max_length, chat_template=alias in chats)
            references = References(TaskEvaluator(None, Prompts(self._bank.sources.result_dir, options)))
            self._targets[alias] = [references.targets(task)[:samples] for task in own]
            self._units[alias] = [references.unit(task) for task in own]

    def of(self, merge: Merge) -> dict[str, float]:
        """The mean loss of a merge on the tasks of each merged expert, by the expert's alias."""
        recipe = Recipe.uniform(
            merge, models=self._fingerprints, base=self._base, num_layers=self._num_layers
        ).canonical()
        return self._of_recipe(recipe, [source.model for source in merge.sources])

    @torch.inference_mode()
    def _of_recipe(self, recipe: Recipe, experts: Sequence[str]) -> dict[str, float]:
        merge_into(recipe, self._bank, self._model.memory)
        found = {}
        for alias in experts:
            tasks = zip(self._targets[alias], self._units[alias], strict=True)
            means = [self._mean(targets) / unit for targets, unit in tasks if targets]
            found[alias] = sum(means) / len(means)
        return found

    def _mean(self, targets: Sequence[Target]) -> float:
        total = 0.0
        for indices in minibatches(targets, MAX_TOKENS):
            total += float(sample_losses(self._model, [targets[i] for i in indices]).sum())
        return total / len(targets)


def lack_of_losses(
    experts: Mapping[str, FinetuneSpec], *, access: FileAccess | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the losses of merges of a fleet's experts cannot be measured, each with an expert's alias.

    Nothing is yielded for a single expert, whose merges are never measured. `access` limits the files that tasks may
    use, or is None for no limit.
    """
    for alias, spec in experts.items() if len(experts) > 1 else ():
        if spec.evaluation is None:
            yield alias, "has no evaluation; losses of merges are those of its reference answers"
            continue
        for each in spec.evaluation.objectives:
            try:
                lack = lack_of_references(task_of(each, seed=spec.seed, access=access))
            except InvalidTask as error:
                lack = str(error)
            if lack is not None:
                yield (
                    alias,
                    f"objective {each.name!r} has no reference answers, to measure merges by: {lack}",
                )


def losses_of_experts(
    experts: Mapping[str, FinetuneSpec],
    directories: Mapping[str, Path],
    *,
    samples: int,
    access: FileAccess | None = None,
) -> MergeLosses:
    """Prepare to measure the losses of merges of a fleet's trained experts.

    `directories` has the directory of each trained expert by alias. The losses are on the first `samples` samples of
    each task of an expert's evaluation. `access` limits the files that tasks may use, or is None for no limit. Raises
    InvalidTask if an expert has no evaluation, and the errors of `MergeLosses`.
    """
    tasks = {}
    for alias, spec in experts.items():
        if spec.evaluation is None:
            raise InvalidTask(f"{alias}: has no evaluation; losses of merges are those of its reference answers")
        tasks[alias] = [task_of(each, seed=spec.seed, access=access) for each in spec.evaluation.objectives]
    first = next(iter(experts.values()))
    longest = max(spec.data.max_length for spec in experts.values())
    chats = [alias for alias, spec in experts.items() if writes_chats(spec)]
    return MergeLosses(locate(first.base), directories, tasks, samples=samples, max_length=longest, chats=chats)


def landscape(
    measure: Callable[[Merge], Mapping[str, float]], experts: tuple[str, str], *, grid: Sequence[float] = GRID
) -> Landscape:
    """Measure the sum of two experts' losses over a grid of their coefficients (MergOPT, figure 2).

    `grid` has the coefficients that are used for both experts; all pairs of them are measured. `measure` returns a
    merge's loss on each expert's tasks, by alias.
    """
    sources = tuple(Source(alias) for alias in experts)

    def joint(first: float, second: float) -> float:
        losses = measure(Merge("task_arithmetic", sources, {"lambda": (first, second)}))
        return sum(losses[alias] for alias in experts)

    rows = tuple(tuple(joint(first, second) for second in grid) for first in grid)
    return Landscape(experts, tuple(grid), rows)


def candidates(experts: Sequence[str], *, seed: int = 0, wudi: bool = False) -> Iterator[Candidate]:
    """Yield the merges of experts by the methods of the MergOPT paper, with all coefficients to compare.

    The methods are weight averaging, task arithmetic, TIES and DARE, and with `wudi` WUDI-Merging (table 5), which
    takes several hundred matrix products for each matrix. `seed` determines the random masks of DARE.
    """
    sources = tuple(Source(alias) for alias in experts)
    yield Candidate("weight averaging", None, Merge("linear", sources, {"weight": 1 / len(experts)}))
    for lambda_ in TASK_ARITHMETIC:
        yield Candidate("task arithmetic", lambda_, Merge("task_arithmetic", sources, {"lambda": lambda_}))
    for lambda_ in TIES_SCALES:
        yield Candidate("TIES", lambda_, Merge("ties", sources, {"k": TIES_KEEP, "lambda": lambda_}))
    for lambda_ in TASK_ARITHMETIC:
        coefficients = {"lambda": lambda_, "density": DARE_DENSITY}
        yield Candidate("DARE", lambda_, Merge("dare_linear", sources, coefficients, seed=seed))
    if wudi:
        yield Candidate("WUDI", WUDI_SCALE, Merge("wudi", sources, {"lambda": WUDI_SCALE}))


def merge_table(
    measure: Callable[[Merge], Mapping[str, float]], experts: Sequence[str], *, seed: int = 0
) -> tuple[MergeLoss, ...]:
    """Measure merges of experts: a row for each method and number of experts.

    With more than two experts, the first rows are for all pairs of the first IN_PAIRS experts. The other rows are for
    all experts together. `measure` returns a merge's loss on each expert's tasks, by alias. `seed` determines the
    random masks of DARE.
    """
    sets = [[tuple(experts)]]
    if len(experts) > 2:
        sets.insert(0, list(combinations(experts[:IN_PAIRS], 2)))
    return tuple(row for together in sets for row in _rows(measure, together, seed=seed))


def _rows(
    measure: Callable[[Merge], Mapping[str, float]], sets: Sequence[tuple[str, ...]], *, seed: int
) -> Iterator[MergeLoss]:
    """Yield the losses of merges by each method, as means over `sets` of experts, all of one size.

    `measure` returns a merge's loss on each expert's tasks, by alias. `seed` determines the random masks of DARE.
    """
    found: dict[str, list[tuple[float | None, Mapping[str, float], float]]] = {}
    for same in zip(*(candidates(experts, seed=seed) for experts in sets), strict=True):
        measured = [measure(candidate.merge) for candidate in same]
        mean = _mean(value for losses in measured for value in losses.values())
        aliases = dict.fromkeys(alias for losses in measured for alias in losses)
        by_expert = {alias: _mean(losses[alias] for losses in measured if alias in losses) for alias in aliases}
        found.setdefault(same[0].method, []).append((same[0].coefficient, by_expert, mean))
    for method, tried in found.items():
        means = torch.tensor([mean for *_, mean in tried], dtype=torch.float64)
        coefficient, best, mean = min(tried, key=lambda each: math.inf if math.isnan(each[2]) else each[2])
        yield MergeLoss(method, len(sets[0]), coefficient, best, mean, float(means.std(correction=0)))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
