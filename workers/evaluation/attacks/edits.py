"""Character-level changes of words, as in DeepWordBug, and the Levenshtein distance of texts.

Gao et al., 2018, "Black-box Generation of Adversarial Text Sequences to Evade Deep Learning Classifiers", III-C.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from string import ascii_letters
from typing import TypeVar

__all__ = ["NUM_CHANGES", "changed_words", "distance"]

# The largest number of changes of one word.
NUM_CHANGES = 4

Item = TypeVar("Item")


def changed_words(word: str, *, seed: int, index: int) -> tuple[str, ...]:
    """Variants of a word, each with one edit: two neighbours swapped, a letter replaced, deleted or inserted.

    The place and the letter of each edit are pseudorandom: they are computed from a hash of `seed`, the word, and
    `index`, the word's place in the template. Edits that give the same word are left out. A word of one character has
    no variants.
    """

    def draw(items: Sequence[Item], what: str) -> Item:
        number = hashlib.sha256(f"{seed}\0{index}\0{word}\0{what}".encode()).digest()
        return items[int.from_bytes(number[:8], "big") % len(items)]

    if len(word) < 2:
        return ()
    places = range(len(word))
    found = []
    if swapped := [i for i in places[:-1] if word[i] != word[i + 1]]:
        i = draw(swapped, "swap")
        found.append(word[:i] + word[i + 1] + word[i] + word[i + 2 :])
    i = draw(places, "replace")
    letter = draw(ascii_letters.replace(word[i], ""), "replacement")
    found.append(word[:i] + letter + word[i + 1 :])
    i = draw(places, "delete")
    found.append(word[:i] + word[i + 1 :])
    i = draw(places, "insert")
    found.append(word[:i] + draw(ascii_letters, "inserted") + word[i:])
    return tuple(dict.fromkeys(found))


def distance(text: str, other: str) -> int:
    """The Levenshtein distance of `text` and `other`: the least number of characters to insert, delete or replace."""
    row = list(range(len(other) + 1))
    for i, character in enumerate(text, 1):
        before, row[0] = row[0], i
        for j, each in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (character != each))
    return row[-1]
