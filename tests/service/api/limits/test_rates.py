"""Limits on the number of requests, under a fake clock."""

from __future__ import annotations

from service.api.limits.rates import MAX_SENDERS, Rate, TeamRates


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_sender_is_limited_in_the_long_run() -> None:
    """A burst is accepted at once, then as many as the rate allows; other senders are not affected."""
    clock = Clock()
    rate = Rate(2.0, 3.0, clock=clock)
    assert [rate.wait_s("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rate.wait_s("b") == 0.0
    clock.now = 0.5
    assert [rate.wait_s("a") for _ in range(2)] == [0.0, 0.5]


def test_many_senders_do_not_lift_the_limits() -> None:
    """A sender that has used up its requests stays refused, however many others come; memory stays bounded."""
    rate = Rate(0.001, 5.0, clock=Clock())
    used_up = [f"used up {number}" for number in range(50)]
    for sender in used_up:
        assert [rate.wait_s(sender) for _ in range(5)] == [0.0] * 5
    for number in range(3 * MAX_SENDERS):
        assert rate.wait_s(f"other {number}") == 0.0
    assert len(rate._buckets._left) <= MAX_SENDERS
    assert all(rate.wait_s(sender) > 0 for sender in used_up)


def test_a_team_has_its_own_rate() -> None:
    """As many requests as the quota of a minute are accepted at once; a changed quota holds from then on."""
    clock = Clock()
    teams = TeamRates(clock=clock)
    assert [teams.wait_s("red", 2) for _ in range(3)] == [0.0, 0.0, 30.0]
    assert teams.wait_s("blue", 2) == 0.0
    clock.now = 30.0
    assert [teams.wait_s("red", 2) for _ in range(2)] == [0.0, 30.0]
    clock.now = 31.0
    assert teams.wait_s("red", 120) == 0.0
