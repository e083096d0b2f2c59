"""LoRA adapters with a head of their own: scored, verified and exported as whole experts are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

from search_spaces.study.engine import EngineOptions
from tests.vision import image_folder, tiny_clip, tiny_vit
from workers.engines.source_recipes import source_recipe
from workers.errors import InvalidModel
from workers.evaluation.image_tasks import load_image_task
from workers.export.checkpoint import export
from workers.models.family import open_family, resolve_family
from workers.models.task_heads import TaskHead, task_heads
from workers.serving.image_worker import ImageWorker
from workers.types import ScoreRequest, Span, TaskSpec

CLASSES = ("circle", "line", "square")


def adapter(base: Path, directory: Path, *, num_classes: int = 3, seed: int = 1, **options: Any) -> Any:
    """Write a LoRA adapter to a base, with a trained head of its own, and return peft's model."""
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj", "fc1"], "modules_to_save": ["classifier"], **options}
    model: Any = AutoModelForImageClassification.from_pretrained(
        base, num_labels=num_classes, ignore_mismatched_sizes=True
    )
    torch.manual_seed(seed)
    made: Any = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **options))
    with torch.no_grad():
        for _, parameter in made.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    made.save_pretrained(directory)
    return made.eval()


@pytest.mark.parametrize("of_base", [None, ("no", "yes"), ("x", "y", "z")], ids=["no head", "two", "three"])
def test_samples_are_those_of_peft(of_base: Sequence[str] | None, tmp_path: Path) -> None:
    """Each sample's class is that of peft's model, with any head of the base; the export has the adapter's head."""
    base = tiny_vit(tmp_path / "base", 0, classes=of_base)
    model = adapter(base, tmp_path / "tuned")
    worker = ImageWorker(open_family(base, {"tuned": tmp_path / "tuned"}), EngineOptions(), device="cpu")
    folder = image_folder(tmp_path / "images", per_class=8)
    spec = TaskSpec({"images": str(folder), "head": "tuned"}, "acc")
    recipe, spans = source_recipe(worker.engine.family, "tuned", num_layers=2), (Span("shapes", spec, 0, 24),)
    samples = worker.score(ScoreRequest("s", recipe, spans)).samples
    task, processor = load_image_task(spec), AutoImageProcessor.from_pretrained(base)
    files = [task.images.samples[index] for index in task.order]
    inputs = processor([Image.open(sample.file).convert("RGB") for sample in files], return_tensors="pt")
    with torch.inference_mode():
        outputs = model(**inputs).logits.argmax(-1).tolist()
    wanted = [float(output == sample.label) for output, sample in zip(outputs, files, strict=True)]
    assert [sample.value for sample in samples] == wanted
    assert 0 < sum(wanted) < len(wanted)
    report = worker.verify(recipe, samples, spans)
    assert (report.num_samples, report.num_equal) == (24, 24)
    out = export(recipe, worker.engine.bank, tmp_path / "out")
    trained = model.base_model.model.classifier.modules_to_save["default"]
    assert torch.equal(load_file(out / "heads" / "tuned.safetensors")["classifier.weight"], trained.weight)
    listed = json.loads((out / "heads" / "heads.json").read_text())
    assert listed["heads"]["tuned"] == {"num_classes": 3, "classes": None}
    loaded = AutoModelForImageClassification.from_pretrained(out)
    assert listed["loaded"] == ("tuned" if of_base is None else "base")
    assert loaded.config.num_labels == loaded.classifier.out_features == (3 if of_base is None else len(of_base))
    assert loaded.config.architectures == ["ViTForImageClassification"]


def test_names_of_the_bases_classes_are_not_the_adapters(tmp_path: Path) -> None:
    """A head of the same size has classes of its own; without a head of its own, an adapter has none."""
    base = tiny_vit(tmp_path / "base", 0)
    adapter(base, tmp_path / "own")
    adapter(base, tmp_path / "none", modules_to_save=None)
    sources = resolve_family(base, {"own": tmp_path / "own", "none": tmp_path / "none"})
    assert task_heads(sources.checkpoints) == {"base": TaskHead("base", 3, CLASSES), "own": TaskHead("own", 3, None)}


def test_a_stale_configuration_of_the_base_is_not_exported(tmp_path: Path) -> None:
    """An encoder alone may state classes of a head that it lost; an export states those of the head that it has."""
    base = tiny_vit(tmp_path / "base", 0, classes=None, id2label={number: f"c{number}" for number in range(9)})
    assert len(json.loads((base / "config.json").read_text())["id2label"]) == 9
    expert = tiny_vit(tmp_path / "expert", 1, classes=("no", "yes"))
    config = json.loads((expert / "config.json").read_text())
    (expert / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "label" not in k}))
    worker = ImageWorker(open_family(base, {"expert": expert}), EngineOptions(), device="cpu")
    out = export(source_recipe(worker.engine.family, "expert", num_layers=2), worker.engine.bank, tmp_path / "out")
    assert AutoModelForImageClassification.from_pretrained(out).config.num_labels == 2


def spoil(directory: Path, **tensors: torch.Tensor | None) -> None:
    file = directory / "adapter_model.safetensors"
    changed = {f"base_model.model.classifier.{name}": tensor for name, tensor in tensors.items()}
    kept = {**load_file(file), **changed}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


def test_heads_of_adapters_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """A head must be whole and have the features' size; LoRA on a head is refused, and heads on CLIP."""
    base = tiny_vit(tmp_path / "base", 0)
    cases: dict[str, dict[str, torch.Tensor | None]] = {
        r"its head has classifier\.weight and no classifier\.bias; expected both": {"bias": None},
        r"its head has classifier\.bias and no classifier\.weight; expected both": {"weight": None},
        r"its head has weights of shape \[3, 16\]; expected \[classes, 32\]": {"weight": torch.zeros(3, 16)},
        r"its head has a bias of shape \[2\]; expected \[3\]": {"bias": torch.zeros(2)},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        adapter(base, tmp_path / str(number))
        spoil(tmp_path / str(number), **tensors)
        with pytest.raises(InvalidModel, match=message):
            open_family(base, {"tuned": tmp_path / str(number)})
    adapter(base, tmp_path / "lora", target_modules="all-linear", modules_to_save=None)
    with pytest.raises(InvalidModel, match=r"changes classifier\.weight, which are not merged; expected an adapter"):
        open_family(base, {"tuned": tmp_path / "lora"})


def test_adapters_to_both_towers_of_clip_are_refused(tmp_path: Path) -> None:
    """The message says that the text tower is not merged, and not that the base lacks it."""
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPModel

    base = tiny_clip(tmp_path / "base")
    for name, modules in {"both": ["q_proj"], "vision": r".*vision_model.*q_proj"}.items():
        model: Any = CLIPModel.from_pretrained(base)
        get_peft_model(model, LoraConfig(r=2, target_modules=modules)).save_pretrained(tmp_path / name)
    with pytest.raises(InvalidModel) as caught:
        open_family(base, {"both": tmp_path / "both"})
    assert "changes text_model.encoder.layers.0.self_attn.q_proj.weight" in str(caught.value)
    assert "which are not merged" in str(caught.value)
    assert "an adapter of another model" not in str(caught.value)
    assert open_family(base, {"vision": tmp_path / "vision"}).modality == "image"
