"""A prompt template, divided into words, placeholders and the texts between them.

A word is a run of letters and digits, which may contain apostrophes, hyphens and underscores. A placeholder is an
expression, a statement or a comment of Jinja; no attack changes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from workers.evaluation.attacks.stop_words import STOP_WORDS

__all__ = ["Piece", "Template", "is_word"]

_QUOTED = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
# A raw block is kept whole, because its braces are no expressions.
_PLACEHOLDER = re.compile(
    r"\{%-?\s*raw\s*-?%\}.*?\{%-?\s*endraw\s*-?%\}"
    rf"|\{{\{{(?:{_QUOTED}|.)*?\}}\}}|\{{%(?:{_QUOTED}|.)*?%\}}|\{{#.*?#\}}",
    re.DOTALL,
)
_WORD = re.compile(r"[^\W_]+(?:['\u2019_-]+[^\W_]+)*")
# The text that models read in place of a template's placeholder, as in PromptBench.
_READ_AS = "{content}"


@dataclass(frozen=True)
class Piece:
    """A part of a prompt template: a word, a Jinja placeholder, or another text between them.

    `text` is the part's text. `is_fixed` marks a word that no attack may change.
    """

    text: str
    kind: Literal["word", "placeholder", "other"]
    is_fixed: bool = False


@dataclass(frozen=True)
class Template:
    """A prompt template as a sequence of pieces, whose concatenated texts are the template's text."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, text: str, *, labels: Sequence[str] = ()) -> Template:
        """Divide a Jinja template into pieces: words, placeholders and the texts between them.

        `labels` are the names of answers, such as "positive". Their words are fixed, so that no attack changes them,
        wherever a label occurs as whole words, in upper or lower case. Stop words, such as "the", are also fixed.
        """
        pieces: list[Piece] = []
        start = 0
        for found in _PLACEHOLDER.finditer(text):
            pieces += _words(text[start : found.start()], labels)
            pieces.append(Piece(found.group(), "placeholder"))
            start = found.end()
        return cls((*pieces, *_words(text[start:], labels)))

    @cached_property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def words(self) -> tuple[int, ...]:
        """Indices of the pieces of the template that an attack may change: the words that are not fixed."""
        return tuple(i for i, piece in enumerate(self.pieces) if piece.kind == "word" and not piece.is_fixed)

    def with_word(self, index: int, word: str) -> Template:
        """A copy of the template with `word` in place of its piece `index`, which is a word."""
        piece = replace(self.pieces[index], text=word)
        return Template((*self.pieces[:index], piece, *self.pieces[index + 1 :]))

    def with_sentence(self, sentence: str) -> Template:
        """The template with a sentence inserted after its last word or placeholder.

        Punctuation that ends the template, such as the colon of "Answer:", stays at the end. A space is added before
        the sentence unless it begins the template, and after the sentence unless it ends the template.
        """
        last = max((i for i, piece in enumerate(self.pieces) if piece.kind != "other"), default=-1)
        before, after = self.pieces[: last + 1], self.pieces[last + 1 :]
        text = f"{' ' if before else ''}{sentence}{' ' if after else ''}"
        return Template((*before, Piece(text, "other"), *after))

    def read(self) -> str:
        """The template's text for a fill-mask model, which cannot read Jinja.

        Each Jinja expression is replaced by "{content}". Statements and comments of Jinja are left out.
        """
        return "".join(map(_read, self.pieces))

    def span(self, index: int) -> tuple[int, int]:
        """Position of piece `index` in the text that the method `read` returns.

        The result is (index of the first character, index after the last character).
        """
        start = sum(len(_read(piece)) for piece in self.pieces[:index])
        return start, start + len(_read(self.pieces[index]))


def is_word(text: str) -> bool:
    """Whether `text` is exactly one word, by the rules that divide templates into words."""
    return _WORD.fullmatch(text) is not None


def _read(piece: Piece) -> str:
    if piece.kind != "placeholder":
        return piece.text
    return _READ_AS if piece.text.startswith("{{") else ""


def _words(text: str, labels: Sequence[str]) -> Iterator[Piece]:
    """Divide a text without placeholders into words and the texts between them.

    A word is fixed, so that no attack changes it, if it belongs to an occurrence of one of `labels` in the text, or is
    a stop word.
    """
    fixed = [found.span() for label in labels for found in _whole(label).finditer(text)]
    start = 0
    for found in _WORD.finditer(text):
        first, end = found.span()
        if first > start:
            yield Piece(text[start:first], "other")
        is_label = any(first < stop and begin < end for begin, stop in fixed)
        yield Piece(found.group(), "word", is_label or found.group().lower() in STOP_WORDS)
        start = end
    if start < len(text):
        yield Piece(text[start:], "other")


def _whole(label: str) -> re.Pattern[str]:
    """A regular expression that finds whole words only: `label` with no letter or digit directly before or after it.

    Upper and lower case are not distinguished.
    """
    return re.compile(rf"(?<![^\W_]){re.escape(label.strip())}(?![^\W_])", re.IGNORECASE)
