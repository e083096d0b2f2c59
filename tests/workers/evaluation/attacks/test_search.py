from collections.abc import Callable, Sequence

import pytest

from search_spaces.study.attacks import AttackSpec, BertAttack, DeepWordBugAttack, StressAttack
from workers.evaluation.attacks.edits import distance
from workers.evaluation.attacks.search import SENTENCES, Attacked, PromptAttack, run, search
from workers.evaluation.attacks.templates import Template

TEXT = "Classify the sentence as positive or negative: {{text}}\nAnswer:"
LABELS = ("positive", "negative")
BUG = DeepWordBugAttack(kind="deepwordbug")


class Dictionary:
    """A source of replacements that proposes the same words for every word."""

    def __init__(self, *words: str) -> None:
        self.known = words

    def words(self, current: Template, index: int, *, original: Template, option: BertAttack) -> Sequence[str]:
        return self.known[: option.candidates]


def attacked(
    option: AttackSpec, score: Callable[[str], float], *, text: str = TEXT, seed: int = 0, words: Sequence[str] = ()
) -> tuple[Attacked, list[str]]:
    """The result of an attack, and the templates that it scored."""
    asked: list[str] = []

    def noted(template: str) -> float:
        asked.append(template)
        return score(template)

    attack = PromptAttack(option, Template.of(text, labels=LABELS))
    found = run(search(attack, clean=score(text), seed=seed, replacements=Dictionary(*words)), noted)
    assert found.num_queries == len(asked) <= attack.most_queries
    return found, asked


def by_letters(template: str) -> float:
    """A metric that falls with each letter that a template lacks of "classify sentence answer"."""
    lowered = template.lower()
    return sum(word in lowered for word in ("classify", "sentence", "answer")) / 3 + 0.01 * lowered.count("e")


def test_stress_takes_the_worst_of_three_sentences() -> None:
    """Each of the three sentences is scored once, at the end of the template, and the worst result counts."""
    found, asked = attacked(
        StressAttack(kind="stress"), lambda text: 0.9 - 0.1 * ("false" in text) + 0.05 * ("true" in text)
    )
    assert asked == [TEXT.replace("Answer:", f"Answer {sentence} :") for sentence in SENTENCES]
    assert found == Attacked(asked[1], 0.9 - 0.1 + 0.05, 3, False)


def test_stress_counts_even_where_it_helps() -> None:
    """The worst sentence counts although the original template is worse: the drop is then negative."""
    found, _ = attacked(StressAttack(kind="stress"), lambda text: 0.5 + 0.1 * ("true" in text))
    assert found.value == pytest.approx(0.6)


def test_words_are_changed_by_importance() -> None:
    """The first word to be changed is the one without which the metric is lowest."""
    weights = {"Classify": 0.1, "sentence": 0.5, "Answer": 0.3}
    found, asked = attacked(BUG, lambda text: 0.1 + sum(weight for word, weight in weights.items() if word in text))
    assert asked[:3] == [TEXT.replace(word, "[UNK]") for word in weights]
    changed = [{word for word in weights if word not in text} for text in asked[3:]]
    assert changed == [*[{"sentence"}] * 4, *[{"sentence", "Answer"}] * 4, *[set(weights)] * 4]
    assert found.value == pytest.approx(0.1)
    assert found.num_queries == 3 + 3 * 4


def test_a_change_that_does_not_harm_is_not_kept() -> None:
    """A word whose changes do not lower the metric stays as it is."""
    found, _ = attacked(BUG, lambda text: 0.2 + 0.5 * ("Answer" in text))
    assert "Classify the sentence as" in found.template
    assert "Answer" not in found.template


@pytest.mark.parametrize("option", [BUG, BertAttack(kind="bert", model="x"), StressAttack(kind="stress")])
def test_labels_and_placeholder_survive(option: AttackSpec) -> None:
    """Every template that is scored has the labels, the stop words and the placeholder unchanged."""
    _, asked = attacked(option, by_letters, words=["bad", "movie"])
    assert asked
    for text in asked:
        assert "{{text}}" in text
        assert "as positive or negative: " in text


def test_an_attack_is_fixed_by_its_seed() -> None:
    """The same seed gives the same templates in the same order; another seed gives others."""
    first, second, other = (attacked(BUG, by_letters, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert other[1] != first[1]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 30])
def test_edits_stay_within_the_limit(most: int) -> None:
    """No candidate is farther from the original than the limit, which is reached where it binds."""
    option = DeepWordBugAttack(kind="deepwordbug", max_edits=most)
    _, asked = attacked(option, lambda text: distance(text, TEXT) * -0.01 + 1)
    changed = [text for text in asked if "[UNK]" not in text]
    distances = [distance(text, TEXT) for text in changed]
    assert max(distances) == min(most, 6)


def test_max_queries_ends_an_attack() -> None:
    """The number of scored templates is limited, also within the changes of one word, and the result says so."""
    whole, every = attacked(BUG, by_letters)
    assert not whole.is_cut
    for most in range(1, len(every)):
        option = DeepWordBugAttack(kind="deepwordbug", max_queries=most)
        found, asked = attacked(option, by_letters)
        assert asked == every[:most]
        assert (found.num_queries, found.is_cut) == (most, True)
        assert found.value >= whole.value


def test_nothing_is_scored_at_the_lowest_value() -> None:
    """A model without a right answer cannot be attacked, and one that reaches 0 is attacked no further."""
    assert attacked(BUG, lambda _: 0.0)[0] == Attacked(TEXT, 0.0, 0, False)
    found, asked = attacked(BUG, lambda text: float(text == TEXT))
    assert (found.value, len(asked)) == (0.0, 3 + 4)


def test_a_search_is_repeated_with_the_same_values() -> None:
    """A search that stops after any batch continues with equal templates when it is sent the known values again."""
    attack = PromptAttack(BUG, Template.of(TEXT, labels=LABELS))
    batches: list[tuple[str, ...]] = []
    steps = search(attack, clean=by_letters(TEXT), seed=7)
    batch = next(steps)
    for _ in range(3):
        batches.append(batch)
        batch = steps.send([by_letters(text) for text in batch])
    again = search(attack, clean=by_letters(TEXT), seed=7)
    repeated = next(again)
    for known in batches:
        assert repeated == known
        repeated = again.send([by_letters(text) for text in known])
    assert repeated == batch
