"""Image tasks with data sets of the hub, and the named tasks of the papers' tables on vision."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from search_spaces.study.image_suites import IMAGE_SUITES, with_described_suites
from search_spaces.study.objectives import ImageTask, ObjectiveSpec
from workers.errors import InvalidTask
from workers.evaluation.image_tasks import ImageSet, load_image_task, read_image_set
from workers.evaluation.shipped_tasks import fetch, shipped_tasks
from workers.evaluation.tasks import check_task
from workers.file_access import FileAccess
from workers.models.zero_shot import check_templates, prompts_of
from workers.types import TaskSpec

LAND = IMAGE_SUITES["clip_eurosat"]


def png(seed: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


@pytest.fixture
def eurosat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in the user's own directory with 30 images, and the name and columns of EuroSAT's copy on the hub."""
    from datasets import ClassLabel, Dataset, Features, Image

    labels = [index % 10 for index in range(30)]
    names = [f"Class{index}" for index in range(10)]
    rows = {"image": [{"bytes": png(index), "path": None} for index in range(30)], "label": labels}
    made = Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(names=names)}))
    place = tmp_path / "tanganke" / "eurosat"
    place.mkdir(parents=True)
    made.to_parquet(place / "test.parquet")
    monkeypatch.setenv("MERGESEARCH_DATA", str(tmp_path))
    return place


def test_a_named_task_reads_its_data_set(eurosat: Path) -> None:
    """The task's images, classes and order come from the data set and the suite; content digests are of the images."""
    entry = {"name": "land", "task": "clip_eurosat", "metric": "acc", "split": "test[:20]"}
    (described,) = with_described_suites({"objectives": [entry]})["objectives"]
    objective = ObjectiveSpec.model_validate(described)
    assert isinstance(objective.task, ImageTask)
    assert (objective.split, objective.task.split, objective.task.head) == (None, "test[:20]", "base")
    description = objective.task.description()
    images = read_image_set(description)
    assert images.classes == LAND.classes
    assert [sample.label for sample in images.samples] == [index % 10 for index in range(20)]
    assert images.read(images.samples[7]) == png(7)
    task = load_image_task(TaskSpec(description, "acc", content=images.content))
    assert sorted(task.order) == list(range(20))
    other = read_image_set({**description, "split": "test[10:]"})
    assert other.content != images.content
    assert images.samples[3].name == "test[:20]/3"


def test_images_of_a_data_set_are_hashed_once(eurosat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study's checks read each task several times and hash its images once; other data are hashed too."""
    from datasets import load_dataset

    reads: list[int] = []
    stored = ImageSet._stored

    def counted(images: ImageSet, row: int) -> Any:
        reads.append(row)
        return stored(images, row)

    monkeypatch.setattr(ImageSet, "_stored", counted)
    task = {"images": "hub:tanganke/eurosat", "split": "test[:20]", "head": "base"}
    first = read_image_set(task).digests
    assert len(set(first)) == len(reads) == 20
    assert read_image_set(task).digests == first
    assert len(reads) == 20
    assert read_image_set({**task, "split": "test[10:]"}).digests[:10] == first[10:]
    assert len(reads) == 40
    other = load_dataset("parquet", data_files=str(eurosat / "test.parquet"), split="train").select(range(29, -1, -1))
    other.to_parquet(eurosat / "test.parquet")
    changed = read_image_set(task).digests
    assert len(reads) == 60
    assert changed[0] == hashlib.sha256(png(29)).hexdigest() != first[0]


def test_classes_default_to_those_of_the_data_set(eurosat: Path) -> None:
    images = read_image_set({"images": "hub:tanganke/eurosat", "split": "test", "head": "base"})
    assert images.classes is not None
    assert images.classes[3] == "Class3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "train"}, "train"),
        ({"label": "kind"}, "has no column 'kind'; its columns are image, label"),
        ({"classes": ["forest", "river"]}, "has other values than numbers from 0 to 1"),
    ],
)
def test_what_the_data_set_does_not_have_is_named(eurosat: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTask, match=message):
        read_image_set({"images": "hub:tanganke/eurosat", "split": "test", "head": "base", **change})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"images": "hub:a/b", "head": "base"}, r"hub:a/b has no split"),
        ({"images": "folder", "head": "base", "split": "test"}, r"only data sets of the hub .* have a split"),
        ({"images": "folder", "head": "base", "config": "x"}, r"only data sets of the hub .* have a config"),
    ],
)
def test_splits_belong_to_data_sets(task: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ObjectiveSpec.model_validate({"name": "land", "task": task, "metric": "acc"})


def test_names_near_to_a_suite_are_told() -> None:
    with pytest.raises(InvalidTask, match=r"lm-eval knows no such task; nearest are .*\bclip_mnist\b"):
        check_task(TaskSpec("clip_mnst", "acc"))


def test_suites_are_listed_and_fetched(eurosat: Path) -> None:
    """`mergesearch tasks` lists the suites, says which are here, and `fetch` finds the data without the hub."""
    listed = {task.name: task for task in shipped_tasks()}
    assert listed.keys() >= IMAGE_SUITES.keys()
    assert listed["clip_eurosat"].is_here
    assert not listed["clip_dtd"].is_here
    (found,) = fetch("clip_eurosat")
    assert (found.data, dict(found.sizes)) == ("tanganke/eurosat", {"test": 30})


def test_every_suite_makes_prompts() -> None:
    """Templates have one place for the class; suites with named classes name each once; HM3 has eight, MergOPT ten."""
    assert len(IMAGE_SUITES) == 10
    assert sum("HM3" in suite.paper for suite in IMAGE_SUITES.values()) == 8
    for name, suite in IMAGE_SUITES.items():
        check_templates(suite.templates, where=name)
        assert len(set(suite.templates)) == len(suite.templates)
        assert suite.classes is None or len(set(suite.classes)) == len(suite.classes)
    assert prompts_of(("river",), LAND.templates)[0][2] == "a centered satellite photo of the river."
    counts = {name: len(suite.classes or ()) for name, suite in IMAGE_SUITES.items() if suite.classes}
    assert counts == {"clip_eurosat": 10, "clip_svhn": 10, "clip_gtsrb": 43, "clip_mnist": 10, "clip_pcam": 2}


@pytest.mark.parametrize("name", ["imagefolder", "../eurosat", "/etc", "a/b/c", "~/x", "./x/y"])
def test_only_names_of_the_hub_are_data_sets(name: str) -> None:
    with pytest.raises(InvalidTask, match="is not the name of a data set of the hub"):
        read_image_set({"images": f"hub:{name}", "split": "test", "head": "base"})


def test_a_directory_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "files").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidTask, match="is not the name of a data set of the hub"):
        read_image_set({"images": "hub:own/files", "split": "test", "head": "base"})


def test_a_data_set_cannot_name_files_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limited access, paths in an image column are not opened, and neither are files that a README names."""
    from datasets import ClassLabel, Dataset, Features, Image

    secret = tmp_path / "secret.png"
    secret.write_bytes(png(0))
    rows = {"image": [{"bytes": None, "path": str(secret)}], "label": [0]}
    made = Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(names=["a"])}))
    place = tmp_path / "data" / "own" / "paths"
    place.mkdir(parents=True)
    made.to_parquet(place / "test.parquet")
    monkeypatch.setenv("MERGESEARCH_DATA", str(tmp_path / "data"))
    description = {"images": "hub:own/paths", "split": "test", "head": "base"}
    free = read_image_set(description)
    assert free.rows[0]["image"]["bytes"] is None, "the path is what is stored"
    assert free.read(free.samples[0]) == png(0)
    limited = read_image_set(description, FileAccess(readable=(str(tmp_path / "data"),)))
    with pytest.raises(InvalidTask, match="does not contain the image itself"):
        limited.read(limited.samples[0])
    outside = tmp_path / "outside.parquet"
    (place / "test.parquet").rename(outside)
    (place / "README.md").write_text(
        f"---\nconfigs: [{{config_name: default, data_files: [{{split: test, path: {outside}}}]}}]\n---\n"
    )
    with pytest.raises(InvalidTask):
        read_image_set(description, FileAccess(readable=(str(tmp_path / "data"),)))


def test_slices_of_data_that_are_sorted_by_class_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import ClassLabel, Dataset, Features, Image

    rows = {"image": [{"bytes": png(n), "path": None} for n in range(20)], "label": [n // 2 for n in range(20)]}
    made = Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(names=list("abcdefghij"))}))
    place = tmp_path / "own" / "sorted"
    place.mkdir(parents=True)
    made.to_parquet(place / "test.parquet")
    monkeypatch.setenv("MERGESEARCH_DATA", str(tmp_path))
    with pytest.raises(InvalidTask, match="images of 7 of 10 classes, so the data seem to be sorted"):
        read_image_set({"images": "hub:own/sorted", "split": "test[:70%]", "head": "base"})
