"""Option `attack` of a benchmark: adversarial changes of its prompt template, which measure robustness.

Attacks follow PromptBench (Zhu et al., 2024, "PromptBench: A unified library for evaluation of large language models"),
which M3 uses (section 4.5, appendices C and E). The package `workers.evaluation.attacks` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, Tag

from search_spaces.section import Line, Section, one_of

__all__ = ["AttackSpec", "BertAttack", "DeepWordBugAttack", "StressAttack"]


class _Attack(Section):
    labels: Annotated[tuple[Line, ...], Field(min_length=1)] | None = None
    """Words of the template that no attack changes, such as the names of classes, in upper or lower case. Default: the
    options of a multiple-choice task that has the same options for all samples.
    """
    max_queries: Annotated[int, Field(ge=1)] | None = None
    """The largest number of templates that an attack on a model scores, each on all samples. Default: no limit."""


class StressAttack(_Attack):
    """An attack that adds the sentences of StressTest (Naik et al., 2018) to the end of the prompt template."""

    kind: Literal["stress"]


class DeepWordBugAttack(_Attack):
    """An attack that changes characters, in the most important words first, after DeepWordBug (Gao et al., 2018)."""

    kind: Literal["deepwordbug"]
    max_edits: Annotated[int, Field(ge=1)] = 30
    """The largest Levenshtein distance, in characters, between the template and an attacked one."""


class BertAttack(_Attack):
    """An attack that replaces words by words from a fill-mask model, after BERT-Attack (Li et al., 2020).

    The most important words are replaced first.
    """

    kind: Literal["bert"]
    model: Line
    """A fill-mask model, such as BERT: a directory, a hub id or a URL, as the models of a study are given."""
    encoder: Line | None = None
    """A model whose final states, averaged over tokens, give the similarity of two templates. Default: `model`."""
    candidates: Annotated[int, Field(ge=1)] = 48
    """The largest number of words that the model proposes in place of one word."""
    min_similarity: Annotated[float, Field(ge=-1, le=1)] = 0.8
    """The least cosine similarity between the template and an attacked one."""


def _tag_of_kind(value: object) -> str | None:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return f"<{kind}>" if kind in ("stress", "deepwordbug", "bert") else None


if TYPE_CHECKING:
    AttackSpec = StressAttack | DeepWordBugAttack | BertAttack
else:
    AttackSpec = Annotated[
        Annotated[StressAttack, Tag("<stress>")]
        | Annotated[DeepWordBugAttack, Tag("<deepwordbug>")]
        | Annotated[BertAttack, Tag("<bert>")],
        one_of(_tag_of_kind, "{kind: stress}, {kind: deepwordbug} or {kind: bert, model: DIR}"),
    ]
