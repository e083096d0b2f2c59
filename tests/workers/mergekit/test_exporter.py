"""Our files for mergekit: mergekit's tensors for them must equal our own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from tests.workers.merging.methods.karcher_reference import TOLERANCE, iterates
from workers.export.checkpoint import export
from workers.mergekit.exporter import Inexpressible, mergekit_config
from workers.mergekit.importer import to_recipe
from workers.mergekit.reader import read_configuration
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.types import Family

Make = Callable[[int | None], Merge]


def passthrough(alias: str) -> Make:
    return lambda layer: Merge("passthrough", (Source(alias, layer),))


def linear(*weights: float) -> Make:
    return lambda layer: Merge("linear", (Source("math", layer), Source("text", layer)), {"weight": weights})


def arithmetic(*lambdas: float) -> Make:
    return lambda layer: Merge("task_arithmetic", (Source("math", layer), Source("text", layer)), {"lambda": lambdas})


def slerp(first: str, second: str, t: float) -> Make:
    return lambda layer: Merge("slerp", (Source(first, layer), Source(second, layer)), {"t": t})


def by(method: str, *aliases: str, **coefficients: float | tuple[float, ...]) -> Make:
    named = {name.rstrip("_"): value for name, value in coefficients.items()}
    return lambda layer: Merge(method, tuple(Source(alias, layer) for alias in aliases), named)


def ties(layer: int | None) -> Merge:
    return Merge("ties", (Source("math", layer), Source("text", layer)), {"lambda": 0.5, "k": 0.3})


def layer_of(index: int, attention: Make, mlp: Make, norm: Make) -> LayerRecipe:
    return LayerRecipe(attention(index), mlp(index), norm(index))


def recipe_of(family: Family, layers: list[tuple[Make, Make, Make]], embedding: Make, head: Make) -> Recipe:
    rows = tuple(layer_of(index, *makes) for index, makes in enumerate(layers))
    return Recipe(family.fingerprints, "base", rows, embedding(None), head(None))


def config_of(recipe: Recipe, bank: Bank) -> dict[str, object]:
    return mergekit_config(recipe, bank.layout, {model.alias: model.directory for model in bank.family.models})


@pytest.fixture(scope="module")
def bank(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Sources with three layers, tied embeddings and biases in attention."""
    return Bank(tied_family, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def untied_bank(untied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Sources with five layers and an untied head, stored in bfloat16."""
    return Bank(untied_family, cache=tmp_path_factory.mktemp("cache"))


GROUPED = [
    [(linear(0.2, 0.8), arithmetic(0.3, 0.4), passthrough("base"))] * 2 + [(passthrough("text"),) * 3],
    [(arithmetic(0.3, 0.4), arithmetic(0.9, 0.1), passthrough("base"))] * 2 + [(arithmetic(0.5, 0.5),) * 3],
    [(slerp("math", "text", 0.3), slerp("text", "math", 0.1), passthrough("text"))] * 2
    + [(slerp("base", "math", 0.6), passthrough("base"), slerp("base", "math", 0.5))],
]


@pytest.mark.parametrize(
    ("layers", "embedding", "head", "method", "num_slices"),
    [
        ([(linear(0.3, 0.6),) * 3] * 3, linear(0.3, 0.6), linear(0.3, 0.6), "linear", 1),
        ([(arithmetic(0.3, 0.4),) * 3] * 3, arithmetic(0.3, 0.4), arithmetic(0.3, 0.4), "task_arithmetic", 1),
        ([(slerp("math", "text", 0.3),) * 3] * 3, slerp("math", "text", 0.3), passthrough("text"), "slerp", 1),
        ([(passthrough("math"),) * 3] * 3, passthrough("math"), passthrough("math"), "linear", 1),
        (GROUPED[0], linear(0.5, 0.5), passthrough("base"), "linear", 2),
        (GROUPED[1], passthrough("base"), arithmetic(0.2, 0.1), "task_arithmetic", 2),
        (GROUPED[2], slerp("math", "text", 0.9), passthrough("math"), "slerp", 2),
    ],
)
def test_mergekit_gives_the_same_tensors(
    bank: Bank,
    tmp_path: Path,
    layers: list[tuple[Make, Make, Make]],
    embedding: Make,
    head: Make,
    method: str,
    num_slices: int,
) -> None:
    recipe = recipe_of(bank.family, layers, embedding, head)
    out = export(recipe, bank, tmp_path / "ours")
    document = yaml.safe_load((out / "mergekit_config.yml").read_text())
    assert document["merge_method"] == method
    assert len(document["slices"]) == num_slices
    compare(recipe, bank, document, tmp_path / "theirs")


@pytest.mark.parametrize(
    ("one", "other", "method"),
    [
        (by("nuslerp", "math", "text", weight=(0.2, 0.5)), by("nuslerp", "math", "text", weight=0.5), "nuslerp"),
        (by("nuslerp_rows", "math", "text", weight=(0.2, 0.5)),) * 2 + ("nuslerp",),
        (by("nuslerp_columns", "math", "text", weight=(0.2, 0.5)),) * 2 + ("nuslerp",),
        (by("nuslerp_task_vectors", "math", "text", weight=(0.2, 0.5)),) * 2 + ("nuslerp",),
        (by("multislerp", "base", "math", "text", weight=(0.2, 0.5, 0.1)),) * 2 + ("multislerp",),
        (by("multislerp_task_vectors", "math", "text", weight=(0.2, 0.5)),) * 2 + ("multislerp",),
        (by("nearswap", "text", "math", t=0.001), by("nearswap", "text", "math", t=0.01), "nearswap"),
        (by("ram", "math", "text"),) * 2 + ("ram",),
        (by("ramplus_tl", "math", "text", r=0.3, epsilon=0.001), by("ramplus_tl", "math", "text", r=0.2), "ramplus_tl"),
        (
            by("ties_weighted", "math", "text", weight=(0.3, 0.4), density=1.0, lambda_=0.7),
            by("ties_weighted", "math", "text", weight=0.5, density=1.0, normalize=0.0),
            "ties",
        ),
    ],
)
def test_mergekit_gives_the_same_by_the_other_methods(
    bank: Bank, tmp_path: Path, one: Make, other: Make, method: str
) -> None:
    recipe = recipe_of(bank.family, [(one, other, one), (one, other, one), (other,) * 3], one, other)
    document = config_of(recipe, bank)
    assert document["merge_method"] == method
    compare(recipe, bank, document, tmp_path)


# mergekit adds unit vectors in float32, with an error of some 2^-24 in the length of a step. This near to the
# tolerance, rounding decides whether it takes the step: another CPU, another number of threads, another result.
STEP_ERROR = 2.0**-22


def test_mergekit_gives_the_same_karcher_mean(bank: Bank, tmp_path: Path) -> None:
    """Each tensor of mergekit is one of the means at which its iteration may stop.

    That is the first mean whose next step is shorter than the tolerance, or its neighbour if that step is as long as
    the tolerance but for rounding. Our tensors, computed with angles in float64, are always the first one.
    """
    make = by("karcher", "base", "math", "text")
    recipe = recipe_of(bank.family, [(make,) * 3] * 3, make, make)
    document = config_of(recipe, bank)
    assert document["merge_method"] == "karcher"
    theirs = run_mergekit(document, tmp_path)
    ours = dict(merged_tensors(recipe, bank, torch.float32))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        means = iterates([bank.get(alias, name).float() for alias in ("base", "math", "text")], (1.0,) * 3, 10)
        lengths = [length for _, length in means]
        assert min(abs(length - TOLERANCE) for length in lengths) > 1e-12, f"{name}: float64 decides by rounding too"
        exact = means[[length < TOLERANCE for length in lengths].index(True)][0].float()
        torch.testing.assert_close(tensor, exact, rtol=1e-6, atol=1e-7, msg=(name + ": {}").format)
        first = [length < TOLERANCE + STEP_ERROR for length in lengths].index(True)
        last = [length < TOLERANCE - STEP_ERROR for length in lengths].index(True)
        assert any(
            torch.allclose(theirs[name], mean.float(), rtol=1e-6, atol=1e-6) for mean, _ in means[first : last + 1]
        ), f"{name}: none of the means after {first} to {last} steps; the lengths of steps are {lengths}"


def test_mergekit_gives_the_same_scaled_models(bank: Bank, tmp_path: Path) -> None:
    scaled = by("passthrough", "math", scale=0.7)
    recipe = recipe_of(bank.family, [(scaled, arithmetic(0.3, 0.4), passthrough("text"))] * 3, scaled, scaled)
    compare(recipe, bank, config_of(recipe, bank), tmp_path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (by("model_stock", "math", "text"), "model_stock differs in mergekit where task vectors are short"),
        (by("arcee_fusion", "math", "text"), "arcee_fusion takes random quartiles in mergekit"),
        (by("sce", "math", "text", select_topk=1.0), "sce differs in mergekit where task vectors are small"),
        (by("karcher", "math", "text", weight=(1.0, 2.0)), "karcher has equal weights in mergekit"),
        (by("ram", "base", "text"), "ram has the base among its sources"),
        (by("pcb", "base", "text", lambda_=1.0, density=0.1), "mergekit has no pcb"),
        (
            by("ties_weighted", "math", "text", weight=1.0, density=0.5),
            "ties_weighted differs in mergekit where magnitudes are equal",
        ),
        (
            lambda layer: Merge("dare_linear_l1", (Source("math", layer),), {"lambda": 1.0, "density": 0.5}, 0),
            "dare_linear_l1 has random masks, which mergekit draws differently",
        ),
    ],
)
def test_deviating_methods_are_not_written(bank: Bank, make: Make, reason: str) -> None:
    """Methods that mergekit computes differently are not written."""
    recipe = recipe_of(bank.family, [(make,) * 3] * 3, make, make)
    with pytest.raises(Inexpressible, match=reason):
        config_of(recipe, bank)


def test_models_that_differ_within_a_layer_are_inexpressible(bank: Bank) -> None:
    one, other = by("ram", "math", "text"), by("ram", "math")
    recipe = recipe_of(bank.family, [(one, other, one)] * 3, one, one)
    with pytest.raises(Inexpressible, match="the slice of layer 0 merges different models"):
        config_of(recipe, bank)
    recipe = recipe_of(bank.family, [(one,) * 3, (other,) * 3, (one,) * 3], one, one)
    with pytest.raises(Inexpressible, match="mergekit merges the same number of models in all layers"):
        config_of(recipe, bank)


def test_mergekit_gives_the_same_untied_head(untied_bank: Bank, tmp_path: Path) -> None:
    layers = [(arithmetic(0.3, 0.4),) * 3, *[(linear(0.3, 0.7), passthrough("text"), arithmetic(0.1, 0.1))] * 4]
    recipe = recipe_of(untied_bank.family, layers, arithmetic(0.5, 0.1), linear(0.9, 0.1))
    compare(recipe, untied_bank, config_of(recipe, untied_bank), tmp_path / "theirs")


def with_single_tensors(recipe: Recipe, bank: Bank, merge_of: Callable[[int], Merge]) -> Recipe:
    """A recipe with one merge per tensor except layer 1's norms; `merge_of` gives the merge of the n-th tensor."""
    tensors = {}
    for number, (name, place) in enumerate(bank.layout.places.items()):
        if (place.layer, place.component) != (1, "norm"):
            merge = merge_of(number)
            tensors[name] = replace(merge, sources=tuple(Source(s.model, place.layer) for s in merge.sources))
    return replace(recipe, tensors=tensors)


SINGLE: dict[str, tuple[Make, Callable[[int], Merge]]] = {
    # Some tensors are the base's, some have the task vector of one model only.
    "task_arithmetic": (arithmetic(0.3, 0.4), lambda n: arithmetic(0.1 * (n % 7), 0.2 * (n % 3))(None)),
    "linear": (linear(0.3, 0.7), lambda n: linear(0.1 * (n % 11), 1 - 0.1 * (n % 11))(None)),
    "slerp": (slerp("math", "text", 0.3), lambda n: slerp("math", "text", 0.1 * (n % 11))(None)),
    "multislerp": (
        by("multislerp", "math", "text", weight=(0.3, 0.7)),
        lambda n: by("multislerp", "math", "text", weight=(1.0, 1.0 + n))(None),
    ),
}


@pytest.mark.parametrize("method", SINGLE)
@pytest.mark.parametrize("is_tied", [True, False])
def test_mergekit_gives_the_same_single_tensors(
    bank: Bank, untied_bank: Bank, tmp_path: Path, method: str, is_tied: bool
) -> None:
    models = bank if is_tied else untied_bank
    make, merge_of = SINGLE[method]
    num_layers = models.layout.num_layers
    recipe = recipe_of(models.family, [(make,) * 3] * num_layers, make, make)
    recipe = with_single_tensors(recipe, models, merge_of)
    compare(recipe, models, config_of(recipe, models), tmp_path)


def test_mergekit_gives_the_same_layers_from_elsewhere(untied_bank: Bank, tmp_path: Path) -> None:
    recipe = recipe_of(
        untied_bank.family, [(arithmetic(0.3, 0.4),) * 3] * 5, arithmetic(0.3, 0.4), arithmetic(0.3, 0.4)
    )
    recipe = replace(recipe, layers=(*recipe.layers[:3], *recipe.layers[1:4]))
    document = config_of(recipe, untied_bank)
    ranges = [slice_["sources"][0]["layer_range"] for slice_ in document["slices"]]  # type: ignore[attr-defined]
    assert ranges == [[0, 3], [1, 4]]
    compare(recipe, untied_bank, document, tmp_path / "theirs")


def path_of(family: Family, steps: str, embedding: str, head: str) -> Recipe:
    """A recipe of whole layers; "m1 b0" stands for layer 1 of math and layer 0 of the base."""
    models = {model.alias[0]: model.alias for model in family.models}
    merges = [Merge("passthrough", (Source(models[step[0]], int(step[1:])),)) for step in steps.split()]
    layers = tuple(LayerRecipe(merge, merge, merge) for merge in merges)
    return Recipe(family.fingerprints, "base", layers, passthrough(embedding)(None), passthrough(head)(None))


@pytest.mark.parametrize(
    ("steps", "embedding", "head", "method", "num_slices"),
    [
        ("b0 b1 m2 m3 m2 m3 m4 t1", "base", "text", "passthrough", 4),
        ("m0 m0 m0", "math", "math", "passthrough", 3),
        ("m0 t1 b2 b3", "base", "base", "linear", 3),  # mergekit would take the embedding from math
    ],
)
def test_mergekit_gives_the_same_paths(
    untied_bank: Bank, tmp_path: Path, steps: str, embedding: str, head: str, method: str, num_slices: int
) -> None:
    recipe = path_of(untied_bank.family, steps, embedding, head)
    out = export(recipe, untied_bank, tmp_path / "ours")
    document = yaml.safe_load((out / "mergekit_config.yml").read_text())
    assert (document["merge_method"], len(document["slices"])) == (method, num_slices)
    compare(recipe, untied_bank, document, tmp_path / "theirs")
    directories = {model.directory: model.alias for model in untied_bank.family.models}
    again = to_recipe(
        read_configuration(document),
        directories,
        fingerprints=untied_bank.family.fingerprints,
        layout=untied_bank.layout,
    )
    ours = dict(merged_tensors(recipe, untied_bank, torch.float32))
    assert ours.keys() == dict(merged_tensors(again, untied_bank, torch.float32)).keys()
    assert all(torch.equal(ours[name], found) for name, found in merged_tensors(again, untied_bank, torch.float32))


@pytest.mark.parametrize(("steps", "num_slices"), [("m0 m1 m2 m3 m4", 5), ("m0 t1 b2 b3 b3 t1", 6)])
def test_mergekit_gives_the_same_scales_of_mlps(untied_bank: Bank, tmp_path: Path, steps: str, num_slices: int) -> None:
    recipe = path_of(untied_bank.family, steps, "base", "text")
    layers = [replace(layer, mlp_scale=(1.3, 0.0, 1.0, 0.7)[i % 4]) for i, layer in enumerate(recipe.layers)]
    recipe = replace(recipe, layers=tuple(layers))
    document = config_of(recipe, untied_bank)
    assert (document["merge_method"], len(document["slices"])) == ("linear", num_slices)  # type: ignore[arg-type]
    compare(recipe, untied_bank, document, tmp_path)


def test_mergekit_has_no_scales_of_merged_mlps(untied_bank: Bank) -> None:
    make = arithmetic(0.3, 0.4)
    recipe = recipe_of(untied_bank.family, [(make,) * 3] * 5, make, make)
    layers = (*recipe.layers[:2], replace(recipe.layers[2], mlp_scale=0.5), *recipe.layers[3:])
    with pytest.raises(Inexpressible, match="layer 2: the output of a merged MLP is scaled"):
        config_of(replace(recipe, layers=layers), untied_bank)


def test_mergekit_has_no_scale_of_the_stream(untied_bank: Bank) -> None:
    recipe = path_of(untied_bank.family, "b0 b1", "base", "base")
    scaled = replace(recipe, layers=(replace(recipe.layers[0], scale=1.5), recipe.layers[1]))
    with pytest.raises(Inexpressible, match="layers are scaled or aligned"):
        config_of(scaled, untied_bank)


@pytest.mark.parametrize("make", [arithmetic(0.3, 0.4), by("multislerp_task_vectors", "math", "text", weight=0.5)])
def test_bfloat16_is_computed_in_float32(untied_bank: Bank, tmp_path: Path, make: Make) -> None:
    """From bfloat16 files, both write bfloat16 that was computed in float32."""
    recipe = recipe_of(untied_bank.family, [(make,) * 3] * 5, make, make)
    directories = {model.alias: model.directory for model in untied_bank.family.models}
    theirs = run_mergekit(mergekit_config(recipe, untied_bank.layout, directories, dtype="bfloat16"), tmp_path)
    ours = dict(merged_tensors(recipe, untied_bank, torch.bfloat16))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == torch.bfloat16
        # Where float32 results differ in their last bit a bfloat16 may be the next one; of bfloat16 sources many are
        # half way between two.
        torch.testing.assert_close(theirs[name], tensor, rtol=2**-7, atol=1e-6, msg=(name + ": {}").format)
    differing = sum(int((theirs[name] != tensor).sum()) for name, tensor in ours.items())
    assert differing < 0.003 * sum(tensor.numel() for tensor in ours.values())


def run_mergekit(document: dict[str, object], directory: Path) -> dict[str, torch.Tensor]:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(device="cpu", copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(document), str(directory), options)
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def compare(recipe: Recipe, bank: Bank, document: dict[str, object], directory: Path) -> None:
    theirs = run_mergekit(document, directory)
    ours = dict(merged_tensors(recipe, bank, torch.float32))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-6, atol=1e-6, msg=(name + ": {}").format)


@pytest.mark.parametrize(
    ("layers", "embedding", "reason"),
    [
        ([(ties,) * 3] * 3, ties, "ties differs in mergekit where signs cancel and where magnitudes are equal"),
        (
            [(slerp("math", "text", 0.5), arithmetic(0.1, 0.2), passthrough("base"))] * 3,
            passthrough("base"),
            "mergekit applies one method to a whole model; this recipe has passthrough, slerp, task_arithmetic",
        ),
        (
            [(slerp("math", "text", 0.5), slerp("math", "base", 0.5), passthrough("base"))] * 3,
            passthrough("base"),
            "mergekit's slerp takes two models; the slice of layer 0 takes",
        ),
    ],
)
def test_what_mergekit_cannot_express_has_a_reason(
    bank: Bank, tmp_path: Path, layers: list[tuple[Make, Make, Make]], embedding: Make, reason: str
) -> None:
    recipe = recipe_of(bank.family, layers, embedding, passthrough("base"))
    with pytest.raises(Inexpressible, match=reason):
        config_of(recipe, bank)
    out = export(recipe, bank, tmp_path / "out")
    assert not (out / "mergekit_config.yml").exists()
    assert f"There is no mergekit configuration: {reason}" in (out / "README.md").read_text()


def test_mixed_layers_are_inexpressible(bank: Bank) -> None:
    """Components from different layers of a model are inexpressible."""
    whole = recipe_of(bank.family, [(passthrough("math"),) * 3] * 3, passthrough("math"), passthrough("math"))
    crossed = replace(whole.layers[0], mlp=passthrough("math")(2))
    with pytest.raises(Inexpressible, match="layer 0 takes layers 0 and 2 of model 'math'"):
        config_of(replace(whole, layers=(crossed, *whole.layers[1:])), bank)
    twice = Merge("linear", (Source("math", 0), Source("math", 1)), {"weight": (0.5, 0.5)})
    with pytest.raises(Inexpressible, match=r"layer 0 takes layers (0 and 1|1 and 0) of model 'math'"):
        config_of(replace(whole, layers=(LayerRecipe(twice, twice, twice), *whole.layers[1:])), bank)
