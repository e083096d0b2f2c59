from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source

FINGERPRINTS = {"base": "0", "math": "2", "text": "1"}


def recipe(merge: Merge, *, fingerprints: Mapping[str, str] = FINGERPRINTS, base: str = "base", **layer: Any) -> Recipe:
    return Recipe(fingerprints, base, (LayerRecipe(merge, merge, merge, **layer),), merge, merge)


def merge(method: str, *models: str, **coefficients: float | tuple[float, ...]) -> Merge:
    return Merge(method, tuple(map(Source, models)), coefficients)


def canonical(merge: Merge) -> Merge:
    return recipe(merge).canonical().head


def test_a_recipe_that_trims_whole_models_has_its_own_format() -> None:
    """Programs that do not know the option refuse the format; all other recipes and digests stay."""
    cut = recipe(merge("ties", "math", "text", **{"lambda": 1.0}, k=0.3))
    whole = replace(cut, trim="model")
    assert "trim" not in cut.to_json()
    assert (whole.to_json()["format"], whole.to_json()["trim"]) == ("mergesearch-recipe/3", "model")
    assert whole.digest != cut.digest
    assert Recipe.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    assert replace(whole, keeps_equal=True) == whole
    for untrimmed in (merge("linear", "math", "text", weight=0.5), merge("ties", "math", k=0.3, **{"lambda": 0.0})):
        assert replace(recipe(untrimmed), trim="model").digest == recipe(untrimmed).digest
    with pytest.raises(InvalidRecipe, match="trim is 'layer'; expected one of tensor, model"):
        Recipe.from_json(cut.to_json() | {"trim": "layer"})


@pytest.mark.parametrize(
    ("given", "equal"),
    [
        (merge("linear", "math", "text", weight=(1.0, 0.0)), merge("passthrough", "math")),
        (merge("linear", "math", "text", weight=(0.3, 0.7)), merge("linear", "text", "math", weight=(0.7, 0.3))),
        (merge("linear", "math", "text", weight=(0.5, 0.5)), merge("linear", "text", "math", weight=0.5)),
        (merge("task_arithmetic", "math", "text", **{"lambda": 0.0}), merge("passthrough", "base")),
        (merge("task_arithmetic", "math", "text", **{"lambda": (1.0, 0.0)}), merge("passthrough", "math")),
        (
            merge("task_arithmetic", "math", "base", **{"lambda": 0.5}),
            merge("task_arithmetic", "math", **{"lambda": 0.5}),
        ),
        (merge("ties", "math", "text", **{"lambda": 0.0}, k=0.3), merge("passthrough", "base")),
        (merge("slerp", "math", "text", t=0.0), merge("passthrough", "math")),
        (merge("slerp", "math", "text", t=1.0), merge("passthrough", "text")),
        (merge("slerp", "math", "text", t=0.25), merge("slerp", "text", "math", t=0.75)),
        (merge("passthrough", "math", scale=1.0), merge("passthrough", "math")),
        (merge("nuslerp", "math", "text", weight=(0.0, 0.4)), merge("passthrough", "text")),
        (merge("nuslerp", "math", "text", weight=(0.3, 0.4)), merge("nuslerp", "text", "math", weight=(0.4, 0.3))),
        (
            merge("multislerp", "math", "base", "text", weight=(0.5, 0.0, 0.2)),
            merge("multislerp", "text", "math", weight=(0.2, 0.5)),
        ),
        (merge("karcher", "math", "text", weight=(1.0, 1.0)), merge("karcher", "text", "math")),
        (merge("karcher", "math"), merge("passthrough", "math")),
        (merge("nearswap", "math", "text", t=0.0), merge("passthrough", "math")),
        (merge("pcb", "math", "text", **{"lambda": 0.0}, density=0.1), merge("passthrough", "base")),
        (
            merge("ties_weighted", "math", "text", weight=(0.0, 1.0), density=(0.1, 0.5), **{"lambda": 1.0}),
            merge("ties_weighted", "text", weight=1.0, density=0.5),
        ),
        (merge("ties_peft", "math", "text", weight=0.0, density=0.5), merge("passthrough", "base")),
    ],
)
def test_equal_merges_have_one_canonical_form_and_one_digest(given: Merge, equal: Merge) -> None:
    assert canonical(given) == equal
    assert recipe(given).digest == recipe(equal).digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # The first model is the one that changes.
        (merge("nearswap", "math", "text", t=0.1), merge("nearswap", "text", "math", t=0.1)),
        (merge("arcee_fusion", "math", "text"), merge("arcee_fusion", "text", "math")),
        # A model of no weight takes part in the election of signs, and what it keeps alone is kept.
        (
            merge("m3_ties", "math", "text", weight=(0.0, 1.0), **{"lambda": 1.0}, k=0.5),
            merge("m3_ties", "text", weight=1.0, **{"lambda": 1.0}, k=0.5),
        ),
        (
            merge("ties_peft", "math", "text", weight=(0.0, 1.0), density=0.5),
            merge("ties_peft", "text", weight=1.0, density=0.5),
        ),
        # An unchanged model counts: it halves the mean.
        (merge("model_stock", "math", "text", "base"), merge("model_stock", "math", "text")),
    ],
)
def test_merges_that_differ_keep_their_own_form(one: Merge, other: Merge) -> None:
    assert canonical(one) != canonical(other)
    assert recipe(one).digest != recipe(other).digest


def test_masks_of_another_seed_are_another_recipe() -> None:
    digests = set()
    for seed in (0, 1):
        made = Merge("dare_linear", (Source("math"),), {"lambda": 1.0, "density": 0.5}, seed)
        assert Recipe.from_json(json.loads(json.dumps(recipe(made).to_json()))).head == made
        digests.add(recipe(made).digest)
    assert len(digests) == 2


def test_what_a_method_does_not_take_is_refused_with_its_place() -> None:
    wrong = Recipe(
        FINGERPRINTS,
        "base",
        (LayerRecipe(merge("passthrough", "math"), merge("linear", "math", t=0.5), merge("passthrough", "math")),),
        merge("passthrough", "math"),
        merge("passthrough", "math"),
    )
    with pytest.raises(InvalidRecipe, match=r"^layer 0, mlp: linear takes no coefficient 't'; it takes weight"):
        wrong.canonical()


def test_numbers_closer_than_a_millionth_are_the_same_merge() -> None:
    digests = {recipe(merge("slerp", "math", "text", t=t)).digest for t in (0.3, 0.3 + 4e-7, 0.300001)}
    assert len(digests) == 2


def test_digest_depends_on_content_not_on_names() -> None:
    named = recipe(merge("task_arithmetic", "math", "text", **{"lambda": 0.5}))
    renamed = Recipe.from_json(json.loads(json.dumps(named.to_json()).replace("math", "arithmetic")))
    other = recipe(
        merge("task_arithmetic", "math", "text", **{"lambda": 0.5}), fingerprints={**FINGERPRINTS, "math": "9"}
    )
    assert renamed.digest == named.digest
    assert other.digest != named.digest


def test_canonical_recipe_names_only_models_it_uses() -> None:
    assert recipe(merge("passthrough", "math")).canonical().models == {"base": "0", "math": "2"}


def test_scale_and_alignment_are_part_of_the_digest_and_of_json() -> None:
    plain = recipe(merge("passthrough", "math"))
    scaled = recipe(merge("passthrough", "math"), scale=1.5, alignment="rotation")
    assert scaled.digest != plain.digest
    assert Recipe.from_json(json.loads(json.dumps(scaled.to_json()))) == scaled


def test_the_scale_of_an_mlp_is_part_of_the_digest_and_of_json() -> None:
    plain, scaled = recipe(merge("passthrough", "math")), recipe(merge("passthrough", "math"), mlp_scale=0.0)
    assert len({plain.digest, scaled.digest, recipe(merge("passthrough", "math"), scale=0.0).digest}) == 3
    assert scaled.to_json()["layers"][0]["mlp_scale"] == 0.0
    again = Recipe.from_json(json.loads(json.dumps(scaled.to_json())))
    assert again == scaled
    assert again.canonical().layers == scaled.layers
    with pytest.raises(InvalidRecipe, match="layer: not a layer recipe"):
        Recipe.from_json({**scaled.to_json(), "layers": [{**scaled.to_json()["layers"][0], "mlp_scale": "half"}]})


@pytest.mark.parametrize(
    ("given", "layer", "digest"),
    [
        (merge("passthrough", "math"), {}, "4437a7511831cb38e815d52abad2316c54363937a4879e8d2f6aed413c731727"),
        (
            merge("passthrough", "math"),
            {"scale": 1.5},
            "6dc07cbb1df13dd072c340ae1a4f39a118822315a31b81b3b65da1d7f4ba507d",
        ),
        (
            merge("passthrough", "math"),
            {"scale": 0.75, "alignment": "rotation"},
            "45eb45952e34ae315192dce8a2132f28080c6c9431a26b3d957ad125379438b7",
        ),
        (
            merge("task_arithmetic", "math", "text", **{"lambda": (0.3, 0.4)}),
            {"scale": 0.5},
            "d3466b57eb09acf5335568ee67fdbbf6aa7c0f7c5957c6477dd0603ce693064d",
        ),
    ],
)
def test_digests_are_those_of_earlier_releases(given: Merge, layer: Mapping[str, Any], digest: str) -> None:
    """Digests name stored results; they were written before layers had a scale of the MLP, and do not change."""
    assert recipe(given, **layer).digest == digest
    assert recipe(given, **layer, mlp_scale=1.0).digest == digest
    assert "mlp_scale" not in recipe(given, **layer).to_json()["layers"][0]


def test_rank_cuts_have_their_own_format() -> None:
    """Recipes that cut at a rank have a format of their own; those of format 1 are unchanged."""
    linear = recipe(merge("linear", "math", "text", weight=0.5))
    cut = recipe(merge("ties", "math", "text", k=0.2, **{"lambda": 1.0}))
    assert linear.to_json()["format"] == "mergesearch-recipe/1"
    assert cut.to_json()["format"] == "mergesearch-recipe/2"
    assert Recipe.from_json(cut.to_json()) == cut
    old = Recipe.from_json(cut.to_json() | {"format": "mergesearch-recipe/1"})
    assert old.keeps_equal
    assert old.digest != cut.digest
    assert old.canonical().to_json()["format"] == "mergesearch-recipe/1"
    assert Recipe.from_json(linear.to_json()).digest == linear.digest, "nothing of it depends on equal magnitudes"
    whole = recipe(merge("ties", "math", "text", k=0.2, **{"lambda": 0.0}))
    assert whole.digest == recipe(merge("passthrough", "base")).digest, "the canonical form has no cut"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"experts": "stakced"}, "experts is 'stakced'; expected 'each' or 'stacked'"),
        (lambda d: d | {"format": "other"}, "format is 'other'; this version reads 'mergesearch-recipe/1'"),
        (lambda d: d | {"layers": [{}]}, "layer: not a layer recipe"),
        (lambda d: d | {"head": {"method": "ties"}}, "merge: not a merge"),
        (lambda d: d | {"head": {"method": "ties", "sources": [["math"]]}}, "merge: not a merge"),
        (lambda d: d | {"head": d["head"] | {"coefficients": {"t": "x"}}}, "merge: not a merge"),
        (lambda d: d | {"head": d["head"] | {"sources": []}}, "has no sources; give at least one"),
        (lambda d: d | {"head": d["head"] | {"sources": [["law", None]]}}, r"\['law'\] not in models; known are"),
        (lambda d: {key: d[key] for key in d if key != "layers"}, "recipe: missing or malformed: KeyError"),
        (lambda d: [d], "recipe: format is"),
    ],
)
def test_json_that_is_no_recipe_is_refused(change: Any, message: str) -> None:
    document = recipe(merge("passthrough", "math")).to_json()
    with pytest.raises(InvalidRecipe, match=message):
        Recipe.from_json(change(document))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: merge("linear", "math", "text", weight=(1.0,)), "linear.weight has 1 numbers for 2 sources"),
        (lambda: merge("slerp", "math", "text", t=float("nan")), "coefficient nan is not a finite number"),
        (lambda: canonical(merge("slerp", "math", t=0.5)), "slerp has 1 sources; it takes 2"),
        (lambda: canonical(merge("slerp", "math", "text")), "slerp needs one number 't', found None"),
        (lambda: canonical(merge("linear", "math")), "linear needs 'weight', found only"),
    ],
)
def test_merges_that_make_no_sense_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        build()


def test_single_tensors_are_in_the_digest() -> None:
    """Single tensors are part of the JSON, the digest and the canonical form."""
    whole = recipe(merge("linear", "math", "text", weight=(0.5, 0.5)))
    own = replace(whole, tensors={"b": merge("slerp", "math", "text", t=0.5), "a": merge("slerp", "math", "text", t=0)})
    assert list(own.tensors) == ["a", "b"]
    assert own.digest != whole.digest
    assert Recipe.from_json(json.loads(json.dumps(own.to_json()))) == own
    assert own.canonical().tensors["a"] == merge("passthrough", "math")
    assert "tensors" not in whole.to_json()
    # A tensor may be called anything.
    odd = replace(whole, tensors={name: merge("passthrough", "base") for name in ("base", "sources", "models")})
    assert len(odd.digest) == 64
    with pytest.raises(InvalidRecipe, match=r"^a: ties\.k is 2; give a number in \[0, 1\]"):
        replace(whole, tensors={"a": merge("ties", "math", lambda_=1, k=2)}).check()
    with pytest.raises(InvalidRecipe, match=r"\['code'\] not in models"):
        replace(whole, tensors={"a": merge("passthrough", "code")})


def test_tokenizer_is_in_the_digest() -> None:
    """The digest covers the tokenizer, which is left out where it is the base's."""
    plain = recipe(merge("passthrough", "math"))
    found = {name: replace(plain, tokenizer=name) for name in ("base", "union", "math", "text")}
    assert len({each.digest for each in found.values()}) == 4
    assert "tokenizer" not in found["base"].to_json()
    for name, each in found.items():
        assert Recipe.from_json(json.loads(json.dumps(each.to_json()))) == each
        # With another tokenizer than the base's, rows also depend on models that no merge uses.
        assert set(each.canonical().models) == ({"base", "math"} if name == "base" else {"base", "math", "text"})
    whole = merge("passthrough", "m")
    renamed = Recipe({"b": "0", "m": "2", "t": "1"}, "b", plain.layers[:0], whole, whole, tokenizer="m")
    same = replace(plain, layers=(), tokenizer="math")
    assert renamed.digest == same.digest
    assert replace(renamed, tokenizer="b").tokenizer == "base"
    with pytest.raises(InvalidRecipe, match=r"tokenizer is 'code'; expected base, union or one of \['base', 'math'"):
        replace(plain, tokenizer="code")


def test_a_merge_may_subtract_a_base_of_its_own() -> None:
    usual = merge("ties_weighted", "math", "text", weight=1.0, density=0.5)
    plain, other = recipe(usual), recipe(replace(usual, base=Source("text")))
    assert plain.digest == recipe(replace(usual, base=Source("base"))).digest != other.digest
    assert "base" not in plain.canonical().embedding.to_json()
    assert other.canonical().embedding.base == Source("text")
    assert Recipe.from_json(json.loads(json.dumps(other.to_json()))) == other
    nothing = recipe(replace(usual, base=Source("text"), coefficients={"weight": 0.0, "density": 0.5}))
    assert nothing.canonical().embedding == merge("passthrough", "text")
