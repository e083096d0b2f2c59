"""Pauses between tries: they increase, differ at random, and last about a day in total."""

from __future__ import annotations

import random

from service.notifications.retries import MAX_TRIES, pause_s


def test_the_tries_of_a_delivery_last_about_a_day() -> None:
    """All pauses together are between 15 and 30 hours, the first ones are short, and none is the same twice."""
    for seed in range(20):
        generator = random.Random(seed)
        pauses = [pause_s(tries, generator=generator) for tries in range(1, MAX_TRIES)]
        assert 7 <= pauses[0] <= 13
        assert pauses[:6] == sorted(pauses[:6])
        assert 15 <= sum(pauses) / 3600 <= 30
        assert len(set(pauses)) == len(pauses)


def test_no_number_of_tries_is_too_large() -> None:
    """The pause after many tries is the longest one."""
    assert pause_s(400, generator=random.Random(1)) <= 8 * 3600
