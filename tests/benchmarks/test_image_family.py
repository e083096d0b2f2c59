"""Tests of the image family's script: disjoint splits, and files that studies and fine-tunings accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from search_spaces.study.file import load_study
from search_spaces.study.objectives import ImageTask
from tests.benchmarks import image_family
from tests.benchmarks.image_family import (
    CLASSES,
    Images,
    build_family,
    finetune_document,
    forgetting,
    split_images,
    write_images,
)
from workers.evaluation.image_tasks import read_image_set
from workers.models.family import open_family
from workers.training.finetuning.fleet import load_pipeline

SIZES = {"holdout": 60, "search": 60, "validation": 60}


def drawn(task: str, *, num: int = 240) -> Images:
    """Images of ten classes that differ in the rows that are bright."""
    random = np.random.default_rng(len(task))
    labels = np.arange(num) % 10
    pixels = random.integers(0, 80, (num, 28, 28), dtype=np.uint8)
    for index, label in enumerate(labels):
        pixels[index, 2 * label : 2 * label + 4] += 150
    return Images(pixels, labels.astype(np.int64))


def test_splits_have_no_image_in_common() -> None:
    images = drawn("mnist")
    twice = Images(np.concatenate([images.pixels] * 2), np.concatenate([images.labels] * 2))
    splits = split_images("mnist", twice, sizes=SIZES)
    assert {name: len(each) for name, each in splits.items()} == {**SIZES, "train": 240 - sum(SIZES.values())}
    seen = [each.tobytes() for split in splits.values() for each in split.pixels]
    assert len(set(seen)) == len(seen)
    again = split_images("mnist", twice, sizes=SIZES)
    assert {name: each.digest for name, each in again.items()} == {name: each.digest for name, each in splits.items()}
    other = split_images("mnist", twice, sizes=SIZES, seed=1)
    assert other["train"].digest != splits["train"].digest


def test_written_images_are_those_of_a_task(tmp_path: Path) -> None:
    images = drawn("fashion", num=6)
    write_images("fashion", {"search": images}, tmp_path)
    found = read_image_set({"images": str(tmp_path / "fashion_search.jsonl"), "head": "fashion"})
    assert [found.class_of(sample) for sample in found.samples] == [CLASSES["fashion"][i] for i in images.labels]


@pytest.mark.slow
def test_the_family_is_made_and_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base, heads, specification and studies are written, and the experts are trained in the process."""
    monkeypatch.setattr(image_family, "read_images", drawn)
    monkeypatch.setattr(image_family, "SPLITS", dict.fromkeys(image_family.TASKS, SIZES))
    monkeypatch.setattr(image_family, "BASE_STEPS", 2)
    monkeypatch.setattr(image_family, "STEPS", dict.fromkeys(image_family.TASKS, 2))
    facts = build_family(tmp_path / "family", train=image_family.train_here)
    assert set(facts["validation"]) == {"base", *image_family.TASKS}
    assert json.loads((tmp_path / "family" / "family.json").read_text())["splits"] == facts["splits"]
    places = load_pipeline(tmp_path / "family" / "finetune.yaml").places(tmp_path / "family" / "training")
    family = open_family(tmp_path / "family" / "base", {alias: place / "model" for alias, place in places.items()})
    assert family.modality == "image"
    for name in ("study.yaml", "lfs.yaml"):
        study = load_study(tmp_path / "family" / name)
        assert set(study.models.named) == set(image_family.TASKS)
        places_of_images = {
            Path(spec.task.place).parent for _, spec in study.with_tasks() if isinstance(spec.task, ImageTask)
        }
        assert places_of_images == {tmp_path / "family" / "tasks"}


def test_an_expert_that_forgets_nothing_is_named() -> None:
    values = {
        "base": {"mnist": 0.7, "fashion": 0.7, "digits": 0.7},
        "mnist": {"mnist": 0.9, "fashion": 0.6, "digits": 0.7},
        "fashion": {"mnist": 0.6, "fashion": 0.9, "digits": 0.6},
        "digits": {"mnist": 0.6, "fashion": 0.6, "digits": 0.9},
    }
    assert forgetting({"validation": values}) == ["mnist on digits"]


def test_the_specification_is_read(tmp_path: Path) -> None:
    for task in image_family.TASKS:
        (tmp_path / "heads" / task).mkdir(parents=True)
    document: dict[str, Any] = finetune_document(method={"kind": "mergopt", "scale": 0.001})
    (tmp_path / "finetune.yaml").write_text(yaml.safe_dump(document))
    pipeline = load_pipeline(tmp_path / "finetune.yaml")
    assert {spec.data.head for spec in pipeline.experts.values()} == {
        str(tmp_path / "heads" / task) for task in image_family.TASKS
    }
