"""Choice of the prompts that an engine must read to compute the log-probabilities of continuations.

One prompt gives the log-probabilities of its own last tokens, and of every token that may follow it. Therefore
continuations of one token that have a common context, such as the options of a multiple choice, need only one prompt:
the context. Each longer continuation needs one more prompt for its other tokens; the beginning of this prompt comes
from the prefix cache.

This module does not depend on vLLM or models.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from workers.evaluation.prompts import Continuation

__all__ = ["MAX_CHOICES", "MAX_ROWS", "Read", "Reading", "ReadingPlan", "Scored", "neighbours"]

# For each log-probability of a prompt's token vLLM computes a row of logits, one value for each token of the
# vocabulary, all rows of a prompt at once: 512 rows of 128,000 values are 262 MB in float32.
MAX_ROWS = 512

# vLLM's limit on the tokens that may follow.
MAX_CHOICES = 128

Tokens: TypeAlias = tuple[int, ...]

# A token's log-probability (natural log), and whether the token is the likeliest in its place.
Scored: TypeAlias = tuple[float, bool]

# A continuation's index, and those of its tokens that are not planned yet.
Tail: TypeAlias = tuple[int, Tokens]


@dataclass(frozen=True)
class Reading:
    """A prompt for the engine, and the tokens whose log-probabilities are needed.

    - `tokens`: the prompt
    - `start`: the index in the prompt of the first token whose log-probability is needed; the log-probabilities of all
      later tokens are also needed
    - `choices`: tokens that may follow the prompt, whose log-probabilities after the whole prompt are needed
    """

    tokens: Tokens
    start: int
    choices: Tokens

    @property
    def num_rows(self) -> int:
        """Number of the prompt's own tokens whose log-probabilities are needed.

        Each of these tokens takes one row of logits.
        """
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Read:
    """Log-probabilities that the engine returned for one planned prompt (class `Reading`).

    Each log-probability is in a pair: (log-probability of a token, whether the token is the likeliest in its place).
    `rows` has the pairs of the prompt's own tokens, from the index `start` of the reading on. `choices` has the pairs
    of the tokens that may follow the prompt, keyed by token id.
    """

    rows: tuple[Scored, ...]
    choices: Mapping[int, Scored]


class ReadingPlan:
    """Prompts ("readings") that together give the log-probability of every scored token of `continuations`.

    A continuation is a text whose beginning (context) is given and whose end is scored. The attribute `readings` has
    the prompts in the order in which an engine should read them. `block` is the number of tokens in a block of the
    engine's prefix cache, which keeps whole blocks only; 0 means that there is no prefix cache.

    Without a prefix cache, every continuation is read with its whole prompt; continuations that differ only in their
    last token share a prompt. With a prefix cache, continuations of one context share the beginning of the prompt, and
    a reading has at most MAX_ROWS rows of logits.

    vLLM computes no logits for tokens that it finds in the prefix cache. Therefore the prompts are planned such that
    none of the tokens whose logits are needed is in the cache. A needed token can still be in the cache, for example
    after an earlier request with the same text; the engine then repeats the prompt without the cache.
    """

    def __init__(self, continuations: Sequence[Continuation], *, block: int) -> None:
        self._readings: list[Reading] = []
        # For each continuation the parts of its tail, in order: the rows of a reading (None), or a choice after it.
        self._parts: list[list[tuple[int, int | None]]] = [[] for _ in continuations]
        by_context: dict[Tokens, list[Tail]] = {}
        for index, each in enumerate(continuations):
            context, tail = each.tokens[: each.num_context], each.tokens[each.num_context :]
            if tail:
                by_context.setdefault(context, []).append((index, tail))
        for context, tails in by_context.items():
            if block and (len(context) >= block or max(len(tail) for _, tail in tails) > MAX_ROWS):
                self._branch(context, len(context), tails)
            else:
                self._read_whole(context, tails)
        self._order = neighbours([reading.tokens for reading in self._readings])
        self.readings = tuple(self._readings[index] for index in self._order)

    def scores(self, results: Sequence[Read]) -> list[list[Scored]]:
        """The log-probabilities of the scored tokens of each continuation, from the engine's `results`.

        A continuation is a text whose end is scored. `results` are the engine's results for the planned prompts, in the
        order of the attribute `readings`. The result has, for each continuation, a list of pairs (log-probability of a
        token, whether the token is the likeliest in its place).
        """
        found = dict(zip(self._order, results, strict=True))

        def tokens(parts: Sequence[tuple[int, int | None]]) -> Iterator[Scored]:
            for number, choice in parts:
                yield from found[number].rows if choice is None else (found[number].choices[choice],)

        return [list(tokens(parts)) for parts in self._parts]

    def _read_whole(self, context: Tokens, tails: Sequence[Tail]) -> None:
        """Plan prompts that contain `context` and a continuation, for scoring without the prefix cache.

        `tails` has, for each continuation of `context`, the index of the continuation and its scored tokens. A prompt
        leaves out the last token of its continuation. Therefore continuations that differ only in this token share a
        prompt.
        """
        by_stem: dict[Tokens, list[Tail]] = {}
        for index, tail in tails:
            by_stem.setdefault(tail[:-1], []).append((index, tail[-1:]))
        for stem, ends in by_stem.items():
            self._branch(context + stem, len(context), ends)

    def _branch(self, prompt: Tokens, start: int, tails: Sequence[Tail]) -> None:
        """Plan prompts that give the log-probabilities of all tokens in `tails`; every tail follows `prompt`.

        A tail is (index of a continuation, its tokens that are not planned yet). The first planned prompt is `prompt`
        itself. It gives the log-probabilities of its own tokens from `start` on, and of the first token of each tail.
        For longer tails, further prompts extend `prompt` by the tokens that some tails share, at most MAX_ROWS tokens
        at a time.
        """
        rests: dict[int, list[Tail]] = {}
        for index, tail in tails:
            rests.setdefault(tail[0], []).append((index, tail[1:]))
        rows = len(self._readings)
        choices = tuple(rests)
        for first in range(0, len(choices), MAX_CHOICES):
            self._readings.append(
                Reading(prompt, start if first == 0 else len(prompt), choices[first : first + MAX_CHOICES])
            )
        for number, choice in enumerate(choices):
            for index, _ in rests[choice]:
                self._parts[index] += [(rows, None), (rows + number // MAX_CHOICES, choice)]
            if longer := [(index, rest) for index, rest in rests[choice] if rest]:
                num_shared = min(MAX_ROWS, _num_shared([rest[:-1] for _, rest in longer]))
                after = [(index, rest[num_shared:]) for index, rest in longer]
                self._branch((*prompt, choice, *longer[0][1][:num_shared]), len(prompt) + 1, after)


def _num_shared(tails: Sequence[Tokens]) -> int:
    """Length of the longest common prefix of the token sequences in `tails`."""
    places = enumerate(zip(*tails, strict=False))
    return next((place for place, tokens in places if len(set(tokens)) > 1), min(map(len, tails)))


def neighbours(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Order prompts so that prompts with a common prefix are neighbours, and return their indices in this order.

    A prompt that is a prefix of another prompt comes before it.
    """
    return sorted(range(len(prompts)), key=lambda index: array("I", prompts[index]).tobytes())
