"""Plan of the memory that a fine-tuning takes on each of its workers, from the headers of the base model's files.

The sizes of weights, gradients and the optimizer's state are exact. The sizes of activations and gathered weights are
estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from workers.models.checkpoints import Checkpoint
from workers.models.modalities import modality_of
from workers.training.finetuning.spec import ALL_LINEAR, OF_EXPERTS, Adapter, FinetuneSpec
from workers.training.memory import activation_bytes

if TYPE_CHECKING:
    from workers.training.finetuning.modality import TrainingModality

__all__ = ["TrainingMemory", "lack_of_memory", "recomputes", "training_memory"]

FLOAT32 = 4
GIB = 1 << 30

# Elements of logits in memory at once (`workers.training.finetuning.target_loss.CHUNK`), and the bytes of each: as
# computed, in float32, and its gradient.
LOGITS, LOGIT_BYTES = 1 << 26, 12

# Bytes of a weight in NF4: 4 bits, and 8 bits for each block of 64 with 32 bits for each 256 blocks.
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8

# The share of a device's memory that a training may plan to use: the rest is for the allocator and for kernels.
USABLE = 0.9

# Numbers of workers among which a message looks for one that fits.
WORKERS = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of memory that a training takes on each of its workers.

    - `weights`, `gradients`, `optimizer`: the weights, the gradients and the optimizer's state in this worker's shard
    - `offset`: the additional memory of the training method. MergOPT keeps a copy of the weights and the task vectors,
      SAM keeps the offset of the weights for the second gradient, and `tangent` keeps the original weights.
    - `gathered`: weights and gradients that are gathered from all shards while a unit of the model, such as a layer,
      computes
    - `activations`: the activations, including logits
    """

    weights: int
    gradients: int
    optimizer: int
    offset: int
    gathered: int
    activations: int

    @property
    def state(self) -> int:
        """Bytes of memory that are in use during the whole training: weights, gradients, optimizer state and offset.

        These bytes do not depend on the number of rows in a forward pass.
        """
        return self.weights + self.gradients + self.optimizer + self.offset

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.activations

    def text(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "offsets": self.offset,
            "gathered weights": self.gathered,
            "activations": self.activations,
        }
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
        return f"{self.total / GIB:.1f} GiB ({listed})"


def training_memory(
    spec: FinetuneSpec, base: Checkpoint, *, is_bfloat16: bool, recomputes: bool = False
) -> TrainingMemory:
    """Estimate the memory of the training that `spec` describes, on each of its workers.

    `base` has the tensors of the base model. `is_bfloat16` says whether activations are bfloat16; otherwise they are
    float32. `recomputes` says whether activations are computed again in the backward pass, to save their memory.
    """
    value = 2 if is_bfloat16 else FLOAT32
    sizes = {name: math.prod(tensor.shape) for name, tensor in base.tensors.items()}
    whole = sum(sizes.values())
    layers = _of_layers(sizes)
    method = spec.method
    quantised = 0
    if spec.adapter is not None:
        trained = _adapter_elements(spec, {name: tuple(each.shape) for name, each in base.tensors.items()})
        frozen, frozen_bytes = whole, value
        if spec.adapter.base_precision == "nf4":
            linear = sum(size for name, size in sizes.items() if _is_linear(name, tuple(base.tensors[name].shape)))
            quantised = round(NF4_BYTES * linear)
            frozen = whole - linear
        noisy_targets = spec.adapter.targets if method.noise_targets is None else method.noise_targets
        moved = sum(
            size for name, size in sizes.items() if is_target(noisy_targets, name, tuple(base.tensors[name].shape))
        )
    else:
        chosen = spec.training.layers
        trained = whole if chosen is None else sum(layers.get(layer, 0) for layer in chosen)
        frozen, frozen_bytes = whole - trained, FLOAT32
        noisy = method.noise_layers
        moved = whole if noisy is None else sum(layers.get(layer, 0) for layer in noisy)
    moved_bytes = frozen_bytes if spec.adapter is not None else FLOAT32
    is_sgd = method.kind == "sgd" or (method.kind != "adamw" and method.optimizer == "sgd")
    moments = (1 if method.momentum else 0) if is_sgd else 2
    offset = 0
    if method.kind == "mergopt":
        offset = 0 if method.in_layers else moved * moved_bytes
        if method.noise in OF_EXPERTS:
            offset += (len(method.fit_to) + (method.noise == "merges")) * moved * FLOAT32
    elif method.kind in ("sam", "asam"):
        offset = 3 * trained * FLOAT32  # the scaled gradient, the offset, and the copy
    elif method.kind == "tangent":
        offset = 2 * trained * FLOAT32
    shards = spec.workers if spec.is_sharded else 1
    gathered = 0
    if shards > 1:
        unit, rest = max(layers.values(), default=0), whole - sum(layers.values())
        # The unit that computes, the one that is gathered for the next step, and a gradient before it is divided.
        gathered = (2 * unit + rest) * value + (max(unit, rest) * (value + FLOAT32) if trained == whole else 0)
    training = cast("TrainingModality", modality_of(base.settings).training_module())
    tokens = spec.training.micro_batch * training.tokens_of_row(spec, base.settings)
    activations = activation_bytes(base.settings, tokens, value, recomputes=recomputes)
    if method.kind == "tangent":
        activations *= 2
    vocabulary = int(base.settings.get("vocab_size") or 0)
    logits = tokens * vocabulary if method.kind == "tangent" else min(tokens * vocabulary, LOGITS)
    return TrainingMemory(
        weights=(trained * FLOAT32 + frozen * frozen_bytes + quantised) // shards,
        gradients=trained * FLOAT32 // shards,
        optimizer=moments * trained * FLOAT32 // shards,
        offset=offset // shards,
        gathered=gathered,
        activations=activations + logits * LOGIT_BYTES,
    )


def lack_of_memory(spec: FinetuneSpec, base: Checkpoint, capacity: int, *, is_bfloat16: bool) -> str | None:
    """Reason why the training `spec` needs more than `capacity` bytes of memory on a worker; None if it may fit.

    `base` has the tensors of the base model. `is_bfloat16` says whether activations are bfloat16; otherwise they are
    float32. The text also names changes of the specification with which the training would fit, if any are known.
    """
    plan = training_memory(spec, base, is_bfloat16=is_bfloat16, recomputes=spec.method.kind != "tangent")
    if plan.state <= capacity:
        return None

    def fits(other: FinetuneSpec) -> bool:
        found = training_memory(other, base, is_bfloat16=is_bfloat16, recomputes=True)
        return found.total <= USABLE * capacity

    ways = []
    if spec.method.kind != "tangent":
        more = (count for count in WORKERS if count > spec.workers)
        workers = next((count for count in more if fits(spec.model_copy(update={"workers": count}))), None)
        if workers is not None:
            ways.append(f"workers: {workers}")
    is_whole = spec.adapter is None and spec.training.layers is None and spec.method.kind != "tangent"
    if is_whole and fits(spec.model_copy(update={"adapter": Adapter()})):
        ways.append("an adapter")
    elif spec.method.kind in ("adamw", "sgd") and spec.training.layers is None and spec.workers == 1:
        coarse = (spec.adapter or Adapter()).model_copy(update={"base_precision": "nf4"})
        if coarse != spec.adapter and fits(spec.model_copy(update={"adapter": coarse})):
            ways.append("an adapter with base_precision: nf4")
    advice = f"; what fits is {' or '.join(ways)}" if ways else ""
    return (
        f"training takes {plan.text()} on each of {spec.workers} workers, which have {capacity / GIB:.1f} GiB "
        f"each{advice}"
    )


def recomputes(spec: FinetuneSpec, base: Checkpoint, capacity: int, *, is_bfloat16: bool) -> bool:
    """Whether activations are computed again in the backward pass instead of being kept in memory.

    The specification `spec` decides. If it says "auto", the result is True if activations would otherwise not fit into
    `capacity` bytes. `base` has the tensors of the base model. `is_bfloat16` says whether activations are bfloat16;
    otherwise they are float32.
    """
    wanted = spec.training.gradient_checkpointing
    if wanted != "auto":
        return wanted
    if spec.method.kind == "tangent":
        return False
    return training_memory(spec, base, is_bfloat16=is_bfloat16).total > USABLE * capacity


def _of_layers(sizes: Mapping[str, int]) -> dict[int, int]:
    """Number of elements in each decoder layer, keyed by the layer's index.

    `sizes` has the number of elements of each tensor, keyed by the tensor's name.
    """
    found: dict[int, int] = {}
    for name, size in sizes.items():
        parts = name.split(".")
        number = next((int(each) for each in parts if each.isdecimal()), None)
        if number is not None:
            found[number] = found.get(number, 0) + size
    return found


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the tensor `name` is the weight of a linear layer in a decoder layer; NF4 quantises these weights."""
    parts = name.split(".")
    return len(shape) == 2 and parts[-1] == "weight" and any(each.isdecimal() for each in parts)


def is_target(targets: str | Sequence[str], name: str, shape: tuple[int, ...]) -> bool:
    """Whether the tensor `name` of a model is a weight that an adapter with the targets `targets` changes.

    `targets` are names of modules, ALL_LINEAR, or a pattern, which counts as if it matched all modules. `shape` is the
    tensor's shape.
    """
    parts = name.split(".")
    if len(shape) < 2 or parts[-1] != "weight":
        return False
    if isinstance(targets, str):
        return targets != ALL_LINEAR or any(each.isdecimal() for each in parts)
    return any(parts[-2] == target or ".".join(parts[:-1]).endswith(f".{target}") for target in targets)


def _adapter_elements(spec: FinetuneSpec, shapes: Mapping[str, tuple[int, ...]]) -> int:
    assert spec.adapter is not None
    adapted = (shape for name, shape in shapes.items() if is_target(spec.adapter.targets, name, shape))
    return sum(math.prod(shape[:-2]) * spec.adapter.rank * sum(shape[-2:]) for shape in adapted)
