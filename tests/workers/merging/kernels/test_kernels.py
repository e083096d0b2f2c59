"""The fused kernels give the same bits as the plain methods, for any operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Source
from tests.workers.merging.methods.examples import EXAMPLES
from workers.merging import masks
from workers.merging.kernels import FUSED, for_each, is_fused, merge_stored, reductions, rules
from workers.merging.kernels import cpu as kernels
from workers.merging.kernels.sorting import ascending_importances, ascending_magnitudes, ascending_variances
from workers.merging.methods.arithmetic import cosine_of, num_kept, total
from workers.merging.methods.competition import variance
from workers.merging.methods.plain import PLAIN, Operands
from workers.merging.order_statistics import ALL, MOST_LEFT, SPACING, TieOrder, magnitude_keys, threshold_of_rank
from workers.merging.statistics import importance_of, inner_products, magnitude_table, row_ranks, variance_table

Coefficients = dict[str, float | tuple[float, ...]]

ORDER = TieOrder(2**63 + 12345)
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
LAMBDAS = (0.3, -0.2, 0.7, 0.11, 0.6, 0.05, 0.9, 0.4)
# One of each way to make task vectors sparse and those of two sources: what an element is read from and rounded to has
# nothing to do with the rest of a rule, and every combination takes a second to compile. For the same reason, those of
# any number of sources are stored in bfloat16 or in float16; the test after merges them from and to different dtypes.
IN_BFLOAT16 = ("task_arithmetic", "breadcrumbs", "della")
IN_FLOAT16 = ("ties", "dare_ties", "sce")
OF_TWO = ("nearswap", "arcee_fusion", "slerp", "nuslerp")
SOME = (*IN_BFLOAT16, *IN_FLOAT16, *OF_TWO)
# One of each way to read an element: with a weight, with a threshold, and with a mask. More sources than a handful are
# another way to compile the loop over the sources, whatever the rest of the rule.
OF_MANY = ("task_arithmetic", "ties", "dare_ties")
OF_ONE = (*OF_MANY, "sce")  # and the variance of one source


def merges(num_sources: int) -> Iterator[Merge]:
    """Merges by every fused method: the chosen ones, and the others with their example coefficients."""
    yield from chosen_merges(num_sources)
    for name in FUSED.keys() - {merge.method for merge in chosen_merges(2)}:
        declared = METHODS[name]
        if declared.min_sources <= num_sources and (declared.max_sources or num_sources) == num_sources:
            numbers = {c.name: EXAMPLES[c.name] for c in declared.coefficients if c.default is None}
            shared = {key: value[0] if isinstance(value, tuple) else value for key, value in numbers.items()}
            sources = tuple(Source(f"m{i}") for i in range(num_sources))
            yield Merge(name, sources, shared, 3 if declared.takes_seed else None)


def chosen_merges(num_sources: int) -> Iterator[Merge]:
    """Merges with chosen coefficients. Methods with a density are tried with few, many and all elements kept."""
    sources = tuple(Source(f"m{i}") for i in range(num_sources))
    numbers = LAMBDAS[:num_sources]
    yield Merge("linear", sources, {"weight": numbers})
    yield Merge("weighted_sum", sources, {"weight": numbers})
    yield Merge("task_arithmetic", sources, {"lambda": 1})
    yield Merge("task_arithmetic", sources, {"lambda": numbers})
    yield Merge("passthrough", sources[:1], {"scale": 0.7})
    weights = tuple(map(abs, numbers))
    for k in (1e-6, 0.2, 0.777777, 1.0):
        each = tuple(k * (1 - 0.01 * i) for i in range(num_sources))
        yield Merge("ties", sources, {"lambda": 0.7, "k": k})
        yield Merge("ties_sum", sources, {"lambda": 0.7, "k": k})
        yield Merge("m3_ties", sources, {"lambda": 0.7, "k": k, "weight": weights})
        yield Merge("ties_peft", sources, {"weight": numbers, "density": each})
        for normalize in (0, 1):
            coefficients: Coefficients = {"weight": numbers, "density": each, "lambda": 0.9, "normalize": normalize}
            yield Merge("ties_weighted", sources, coefficients)
            gammas: Coefficients = {"gamma": tuple(0.1 * (1 - number) for number in each)}
            yield Merge("breadcrumbs_ties", sources, coefficients | gammas)
        yield Merge("breadcrumbs", sources, {"lambda": numbers, "density": each} | gammas)
        yield Merge("consensus_ties", sources, {"lambda": 0.7, "k": k, "mask_lambda": weights, "agreement": 2})
        yield Merge("sce", sources, {"select_topk": k})
        yield Merge("sce_mergekit", sources, {"select_topk": k})
    yield Merge("sce", sources, {"select_topk": 0.0})
    yield Merge("consensus_ta", sources, {"lambda": 0.7, "mask_lambda": weights, "agreement": 1})
    yield Merge("ramplus_tl", sources, {"r": 0.3, "alpha": 0.9, "epsilon": 0.03})
    for density in (0.03, 0.5, 1.0):
        each = tuple(density * (1 - 0.01 * i) for i in range(num_sources))
        yield Merge("dare_linear", sources, {"lambda": numbers, "density": each}, seed=3)
        yield Merge("dare_ties", sources, {"lambda": -0.8, "density": each}, seed=3)
        yield Merge("dare_linear_l1", sources, {"lambda": numbers, "density": each}, seed=3)
        yield Merge("m3_dare", sources, {"lambda": 0.8, "density": each, "weight": weights}, seed=3)
        yield Merge("dare_ties_l1", sources, {"weight": numbers, "density": each}, seed=3)
        share: Coefficients = {"density": each, "epsilon": tuple(min(number, 1 - number) / 2 for number in each)}
        yield Merge("della", sources, {"lambda": 0.8} | share, seed=3)
        yield Merge("della_l1", sources, {"weight": numbers} | share, seed=3)
        yield Merge("della_linear", sources, {"lambda": numbers} | share, seed=3)
        yield Merge("della_linear_l1", sources, {"lambda": numbers} | share, seed=3)
        yield Merge("della_linear_l1", sources, share | {"lambda": numbers, "rescale": 0}, seed=3)
        yield Merge("dare_ties_l1", sources, {"weight": numbers, "density": each, "rescale": 0}, seed=3)
    yield Merge("ram", sources, {"epsilon": 0.03})
    yield Merge("multislerp", sources, {"weight": numbers})
    yield Merge("multislerp_task_vectors", sources, {"weight": numbers})
    yield Merge("karcher", sources, {"weight": tuple(map(abs, numbers)), "max_iter": 3, "tol": 0.001})
    yield Merge("karcher", sources, {"weight": tuple(map(abs, numbers))})
    if num_sources > 1:
        yield Merge("model_stock", sources)
    if num_sources == 2:
        yield Merge("nearswap", sources, {"t": 0.03})
        yield Merge("arcee_fusion", sources)
        yield Merge("nuslerp_task_vectors", sources, {"weight": numbers})
        yield Merge("slerp", sources, {"t": 0.3})
        yield Merge("nuslerp", sources, {"weight": numbers})


def operands(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], seed: int = 0, *, ranks_of: torch.dtype | None = None
) -> Operands:
    """A base and experts near it with all statistics; `dtypes` are those of the base and of each expert.

    Ranks in rows are those of copies in `ranks_of`, if it is given.
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    tensors = tuple((base + 0.05 * torch.randn(shape, generator=generator)).to(dtype) for dtype in dtypes[1:])
    base = base.to(dtypes[0])
    return with_statistics(tensors, base, ranks_of=ranks_of)


def with_statistics(
    tensors: tuple[torch.Tensor, ...], base: torch.Tensor, *, ranks_of: torch.dtype | None = None
) -> Operands:
    orders = tuple(TieOrder(place) for place in range(len(tensors)))
    tables = tuple(magnitude_table(tensor, base, order) for tensor, order in zip(tensors, orders, strict=True))
    keys = tuple(masks.mask_key(3, f"m{i}", "weight") for i in range(len(tensors)))
    is_pair = len(tensors) == 2
    cos, importance = (cosine_of(inner_products(tensors), 0, 1), importance_of(*tensors)) if is_pair else (None, None)
    variances = variance_table(tensors, base, ORDER)
    ranks = tuple(
        row_ranks(tensor.to(ranks_of or tensor.dtype), base.to(ranks_of or base.dtype), order)
        for tensor, order in zip(tensors, orders, strict=True)
    )
    known = Operands(tensors, base, cos, tables, keys, importance=importance, variances=variances, ranks=ranks)
    return replace(known, orders=orders, order=ORDER)


def given_to(merge: Merge, stored: Operands) -> Operands:
    """The operands with inner products for the method: of task vectors if the method needs the base."""
    tensors = [tensor.float() for tensor in stored.tensors]
    if METHODS[merge.method].needs_base and stored.base is not None:
        tensors = [tensor - stored.base.float() for tensor in tensors]
    taken = METHODS[merge.method].max_sources
    return replace(stored, tensors=stored.tensors[:taken], products=inner_products(tensors))


def plain(merge: Merge, given: Operands, dtype: torch.dtype) -> torch.Tensor:
    """The merged tensor by the plain method, which sorts for itself instead of using statistics."""
    alone = Operands(
        given_to(merge, given).tensors, given.base, keys=given.keys, orders=given.orders, order=given.order
    )
    alone = alone.in_float32()
    return PLAIN[merge.method].merge(alone, merge).to(dtype)


def fused(merge: Merge, given: Operands, dtype: torch.dtype) -> torch.Tensor:
    assert is_fused(merge, given, dtype)
    out = torch.full(given.tensors[0].shape, 7.0, dtype=dtype)
    merge_stored(merge, given_to(merge, given), out)
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == FLOAT32 else torch.int16)


def check(merge: Merge, given: Operands, dtype: torch.dtype) -> None:
    found, expected = fused(merge, given, dtype), plain(merge, given, dtype)
    assert torch.equal(bits(found), bits(expected)), (merge, int((found != expected).sum()))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_fused_method_is_among_those_checked() -> None:
    assert {merge.method for merge in merges(2)} == set(FUSED)


@pytest.mark.parametrize("num_sources", [1, 2, *(pytest.param(number, marks=pytest.mark.slow) for number in (3, 8))])
def test_kernels_give_the_bits_of_the_plain_methods(
    num_sources: int, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.merging.kernels.threads.MIN_PIECE", 1024)  # two threads share the last shape
    for shape in ((1,), (7, 43), (67, 131)):
        given = operands(shape, (FLOAT32,) * (num_sources + 1))
        for merge in merges(num_sources):
            if num_sources == 3 or merge.method in {1: OF_ONE, 2: SOME, 8: OF_MANY}[num_sources]:
                check(merge, given, FLOAT32)


@pytest.mark.slow
def test_large_tensors_have_the_bits_of_the_plain_methods(two_threads: None) -> None:
    """Tables of statistics have hundreds of entries, and each thread hundreds of blocks."""
    given = operands((301, 499), (FLOAT32,) * 4)
    first = {merge.method: merge for merge in reversed(list(merges(3)))}
    for method in (*IN_BFLOAT16, *IN_FLOAT16):
        check(first[method], given, FLOAT32)


@pytest.mark.parametrize(("dtype", "methods"), [(BFLOAT16, (*IN_BFLOAT16, *OF_TWO)), (FLOAT16, IN_FLOAT16)])
def test_stored_dtypes_are_read_and_written_with_one_rounding(dtype: torch.dtype, methods: tuple[str, ...]) -> None:
    # The kernel that ranks rows takes longest to compile, and of these methods DELLA alone has ranks.
    given = operands((97, 53), (dtype,) * 3, ranks_of=dtype if "della" in methods else FLOAT32)
    for merge in merges(2):
        if merge.method in methods:
            check(merge, given, dtype)


def test_dtypes_may_differ_between_sources_base_and_result() -> None:
    # Another test ranks rows of one dtype by a base of another one: that kernel takes longest to compile.
    given = operands((33, 5), (FLOAT16, BFLOAT16, FLOAT32, FLOAT16), ranks_of=FLOAT32)
    for merge in merges(3):
        if merge.method in (*OF_MANY, "della", "sce"):
            check(merge, given, BFLOAT16)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_rounding_is_torchs_for_every_kind_of_number(dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = halves[torch.isfinite(halves)]
    passed = fused(Merge("linear", (Source("a"),), {"weight": 1.0}), Operands((finite,)), FLOAT32)
    assert torch.equal(bits(passed), bits(finite.float()))  # every number of the type is read right
    between = torch.cat([passed[:-1] + (passed[1:] - passed[:-1]) * share for share in (0.25, 0.5, 0.75)])
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).int().view(FLOAT32)
    numbers = torch.cat([between, passed, random[torch.isfinite(random)], torch.tensor([0.0, -0.0, 65519.9, 65520.0])])
    check(Merge("linear", (Source("a"),), {"weight": 1.0}), Operands((numbers,)), dtype)


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit(two_threads: None) -> None:
    given = operands((512, 513), (FLOAT32,) * 4)
    for merge in merges(3):
        parallel = fused(merge, given, FLOAT32)
        torch.set_num_threads(1)
        assert torch.equal(fused(merge, given, FLOAT32), parallel)
        torch.set_num_threads(2)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_results_may_start_anywhere(dtype: torch.dtype) -> None:
    """Stores past the caches go to multiples of 32 bytes; nothing else is touched."""
    given = operands((1023,), (FLOAT32,) * 3)
    for merge in (next(merges(2)), Merge("ties", (Source("a"), Source("b")), {"lambda": 0.7, "k": 0.3})):
        expected = plain(merge, given, dtype)
        for start in range(18):
            memory = torch.full((1060,), 7.0, dtype=dtype)
            merge_stored(merge, given, memory[start : start + 1023])
            assert torch.equal(memory[start : start + 1023], expected)
            assert (memory[:start] == 7).all()
            assert (memory[start + 1023 :] == 7).all()


def test_threads_merge_each_tensor_once(two_threads: None) -> None:
    """Several threads merge many tensors, each once."""
    sizes = [1, 5, 900, 70_000, 300_000, *[4000] * 300]
    done: list[int] = []
    for_each(done.append, list(zip(sizes, range(len(sizes)), strict=True)), torch.device("cpu"))
    assert sorted(done) == list(range(len(sizes)))
    assert done[0] == 4  # the largest first

    def fails(item: int) -> None:
        if item == 9:
            raise ZeroDivisionError
        done.append(item)

    with pytest.raises(ZeroDivisionError):
        for_each(fails, list(zip(sizes, range(len(sizes)), strict=True)), torch.device("cpu"))


def test_fused_masks_are_those_of_the_definition() -> None:
    zero, one = torch.zeros(70_001), torch.ones(70_001)
    for key in (0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1):
        for density in (1e-6, 0.1, 0.5, 0.999999, 1.0):
            found = torch.empty(70_001)
            k0, k1 = masks.key_words(key)
            sparse = rules.Dropped((k0,), (k1,), (masks.threshold(density) - 1,), (1.0,))
            kernels.merge(rules.Sum(sparse, (1.0,)), [one], zero, found)
            assert torch.equal(found != 0, masks.keep(key, (70_001,), density))


# Few distinct numbers, so that magnitudes are often equal, or zero, or cancel.
numbers = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.0, 1e-30, -3.0])


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 400), st.integers(0, 1_000_000))
def test_ties_keeps_exactly_what_a_full_sort_keeps(data: st.DataObject, size: int, millionths: int) -> None:
    rows = [data.draw(st.lists(numbers, min_size=3, max_size=60)) for _ in range(2)]
    tensors = tuple(torch.tensor((row * size)[:size]) for row in rows)
    base = torch.zeros(size)
    merge = Merge("ties", (Source("a"), Source("b")), {"lambda": 0.9, "k": millionths / 1e6})
    check(merge, with_statistics(tensors, base), FLOAT32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 40), st.integers(0, 2**31), st.floats(0, 1))
@example(size=16, num_distinct=1, seed=127, share=1.0)  # the first element, whose mark is 0, is zero, and all are kept
def test_any_rank_is_found_among_fewer_than_the_tables_spacing(
    size: int, num_distinct: int, seed: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base, source = torch.zeros(size), torch.randn(size, generator=generator)
    if num_distinct:
        source = (source * num_distinct).round() / num_distinct
    ordered = source.abs().sort().values
    order = TieOrder(seed)
    table = magnitude_table(source, base, order)
    rank = num_kept(round(share, 6), size)
    trim, keys = table.trim(rank), magnitude_keys(source.abs(), order)
    between = keys[(keys > trim.low.key) & (keys < trim.high.key)].sort().values
    assert len(between) < SPACING
    expected = int(keys.sort().values[-rank])
    assert expected == (trim.high.key if trim.low == trim.high else between[trim.num_smaller])
    assert table.num_not_zero == int(torch.count_nonzero(ordered))
    found = table.threshold(rank, source.abs(), order)
    assert found == threshold_of_rank(source.abs(), rank, order)
    assert (found.key, found.magnitude) == (expected, float(ordered[-rank]))
    assert int(found.reached_by(source.abs(), order).sum()) == rank
    assert table.num_bytes <= 9 * (size / SPACING + 2)
    # Where magnitudes alone are compared, few elements are left, and the others are on the right side.
    below, above = trim.magnitudes
    if not trim.is_tied:
        assert len(ordered[(ordered > below) & (ordered < above)]) <= MOST_LEFT
    if trim == ALL:
        assert int((ordered >= above).sum()) == rank == size
    else:
        assert int((ordered >= above).sum()) < rank <= int((ordered > below).sum())


def test_sums_are_those_of_torch_in_another_order() -> None:
    given = operands((301, 499), (FLOAT32,) * 4)
    assert given.base is not None
    taus = [tensor - given.base for tensor in given.tensors]
    for tau in taus:
        assert total(torch.abs, tau) == pytest.approx(float(tau.double().abs().sum()), rel=1e-13)
    half = rules.Dropped((1, 2, 3), (4, 5, 6), (2**31,) * 3, (1.0,) * 3)
    whole, kept = (reductions.kept_norms(sparse, given.tensors, given.base) for sparse in (rules.Whole(), half))
    assert whole == [total(torch.abs, tau) for tau in taus]
    assert kept == pytest.approx([number / 2 for number in whole], rel=0.02)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_sorting_agrees_with_torch(dtype: torch.dtype) -> None:
    """Variances and importances are sorted as torch sorts them."""
    given = operands((300, 20), (dtype,) * 4)
    assert given.base is not None
    expected = variance(given.tensors, given.base).flatten().sort().values
    found = [torch.from_numpy(piece) for piece, _ in ascending_variances(given.tensors, given.base, 1)]
    assert torch.equal(torch.cat(found), expected)
    rows = torch.randn(300, generator=torch.Generator().manual_seed(1))
    first, second = given.tensors[:2]
    sizes = (second.float() - first.float()).abs() * rows[:, None]
    found = [torch.from_numpy(piece.copy()) for piece in ascending_importances(first, second, rows)]
    assert torch.equal(torch.cat(found), sizes.flatten().sort().values)


@pytest.mark.parametrize("shape", [(1,), (7,), (70_000,), (3, 70_000), (300, 20), (4, 5, 6)])
def test_ranks_in_rows_are_those_of_a_sort_by_magnitude_and_hash(shape: tuple[int, ...]) -> None:
    given = operands(shape, (FLOAT32, BFLOAT16))  # so short a mantissa leaves many equal
    assert given.base is not None
    base = given.base.bfloat16().float()
    sizes = (given.tensors[0].float() - base).abs().reshape(1 if len(shape) == 1 else -1, shape[-1])
    places = magnitude_keys(sizes, ORDER).sort(dim=-1).indices.sort(dim=-1).indices
    assert torch.equal(row_ranks(given.tensors[0], base, ORDER).long(), places.reshape(shape))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_magnitudes_are_sorted_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands((40_000,), (dtype, dtype))
    given.tensors[0][:9000] = given.base[:9000]  # type: ignore[index]
    assert given.base is not None
    expected = magnitude_keys((given.tensors[0].float() - given.base.float()).abs(), ORDER).sort().values
    for part, size in ((1 << 20, 1 << 20), (1 << 20, 3000), (7000, 500), (1, 1)):
        monkeypatch.setattr("workers.merging.kernels.sorting.PART", part)
        monkeypatch.setattr("workers.merging.kernels.sorting.RANGE", size)
        pieces = ascending_magnitudes(given.tensors[0], given.base, ORDER.factor)
        keys = [sizes.view(np.uint32).astype(np.int64) << 32 | marks for sizes, marks in pieces]
        assert torch.equal(torch.from_numpy(np.concatenate(keys)), expected)


def test_what_has_no_kernel_is_left_to_the_plain_methods() -> None:
    given = operands((8, 6), (FLOAT32,) * 3)
    linear = Merge("linear", (Source("a"), Source("b")), {"weight": 0.5})
    assert is_fused(linear, given, FLOAT32)
    assert not is_fused(Merge("wudi", (Source("a"), Source("b"))), given, FLOAT32)
    assert not is_fused(linear, given, torch.float64)
    turned = Operands(tuple(tensor.T for tensor in given.tensors))
    assert not is_fused(linear, turned, FLOAT32)
    assert not is_fused(linear, Operands((torch.empty(0), torch.empty(0))), FLOAT32)
