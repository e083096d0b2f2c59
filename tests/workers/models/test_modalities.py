"""The declarations of modalities, and image classifiers as sources of merges."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import tiny_llama
from tests.vision import CLASSES, tiny_vit, vit_family
from workers.engines.source_recipes import base_recipe
from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.task_reader import TaskReader
from workers.merging.bank import Bank
from workers.merging.plan import merged_names
from workers.models.checkpoints import open_checkpoint
from workers.models.family import resolve_family
from workers.models.fingerprints import fingerprint
from workers.models.modalities import IMAGE, MODALITIES, TEXT, Modality, modality_at, modality_of, modality_of_task
from workers.models.task_heads import TaskHead, head_tensors, task_head, task_heads
from workers.serving.replica import Worker
from workers.training.finetuning.modality import TrainingModality
from workers.training.task_losses import TaskLosses


def methods_of(protocol: type) -> dict[str, list[str]]:
    members = inspect.getmembers(protocol, inspect.isfunction)
    return {name: list(inspect.signature(f).parameters) for name, f in members if not name.startswith("_")}


@pytest.mark.parametrize("modality", MODALITIES.values(), ids=MODALITIES)
def test_what_a_declaration_names_has_its_interface(modality: Modality) -> None:
    """What scores, reads and trains for a modality has all methods of its interface, with their parameters."""
    declared = (
        (TaskReader, type(modality.task_reader())),
        (Worker, modality.worker_class()),
        (TrainingModality, type(modality.training_module())),
        (TaskLosses, modality.losses_class()),
    )
    for protocol, found in declared:
        assert methods_of(protocol).items() <= methods_of(found).items()
    import transformers

    assert hasattr(transformers, modality.auto_class)


def test_models_and_tasks_have_the_modality_that_declares_them(tmp_path: Path) -> None:
    assert modality_of({"model_type": "vit"}) is IMAGE
    assert modality_of({"model_type": "llama"}) is TEXT
    assert modality_of({"model_type": ["vit"]}) is modality_of({}) is TEXT
    assert modality_of_task({"images": "x", "head": "a"}) is IMAGE
    assert modality_of_task({"file": "x"}) is modality_of_task("gsm8k") is TEXT
    assert modality_at(tmp_path) is TEXT
    assert modality_at(tiny_vit(tmp_path / "vit")) is IMAGE


def test_layers_and_components_of_a_vit(tmp_path: Path) -> None:
    """Every tensor of a ViT has its place; the head of its task is none of them."""
    layout = open_checkpoint(tiny_vit(tmp_path / "vit", layers=3)).layout
    assert (layout.num_layers, layout.layer_prefix) == (3, "vit.encoder.layer.")
    assert layout.suffixes("norm", 2) == tuple(
        f"layernorm_{at}.{kind}" for at in ("after", "before") for kind in ("bias", "weight")
    )
    assert {name.split(".")[0] for name in layout.suffixes("mlp", 0)} == {"intermediate", "output"}
    assert {name.split(".")[0] for name in layout.suffixes("attention", 0)} == {"attention"}
    assert layout.suffixes("head") == ("vit.layernorm.bias", "vit.layernorm.weight")
    assert {name.split(".")[2] for name in layout.suffixes("embedding")} == {
        "cls_token",
        "position_embeddings",
        "patch_embeddings",
    }
    assert layout.task_heads == ("classifier.bias", "classifier.weight")
    assert not {*layout.task_heads} & {*layout.places}


def test_an_encoder_alone_and_classifiers_are_a_family(tmp_path: Path) -> None:
    """A base without a head and experts with heads of other classes merge; tensors of heads are not merged."""
    tiny_vit(tmp_path / "base", 0, classes=None)
    tiny_vit(tmp_path / "a", 1)
    tiny_vit(tmp_path / "b", 2, classes=("no", "yes"))
    sources = resolve_family(tmp_path / "base", {"a": tmp_path / "a", "b": tmp_path / "b"})
    assert task_heads(sources.checkpoints) == {"a": TaskHead("a", 3, CLASSES), "b": TaskHead("b", 2, ("no", "yes"))}
    assert sources.family.modality == "image"
    bank = Bank(sources)
    names = merged_names(base_recipe(sources.family), bank)
    assert all(name.startswith("vit.") for name in names)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert names.keys() == stored.keys() - {"classifier.weight", "classifier.bias"}
    assert torch.equal(bank.get("a", "vit.layernorm.weight"), stored["vit.layernorm.weight"])
    head = head_tensors(sources.checkpoints["b"])
    assert head.weight.shape == (2, 32)
    # The encoder's file has no prefix.
    alone = load_file(tmp_path / "base" / "model.safetensors")
    assert torch.equal(bank.get("base", "vit.layernorm.weight"), alone["layernorm.weight"])


def test_a_base_may_have_a_head_of_its_own(tmp_path: Path) -> None:
    tiny_vit(tmp_path / "base", 0, classes=("x", "y", "z", "w"))
    sources = resolve_family(tmp_path / "base", {"a": tiny_vit(tmp_path / "a", 1)})
    assert {alias: head.num_classes for alias, head in task_heads(sources.checkpoints).items()} == {"base": 4, "a": 3}


def test_the_processor_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Another image processor makes another model, as another tokenizer does."""
    tiny_vit(tmp_path / "one", 1)
    tiny_vit(tmp_path / "two", 1, processor={"image_mean": [0.1, 0.2, 0.3]})
    prints = [fingerprint(open_checkpoint(tmp_path / name)) for name in ("one", "two")]
    assert prints[0] != prints[1]


def changed_config(directory: Path, **fields: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def unknown_tensor(directory: Path) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), "vit.encoder.layer.0.adapter.weight": torch.zeros(2)}, file)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "patch": (lambda d: changed_config(d, patch_size=8), "image_size 28 is not divisible by patch_size 8; expected a"),
    "no size": (
        lambda d: changed_config(d, image_size=[28, 14]),
        r"image_size is \[28, 14\] and patch_size 7; expected",
    ),
    "labels": (
        lambda d: changed_config(d, id2label={"0": "a"}),
        "its head has 3 classes, id2label in config.json names 1",
    ),
    "depth": (
        lambda d: changed_config(d, num_hidden_layers=5),
        "num_hidden_layers is 5 .* its tensors are of 2 layers",
    ),
    "unknown": (unknown_tensor, "not a known part of an image encoder: vit.encoder.layer.0.adapter.weight"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_classifiers_that_cannot_be_used_are_refused(case: str, tmp_path: Path) -> None:
    spoil, message = BROKEN[case]
    spoil(tiny_vit(tmp_path / "vit"))
    with pytest.raises(InvalidModel, match=message):
        open_checkpoint(tmp_path / "vit")


def test_image_models_of_other_types_are_refused_as_such(tmp_path: Path) -> None:
    """The error for a classifier of another type, or a model of two towers, names the models that are merged."""
    vit = tiny_vit(tmp_path / "vit")
    merged = r"decoder-only text models are merged, and those of the modality image of the types clip, clip_vision"
    cases: dict[str, dict[str, object]] = {
        "a model of the modality image of type 'deit'": {
            "model_type": "deit",
            "architectures": ["DeiTForImageClassification"],
        },
        r"a vision-language model \(siglip\)": {
            "model_type": "siglip",
            "architectures": ["SiglipModel"],
            "vision_config": {},
        },
    }
    for message, fields in cases.items():
        changed_config(vit, **fields)
        with pytest.raises(InvalidModel, match=f"{message}; {merged}") as caught:
            open_checkpoint(vit)
        assert len(caught.value.problems) == 1


def test_models_of_two_modalities_are_refused(tmp_path: Path) -> None:
    """A language model and a classifier are not a family, whichever is the base; nothing else is said of them."""
    vit, llama = tiny_vit(tmp_path / "vit"), tiny_llama(tmp_path / "llama")
    for base, expert, own, other in ((vit, llama, "text", "image"), (llama, vit, "image", "text")):
        with pytest.raises(InvalidModel) as caught:
            resolve_family(base, {"a": expert})
        assert caught.value.problems == (
            f"expert 'a': {expert}: is a model of the modality {own}, the base is one of {other}; expected models of "
            "one modality",
        )


def test_another_processor_than_the_bases_is_refused(tmp_path: Path) -> None:
    base = tiny_vit(tmp_path / "base", classes=None)
    expert = tiny_vit(tmp_path / "a", 1, processor={"image_std": [0.1, 0.2, 0.3]})
    with pytest.raises(
        InvalidModel, match=r"its image processor has image_std \[0.1, 0.2, 0.3\]; the base's has \[0.5"
    ):
        resolve_family(base, {"a": expert})
    (expert / "preprocessor_config.json").unlink()  # an expert without a processor has the base's
    assert resolve_family(base, {"a": expert}).modality is IMAGE


def test_processors_must_fit_the_images_of_the_model(tmp_path: Path) -> None:
    vit = tiny_vit(tmp_path / "a", processor={"size": {"height": 32, "width": 28}})
    with pytest.raises(
        InvalidModel, match=r"gives images of 32 x 28 for one of 29 x 59, config\.json states image_size 28"
    ):
        IMAGE.check_files(vit)
    (vit / "preprocessor_config.json").unlink()
    with pytest.raises(InvalidModel, match=r"no preprocessor_config.json; expected the settings of an image processor"):
        IMAGE.check_files(vit)


def test_classifiers_have_no_vocabulary(tmp_path: Path) -> None:
    family = {"base": tiny_vit(tmp_path / "base", classes=None), "experts": {"a": tiny_vit(tmp_path / "a", 1)}}
    with pytest.raises(InvalidModel, match="tokenizer: models of the modality image have none; leave it out"):
        resolve_family(**family, tokenizer="union")  # type: ignore[arg-type]


def test_other_sizes_of_images_are_refused(tmp_path: Path) -> None:
    base = tiny_vit(tmp_path / "base", classes=None)
    size = {"height": 35, "width": 35}
    expert = tiny_vit(tmp_path / "a", 1, image_size=35, processor={"size": size})
    with pytest.raises(InvalidModel, match="image_size is 35; the base has 28"):
        resolve_family(base, {"a": expert})


def test_classes_are_found_by_their_names() -> None:
    """A task's classes are the head's outputs by name, in a stated order, or in alphabetical order if it has none."""
    named, plain = TaskHead("a", 3, ("c", "a", "b")), TaskHead("a", 3, None)
    assert named.order_of(("a", "b", "c"), is_ordered=False, where="x") == (1, 2, 0)
    assert named.order_of(("x", "y", "z"), is_ordered=True, where="x") == (0, 1, 2)
    assert plain.order_of(("a", "b", "c"), is_ordered=False, where="x") == (0, 1, 2)
    with pytest.raises(InvalidTask, match="x: has 2 classes, the head of 'a' has 3; name the model that was trained"):
        named.order_of(("a", "b"), is_ordered=False, where="x")
    with pytest.raises(
        InvalidTask, match="has the class 'd', which the head of 'a' does not know; its classes are c, a, b"
    ):
        named.order_of(("a", "b", "d"), is_ordered=False, where="x")


def test_unnamed_classes_are_not_names(tmp_path: Path) -> None:
    """LABEL_0 and so on are what transformers writes for classes without names."""
    vit = tiny_vit(tmp_path / "a", classes=[f"LABEL_{i}" for i in range(4)])
    assert task_head("a", open_checkpoint(vit)) == TaskHead("a", 4, None)


def test_a_family_of_the_test_helper_is_one_of_images(tmp_path: Path) -> None:
    assert vit_family(tmp_path).modality == "image"
