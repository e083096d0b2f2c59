"""Fine-tuning of image classifiers: each expert's head, the trained weights, and refused data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, ViTForImageClassification

from search_spaces.errors import InvalidStudy
from tests.builders import tiny_llama
from tests.vision import CLASSES, image_folder, image_lines, tiny_vit
from workers.errors import InvalidModel, InvalidTask
from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint, read_expert
from workers.models.family import open_family
from workers.training.finetuning.history import EXPERT, METRICS, read_history
from workers.training.finetuning.methods import make_optimizer
from workers.training.finetuning.models import load_model
from workers.training.finetuning.result import TRAINING_FILE
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.finetuning.trainer import check, train
from workers.training.mergopt.optimizer import MergOPT

pytestmark = pytest.mark.slow  # models are trained

HEAD = ("classifier.bias", "classifier.weight")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without a head, two models with heads, and images as a folder and as a JSONL file."""
    directory = tmp_path_factory.mktemp("images")
    tiny_vit(directory / "base", classes=None, initializer_range=0.02)
    tiny_vit(directory / "with_head", seed=1, initializer_range=0.02)
    tiny_vit(directory / "reversed", seed=2, classes=tuple(reversed(CLASSES)), initializer_range=0.02)
    tiny_vit(directory / "four", seed=3, classes=("a", "b", "c", "d"))
    image_folder(directory / "folder", per_class=8)
    image_lines(directory / "names.jsonl", directory / "folder")
    image_lines(directory / "indices.jsonl", directory / "folder", indices=True)
    return directory


def spec_of(place: Path, **changes: Any) -> FinetuneSpec:
    document: dict[str, Any] = {
        "name": "shapes",
        "base": "base",
        "data": {"images": "folder", "head": "with_head"},
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
    return tensors


def objective(**changes: Any) -> Mapping[str, Any]:
    return {"name": "shapes", "task": {"images": "folder", "head": "shapes", **changes}, "metric": "acc"}


@pytest.mark.parametrize("kind", ["adamw", "mergopt"])
def test_a_head_stays_as_it_is_and_the_encoder_is_trained(place: Path, tmp_path: Path, kind: str) -> None:
    run(place, tmp_path / "out", method={"kind": kind})
    expert, head = stored(tmp_path / "out" / EXPERT), stored(place / "with_head")
    for name in HEAD:
        assert torch.equal(expert[name], head[name])
    base = stored(place / "base")
    assert not any(torch.equal(expert[f"vit.{name}"], tensor) for name, tensor in base.items())


def test_the_expert_is_one_of_a_family_with_its_own_head(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out")
    family = open_family(place / "base", {"shapes": tmp_path / "out" / EXPERT})
    assert family.modality == "image"
    expert = ViTForImageClassification.from_pretrained(tmp_path / "out" / EXPERT)
    assert expert.config.id2label == dict(enumerate(CLASSES))
    settings = [
        AutoImageProcessor.from_pretrained(each).to_dict() for each in (place / "base", tmp_path / "out" / EXPERT)
    ]
    assert settings[0] == settings[1]
    document = json.loads((tmp_path / "out" / EXPERT / TRAINING_FILE).read_text())
    assert set(document["sources"]) == {"base", "data", "head"}
    assert "on folder by mergesearch" in (tmp_path / "out" / EXPERT / "README.md").read_text()
    line = read_history(tmp_path / "out" / METRICS)[0]
    assert line["images"] == 6


def test_a_new_head_is_trained(place: Path, tmp_path: Path) -> None:
    """A new head begins at 0, so that the first loss is that of equal probabilities, and is trained."""
    run(place, tmp_path / "out", data={"head": "new"})
    assert read_history(tmp_path / "out" / METRICS)[0]["loss"] == pytest.approx(torch.log(torch.tensor(3.0)))
    expert = stored(tmp_path / "out" / EXPERT)
    assert all(float(expert[name].abs().max()) > 0 for name in HEAD)


def test_replacing_a_head_gives_no_warning(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model without a head, or with a head of other classes, is loaded without warnings of transformers."""
    logger = logging.getLogger("transformers")  # hands nothing to the loggers above it
    logger.addHandler(caplog.handler)
    try:
        for base in ("base", "four"):
            run(place, tmp_path / base, base=base, data={"head": "new"})
    finally:
        logger.removeHandler(caplog.handler)
    assert not [record.message for record in caplog.records if record.name.startswith("transformers")]


@pytest.mark.parametrize("head", ["with_head", "new"])
def test_noise_is_on_what_merges_move(place: Path, head: str) -> None:
    """MergOPT's offset is on the encoder alone, also if a new head is trained; a head is not merged."""
    spec = spec_of(place, data={"head": head}, method={"kind": "mergopt", "scale": 0.01})
    model = load_model(spec, place / "base", torch.device("cpu"))
    optimizer = make_optimizer(
        spec.method, model.trained.values(), learning_rate=0.1, seed=3, model=model.module, moved=model.moved
    )
    assert isinstance(optimizer, MergOPT)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    with optimizer.offset():
        changed = {name for name, p in model.module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not name.startswith("classifier.")}
    assert set(model.trained) == (changed if head == "with_head" else set(before))


@pytest.mark.parametrize("data", [{"images": "folder"}, {"images": "names.jsonl"}, {"images": "indices.jsonl"}])
def test_folders_and_lines_train_alike(place: Path, tmp_path: Path, data: dict[str, Any]) -> None:
    run(place, tmp_path / "folder")
    run(place, tmp_path / "out", data=data)
    one, other = stored(tmp_path / "folder" / EXPERT), stored(tmp_path / "out" / EXPERT)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_labels_are_outputs_of_the_head_by_name(place: Path, tmp_path: Path) -> None:
    """The first loss is that of the head's output with the name of the class, whatever the head's order is."""
    for head in ("with_head", "reversed"):
        run(place, tmp_path / head, data={"head": head}, training={"steps": 1, "batch": 24, "micro_batch": 24})
        model = load_model(spec_of(place, data={"head": head}), place / "base", torch.device("cpu")).module
        model.eval()
        processor = AutoImageProcessor.from_pretrained(place / "base", backend="pil")
        losses = []
        for file in sorted((place / "folder").rglob("*.png")):
            logits = model(**processor(Image.open(file), return_tensors="pt")).logits[0].detach()
            right = {name: int(index) for index, name in model.config.id2label.items()}[file.parent.name]
            losses.append(float(-torch.log_softmax(logits, 0)[right]))
        found = read_history(tmp_path / head / METRICS)[0]["loss"]
        assert found == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_evaluations_are_those_of_plain_transformers(place: Path, tmp_path: Path) -> None:
    evaluation = {"every": 2, "samples": 24, "objectives": [objective()]}
    facts = run(place, tmp_path / "out", training={"steps": 12}, evaluation=evaluation)
    model = ViTForImageClassification.from_pretrained(tmp_path / "out" / EXPERT).eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out" / EXPERT, backend="pil")
    files = sorted((place / "folder").rglob("*.png"))
    logits = [model(**processor(Image.open(file), return_tensors="pt")).logits[0] for file in files]
    right = [CLASSES[int(each.argmax())] == file.parent.name for each, file in zip(logits, files, strict=True)]
    assert facts["values"] == {"shapes": sum(right) / len(right)}
    steps = [line["step"] for line in read_history(tmp_path / "out" / METRICS) if "values" in line]
    assert steps == [2, 4, 6, 8, 10, 12]
    with pytest.raises(InvalidTask, match=r"its head is that of 'other'; .* give head: shapes"):
        run(place, tmp_path / "b", evaluation={"objectives": [objective(head="other")]})


def test_tangent_experts_are_scored_as_trained_and_as_exported(place: Path, tmp_path: Path) -> None:
    facts = run(
        place,
        tmp_path / "out",
        method={"kind": "tangent"},
        training={"steps": 30, "learning_rate": 0.02},
        evaluation={"every": 30, "samples": 24, "objectives": [objective()]},
    )
    losses = [line["loss"] for line in read_history(tmp_path / "out" / METRICS) if "loss" in line]
    assert facts["linearized_values"]["shapes"] > 0.5 > losses[-1]
    assert facts["values"] != facts["linearized_values"]


def test_adapters_are_trained_with_the_bases_head(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InvalidModel, match=r"data.head: .*with_head; an adapter has no head"):
        check(spec_of(place, adapter={"rank": 2}))
    run(place, out, base="with_head", data={"head": "base"}, adapter={"rank": 2})
    names = load_file(out / EXPERT / "adapter_model.safetensors").keys()
    assert names
    assert not any("classifier" in name for name in names)
    base = open_checkpoint(place / "with_head")
    expert = read_expert(out / EXPERT, base)
    assert expert is not None
    wrapped = PeftModel.from_pretrained(ViTForImageClassification.from_pretrained(place / "with_head"), out / EXPERT)
    merged = dict(wrapped.merge_and_unload().named_parameters())
    stored_name = "vit.encoder.layer.0.attention.attention.query.weight"
    assert not torch.equal(expert.read(stored_name), base.read(stored_name))
    torch.testing.assert_close(expert.read(stored_name), merged["vit.layers.0.attention.q_proj.weight"].data)
    assert open_family(place / "with_head", {"shapes": out / EXPERT}).modality == "image"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": {"head": "base"}}, InvalidModel, r"data.head: base; .*base has no head; give a model .* or new"),
        ({"data": {"head": "four"}}, InvalidTask, r"folder: has 3 classes, the head of 'shapes' has 4"),
        ({"data": {"head": "new", "images": "indices.jsonl"}}, InvalidTask, r"labels are numbers; give data.classes"),
        ({"data": {"images": "none"}}, InvalidTask, r"none: cannot be read"),
        ({"data": {"head": "wide"}}, InvalidModel, r"wide has features of size 64; those of .*base have 32"),
        ({"data": {"images": "broken"}}, InvalidTask, r"broken/circle/000.png: is no image that Pillow can read"),
        ({"base": "llama", "data": {"head": "base"}}, InvalidTask, r"data.images: .*llama reads text; give file"),
        ({"data": {"images": None, "file": "names.jsonl", "head": "base"}}, InvalidTask, r"base reads images; give"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    place: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    if not (place / "wide").exists():
        tiny_vit(place / "wide", hidden_size=64)
        tiny_llama(place / "llama")
        image_folder(place / "broken", per_class=1)
        (place / "broken" / "circle" / "000.png").write_text("no image")
    with pytest.raises(error, match=message):
        check(spec_of(place, **changes))


def test_images_outside_the_allowed_directories_are_refused(place: Path, tmp_path: Path) -> None:
    """Lines that name files elsewhere are refused, because the specification names only their file."""
    outside = image_folder(tmp_path / "outside", per_class=1)
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    rows = [{"image": f"../outside/{name}/000.png", "label": name} for name in CLASSES]
    (allowed / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (outside / CLASSES[0] / "000.png").exists()
    spec = spec_of(place, data={"images": str(allowed / "data.jsonl")})
    check(spec)
    with pytest.raises(InvalidTask, match=r"outside/circle/000.png"):
        check(spec, access=FileAccess((str(allowed), str(place))))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"file": "a.jsonl"}, "data: give either file or dataset, or images"),
        ({"images": None, "file": "a.jsonl", "head": "new"}, "data.head: is for images; leave it out"),
        ({"images": None, "file": "a.jsonl", "head": "base", "label": "y"}, "data.label: is for images"),
    ],
)
def test_contradictions_are_refused(place: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidStudy) as refused:
        spec_of(place, data=data)
    assert message in str(refused.value)


def test_opened_experts_have_the_bases_layers(place: Path, tmp_path: Path) -> None:
    """`training.layers` are those of the encoder."""
    run(place, tmp_path / "out", training={"layers": [1]})
    expert, base = stored(tmp_path / "out" / EXPERT), stored(place / "base")
    changed = {name for name, tensor in base.items() if not torch.equal(expert[f"vit.{name}"], tensor)}
    assert changed == {name for name in base if ".layer.1." in name}
    assert open_checkpoint(tmp_path / "out" / EXPERT).layout.num_layers == 2
