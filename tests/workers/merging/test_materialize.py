from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from tests.benchmarks import bench_memory, merge_family
from tests.builders import opposed_family
from tests.workers.merging.methods.examples import EXAMPLES
from tests.workers.recipes import arithmetic, model_stock, num_layers, slerp
from workers.errors import InvalidModel
from workers.merging import materialize
from workers.merging.bank import Bank
from workers.merging.kernels import FUSED
from workers.merging.masks import keep, mask_key
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.methods.averages import linear
from workers.merging.methods.plain import PLAIN
from workers.merging.methods.task_vectors import task_arithmetic, ties
from workers.merging.plan import computations, merged_names
from workers.types import Family

Make = Callable[[int | None], Merge]


def recipe_of(family: Family, make: Make, **parts: Make) -> Recipe:
    """A recipe with one merge everywhere, except in the named parts: attention, mlp, norm, embedding, head."""

    def part(name: str, layer: int | None) -> Merge:
        return parts.get(name, make)(layer)

    layers = tuple(
        LayerRecipe(part("attention", i), part("mlp", i), part("norm", i)) for i in range(num_layers(family))
    )
    return Recipe(family.fingerprints, "base", layers, part("embedding", None), part("head", None))


def passthrough(alias: str) -> Make:
    return lambda layer: Merge("passthrough", (Source(alias, layer),))


def sources(layer: int | None) -> tuple[Source, ...]:
    return Source("math", layer), Source("text", layer)


@pytest.fixture(scope="module")
def untied(untied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(untied_family, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tied(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(tied_family, cache=tmp_path_factory.mktemp("cache"))


def test_passthrough_is_the_model_bit_for_bit(untied: Bank, tied: Bank) -> None:
    for bank, dtype in ((untied, torch.bfloat16), (tied, torch.float32)):
        merged = dict(merged_tensors(recipe_of(bank.family, passthrough("text")), bank, dtype))
        assert set(merged) == set(bank.base.tensors)
        assert all(torch.equal(tensor, bank.get("text", name)) for name, tensor in merged.items())


def test_tensors_come_embedding_first_layer_by_layer_head_last(untied: Bank) -> None:
    names = list(merged_names(arithmetic(untied.family, 0.3, 0.3), untied))
    assert names[0] == "model.embed_tokens.weight"
    assert set(names[-2:]) == {"model.norm.weight", "lm_head.weight"}
    layers = [int(name.split(".")[2]) for name in names[1:-2]]
    assert layers == sorted(layers)
    assert max(layers) == 4


def test_format_1_keeps_all_at_the_cut(untied: Bank) -> None:
    """Recipes of format 1 keep all elements of the magnitude at the cut.

    Those of format 2 keep the stated share exactly.
    """
    name = "model.layers.1.mlp.down_proj.weight"
    sizes = (untied.get("math", name).float() - untied.get("base", name).float()).abs()
    ordered = sizes.flatten().sort(descending=True).values
    rank = int((ordered[1:] == ordered[:-1]).nonzero()[0]) + 1  # the next element has the same magnitude
    k = math.ceil(rank / sizes.numel() * 1e6) / 1e6

    def kept(recipe: Recipe) -> torch.Tensor:
        merged = dict(merged_tensors(recipe, untied, torch.float32, names={name}))[name]
        return merged != untied.get("base", name).float()

    def trimmed(layer: int | None) -> Merge:
        return Merge("ties", (Source("math", layer),), {"lambda": 1.0, "k": k})

    now = recipe_of(untied.family, trimmed)
    old = Recipe.from_json(now.to_json() | {"format": "mergesearch-recipe/1"})
    assert int(kept(now).sum()) == rank
    assert torch.equal(kept(old), sizes >= ordered[rank - 1])
    assert int(kept(old).sum()) > rank
    assert computations(old, untied)[name] != computations(now, untied)[name]


def test_kept_elements_depend_on_content(untied: Bank) -> None:
    """The kept elements of equal magnitude depend on content, not on aliases or partners."""
    name = "model.layers.1.mlp.down_proj.weight"
    order = untied.order(("math", name))
    assert order == untied.order(("math", name)) != untied.order(("text", name))
    assert order != untied.order(("math", "model.layers.2.mlp.down_proj.weight"))
    assert order.key == mask_key(-1, untied.family.fingerprints["math"], name)


def test_names_and_shapes_are_known_before_the_tensors(tied: Bank) -> None:
    recipe = slerp(tied.family, 0.4)
    merged = dict(merged_tensors(recipe, tied, torch.float32))
    assert merged_names(recipe, tied) == {name: tuple(tensor.shape) for name, tensor in merged.items()}
    assert list(merged_names(recipe, tied)) == list(merged)


def test_a_tied_head_is_not_emitted(tied: Bank) -> None:
    assert "lm_head.weight" not in merged_names(arithmetic(tied.family, 0.5, 0.5), tied)


def test_each_component_is_merged_by_its_own_merge(tied: Bank) -> None:
    recipe = recipe_of(
        tied.family,
        passthrough("base"),
        attention=lambda layer: Merge("linear", sources(layer), {"weight": (0.25, 0.75)}),
        mlp=lambda layer: Merge("ties", sources(layer), {"lambda": 0.7, "k": 0.3}),
        norm=lambda layer: Merge("task_arithmetic", sources(layer), {"lambda": (0.1, 0.9)}),
        embedding=passthrough("math"),
        head=passthrough("text"),
    )
    merged = dict(merged_tensors(recipe, tied, torch.float32))

    # The canonical recipe orders sources by content: for linear and the like, the order is in the last bits.
    order = sorted(("math", "text"), key=tied.family.fingerprints.__getitem__)
    share = {"linear": {"math": 0.25, "text": 0.75}, "task": {"math": 0.1, "text": 0.9}}

    def operands(name: str) -> list[torch.Tensor]:
        return [tied.get(alias, name) for alias in order]

    bias = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(merged[bias], linear(operands(bias), [share["linear"][alias] for alias in order]))
    weight = "model.layers.2.mlp.down_proj.weight"
    orders = [tied.order((alias, weight)) for alias in order]
    assert torch.equal(
        merged[weight], ties(operands(weight), tied.get("base", weight), lambda_=0.7, k=0.3, orders=orders)
    )
    norm = "model.layers.0.post_attention_layernorm.weight"
    expected = task_arithmetic(operands(norm), tied.get("base", norm), [share["task"][alias] for alias in order])
    assert torch.equal(merged[norm], expected)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(merged[embedding], tied.get("math", embedding))
    assert torch.equal(merged["model.norm.weight"], tied.get("text", "model.norm.weight"))


def test_merging_is_in_float32_and_rounds_once(untied: Bank) -> None:
    recipe = arithmetic(untied.family, 0.37, 0.21)
    fine = dict(merged_tensors(recipe, untied, torch.float32))
    coarse = dict(merged_tensors(recipe, untied, torch.bfloat16))
    assert all(tensor.dtype == torch.float32 for tensor in fine.values())
    assert all(torch.equal(coarse[name], tensor.to(torch.bfloat16)) for name, tensor in fine.items())
    name = "model.layers.0.mlp.up_proj.weight"
    base, math, text = (untied.get(alias, name) for alias in ("base", "math", "text"))
    assert not torch.equal(coarse[name], base + 0.37 * (math - base) + 0.21 * (text - base))  # rounded at every step


def test_equal_digests_give_equal_bits(tied: Bank) -> None:
    def ordered(*aliases: str) -> Recipe:
        weights = {"math": 0.3, "text": 0.4}
        return recipe_of(
            tied.family,
            lambda layer: Merge(
                "task_arithmetic",
                tuple(Source(alias, layer) for alias in aliases),
                {"lambda": tuple(weights[alias] for alias in aliases)},
            ),
        )

    one, other = ordered("math", "text"), ordered("text", "math")
    assert one.digest == other.digest
    pairs = zip(merged_tensors(one, tied, torch.float32), merged_tensors(other, tied, torch.float32), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def test_kernels_and_known_statistics_change_no_bit(tied: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (
        lambda layer: Merge("ties", sources(layer), {"lambda": 0.8, "k": 0.37}),
        lambda layer: Merge("slerp", sources(layer), {"t": 0.37}),
        lambda layer: Merge("dare_linear", sources(layer), {"lambda": 0.6, "density": (0.3, 0.9)}, seed=5),
    ):
        recipe = recipe_of(tied.family, make)
        first = dict(merged_tensors(recipe, tied, torch.bfloat16))
        known = dict(merged_tensors(recipe, tied, torch.bfloat16))
        with monkeypatch.context() as patch:
            patch.setattr("workers.merging.materialize.is_fused", lambda *operands: False)
            plain = dict(merged_tensors(recipe, tied, torch.bfloat16))
        for name, tensor in plain.items():
            assert torch.equal(first[name], tensor)
            assert torch.equal(known[name], tensor)


def test_models_are_found_by_content_whatever_their_aliases(tied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(tied.family, 0.3, 0.6)
    renamed = replace(
        tied.family,
        base=replace(tied.family.base, alias="b"),
        experts=tuple(replace(expert, alias=f"{expert.alias}2") for expert in tied.family.experts),
    )
    other = Bank(renamed, cache=tmp_path)
    pairs = zip(merged_tensors(recipe, tied, torch.float32), merged_tensors(recipe, other, torch.float32), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def test_layers_may_come_from_elsewhere_and_be_fewer(untied: Bank) -> None:
    def layer(alias: str, index: int) -> LayerRecipe:
        merge = passthrough(alias)(index)
        return LayerRecipe(merge, merge, merge)

    whole = recipe_of(untied.family, passthrough("base"))
    recipe = replace(whole, layers=(layer("text", 3), layer("math", 3), layer("base", 0)))
    merged = dict(merged_tensors(recipe, untied, torch.bfloat16))
    suffix = "self_attn.o_proj.weight"
    for index, (alias, source) in enumerate((("text", 3), ("math", 3), ("base", 0))):
        expected = untied.get(alias, f"model.layers.{source}.{suffix}")
        assert torch.equal(merged[f"model.layers.{index}.{suffix}"], expected)
    assert f"model.layers.3.{suffix}" not in merged


def test_sources_are_never_modified(tied: Bank) -> None:
    before = {(m.alias, n): tied.get(m.alias, n).clone() for m in tied.family.models for n in tied.base.tensors}
    for make in (
        lambda layer: Merge("ties", sources(layer), {"lambda": 1.0, "k": 0.5}),
        lambda layer: Merge("slerp", sources(layer), {"t": 0.5}),
        lambda layer: Merge("task_arithmetic", sources(layer), {"lambda": 0.5}),
    ):
        list(merged_tensors(recipe_of(tied.family, make), tied, torch.float32))
    assert all(torch.equal(tied.get(*key), tensor) for key, tensor in before.items())


def by(method: str, *aliases: str, seed: int = 0) -> Make:
    declared = METHODS[method]
    examples = {c.name: EXAMPLES.get(c.name, ()) for c in declared.coefficients}
    numbers = {name: value for name, value in examples.items() if not isinstance(value, tuple)}
    if declared.coefficient("weight"):
        numbers["weight"] = 0.4
    return lambda layer: Merge(
        method, tuple(Source(alias, layer) for alias in aliases), numbers, seed if declared.takes_seed else None
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_merges_whole_models_in_recipes(tied: Bank, method: str) -> None:
    # Two sources in float32: other tests compile the same kernels, which takes seconds for each method.
    aliases = ("math", "text")[: METHODS[method].max_sources or 2]
    recipe = recipe_of(tied.family, by(method, *aliases), embedding=passthrough("base"), head=passthrough("base"))
    merged = dict(merged_tensors(Recipe.from_json(recipe.to_json()), tied, torch.float32))
    assert {name: tuple(tensor.shape) for name, tensor in merged.items()} == merged_names(recipe, tied)
    assert all(tensor.isfinite().all() for tensor in merged.values())
    name = "model.layers.2.mlp.up_proj.weight"
    assert not torch.equal(merged[name], tied.get("base", name))
    base, experts = tied.get("base", name), [tied.get(alias, name) for alias in aliases]
    # No method leaves the neighbourhood of the models.
    reach = sum(float((expert - base).norm()) for expert in experts)
    assert float((merged[name] - base * (0.7 if method == "passthrough" else 1)).norm()) < 3 * reach


def test_masks_follow_seed_content_and_tensor_and_not_aliases(tied: Bank, tmp_path: Path) -> None:
    recipe = recipe_of(tied.family, by("dare_linear", "math", "text"))
    merged = dict(merged_tensors(recipe, tied, torch.float32))
    other = dict(merged_tensors(recipe_of(tied.family, by("dare_linear", "math", "text", seed=1)), tied, torch.float32))
    renamed = replace(
        tied.family, experts=tuple(replace(expert, alias=f"{expert.alias}2") for expert in tied.family.experts)
    )
    again = dict(merged_tensors(recipe, Bank(renamed, cache=tmp_path), torch.float32))
    name = "model.layers.1.mlp.up_proj.weight"
    assert all(torch.equal(again[key], tensor) for key, tensor in merged.items())
    assert not torch.equal(other[name], merged[name])
    expected = tied.get("base", name).clone()
    for alias in sorted(("math", "text"), key=tied.family.fingerprints.__getitem__):
        mask = keep(mask_key(0, tied.family.fingerprints[alias], name), expected.shape, 0.4)
        expected += (tied.get(alias, name) - tied.get("base", name)) * mask * (0.4 / 0.4)
    torch.testing.assert_close(merged[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda layer: Merge("fisher", sources(layer)), r"layer 0, attention: unknown merge method 'fisher'; known "),
        (lambda layer: Merge("passthrough", sources(layer)), "attention: passthrough has 2 sources; it takes 1"),
        (lambda layer: Merge("ties", sources(layer), {"lambda": 0.5}), "ties needs one number 'k', found None"),
        (
            lambda layer: Merge("linear", (Source("math", 7), Source("text", 7)), {"weight": (0.5, 0.5)}),
            r"source '(math|text)' names layer 7; the models have layers 0..4",
        ),
        (
            lambda layer: Merge("task_arithmetic", (Source("math", 0), Source("text", 1)), {"lambda": 0.5}),
            r"task_arithmetic subtracts the base's layer, so all sources must name one layer; found \[0, 1\]",
        ),
        (lambda layer: Merge("passthrough", (Source("math"),)), "source 'math' names layer None; expected a layer"),
    ],
)
def test_unmergeable_recipe_is_refused(untied: Bank, make: Make, message: str) -> None:
    """Recipes that cannot be merged are refused before the first tensor."""
    recipe = recipe_of(untied.family, passthrough("base"), attention=make)
    with pytest.raises(InvalidRecipe, match=message):
        merged_tensors(recipe, untied, torch.float32)


def test_a_recipe_of_other_models_is_refused_by_fingerprint(untied: Bank, tied: Bank) -> None:
    with pytest.raises(InvalidModel, match=r"model 'math' \([0-9a-f]{12}\) is not among the given ones: base \("):
        merged_tensors(arithmetic(tied.family, 0.5, 0.5), untied, torch.float32)


def test_single_tensors_have_their_own_merges(untied: Bank) -> None:
    whole = arithmetic(untied.family, 0.3, 0.4)
    norm, up = "model.layers.2.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"
    own = {norm: passthrough("text")(2), up: passthrough("math")(4), "lm_head.weight": passthrough("text")(None)}
    merged = dict(merged_tensors(replace(whole, tensors=own), untied, torch.bfloat16))
    taken = {norm: ("text", norm), up: ("math", up.replace(".2.", ".4.")), "lm_head.weight": ("text", "lm_head.weight")}
    for name, tensor in merged_tensors(whole, untied, torch.bfloat16):
        assert torch.equal(merged[name], untied.get(*taken[name]) if name in taken else tensor)


def test_some_tensors_are_those_of_the_whole(untied: Bank) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.4)
    whole = dict(merged_tensors(recipe, untied, torch.float32))
    names = {"model.norm.weight", "model.layers.3.mlp.down_proj.weight"}
    some = dict(merged_tensors(recipe, untied, torch.float32, names=names))
    assert some.keys() == names
    assert all(torch.equal(whole[name], tensor) for name, tensor in some.items())


@pytest.mark.slow
def test_memory_of_a_merge(tmp_path: Path) -> None:
    """A bank and a candidate need the sources, one result and a tenth.

    In a process whose memory is limited to that, by one method for each kind of statistics; a second result, or task
    vectors, would not fit. The benchmark `memory` has every fused method.
    """
    merge_family.make(
        tmp_path, hidden=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=4, vocab_size=8000
    )
    methods = {PLAIN[method].uses: method for method in sorted(FUSED, reverse=True)}
    assert len(methods) > 5
    rows = bench_memory.measure(tmp_path, sorted(methods.values()))
    assert [row["placement"] for row in rows] == ["mapped", "host"]
    for row in rows:
        assert set(row["methods"]) == set(methods.values())
        assert row["opening"] < row["sources"] / (row["sources"] + row["result"]) + 0.05
        assert 0.99 < row["merging"] <= bench_memory.ALLOWED


def test_merges_written_in_place_are_those_of_the_stream(untied: Bank) -> None:
    """Fused or not, copied or computed, in one thread or several."""
    makers = (
        by("task_arithmetic", "math", "text"),
        by("nearswap", "math", "text"),
        by("della", "math", "text", seed=3),
    )
    for maker in (*makers, passthrough("text")):
        recipe = recipe_of(untied.family, maker)
        for dtype in (torch.float32, torch.bfloat16):
            expected = dict(merged_tensors(recipe, untied, dtype))
            found = {name: torch.full(tensor.shape, 7.0, dtype=dtype) for name, tensor in expected.items()}
            left_out = found.pop("model.norm.weight")
            merge_into(recipe, untied, found)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
            assert (left_out == 7).all()


@pytest.mark.parametrize("method", ["model_stock", "model_stock_rows"])
def test_model_stock_pole_names_the_tensor(tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Near Model Stock's pole, every way of merging names the tensor."""
    family = opposed_family(tmp_path)
    bank, recipe = Bank(family, cache=tmp_path / "cache"), model_stock(family, method)
    places = {name: torch.empty(shape) for name, shape in merged_names(recipe, bank).items()}
    message = r"^model\.\S+: the ratio of model_stock is -\d.*; expected -2 to 1: leave out a model"
    with pytest.raises(InvalidRecipe, match=message):
        merge_into(recipe, bank, places)
    with pytest.raises(InvalidRecipe, match=message):
        list(merged_tensors(recipe, bank, torch.float32))
    assert not caplog.text

    kept = model_stock(family, method, unbounded=1)
    assert kept.digest != recipe.digest
    merge_into(kept, bank, places)
    for name, tensor in merged_tensors(kept, bank, torch.float32):
        taus = [bank.get(alias, name) - bank.get("base", name) for alias in ("math", "text")]
        expected = PLAIN[method].function(taus, torch.zeros_like(taus[0]), unbounded=True) + bank.get("base", name)
        assert torch.equal(places[name], tensor)
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-3)
        assert f"{name}: the ratio of model_stock is -" in caplog.text


def test_a_larger_merge_is_small_where_it_is_a_weighted_sum(untied: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    others: dict[str, dict[str, float]] = {"linear": {}, "ties_weighted": {"density": 0.5, "lambda": 1.0}}

    def merged_by(method: str) -> Recipe:
        return recipe_of(untied.family, lambda layer: Merge(method, sources(layer), {"weight": 0.5, **others[method]}))

    num_elements = 3 * sum(math.prod(shape) for shape in merged_names(merged_by("linear"), untied).values())
    monkeypatch.setattr(materialize, "SMALL", num_elements - 1)
    monkeypatch.setattr(materialize, "SMALL_SUM", num_elements)
    assert materialize.is_small(merged_by("linear"), untied)
    assert not materialize.is_small(merged_by("ties_weighted"), untied)
    monkeypatch.setattr(materialize, "SMALL_SUM", num_elements - 1)
    assert not materialize.is_small(merged_by("linear"), untied)
