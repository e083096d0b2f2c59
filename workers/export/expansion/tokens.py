"""Rows of embeddings and output heads for the tokens of another model.

A token that a model has, by the bytes of its text, keeps its row. The row of another token is the mean of the rows of
the tokens that its text is divided into, as in fast vocabulary transfer (arXiv:2402.09977). The division takes the
longest token at each place. Tokens that are not part of texts, such as that for the end of a text, correspond by their
name or, without one of the same name, by their role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from workers.models.tokenizers import load_tokenizer

__all__ = ["Rows", "Tokens", "rows_for"]

# The role that comes first decides which token corresponds to one with several roles.
ROLES = ("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id")
BYTE = re.compile("<0x([0-9A-F]{2})>")
SPACE = "\u2581"  # stands for a space in tokenizers that are not made of bytes


@dataclass(frozen=True)
class Tokens:
    """The tokens of a tokenizer.

    - `texts`: the bytes of each token's text, keyed by id
    - `special`: the ids of the tokens that are not part of texts, such as that for the end of a text
    - `roles`: the ids of tokens with a role, such as "eos_token_id"
    """

    texts: Mapping[int, bytes]
    special: frozenset[int]
    roles: Mapping[str, int]

    @classmethod
    def of(cls, directory: Path) -> Tokens:
        """Read the tokens of the tokenizer in `directory`. Raises InvalidModel if it cannot be loaded."""
        tokenizer = load_tokenizer(directory)
        added = {int(number): str(token.content) for number, token in tokenizer.added_tokens_decoder.items()}
        text_of = _text_of_bytes if _is_of_bytes(tokenizer) else _text_of_pieces
        texts = {number: text_of(token) for token, number in tokenizer.get_vocab().items()}
        texts |= {number: content.encode() for number, content in added.items()}
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        roles = {role: getattr(tokenizer, role) for role in ROLES}
        known = {role: int(number) for role, number in roles.items() if number is not None}
        return cls(texts, frozenset(special | {*known.values()}), known)

    @cached_property
    def by_text(self) -> Mapping[bytes, int]:
        """The id of each token that is part of texts, keyed by its text."""
        return {text: number for number, text in sorted(self.texts.items()) if number not in self.special and text}

    @cached_property
    def by_name(self) -> Mapping[bytes, int]:
        """The id of each token that is not part of texts, keyed by its name."""
        return {self.texts[number]: number for number in sorted(self.special) if number in self.texts}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.by_text), default=0)

    def pieces(self, text: bytes) -> list[int]:
        """The tokens that `text` is divided into; bytes that no token has are left out."""
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self.by_text), None)
            if end is not None:
                found.append(self.by_text[text[at:end]])
            at = at + 1 if end is None else end
        return found


@dataclass(frozen=True)
class Rows:
    """For each row of a new vocabulary, the rows of a model of which it is the mean.

    `sources` are empty for a row of which nothing is known; it is the mean of all rows. `num_equal` is the number of
    tokens that the model has itself.
    """

    sources: tuple[tuple[int, ...], ...]
    num_equal: int

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The new rows of an embedding or output head, [tokens, hidden]; rows of one source are copied exactly."""
        found = matrix.float().mean(0).to(matrix.dtype).repeat(len(self.sources), 1)
        single = [(row, sources[0]) for row, sources in enumerate(self.sources) if len(sources) == 1]
        if single:
            rows, own = torch.tensor(single).T
            found[rows] = matrix[own]
        for row, sources in enumerate(self.sources):
            if len(sources) > 1:
                found[row] = matrix[list(sources)].float().mean(0)
        return found


def rows_for(wanted: Tokens, own: Tokens, num_rows: int) -> Rows:
    """The rows of a model with the tokens `own` for the tokens `wanted`, whose ids are below `num_rows`."""
    common = [role for role in ROLES if role in wanted.roles and role in own.roles]
    roles = {wanted.roles[role]: own.roles[role] for role in reversed(common)}
    sources: list[tuple[int, ...]] = []
    num_equal = 0
    for number in range(num_rows):
        text = wanted.texts.get(number)
        if text is None:
            sources.append(())
            continue
        names = own.by_name if number in wanted.special else own.by_text
        equal = names.get(text, roles.get(number))
        num_equal += equal is not None
        sources.append((equal,) if equal is not None else tuple(own.pieces(text)))
    return Rows(tuple(sources), num_equal)


def _is_of_bytes(tokenizer: Any) -> bool:
    return "ByteLevel" in json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"))


def _text_of_pieces(token: str) -> bytes:
    match = BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode()


def _text_of_bytes(token: str) -> bytes:
    return b"".join(_BYTES[character] if character in _BYTES else character.encode() for character in token)


def _characters_of_bytes() -> dict[str, bytes]:
    """The byte that each character of a byte-level token stands for.

    Printable bytes of Latin-1 stand for themselves, and the others, in order, for the characters from 256.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): bytes([byte]) for byte in printable}
    return found | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


_BYTES = _characters_of_bytes()
