"""Speeds and the time left, as displays of progress show them."""

from __future__ import annotations

import pytest

from service.jobs.search.progress import PaceMeter, ProgressSnapshot

PLANNED_SAMPLES, PLANNED_STEPS = 10_000, 100


class Clock:
    """A clock that a test moves; the meter reads it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def work(meter: PaceMeter, clock: Clock, stage: str, seconds: int, *, samples: int = 0, steps: float = 0.0) -> None:
    """Let a stage score samples and make steps, so many in each second, after what earlier stages did."""
    done = meter._snapshot or ProgressSnapshot("study", stage)
    for second in range(seconds + 1):
        meter.add(
            ProgressSnapshot(
                "study",
                stage,
                samples_scored=done.samples_scored + second * samples,
                samples_planned=PLANNED_SAMPLES,
                steps=done.steps + int(second * steps),
                steps_planned=PLANNED_STEPS,
            )
        )
        clock.now_s += second < seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> PaceMeter:
    return PaceMeter(clock=clock)


def test_time_left_is_that_of_samples_and_of_steps(meter: PaceMeter, clock: Clock) -> None:
    work(meter, clock, "searching", 10, samples=100, steps=1.0)
    assert meter.pace().samples_per_second == pytest.approx(100.0)
    assert meter.pace().time_left_s == pytest.approx((PLANNED_SAMPLES - 1000) / 100 + (PLANNED_STEPS - 10) / 1.0)


def test_samples_after_a_refinement_have_the_speed_of_the_search(meter: PaceMeter, clock: Clock) -> None:
    """Between its steps a refinement scores few samples, which says nothing about the held-out samples after it."""
    work(meter, clock, "searching", 40, samples=100)
    work(meter, clock, "refining", 40, samples=5, steps=2.0)
    left = PLANNED_SAMPLES - 40 * 105
    assert meter.pace().samples_per_second == pytest.approx(5.0)
    assert meter.pace().time_left_s == pytest.approx(left / 100 + (PLANNED_STEPS - 80) / 2.0)
    # Other stages are measured themselves.
    work(meter, clock, "held-out", 10, samples=50)
    assert meter.pace().time_left_s == pytest.approx((left - 500) / 50)


def test_a_stage_has_no_speed_before_its_first_chunk(meter: PaceMeter, clock: Clock) -> None:
    """Samples are counted once their chunk is scored. Before the first chunk of a stage, "0/s" looks like a halt."""
    work(meter, clock, "searching", 40)
    assert meter.pace().samples_per_second is None
    work(meter, clock, "searching", 10, samples=20)
    assert meter.pace().samples_per_second == pytest.approx(200 / 50)
    work(meter, clock, "searching", 90)
    assert meter.pace().samples_per_second == 0.0  # work that has halted is shown as such
    work(meter, clock, "held-out", 40)
    assert meter.pace().samples_per_second is None


def test_a_driver_that_begins_with_a_refinement_has_its_speed(meter: PaceMeter, clock: Clock) -> None:
    work(meter, clock, "refining", 10, samples=5, steps=2.0)
    assert meter.pace().time_left_s == pytest.approx((PLANNED_SAMPLES - 50) / 5 + (PLANNED_STEPS - 20) / 2.0)
