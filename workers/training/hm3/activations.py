"""What a model's layers hand on while it reads the prompts of search samples: what alignments are learned from.

A tenth of the search samples is read, as HM3's authors do, the first ones in their order. The first token of each text
is left out: in trained models its activations are larger than all others by orders of magnitude (Sun et al., "Massive
Activations in Large Language Models", 2024), so that they alone would be aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from search_spaces.recipe import Recipe
from search_spaces.study.sections import EngineOptions
from workers.errors import InvalidModel
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into
from workers.merging.plan import plan_tensors
from workers.training.model import TrainableModel
from workers.types import Family, Placement, TaskSpec

__all__ = ["MIN_SAMPLES", "SHARE", "Activations", "lack_of_samples", "positions_of", "prompts_of", "read_activations"]

SHARE = 0.1

# Eight to learn from and two held out.
MIN_SAMPLES, HELD_OUT_EVERY = 10, 5

# Tokens that are kept, evenly over all texts, and tokens of one forward pass.
MAX_ROWS, MAX_TOKENS = 4096, 16_384


@dataclass(frozen=True)
class Activations:
    """`before` [L + 1, N, D]: the residual stream before each of L layers, then after the last, at N tokens, in
    float32. `is_held_out` [N]: whether the token's text is one that alignments are not learned from."""

    before: Tensor
    is_held_out: Tensor

    def after(self, layer: int) -> Tensor:
        """[N, D]: what the layer hands on."""
        return self.before[layer + 1]

    def to_bytes(self) -> bytes:
        content: bytes = safetensors.torch.save({"before": self.before.contiguous(), "is_held_out": self.is_held_out})
        return content

    @classmethod
    def from_bytes(cls, content: bytes) -> Activations:
        """Raises ValueError for anything else."""
        try:
            found = safetensors.torch.load(content)
            return cls(found["before"], found["is_held_out"])
        except (safetensors.SafetensorError, KeyError) as error:
            raise ValueError(f"no activations: {error!r}") from error


def positions_of(num_samples: Mapping[str, int]) -> dict[str, range]:
    """The sample positions that are read, of objectives with so many search samples."""
    return {name: range(math.ceil(SHARE * num)) for name, num in num_samples.items()}


def lack_of_samples(num_samples: Mapping[str, int]) -> str | None:
    """Why alignments cannot be learned from so many search samples of each objective; None if they can."""
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
    """The tokens of the prompts of these samples, one for each sample: of several options the first one's. Raises
    InvalidTask."""
    evaluator = TaskEvaluator(None, Prompts(family_dir, options))
    return tuple(evaluator.requests(tasks[name], at)[0].tokens for name, each in positions.items() for at in each)


def read_activations(
    family: Family, recipe: Recipe, prompts: Sequence[Sequence[int]], *, device: str | None = None
) -> Activations:
    """Of this merge, with the layers of a source model, in float32, while it reads the prompts. Raises InvalidModel
    where transformers hides its layers."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    bank = Bank(family, Placement.MAPPED, device=place)
    model = TrainableModel(bank, torch.float32, device=place)
    with torch.no_grad():
        merge_into(plan_tensors(recipe, bank), bank, dict(model.memory))
    layers = getattr(getattr(model.module, model.module.base_model_prefix), "layers", None)
    if layers is None or len(layers) != bank.base.layout.num_layers:
        raise InvalidModel((f"alignment: {type(model.module).__name__} does not list its layers",))
    texts = [index for index, prompt in enumerate(prompts) if len(prompt) > 1]
    num_rows = sum(len(prompts[index]) - 1 for index in texts)
    step = max(1, math.ceil(num_rows / MAX_ROWS))
    parts: list[Tensor] = []
    held_out: list[bool] = []
    with _Recorded(layers) as recorded, torch.no_grad():
        for batch in _batches(texts, prompts):
            width = max(len(prompts[index]) for index in batch)
            tokens = torch.zeros(len(batch), width, dtype=torch.long)
            for row, index in enumerate(batch):
                tokens[row, : len(prompts[index])] = torch.tensor(prompts[index])
            model.logits(tokens.to(place), 1)
            before = recorded.take()
            for row, index in enumerate(batch):
                chosen = range(1 + index % step, len(prompts[index]), step)
                parts.append(before[:, row, list(chosen)].cpu())
                held_out += [index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1] * len(chosen)
    return Activations(torch.cat(parts, dim=1), torch.tensor(held_out))


def _batches(texts: Sequence[int], prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Texts of similar length together, with at most MAX_TOKENS tokens with padding, or one text."""
    together: list[int] = []
    for index in sorted(texts, key=lambda each: (len(prompts[each]), each)):
        if together and (len(together) + 1) * len(prompts[index]) > MAX_TOKENS:
            yield together
            together = []
        together.append(index)
    if together:
        yield together


class _Recorded:
    """Within, what the layers receive, and what the last one hands on, is kept for `take`."""

    def __init__(self, layers: Any) -> None:
        self._layers = layers
        self._found: list[Tensor] = []

    def __enter__(self) -> _Recorded:
        self._hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: self._found.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            for layer in self._layers
        ]
        last = self._layers[-1].register_forward_hook(
            lambda _, __, output: self._found.append(output[0] if isinstance(output, tuple) else output)
        )
        self._hooks.append(last)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> Tensor:
        """[L + 1, rows, columns, D] of the last forward pass."""
        found, self._found = torch.stack(self._found).float(), []
        return found
