"""Requirements of every merge method."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import workers.merging.methods
from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Source
from tests.workers.merging.methods.examples import EXAMPLES, MIDDLES
from workers.merging.masks import mask_key
from workers.merging.methods.plain import PLAIN, Operands, merge_tensors
from workers.merging.methods.registry import FUNCTIONS, merges
from workers.merging.methods.table import table
from workers.merging.order_statistics import TieOrder
from workers.merging.statistics import magnitude_table

# Coefficients of an average of equals: it is what it was.
NEUTRAL: Mapping[str, float] = {
    **MIDDLES,
    "weight": 1.0,
    "lambda": 1.0,
    "k": 1.0,
    "t": 0.5,
    "density": 1.0,
    "epsilon": 0.0,
    "gamma": 0.0,
    "select_topk": 1.0,
    "mask_lambda": 0.1,
    "agreement": 1.0,
}
# Sums of task vectors, each times its lambda or its weight.
SUMS = {name for name, method in METHODS.items() if method.drops_zeros == "lambda"} | {"ties_sum", "consensus_ta"}
WEIGHTED_SUMS = {
    name
    for name, method in METHODS.items()
    if (normalize := method.coefficient("normalize")) is not None and normalize.default == 0
} | {"weighted_sum", "multislerp_unscaled", "multislerp_unscaled_task_vectors"}
# Moves part of the way only, clips, or is in general no average.
NO_AVERAGE = {"wudi", "pcb_tanh"}

every_method = pytest.mark.parametrize("name", METHODS)


def num_sources(name: str) -> int:
    return METHODS[name].max_sources or 3


def merged(
    name: str,
    tensors: list[Tensor],
    base: Tensor,
    coefficients: Mapping[str, float | tuple[float, ...]] = EXAMPLES,
    models: tuple[str, ...] = ("a", "b", "c"),
) -> Tensor:
    declared = METHODS[name]
    taken = {
        c.name: value[: len(tensors)] if isinstance(value := coefficients[c.name], tuple) else value
        for c in declared.coefficients
        if c.name in coefficients
    }
    sources = tuple(Source(model) for model in models[: len(tensors)])
    seed = 3 if declared.takes_seed else None
    keys = tuple(mask_key(3, source.model, "weight") for source in sources)
    return merge_tensors(
        Merge(name, sources, taken, seed), Operands(tuple(tensors), base if declared.needs_base else None, keys=keys)
    )


def models(name: str, *shape: int, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A base, and as many models near it as the method takes."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(*shape, generator=generator)
    return base, [base + 0.1 * torch.randn(*shape, generator=generator) for _ in range(num_sources(name))]


@pytest.fixture
def all_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_declared_method_has_exactly_one_plain_function() -> None:
    assert list(PLAIN) == list(METHODS)
    assert set(FUNCTIONS) == set(METHODS)
    functions = [method.function for method in PLAIN.values()]
    assert len(set(functions)) == len(functions)


def test_wrong_functions_are_refused() -> None:
    """A second function for a method and one for no method are refused."""
    with pytest.raises(ValueError, match=r"nearswap is computed by workers.merging.methods.fusions already"):
        merges("nearswap")
    with pytest.raises(
        ValueError, match="merge method 'fisher' is not declared; declare it in a module of search_spaces/methods"
    ):
        merges("fisher")
    assert set(FUNCTIONS) == set(METHODS)


@every_method
def test_its_function_says_what_it_computes_and_from_where(name: str) -> None:
    assert len(PLAIN[name].function.__doc__ or "") > 60
    assert METHODS[name].source
    assert METHODS[name].variant


def test_the_table_in_the_readme_is_that_of_the_registry() -> None:
    readme = Path(workers.merging.methods.__file__).with_name("README.md").read_text()
    assert table() in readme


@every_method
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4), (6, 1), (2, 3, 4)])
def test_the_result_is_finite_float32_of_the_same_shape(name: str, shape: tuple[int, ...]) -> None:
    base, experts = models(name, *shape)
    result = merged(name, experts, base)
    assert result.shape == base.shape
    assert result.dtype == torch.float32
    assert result.isfinite().all()


@every_method
def test_operands_are_not_modified(name: str) -> None:
    base, experts = models(name, 12, 9)
    copies = [tensor.clone() for tensor in (base, *experts)]
    merged(name, experts, base)
    assert all(torch.equal(now, before) for now, before in zip((base, *experts), copies, strict=True))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "wudi"])
def test_the_number_of_threads_does_not_change_a_bit(name: str, all_threads: None) -> None:
    base, experts = models(name, 211, 331)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(merged(name, experts, base))
    assert all(torch.equal(one, other) for one, other in itertools.pairwise(results))


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].is_ordered and num_sources(name) == 3])
def test_the_order_of_experts_matters_only_in_the_last_bits(name: str) -> None:
    base, experts = models(name, 20, 15)
    expected = merged(name, experts, base)
    for order in itertools.permutations(range(3)):
        permuted = {
            key: tuple(value[i] for i in order) if isinstance(value, tuple) else value
            for key, value in EXAMPLES.items()
        }
        names = tuple("abc"[i] for i in order)
        result = merged(name, [experts[i] for i in order], base, permuted, names)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].base_at_zero])
def test_a_coefficient_of_zero_gives_the_base_exactly(name: str) -> None:
    base, experts = models(name, 20, 15)
    zero = {METHODS[name].base_at_zero or "": 0.0}
    assert torch.equal(merged(name, experts, base, {**EXAMPLES, **zero}), base)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].needs_base])
def test_zero_task_vectors_give_the_base_exactly(name: str) -> None:
    base, experts = models(name, 20, 15)
    assert torch.equal(merged(name, [base] * len(experts), base), base)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NO_AVERAGE])
def test_identical_experts_are_merged_to_what_they_are(name: str) -> None:
    base, experts = models(name, 20, 15)
    count = len(experts)
    coefficients = dict(NEUTRAL)
    if name in SUMS:
        coefficients["lambda"] = 1 / count
    if name in WEIGHTED_SUMS:
        coefficients["weight"] = 1 / count
    if name == "ram" or name == "ramplus_tl":
        coefficients["epsilon"] = 0.0
    result = merged(name, [experts[0]] * count, base, coefficients)
    torch.testing.assert_close(result, experts[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in NO_AVERAGE and METHODS[name].min_sources == 1]
)
def test_a_single_expert_is_merged_to_what_it_is(name: str) -> None:
    base, experts = models(name, 20, 15)
    coefficients = {**NEUTRAL, "epsilon": 0.0}
    torch.testing.assert_close(merged(name, experts[:1], base, coefficients), experts[0], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    "name", [name for name in METHODS if METHODS[name].coefficient("density") and METHODS[name].takes_seed]
)
def test_density_one_keeps_everything_whatever_the_seed(name: str) -> None:
    base, experts = models(name, 20, 15)
    whole = {**EXAMPLES, "density": 1.0, "epsilon": 0.0}
    result = merged(name, experts, base, whole)
    assert torch.equal(merged(name, experts, base, whole, ("x", "y", "z")), result)
    assert not torch.equal(merged(name, experts, base, EXAMPLES, ("x", "y", "z")), merged(name, experts, base))


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].trims and not METHODS[name].takes_seed])
def test_known_magnitudes_change_no_bit(name: str) -> None:
    base, experts = models(name, 20, 15)
    declared = METHODS[name]
    merge = Merge(
        name,
        tuple(Source(model) for model in "abc"),
        {c.name: EXAMPLES[c.name] for c in declared.coefficients if c.name in EXAMPLES},
    )
    known = tuple(magnitude_table(expert, base, TieOrder(place)) for place, expert in enumerate(experts))
    result = PLAIN[name].merge(Operands(tuple(experts), base, magnitudes=known), merge)
    assert torch.equal(result, merged(name, experts, base))


def test_trimming_is_declared() -> None:
    """A method that takes the magnitudes of its sources is declared to trim."""
    trimming = {name for name, method in PLAIN.items() if "magnitudes" in method.uses}
    assert trimming == {name for name, method in METHODS.items() if method.trims}


def test_rank_cut_is_declared() -> None:
    """A method that takes the order of equal elements is declared to cut at a rank."""
    cutting = {name for name, method in PLAIN.items() if method.order_parameter is not None}
    assert cutting == {name for name, method in METHODS.items() if method.cuts_at_rank}
    assert {"ties", "breadcrumbs", "della", "sce", "pcb", "consensus_ties"} <= cutting


def test_a_merge_that_its_method_does_not_take_is_refused() -> None:
    base, experts = models("ties", 4, 4)
    with pytest.raises(InvalidRecipe, match=r"ties.k is 1.5; give a number in \[0, 1\]"):
        merged("ties", experts, base, {"lambda": 1.0, "k": 1.5})
