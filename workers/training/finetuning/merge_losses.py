"""Losses and task metrics of merges of trained experts.

Paper: "MergOPT: A merge-aware optimizer for robust model merging", figure 2 (the joint loss over two coefficients),
tables 1, 3, 20 and 21 (merge methods by optimizer and number of experts). Losses are measured on the reference answers
of the experts' evaluation tasks, in nats per token of an answer, in float32. The coefficients of a merge are chosen by
the losses on some samples of each task. The losses and metrics that are reported for the merge are measured on other
samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from search_spaces.recipe import Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.evaluation.references import References, Target
from workers.file_access import FileAccess
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into
from workers.models.family import open_family
from workers.models.modalities import modality_of_task
from workers.models.remote import locate
from workers.training.finetuning.evaluation import TaskScorer
from workers.training.finetuning.modality import MergeMeasurement, MergeReport, training_of
from workers.training.finetuning.spec import FinetuneSpec, task_of
from workers.training.losses import ModelOfLogits, minibatches, sample_losses
from workers.training.mergopt.tangent import LinearizedModel, TangentModel
from workers.training.model import TrainableModel
from workers.types import Placement, Span, TaskSpec

__all__ = [
    "Candidate",
    "Landscape",
    "MergeLoss",
    "MergeLosses",
    "candidates",
    "lack_of_losses",
    "landscape",
    "landscapes",
    "losses_of_experts",
    "merge_table",
    "mixed_table",
]

# The coefficients of both experts in figure 2.
GRID = tuple(round(0.1 * i, 1) for i in range(11))
# Coefficients to try for each method. Those above 1 are for experts whose task vectors are small: an optimum at the end
# of a grid would be taken for a property of the experts.
TASK_ARITHMETIC = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0)
TIES_SCALES = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
TIES_KEEP = 0.2
DARE_DENSITY = 0.5
WUDI_SCALES = (0.5, 1.0, 1.5, 2.0)

# The number of a fleet's first experts of which all pairs are merged too, and the number of landscapes (figure 2).
IN_PAIRS = 4
NUM_LANDSCAPES = 4

MAX_TOKENS = 4096  # in one forward pass


@dataclass(frozen=True)
class Landscape:
    """Sums of two experts' losses for merges of the two, over a grid of the two coefficients.

    `losses[i][j]` is for the merge that is the base plus `coefficients[i]` times the first expert's task vector plus
    `coefficients[j]` times the second expert's task vector. An expert's loss is the loss of the merge on this expert's
    tasks.
    """

    experts: tuple[str, str]
    coefficients: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]


class Candidate(NamedTuple):
    """A merge of experts by a published method, with one of the coefficients to try for this method.

    `method` is the method's name in tables. `coefficient` is the coefficient, or None for a method without a
    coefficient.
    """

    method: str
    coefficient: float | None
    merge: Merge


@dataclass(frozen=True)
class MergeLoss:
    """Losses of merges of `num_experts` experts by one merge method, at the method's best coefficient.

    Several sets of `num_experts` experts may be merged; each loss is then a mean over these sets. The best coefficient
    is the coefficient with the lowest mean loss over the merged experts' tasks.

    - `losses`: the loss on each expert's evaluation tasks, keyed by the expert's alias
    - `mean`: the mean of `losses`
    - `spread`: the standard deviation of the losses in `tried`, over the coefficients
    - `coefficient`: the best coefficient, or None for a method without a coefficient
    - `values`: the mean metric over each expert's evaluation tasks, keyed by alias; empty if metrics were not measured
    - `value`: the mean of `values`, or None if metrics were not measured
    - `tried`: each coefficient that was tried, with the mean loss by which the best coefficient is chosen
    """

    method: str
    num_experts: int
    coefficient: float | None
    losses: Mapping[str, float]
    mean: float
    spread: float
    values: Mapping[str, float] = field(default_factory=dict)
    value: float | None = None
    tried: tuple[tuple[float | None, float], ...] = ()


class MergeLosses:
    """Measurement of losses and metrics of merges of trained experts, on each expert's tasks.

    The first `samples` samples of each task are for choosing coefficients, and the next `samples` samples are for
    reporting merges. If a task has fewer than twice `samples` samples, each part has half of the samples. Raises
    InvalidModel if a model cannot be used, and InvalidTask if a sample has no reference answer or a task has a single
    sample.

    - `base`: the directory of the base model
    - `directories`: the directory of each expert, keyed by alias
    - `tasks`: the tasks of each expert, keyed by alias
    - `max_length`: the largest number of tokens in a text
    - `chats`: the aliases of the experts on whose tasks prompts are formatted with the chat template
    - `is_linearized`: whether the experts are linearizations of the base model (linear in the weights), which the
      fine-tuning method `tangent` trains; a merge is then the linearization at the merged weights
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
        is_linearized: bool = False,
    ) -> None:
        family = open_family(base, directories)
        self._bank = Bank(family, Placement.MAPPED)
        self._model = TrainableModel(self._bank, torch.float32, device=self._bank.device)
        module = self._model.module
        self._scored: ModelOfLogits = self._model
        self._called: Any = module
        if is_linearized:
            module.set_attn_implementation("eager")  # fused kernels have no forward derivative
            self._called = LinearizedModel(TangentModel(module))
            self._scored = _Linearized(self._called, self._model.device)
        self._base = self._bank.sources.base_alias
        self._num_layers = self._bank.view(self._base).layout.num_layers
        self._fingerprints = {model.alias: model.fingerprint for model in family.models}
        self._tasks: dict[str, list[_TaskSamples]] = {}
        self._scorers: dict[str, TaskScorer] = {}
        for alias, own in tasks.items():
            options = EngineOptions(max_model_len=max_length, chat_template=alias in chats)
            references = References(TaskEvaluator(None, Prompts(self._bank.sources.result_dir, options)))
            self._tasks[alias] = [_TaskSamples.of(task, references, samples) for task in own]
            self._scorers[alias] = TaskScorer(str(self._bank.sources.result_dir), options, self._called)

    def of(self, merge: Merge) -> dict[str, float]:
        """Measure the mean loss of a merge on each merged expert's tasks, on the samples for choosing coefficients.

        The losses are keyed by the expert's alias.
        """
        self._hold(merge)
        return {source.model: self._loss(source.model, is_reported=False) for source in merge.sources}

    def report(self, merge: Merge) -> MergeReport:
        """Measure the mean loss and metric of a merge on each merged expert's tasks, on the samples for reports.

        These samples are not used to choose coefficients. The losses and metrics have a value for each expert's alias.
        """
        self._hold(merge)
        aliases = [source.model for source in merge.sources]
        losses = {alias: self._loss(alias, is_reported=True) for alias in aliases}
        return MergeReport(losses, {alias: self._value(alias) for alias in aliases})

    @torch.no_grad()
    def _hold(self, merge: Merge) -> None:
        recipe = Recipe.uniform(merge, models=self._fingerprints, base=self._base, num_layers=self._num_layers)
        merge_into(recipe.canonical(), self._bank, self._model.memory)

    @torch.no_grad()
    def _loss(self, alias: str, *, is_reported: bool) -> float:
        return _mean(
            self._mean(task.reported if is_reported else task.chosen_by) / task.unit for task in self._tasks[alias]
        )

    def _value(self, alias: str) -> float:
        tasks = self._tasks[alias]
        spans = [Span(str(number), task.task, *task.span) for number, task in enumerate(tasks)]
        return _mean(self._scorers[alias].values(spans).values())

    def _mean(self, targets: Sequence[Target]) -> float:
        total = 0.0
        for indices in minibatches(targets, MAX_TOKENS):
            total += float(sample_losses(self._scored, [targets[i] for i in indices]).sum())
        return total / len(targets)


@dataclass(frozen=True)
class _TaskSamples:
    """A task's samples in two disjoint parts: one for choosing coefficients, one for reporting merges.

    `chosen_by` and `reported` have the reference answers of the two parts. `span` has the positions of the reported
    samples: the first position, and the position after the last. Losses are divided by `unit`, the mean size of an
    answer in the task (method `References.unit`), so that losses on different tasks are comparable.
    """

    task: TaskSpec
    chosen_by: tuple[Target, ...]
    reported: tuple[Target, ...]
    span: tuple[int, int]
    unit: float

    @classmethod
    def of(cls, task: TaskSpec, references: References, samples: int) -> _TaskSamples:
        """Divide the samples of a task into a part for choosing coefficients and a part for reporting merges.

        Each part has `samples` samples, or about half of the task's samples if the task has fewer than twice `samples`
        samples. `references` computes the reference answers of the samples. Raises InvalidTask if the task has fewer
        than two samples.
        """
        targets = tuple(references.targets(task))
        if len(targets) < 2:
            name = task.task.get("file") if isinstance(task.task, Mapping) else task.task
            raise InvalidTask(
                f"{name}: has {len(targets)} samples; expected at least 2, because coefficients of merges "
                "are chosen on other samples than are reported"
            )
        middle = min(samples, len(targets) // 2)
        stop = min(middle + samples, len(targets))
        return cls(task, targets[:middle], targets[middle:stop], (middle, stop), references.unit(task))


class _Linearized:
    """Wrapper that gives a linearized model the method `logits`, so that losses of samples can be computed.

    A linearized model is linear in its weights. The class implements the interface `ModelOfLogits`. `device` is the
    device of the model.
    """

    def __init__(self, model: LinearizedModel, device: torch.device) -> None:
        self._model, self.device = model, device

    def logits(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        found: torch.Tensor = self._model(input_ids=tokens).logits[:, -last:]
        return found


def lack_of_losses(
    experts: Mapping[str, FinetuneSpec], *, access: FileAccess | None = None
) -> Iterator[tuple[str, str]]:
    """Yield each reason why losses cannot be measured on merges of a fleet's experts, as a pair (alias, reason).

    A fleet consists of the experts that one fine-tuning trains. `experts` has the specification of each expert, keyed
    by its alias. For a fleet with a single expert nothing is yielded, because merges of one expert are not measured.
    `access` limits the files that tasks may use; None means no limit.
    """
    for alias, spec in experts.items() if len(experts) > 1 else ():
        if spec.evaluation is None:
            yield alias, "has no evaluation; losses of merges need its reference answers"
            continue
        for each in spec.evaluation.objectives:
            task = task_of(each, seed=spec.seed, access=access)
            try:
                lack = modality_of_task(task.task).training_module().lack_of_losses(spec, task)
            except InvalidTask as error:
                lack = f"has no reference answers to measure merges on: {error}"
            if lack is not None:
                yield alias, f"objective {each.name!r} {lack}"


def losses_of_experts(
    experts: Mapping[str, FinetuneSpec],
    directories: Mapping[str, Path],
    *,
    samples: int,
    is_linearized: bool = False,
    access: FileAccess | None = None,
) -> MergeMeasurement:
    """Prepare to measure the losses and metrics of merges of a fleet's trained experts.

    A fleet consists of the experts that one fine-tuning trains. `experts` has the specification of each expert, and
    `directories` has the directory of each expert, both keyed by alias. Coefficients are chosen on `samples` samples of
    each task of an expert's evaluation, and merges are reported on the next `samples` samples. `is_linearized` says
    whether the experts were trained as linearizations of the base model (method `tangent`). `access` limits the files
    that tasks may use; None means no limit. Raises InvalidTask if an expert has no evaluation or a sample has no
    reference answer, and InvalidModel if a model cannot be used.
    """
    tasks = {}
    for alias, spec in experts.items():
        if spec.evaluation is None:
            raise InvalidTask(f"{alias}: has no evaluation; losses of merges need its reference answers")
        tasks[alias] = [task_of(each, seed=spec.seed, access=access) for each in spec.evaluation.objectives]
    first = next(iter(experts.values()))
    found: MergeMeasurement = training_of(locate(first.base)).merge_losses(
        experts, directories, tasks, samples=samples, is_linearized=is_linearized
    )
    return found


def landscape(
    measure: Callable[[Merge], Mapping[str, float]], experts: tuple[str, str], *, grid: Sequence[float] = GRID
) -> Landscape:
    """Measure the sum of two experts' losses on their merges, for all pairs of coefficients in a grid.

    Figure 2 of the MergOPT paper shows such landscapes. `grid` has the coefficients that are used for both experts; a
    merge is measured for each pair of coefficients. `measure` returns a merge's loss on each expert's tasks, keyed by
    the expert's alias.
    """
    sources = tuple(Source(alias) for alias in experts)

    def joint(first: float, second: float) -> float:
        losses = measure(Merge("task_arithmetic", sources, {"lambda": (first, second)}))
        return sum(losses[alias] for alias in experts)

    rows = tuple(tuple(joint(first, second) for second in grid) for first in grid)
    return Landscape(experts, tuple(grid), rows)


def landscapes(
    measure: Callable[[Merge], Mapping[str, float]], experts: Sequence[str], *, grid: Sequence[float] = GRID
) -> tuple[Landscape, ...]:
    """Measure the loss landscapes of the first NUM_LANDSCAPES pairs of experts.

    A landscape has the sum of two experts' losses over a grid of their coefficients. `experts` are the aliases of all
    experts. `measure` returns a merge's loss on each expert's tasks, keyed by alias. `grid` has the coefficients that
    are used for both experts.
    """
    pairs = list(combinations(experts[:IN_PAIRS], 2))[:NUM_LANDSCAPES]
    return tuple(landscape(measure, pair, grid=grid) for pair in pairs)


def candidates(experts: Sequence[str], *, seed: int = 0, wudi: bool = False) -> Iterator[Candidate]:
    """Yield merges of the experts by each merge method of the MergOPT paper.

    The methods are weight averaging, task arithmetic, TIES, DARE and, with `wudi`, WUDI-Merging (table 5). A method
    with a coefficient gets one merge for each value to try; the caller keeps each method's best merge. `experts` are
    the aliases of the experts. `seed` determines the random masks of DARE.
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
        for lambda_ in WUDI_SCALES:
            yield Candidate("WUDI", lambda_, Merge("wudi", sources, {"lambda": lambda_}))


def merge_table(
    measure: Callable[[Merge], Mapping[str, float]],
    experts: Sequence[str],
    *,
    report: Callable[[Merge], MergeReport] | None = None,
    seed: int = 0,
    wudi: bool = False,
) -> tuple[MergeLoss, ...]:
    """Measure merges of experts: one row for each merge method and number of experts.

    If there are more than two experts, the first rows are for pairs: all pairs of the first IN_PAIRS experts are
    merged. The other rows are for the merge of all experts together. `measure` returns the loss on each expert's tasks,
    keyed by the expert's alias; coefficients are chosen by this loss. `report` returns the losses and metrics that are
    reported for the best merge; by default, the losses of `measure` are reported. `seed` determines the random masks of
    DARE. With `wudi`, WUDI-Merging is one of the methods.
    """
    sets = [[tuple(experts)]]
    if len(experts) > 2:
        sets.insert(0, list(combinations(experts[:IN_PAIRS], 2)))
    reported = report or (lambda merge: MergeReport(measure(merge), {}))
    return tuple(row for together in sets for row in _rows(measure, reported, together, seed=seed, wudi=wudi))


def mixed_table(
    measure: Callable[[Merge], Mapping[str, float]],
    experts: Mapping[str, str],
    *,
    report: Callable[[Merge], MergeReport],
    seed: int = 0,
    wudi: bool = False,
) -> tuple[MergeLoss, ...]:
    """Measure merges of two experts that were trained in different ways: one row for each merge method.

    The result corresponds to table 19 in the paper of MergOPT, an optimizer for experts that will be merged. The keys
    of `experts` are the aliases of experts of one training, and each value is the alias of the other training's expert
    for the same tasks. From every two of the first IN_PAIRS keys, A and B, two merges are made: A with the other
    training's expert for B, and B with the other training's expert for A.

    `measure` returns a merge's loss on each expert's tasks; coefficients are chosen by this loss. `report` returns the
    losses and metrics that the rows contain. `seed` determines the random masks of DARE. With `wudi`, WUDI-Merging is
    one of the methods. The losses and metrics of a row are keyed by the keys of `experts`; both experts for the same
    tasks count under one key.
    """
    pairs = list(combinations(list(experts)[:IN_PAIRS], 2))
    mixed = [pair for one, two in pairs for pair in ((one, experts[two]), (experts[one], two))]
    names = {other: alias for alias, other in experts.items()}

    def renamed(numbers: Mapping[str, float]) -> dict[str, float]:
        by_alias: dict[str, list[float]] = {}
        for alias, number in numbers.items():
            by_alias.setdefault(names.get(alias, alias), []).append(number)
        return {alias: _mean(each) for alias, each in by_alias.items()}

    rows = _rows(measure, report, mixed, seed=seed, wudi=wudi)
    return tuple(replace(row, losses=renamed(row.losses), values=renamed(row.values)) for row in rows)


def _rows(
    measure: Callable[[Merge], Mapping[str, float]],
    report: Callable[[Merge], MergeReport],
    sets: Sequence[tuple[str, ...]],
    *,
    seed: int,
    wudi: bool,
) -> Iterator[MergeLoss]:
    """Yield one row of measurements for each merge method, averaged over several sets of merged experts.

    `sets` has the aliases of the experts in each set; all sets have the same number of experts. `measure` returns the
    loss by which the best coefficient is chosen, and `report` returns the losses and metrics that the row has. `seed`
    determines the random masks of DARE. With `wudi`, WUDI-Merging is one of the methods.
    """
    found: dict[str, list[tuple[float, tuple[Candidate, ...]]]] = {}
    for same in zip(*(candidates(experts, seed=seed, wudi=wudi) for experts in sets), strict=True):
        mean = _mean(loss for candidate in same for loss in measure(candidate.merge).values())
        found.setdefault(same[0].method, []).append((mean, same))
    for method, tried in found.items():
        means = torch.tensor([mean for mean, _ in tried], dtype=torch.float64)
        _, best = min(tried, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
        reports = [report(candidate.merge) for candidate in best]
        values = [value for each in reports for value in each.values.values()]
        yield MergeLoss(
            method,
            len(sets[0]),
            best[0].coefficient,
            _by_expert([each.losses for each in reports]),
            _mean(loss for each in reports for loss in each.losses.values()),
            float(means.std(correction=0)),
            _by_expert([each.values for each in reports]),
            _mean(values) if values else None,
            tuple((same[0].coefficient, mean) for mean, same in tried),
        )


def _by_expert(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean value of each expert over the merges that contain it, keyed by the expert's alias.

    `each` has a mapping for each merge: the value of each merged expert, keyed by its alias.
    """
    aliases = dict.fromkeys(alias for numbers in each for alias in numbers)
    return {alias: _mean(numbers[alias] for numbers in each if alias in numbers) for alias in aliases}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
