"""Losses of merges of image experts equal those of plain transformers, on both halves of each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, ViTForImageClassification

from search_spaces.recipe import Merge, Source
from service.results.training import analyse
from tests.vision import CLASSES, image_folder, image_lines, tiny_vit
from workers.errors import InvalidTask
from workers.evaluation.image_tasks import load_image_task
from workers.training.finetuning.fleet import parse_pipeline
from workers.training.finetuning.image_merge_losses import ImageMergeLosses
from workers.training.finetuning.task_vectors import accumulated_vector, task_vector
from workers.training.finetuning.trainer import train
from workers.types import TaskSpec

pytestmark = pytest.mark.slow  # models are trained


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base without a head, two experts with heads, and images."""
    directory = tmp_path_factory.mktemp("merges")
    tiny_vit(directory / "base", classes=None, initializer_range=0.02)
    for seed, name in enumerate(("left", "right"), start=1):
        tiny_vit(directory / name, seed, initializer_range=0.02)
        image_folder(directory / f"{name}-images", per_class=7, seed=seed)
    return directory


def task(place: Path, name: str) -> TaskSpec:
    return TaskSpec({"images": str(place / f"{name}-images"), "head": name}, metric="acc")


def losses(place: Path, *, samples: int = 4) -> ImageMergeLosses:
    names = ("left", "right")
    return ImageMergeLosses(
        place / "base",
        {name: place / name for name in names},
        {name: [task(place, name)] for name in names},
        samples=samples,
    )


def plain(place: Path, weights: dict[str, float], name: str, start: int, stop: int) -> tuple[float, float]:
    """Mean loss and accuracy, in plain transformers, of the base plus weighted task vectors with the expert's head."""
    base = ViTForImageClassification.from_pretrained(place / "base").state_dict()
    experts = {alias: ViTForImageClassification.from_pretrained(place / alias).state_dict() for alias in weights}
    model = ViTForImageClassification.from_pretrained(place / name).eval()
    merged = {
        key: tensor + sum(weight * (experts[alias][key] - tensor) for alias, weight in weights.items())
        for key, tensor in base.items()
        if not key.startswith("classifier")
    }
    model.load_state_dict(merged, strict=False)
    processor = AutoImageProcessor.from_pretrained(place / "base", backend="pil")
    found = load_image_task(task(place, name))
    total, right = 0.0, 0
    for index in found.order[start:stop]:
        sample = found.images.samples[index]
        logits = model(**processor(Image.open(sample.file), return_tensors="pt")).logits[0].detach()
        label = CLASSES.index(found.images.class_of(sample))
        total -= float(logits.log_softmax(0)[label])
        right += int(logits.argmax()) == label
    return total / (stop - start), right / (stop - start)


def test_losses_of_merges_are_those_of_transformers(place: Path) -> None:
    measured = losses(place)
    weights = {"left": 0.3, "right": 0.6}
    merge = Merge("task_arithmetic", tuple(map(Source, weights)), {"lambda": tuple(weights.values())})
    chosen_by, report = measured.of(merge), measured.report(merge)
    for name in weights:
        assert chosen_by[name] == pytest.approx(plain(place, weights, name, 0, 4)[0], rel=1e-4)
        loss, value = plain(place, weights, name, 4, 8)
        assert report.losses[name] == pytest.approx(loss, rel=1e-4)
        assert report.values[name] == value


def test_losses_are_measured_on_the_cpu(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The analysis runs in the process of a driver, which has reserved no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    measured = losses(place)
    found = measured.of(Merge("linear", (Source("left"), Source("right")), {"weight": 0.5}))
    assert set(found) == {"left", "right"}


def test_a_short_task_gives_half_of_its_images_to_each(place: Path) -> None:
    measured = losses(place, samples=100)
    merge = Merge("linear", (Source("left"), Source("right")), {"weight": 0.5})
    weights = {"left": 0.5, "right": 0.5}
    assert measured.of(merge)["left"] == pytest.approx(plain(place, weights, "left", 0, 10)[0], rel=1e-4)
    assert measured.report(merge).losses["left"] == pytest.approx(plain(place, weights, "left", 10, 21)[0], rel=1e-4)


def test_a_single_image_is_refused(place: Path, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images", per_class=1)
    line = image_lines(tmp_path / "all.jsonl", folder).read_text().splitlines()[0]
    (tmp_path / "one.jsonl").write_text(line + "\n")
    one = TaskSpec({"images": str(tmp_path / "one.jsonl"), "head": "left", "classes": list(CLASSES)}, metric="acc")
    with pytest.raises(InvalidTask, match=r"one.jsonl: has 1 image; expected at least 2"):
        ImageMergeLosses(place / "base", {"left": place / "left"}, {"left": [one]}, samples=4)


def test_heads_are_no_part_of_task_vectors(place: Path, tmp_path: Path) -> None:
    """Base and experts may have heads of any classes: merges leave them out, and so do task vectors."""
    base = tiny_vit(tmp_path / "base", classes=("a", "b", "c"), initializer_range=0.02)
    experts = [
        tiny_vit(tmp_path / str(seed), seed, classes=classes, initializer_range=0.02)
        for seed, classes in ((1, ("a", "b")), (2, ("a", "b", "c")))
    ]
    encoders = tiny_vit(tmp_path / "encoder", classes=None, initializer_range=0.02)
    numbers = sum(p.numel() for p in ViTForImageClassification.from_pretrained(encoders).vit.parameters())
    assert accumulated_vector(base, experts).fits[0].num_elements <= numbers
    for expert in experts:
        assert task_vector("one", base, expert).fits[0].num_elements <= numbers


def test_an_analysis_of_image_experts(place: Path, tmp_path: Path) -> None:
    """A fleet of image experts gets task vectors, a landscape of losses, and merges by each method."""

    def own(name: str) -> dict[str, Any]:
        images = {"images": f"{name}-images", "head": name}
        return {
            "data": {"images": f"{name}-images", "head": name},
            "evaluation": {"objectives": [{"name": name, "task": images, "metric": "acc"}]},
        }

    document = {
        "name": "two",
        "base": "base",
        "method": {"kind": "adamw"},
        "training": {"steps": 2, "batch": 4, "learning_rate": 0.003},
        "dtype": "float32",
        "experts": {name: own(name) for name in ("left", "right")},
    }
    pipeline = parse_pipeline(document, place)
    places = pipeline.places(tmp_path)
    for alias, spec in pipeline.experts.items():
        places[alias].mkdir(parents=True)
        train(spec, places[alias])
    found = json.loads(json.dumps(analyse([(pipeline.experts, places)], samples=5)))
    (fleet,) = found["fleets"]
    assert [vector["expert"] for vector in fleet["task_vectors"]] == ["left", "right"]
    assert len(fleet["landscape"]["losses"]) == 11
    assert {"task arithmetic", "TIES"} <= {row["method"] for row in fleet["merges"]}
    assert all(0 <= row["value"] <= 1 and row["mean"] > 0 for row in fleet["merges"])
    assert fleet["accumulated"]["fits"]
