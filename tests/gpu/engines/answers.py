"""Answers of an engine with the merge that it holds, and their comparison with transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.transformers.backend import choice_gaps, logprobs, typical_difference
from workers.engines.transformers.merged_models import merged_model
from workers.engines.transformers.tolerance import measured_tolerance
from workers.engines.vllm.engine import Engine
from workers.evaluation.prompts import Generation
from workers.merging.bank import Bank
from workers.types import Family

OPTIONS = EngineOptions(max_model_len=256, threads=1)

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Answers:
    """The tokens of greedy completions, and the log-probabilities of the tokens of texts except the first."""

    completions: tuple[Tokens, ...]
    logprobs: tuple[tuple[float, ...], ...]


def requests(seed: int = 0, *, num_long: int = 5) -> list[Generation]:
    """Requests of different lengths, of which `num_long` begin with the same 150 tokens, more than a cache block."""
    draw = random.Random(seed)
    shots = draw.choices(range(4, 99), k=150)
    prompts = [[*shots, *draw.choices(range(4, 99), k=5 + index)] for index in range(num_long)]
    prompts += [draw.choices(range(4, 99), k=length) for length in (3, 17, 40)]
    return [Generation(tuple(prompt), 4 + 6 * (index % 4)) for index, prompt in enumerate(prompts)]


def answers(engine: Engine, asked: Sequence[Generation] | None = None) -> Answers:
    """The answers of the engine's merge to `asked`, by default to the same requests each time."""
    asked = requests() if asked is None else asked
    completions = engine.generate(asked)
    read = engine.logprobs([request.tokens for request in asked])
    return Answers(tuple(each.tokens for each in completions), tuple(map(tuple, read)))


def differences(
    found: Answers, recipe: Recipe, family: Family, *, dtype: str, asked: Sequence[Generation] | None = None
) -> tuple[float, float]:
    """Compare answers of an engine in `dtype` with transformers on the merge of `recipe`, which the CPU computes.

    Returns two differences, each as a multiple of the tolerance for rounding, which is measured on that merge: of the
    log-probabilities of the texts, and the largest gap between a token of a completion and the token that transformers
    finds likeliest in its place. The answers are those of the merge if neither is above 1.
    """
    asked = requests() if asked is None else asked
    model = merged_model(recipe, Bank(family), dtype=dtype)
    texts = [request.tokens for request in asked]
    tolerance = measured_tolerance(model, texts, dtype=dtype)
    assert tolerance.too_large is None, tolerance.too_large
    ours = [value for values in found.logprobs for value in values]
    theirs = [value for text in texts for value in logprobs(model, text)]
    gaps = [
        gap
        for text, completion in zip(texts, found.completions, strict=True)
        if completion
        for gap in choice_gaps(model, text, completion)
    ]
    assert len(gaps) >= len(texts), "completions have tokens"
    return typical_difference(ours, theirs, dtype=dtype) / tolerance.value, max(gaps) / tolerance.gap


def check(found: Answers, recipe: Recipe, engine: Engine, *, asked: Sequence[Generation] | None = None) -> None:
    """Raise AssertionError if the answers are not those that transformers computes for `recipe`, but for rounding."""
    of_logprobs, of_choices = differences(found, recipe, engine.family, dtype=engine.dtype, asked=asked)
    assert of_logprobs <= 1, f"log-probabilities differ by {of_logprobs:.2f} of what rounding explains"
    assert of_choices <= 1, f"a token is {of_choices:.2f} of what rounding explains from transformers' choice"
