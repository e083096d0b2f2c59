import random

from hypothesis import given
from hypothesis import strategies as st

from workers.evaluation.attacks.edits import changed_words, distance

WORDS = st.text("abcdefgh", min_size=2, max_size=12)


@given(WORDS, st.integers(0, 100))
def test_changes_are_at_most_two_edits(word: str, seed: int) -> None:
    """Each changed word differs, by one edit or by two for swapped neighbours."""
    changed = changed_words(word, seed=seed, index=0)
    assert changed
    for each in changed:
        assert 1 <= distance(word, each) <= 2
    assert sum(distance(word, each) == 2 for each in changed) <= 1


def test_changes_are_fixed_by_the_seed() -> None:
    """The seed, the word and its place determine the changes, and nothing else does."""
    first = changed_words("question", seed=3, index=2)
    random.seed(0)
    assert changed_words("question", seed=3, index=2) == first
    assert len(first) == 4
    assert changed_words("question", seed=4, index=2) != first
    assert changed_words("question", seed=3, index=5) != first


def test_a_single_character_is_not_changed() -> None:
    """A word of one character has no change."""
    assert changed_words("a", seed=0, index=0) == ()


def test_distance_of_known_pairs() -> None:
    """Textbook values of the Levenshtein distance."""
    assert [distance(a, b) for a, b in [("kitten", "sitting"), ("", "abc"), ("flaw", "lawn"), ("ab", "ba")]] == [
        3,
        3,
        2,
        2,
    ]


@given(WORDS, WORDS)
def test_distance_is_symmetric(text: str, other: str) -> None:
    """The distance is the same in both directions, and 0 only for equal texts."""
    assert distance(text, other) == distance(other, text)
    assert (distance(text, other) == 0) == (text == other)
