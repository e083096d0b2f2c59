"""Search for the prompt template on which a model's metric is lowest, as in PromptBench.

A search is a generator: it yields templates, and receives the model's metric with each of them. Therefore a search can
be stopped at any template and repeated later with the same values. The search depends only on the template, the
attack's options, the seed, and the words that a fill-mask model proposes.

StressTest's sentences (Naik et al., 2018, "Stress Test Evaluation for Natural Language Inference") are tried one by
one. The attacks on words are greedy. First, each word in turn is replaced by "[UNK]", and the loss of the metric is
measured. The word with the largest loss is changed first. Then each word is changed in several ways. The change with
the lowest metric is kept if the metric is lower than with the present template (Jin et al., 2019, "Is BERT Really
Robust?"; TextAttack and PromptBench search in this way).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from search_spaces.study.attacks import AttackSpec, BertAttack, DeepWordBugAttack, StressAttack
from workers.evaluation.attacks.edits import NUM_CHANGES, changed_words, distance
from workers.evaluation.attacks.templates import Template

__all__ = ["SENTENCES", "Attacked", "PromptAttack", "Replacements", "Search", "run", "search"]

SENTENCES = ("and true is true", "and false is not true", " ".join(["and true is true"] * 5))

UNKNOWN = "[UNK]"


@dataclass(frozen=True)
class PromptAttack:
    """The prompt attack of one task: a search for changed prompt templates that worsen a model's metric.

    `option` has the attack's options from the study file. `original` is the task's prompt template. No attack changes
    the label words in it.
    """

    option: AttackSpec
    original: Template

    @property
    def most_queries(self) -> int:
        """The largest number of templates that may be scored in one attack on one model."""
        option, num_words = self.option, len(self.original.words)
        if isinstance(option, StressAttack):
            most = len(SENTENCES)
        else:
            most = num_words * (1 + (option.candidates if isinstance(option, BertAttack) else NUM_CHANGES))
        return most if option.max_queries is None else min(most, option.max_queries)


@dataclass(frozen=True)
class Attacked:
    """The result of an attack on one model: the template that it found, and the model's metric with it.

    - `template`: the changed template with the lowest metric that the attack found, or the original template if no
      change of words lowered the metric
    - `value`: the metric with `template`
    - `num_queries`: the number of changed templates that were scored
    - `is_cut`: whether the limit `max_queries` ended the attack
    """

    template: str
    value: float
    num_queries: int
    is_cut: bool


class Replacements(Protocol):
    """Interface of a model that proposes replacements for single words of a prompt template.

    The class `masked_model.MaskedModel` implements this interface.
    """

    def words(self, current: Template, index: int, *, original: Template, option: BertAttack) -> Sequence[str]:
        """Words that may replace one word of the prompt template `current`.

        A template consists of pieces (words, placeholders, other text), and the word is the piece `index`. `current`
        was made from `original` by earlier changes. `option` has limits, such as the number of words.
        """
        ...


Search: TypeAlias = Generator[tuple[str, ...], Sequence[float], Attacked]
"""Yields templates, and is sent the metric on the data with each, in the same order."""

_Changes: TypeAlias = Callable[[Template, int], Sequence[str]]


def search(
    attack: PromptAttack, *, clean: float, seed: int, lowest: float = 0.0, replacements: Replacements | None = None
) -> Search:
    """Search for the template with the lowest metric; larger values of the metric are better for the model.

    A template is the text from which a task's prompts are made. The result is a generator that does not call the model
    itself: it yields templates, expects the caller to send the model's metric with each of them, and returns the
    template that it has found. The search ends when all changes were tried, or earlier: when the metric is `lowest`, or
    `attack.option.max_queries` templates were scored.

    Args:
        attack: The task's template, and the options of the attack.
        clean: The metric with the original template.
        seed: Fixes random changes.
        lowest: The lowest possible value of the metric.
        replacements: The model that proposes words. Attacks of the kind "bert" need it; other attacks do not use it.
    """
    option, original = attack.option, attack.original
    queries = _Queries(option.max_queries)
    current, value = original, clean
    if isinstance(option, StressAttack):
        found = yield from queries.ask([original.with_sentence(sentence) for sentence in SENTENCES])
        current, value = _worst(found)
    else:
        changes = _changes(original, option, seed, replacements)
        without = [original.with_word(index, UNKNOWN) for index in original.words] if clean > lowest else []
        ranked = yield from queries.ask(without)
        losses = {index: clean - left for index, (_, left) in zip(original.words, ranked, strict=False)}
        for index in sorted(losses, key=lambda index: -losses[index]):
            if value <= lowest:
                break
            if queries.is_used_up:
                queries.is_cut = True
                break
            found = yield from queries.ask([current.with_word(index, word) for word in changes(current, index)])
            if found and (worst := _worst(found))[1] < value:
                current, value = worst
    return Attacked(current.text, value, queries.count, queries.is_cut)


def run(steps: Search, score: Callable[[str], float]) -> Attacked:
    """Run an attack's search to its end, and return its result.

    `steps` is the result of the function `search`. `score` returns the model's metric with a template.
    """
    try:
        templates = next(steps)
        while True:
            templates = steps.send([score(template) for template in templates])
    except StopIteration as end:
        found: Attacked = end.value
        return found


@dataclass
class _Queries:
    """Counter of the scored templates, with a limit of `most` templates; None is no limit."""

    most: int | None
    count: int = 0
    is_cut: bool = False

    @property
    def is_used_up(self) -> bool:
        return self.count == self.most

    def ask(
        self, candidates: Sequence[Template]
    ) -> Generator[tuple[str, ...], Sequence[float], list[tuple[Template, float]]]:
        """Generator that asks for the metric of each candidate (changed template), up to the limit of scored templates.

        The generator yields the texts of the candidates within the limit, receives their metrics, and returns the pairs
        (candidate, metric).
        """
        allowed = candidates if self.most is None else candidates[: self.most - self.count]
        self.is_cut |= len(allowed) < len(candidates)
        self.count += len(allowed)
        values = (yield tuple(each.text for each in allowed)) if allowed else ()
        return list(zip(allowed, values, strict=True))


def _worst(found: Sequence[tuple[Template, float]]) -> tuple[Template, float]:
    return min(found, key=lambda each: each[1])  # the first of equal ones


def _changes(
    original: Template, option: DeepWordBugAttack | BertAttack, seed: int, replacements: Replacements | None
) -> _Changes:
    """Make an attack's function that finds replacements for one word of a prompt template.

    The function takes the present template and the index of the word among the template's pieces, and returns the words
    that may replace it. `option` has the kind and the limits of the attack: an attack of the kind "bert" asks the model
    `replacements`, and any other attack edits characters at random, as `seed` determines. `original` is the template
    before any change; limits on changes refer to it.
    """
    if isinstance(option, BertAttack):
        assert replacements is not None
        return lambda current, index: replacements.words(current, index, original=original, option=option)

    def edited(current: Template, index: int) -> list[str]:
        words = changed_words(current.pieces[index].text, seed=seed, index=index)
        return [
            word for word in words if distance(original.text, current.with_word(index, word).text) <= option.max_edits
        ]

    return edited
