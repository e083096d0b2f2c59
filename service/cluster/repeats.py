"""Limit on log messages that are repeated, such as the reason why Ray does not start, which is found every second."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

__all__ = ["REPEAT_S", "Repeats"]

# Seconds for which a message is not logged again.
REPEAT_S = 300.0
MAX_REMEMBERED = 100

# Numbers that differ between messages about the same problem: seconds left, ports, process ids, addresses of Python's
# objects.
CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")


class Repeats:
    """Record of the messages that were logged in the last REPEAT_S seconds, by which repeated messages are recognised.

    Two messages that differ in numbers alone are the same message. `clock` returns seconds from a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def is_new(self, message: str) -> bool:
        """Whether `message` was not logged in the last REPEAT_S seconds; the caller logs it only in this case."""
        key, now = CHANGING.sub("", message), self._clock()
        if now - self._logged_at.get(key, -REPEAT_S) < REPEAT_S:
            return False
        if len(self._logged_at) >= MAX_REMEMBERED:
            self._logged_at.clear()
        self._logged_at[key] = now
        return True
