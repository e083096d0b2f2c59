"""Limits on the number of requests: for tokens, addresses and teams, for logins, and without a valid token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Rate", "RateLimits", "TeamRates"]

# Senders that are remembered at most.
MAX_SENDERS = 10_000

# Senders that are forgotten at once when there are more.
FORGOTTEN = MAX_SENDERS // 10


class _Buckets:
    """Token buckets, which count for each sender how many requests the sender may still send.

    `clock` is a monotonic clock in seconds. If there are too many senders to remember, the senders with the most
    requests left are forgotten; a forgotten sender starts with its full number of requests when it comes back. A sender
    that has used up its requests is therefore remembered, even if many new senders appear.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # requests left, and when

    def wait_s(self, sender: str, *, per_s: float, burst: float) -> float:
        """Count a request of `sender`; return 0.0 if it is accepted, else the seconds until a request is accepted.

        A sender may send `per_s` requests a second in the long run, and `burst` requests at once.
        """
        now = self._clock()
        left = self._refilled(sender, now, per_s, burst)
        if left < 1:
            return (1 - left) / per_s
        if len(self._left) >= MAX_SENDERS and sender not in self._left:
            by_left = sorted(self._left, key=lambda name: -self._refilled(name, now, per_s, burst))
            for name in by_left[:FORGOTTEN]:
                del self._left[name]
        self._left[sender] = left - 1, now
        return 0.0

    def _refilled(self, sender: str, now: float, per_s: float, burst: float) -> float:
        left, at = self._left.get(sender, (burst, now))
        return min(burst, left + (now - at) * per_s)


class Rate:
    """Limit on the requests of each sender: `per_s` a second in the long run, and `burst` at once.

    Each server counts by itself. `clock` returns seconds from a monotonic clock; tests replace it.
    """

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._burst = burst
        self._buckets = _Buckets(clock)

    def wait_s(self, sender: str) -> float:
        """Count a request of `sender`, and return 0.0 if the request is accepted.

        If the sender has sent too many requests, the result is the number of seconds until the next request is
        accepted.
        """
        if math.isinf(self.per_s):
            return 0.0
        return self._buckets.wait_s(sender, per_s=self.per_s, burst=self._burst)


class TeamRates:
    """Limit on the number of requests that each team may send in a minute.

    Each server counts by itself. `clock` is a monotonic clock in seconds, which tests replace.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = _Buckets(clock)

    def wait_s(self, team: str, per_minute: int) -> float:
        """Count a request of `team`; return 0.0 if it is accepted, else the seconds until a request is accepted.

        A team may send `per_minute` requests a minute in the long run, and `per_minute` requests at once.
        """
        return self._buckets.wait_s(team, per_s=per_minute / 60, burst=per_minute)


@dataclass(frozen=True)
class RateLimits:
    """Limits on the number of requests.

    - `tokens`: limit for each API token and each browser session
    - `open`: limit for each network address, at a server without accounts; by default there is no limit, since all
      users may have one address
    - `refused`: limit, for each network address, on requests without a valid token or session
    - `logins`: limit, for each network address, on requests that begin or end a login
    - `teams`: limit for each team with the quota `requests_per_minute`
    """

    tokens: Rate = field(default_factory=lambda: Rate(100.0, 1000.0))
    open: Rate = field(default_factory=lambda: Rate(math.inf, math.inf))
    refused: Rate = field(default_factory=lambda: Rate(5.0, 50.0))
    logins: Rate = field(default_factory=lambda: Rate(5.0, 100.0))
    teams: TeamRates = field(default_factory=TeamRates, kw_only=True)

    @classmethod
    def of(cls, per_s: float) -> RateLimits:
        """Create limits of `per_s` requests a second for each token, and for each address at a server without accounts.

        The limits on refused requests and on logins keep their defaults.
        """
        return cls(Rate(per_s, 10 * per_s), Rate(per_s, 10 * per_s))
