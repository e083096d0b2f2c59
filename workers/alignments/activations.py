"""Recording of the input of each layer of a model on given prompts.

The activations of the first token of each text are stored separately. In trained models they are larger than all other
activations by orders of magnitude (Sun et al., "Massive Activations in Large Language Models", 2024), so they would
dominate an alignment that is fitted to them.

Axes: L layers, N tokens, D channels of the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.errors import InvalidModel

__all__ = ["Activations", "activation_bytes", "read_activations"]

# Every fifth text is held out.
HELD_OUT_EVERY = 5

# Tokens that are kept, evenly over all texts, and tokens of one forward pass.
MAX_ROWS, MAX_TOKENS = 4096, 16_384

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Activations:
    """Activations of a model with L layers, in float32: the residual stream before each layer and at the end.

    `before` [L + 1, N tokens, D channels] has the input of each layer, then the output of the last layer, without the
    first token of each text. `first` [L + 1, texts, D] has the activations of these first tokens. `is_held_out` [N] is
    true for the tokens of held-out texts, which measure the quality of alignments. Alignments are learned from the
    other tokens.
    """

    before: Tensor
    first: Tensor
    is_held_out: Tensor

    def after(self, layer: int) -> Tensor:
        """The residual stream [tokens, channels] after the layer with index `layer`, from 0."""
        return self.before[layer + 1]


def read_activations(model: Any, prompts: Sequence[Sequence[int]]) -> Activations:
    """Run a transformers model on prompts, and return the inputs and outputs of its layers.

    `prompts` are lists of token ids. Besides the first token of each prompt, at most about MAX_ROWS tokens (a constant
    of this module) are used, spread evenly over all prompts. Every fifth prompt is held out: its tokens are for
    measuring the quality of alignments (maps of the residual stream), not for learning them. Raises InvalidModel if the
    model has no list of decoder layers.
    """
    layers = getattr(getattr(model, model.base_model_prefix), "layers", None)
    if layers is None or len(layers) != model.config.num_hidden_layers:
        raise InvalidModel((f"alignment: {type(model).__name__} does not list its layers",))
    texts = [index for index, prompt in enumerate(prompts) if len(prompt) > 1]
    num_rows = sum(len(prompts[index]) - 1 for index in texts)
    step = max(1, math.ceil(num_rows / MAX_ROWS))
    parts: list[Tensor] = []
    first: list[Tensor] = []
    held_out: list[bool] = []
    with _Recorder(layers) as recorder, torch.no_grad():
        for batch in _batches(texts, prompts):
            width = max(len(prompts[index]) for index in batch)
            tokens = torch.zeros(len(batch), width, dtype=torch.long)
            for row, index in enumerate(batch):
                tokens[row, : len(prompts[index])] = torch.tensor(prompts[index])
            model(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1)
            before = recorder.take()
            first.append(before[:, :, 0].to("cpu", copy=True))  # a view would keep all activations of the batch
            for row, index in enumerate(batch):
                chosen = range(1 + index % step, len(prompts[index]), step)
                parts.append(before[:, row, list(chosen)].cpu())
                held_out += [index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1] * len(chosen)
            del before  # the next pass needs its memory
    return Activations(torch.cat(parts, dim=1), torch.cat(first, dim=1), torch.tensor(held_out))


def activation_bytes(config: Mapping[str, Any], *, num_prompts: int, max_tokens: int) -> int:
    """Bytes that `read_activations` needs on the model's device besides the model, whose weights are in float32.

    The bytes are those of the largest forward pass: the recorded input of each layer and output of the last layer, and
    besides the activations within one layer, or the copy that joins what was recorded. By PyTorch's allocator on CPU,
    three models of 4 to 16 layers needed 0.84 to 0.94 of this. `config` is the model's configuration. There are
    `num_prompts` prompts of at most `max_tokens` tokens.
    """
    tokens = min(num_prompts * max_tokens, max(MAX_TOKENS, max_tokens))
    hidden = int(config["hidden_size"])
    recorded = (int(config["num_hidden_layers"]) + 1) * hidden
    # Of an MLP: the two projections of its input, the function of one of them, and their product.
    in_layer = 4 * int(config.get("intermediate_size") or 4 * hidden)
    return (recorded + max(recorded, in_layer)) * tokens * FLOAT32_BYTES


def _batches(texts: Sequence[int], prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield batches of prompts of similar length; a batch is a list of the prompts' indices.

    Only the prompts with the indices `texts` are used. A batch has at most MAX_TOKENS tokens with padding to its
    longest prompt. A prompt that is longer than MAX_TOKENS is the only one in its batch.
    """
    batch: list[int] = []
    for index in sorted(texts, key=lambda each: (len(prompts[each]), each)):
        if batch and (len(batch) + 1) * len(prompts[index]) > MAX_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class _Recorder:
    """Context manager that records the input of every layer, and the last layer's output, in each forward pass."""

    def __init__(self, layers: Any) -> None:
        self._layers = layers
        self._found: list[Tensor] = []

    def __enter__(self) -> _Recorder:
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
        """Return the activations recorded in the last forward pass, in float32, and clear the record.

        Axes: [layers + 1, texts, tokens, channels].
        """
        found, self._found = torch.stack(self._found).float(), []
        return found
