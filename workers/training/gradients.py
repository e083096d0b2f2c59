"""Coefficient gradients: derivatives of the loss on reference answers with respect to a merge's coefficients.

The merge is computed by the code that inference engines use, and is written into a transformers model. One backward
pass then gives the gradient of each merged tensor. Each gradient is reduced to one number for each coefficient as soon
as it is computed, and then freed, so that the gradients of the whole model are never in memory at once. The modality of
the models defines the model and the loss of a sample (module `workers.training.task_losses`).
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from search_spaces.methods.base import Coefficient
from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.host_memory import free_host_bytes
from workers.errors import InvalidModel, TrialFailed
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into
from workers.merging.merged_tensor import MergedTensor
from workers.merging.plan import TensorPlan, computations, plan_as_stated, plan_tensors
from workers.merging.residual_scales import ends_a_branch
from workers.training.memory import keep_freed_memory, reduction_bytes, tokens_within
from workers.training.model import ParameterPart
from workers.training.reduction import derivatives, inner_product, stated_coefficients
from workers.training.task_losses import TaskLosses, WritableModel
from workers.types import Completions, Family, GradientResult, Placement, TaskSpec

__all__ = ["CoefficientGradients"]

# Tokens of one forward pass, padding included: bounds the memory of activations. A GPU that is full halves it, down to
# the least number.
MAX_TOKENS = 16_384
LEAST_TOKENS = 512
# Share of the host's free memory that passes on the CPU may take.
FREE_HOST_SHARE = 0.8

Batch = Mapping[str, Sequence[int]]
T = TypeVar("T")

log = logging.getLogger(__name__)


class CoefficientGradients:
    """The losses of a family's merges, and their derivatives with respect to the merges' coefficients.

    A family is a base model and its experts. Methods compute losses and derivatives for a given merge. Merges are
    written, one at a time, into a transformers model, which is replaced if a merge has other layers. The loss of a
    sample is the loss on its right answer, such as the cross-entropy of an image's class. Sums over tensors are in
    float32 or finer. At first, the free memory of the device limits the tokens of a forward pass. If a GPU is full
    nevertheless, forward passes have fewer tokens from then on; if this is not enough, activations are recomputed. Both
    measures change only the rounding of sums. Equal calls give equal bits on the same device with the same number of
    threads, independent of earlier calls, as long as the memory has room for passes of `max_tokens` tokens.

    - `tasks`: the task of each objective; all tasks, except the tasks of `entropies`, must have right answers (function
      `references.lack_of_references`)
    - `options`: the options of the study's engines, which define prompts and dtype; float32 replaces float16, in which
      gradients vanish
    - `placement`: the place where the source weights are kept
    - `is_shared`: whether processes of the machine share sources in host memory (class `Bank`)
    - `device`: the device on which the model computes. The default is the CPU, because a GPU that this process sees may
      belong to an engine
    - `more_devices`: further devices; the layers of the model are divided over `device` and these devices
    - `recomputes`: whether activations are recomputed, to save their memory; a step then takes a third more time
    - `max_tokens`: the largest number of tokens in a forward pass, with padding
    - `cache`: the directory that caches which source files have been searched for NaN and infinity; None means the
      default directory
    - `entropies`: the objectives whose loss is the entropy of the model's predictions, for which tasks need no right
      answers (function `references.lack_of_entropy`)
    - `methods`: the merge methods for whose derivatives memory is kept free

    All arguments are picklable. Raises InvalidModel and InvalidTask if the models or the tasks cannot be used.
    """

    def __init__(
        self,
        family: Family,
        options: EngineOptions,
        tasks: Mapping[str, TaskSpec],
        *,
        placement: Placement | str = Placement.MAPPED,
        device: str = "cpu",
        more_devices: Sequence[str] = (),
        is_shared: bool = False,
        recomputes: bool = False,
        max_tokens: int = MAX_TOKENS,
        cache: str | Path | None = None,
        entropies: Collection[str] = (),
        methods: Collection[str] = (),
    ) -> None:
        target = torch.device(device)
        if target.type == "cpu":
            keep_freed_memory()
        if target.type == "cuda":  # cuBLAS reads this at its first use, and needs it for deterministic products
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.bank = Bank(family, placement, device=target, cache=cache, is_shared=is_shared)
        if options.rank_cache:
            self.bank.keep_ranks()
        self.dtype = _dtype(options.dtype, target)
        self._recomputes = recomputes
        self._methods = tuple(methods)
        self._more_devices = tuple(map(torch.device, more_devices))
        kind = self.bank.sources.modality.losses_class()
        self._task_losses: TaskLosses[Any, Any] = kind(self.bank, options, dtype=self.dtype)
        self.model: WritableModel = self._new_model(target)
        self._tasks = dict(tasks)
        self._of_tasks = {}
        for name, spec in tasks.items():
            targets = self._task_losses.targets(spec, is_entropy=name in entropies)
            self._of_tasks[name] = _Targets(dict(enumerate(targets)), self._task_losses.unit(spec))
        self._of_completions: dict[str, _Targets] = {}
        self._max_tokens = self._asked_tokens = max_tokens
        self._limit_tokens()
        self._held: dict[str, Hashable] = {}  # how each tensor that the model holds was computed

    def set_completions(self, completions: Completions) -> None:
        """Set the completions that may replace the tasks' right answers as targets of losses.

        `completions` has the token ids of each completion, keyed by objective and sample position. All earlier
        completions are dropped. The losses of an objective are divided by the mean number of scored tokens of its
        completions. Raises InvalidTask for an objective whose samples are multiple choices.
        """
        found = {}
        for name, tokens in completions.items():
            each = {p: self._task_losses.of_completion(self._tasks[name], p, tokens[p]) for p in sorted(tokens)}
            found[name] = _Targets(each, sum(map(self._task_losses.size, each.values())) / max(1, len(each)))
        self._of_completions = found

    def loss_and_gradient(
        self,
        recipe: Recipe,
        batch: Batch,
        weights: Mapping[str, float],
        *,
        completions: Collection[str] = (),
        by_scales: bool = False,
    ) -> GradientResult:
        """Compute the mean loss of each objective over its samples in `batch`, and the gradient of their weighted sum.

        The sum is sum_o weights[o] loss_o, where loss_o is the mean loss of objective o. There is a derivative with
        respect to every coefficient in `recipe` for which the merge method is differentiable. With `by_scales` there is
        also a derivative with respect to the scale of every layer. Instead of multiplying the residual stream after
        layer i by its scale s_i, the merge divides the output weights of each branch (attention or MLP) in all later
        layers by s_i (module `workers.merging.residual_scales`). The derivative with respect to s_i is therefore -1 /
        s_i times the sum of the inner products of these weights with their gradients.

        The objectives named in `completions` are measured on the completions given to the method `set_completions`; all
        other objectives are measured on the right answers. Raises InvalidRecipe for a merge that has no gradients or
        cannot be made, and TrialFailed if a loss is NaN or infinite.
        """
        started = time.perf_counter()
        targets = self._targets(batch, completions)
        if missing := sorted(batch.keys() - weights.keys()):
            raise ValueError(
                f"gradients: no weight for objective {missing[0]!r}; given are {', '.join(sorted(weights))}"
            )
        result = self._within_memory(lambda: self._step(recipe, batch, targets, weights, by_scales=by_scales))
        return replace(result, seconds=time.perf_counter() - started)

    def _step(
        self,
        recipe: Recipe,
        batch: Batch,
        targets: Mapping[str, _Targets],
        weights: Mapping[str, float],
        *,
        by_scales: bool,
    ) -> GradientResult:
        """Compute the result of the method `loss_and_gradient`, but with 0 in the field `seconds`.

        The result contains the mean loss of each objective on the merge of `recipe`, and the gradient of the sum of
        these losses times their `weights`. `batch` has the positions of the samples, and `targets` has the targets from
        which losses are computed, both keyed by objective. With `by_scales` there are also derivatives with respect to
        the scales of layers.
        """
        plan = plan_as_stated(recipe, self.bank)
        self._fit(recipe)
        reducers = {}
        for tensor in plan.tensors:
            is_end = by_scales and tensor.layer is not None and ends_a_branch(tensor.suffix)
            stated = stated_coefficients(tensor)
            if is_end or stated:
                merged = self.model.memory[tensor.name] if is_end else None
                bank = self.bank.on(self._device_of(tensor))
                reducers[tensor.name] = _Reducer(tensor, stated, plan, bank, merged)
        self._hold(recipe)
        samples = _samples(batch, targets)
        factors = {name: weights[name] / (targets[name].unit * len(positions)) for name, positions in batch.items()}
        with _deterministic(), self._reduced_by(reducers):
            losses = self._read(samples, [factors[name] for name, _ in samples])
        each = _by_objective(batch, losses, targets)
        by_source, shared = _by_coefficient(reducers.values())
        return GradientResult(
            losses={name: sum(found) / len(found) for name, found in each.items()},
            num_samples=len(samples),
            seconds=0.0,
            by_source=by_source,
            shared=shared,
            layer_scales=_by_scale(recipe, reducers.values()) if by_scales else {},
        )

    def losses(
        self, recipe: Recipe, batch: Batch, *, completions: Collection[str] = ()
    ) -> dict[str, tuple[float, ...]]:
        """Compute the loss of the merge of `recipe` on each sample in `batch`, keyed by objective.

        `batch` has the positions of samples, keyed by objective, and the losses of an objective are in the order of its
        positions. The objectives named in `completions` are measured on the completions given to the method
        `set_completions`; all other objectives are measured on the right answers. Each loss is divided by its
        objective's unit, to make objectives comparable (method `TaskLosses.unit`).
        """
        targets = self._targets(batch, completions)
        plan_tensors(recipe, self.bank)  # raises the errors of the recipe before the model is replaced

        def read() -> dict[str, tuple[float, ...]]:
            self._fit(recipe)
            self._hold(recipe)
            with _deterministic(), torch.no_grad():
                return _by_objective(batch, self._read(_samples(batch, targets), None), targets)

        return self._within_memory(read)

    def _within_memory(self, compute: Callable[[], T]) -> T:
        """Call `compute` and return its result; if the GPU is full, repeat the call with smaller passes.

        Raises InvalidModel if the GPU has too little memory for a forward pass of LEAST_TOKENS tokens (a constant)
        whose activations are recomputed.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                lack = str(error)
            # Outside the handler, whose error holds the tensors of the failed pass.
            if self._max_tokens > LEAST_TOKENS:
                self._max_tokens = max(LEAST_TOKENS, self._max_tokens // 2)
            elif not self._recomputes:
                self._recomputes, self._max_tokens = True, self._asked_tokens
                self.model.recompute()
            else:
                raise InvalidModel(
                    (
                        f"gradients: the GPU has too little memory for forward passes of {LEAST_TOKENS} tokens with "
                        f"recomputed activations ({lack}); choose a search algorithm without gradients",
                    )
                )
            self._held = {}
            gc.collect()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
            log.warning(
                "the GPU is full, so gradients are computed by passes of %d tokens%s: %s",
                self._max_tokens,
                " with recomputed activations" if self._recomputes else "",
                lack,
            )

    def _device_of(self, tensor: MergedTensor) -> torch.device:
        """The device of the parameter into which the merged tensor `tensor` is written.

        A tensor that is a stack (the joined matrices of all experts of an MoE layer) is written to several parameters;
        the result is the device of the first.
        """
        return next(self.model.memory[name].device for name in tensor.shapes())

    def _targets(self, batch: Batch, completions: Collection[str]) -> dict[str, _Targets]:
        """Targets of losses for each objective in `batch`, such as texts with right answers.

        `batch` has the positions of the samples, keyed by objective. For the objectives in `completions`, a target is a
        completion given to the method `set_completions`; for all other objectives, a target is the task's right answer.
        Raises ValueError for an unknown objective, for an objective without positions, and for a position without a
        completion or right answer.
        """
        found = {}
        for name, positions in batch.items():
            known = self._of_completions if name in completions else self._of_tasks
            if name not in known:
                what = "objective without completions" if name in completions else "unknown objective"
                raise ValueError(f"gradients: {what} {name!r}; known are {', '.join(sorted(known))}")
            found[name] = known[name]
            lacking = [position for position in positions if position not in known[name].at]
            if lacking or not positions:
                has = "a completion" if name in completions else "a reference"
                message = f"gradients: objective {name!r} at positions {list(lacking or positions)[:5]}; give some of"
                raise ValueError(f"{message} 0 to {max(known[name].at, default=0)} with {has}")
        return found

    def _fit(self, recipe: Recipe) -> None:
        """Make a new transformers model if the present one has other layers than the merge of `recipe`.

        The new model has the layers of this merge, and replaces the present one.
        """
        if self.model.holds(recipe, self.bank):
            return
        device = self.model.device
        self._held = {}
        del self.model  # the memory of both together may not be free
        self.model = self._new_model(device, like=recipe)
        self._limit_tokens()

    def _new_model(self, device: torch.device, like: Recipe | None = None) -> WritableModel:
        """Make a model with the layers of the merge of the recipe `like`; None means the layers of the base."""
        model: WritableModel = self._task_losses.model(
            device=device, more_devices=self._more_devices, recomputes=self._recomputes, like=like
        )
        return model

    def _limit_tokens(self) -> None:
        """Limit the tokens of a pass so that its activations fit into the free memory of every device of the model.

        If the activations of LEAST_TOKENS tokens (a constant) do not fit, activations are recomputed. The limit is
        never raised.
        """
        for recomputes in dict.fromkeys((self._recomputes, True)):
            fitting = self._fitting_tokens(recomputes=recomputes)
            if fitting >= LEAST_TOKENS or recomputes:
                break
        if recomputes and not self._recomputes:
            self._recomputes = True
            self.model.recompute()
        limit = min(self._max_tokens, max(LEAST_TOKENS, fitting))
        if limit < self._max_tokens:
            twice = " with recomputed activations" if recomputes else ""
            log.info("passes have %d tokens at most%s, as the memory has room for no more", limit, twice)
        self._max_tokens = limit

    def _fitting_tokens(self, *, recomputes: bool) -> int:
        """Largest number of tokens of a pass whose activations fit into the free memory of every device of the model.

        With `recomputes`, activations within layers are recomputed in the backward pass, and need less memory. Some
        memory is kept free for a gradient of the largest tensor and for this tensor's values in all sources.
        """
        found = []
        config = dict(self.bank.base.settings)
        on_gpu = self.model.device.type == "cuda"
        operands = reduction_bytes(self.bank.sources, self._methods, on_gpu=on_gpu)
        largest = max((memory.nbytes for memory in self.model.memory.values()), default=0)  # a gradient
        for device, layers in zip((self.model.device, *self._more_devices), self.model.num_layers_on, strict=True):
            left, size = free_bytes(device) - operands - largest, self.dtype.itemsize
            found.append(tokens_within(left, config, size, recomputes=recomputes, layers=max(1, layers)))
        return min(found)

    def _hold(self, recipe: Recipe) -> None:
        """Write the merge of `recipe` into the model.

        Only tensors that differ from the merge in the model are computed and written.
        """
        plan = plan_tensors(recipe, self.bank)
        wanted = computations(plan, self.bank)
        held, self._held = self._held, {}
        changed = {name: memory for name, memory in self.model.memory.items() if held.get(name) != wanted[name]}
        with torch.no_grad():
            for device in dict.fromkeys(memory.device for memory in changed.values()):
                on_device = {name: memory for name, memory in changed.items() if memory.device == device}
                merge_into(plan, self.bank.on(device), on_device)
        self._held = wanted

    def _read(self, samples: Sequence[tuple[str, Any]], factors: Sequence[float] | None) -> list[float]:
        """Compute the loss of every sample by forward passes, in the order of `samples`.

        If `factors` has a number for each sample, the gradients of the sum of all losses times their factors are also
        computed, by backward passes. Raises TrialFailed if a loss is NaN or infinite.
        """
        targets = [target for _, target in samples]
        found = [0.0] * len(targets)
        for indices in self._task_losses.minibatches(targets, self._max_tokens):
            losses = self._task_losses.of_samples(self.model, [targets[i] for i in indices])
            for i, loss in zip(indices, losses.tolist(), strict=True):
                if not math.isfinite(loss):
                    raise TrialFailed(f"the loss on a reference of objective {samples[i][0]!r} is {loss}")
                found[i] = loss
            if factors is not None and losses.requires_grad:
                upstream = torch.tensor([factors[i] for i in indices], dtype=losses.dtype, device=losses.device)
                torch.autograd.backward(losses, upstream)
        return found

    @contextmanager
    def _reduced_by(self, reducers: Mapping[str, _Reducer]) -> Iterator[None]:
        """Context manager that reduces gradients to derivatives with respect to coefficients, and frees them.

        As soon as the gradient of a merged tensor is computed, it is passed to the tensor's reducer, which adds up the
        derivatives with respect to the coefficients of this tensor. `reducers` are keyed by the tensor's name. No
        gradients are computed for parameters without a reducer.
        """
        hooks = []
        leaf: Any  # torch's hooks have no types
        for leaf, parts in self.model.leaves:
            wanted = [(part, reducers[name]) for name, part in parts.items() if name in reducers]
            leaf.requires_grad_(bool(wanted))
            if wanted:
                hooks.append(leaf.register_post_accumulate_grad_hook(partial(_reduce, wanted)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for leaf, _ in self.model.leaves:
                leaf.grad = None


def free_bytes(device: torch.device) -> int:
    """Bytes of a device's memory that this process may allocate now.

    For a GPU, the result is the sum of its free memory and the memory that torch has reserved but does not use. For the
    CPU, it is a share of the free memory of the machine or container, because other processes allocate too.
    """
    if device.type != "cuda":
        return int(FREE_HOST_SHARE * free_host_bytes())
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@dataclass(frozen=True)
class _Targets:
    """Targets of one objective's losses, and the divisor that makes losses of several objectives comparable.

    `at` has the targets, keyed by the sample's position; a target is the data from which the loss of a sample is
    computed. The divisor, `unit`, is the mean size of the task's samples (method `TaskLosses.unit`), or the mean size
    of the completions that replace right answers.
    """

    at: Mapping[int, Any]
    unit: float


def _samples(batch: Batch, targets: Mapping[str, _Targets]) -> list[tuple[str, Any]]:
    return [(name, targets[name].at[position]) for name, positions in batch.items() for position in positions]


def _by_objective(
    batch: Batch, losses: Sequence[float], targets: Mapping[str, _Targets]
) -> dict[str, tuple[float, ...]]:
    """Group the losses of samples by objective; a loss is divided by the objective's unit, for comparability.

    `losses` are in the order of `batch`, which has the positions of the samples, keyed by objective. `targets` has the
    unit of each objective.
    """
    each = iter(losses)
    return {name: tuple(next(each) / targets[name].unit for _ in positions) for name, positions in batch.items()}


class _Reducer:
    """Accumulator of the derivatives of a loss with respect to the coefficients of one merged tensor.

    The method `add` is called with gradients of the loss with respect to the tensor. `stated` are the coefficients.
    `plan` lists the tensors of the merge with their sources, and `bank` has the weights of the sources. `merged` is the
    computed tensor, or None. With `merged`, the attribute `along` accumulates the inner products of the gradients with
    `merged`, from which derivatives with respect to layer scales are computed.
    """

    def __init__(
        self,
        tensor: MergedTensor,
        stated: Sequence[Coefficient],
        plan: TensorPlan,
        bank: Bank,
        merged: torch.Tensor | None,
    ) -> None:
        self.tensor = tensor
        self.stated = stated
        self._plan = plan
        self._bank = bank
        self._merged = merged
        self.found: dict[str, torch.Tensor] = {}
        self.along = 0.0

    def add(self, gradient: torch.Tensor) -> None:
        if self._merged is not None:
            self.along += inner_product(gradient, self._merged)
        if not self.stated:
            return
        for name, slopes in derivatives(self.tensor, self._plan, self._bank, gradient).items():
            if self.tensor.factor != 1:
                slopes = slopes * self.tensor.factor
            self.found[name] = self.found[name] + slopes if name in self.found else slopes


def _reduce(wanted: Sequence[tuple[ParameterPart, _Reducer]], leaf: torch.Tensor) -> None:
    """Pass each part of a parameter's gradient to the reducer of its merged tensor, and free the gradient.

    `leaf` is the parameter. `wanted` has its parts that are merged tensors, each with the reducer that adds up the
    tensor's derivatives.
    """
    assert leaf.grad is not None
    gradient, leaf.grad = leaf.grad, None
    for part, reducer in wanted:
        reducer.add(part.of(gradient))


Slopes = dict[str, dict[str, float]]


def _by_coefficient(reducers: Any) -> tuple[Slopes, Slopes]:
    by_source: Slopes = {}
    shared: Slopes = {}
    for reducer in reducers:
        tensor = reducer.tensor
        for coefficient in reducer.stated:
            count = len(tensor.merge.sources) if coefficient.per_model else 1
            slopes = reducer.found[coefficient.name].tolist() if coefficient.name in reducer.found else [0.0] * count
            if coefficient.per_model:
                models = (source.model for source in tensor.merge.sources)
                by_source[tensor.name] = dict(zip(models, slopes, strict=True))
            else:
                shared.setdefault(tensor.name, {})[coefficient.name] = slopes[0]
    return by_source, shared


def _by_scale(recipe: Recipe, reducers: Iterable[_Reducer]) -> dict[int, float]:
    """Derivative of the loss with respect to each layer's scale, keyed by the layer's index.

    `recipe` has the scales. A layer's scale is a factor on the residual stream after the layer. Instead of scaling the
    stream by s, the merge divides the output weights of each branch (attention or MLP) in all later layers by s. The
    derivative is therefore -1 / s times the sum of the inner products of these weights with their gradients. The inner
    products were added up by `reducers`, one for each merged tensor.
    """
    after = [0.0] * len(recipe.layers)
    for reducer in reducers:
        for layer in range(reducer.tensor.layer or 0):
            after[layer] += reducer.along
    return {index: -along / recipe.layers[index].scale for index, along in enumerate(after)}


@contextmanager
def _deterministic() -> Iterator[None]:
    """Context manager that makes torch use deterministic algorithms.

    For an operation without a deterministic algorithm, torch warns and uses a nondeterministic one.
    """
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # saves time; only programs that read uninitialized memory need it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        memory.fill_uninitialized_memory = filled


def _dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if asked == "bfloat16" else torch.float32
