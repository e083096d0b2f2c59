"""Our merge methods compared with mergekit's: the same tensors, and each deliberate deviation with its reason.

All is in float32, equal to 1e-6; from bfloat16 sources both compute in float32 and round at the end. Random masks are
ours on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Source
from workers.merging.masks import keep, keep_each, mask_key
from workers.merging.methods.plain import Operands, merge_tensors

Coefficients = Mapping[str, float | tuple[float, ...]]

SEED = 5


def keys_of(count: int) -> tuple[int, ...]:
    return tuple(mask_key(SEED, f"m{i}", "weight") for i in range(count))


def ours(name: str, base: Tensor | None, experts: Sequence[Tensor], coefficients: Coefficients) -> Tensor:
    takes_seed = METHODS[name].takes_seed
    sources = tuple(Source(f"m{i}") for i in range(len(experts)))
    merge = Merge(name, sources, coefficients, SEED if takes_seed else None)
    keys = keys_of(len(experts)) if takes_seed else None
    return merge_tensors(
        merge, Operands(tuple(t.float() for t in experts), None if base is None else base.float(), keys=keys)
    )


def theirs(method: str, base: Tensor | None, experts: Sequence[Tensor], parameters: Mapping[str, Any]) -> Tensor:
    """Result of mergekit; a tuple in `parameters` holds one number per expert."""
    from mergekit.merge_methods.api import merge_tensors as merge

    names = [f"m{i}" for i in range(len(experts))]
    named = {
        key: dict(zip(names, value, strict=True)) if isinstance(value, tuple) else value
        for key, value in parameters.items()
    }
    tensors = [t.float() for t in ([] if base is None else [base]) + list(experts)]
    ids = ([] if base is None else ["base"]) + names
    merged: Tensor = merge(tensors, method, parameters=named, ids=ids, base_index=None if base is None else 0)
    return merged


@pytest.fixture
def our_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make mergekit draw the same random masks as we do, one per expert in order."""
    remaining = list(keys_of(3))

    def bernoulli(probabilities: Tensor) -> Tensor:
        key = remaining.pop(0)
        chances = probabilities.double()
        if float(chances.min()) == float(chances.max()):
            kept = keep(key, chances.shape, round(float(chances.flatten()[0]), 6))
        else:
            kept = keep_each(key, chances)
        return kept.to(probabilities.dtype)

    monkeypatch.setattr(torch, "bernoulli", bernoulli)


def random(*shape: int, seed: int = 0, scale: float = 0.05) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(*shape, generator=generator)
    return base, [base + scale * torch.randn(*shape, generator=generator) for _ in range(3)]


def low_rank() -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(24, 40, generator=generator)
    return base, [
        base + 0.1 * torch.randn(24, 2, generator=generator) @ torch.randn(2, 40, generator=generator) for _ in range(3)
    ]


def sparse() -> tuple[Tensor, list[Tensor]]:
    base, experts = random(24, 40, seed=2)
    kept = [torch.rand(24, 40, generator=torch.Generator().manual_seed(i)) < 0.3 for i in range(3)]
    return base, [torch.where(mask, expert, base) for mask, expert in zip(kept, experts, strict=True)]


def unchanged() -> tuple[Tensor, list[Tensor]]:
    base, experts = random(24, 40, seed=3)
    return base, [experts[0], base.clone(), experts[2]]


def same() -> tuple[Tensor, list[Tensor]]:
    base, experts = random(24, 40, seed=4)
    return base, [experts[0]] * 3


def bfloat16() -> tuple[Tensor, list[Tensor]]:
    base, experts = random(24, 40, seed=5)
    return base.bfloat16(), [expert.bfloat16() for expert in experts]


TENSORS: dict[str, Callable[[], tuple[Tensor, list[Tensor]]]] = {
    "random": lambda: random(24, 40),
    "vector": lambda: random(97),
    "large changes": lambda: random(16, 33, seed=6, scale=3.0),
    "low rank": low_rank,
    "sparse": sparse,
    "one unchanged": unchanged,
    "identical": same,
    "bfloat16": bfloat16,
}

W, D, G = (0.2, 0.5, 0.4), (0.3, 0.5, 0.7), (0.05, 0.1, 0.0)
PAIR = (0.3, 0.9)

# Ours, its coefficients, mergekit's name, its parameters, whether mergekit is given the base, how many experts.
CASES: list[tuple[str, Coefficients, str, Mapping[str, Any], bool, int]] = [
    ("passthrough", {}, "passthrough", {}, False, 1),
    ("passthrough", {"scale": 0.7}, "passthrough", {"scale": 0.7}, False, 1),
    ("linear", {"weight": W}, "linear", {"weight": W}, False, 3),
    ("task_arithmetic", {"lambda": W}, "task_arithmetic", {"weight": W}, True, 3),
    ("task_arithmetic", {"lambda": 0.35}, "task_arithmetic", {"weight": 0.7, "lambda": 0.5}, True, 3),
    ("nuslerp", {"weight": PAIR}, "nuslerp", {"weight": PAIR}, False, 2),
    ("nuslerp", {"weight": (0.5, -0.5)}, "nuslerp", {"weight": (0.5, -0.5)}, False, 2),
    ("nuslerp_task_vectors", {"weight": PAIR}, "nuslerp", {"weight": PAIR}, True, 2),
    ("nuslerp_rows", {"weight": PAIR}, "nuslerp", {"weight": PAIR, "nuslerp_flatten": False}, False, 2),
    (
        "nuslerp_columns", {"weight": PAIR}, "nuslerp",
        {"weight": PAIR, "nuslerp_flatten": False, "nuslerp_row_wise": True}, False, 2,
    ),
    ("multislerp", {"weight": W}, "multislerp", {"weight": W}, False, 3),
    ("multislerp_task_vectors", {"weight": W}, "multislerp", {"weight": W}, True, 3),
    ("multislerp", {"weight": W, "eps": 0.01}, "multislerp", {"weight": W, "eps": 0.01}, False, 3),
    ("multislerp_unscaled", {"weight": W}, "multislerp", {"weight": W, "normalize_weights": False}, False, 3),
    (
        "multislerp_unscaled_task_vectors", {"weight": W}, "multislerp",
        {"weight": W, "normalize_weights": False}, True, 3,
    ),
    ("weighted_sum", {"weight": W}, "linear", {"weight": W, "normalize": False}, False, 3),
    ("weighted_sum", {"weight": (0.5, -0.5)}, "linear", {"weight": (0.5, -0.5), "normalize": False}, False, 2),
    (
        "nuslerp_rows_task_vectors", {"weight": PAIR}, "nuslerp",
        {"weight": PAIR, "nuslerp_flatten": False}, True, 2,
    ),
    (
        "nuslerp_columns_task_vectors", {"weight": PAIR}, "nuslerp",
        {"weight": PAIR, "nuslerp_flatten": False, "nuslerp_row_wise": True}, True, 2,
    ),
    ("karcher", {}, "karcher", {}, False, 3),
    ("karcher", {"max_iter": 1000, "tol": 1e-9}, "karcher", {"max_iter": 1000, "tol": 1e-9}, False, 3),
    ("karcher", {"max_iter": 1, "tol": 0.01}, "karcher", {"max_iter": 1, "tol": 0.01}, False, 3),
    ("karcher", {"max_iter": 0}, "karcher", {"max_iter": 0}, False, 3),
    ("model_stock", {}, "model_stock", {}, True, 3),
    ("model_stock", {}, "model_stock", {}, True, 2),
    ("model_stock_rows", {}, "model_stock", {"filter_wise": True}, True, 3),
    ("ties_weighted", {"weight": W, "density": D}, "ties", {"weight": W, "density": D}, True, 3),
    (
        "ties_weighted", {"weight": W, "density": 0.25, "lambda": 0.7, "normalize": 0}, "ties",
        {"weight": W, "density": 0.25, "lambda": 0.7, "normalize": False}, True, 3,
    ),
    ("ties_weighted", {"weight": W, "density": 1.0}, "ties", {"weight": W}, True, 3),
    (
        "ties_weighted_l1", {"weight": W, "density": D}, "ties",
        {"weight": W, "density": D, "rescale": True}, True, 3,
    ),
    (
        "breadcrumbs_l1", {"lambda": W, "density": 0.5, "gamma": 0.25}, "breadcrumbs",
        {"weight": W, "density": 0.5, "gamma": 0.25, "rescale": True}, True, 3,
    ),
    (
        "breadcrumbs_ties_l1", {"weight": W, "density": D, "gamma": G, "lambda": 0.8}, "breadcrumbs_ties",
        {"weight": W, "density": D, "gamma": G, "lambda": 0.8, "rescale": True}, True, 3,
    ),
    (
        "breadcrumbs", {"lambda": W, "density": 0.9, "gamma": 0.25}, "breadcrumbs",
        {"weight": W, "density": 0.9, "gamma": 0.25}, True, 3,
    ),
    (
        "breadcrumbs", {"lambda": W, "density": 0.5, "gamma": 0.25}, "breadcrumbs",
        {"weight": W, "density": 0.5, "gamma": 0.25}, True, 3,
    ),
    (
        "breadcrumbs_ties", {"weight": W, "density": D, "gamma": G, "lambda": 0.8}, "breadcrumbs_ties",
        {"weight": W, "density": D, "gamma": G, "lambda": 0.8}, True, 3,
    ),
    ("sce", {"select_topk": 1.0}, "sce", {"select_topk": 1.0}, True, 3),
    ("sce", {"select_topk": 0.25}, "sce", {"select_topk": 0.25}, True, 3),
    ("sce_mergekit", {"select_topk": 1.0}, "sce", {"select_topk": 1.0}, True, 3),
    ("sce_mergekit", {"select_topk": 0.25}, "sce", {"select_topk": 0.25}, True, 3),
    ("ram", {}, "ram", {}, True, 3),
    ("ram", {"epsilon": 0.03}, "ram", {"epsilon": 0.03}, True, 3),
    ("ramplus_tl", {}, "ramplus_tl", {}, True, 3),
    (
        "ramplus_tl", {"epsilon": 0.05, "r": 0.5, "alpha": 4.0}, "ramplus_tl",
        {"epsilon": 0.05, "r": 0.5, "alpha": 4.0}, True, 3,
    ),
    ("dare_linear_l1", {"lambda": W, "density": D}, "dare_linear", {"weight": W, "density": D}, True, 3),
    (
        "dare_ties_l1", {"weight": W, "density": D, "lambda": 0.6}, "dare_ties",
        {"weight": W, "density": D, "lambda": 0.6}, True, 3,
    ),
    (
        "dare_ties_l1", {"weight": W, "density": 0.4, "normalize": 1}, "dare_ties",
        {"weight": W, "density": 0.4, "normalize": True}, True, 3,
    ),
    ("dare_linear_l1", {"lambda": W, "density": 1.0}, "task_arithmetic", {"weight": W}, True, 3),
    (
        "dare_linear_l1", {"lambda": W, "density": D, "rescale": 0}, "dare_linear",
        {"weight": W, "density": D, "rescale": False}, True, 3,
    ),
    (
        "dare_ties_l1", {"weight": W, "density": D, "rescale": 0}, "dare_ties",
        {"weight": W, "density": D, "rescale": False}, True, 3,
    ),
    (
        "della_l1", {"weight": W, "density": D, "epsilon": 0.15, "rescale": 0}, "della",
        {"weight": W, "density": D, "epsilon": 0.15, "rescale": False}, True, 3,
    ),
    (
        "della_linear_l1", {"lambda": W, "density": 0.5, "epsilon": 0.2, "rescale": 0}, "della_linear",
        {"weight": W, "density": 0.5, "epsilon": 0.2, "rescale": False}, True, 3,
    ),
    (
        "della_l1", {"weight": W, "density": D, "epsilon": 0.15}, "della",
        {"weight": W, "density": D, "epsilon": 0.15}, True, 3,
    ),
    (
        "della_linear_l1", {"lambda": W, "density": 0.5, "epsilon": 0.2}, "della_linear",
        {"weight": W, "density": 0.5, "epsilon": 0.2}, True, 3,
    ),
]  # fmt: skip

# Of elements of equal magnitude these keep or rank others than mergekit, as many of them: tested below.
CUTTING = {
    *("ties_weighted", "ties_weighted_l1", "breadcrumbs", "breadcrumbs_l1", "breadcrumbs_ties", "breadcrumbs_ties_l1"),
    *("sce", "sce_mergekit", "della_l1", "della_linear_l1"),
}


@pytest.mark.parametrize(
    ("name", "coefficients", "peer", "parameters", "has_base", "count", "kind"),
    [(*case, kind) for case in CASES for kind in TENSORS if kind != "bfloat16" or case[0] not in CUTTING],
)
def test_mergekit_gives_the_same(
    our_masks: None,
    name: str,
    coefficients: Coefficients,
    peer: str,
    parameters: Mapping[str, Any],
    has_base: bool,
    count: int,
    kind: str,
) -> None:
    base, experts = TENSORS[kind]()
    mine = ours(name, base if METHODS[name].needs_base else None, experts[:count], coefficients)
    other = theirs(peer, base if has_base else None, experts[:count], parameters)
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6 * max(1.0, float(other.abs().max())))


PAIRS: list[tuple[str, Coefficients]] = [
    ("slerp", {"t": 0.3}),
    ("slerp", {"t": 1.0}),
    ("slerp", {"t": -0.5}),
    ("nearswap", {"t": 0.01}),
    ("nearswap", {"t": 0.0}),
    ("arcee_fusion", {}),
]


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize(("name", "coefficients"), PAIRS)
def test_parity_of_pairs_with_a_base(name: str, coefficients: Coefficients, kind: str) -> None:
    """Mergekit gives the same for pairs whose first model it calls the base."""
    _, experts = TENSORS[kind]()
    mine = ours(name, None, experts[:2], coefficients)
    torch.testing.assert_close(mine, theirs(name, experts[0], experts[1:2], coefficients), rtol=1e-6, atol=1e-6)


def test_from_bfloat16_both_compute_in_float32_and_round_once() -> None:
    base, experts = bfloat16()
    for name, peer, coefficients, parameters in (
        ("task_arithmetic", "task_arithmetic", {"lambda": W}, {"weight": W}),
        ("multislerp_task_vectors", "multislerp", {"weight": W}, {"weight": W}),
        ("model_stock", "model_stock", {}, {}),
        ("ram", "ram", {}, {}),
    ):
        mine = ours(name, base, experts, coefficients).bfloat16()
        other = theirs(peer, base, experts, parameters).bfloat16()
        assert (mine != other).float().mean() < 0.005
        torch.testing.assert_close(mine, other, rtol=2**-7, atol=0)


def test_ties_of_peft_is_the_same() -> None:
    from peft.utils.merge_utils import ties

    for kind in set(TENSORS) - {"bfloat16"}:
        base, experts = TENSORS[kind]()
        expected = base + ties([expert - base for expert in experts], tensor(W), density=0.25)
        mine = ours("ties_peft", base, experts, {"weight": W, "density": 0.25})
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


# Deviations.


def test_deviation_linear_refuses_weights_that_sum_to_zero() -> None:
    _, experts = random(4, 4)
    with pytest.raises(InvalidRecipe, match=r"weights .* sum to zero; they must not"):
        ours("linear", None, experts[:2], {"weight": (0.5, -0.5)})
    assert not theirs("linear", None, experts[:2], {"weight": (0.5, -0.5)}).isfinite().all()


def finetuned(count: int) -> tuple[Tensor, list[Tensor]]:
    """A base and experts in bfloat16, with changes of a hundredth of the weights: few distinct magnitudes."""
    generator = torch.Generator().manual_seed(7)
    base = 0.02 * torch.randn(200, 250, generator=generator)
    experts = [base + 2e-4 * torch.randn(200, 250, generator=generator) for _ in range(count)]
    return base.bfloat16(), [expert.bfloat16() for expert in experts]


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5])
def test_parity_of_equal_magnitudes(density: float) -> None:
    """Both keep the stated share, and differ only in elements of equal magnitude."""
    base, experts = finetuned(3)
    taus = [expert.float() - base.float() for expert in experts]
    for expert, tau in zip(experts, taus, strict=True):
        results = (
            ours("ties_weighted", base, [expert], {"weight": 1.0, "density": density}),
            theirs("ties", base, [expert], {"weight": (1.0,), "density": density}),
        )
        kept = min(round(density * tau.numel()), int(torch.count_nonzero(tau)))
        assert [int((result != base.float()).sum()) for result in results] == [kept, kept]
    cuts = [tau.abs().flatten().sort(descending=True).values[round(density * tau.numel()) - 1] for tau in taus]
    is_tied = torch.stack([tau.abs() == cut for tau, cut in zip(taus, cuts, strict=True)])
    assert float(is_tied.float().mean()) > 0.001, "equal magnitudes are the rule"
    mine = ours("ties_weighted", base, experts, {"weight": W, "density": density})
    other = theirs("ties", base, experts, {"weight": W, "density": density})
    differs = ~torch.isclose(mine, other, rtol=1e-6, atol=1e-6)
    assert differs.any()
    assert not (differs & ~is_tied.any(dim=0)).any()


def test_deviation_the_number_kept_is_exact() -> None:
    base, expert = torch.zeros(100), torch.arange(1.0, 101.0)
    assert int((ours("ties_weighted", base, [expert], {"weight": 1.0, "density": 0.29}) != 0).sum()) == 29
    # 0.29 * 100 is 28.999999999999996 in binary.
    assert int((theirs("ties", base, [expert], {"weight": (1.0,), "density": 0.29}) != 0).sum()) == 28


def test_deviation_ties_of_the_paper() -> None:
    """TIES of the paper keeps nothing where signs cancel."""
    base = torch.zeros(2)
    experts = [tensor([1.0, 3.0]), tensor([-1.0, 1.0])]
    assert ours("ties", base, experts, {"lambda": 1.0, "k": 1.0}).tolist() == [0.0, 2.0]
    assert ours("ties_weighted", base, experts, {"weight": 1.0, "density": 1.0}).tolist() == [1.0, 2.0]
    assert theirs("ties", base, experts, {"weight": (1.0, 1.0)}).tolist() == [1.0, 2.0]


def test_deviation_breadcrumbs() -> None:
    """Breadcrumbs without outliers to cut keeps its share."""
    base, experts = random(10)
    for gamma in (0.0, 0.01):  # floor(0.01 * 10) = 0: nothing is cut off the top
        mine = ours("breadcrumbs", base, experts[:1], {"lambda": 1.0, "density": 0.4, "gamma": gamma})
        assert int((mine != base).sum()) == 4
        other = theirs("breadcrumbs", base, experts[:1], {"weight": (1.0,), "density": 0.4, "gamma": gamma})
        torch.testing.assert_close(mine, other)


def test_deviation_masks() -> None:
    """Masks depend on seed, model and name, and not on earlier draws."""
    base, experts = random(32, 32)
    coefficients = {"lambda": 1.0, "density": 0.5}
    once = ours("dare_linear_l1", base, experts[:1], coefficients)
    assert torch.equal(ours("dare_linear_l1", base, experts[:1], coefficients), once)
    parameters = {"weight": (1.0,), "density": 0.5}
    other = theirs("dare_linear", base, experts[:1], parameters)
    assert not torch.equal(theirs("dare_linear", base, experts[:1], parameters), other)


def test_deviation_dare_of_the_paper_rescales_by_the_density() -> None:
    base = torch.zeros(4000)
    expert = torch.ones(4000)
    mine = ours("dare_linear", base, [expert], {"lambda": 1.0, "density": 0.25})
    assert set(mine.tolist()) == {0.0, 4.0}
    matched = ours("dare_linear_l1", base, [expert], {"lambda": 1.0, "density": 0.25})
    assert float(matched.sum()) == pytest.approx(4000)
    assert float(mine.sum()) != pytest.approx(4000, abs=1)


def test_deviation_della_merges_rows_of_one_element(our_masks: None) -> None:
    base, experts = random(50, 1)
    coefficients = {"lambda": 1.0, "density": 0.5, "epsilon": 0.1}
    kept = ours("della_linear_l1", base, experts[:1], coefficients) != base
    assert 10 < int(kept.sum()) < 40
    other = theirs("della_linear", base, experts[:1], {"weight": (1.0,), "density": 0.5, "epsilon": 0.1})
    assert int((other != base).sum()) in (0, 50) or not other.isfinite().all()


def test_deviation_sce() -> None:
    """SCE weighs small task vectors by their squares too."""
    base = torch.zeros(4)
    experts = [tensor([3e-4, 3e-4, 3e-4, 3e-4]), tensor([1e-4, 1e-4, 1e-4, 1e-4])]
    # Weights 0.9 and 0.1, equal in mergekit, where the mean squares sum to 1e-7.
    assert ours("sce", base, experts, {"select_topk": 1.0}).tolist() == pytest.approx([2.8e-4] * 4)
    assert theirs("sce", base, experts, {"select_topk": 1.0}).tolist() == pytest.approx([2e-4] * 4)
    assert ours("sce_mergekit", base, experts, {"select_topk": 1.0}).tolist() == pytest.approx([2e-4] * 4)


def test_deviation_sce_keeps_nothing_where_signs_cancel() -> None:
    base = torch.zeros(2)
    experts = [tensor([1.0, 1.0]), tensor([-1.0, 1.0])]
    assert ours("sce", base, experts, {"select_topk": 1.0}).tolist() == [0.0, 1.0]
    assert theirs("sce", base, experts, {"select_topk": 1.0}).tolist() == [1.0, 1.0]
    assert ours("sce_mergekit", base, experts, {"select_topk": 1.0}).tolist() == [1.0, 1.0]


def test_deviation_model_stock() -> None:
    """Model Stock uses the angle of short task vectors too."""
    base = torch.zeros(2)
    experts = [tensor([4e-4, 0.0]), tensor([4e-4, 0.0])]
    assert ours("model_stock", base, experts, {}).tolist() == pytest.approx([4e-4, 0.0])
    assert float(theirs("model_stock", base, experts, {})[0]) < 2e-4


def test_deviation_multislerp_of_zero_task_vectors_is_the_base() -> None:
    base, _ = random(4, 4)
    assert torch.equal(ours("multislerp_task_vectors", base, [base] * 3, {"weight": 1.0}), base)
    with pytest.raises(ValueError, match="weighted sum of the input tensors is zero"):
        theirs("multislerp", base, [base] * 3, {"weight": (1.0, 1.0, 1.0)})


def test_deviation_nuslerp() -> None:
    """NuSLERP interpolates linearly between opposite tensors."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(4096, generator=generator)
    second = -first * (1 + 1e-6)
    torch.testing.assert_close(ours("nuslerp", None, [first, second], {"weight": 1.0}), (first + second) / 2)


def test_deviation_karcher() -> None:
    """The Karcher mean leaves opposite directions out of its step."""
    first = tensor([1.0, 0.0, 0.0])
    merged = ours("karcher", None, [first, -first], {})
    assert merged.tolist() == [1.0, 0.0, 0.0]


def test_deviation_arcee_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arcee Fusion uses quartiles of the whole tensor."""
    import mergekit.merge_methods.arcee_fusion as peer

    _, experts = random(40, 50)
    whole = ours("arcee_fusion", None, experts[:2], {})
    torch.testing.assert_close(whole, theirs("arcee_fusion", experts[0], experts[1:2], {}))
    monkeypatch.setattr(peer, "_QUANTILE_SAMPLE_SIZE", 100)  # a million, of tensors larger than that
    assert not torch.equal(whole, theirs("arcee_fusion", experts[0], experts[1:2], {}))


def test_every_method_with_a_counterpart_is_compared() -> None:
    pairs = {name for name, _ in PAIRS}
    compared = {case[0] for case in CASES} - {"sce"}  # where it does not deviate it is equal too
    assert {name for name, method in METHODS.items() if method.mergekit} == compared | pairs
