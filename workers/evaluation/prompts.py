"""The requests that a backend answers, and tokenization: BOS, end of text, decoding.

The engine and the transformers reference share this module, so that both read and stop at the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from search_spaces.study.engine import EngineOptions
from workers.models.config import read_config
from workers.models.tokenizers import load_tokenizer

__all__ = ["LOGPROB_TOLERANCE", "Backend", "Completion", "Continuation", "Generation", "Prompts"]

# Largest difference of a log-probability (natural log) between the engine and transformers that rounding explains.
# bfloat16 has 8 significant bits: logits near 32 are 0.125 apart, and both sides round.
LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True)
class Generation:
    """Tokens to continue until `max_tokens` new ones, end of text or one of the strings `stop`.

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
    """Tokens to read. All after the first `num_context` (at least 1) are scored."""

    tokens: tuple[int, ...]
    num_context: int


@dataclass(frozen=True)
class Completion:
    """A backend's completion: `text` without the stop string or end-of-text token that ended it, `tokens` with it."""

    text: str
    tokens: tuple[int, ...]


class Backend(Protocol):
    """Answers requests: the warm engine, or plain transformers."""

    def generate(self, requests: Sequence[Generation]) -> list[Completion]: ...

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        """For each request, the log-likelihood of the scored tokens, and whether all are the likeliest.

        The logarithm is natural.
        """
        ...


@dataclass(frozen=True)
class Prompts:
    """The tokenizer of the model in `directory`, applied according to `options`."""

    directory: str
    options: EngineOptions

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's configuration with common key names, with defaults filled in."""
        return read_config(self.directory)

    @property
    def max_length(self) -> int:
        """The largest number of tokens in prompt and completion together.

        It is the option `max_model_len`, or the model's own maximum if that is less.
        """
        return min(self.options.max_model_len, int(self.config.get("max_position_embeddings", 1 << 30)))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a text: those of the tokenizer, the configuration and the generation configuration."""
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
        """Token ids from the model's tokenizer, with at most one BOS in front.

        `special_tokens` False adds none (continuations); None follows `options.add_bos_token`, whose default is what
        the tokenizer does. A text that already begins with BOS (chat templates write it) does not get a second one.
        """
        bos = self.tokenizer.bos_token_id
        add = self.options.add_bos_token if special_tokens is None else special_tokens
        ids: list[int] = self.tokenizer(text, add_special_tokens=add is None)["input_ids"]
        if add and bos is not None:
            ids = [bos, *ids]
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == bos else ids

    def decode(self, prompt: Sequence[int], completion: Sequence[int]) -> str:
        """The text that `completion` adds after `prompt`, special tokens included."""
        tail = list(prompt[-8:])  # decoded without them, a completion would lose the space before its first word
        before = self._text(tail)
        after = self._text([*tail, *completion])
        return after[len(before) :] if after.startswith(before) else self._text(completion)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
