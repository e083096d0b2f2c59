"""The model that a fine-tuning trains: all weights, the weights of some layers, or LoRA adapters."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.errors import InvalidModel
from workers.file_access import FileAccess
from workers.training.finetuning.memory_plan import is_target
from workers.training.finetuning.modality import TrainingModality, training_of
from workers.training.finetuning.sharding import ShardedModel, decoder_layers, shard, unread_model
from workers.training.finetuning.spec import FinetuneSpec
from workers.training.mergopt.tangent import TangentModel

__all__ = ["TrainedModel", "check_packing", "computes_in", "load_model"]

# Tokens per document in the check that documents in one row do not see each other.
PROBE = 8

# The largest difference that a document may make in a logit of the next one, relative to the standard deviation of
# logits. Both rows are computed by the same kernels. With random weights it was at most 1e-6 in layouts that keep
# documents apart, and 0 with bfloat16; in others it was at least 1e-3 with float32 and 0.018 with bfloat16.
LEAKED = {torch.float32: 1e-4, torch.bfloat16: 0.01}

# The largest difference that another kernel for attention may make in a logit, relative to the same deviation.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@dataclass(frozen=True)
class TrainedModel:
    """A model in training, with its trained parameters.

    - `module`: the model that transformers or peft saves
    - `loss`: the module that is called in training and returns the sum of losses over targets
    - `trained`: the parameters that are updated, keyed by name
    - `moved`: the parameters to which MergOPT adds its offset while the gradient is computed; None if they are the
      trained parameters
    - `tangent`: the linearization (linear in the weights) that is trained in place of `module`, or None
    - `is_sharded`: whether this rank holds only a shard of each parameter; all ranks must then call the model together
    """

    module: Any
    loss: torch.nn.Module
    trained: dict[str, torch.nn.Parameter]
    moved: tuple[torch.nn.Parameter, ...] | None
    tangent: TangentModel | None = None
    is_sharded: bool = False

    @property
    def called(self) -> Any:
        """The model to call for scoring and checks, with the interface of a transformers model.

        The result is the field `module` or, if parameters are sharded, a wrapper that computes on all ranks together.
        """
        return ShardedModel(self.loss, self.module) if self.is_sharded else self.module


def computes_in(spec: FinetuneSpec, device: torch.device) -> torch.dtype:
    """Dtype of activations in the training `spec` on `device`.

    If a LoRA adapter is trained, frozen weights also have this dtype, unless they are quantised.
    """
    wanted = spec.training.precision
    is_bfloat16 = wanted == "bfloat16" or (wanted == "auto" and device.type == "cuda")
    return torch.bfloat16 if is_bfloat16 else torch.float32


def load_model(
    spec: FinetuneSpec,
    base: Path,
    device: torch.device,
    *,
    is_sharded: bool = False,
    recomputes: bool = False,
    access: FileAccess | None = None,
) -> TrainedModel:
    """Load the base model in the directory `base` for the training `spec` on `device`, in training mode.

    Trained weights are float32. If a LoRA adapter is trained, the frozen weights have the dtype of activations, or are
    NF4. With `is_sharded`, each rank of the process group holds a shard of each parameter. `recomputes` says whether
    activations are computed again in the backward pass. `access` limits the files that the data may name; None is no
    limit. A task's head is trained only if it is new, and gets no offset of MergOPT, because merges do not change it.
    Raises InvalidModel if the specification names layers that the base does not have, if its adapter targets or
    its noise targets match no module, or if a needed library is missing.
    """
    training = training_of(base)
    is_tangent = spec.method.kind == "tangent"
    dtype = torch.float32 if spec.adapter is None else computes_in(spec, device)
    unread = unread_model(base, dtype) if is_sharded and training.reads_by_unit else None
    if unread is not None:
        model, weights = unread
    elif spec.adapter is not None and spec.adapter.base_precision == "nf4":
        model = _in_four_bits(base, device, dtype)
    else:
        options = {"dtype": dtype, "attn_implementation": "eager" if is_tangent else None}
        model = training.network(spec, base, access, options)
        if not is_sharded:  # shards are moved unit by unit
            model = model.to(device)
    moved: tuple[torch.nn.Parameter, ...] | None = None
    if spec.adapter is not None:
        model, moved = _with_adapter(model, spec, training)
    else:
        encoder = tuple(p for name, p in model.named_parameters() if not training.is_head(name))
        if len(encoder) < len(list(model.parameters())):
            moved = encoder
        if spec.training.layers is not None:
            chosen = {id(p) for p in _of_layers(model, spec.training.layers, "training.layers")}
            for parameter in encoder:
                parameter.requires_grad_(id(parameter) in chosen)
            moved = encoder
        if spec.method.noise_layers is not None:
            moved = _of_layers(model, spec.method.noise_layers, "method.noise_layers")
    if recomputes:
        if spec.adapter is not None:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    tangent = TangentModel(model, output=training.output_of(model)) if is_tangent else None
    loss = training.loss(model if tangent is None else tangent)
    if is_sharded:
        names = None if moved is None else _names(model, moved)
        shard(
            loss,
            decoder_layers(model),
            device=device,
            computes_in=computes_in(spec, device),
            **({} if unread is None else {"read": weights.read_into}),
        )
        parameters = dict(model.named_parameters())
        moved = None if names is None else tuple(parameters[name] for name in names)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return TrainedModel(model, loss, trained, moved, tangent, is_sharded)


def _in_four_bits(base: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the base model with linear layers in 4 bits (NF4; their scales are also quantised), computing in `dtype`.

    Each weight is quantised as it is read, so that no copy of the model in full is in memory. Raises InvalidModel if
    bitsandbytes is not installed.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise InvalidModel(
            ("adapter.base_precision: nf4 needs the package bitsandbytes; install mergesearch with the extra nf4",)
        )
    return AutoModelForCausalLM.from_pretrained(
        base,
        dtype=dtype,
        trust_remote_code=False,
        device_map={"": device},
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
    )


def _names(model: Any, parameters: tuple[torch.nn.Parameter, ...]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in parameters]


@torch.no_grad()
def check_packing(model: Any, called: Any = None) -> None:
    """Check that a document in a row of several documents does not change the model's outputs for the next document.

    The positions in a row, which restart with each document, keep attention within one document. But layers with a
    state (recurrent or convolutional layers) may carry the state into the next document. The check compares two rows
    whose first documents differ and whose second documents are equal. `model` is a transformers model; if it has
    shards, `called` is the wrapper that calls it on all ranks together. Raises InvalidModel if the logits of the second
    documents differ by more than rounding.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    called = model if called is None else called
    device = next(model.parameters()).device
    tokens = torch.arange(3 * PROBE, device=device) % vocabulary
    first, other, second = tokens.split(PROBE)
    rows = torch.stack([torch.cat([first, second]), torch.cat([other, second])])
    positions = torch.arange(PROBE, device=device).repeat(2).expand(2, -1)
    was_training = model.training
    model.eval()
    found = called(input_ids=rows, position_ids=positions, use_cache=False).logits[:, PROBE:]
    logits = found.float()
    model.train(was_training)
    difference = float((logits[0] - logits[1]).abs().max())
    if not difference <= LEAKED[found.dtype] * float(logits.std()):
        raise InvalidModel(
            (
                f"data.packing: true; in models of type {model.config.model_type!r} a document of a row changes the "
                f"outputs for the next one (by {difference:.2g} in a logit), because layers keep a state across "
                "documents; expected data.packing: false",
            )
        )


def _with_adapter(
    model: Any, spec: FinetuneSpec, training: TrainingModality
) -> tuple[Any, tuple[torch.nn.Parameter, ...]]:
    from peft import LoraConfig, get_peft_model

    assert spec.adapter is not None
    targets, noisy = spec.adapter.targets, spec.method.noise_targets
    # The adapted model has other names for the same parameters.
    named = (
        () if noisy is None else tuple(p for n, p in model.named_parameters() if is_target(noisy, n, tuple(p.shape)))
    )
    if noisy is not None and not named:
        raise InvalidModel(
            (f"method.noise_targets: {noisy}; the model has no such modules, its linear modules are {_linear(model)}",)
        )
    try:
        adapted = get_peft_model(
            model,
            LoraConfig(
                r=spec.adapter.rank,
                lora_alpha=spec.adapter.alpha,
                lora_dropout=spec.adapter.dropout,
                target_modules=targets if isinstance(targets, str) else list(targets),
                **training.adapter_options(),
            ),
        )
    except ValueError as error:
        raise InvalidModel(
            (
                f"adapter.targets: {targets if isinstance(targets, str) else ', '.join(targets)}: {error} The model's "
                f"linear modules are {_linear(model)}",
            )
        ) from error
    # The offset of a merge is in the weights that the adapters change, not in the adapters. They change no bias.
    own = tuple(p for name, p in adapted.named_parameters() if name.endswith(".base_layer.weight"))
    return adapted, own if noisy is None else named


def _linear(model: Any) -> str:
    """The last parts of the names of a model's linear modules, for messages."""
    kinds = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return ", ".join(sorted(kinds))


def _of_layers(model: Any, layers: tuple[int, ...], option: str) -> tuple[torch.nn.Parameter, ...]:
    """The parameters of the layers with the indices `layers`.

    Raises InvalidModel if the model lacks one of the layers. The message names `option`, the option of the
    specification that lists the layers.
    """
    count = model.config.num_hidden_layers
    if unknown := [layer for layer in layers if layer >= count]:
        raise InvalidModel((f"{option}: {unknown[0]}; the model has the layers 0 to {count - 1}",))
    places = [f".layers.{layer}." for layer in layers]
    return tuple(p for name, p in model.named_parameters() if any(place in f".{name}" for place in places))
