"""Loss over target tokens, computed with the logits of only a few tokens in memory at once.

The logits of a batch take more memory than anything else in a model with a large vocabulary: 8 rows of 1024 tokens and
128,000 tokens in the vocabulary make 4 GB in float32. Logits are therefore computed for target tokens only, and in
chunks. The backward pass computes a chunk's logits again, as in activation checkpointing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from workers.training.finetuning.data import IGNORED
from workers.training.model import returning

__all__ = ["CHUNK", "TargetLoss"]

# Elements of logits (tokens times vocabulary) that are computed at once: 256 MiB in float32.
CHUNK = 1 << 26


class TargetLoss(torch.nn.Module):
    """Module that wraps a model and returns the sum of its losses over the target tokens of some rows.

    A target is a token whose loss the training loss includes. `model` is a transformers model, a peft model, or a
    module that returns logits [rows, columns, vocabulary]. `chunk` limits the memory of logits: at most this number of
    logits is computed at once. If there are more, they are computed for some target tokens at a time; the result then
    differs only by rounding. For a module that returns logits, `chunk` has no effect.
    """

    def __init__(self, model: Any, *, chunk: int = CHUNK) -> None:
        super().__init__()
        self.model = model
        self._chunk = chunk

    def forward(self, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        """Sum of the losses of the tokens whose `labels` [rows, columns] are not IGNORED.

        The label at a position is the next token, which the model predicts there. `inputs` are the inputs of the model,
        such as `input_ids` [rows, columns]. If `labels` is None, the result has the outputs of the model instead.
        """
        if labels is None:
            return self.model(**inputs)
        # No attributes: a module that is an attribute would be a part of this module a second time.
        causal = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        decoder = getattr(causal, "base_model", causal)
        vocabulary = self._vocabulary(causal)
        if decoder is causal or labels.numel() * vocabulary <= self._chunk:
            outputs = self.model(**inputs, use_cache=False)
            logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
            return _summed_loss(logits.flatten(0, 1), labels.flatten())
        outputs = decoder(**inputs, use_cache=False)
        is_target = labels != IGNORED
        hidden, wanted = outputs.last_hidden_state[is_target], labels[is_target]

        def loss_of(hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            # The model's own code computes the logits, because models scale or cap them.
            with returning(decoder, type(outputs)(last_hidden_state=hidden[None])):
                logits = causal(input_ids=wanted[None], use_cache=False).logits
            return _summed_loss(logits[0], wanted)

        size = max(1, self._chunk // vocabulary)
        total = outputs.last_hidden_state.flatten()[0].float() * 0  # without targets, the ranks still compute gradients
        for start in range(0, len(wanted), size):
            part = slice(start, start + size)
            total = total + checkpoint(
                loss_of, hidden[part], wanted[part], use_reentrant=False, preserve_rng_state=False
            )
        return total

    @staticmethod
    def _vocabulary(causal: Any) -> int:
        config = getattr(causal, "config", None)
        return 0 if config is None else int(config.get_text_config().vocab_size)


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float(), labels.to(logits.device), ignore_index=IGNORED, reduction="sum")
