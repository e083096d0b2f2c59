"""Trimming of whole models, compared with a plain implementation that joins all tensors of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Merge, Recipe, Source
from service.merges.merge import merge_file
from workers.engines.transformers.merged_models import merged_model
from workers.merging import order_statistics, whole_models
from workers.merging.bank import Bank
from workers.merging.masks import keep, mask_key
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.methods.arithmetic import num_kept
from workers.merging.methods.sparsify import cut_ranks
from workers.merging.order_statistics import TieOrder, Trim
from workers.merging.plan import check_recipe, computations, plan_as_stated
from workers.merging.whole_models import ModelTensor, WholeTaskVector
from workers.training.reduction import derivatives
from workers.types import Family

Tensors = Mapping[str, torch.Tensor]
SEED = 3


@pytest.fixture(scope="module")
def untied(untied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(untied_family, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tied(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(tied_family, cache=tmp_path_factory.mktemp("cache"))


def recipe(bank: Bank, method: str, seed: int | None = None, **coefficients: Any) -> Recipe:
    names = {"lambda_": "lambda"}
    numbers = {names.get(name, name): value for name, value in coefficients.items()}
    merge = Merge(method, (Source("math"), Source("text")), numbers, seed)
    layers = bank.base.layout.num_layers
    uniform = Recipe.uniform(merge, models=bank.family.fingerprints, base="base", num_layers=layers)
    return replace(uniform, trim="model")


def task_vector(bank: Bank, alias: str, density: float | None) -> dict[str, torch.Tensor]:
    found = {}
    for name in sorted(bank.base.layout.places):
        tau = bank.get(alias, name).float() - bank.get("base", name).float()
        if density is not None:
            mask = keep(mask_key(SEED, bank.family.fingerprints[alias], name), tau.shape, density)
            tau = torch.where(mask, tau * torch.tensor(1 / density), torch.zeros(()))
        found[name] = tau
    return found


def ranks_of(bank: Bank, alias: str, taus: Tensors) -> dict[str, torch.Tensor]:
    """The rank of each element's magnitude among all elements of the model, from 1, the largest.

    Elements of equal magnitude are ordered by their marks, then by the names of their tensors.
    """
    sizes = torch.cat([tau.abs().flatten() for tau in taus.values()])
    orders = [bank.order((alias, name)) for name in taus]
    marks = torch.cat(
        [order.marks_at(torch.arange(tau.numel())) for order, tau in zip(orders, taus.values(), strict=True)]
    )
    by_mark = marks.sort(stable=True).indices
    ascending = by_mark[sizes[by_mark].sort(stable=True).indices]
    ranks = torch.empty_like(ascending)
    ranks[ascending] = torch.arange(len(ascending), 0, -1)
    parts = ranks.split([tau.numel() for tau in taus.values()])
    return {name: part.view(taus[name].shape) for name, part in zip(taus, parts, strict=True)}


def trimmed(
    bank: Bank, share: float, density: float | None = None, gamma: float = 0.0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trimmed task vectors of both experts: a share of each model's elements is kept, the others are 0."""
    found = []
    for alias in ("math", "text"):
        taus = task_vector(bank, alias, density)
        count = sum(tau.numel() for tau in taus.values())
        largest, smallest = 1, num_kept(share, count)
        if gamma:
            cut = cut_ranks(share, gamma, count)
            assert cut is not None
            largest, smallest = cut.largest, cut.smallest
        ranks = ranks_of(bank, alias, taus)
        kept = {name: (ranks[name] >= largest) & (ranks[name] <= smallest) for name in taus}
        assert sum(int(mask.sum()) for mask in kept.values()) == smallest - largest + 1
        found.append({name: tau.masked_fill(~kept[name], 0) for name, tau in taus.items()})
    return found[0], found[1]


def merged(bank: Bank, of: Recipe, *, compiles: bool = True) -> dict[str, torch.Tensor]:
    return dict(merged_tensors(of, bank, torch.float32, compiles=compiles))


def check(bank: Bank, found: Tensors, expected: Tensors) -> None:
    for name, delta in expected.items():
        base = bank.get("base", name).float()
        torch.testing.assert_close(found[name], base + delta, rtol=0, atol=2e-7, msg=name)


def mean(taus: Sequence[torch.Tensor], majority: float = 0.0, weights: Sequence[float] = (0.5, 0.5)) -> torch.Tensor:
    elected = (taus[0] + taus[1]).sign()
    elected = torch.where(elected == 0, torch.tensor(majority), elected)
    agrees = [tau * elected > 0 for tau in taus]
    both = taus[0] * weights[0] + taus[1] * weights[1]
    alone = torch.where(agrees[0], taus[0], torch.where(agrees[1], taus[1], 0.0))
    return torch.where(agrees[0] & agrees[1], both, alone)


@pytest.mark.parametrize("k", [0.002, 0.5])
@pytest.mark.parametrize("compiles", [True, False])
def test_ties_keeps_a_share_of_the_whole_task_vector(untied: Bank, k: float, compiles: bool) -> None:
    of = recipe(untied, "ties", k=k, lambda_=0.7)
    math, text = trimmed(untied, k)
    expected = {name: mean((math[name], text[name])) * 0.7 for name in math}
    found = merged(untied, of, compiles=compiles)
    check(untied, found, expected)
    # Tensors keep different shares.
    per_tensor = merged(untied, replace(of, trim="tensor"), compiles=compiles)
    assert any(not torch.equal(found[name], per_tensor[name]) for name in found)
    shares = [float((tau != 0).float().mean()) for tau in math.values()]
    assert max(shares) - min(shares) > k / 100


def test_few_equal_magnitudes_are_trimmed_exactly(tied: Bank) -> None:
    for k in (0.013, 0.6):
        math, text = trimmed(tied, k)
        found = merged(tied, recipe(tied, "ties", k=k, lambda_=1.0))
        check(tied, found, {name: mean((math[name], text[name])) for name in math})


def test_breadcrumbs_cut_both_ends_of_the_whole_task_vector(untied: Bank) -> None:
    math, text = trimmed(untied, 0.3, gamma=0.02)
    found = merged(untied, recipe(untied, "breadcrumbs", density=0.3, gamma=0.02, lambda_=(0.4, 0.3)))
    check(untied, found, {name: math[name] * 0.4 + text[name] * 0.3 for name in math})


@pytest.mark.parametrize(("method", "density"), [("m3_ties_majority", None), ("m3_dare_ties", 0.8)])
def test_m3_of_its_authors_trims_and_elects_over_the_whole_model(
    untied: Bank, method: str, density: float | None
) -> None:
    """The published code's TIES, with and without DARE: one threshold, one majority sign, shares w and 1 - w."""
    math, text = trimmed(untied, 0.5, density)
    balance = sum(int((math[name] + text[name]).sign().sum()) for name in math)
    sign = float((balance > 0) - (balance < 0))
    assert sign
    weights = (0.2, 0.8)
    expected = {name: mean((math[name], text[name]), sign, weights) * 1.5 for name in math}
    coefficients: dict[str, Any] = {"weight": weights, "lambda": 1.5, "k": 0.5}
    if density is not None:
        coefficients["density"] = density
    of = recipe(untied, method, None if density is None else SEED, **coefficients)
    found = merged(untied, of)
    check(untied, found, expected)
    plain = merged(Bank(untied.family), of, compiles=False)
    assert all(torch.equal(plain[name], tensor) for name, tensor in found.items())
    # An element that cancels has the majority sign of the model, also in tensors whose own majority is the other.
    others = [name for name in math if float((math[name] + text[name]).sign().sum()) * sign < 0]
    assert others


def test_merges_in_place_and_alone_are_those_of_the_stream(untied: Bank, untied_family: Family) -> None:
    of = recipe(untied, "m3_ties", weight=(0.3, 0.7), k=0.5, lambda_=1.0)
    found = merged(untied, of)
    destinations = {name: torch.empty_like(tensor) for name, tensor in found.items()}
    merge_into(of, untied, destinations)
    alone = merged(Bank(untied_family, keeps_statistics=False), of)
    assert all(torch.equal(found[name], destinations[name]) for name in found)
    assert all(torch.equal(found[name], alone[name]) for name in found)
    some = "model.layers.1.mlp.down_proj.weight"
    (only,) = merged_tensors(of, Bank(untied_family), torch.float32, names={some})
    assert torch.equal(only[1], found[some])
    assert computations(of, untied)[some] != computations(replace(of, trim="tensor"), untied)[some]


def test_a_threshold_is_found_once(untied_family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, searched = Bank(untied_family), list[int]()
    monkeypatch.setattr(
        whole_models, "selected", lambda *args, **options: searched.append(args[1]) or order_statistics.selected(*args)
    )
    for lambda_ in (0.3, 0.7):
        merged(bank, recipe(bank, "ties", k=0.5, lambda_=lambda_))
    assert len(searched) == 2  # of two experts
    assert bank.summary()["statistics_bytes"] == 2 * 8 * 2**16
    merged(bank, recipe(bank, "ties", k=0.7, lambda_=0.3))
    assert len(searched) == 4


def test_an_export_has_the_bits_of_the_engine(untied: Bank, untied_family: Family, tmp_path: Path) -> None:
    """A single merge from its recipe.json, by plain torch, has the bits of the kernels; mergekit cannot express it."""
    of = recipe(untied, "m3_ties_majority", weight=(0.3, 0.7), k=0.5, lambda_=1.0)
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(of.canonical().to_json()))
    directories = {model.alias: Path(model.directory) for model in untied_family.models}
    out = merge_file(file, directories, tmp_path / "out")
    assert not (out / "mergekit_config.yml").exists()
    card = (out / "README.md").read_text()
    assert "Shares of task vectors are kept of the whole model." in card
    assert "kept of the whole model; mergekit keeps those of each tensor" in card
    stored = {name: tensor for part in out.glob("*.safetensors") for name, tensor in load_file(part).items()}
    for name, tensor in merged_tensors(of, untied, torch.bfloat16):
        assert torch.equal(stored[name], tensor), name
    verified = merged_model(of, untied, dtype="bfloat16").state_dict()
    assert all(torch.equal(verified[name], tensor.float()) for name, tensor in stored.items())


def test_gradients_are_those_of_the_trimmed_merge(untied: Bank) -> None:
    """The merge is linear in the weights of ties_peft, so a difference is its derivative."""

    def at(first: float) -> Recipe:
        return recipe(untied, "ties_peft", weight=(first, 0.4), density=0.2)

    plan = plan_as_stated(at(0.5), untied)
    tensor = next(each for each in plan.tensors if each.name == "model.layers.2.mlp.down_proj.weight")
    gradient = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    low, high = (merged(untied, at(first))[tensor.name] for first in (0.0, 1.0))
    found = derivatives(tensor, plan, untied, gradient)["weight"][0]
    assert float(found) == pytest.approx(float((gradient * (high - low)).sum()), rel=1e-4)
    of_tensors = derivatives(tensor, plan_as_stated(replace(at(0.5), trim="tensor"), untied), untied, gradient)
    assert float(of_tensors["weight"][0]) != pytest.approx(float(found), rel=1e-3)


@pytest.mark.parametrize("few", [1, 1 << 20])
def test_equal_magnitudes_and_marks_are_ordered_by_tensor(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the number of elements is kept, even where elements of several tensors have equal words."""
    monkeypatch.setattr(order_statistics, "FEW", few)
    monkeypatch.setattr(whole_models, "CHUNK", 7)
    order = TieOrder(5)
    tensors = {name: ModelTensor(torch.full((20,), 0.5), torch.zeros(20), order) for name in "abc"}
    tensors["b"] = tensors["b"]._replace(source=torch.linspace(0.1, 0.9, 20))
    for compiles in (True, False):
        whole = WholeTaskVector(list("abc"), 60, tensors.__getitem__, compiles=compiles)
        for rank in range(1, 61):
            known = {name: whole.of_tensor(name, order, [rank]) for name in "abc"}
            kept = {name: known[name].trim(rank).high.reached_by(tensors[name].source, order) for name in "abc"}
            assert sum(int(mask.sum()) for mask in kept.values()) == rank
            assert isinstance(known["a"].trim(rank), Trim)


def test_a_layer_of_another_number_is_refused(untied: Bank) -> None:
    of = recipe(untied, "ties", k=0.5, lambda_=0.7)
    moved = Merge("ties", (Source("math", 1),), {"k": 0.5, "lambda": 1.0}, base=Source("base", 2))
    layers = (replace(of.layers[0], mlp=moved), *of.layers[1:])
    with pytest.raises(InvalidRecipe, match="layer 0, mlp: trim is model, so ties subtracts each layer"):
        check_recipe(replace(of, layers=layers), untied)
