import pytest

from workers.engines.vllm.canary import typical_difference


def test_one_far_off_token_is_rounding_in_16_bits_and_not_in_32() -> None:
    ours, theirs = [-1.0] * 47 + [-20.0], [-1.0] * 47 + [-20.4]
    assert typical_difference(ours, theirs, dtype="float32") == pytest.approx(0.4)
    assert typical_difference(ours, theirs, dtype="bfloat16") == pytest.approx(0.4 / 48**0.5)
    assert not typical_difference([float("nan")], [-1.0], dtype="bfloat16") <= 1.0
