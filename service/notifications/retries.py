"""Pauses between tries to send a message: exponential back-off with jitter, over about a day."""

from __future__ import annotations

import random

__all__ = ["DISABLES_AFTER_S", "MAX_TRIES", "pause_s"]

# After 10 s, 40 s, 2.7 min, 11 min, 43 min, 2.8 h and then every 6 h: the tenth try follows after about 22 hours.
MAX_TRIES = 10
FIRST_S, FACTOR, LONGEST_S = 10.0, 4.0, 6 * 3600.0

# A pause is longer or shorter by up to this share of it, so that tries after an outage do not all come at once.
JITTER = 0.25

# Seconds without a success after which a webhook or an address is disabled at the last try of a delivery.
DISABLES_AFTER_S = 3 * 86_400.0


def pause_s(tries: int, *, generator: random.Random) -> float:
    """Seconds to wait before the next try to send a message, after `tries` failed tries (at least 1).

    The pauses become longer with each try. `generator` varies them at random.
    """
    return min(FIRST_S * FACTOR ** (tries - 1), LONGEST_S) * generator.uniform(1 - JITTER, 1 + JITTER)
