"""Seconds of a study's phases: cases computed by hand, and changes that must never speed up or slow down a phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.studies.planning.facts import ModelFacts
from service.studies.planning.roofline import (
    CPU,
    PYTHON_LOOPS,
    Calibration,
    Device,
    SampleTokens,
    Speeds,
    Work,
    statistics_s,
)
from workers.engines.canaries import CANARY_TOKENS, NUM_PROMPTS

# Every share is whole and every fixed cost is 0 but where a case sets it.
BARE = Calibration(
    products=1.0,
    transformers_products=1.0,
    decoding=1.0,
    layer_s=0.0,
    pass_s=0.0,
    sample_s=0.0,
    evaluation_s=0.0,
    merging=1.0,
    tensor_s=0.0,
    packing=0.0,
    start_s=0.0,
    start_reads=0.0,
    start_tokens=0.0,
    canary_reads=0.0,
    step_products=1.0,
    step_s=0.0,
    verify_s=0.0,
    verify_reads=0.0,
)
# 1,000 parameters in layers and 100 in the head; no attention, so that operations are two for each parameter and token.
FACTS = ModelFacts(parameters=1100, multiplied=1000, head=100, attention=0, layers=2, tensors=5, bank_bytes=6600)


def speeds(*, products: float = 1e6, bandwidth: float = 1e9, **changes: float) -> Speeds:
    device = Device(products, bandwidth, bandwidth, replace(BARE, **changes))
    return Speeds(facts=FACTS, device=device, value_bytes=2, kv_bytes=0, texts=10, disk_bandwidth=1e9)


def test_evaluation_by_hand() -> None:
    """Prompts are one pass; each further token of the answers is a pass over the samples that are served at once."""
    found = speeds().evaluation_s(Work(20, SampleTokens(read=5, answered=4)))
    reading = 2 * (20 * 5 * 1000 + 20 * 100) / 1e6
    steps = 3 * (20 / 10) * 2 * (10 * 1000 + 10 * 100) / 1e6
    assert found == pytest.approx(reading + steps)


def test_idle_experts_are_read_but_not_multiplied() -> None:
    """Parameters of experts that are not chosen for a token take time only where weights are read."""
    work = Work(20, SampleTokens(read=5, answered=4))

    def of(idle: int, *, bandwidth: float) -> tuple[float, float]:
        found = replace(speeds(bandwidth=bandwidth), facts=replace(FACTS, idle=idle))
        return found.evaluation_s(work), found.step_s(work, recomputes=False)

    half = 20 * 5 * 1000 + 3 * 20 * 1000  # half of two operations for each parameter and token
    evaluation, step = (
        dense - mixture for dense, mixture in zip(*(of(i, bandwidth=1e9) for i in (0, 500)), strict=True)
    )
    assert evaluation == pytest.approx(half / 1e6)
    assert step == pytest.approx(3 * 20 * 9 * 1000 / 1e6)
    assert of(0, bandwidth=1e2)[0] == of(500, bandwidth=1e2)[0]


def test_decoding_waits_for_memory_by_hand() -> None:
    """Where arithmetic is fast, a step takes as long as reading the weights once."""
    found = speeds(products=1e18, bandwidth=1e3).evaluation_s(Work(10, SampleTokens(read=5, answered=3)))
    assert found == pytest.approx(2 * 1100 / 1e3 + 2 * 2 * 1100 / 1e3)


def test_fixed_costs_by_hand() -> None:
    """Each pass costs its layers, each sample its own share, each evaluation once."""
    found = speeds(products=1e18, bandwidth=1e18, layer_s=1.0, pass_s=10.0, sample_s=100.0, evaluation_s=1e4)
    assert found.evaluation_s(Work(10, SampleTokens(5, 3))) == pytest.approx(1e4 + 10 * 100 + 3 * (2 * 1.0 + 10))


def test_fixed_costs_follow_the_speed_of_python() -> None:
    """On a core on which Python is half as fast, programs take twice as long; shares of other speeds stay."""
    calibration = CPU.on_core(PYTHON_LOOPS / 2)
    assert CPU.on_core(PYTHON_LOOPS) == CPU
    assert (calibration.start_s, calibration.evaluation_s) == (2 * CPU.start_s, 2 * CPU.evaluation_s)
    assert (calibration.layer_s, calibration.tensor_s) == (2 * CPU.layer_s, 2 * CPU.tensor_s)
    assert (calibration.decoding, calibration.packing) == (CPU.decoding, CPU.packing)


def test_swap_and_start_by_hand() -> None:
    """A swap reads every source once and writes the merge; a start loads the sources, and then swaps."""
    found = speeds(bandwidth=100.0, tensor_s=1.0, packing=3.0)
    assert found.merge_s == pytest.approx((6600 + 2200) / 100 + 5)
    assert found.swap_s == pytest.approx(found.merge_s + 3 * 2200 / 100)
    started = speeds(bandwidth=100.0, start_s=7.0, start_reads=2.0, start_tokens=10.0)
    loading = 6600 / 1e9
    assert started.start_s == pytest.approx(7 + loading + 2 * 2200 / 100 + 10 * 2 * 1100 / 1e6 + started.swap_s)


def test_canary_by_hand() -> None:
    """A canary merges, builds the merge in float32, and reads each prompt in a pass of its own."""
    built = speeds(products=1e18, bandwidth=100.0, canary_reads=2.0)
    reading = NUM_PROMPTS * 4 * 1100 / 100
    assert built.canary_s == pytest.approx(built.merge_s + 2 * 4 * 1100 / 100 + reading)
    read = speeds(bandwidth=1e18)
    assert read.canary_s == pytest.approx(NUM_PROMPTS * CANARY_TOKENS * 2 * 1100 / 1e6)


def test_statistics_by_hand() -> None:
    """Every expert has a table of magnitudes, all together one of variances; threads share the sorting."""
    assert statistics_s(FACTS, {"magnitudes"}, experts=3, threads=2) == pytest.approx(3 * 1100 / 2.6e7 / 2)
    assert statistics_s(FACTS, {"variances"}, experts=3, threads=1) == pytest.approx(1100 / 1.6e7)
    assert statistics_s(FACTS, set(), experts=3, threads=1) == 0


def test_check_by_hand() -> None:
    """All sources are read twice, and hashed more slowly than a fast disk reads."""
    assert speeds().check_s == pytest.approx(2 * 6600 / 1e9), "the disk of 1 GB/s is slower than both"
    fast = replace(speeds(), disk_bandwidth=1e12)
    assert fast.check_s == pytest.approx(6600 / 1.4e9 + 6600 / 7e9)


def test_gradient_step_by_hand() -> None:
    """A pass back takes twice one forward; recomputed activations take one more."""
    work = Work(10, SampleTokens(read=6, answered=2))
    forward = 2 * (80 * 1000 + 10 * 2 * 100) / 1e6
    once = speeds(bandwidth=1e18)
    assert once.step_s(work, recomputes=False) == pytest.approx(3 * forward)
    assert once.step_s(work, recomputes=True) == pytest.approx(4 * forward)
    # The merge reads the sources once, and each pass once more.
    slow = speeds(bandwidth=100.0)
    for passes in (1, 5):
        expected = 3 * forward + (1 + passes) * slow.merge_s
        assert slow.step_s(work, recomputes=False, num_passes=passes) == pytest.approx(expected)


def test_verification_by_hand() -> None:
    """Answers of a batch grow together; a second batch begins after 64 samples, and compared texts are read alone."""
    found = speeds(products=1e18, bandwidth=1e18, pass_s=1.0)
    assert found.verification_s(Work(32, SampleTokens(5, 256)), compared=16) == pytest.approx(256 + 16, abs=1e-4)
    assert found.verification_s(Work(64, SampleTokens(5, 256)), compared=16) == pytest.approx(256 + 16, abs=1e-4)
    assert found.verification_s(Work(65, SampleTokens(5, 256)), compared=16) == pytest.approx(2 * 256 + 16, abs=1e-4)
    halved = found.verification_s(Work(64, SampleTokens(5, 256)), compared=16, together=32)
    assert halved == pytest.approx(2 * 256 + 16, abs=1e-4)
    by_arithmetic = speeds(bandwidth=1e18).verification_s(Work(10, SampleTokens(read=6, answered=2)), compared=3)
    operations = 2 * (60 * 1000 + 10 * 100) + 2 * (10 * 1000 + 10 * 100) + 3 * 2 * (8 * 1000 + 8 * 100)
    assert by_arithmetic == pytest.approx(operations / 1e6, rel=1e-4)


def test_a_step_of_verification_reads_keys_and_values() -> None:
    """With long texts, the copies of keys and values take longer than the weights."""
    found = replace(speeds(products=1e18, bandwidth=1e6), kv_bytes=10)
    work = Work(8, SampleTokens(read=100, answered=3))
    weights = (1 + 2) * 4 * 1100  # one pass over the prompts, two steps
    cached = 2 * 8 * (100 + 3 / 2) * 3 * 10
    others = found.verification_s(Work(0, work.tokens), compared=0)
    assert found.verification_s(work, compared=0) - others == pytest.approx((weights + cached) / 1e6)


@pytest.mark.parametrize("change", [{"products": 2e6}, {"bandwidth": 2e9}], ids=["products", "bandwidth"])
def test_faster_devices_are_never_slower(change: dict[str, float]) -> None:
    """Twice the speed of products or memory makes no phase slower."""
    work = Work(30, SampleTokens(7, 9))
    slow, fast = speeds(), speeds(**change)
    for phase in ("start_s", "swap_s"):
        assert getattr(fast, phase) <= getattr(slow, phase)
    assert fast.evaluation_s(work) <= slow.evaluation_s(work)
    assert fast.step_s(work, recomputes=True) <= slow.step_s(work, recomputes=True)
    assert fast.verification_s(work, compared=8) <= slow.verification_s(work, compared=8)


def test_more_work_takes_longer() -> None:
    found = speeds(sample_s=1e-3)
    few = found.evaluation_s(Work(10, SampleTokens(5, 3)))
    assert few < found.evaluation_s(Work(11, SampleTokens(5, 3)))
    assert few < found.evaluation_s(Work(10, SampleTokens(6, 3)))
    assert few < found.evaluation_s(Work(10, SampleTokens(5, 4)))


def test_deeper_merges_have_more_of_each_layer() -> None:
    deep = FACTS.deepened(4)
    assert (deep.multiplied, deep.parameters, deep.head) == (2000, 2100, 100)
    assert FACTS.deepened(2) is FACTS
