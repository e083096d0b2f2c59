import math

import pytest

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Source


def merge(method, *models, seed=None, **coefficients):
    named = {name.rstrip("_"): value for name, value in coefficients.items()}
    return Merge(method, tuple(map(Source, models)), named, seed)


def test_every_method_names_its_coefficients_once_and_its_rules_among_them():
    for spec in METHODS.values():
        names = [coefficient.name for coefficient in spec.coefficients]
        assert len(names) == len(set(names))
        assert {spec.drops_zeros, spec.base_at_zero} - {None} <= set(names)
        assert all(c.default is None or c.contains(c.default) for c in spec.coefficients)
        assert spec.max_sources is None or spec.min_sources <= spec.max_sources


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
        (merge("linear", "a", weight=1.0, seed=3), "linear draws nothing, but its seed is 3; leave it out"),
        (merge("nearswap", "a", "b", t=-0.1), "nearswap.t is -0.1; give a number from 0"),
        (
            merge("consensus_ta", "a", "b", lambda_=1.0, mask_lambda=0.5, agreement=1.5),
            "agreement is 1.5; give a whole number from 1",
        ),
        (
            merge("della", "a", lambda_=1.0, density=0.9, epsilon=0.2, seed=0),
            r"della: density 0.9 and epsilon 0.2: density - epsilon and density \+ epsilon are in \[0, 1\]",
        ),
        (
            merge("breadcrumbs", "a", "b", lambda_=1.0, density=(0.5, 0.9), gamma=0.2),
            "breadcrumbs: density 0.9 and gamma 0.2: what is kept and what is cut off are at most 1 in all",
        ),
        (merge("multislerp", "a", "b", weight=(0.5, -0.5)), r"weights \(0.5, -0.5\) sum to zero; they must not"),
    ],
)
def test_what_a_method_does_not_take_is_refused(wrong, message):
    with pytest.raises(InvalidRecipe, match=f"^merge: .*{message}"):
        wrong.check()


def test_the_ends_of_a_constraint_are_accepted():
    merge("della", "a", lambda_=1.0, density=0.3, epsilon=0.3, seed=0).check()
    merge("della", "a", lambda_=1.0, density=0.7, epsilon=0.3, seed=0).check()
    merge("breadcrumbs", "a", lambda_=1.0, density=0.9, gamma=0.1).check()


def test_a_coefficient_that_is_left_out_has_its_default():
    given = merge("ramplus_tl", "a", "b", r=0.3)
    given.check()
    assert (given.number("r"), given.number("alpha"), given.number("epsilon")) == (0.3, 0.2, 1e-5)
    assert merge("karcher", "a", "b").per_source("weight") == (1, 1)
    assert math.isinf(METHODS["ties"].coefficients[0].high)
