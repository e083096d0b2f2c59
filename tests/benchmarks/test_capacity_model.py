"""Tests of the simulation of many replicas, with settings for which the result is known."""

from __future__ import annotations

import pytest

from tests.benchmarks.capacity_model import Load, ServiceTimes, simulate

FREE = ServiceTimes(0.0, 0.0)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_replicas_are_always_busy_if_nothing_else_takes_time(in_flight: int) -> None:
    result = simulate(Load(50, chunk_s=2.0, in_flight=in_flight), FREE)
    assert result.busy == pytest.approx(1.0, abs=0.02)
    assert result.chunks_per_s == pytest.approx(25.0, rel=0.03)
    assert (result.driver, result.database) == (0.0, 0.0)


def test_a_driver_that_is_too_slow_sets_the_pace() -> None:
    result = simulate(Load(100, chunk_s=1.0), ServiceTimes(0.03, 0.01))
    assert result.chunks_per_s == pytest.approx(25.0, rel=0.01)
    assert result.busy == pytest.approx(0.25, rel=0.03)
    assert result.driver == pytest.approx(0.75, rel=0.01)


def test_drivers_share_work_until_the_database_is_full() -> None:
    """Four drivers are four times as fast as one; with twenty the database sets the pace."""
    times = ServiceTimes(0.03, 0.01)
    assert simulate(Load(400, chunk_s=1.0, drivers=2), times).chunks_per_s == pytest.approx(50.0, rel=0.03)
    full = simulate(Load(400, chunk_s=1.0, drivers=20), times)
    assert full.chunks_per_s == pytest.approx(100.0, rel=0.01)
    assert full.database == pytest.approx(1.0, rel=0.01)


def test_a_replica_with_one_chunk_waits_for_each_answer() -> None:
    """With one chunk at a time, a replica is idle while its driver works; with three it is not."""
    times = ServiceTimes(0.25, 0.0)
    assert simulate(Load(1, chunk_s=1.0, in_flight=1, spread=0.0), times).busy == pytest.approx(0.8, rel=0.01)
    assert simulate(Load(1, chunk_s=1.0, in_flight=3, spread=0.0), times).busy == pytest.approx(1.0, rel=0.01)


def test_equal_arguments_give_equal_results() -> None:
    load, times = Load(20, chunk_s=1.0), ServiceTimes(0.02, 0.005)
    assert simulate(load, times) == simulate(load, times)
    assert simulate(load, times) != simulate(load, times, seed=1)
