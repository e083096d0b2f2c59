from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import search_spaces.methods
from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.methods.base import NumSources, PairShare, Range
from search_spaces.recipe import Merge, Source
from search_spaces.spaces.lfs_ranges import SEARCHED_METHODS


def merge(method: str, *models: str, seed: int | None = None, **coefficients: float | tuple[float, ...]) -> Merge:
    named = {name.rstrip("_"): value for name, value in coefficients.items()}
    return Merge(method, tuple(map(Source, models)), named, seed)


def test_coefficients_are_named_once() -> None:
    """Every method names each coefficient once, and its rules refer to these names."""
    for name, method in METHODS.items():
        names = [coefficient.name for coefficient in method.coefficients]
        assert method.name == name
        assert len(names) == len(set(names))
        assert {method.drops_zeros, method.base_at_zero, method.first_at_zero} - {None} <= set(names)
        assert all(c.default is None or c.contains(c.default) for c in method.coefficients)
        assert method.max_sources is None or method.min_sources <= method.max_sources


# A study's parameters are in this order, and so the trials of a seed: others may come between, none may move.
LFS_ORDER = [
    *("task_arithmetic", "ties", "slerp", "linear", "passthrough"),
    *("nuslerp", "nuslerp_rows", "nuslerp_columns", "nuslerp_task_vectors", "multislerp", "multislerp_task_vectors"),
    *("karcher", "model_stock", "model_stock_rows", "nearswap", "arcee_fusion"),
    *("ties_majority", "ties_sum", "ties_weighted", "ties_peft", "m3_ties"),
    *("dare_linear", "dare_linear_l1", "dare_ties", "dare_ties_l1", "m3_dare"),
    *("della", "della_l1", "della_linear", "della_linear_l1", "breadcrumbs", "breadcrumbs_ties"),
    *("sce", "sce_mergekit", "ram", "ramplus_tl", "pcb", "pcb_tanh", "consensus_ta", "consensus_ties", "wudi"),
]


def test_the_order_of_methods_in_a_search_does_not_change() -> None:
    assert [name for name in SEARCHED_METHODS if name in LFS_ORDER] == LFS_ORDER


def test_searched_range_is_accepted() -> None:
    """Every coefficient is searched within its accepted range or has a default."""
    for method in METHODS.values():
        for coefficient in method.coefficients:
            match coefficient.searched:
                case Range(low=low, high=high) | PairShare(low=low, high=high):
                    assert low < high
                    assert coefficient.contains(low)
                    assert coefficient.contains(high)
                case NumSources(value=value):
                    assert coefficient.is_whole
                    assert coefficient.contains(value)
                case None:
                    assert coefficient.default is not None


def test_pair_weights_need_a_pair() -> None:
    """Weights of a pair are searched only by methods of two sources."""
    for method in METHODS.values():
        if any(isinstance(coefficient.searched, PairShare) for coefficient in method.coefficients):
            assert [coefficient.name for coefficient in method.coefficients] == ["weight"]
            assert method.source_choice == "pair"


def test_methods_of_one_counterpart() -> None:
    """Methods with one counterpart share its parameters and differ in those that select them."""
    variants: dict[str, list[Any]] = {}
    for method in METHODS.values():
        if method.mergekit is not None:
            variants.setdefault(method.mergekit.method, []).append(method.mergekit)
    for counterparts in variants.values():
        assert {c.parameters for c in counterparts} == {counterparts[0].parameters}
        names = {parameter.name for parameter in counterparts[0].parameters}
        assert all(set(c.settings) <= names for c in counterparts)
        choices = [(c.base, tuple(sorted(c.settings.items()))) for c in counterparts]
        assert len(set(choices)) == len(choices)


def test_partly_exact_counterpart() -> None:
    """A counterpart that is exact only in places describes its difference."""
    for method in METHODS.values():
        if method.mergekit is not None and method.mergekit.exact_at:
            assert method.mergekit_difference
            assert set(method.mergekit.exact_at) <= {coefficient.name for coefficient in method.coefficients}


def test_reading_the_declarations_needs_no_numpy_and_no_pydantic() -> None:
    program = (
        "import json, sys, search_spaces.recipe\n"
        "print(json.dumps([name for name in ('numpy', 'pydantic', 'torch') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_new_module_of_the_package_is_found_without_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added.py").write_text(
        "from search_spaces.methods.base import MergeMethod\n"
        "POSITION = 0\n"
        "ADDED = MergeMethod(name='added', source='a paper', variant='a test')\n"
    )
    monkeypatch.setattr(search_spaces.methods, "__path__", [*search_spaces.methods.__path__, str(tmp_path)])
    found = [method.name for method in search_spaces.methods.declarations()]
    assert found == ["added", *METHODS]
    del sys.modules["search_spaces.methods.added"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (merge("fisher", "a"), "unknown merge method 'fisher'; known are passthrough, linear, task_arithmetic"),
        (merge("nuslerp", "a", weight=1.0), "nuslerp has 1 sources; it takes 2"),
        (merge("model_stock", "a"), "model_stock has 1 sources; it takes at least 2"),
        (merge("passthrough", "a", "b"), "passthrough has 2 sources; it takes 1"),
        (merge("ties", "a", lambda_=1.0, k=1.5), r"ties.k is 1.5; give a number in \[0, 1\]"),
        (merge("ties", "a", lambda_=1.0, density=0.5), "ties takes no coefficient 'density'; it takes lambda, k"),
        (merge("arcee_fusion", "a", "b", t=0.5), "arcee_fusion takes no coefficient 't'; it takes none"),
        (merge("ties", "a", "b", lambda_=(1.0, 1.0), k=0.5), r"ties needs one number 'lambda', found \(1.0, 1.0\)"),
        (merge("dare_linear", "a", lambda_=1.0, density=0.0, seed=1), r"density is 0; give a number in \[1e-06, 1\]"),
        (merge("dare_linear", "a", lambda_=1.0, density=0.5), "draws random masks and its seed is None; give a whole"),
        (merge("dare_linear", "a", lambda_=1.0, density=0.5, seed=-1), "its seed is -1; give a whole number from 0"),
        (merge("linear", "a", weight=1.0, seed=3), "linear draws no masks, but its seed is 3; leave it out"),
        (merge("nearswap", "a", "b", t=-0.1), "nearswap.t is -0.1; give a number from 0"),
        (
            merge("consensus_ta", "a", "b", lambda_=1.0, mask_lambda=0.5, agreement=1.5),
            "agreement is 1.5; give a whole number from 1",
        ),
        (
            merge("della", "a", lambda_=1.0, density=0.9, epsilon=0.2, seed=0),
            r"della: density 0.9 and epsilon 0.2: density - epsilon and density \+ epsilon must be in \[0, 1\]",
        ),
        (
            merge("breadcrumbs", "a", "b", lambda_=1.0, density=(0.5, 0.9), gamma=1.2),
            r"breadcrumbs.gamma is 1.2; give a number in \[0, 1\]",
        ),
        (merge("multislerp", "a", "b", weight=(0.5, -0.5)), r"weights \(0.5, -0.5\) sum to zero; they must not"),
    ],
)
def test_what_a_method_does_not_take_is_refused(wrong: Merge, message: str) -> None:
    with pytest.raises(InvalidRecipe, match=f"^merge: .*{message}"):
        wrong.check()


def test_the_ends_of_a_constraint_are_accepted() -> None:
    merge("della", "a", lambda_=1.0, density=0.3, epsilon=0.3, seed=0).check()
    merge("della", "a", lambda_=1.0, density=0.7, epsilon=0.3, seed=0).check()
    merge("breadcrumbs", "a", lambda_=1.0, density=0.9, gamma=0.1).check()


def test_a_coefficient_that_is_left_out_has_its_default() -> None:
    given = merge("ramplus_tl", "a", "b", r=0.3)
    given.check()
    assert (given.number("r"), given.number("alpha"), given.number("epsilon")) == (0.3, 0.2, 1e-5)
    assert merge("karcher", "a", "b").per_source("weight") == (1, 1)
    assert math.isinf(METHODS["ties"].coefficients[0].high)
