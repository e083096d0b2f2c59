"""Training with shards: each rank holds a part of the weights, the gradients and the optimizer's state (FSDP2).

Each decoder layer is a unit, and the rest of the model is one more unit. A rank gathers a unit's weights while the unit
computes, and frees them afterwards. The base model's weights are read unit by unit, so that no rank ever holds the
whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from workers.models.checkpoints import Checkpoint, open_checkpoint

__all__ = ["BaseWeights", "ShardedModel", "decoder_layers", "gathered", "local", "part_of", "shard", "unread_model"]


@dataclass(frozen=True)
class BaseWeights:
    """Weights of a base model that are still in its files, and are read when the model is divided over the ranks.

    Until then, each parameter of the model is a placeholder with a single element in memory. `names` maps the id of
    each placeholder to the placeholder and the name of its tensor in `checkpoint`. The reference to the placeholder
    ensures that no other object gets this id.
    """

    checkpoint: Checkpoint
    names: dict[int, tuple[torch.nn.Parameter, str]] = field(default_factory=dict)

    @torch.no_grad()
    def read_into(self, module: torch.nn.Module, device: torch.device) -> None:
        """Read the weights of `module` to `device`.

        Each placeholder in the module (a parameter that is not read yet) is replaced by a parameter with its values and
        the placeholder's dtype. A parameter that several modules share stays one parameter.
        """
        found: dict[int, torch.nn.Parameter] = {}
        for part in module.modules():
            for attribute, parameter in part._parameters.items():
                if parameter is None or id(parameter) not in self.names:
                    continue
                if id(parameter) not in found:
                    _, name = self.names[id(parameter)]
                    values = self.checkpoint.read(name)
                    found[id(parameter)] = torch.nn.Parameter(
                        values.to(device, parameter.dtype, copy=True), requires_grad=parameter.requires_grad
                    )
                part._parameters[attribute] = found[id(parameter)]


def unread_model(base: Path, dtype: torch.dtype) -> tuple[Any, BaseWeights] | None:
    """Make the transformers model in the directory `base` without reading its weights.

    Returns the model and the object that reads the weights later, or None if transformers names or groups the model's
    weights differently from its files. Each parameter of the model, of the dtype `dtype`, is a placeholder until its
    values are read.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(base)
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()  # a parameter that was registered twice without memory became two
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    tied = set(model.state_dict()) - shapes.keys()  # other names of parameters; anything else would be a buffer
    buffers = {name for name, _ in model.named_buffers()}
    if any(stored.get(name) != shape for name, shape in shapes.items()) or tied & buffers:
        return None
    weights = BaseWeights(checkpoint)
    placeholders: dict[int, torch.nn.Parameter] = {}
    originals = dict(model.named_parameters())  # kept, so that their ids stay their own
    names = {id(parameter): name for name, parameter in originals.items()}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in placeholders:
                    # On the CPU instead of "meta", so that adapters around it begin as in an ordinary model.
                    shared = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                    unread = torch.nn.Parameter(shared)
                    placeholders[id(parameter)] = unread
                    weights.names[id(unread)] = unread, names[id(parameter)]
                module._parameters[attribute] = placeholders[id(parameter)]
    return model.train(), weights


def decoder_layers(model: Any) -> Sequence[torch.nn.Module]:
    """Decoder layers of a transformers or peft model, in order; empty if the model has no list of them."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    count = causal.config.get_text_config().num_hidden_layers
    lists = (m for m in causal.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    return list(next(lists, ()))


def shard(
    root: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
    *,
    device: torch.device,
    computes_in: torch.dtype,
    read: Callable[[torch.nn.Module, torch.device], None] = lambda *_: None,
) -> None:
    """Divide the parameters of `root` over the ranks of the process group along their first dimension, in place.

    While a module computes, its weights are gathered from all ranks. `layers` are modules within `root` that are
    gathered one at a time. `read` reads the weights of a module to `device` before the module is divided. Gathered
    weights and activations have the dtype `computes_in`; gradients are added up in float32.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if computes_in is torch.float32 else computes_in, reduce_dtype=torch.float32
    )
    for layer in layers:
        read(layer, device)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    read(root, device)
    # By default the root keeps its gathered weights after a forward pass: after one without a backward pass, they
    # would be those of the update before.
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, which shares the memory of `tensor`.

    The result is the whole tensor if it is not sharded.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of the tensor `whole`, sharded in the same way as the tensor `like`.

    `like` has the same shape as `whole`. If `like` is not sharded, the result is `whole`.
    """
    if not isinstance(like, DTensor):
        return whole
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


@contextmanager
def gathered(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, directory: Path | None
) -> Iterator[dict[str, torch.Tensor]]:
    """Context manager that gathers whole tensors from sharded ones; the whole tensors are files mapped into memory.

    All ranks must enter the context. `tensors` has the sharded tensors, keyed by name, and the result has the whole
    tensors, of `dtype`, keyed by the same names. Tensors are gathered one at a time and written to hidden files below
    `directory`; the files are removed at the end. Therefore no rank holds more than one whole tensor in its own memory.
    Ranks whose `directory` is None get an empty dict.
    """
    found: dict[str, torch.Tensor] = {}
    files: list[Path] = []
    known: dict[int, torch.Tensor] = {}
    try:
        for number, (name, tensor) in enumerate(tensors.items()):
            if id(tensor) in known:  # tied weights
                found[name] = known[id(tensor)]
                continue
            with torch.no_grad():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            if directory is None:
                known[id(tensor)] = torch.empty(0)
                continue
            files.append(directory / f".{number}.gathered")
            mapped = torch.from_file(str(files[-1]), shared=True, size=whole.numel(), dtype=dtype).view(whole.shape)
            found[name] = known[id(tensor)] = mapped.copy_(whole)
        yield {} if directory is None else found
    finally:
        for file in files:
            if file.exists():
                os.unlink(file)


class ShardedModel:
    """Wrapper that gives a model with shards the interface of a transformers model, to score it on all ranks.

    All ranks must make the same calls. `root` is the module that was divided (function `shard`). `module` is the
    transformers or peft model within it.
    """

    def __init__(self, root: torch.nn.Module, module: Any) -> None:
        self._root, self.module = root, module

    def parameters(self) -> Any:
        return self._root.parameters()

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        # Tensors made in inference mode could not be used in a later backward pass.
        given = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}
        return self._root(**given)
