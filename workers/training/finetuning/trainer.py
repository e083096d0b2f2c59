"""Training loop on one or several ranks; the number of ranks changes the results only by rounding.

Ranks share each batch's rows. Each rank holds a shard of the weights, of the gradients and of the optimizer's state
(FSDP2). With the fine-tuning method `tangent`, which trains a linearization (a model that is linear in its weights),
each rank holds the whole model instead (DDP). The loss of an update is the mean over the targets of the whole batch.
Therefore the number of ranks, and the number of rows in a forward pass, change results only by rounding errors. A
training that was killed continues from its last checkpoint, which all ranks share, on the same or another number of
ranks.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from search_spaces.errors import Problem
from workers.errors import InvalidModel, InvalidTask, TrainingFailed
from workers.evaluation.tasks import check_task
from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint
from workers.models.remote import locate
from workers.training.finetuning import checkpoints
from workers.training.finetuning.data import batch_rows
from workers.training.finetuning.history import (
    CHECKPOINTS,
    EXPERT,
    LINEARIZED,
    METRICS,
    VALUES,
    History,
    Report,
)
from workers.training.finetuning.memory_plan import lack_of_memory, recomputes
from workers.training.finetuning.methods import fitted_scale, make_optimizer, read_task_vectors
from workers.training.finetuning.modality import EvaluationCheck, Examples, ModelScorer, training_of
from workers.training.finetuning.models import TrainedModel, computes_in, load_model
from workers.training.finetuning.result import changed_source, sources_of, write_expert
from workers.training.finetuning.sharding import gathered
from workers.training.finetuning.spec import FinetuneSpec, Training, task_of
from workers.training.mergopt.optimizer import STATE as MERGOPT_STATE
from workers.training.mergopt.optimizer import MergOPT
from workers.types import TaskSpec

__all__ = ["check", "check_data", "check_evaluation", "learning_rate_at", "noise_seed", "train"]

SEEDS = 1_000_003
CPU = torch.device("cpu")

# With MergOPT, the loss at the weights is measured at the first of so many updates, and at the last one.
WEIGHTS_EVERY = 10
SHOWN = 5  # documents of a failed batch that a message names


def train(
    spec: FinetuneSpec,
    out: Path,
    *,
    report: Report = lambda _: None,
    device: torch.device = CPU,
    access: FileAccess | None = None,
) -> dict[str, Any]:
    """Train an expert according to `spec` in the directory `out`, or continue its training from a checkpoint.

    No other training may use `out`. If there is a process group, the function runs on each of its ranks. Each rank
    calls `report` with the metrics of every update, such as the loss, and with the values of every evaluation; the
    module `history` describes these lines. `device` is this rank's device, by default the CPU, because GPUs are visible
    even to a process that has reserved none. `access` limits the files that training data and evaluation tasks may
    name, or is None for no limit. Returns facts about the training, such as the number of steps, the last loss, and the
    values of the last evaluation. Raises InvalidModel if the base model cannot be used, InvalidTask if the data or an
    evaluation task cannot be used, or if an input of the training has changed since its checkpoint, and TrainingFailed
    if a loss or a gradient is NaN or infinite.
    """
    ranks = _Ranks.here(device)
    base = locate(spec.base)
    modality = training_of(base)
    rows = modality.examples(spec, base, access)
    newest = checkpoints.latest(out / CHECKPOINTS)
    sources = sources_of(spec, base) if ranks.rank == 0 else {}
    if newest is not None and (change := changed_source(spec, before=checkpoints.sources(newest), now=sources)):
        raise InvalidTask(change)
    num_steps = spec.training.steps or math.ceil(len(rows) * float(spec.training.epochs or 0) / spec.training.batch)
    torch.manual_seed(spec.seed)  # adapters begin at random
    is_sharded = ranks.size > 1 and spec.method.kind != "tangent"
    recomputes = _recomputes(spec, base, ranks)
    model = load_model(spec, base, ranks.device, is_sharded=is_sharded, recomputes=recomputes, access=access)
    modality.prepare(spec, model, rows, ranks.device)
    fitted = fitted_scale(spec.method, base)
    optimizer = make_optimizer(
        spec.method,
        model.trained.values(),
        learning_rate=spec.training.learning_rate,
        seed=noise_seed(spec),
        model=model.module,
        moved=model.moved,
        fitted=fitted,
        vectors=read_task_vectors(spec.method, base, model.module, model.moved),
    )
    history = History(out / METRICS, is_writer=ranks.rank == 0, report=report)
    start = checkpoints.step_of(newest)
    if newest is not None:
        _load(newest, spec, model, optimizer)
    history.forget_after(start)
    # All ranks score a model with shards, in lockstep, because each has a part of it.
    is_scorer = ranks.rank == 0 or model.is_sharded
    evaluators = _evaluators(spec, base, model, access=access) if is_scorer else {}
    passes = _Passes(spec, model, rows, ranks)
    loss, weights_loss = history.last("loss"), history.last("weights_loss")
    objectives = [each.name for each in spec.evaluation.objectives] if spec.evaluation is not None else []
    values: dict[str, dict[str, float]] = {
        name: (history.last(name) or {}) if objectives else {} for name in (VALUES, LINEARIZED)
    }

    def evaluate(step: int) -> None:
        """Evaluate the model after `step` updates, and add its values to the history."""
        values.update({name: evaluator.values() for name, evaluator in evaluators.items()})
        found = {name: each for name, each in values.items() if each or name == VALUES}
        history.add({"step": step, **found})

    # A process may have ended between a checkpoint and its evaluation, or the evaluation may have changed since.
    is_due = newest is not None and _is_evaluated(start, spec, num_steps)
    if ranks.total(is_due and history.values_at(start).keys() != set(objectives)):
        evaluate(start)
    for step in range(start, num_steps):
        began = time.perf_counter()
        rate = learning_rate_at(step, num_steps, spec.training)
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(
            ((spec.seed * SEEDS + step) * SEEDS + ranks.rank) % 2**63
        )  # the random numbers of dropout, also after a resumption
        is_last = step + 1 == num_steps
        update = passes.update(step, optimizer, kept=newest)
        line: dict[str, Any] = {"step": step + 1, "steps": num_steps}
        if isinstance(optimizer, MergOPT):
            line |= {"alpha": optimizer.draw.alpha, "models": optimizer.draw.num_models}
            if is_last or step % WEIGHTS_EVERY == 0:
                line["weights_loss"] = weights_loss = update.loss_at_weights()
        optimizer.step(update.gradients)
        loss = update.loss
        line |= {"loss": loss, "gradient_norm": update.norm, "learning_rate": rate}
        if update.second_loss is not None:
            line["offset_loss"] = update.second_loss
        history.add({**line, rows.unit: update.num_targets, "seconds": time.perf_counter() - began})
        if is_last or (step + 1) % spec.training.checkpoint_every == 0:
            checkpoints.save(
                out / CHECKPOINTS,
                step=step + 1,
                trained=model.trained,
                optimizer=optimizer,
                loss=loss,
                sources=sources,
            )
            newest = checkpoints.latest(out / CHECKPOINTS)
        if _is_evaluated(step + 1, spec, num_steps):
            evaluate(step + 1)
    facts: dict[str, Any] = {"steps": num_steps, "loss": loss, "rows": len(rows), VALUES: values[VALUES]}
    if values[LINEARIZED]:
        facts[LINEARIZED] = values[LINEARIZED]
    if weights_loss is not None:
        facts["weights_loss"] = weights_loss
    if fitted is not None:
        facts["noise"] = asdict(fitted)
    with _weights(spec, model, out if ranks.rank == 0 else None) as weights:
        if ranks.rank == 0:
            write_expert(
                spec,
                base,
                model.module,
                out / EXPERT,
                sources=sources,
                facts=facts,
                values=values[VALUES],
                weights=weights,
            )
    ranks.wait()
    return facts


def _is_evaluated(step: int, spec: FinetuneSpec, num_steps: int) -> bool:
    """Whether the model is evaluated after `step` of `num_steps` updates of the training `spec`."""
    return spec.evaluation is not None and (step == num_steps or step % spec.evaluation.every == 0)


def _evaluators(
    spec: FinetuneSpec, base: Path, model: TrainedModel, *, access: FileAccess | None
) -> dict[str, ModelScorer]:
    """Make the objects that score the evaluation tasks in `spec` on the model in training.

    The result is empty if the specification has no section `evaluation`. Its keys are the names of the scores in the
    training's history: VALUES for scores of the model with the weights that are exported and, with the method tangent,
    LINEARIZED for scores of the linearized model that is trained. `base` is the directory of the base model, whose
    tokenizer is used. `access` limits the files that evaluation tasks may use; None means no limit.
    """
    if spec.evaluation is None:
        return {}
    modality = training_of(base)
    scored: dict[str, Any] = {VALUES: model.called}
    if model.tangent is not None:
        scored[LINEARIZED] = modality.linearized(model.tangent)
    return {name: modality.evaluation(spec, base, model.module, called, access) for name, called in scored.items()}


def _recomputes(spec: FinetuneSpec, base: Path, ranks: _Ranks) -> bool:
    """Whether this rank saves memory by gradient checkpointing: activations are computed again in the backward pass.

    The option in `spec` decides; if it is "auto", gradient checkpointing is used if activations would otherwise not fit
    into the memory of this rank's device. `base` is the directory of the base model, and `ranks` has the device. Raises
    TrainingFailed if the training cannot fit into this memory at all.
    """
    checkpoint, is_bfloat16 = open_checkpoint(base), computes_in(spec, ranks.device) is torch.bfloat16
    if ranks.device.type == "cuda":
        capacity = torch.cuda.get_device_properties(ranks.device).total_memory
    else:
        capacity = psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    lack = lack_of_memory(spec, checkpoint, capacity, is_bfloat16=is_bfloat16)
    if lack is not None:
        raise TrainingFailed(lack)
    return recomputes(spec, checkpoint, capacity, is_bfloat16=is_bfloat16)


def _weights(
    spec: FinetuneSpec, model: TrainedModel, directory: Path | None
) -> AbstractContextManager[dict[str, torch.Tensor] | None]:
    """Context manager that gathers the weights of a sharded model, keyed by name, for writing the trained expert.

    The weights are gathered from all ranks into files below `directory`, which exist while the context is open. A rank
    whose `directory` is None gets an empty dict. The weights have the dtype that `spec` names; the weights of a LoRA
    adapter are float32. If each rank holds the whole model, the result is None, because nothing must be gathered.
    """
    if not model.is_sharded:
        return nullcontext()
    dtype = torch.float32 if spec.adapter is not None else getattr(torch, spec.dtype)
    tensors = model.trained if spec.adapter is not None else model.module.state_dict(keep_vars=True)
    return gathered(tensors, dtype, directory)


def noise_seed(spec: FinetuneSpec) -> int:
    """Seed of the random noise of the optimizer MergOPT, made from an expert's seed and name in `spec`.

    All experts of a fleet (experts that one specification file defines) have the same seed in the specification. The
    experts' names differ, so the results of this function differ. Therefore the random draws of the experts are
    independent.
    """
    digest = hashlib.blake2b(f"{spec.seed}\x1f{spec.name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _load(checkpoint: Path, spec: FinetuneSpec, model: TrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Restore the trained weights in `model` and the optimizer's state from a checkpoint.

    `spec` is the specification of the training. Raises InvalidModel if the noise of the optimizer MergOPT would change:
    an earlier version of this program, which added noise to the trained layers only, wrote the checkpoint, and `spec`
    adds noise to other layers too.
    """
    had_noise_on_trained = (
        isinstance(optimizer, MergOPT)
        and spec.training.layers is not None
        and optimizer.num_moved != sum(p.numel() for p in model.trained.values())
        and "moved" not in checkpoints.optimizer_state(checkpoint).get(MERGOPT_STATE, {})
    )
    if had_noise_on_trained:
        layers = list(spec.training.layers or ())
        raise InvalidModel(
            (
                f"{checkpoint}: was written by a version that adds noise to the trained layers alone; expected "
                f"method.noise_layers: {layers} to continue it, or another directory to begin anew",
            )
        )
    checkpoints.load(checkpoint, trained=model.trained, optimizer=optimizer)


def check(spec: FinetuneSpec, *, access: FileAccess | None = None) -> tuple[str, ...]:
    """Check everything in `spec`, the specification of a fine-tuning, that can be checked without the model's weights.

    `access` limits the files that data and tasks may name; None is no limit. Returns messages for the user about
    evaluation tasks. Raises InvalidModel for problems of the base, and InvalidTask for problems of the data or of
    evaluation tasks.
    """
    check_data(spec, access=access)
    found = check_evaluation(spec, access=access)
    if found.problems:
        raise InvalidTask("\n".join(f"{spec.name}: {problem.field}: {problem.message}" for problem in found.problems))
    return found.notes


def check_evaluation(
    spec: FinetuneSpec, *, access: FileAccess | None = None, reads_base: bool = True
) -> EvaluationCheck:
    """Check the evaluation tasks of the fine-tuning `spec` without the model's weights.

    `access` limits the files that tasks may name; None is no limit. With `reads_base` False, only the tasks themselves
    are checked, as for a base or data that cannot be used.
    """
    tasks: dict[int, TaskSpec] = {}
    problems: list[Problem] = []
    for index, objective in enumerate(spec.evaluation.objectives if spec.evaluation is not None else ()):
        task = task_of(objective, seed=spec.seed, access=access)
        try:
            check_task(task)
        except InvalidTask as error:
            problems.append(Problem(f"evaluation.objectives.{index}.{error.field}", str(error)))
        else:
            tasks[index] = task
    if spec.evaluation is None or not reads_base:
        return EvaluationCheck(tuple(problems))
    base = locate(spec.base)
    found = training_of(base).check_evaluation(spec, base, tasks)
    return EvaluationCheck((*problems, *found.problems), found.notes)


def check_data(spec: FinetuneSpec, *, access: FileAccess | None = None) -> None:
    """Check the base model and the data of the fine-tuning `spec` without the model's weights.

    Unlike in `check`, evaluation tasks are not checked. `access` limits the files that the data may name; None is no
    limit. Raises InvalidModel for problems of the base, and InvalidTask for problems of the data.
    """
    base = locate(spec.base)
    training_of(base).check(spec, base, access)


def learning_rate_at(step: int, num_steps: int, training: Training) -> float:
    """Learning rate of update number `step` (counted from 0) of `num_steps` updates.

    The rate rises linearly during the warm-up of `training.warmup_steps` updates. After the warm-up, the schedule
    "constant" keeps the rate, and the other schedules lower it towards 0, which would be reached at step `num_steps`.
    """
    warmup = training.warmup_steps
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    falls = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    return training.learning_rate * falls[training.schedule]


@dataclass(frozen=True)
class _Ranks:
    """Position of this process among the training processes (ranks), with operations on all ranks together.

    `rank` is the index of this process, `size` is the number of processes, and `device` is the device of this process.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def here(cls, device: torch.device) -> _Ranks:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), device)
        return cls(0, 1, device)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def total(self, number: float) -> float:
        """Sum of `number` over all training processes, each of which must call this method."""
        if self.size == 1:
            return number
        found = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return float(found)


class _Passes:
    """Forward and backward passes of one rank over its share of each batch.

    `spec` describes the training, `model` is the model in training, `rows` are all rows of the training data, and
    `ranks` has the rank of this process.
    """

    def __init__(self, spec: FinetuneSpec, model: TrainedModel, rows: Examples, ranks: _Ranks) -> None:
        self.spec, self.rows, self.ranks = spec, rows, ranks
        self.parameters = list(model.trained.values())
        is_replicated = ranks.size > 1 and not model.is_sharded
        self._loss = DistributedDataParallel(model.loss) if is_replicated else model.loss
        is_bfloat16 = computes_in(spec, ranks.device) is torch.bfloat16
        # Shards are gathered in the dtype of activations.
        self._autocast = torch.autocast(ranks.device.type, torch.bfloat16, enabled=is_bfloat16 and not model.is_sharded)

    def update(self, step: int, optimizer: torch.optim.Optimizer, *, kept: Path | None) -> _Update:
        numbers = batch_rows(len(self.rows), batch=self.spec.training.batch, step=step, seed=self.spec.seed)
        return _Update(self, optimizer, step, numbers, kept)

    def loss(self, rows: Sequence[int]) -> torch.Tensor:
        """Sum of the losses over the targets of some rows; a target is an output whose loss counts."""
        device = self.ranks.device
        inputs = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in self.rows.inputs(rows).items()
        }
        with self._autocast, self.rows.forward_pass():
            total: torch.Tensor = self._loss(**inputs)
        return total

    def without_averaging(self) -> AbstractContextManager[Any]:
        """Context manager that makes backward passes add up this rank's gradients without averaging them over ranks.

        The context is used for each micro-batch of a batch except the last, so that gradients are averaged once for
        each update. The context has no effect if gradients are sharded: shards are averaged after each micro-batch,
        because no rank has room for whole gradients.
        """
        if isinstance(self._loss, DistributedDataParallel):
            context: AbstractContextManager[Any] = self._loss.no_sync()
            return context
        return nullcontext()


class _Update:
    """One update of the weights: its batch, and the closure that computes the gradients for the optimizer.

    The method `gradients` is the closure. An optimizer may call it twice: `loss` and `norm` are the loss and the
    gradient's norm at the first call, and `second_loss` is the loss at the second call. `step` is the number of the
    update, counted from 0. `numbers` are the indices of the batch's rows. `kept` is the directory of the last
    checkpoint, which error messages name; it is None before the first checkpoint.
    """

    def __init__(
        self,
        passes: _Passes,
        optimizer: torch.optim.Optimizer,
        step: int,
        numbers: Sequence[int],
        kept: Path | None,
    ) -> None:
        self._passes, self._optimizer, self._step, self._kept = passes, optimizer, step, kept
        self._batch = list(numbers)
        self.num_targets = sum(passes.rows.num_targets(row) for row in self._batch)
        self.loss = self.norm = math.nan
        self.second_loss: float | None = None
        self._is_first = True

    def gradients(self) -> float:
        """Compute the gradients of the mean loss over all targets of the batch, and return the loss.

        A target is an output whose loss counts. Gradients are averaged over all ranks, and clipped to the largest norm
        that the specification allows. Raises TrainingFailed if the loss or the norm is NaN or infinite.
        """
        self._optimizer.zero_grad()
        ranks = self._passes.ranks
        total = 0.0
        for rows, is_last in self._micro_batches():
            with nullcontext() if is_last else self._passes.without_averaging():
                loss = self._passes.loss(rows)
                # DDP averages over ranks; this loss is a sum over them.
                torch.autograd.backward(loss * (ranks.size / self.num_targets))
                total += float(loss.detach())
        limit = self._passes.spec.training.max_gradient_norm
        clipped = torch.nn.utils.clip_grad_norm_(self._passes.parameters, math.inf if limit is None else limit)
        norm = float(clipped.full_tensor() if isinstance(clipped, DTensor) else clipped)
        mean = ranks.total(total) / self.num_targets
        if not math.isfinite(mean) or not math.isfinite(norm):
            raise TrainingFailed(self._failure(mean, norm))
        if self._is_first:
            self.loss, self.norm, self._is_first = mean, norm, False
        else:
            self.second_loss = mean
        return mean

    @torch.no_grad()
    def loss_at_weights(self) -> float:
        """The mean loss over all targets of the batch at the current weights, without gradients.

        A target is an output whose loss counts. The optimizer MergOPT computes gradients, and the loss that `gradients`
        returns, at weights to which it has added an offset, to simulate a later merge; this method computes the loss
        without the offset. Dropout uses the same random numbers as in `gradients`.
        """
        ranks = self._passes.ranks
        devices = [ranks.device] if ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            total = sum(float(self._passes.loss(rows)) for rows, _ in self._micro_batches())
        return ranks.total(total) / self.num_targets

    def _micro_batches(self) -> Iterator[tuple[Sequence[int], bool]]:
        """Yield this rank's micro-batches of the batch, each with a flag that is True for the last micro-batch.

        A micro-batch has the rows of one forward pass. All ranks have the same number of micro-batches, because they
        gather weights together. For a rank that has too few rows, a micro-batch may be without rows.
        """
        ranks, size = self._passes.ranks, self._passes.spec.training.micro_batch
        mine = self._batch[ranks.rank :: ranks.size]
        most = len(self._batch[:: ranks.size])
        for start in range(0, most, size):
            yield mine[start : start + size], start + size >= most

    def _failure(self, loss: float, norm: float) -> str:
        origins = [origin for row in self._batch for origin in self._passes.rows.origins(row)]
        others = f" and {len(origins) - SHOWN} others" if len(origins) > SHOWN else ""
        kept = f"the last good checkpoint is {self._kept}" if self._kept else "there is no checkpoint yet"
        return (
            f"step {self._step + 1}: the loss is {loss} and the gradient's norm {norm}; the batch was "
            f"{'; '.join(origins[:SHOWN])}{others}; {kept}. A lower learning rate or other data may help"
        )
