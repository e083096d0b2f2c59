"""The requests that backends answer, and the tokenization of prompts: BOS, end of text, decoding.

The engine and the transformers reference share this module, so that both read and stop at the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from search_spaces.study.engine import EngineOptions
from workers.models.config import read_config
from workers.models.tokenizers import load_tokenizer

__all__ = ["LOGPROB_TOLERANCE", "Backend", "Completion", "Continuation", "Generation", "Prompts", "Stream"]

# Largest difference of a log-probability (natural log) between the engine and transformers that rounding explains.
# bfloat16 has 8 significant bits: logits near 32 are 0.125 apart, and both sides round.
LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True)
class Generation:
    """A request to complete the prompt `tokens`.

    The completion ends after `max_tokens` tokens, at the end of text, or before one of the strings in `stop`. With
    `temperature` 0 the completion is greedy. With a higher temperature, `seed` fixes the random draw.
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
    """A request for the log-likelihood of a text's end, given the text before it.

    `tokens` is the whole text. The first `num_context` tokens (at least 1) are given; the other tokens are scored.
    """

    tokens: tuple[int, ...]
    num_context: int


@dataclass(frozen=True)
class Completion:
    """A backend's completion of a prompt, as text and as token ids.

    A completion may be ended by a stop string or an end-of-text token. `text` excludes this ending, and `tokens`
    includes it.
    """

    text: str
    tokens: tuple[int, ...]


class Stream(Protocol):
    """Interface of a running completion that receives its text piece by piece while the text is generated."""

    @property
    def generation(self) -> Generation:
        """The prompt and the options of the completion."""
        ...

    @property
    def is_cancelled(self) -> bool:
        """Whether the completion was cancelled, because nobody waits for it any more."""
        ...

    def add(self, text: str, num_tokens: int, finish_reason: str | None) -> None:
        """Add to the completion the text that the engine has generated in one step.

        `text` is the added text, and `num_tokens` is its number of tokens. `finish_reason` is "stop" or "length" at the
        end of the completion, and None before.
        """
        ...


class Backend(Protocol):
    """Interface of a backend: the program that runs a model to complete prompts and to compute log-likelihoods.

    The vLLM engine and plain transformers are backends.
    """

    def generate(
        self, requests: Sequence[Generation], *, finished: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        """Complete prompts, and return the completions in the order of the requests.

        If `finished` is not None, it is called with (index of a request, its completion) as soon as the completion is
        ready. `finished` must not raise an error.
        """
        ...

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        """Score the ends of texts; return (log-likelihood, is greedy) for each of `requests`.

        A request is a text whose beginning is given: its first `num_context` tokens. The log-likelihood is the sum of
        the natural log-probabilities of the other tokens. The second value says whether greedy decoding gives exactly
        these tokens.
        """
        ...


@dataclass(frozen=True)
class Prompts:
    """The properties of a model and of a study's options that determine how texts become prompts of tokens.

    `directory` has the model's tokenizer and configuration. `options` are the study's options, such as `max_model_len`.
    """

    directory: str
    options: EngineOptions

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's configuration, with defaults filled in and the same key names for every model type."""
        return read_config(self.directory)

    @property
    def max_length(self) -> int:
        """The largest number of tokens in a prompt and its completion together.

        The result is the option `max_model_len`, or the model's own maximum if that is less.
        """
        return min(self.options.max_model_len, int(self.config.get("max_position_embeddings", 1 << 30)))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids of all tokens that end a generated text.

        The ids come from the tokenizer, the configuration and the generation configuration.
        """
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
        """Tokenize a text, with at most one BOS token in front.

        If `special_tokens` is False, no special tokens are added, as for text that continues a prompt. If it is None,
        the option `add_bos_token` decides whether BOS is added; without the option, the tokenizer's default applies. A
        text that already begins with BOS, as chat templates write it, does not get a second BOS token.
        """
        bos = self.tokenizer.bos_token_id
        add = self.options.add_bos_token if special_tokens is None else special_tokens
        ids: list[int] = self.tokenizer(text, add_special_tokens=add is None)["input_ids"]
        if add and bos is not None:
            ids = [bos, *ids]
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == bos else ids

    def decode(self, prompt: Sequence[int], completion: Sequence[int]) -> str:
        """The text, special tokens included, that the tokens of `completion` add to the text of `prompt`."""
        tail = list(prompt[-8:])  # decoded without them, a completion would lose the space before its first word
        before = self._text(tail)
        after = self._text([*tail, *completion])
        return after[len(before) :] if after.startswith(before) else self._text(completion)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
