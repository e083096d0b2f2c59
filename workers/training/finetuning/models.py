"""The model that a fine-tuning trains: all weights, the weights of some layers, or LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.errors import InvalidModel
from workers.training.finetuning.spec import FinetuneSpec
from workers.training.mergopt.tangent import TangentModel

__all__ = ["TrainedModel", "check_packing", "load_model", "pad_token"]

# Tokens of each document with which it is checked that documents in a row do not see each other.
PROBE = 8

# The largest difference that rounding may make in a logit, relative to the standard deviation of logits. It was 1e-6 in
# layouts that keep documents apart, and 1e-3 and more in others, with random weights.
ROUNDING = 1e-4


@dataclass(frozen=True)
class TrainedModel:
    """A model in training, with its trained parameters.

    `module` is the model that transformers or peft saves. `forward` is the module that is called in training and
    returns logits: a wrapper of `module`, or its linearization. `trained` are the parameters that are updated, by name.
    `moved` are the parameters to which MergOPT adds its offset while the gradient is computed; None means the trained
    parameters, which are then all parameters.
    """

    module: Any
    forward: torch.nn.Module
    trained: dict[str, torch.nn.Parameter]
    moved: tuple[torch.nn.Parameter, ...] | None


class _Logits(torch.nn.Module):
    """Module that wraps a transformers model and returns only the logits [rows, columns, vocabulary]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(**inputs, use_cache=False).logits
        return logits


def load_model(spec: FinetuneSpec, base: Path, device: torch.device) -> TrainedModel:
    """Load the base model for training, in float32 on `device` and in training mode.

    Raises InvalidModel for layers that the base does not have, and for adapter targets that match nothing.
    """
    from transformers import AutoModelForCausalLM

    is_tangent = spec.method.kind == "tangent"
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        trust_remote_code=False,
        attn_implementation="eager" if is_tangent else None,
    ).to(device)
    moved: tuple[torch.nn.Parameter, ...] | None = None
    if spec.adapter is not None:
        model, moved = _with_adapter(model, spec)
    else:
        if spec.training.layers is not None:
            chosen = {id(p) for p in _of_layers(model, spec.training.layers, "training.layers")}
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) in chosen)
            moved = tuple(model.parameters())
        if spec.method.noise_layers is not None:
            moved = _of_layers(model, spec.method.noise_layers, "method.noise_layers")
    if spec.training.gradient_checkpointing:
        if spec.adapter is not None:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return TrainedModel(model, TangentModel(model) if is_tangent else _Logits(model), trained, moved)


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Check that packed documents are independent: no document changes the outputs for the next one in its row.

    In `model`, a transformers model in float32, the positions restrict attention to one document, but layers with a
    state (recurrent or convolutional) keep this state from one document to the next. The check compares two rows whose
    first documents differ and whose second documents are equal. Raises InvalidModel if the logits of the second
    documents differ.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.arange(3 * PROBE, device=model.device) % vocabulary
    first, other, second = tokens.split(PROBE)
    rows = torch.stack([torch.cat([first, second]), torch.cat([other, second])])
    positions = torch.arange(PROBE, device=model.device).repeat(2).expand(2, -1)
    was_training = model.training
    model.eval()
    logits = model(input_ids=rows, position_ids=positions, use_cache=False).logits[:, PROBE:].float()
    model.train(was_training)
    difference = float((logits[0] - logits[1]).abs().max())
    if not difference <= ROUNDING * float(logits.std()):
        raise InvalidModel(
            (
                f"data.packing: true; in models of type {model.config.model_type!r} a document of a row changes the "
                f"outputs for the next one (by {difference:.2g} in a logit), because layers keep a state across "
                "documents; expected data.packing: false",
            )
        )


def pad_token(spec: FinetuneSpec, tokenizer: Any, base: Path) -> int:
    """The id of the token with which rows are padded. Raises InvalidModel if the tokenizer has none."""
    name = spec.data.pad_token
    if name is not None:
        found = tokenizer.get_vocab().get(name)
        if found is None:
            raise InvalidModel((f"data.pad_token: {name!r}; the tokenizer of {base} has no such token",))
        return int(found)
    if tokenizer.pad_token_id is None:
        raise InvalidModel((f"{base}: its tokenizer has no pad token; name one of its tokens in data.pad_token",))
    return int(tokenizer.pad_token_id)


def _with_adapter(model: Any, spec: FinetuneSpec) -> tuple[Any, tuple[torch.nn.Parameter, ...]]:
    from peft import LoraConfig, get_peft_model

    assert spec.adapter is not None
    targets = spec.adapter.targets
    try:
        adapted = get_peft_model(
            model,
            LoraConfig(
                r=spec.adapter.rank,
                lora_alpha=spec.adapter.alpha,
                lora_dropout=spec.adapter.dropout,
                target_modules=targets if isinstance(targets, str) else list(targets),
                task_type="CAUSAL_LM",
            ),
        )
    except ValueError as error:
        kinds = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        raise InvalidModel(
            (
                f"adapter.targets: {targets if isinstance(targets, str) else ', '.join(targets)}: {error} The model's "
                f"linear modules are {', '.join(kinds)}",
            )
        ) from error
    # The offset of a merge is in the weights that the adapters change, not in the adapters.
    return adapted, tuple(p for name, p in adapted.named_parameters() if ".base_layer." in name)


def _of_layers(model: Any, layers: tuple[int, ...], option: str) -> tuple[torch.nn.Parameter, ...]:
    """The weights of the given decoder layers. Raises InvalidModel, naming `option`, if the model lacks a layer."""
    count = model.config.num_hidden_layers
    if unknown := [layer for layer in layers if layer >= count]:
        raise InvalidModel((f"{option}: {unknown[0]}; the model has the layers 0 to {count - 1}",))
    places = [f".layers.{layer}." for layer in layers]
    return tuple(p for name, p in model.named_parameters() if any(place in f".{name}" for place in places))
