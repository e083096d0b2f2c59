"""Limits on the number of requests: of each token and address, of logins, and of requests without a valid token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Rate", "RateLimits"]

# Senders that are remembered at most; those that may send a whole burst again are forgotten first.
MAX_SENDERS = 10_000


class Rate:
    """Limit on the requests of each sender (a token bucket): `per_s` a second in the long run, and `burst` at once.

    Each server counts by itself. `clock` is a monotonic clock in seconds, which tests replace.
    """

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # requests left, and when

    def wait_s(self, sender: str) -> float:
        """Count a request of `sender`. Returns 0.0 if it is accepted, else the seconds until one is accepted again."""
        if math.isinf(self.per_s):
            return 0.0
        now = self._clock()
        left = self._refilled(sender, now)
        if left < 1:
            return (1 - left) / self.per_s
        if len(self._left) >= MAX_SENDERS and sender not in self._left:
            self._left = {name: at for name, at in self._left.items() if self._refilled(name, now) < self._burst}
            if len(self._left) >= MAX_SENDERS:
                self._left.clear()
        self._left[sender] = left - 1, now
        return 0.0

    def _refilled(self, sender: str, now: float) -> float:
        left, at = self._left.get(sender, (self._burst, now))
        return min(self._burst, left + (now - at) * self.per_s)


@dataclass(frozen=True)
class RateLimits:
    """Limits on the number of requests, each for one kind of sender.

    - `tokens`: limit on the requests of each token and session
    - `open`: limit on the requests of each address at a server without accounts; by default there is no limit, since
      all users may have one address
    - `refused`: limit on the requests of each address without a valid token
    - `logins`: limit on the requests of each address that begin or end a login
    """

    tokens: Rate = field(default_factory=lambda: Rate(100.0, 1000.0))
    open: Rate = field(default_factory=lambda: Rate(math.inf, math.inf))
    refused: Rate = field(default_factory=lambda: Rate(5.0, 50.0))
    logins: Rate = field(default_factory=lambda: Rate(5.0, 100.0))

    @classmethod
    def of(cls, per_s: float) -> RateLimits:
        """Create limits of `per_s` requests a second for a token, and for an address at a server without accounts."""
        return cls(Rate(per_s, 10 * per_s), Rate(per_s, 10 * per_s))
