import random
from collections.abc import Sequence

import pytest

from workers.engines.vllm import readings
from workers.engines.vllm.readings import Read, Reading, ReadingPlan, Scored, neighbours
from workers.evaluation.prompts import Continuation

BLOCK = 4


def scored(before: Sequence[int], token: int) -> Scored:
    """Score by a made-up model: an arbitrary function of a text and the next token."""
    return float(hash((*before, token)) % 1000), (sum(before) + token) % 2 == 0


def read_with_cache(plan: ReadingPlan, *, block: int) -> list[Read]:
    """The rows that an engine with a prefix cache returns; rows of cached tokens are missing."""
    cache: set[tuple[int, ...]] = set()
    results = []
    for reading in plan.readings:
        num_cached = 0
        if reading.start > block > 0:
            while reading.tokens[: num_cached + block] in cache and num_cached + block < len(reading.tokens):
                num_cached += block
        if block:
            cache |= {reading.tokens[:end] for end in range(block, len(reading.tokens) + 1, block)}
        assert num_cached < max(1, reading.start) or reading.start == len(reading.tokens), "a row is missing"
        results.append(read(reading))
    return results


def read(reading: Reading) -> Read:
    rows = [scored(reading.tokens[:i], reading.tokens[i]) for i in range(reading.start, len(reading.tokens))]
    return Read(tuple(rows), {token: scored(reading.tokens, token) for token in reading.choices})


@pytest.mark.parametrize("block", [0, 1, BLOCK])
def test_every_scored_token_is_read(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of any lengths with any tokens in common have the scores of each read alone, with and without a cache."""
    monkeypatch.setattr(readings, "MAX_ROWS", 5)
    monkeypatch.setattr(readings, "MAX_CHOICES", 2)
    draw = random.Random(block)
    for _ in range(300):
        shots = tuple(draw.choices(range(3), k=draw.randrange(7)))
        contexts = [(0, *shots, *draw.choices(range(3), k=draw.randrange(6)), question) for question in (7, 8, 9)]
        tails = [tuple(draw.choices(range(3), k=draw.randrange(1, 14))) for _ in range(4)]
        continuations = [Continuation(c + t, len(c)) for c in contexts for t in draw.sample(tails, 3)]
        plan = ReadingPlan(continuations, block=block)
        assert plan.scores(read_with_cache(plan, block=block)) == [
            [scored(each.tokens[:i], each.tokens[i]) for i in range(each.num_context, len(each.tokens))]
            for each in continuations
        ]
        assert all(len(reading.choices) <= 2 for reading in plan.readings)
        if block:
            assert max(reading.num_rows for reading in plan.readings) <= 5


def test_options_of_one_token_take_one_prompt() -> None:
    context = tuple(range(100, 120))
    continuations = [Continuation((*context, letter), len(context)) for letter in (1, 2, 3, 4)]
    for block in (0, BLOCK, 128):
        plan = ReadingPlan(continuations, block=block)
        assert plan.readings == (Reading(context, len(context), (1, 2, 3, 4)),)


def test_options_with_a_common_beginning_share_its_prompt() -> None:
    context = tuple(range(100, 120))
    tails = [(7, 8, 9, 1), (7, 8, 9, 2, 3, 4), (5,)]
    plan = ReadingPlan([Continuation(context + tail, len(context)) for tail in tails], block=BLOCK)
    assert plan.readings == (
        Reading(context, 20, (7, 5)),
        Reading((*context, 7, 8, 9), 21, (1, 2)),
        Reading((*context, 7, 8, 9, 2, 3), 24, (4,)),
    )


def test_without_shared_blocks_each_option_is_read_whole() -> None:
    """Where the cache cannot help, a question of four options takes no fifth prompt."""
    continuations = [Continuation((100, 101, option, 5, 6), 2) for option in range(4)]
    for block in (0, 128):
        plan = ReadingPlan(continuations, block=block)
        assert plan.readings == tuple(Reading((100, 101, option, 5), 2, (6,)) for option in range(4))


def test_a_text_of_one_token_has_no_scores() -> None:
    plan = ReadingPlan([Continuation((7,), 1), Continuation((7, 8), 1)], block=BLOCK)
    assert plan.scores([read(reading) for reading in plan.readings]) == [[], [scored((7,), 8)]]


def test_prompts_with_one_beginning_are_neighbours() -> None:
    prompts = [(1, 2, 3), (9, 9), (1, 2), (9,), (1, 300, 3), (1, 2, 4)]
    ordered = [prompts[index] for index in neighbours(prompts)]
    assert sorted(ordered) == sorted(prompts)
    for prompt in ((1, 2), (9,)):
        place = ordered.index(prompt)
        longer = [each for each in prompts if each[: len(prompt)] == prompt]
        assert set(ordered[place : place + len(longer)]) == set(longer)
