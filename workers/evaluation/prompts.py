"""What an engine is asked, and how text becomes tokens: plain requests, the tokenizer, BOS, chat template, end of text.

The engine and the transformers reference share this file, so that both read the same tokens and stop at the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from workers.models.config import read_config
from workers.models.tokenizers import load_tokenizer
from workers.types import EngineOptions

__all__ = ["LOGPROB_TOLERANCE", "Backend", "Continuation", "Generation", "Prompts"]

# Largest difference of a log-probability (natural log) between the engine and transformers that rounding explains.
# bfloat16 keeps 8 bits: logits near 32 are 0.125 apart, and both sides round.
LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True)
class Generation:
    """Tokens to continue, up to `max_tokens` new ones, to end of text or to one of the strings `stop`.

    `temperature` 0 is greedy; above it, `seed` fixes the draw.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Continuation:
    """Tokens to read, of which all after the first `num_context` (>= 1) are scored."""

    tokens: tuple[int, ...]
    num_context: int


class Backend(Protocol):
    """Whatever can answer requests: the warm engine, or plain transformers."""

    def generate(self, requests: Sequence[Generation]) -> list[str]:
        """The completions, without the stop string or end-of-text token that ended them."""
        ...

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        """Per request the summed log-probability (natural log) of the scored tokens, and whether each was the best."""
        ...


@dataclass(frozen=True)
class Prompts:
    """The tokenizer of the model in `directory`, used as `options` say."""

    directory: str
    options: EngineOptions

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's configuration in the names that models share, defaults filled in."""
        return read_config(self.directory)

    @property
    def max_length(self) -> int:
        """Tokens in prompt and completion together: the option, or what the model was built for if that is less."""
        return min(self.options.max_model_len, int(self.config.get("max_position_embeddings", 1 << 30)))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a text: the tokenizer's, the configuration's and the generation configuration's."""
        file = Path(self.directory) / "generation_config.json"
        declared = [
            self.tokenizer.eos_token_id,
            self.config.get("eos_token_id"),
            json.loads(file.read_text()).get("eos_token_id") if file.exists() else None,
        ]
        ids: set[int] = set()
        for value in declared:
            ids.update(value if isinstance(value, list) else () if value is None else (value,))
        return tuple(sorted(ids))

    def encode(self, text: str, *, special_tokens: bool | None = None) -> list[int]:
        """Token ids as the model's own tokenizer gives them, with never more than one BOS in front.

        `special_tokens` False adds nothing (continuations); None follows `options.add_bos_token`, whose default is
        the tokenizer's own habit. A text that already begins with BOS (chat templates write it) gets no second one.
        """
        bos = self.tokenizer.bos_token_id
        add = self.options.add_bos_token if special_tokens is None else special_tokens
        ids: list[int] = self.tokenizer(text, add_special_tokens=add is None)["input_ids"]
        if add and bos is not None:
            ids = [bos, *ids]
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == bos else ids

    def decode(self, prompt: Sequence[int], completion: Sequence[int]) -> str:
        """The text that `completion` adds after `prompt`, special tokens included."""
        tail = list(prompt[-8:])  # decoded alone, a completion would lose the space in front of its first word
        before = self._text(tail)
        after = self._text([*tail, *completion])
        return after[len(before) :] if after.startswith(before) else self._text(completion)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
