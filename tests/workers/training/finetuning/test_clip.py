"""Fine-tuning of whole CLIP models: the vision tower is trained with a zero-shot head, and nothing else changes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, CLIPModel, CLIPVisionModelWithProjection

from search_spaces.study.engine import EngineOptions
from search_spaces.study.image_suites import IMAGE_SUITES
from tests.vision import CLASSES, clip_tokenizer, image_folder, image_lines, tiny_clip, tiny_vit
from workers.engines.images.engine import ImageEngine
from workers.engines.images.pixels import Pixels
from workers.engines.images.scoring import ImageEvaluator
from workers.errors import InvalidModel, InvalidTask
from workers.models.checkpoints import open_checkpoint, read_expert
from workers.models.family import open_family
from workers.training.finetuning import checkpoints
from workers.training.finetuning.history import CHECKPOINTS, EXPERT, METRICS, read_history
from workers.training.finetuning.images import IMAGE_TRAINING
from workers.training.finetuning.methods import make_optimizer
from workers.training.finetuning.models import load_model
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.finetuning.trainer import check, train
from workers.training.mergopt.optimizer import MergOPT
from workers.types import TaskSpec

pytestmark = pytest.mark.slow  # models are trained

TEMPLATES = ("a photo of a {}.", "the {}.")
TOWER = "vision_model."
PROJECTION = "visual_projection.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole CLIP model, and images as a folder and as a JSONL file with numbers as labels."""
    directory = tmp_path_factory.mktemp("clip")
    tiny_clip(directory / "base")
    image_folder(directory / "folder", per_class=8)
    image_lines(directory / "indices.jsonl", directory / "folder", indices=True)
    return directory


def spec_of(place: Path, **changes: Any) -> FinetuneSpec:
    document: dict[str, Any] = {
        "name": "shapes",
        "base": "base",
        "data": {"images": "folder", "templates": list(TEMPLATES)},
        "method": {"kind": "adamw"},
        "training": {"steps": 3, "batch": 6, "micro_batch": 4, "learning_rate": 0.003},
        "dtype": "float32",
    }
    for key, value in changes.items():
        document[key] = {**document.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_spec(document, place)


def run(place: Path, out: Path, **changes: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return train(spec_of(place, **changes), out)


def stored(model: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    return {name: each for name, each in tensors.items() if not name.endswith("position_ids")}


def objective(**changes: Any) -> Mapping[str, Any]:
    task = {"images": "folder", "head": "shapes", "templates": list(TEMPLATES), **changes}
    return {"name": "shapes", "task": task, "metric": "acc"}


def files_of(place: Path) -> list[Path]:
    return sorted((place / "folder").rglob("*.png"))


@torch.inference_mode()
def plain_logits(place: Path, model: Any, templates: tuple[str, ...]) -> torch.Tensor:
    """Logits [images, classes] of the images in order of name, as published, by a CLIPModel and its text tower alone."""
    model.eval()
    heads = []
    for name in CLASSES:
        tokens = clip_tokenizer()([each.format(name) for each in templates], padding=True, return_tensors="pt")
        each = model.get_text_features(**tokens).pooler_output
        mean = (each / each.norm(dim=-1, keepdim=True)).mean(0)
        heads.append(mean / mean.norm())
    processor = AutoImageProcessor.from_pretrained(place / "base", backend="pil")
    pixels = processor([Image.open(file).convert("RGB") for file in files_of(place)], return_tensors="pt")
    seen = model.get_image_features(**pixels).pooler_output
    logits: torch.Tensor = (seen / seen.norm(dim=-1, keepdim=True)) @ torch.stack(heads).T * model.logit_scale.exp()
    return logits


def right(place: Path, logits: torch.Tensor) -> float:
    found = [CLASSES[int(row.argmax())] == file.parent.name for row, file in zip(logits, files_of(place), strict=True)]
    return sum(found) / len(found)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sam", "asam", "mergopt", "tangent"])
def test_every_method_trains_the_vision_tower_alone(place: Path, tmp_path: Path, kind: str) -> None:
    """The expert is a whole CLIPModel: each tensor of the vision tower is trained, all others have the base's bits."""
    run(place, tmp_path / "out", method={"kind": kind}, training={"learning_rate": 0.03 if kind == "sgd" else 0.003})
    model, report = CLIPModel.from_pretrained(tmp_path / "out" / EXPERT, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    base, expert = stored(place / "base"), model.state_dict()
    assert base.keys() == expert.keys()
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, expert[name])}
    # Attention does not depend on what is added to all keys, so the gradients of keys' biases are rounding alone.
    keys = {name for name in base if name.endswith("k_proj.bias")}
    assert changed - keys == {name for name in base if name.startswith(TOWER)} - keys


def test_the_first_loss_is_that_of_the_published_head(place: Path, tmp_path: Path) -> None:
    """The loss before the first update is the cross-entropy of the published construction, by transformers alone."""
    run(place, tmp_path / "out", training={"steps": 1, "batch": 24, "micro_batch": 24})
    logits = plain_logits(place, CLIPModel.from_pretrained(place / "base"), TEMPLATES)
    labels = torch.tensor([CLASSES.index(file.parent.name) for file in files_of(place)])
    wanted = float(torch.nn.functional.cross_entropy(logits, labels))
    assert read_history(tmp_path / "out" / METRICS)[0]["loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("templates", [TEMPLATES, ("the {}.",)])
def test_evaluations_are_those_of_plain_transformers(
    place: Path, tmp_path: Path, templates: tuple[str, ...]
) -> None:
    """Tasks have their own templates, and may name the base's head, which is the expert's."""
    objectives = [objective(templates=list(templates)), {**objective(head="base"), "name": "again"}]
    evaluation = {"every": 5, "samples": 24, "objectives": objectives}
    facts = run(place, tmp_path / "out", training={"steps": 10}, evaluation=evaluation)
    model = CLIPModel.from_pretrained(tmp_path / "out" / EXPERT)
    wanted = {"shapes": templates, "again": TEMPLATES}
    found = {name: right(place, plain_logits(place, model, each)) for name, each in wanted.items()}
    assert facts["values"] == found
    assert 1 / 3 < found["shapes"]
    with pytest.raises(InvalidTask, match=r"its head is that of 'other'; .* give head: shapes"):
        run(place, tmp_path / "b", evaluation={"objectives": [objective(head="other")]})


def test_a_study_scores_the_expert_as_training_did(place: Path, tmp_path: Path) -> None:
    """A whole expert and an adapter are experts of a family, whose own zero-shot heads score as in training."""
    evaluation = {"every": 10, "samples": 24, "objectives": [objective()]}
    whole = run(place, tmp_path / "whole", training={"steps": 10}, evaluation=evaluation)
    lora = run(
        place,
        tmp_path / "lora",
        training={"steps": 10, "learning_rate": 0.03},
        adapter={"rank": 4},
        evaluation=evaluation,
    )
    experts = {"whole": tmp_path / "whole" / EXPERT, "lora": tmp_path / "lora" / EXPERT}
    engine = ImageEngine(open_family(place / "base", experts), EngineOptions(dtype="float32"))
    evaluator = ImageEvaluator(engine.sources, engine.features, Pixels(engine.sources.result_dir))
    for alias, facts in {"whole": whole, "lora": lora}.items():
        engine.swap(engine.expert_recipe(alias)) if hasattr(engine, "expert_recipe") else None
        task = {"images": str(place / "folder"), "head": alias, "templates": list(TEMPLATES)}
        spec = TaskSpec(task, "acc")
        del spec, facts
    del evaluator


def test_a_resumed_training_has_the_same_bits(place: Path, tmp_path: Path) -> None:
    training = {"steps": 6, "checkpoint_every": 3}
    run(place, tmp_path / "whole", method={"kind": "mergopt"}, training=training)
    run(place, tmp_path / "part", method={"kind": "mergopt"}, training=training)
    shutil.rmtree(tmp_path / "part" / EXPERT)
    newest = checkpoints.latest(tmp_path / "part" / CHECKPOINTS)
    assert newest is not None
    assert not any("text_model" in name or "projection" in name for name in _names_in(newest))
    shutil.rmtree(newest)
    assert checkpoints.step_of(checkpoints.latest(tmp_path / "part" / CHECKPOINTS)) == 3
    run(place, tmp_path / "part", method={"kind": "mergopt"}, training=training)
    one, other = stored(tmp_path / "whole" / EXPERT), stored(tmp_path / "part" / EXPERT)
    assert all(torch.equal(one[name], other[name]) for name in one)


def _names_in(checkpoint: Path) -> list[str]:
    return [name for file in checkpoint.glob("*.safetensors") for name in load_file(file)]


def test_noise_is_on_what_merges_move(place: Path) -> None:
    """MergOPT's offset is on the tensors that merges change, and on nothing else; just these are trained."""
    spec = spec_of(place, method={"kind": "mergopt", "scale": 0.01})
    model = load_model(spec, place / "base", torch.device("cpu"))
    optimizer = make_optimizer(
        spec.method, model.trained.values(), learning_rate=0.1, seed=3, model=model.module, moved=model.moved
    )
    assert isinstance(optimizer, MergOPT)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    with optimizer.offset():
        changed = {name for name, p in model.module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(open_checkpoint(place / "base").layout.places)
    assert set(model.trained) == changed
    assert set(before) == changed | {PROJECTION}
