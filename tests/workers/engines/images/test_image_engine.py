"""The torch engine for image classifiers: merges in place, evidence, canaries, and faults that they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.baselines import all_baselines
from search_spaces.recipe import Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from tests.vision import image_folder, tiny_vit, vit_family
from workers.engines.canaries import CANARY_EVERY
from workers.engines.images.classifiers import reference_encoder
from workers.engines.images.engine import ImageEngine
from workers.engines.images.pixels import Pixels
from workers.engines.images.scoring import entropy, largest_entropy, value_of
from workers.engines.source_recipes import source_recipe
from workers.errors import EngineFault, EngineUnavailable, EvidenceMismatch, InvalidTask, TrialFailed
from workers.evaluation.image_tasks import load_image_task
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.plan import TensorPlan
from workers.types import Family, TaskSpec

LAYERS = 3


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return vit_family(tmp_path_factory.mktemp("vit"), layers=LAYERS)


@pytest.fixture
def image_engine(family: Family) -> ImageEngine:
    return ImageEngine(family, EngineOptions(max_layers=5), device="cpu")


@pytest.fixture
def merges(family: Family) -> dict[str, Recipe]:
    found = all_baselines(
        base="base", experts=["left", "right"], fingerprints=family.fingerprints, num_layers=LAYERS, chosen="all"
    )
    return {label: recipe for _, label, recipe in found if not label.startswith("TIES")}


def path(recipe: Recipe, *layers: int) -> Recipe:
    return replace(recipe, layers=tuple(recipe.layers[index] for index in layers)).canonical()


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, 3, 28, 28, generator=torch.Generator().manual_seed(seed))


def test_an_entropy_is_at_most_one() -> None:
    """Equal logits have the largest entropy, which float32 rounds above the end of the range for many head sizes."""
    equal = {number: torch.zeros(number).log_softmax(-1) for number in range(2, 60)}
    assert any(entropy(logprobs) > largest_entropy(number) for number, logprobs in equal.items())
    prepared: Any = SimpleNamespace(task=SimpleNamespace(is_entropy=True))
    for logprobs in equal.values():
        assert 1 - 1e-6 < value_of(prepared, 0, logprobs) <= 1
    assert 0.5 < value_of(prepared, 0, torch.tensor([3.0, 3, 0, 0, 0, 0]).log_softmax(-1)) < 1


def test_parameters_are_the_merged_tensors(image_engine: ImageEngine, merges: dict[str, Recipe]) -> None:
    """After each swap, the parameters are the merged tensors bit for bit, and the features those of transformers."""
    assert len(merges) > 5
    for recipe in merges.values():
        image_engine.swap(recipe)
        assert image_engine.held_digest == recipe.digest
        for name, tensor in merged_tensors(recipe, image_engine.bank, torch.float32):
            assert torch.equal(image_engine.encoder.parameters[name], tensor), name
        expected = reference_encoder(recipe, image_engine.bank, dtype="float32").features(images())
        assert torch.allclose(image_engine.features(images()), expected, atol=1e-5)


def test_paths_of_other_depths_are_run(image_engine: ImageEngine, merges: dict[str, Recipe]) -> None:
    """Layers in another order and number are the model that transformers loads for that path."""
    base = merges["base"]
    before = image_engine.features(images())
    for layers in ((2, 0), (0, 1, 2, 1, 2), (1,), (0, 1, 2)):
        recipe = path(merges["expert:left"], *layers)
        image_engine.swap(recipe)
        expected = reference_encoder(recipe, image_engine.bank, dtype="float32").features(images())
        assert torch.allclose(image_engine.features(images()), expected, atol=1e-5), layers
    image_engine.swap(base)
    assert torch.equal(image_engine.features(images()), before)
    with pytest.raises(TrialFailed, match="the merge has 6 layers; the engine has 5"):
        image_engine.swap(path(base, 0, 1, 2, 0, 1, 2))
    image_engine.swap(merges["expert:left"])  # it goes on


def test_checksums_depend_on_the_recipe_alone(family: Family, merges: dict[str, Recipe]) -> None:
    """Engines that came to a merge by other ways report the same checksum, and different ones for other merges."""
    first = ImageEngine(family, EngineOptions(), device="cpu")
    second = ImageEngine(family, EngineOptions(max_layers=5), device="cpu")
    found = {label: first.swap(recipe).weights_checksum for label, recipe in merges.items()}
    second.swap(path(merges["base"], 0, 0, 1))
    again = {label: second.swap(merges[label]).weights_checksum for label in reversed(merges)}
    assert found == again
    assert len({*found.values()}) == len(merges)
    assert first.compute_checksum() == [*found.values()][-1]


def test_an_unchanged_merge_is_not_written_again(image_engine: ImageEngine, merges: dict[str, Recipe]) -> None:
    first = image_engine.swap(merges["uniform average"])
    again = image_engine.swap(merges["uniform average"])
    assert (again.swap_count, again.swap_s, again.materialise_s) == (first.swap_count, 0, 0)
    assert image_engine.swap(merges["base"]).swap_count == first.swap_count + 1


def test_a_changed_weight_is_found(image_engine: ImageEngine, merges: dict[str, Recipe]) -> None:
    """A parameter that something else writes is found by the next check, and the engine is not used again."""
    image_engine.swap(merges["uniform average"])
    with torch.no_grad():
        image_engine.encoder.parameters["vit.layernorm.weight"][3] += 1e-3
    with pytest.raises(EngineFault, match="its parameters have changed since the merge was written"):
        image_engine.check()
    for call in (
        image_engine.check,
        lambda: image_engine.swap(merges["base"]),
        lambda: image_engine.features(images()),
    ):
        with pytest.raises(EngineFault):
            call()
    assert image_engine.held_digest is None


def test_a_tensor_that_is_not_written_is_found(
    image_engine: ImageEngine, merges: dict[str, Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swap that leaves a tensor out passes the checksum, and fails the comparison with transformers."""

    def careless(plan: TensorPlan, bank: Bank, destinations: Mapping[str, torch.Tensor]) -> dict[str, str]:
        return merge_into(plan, bank, {name: to for name, to in destinations.items() if "layer.1.output" not in name})

    monkeypatch.setattr("workers.engines.images.engine.merge_into", careless)
    image_engine.swap(merges["expert:left"])
    with pytest.raises(EngineFault, match="features of the engine and of transformers differ by"):
        image_engine.check()


def test_canaries_come_every_so_many_swaps(image_engine: ImageEngine, merges: dict[str, Recipe]) -> None:
    assert image_engine.num_passed == 1
    recipes = [merges["base"], merges["uniform average"]]
    for number in range(CANARY_EVERY):
        image_engine.swap(recipes[(number + 1) % 2])
    assert image_engine.num_passed == 2
    assert image_engine.check().canaries == 3
    assert image_engine.check().canaries == 3  # nothing was scored since


def test_features_that_are_not_finite_pass_no_canary(image_engine: ImageEngine, merges: dict[str, Recipe]) -> None:
    """The canary of a merge that overflows compares nothing: it counts as skipped, and a check takes the base."""
    huge = Merge("task_arithmetic", (Source("left"), Source("right")), {"lambda": (1e38, 1e38)})
    broken = Recipe.uniform(huge, models=image_engine.family.fingerprints, base="base", num_layers=LAYERS).canonical()
    for number in range(CANARY_EVERY):
        image_engine.swap(broken if number % 2 else merges["uniform average"])
    assert not image_engine.features(images()).isfinite().all()
    assert (image_engine.num_passed, image_engine.num_skipped) == (1, 1)
    assert "not finite" in image_engine.report.skipped
    assert image_engine.check().canaries == 2
    assert image_engine.held_digest == image_engine.base_recipe.digest


def test_a_foreign_recipe_during_scoring_is_a_fault(image_engine: ImageEngine, merges: dict[str, Recipe]) -> None:
    image_engine.swap(merges["base"])
    with pytest.raises(EngineFault, match="asked for recipe"), image_engine.whole(merges["base"]):
        image_engine.swap(merges["expert:left"])


def test_changed_sources_end_the_study(tmp_path: Path) -> None:
    family = vit_family(tmp_path)
    engine = ImageEngine(family, EngineOptions(), device="cpu")
    tiny_vit(tmp_path / "left", 9)
    with pytest.raises(EvidenceMismatch, match="model 'left' has changed since it was opened"):
        engine.swap(source_recipe(family, "left", num_layers=2))
    with pytest.raises(EngineUnavailable, match="has changed: its fingerprint is"):
        ImageEngine(family, EngineOptions(), device="cpu")


def test_sixteen_bits_are_rounded_once(family: Family, merges: dict[str, Recipe]) -> None:
    engine = ImageEngine(family, EngineOptions(dtype="bfloat16"), device="cpu")
    engine.swap(merges["uniform average"])
    for name, tensor in merged_tensors(merges["uniform average"], engine.bank, torch.bfloat16):
        assert torch.equal(engine.encoder.parameters[name], tensor), name
    assert engine.check().canaries == 2


@pytest.mark.parametrize("is_kept", [False, True])
def test_ranks_are_kept_where_the_study_says_so(is_kept: bool, family: Family) -> None:
    """With `rank_cache`, whose memory plans count, the ranks of magnitudes that DELLA uses are computed once."""
    bank = ImageEngine(family, EngineOptions(rank_cache=is_kept), device="cpu").bank
    name = "vit.encoder.layer.0.output.dense.weight"
    ranks = [bank.ranks([("left", name)], ("base", name))[0] for _ in range(2)]  # both live, at different addresses
    assert (ranks[0].data_ptr() == ranks[1].data_ptr()) == is_kept
    assert bank.summary()["statistics_bytes"] == (2 * 32 * 64 if is_kept else 0)


def test_scales_of_layers_are_those_of_the_stream(image_engine: ImageEngine, merges: dict[str, Recipe]) -> None:
    """Scales that are folded into weights equal factors on the residual stream, and on what the MLPs add."""
    plain = merges["expert:left"]
    scales, of_mlps = (0.8, 1.3, 0.6), (1.2, 0.0, 0.7)
    layers = tuple(
        replace(layer, scale=scale, mlp_scale=of_mlp)
        for layer, scale, of_mlp in zip(plain.layers, scales, of_mlps, strict=True)
    )
    image_engine.swap(replace(plain, layers=layers).canonical())
    found = image_engine.features(images())
    reference = reference_encoder(plain, image_engine.bank, dtype="float32")
    assert not torch.allclose(found, reference.features(images()), atol=0.1)

    def times(factor: float) -> Any:
        return lambda module, inputs, output: output * factor

    for layer, scale, of_mlp in zip(reference.module.vit.layers, scales, of_mlps, strict=True):
        layer.mlp.register_forward_hook(times(of_mlp))
        layer.register_forward_hook(times(scale))
    assert torch.allclose(found, reference.features(images()), atol=1e-4)


# Images.


def test_images_are_cached_within_their_memory(tmp_path: Path) -> None:
    """The cache never has more bytes than allowed, and its images are those of the processor of transformers."""
    from PIL import Image
    from transformers import AutoImageProcessor

    vit, folder = tiny_vit(tmp_path / "vit"), image_folder(tmp_path / "images")
    task = load_image_task(TaskSpec({"images": str(folder), "head": "a"}, "acc"))
    one = 4 * 3 * 28 * 28
    pixels = Pixels(str(vit), max_bytes=5 * one)
    processor = AutoImageProcessor.from_pretrained(vit)
    for _ in range(2):
        found = pixels.of(task, range(18))
        assert pixels.num_bytes == 5 * one
        files = [task.images.samples[index].file for index in task.order]
        expected = processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")["pixel_values"]
        assert torch.equal(found, expected)
    whole = Pixels(str(vit))
    whole.of(task, range(18))
    assert whole.num_bytes == 18 * one
    for file in files:
        file.unlink()
    assert torch.equal(whole.of(task, range(18)), expected)  # without reading


def test_an_image_that_changes_is_not_scored(tmp_path: Path) -> None:
    vit, folder = tiny_vit(tmp_path / "vit"), image_folder(tmp_path / "images")
    task = load_image_task(TaskSpec({"images": str(folder), "head": "a"}, "acc"))
    assert task.images.digests
    file = task.images.samples[task.order[2]].file
    file.write_bytes(b"x")
    with pytest.raises(InvalidTask, match=f"{file.name}: has changed since the task was read"):
        Pixels(str(vit)).of(task, range(4))
