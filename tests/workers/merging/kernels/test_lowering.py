"""Every fused rule belongs to a declared method, and every method has at most one."""

from __future__ import annotations

import pytest

from search_spaces.methods import METHODS
from workers.merging.kernels import FUSED, ON_CUDA
from workers.merging.kernels.lowering.averages import Nearswap
from workers.merging.kernels.lowering.base import RULES, fuses
from workers.merging.kernels.operations import computes


def test_every_rule_belongs_to_a_declared_method() -> None:
    assert set(FUSED) == set(RULES)
    assert set(METHODS) > set(FUSED) > ON_CUDA
    assert len(set(FUSED.values())) == len(FUSED)


def test_wrong_rules_are_refused() -> None:
    """A second rule for a method and one for no method are refused."""
    with pytest.raises(ValueError, match=r"nearswap has a rule in workers.merging.kernels.lowering.averages already"):
        fuses("nearswap")
    with pytest.raises(
        ValueError, match="merge method 'fisher' is not declared; declare it in a module of search_spaces/methods"
    ):
        fuses("fisher")
    assert set(FUSED) == set(RULES)


def test_a_second_formula_for_a_rule_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Nearswap has a formula in workers\.merging\.kernels\.lowering\.averages already"
    ):
        computes(Nearswap)
