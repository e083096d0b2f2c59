"""Small pictures of images: they show the image, are small, and hold nothing else of its file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from tests.vision import image_folder
from workers.evaluation.image_pictures import MAX_BYTES, SIDE, picture_of, pictures_of
from workers.evaluation.image_tasks import ImageTask, load_image_task
from workers.types import TaskSpec


def opened(picture: bytes | None) -> Any:
    assert picture is not None
    image = Image.open(io.BytesIO(picture))
    assert image.format == "WEBP"
    return image


def noise(width: int, height: int) -> Any:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def task(tmp_path: Path) -> ImageTask:
    folder = image_folder(tmp_path / "data", per_class=3)
    return load_image_task(TaskSpec(task={"images": str(folder), "head": "any"}, metric="acc", permutation_seed=3))


def test_pictures_of_small_images_have_every_pixel(task: ImageTask) -> None:
    """They are in the order of scoring, and without loss."""
    found = pictures_of(task, 2, 7)
    assert len(found) == 5
    for picture, index in zip(found, task.order[2:7], strict=True):
        with Image.open(task.images.samples[index].file) as image:
            assert np.array_equal(np.asarray(opened(picture).convert("RGB")), np.asarray(image.convert("RGB")))
    assert pictures_of(task, 8, 100) == pictures_of(task, 8, 9) != ()


@pytest.mark.parametrize(("size", "wanted"), [((600, 300), (112, 56)), ((60, 90), (60, 90)), ((4000, 1), (112, 1))])
def test_pictures_are_small(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    """Large images become smaller, in their proportions; none grows, and none has more than MAX_BYTES."""
    picture = picture_of(noise(*size))
    assert picture is not None
    assert opened(picture).size == wanted
    assert max(wanted) <= SIDE
    assert len(picture) <= MAX_BYTES


def test_a_picture_of_too_many_bytes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quality is lowered until a picture fits; without one that fits there is none."""
    whole = picture_of(noise(100, 100))
    assert whole is not None
    monkeypatch.setattr("workers.evaluation.image_pictures.MAX_BYTES", len(whole) - 1)
    smaller = picture_of(noise(100, 100))
    assert smaller is not None
    assert len(smaller) < len(whole)
    monkeypatch.setattr("workers.evaluation.image_pictures.MAX_BYTES", 100)
    assert picture_of(noise(100, 100)) is None


def test_a_large_image_is_held_once() -> None:
    """Images near Pillow's limit have hundreds of MB: a picture is made without a copy of the image."""
    image = noise(600, 300)
    picture = picture_of(image)
    assert image.size == opened(picture).size == (112, 56)


def test_images_that_are_gone_or_broken_have_none(task: ImageTask) -> None:
    first, second = (task.images.samples[index].file for index in task.order[:2])
    first.unlink()
    second.write_bytes(b"\x89PNG")
    found = pictures_of(task, 0, 3)
    assert [picture is None for picture in found] == [True, True, False]


def test_pictures_hold_no_metadata(task: ImageTask) -> None:
    """Texts, EXIF, colour profiles and trailing bytes of the file, such as a place, are not in the picture."""
    file = task.images.samples[task.order[0]].file
    text, exif = PngImagePlugin.PngInfo(), Image.Exif()
    text.add_text("Author", "SECRET")
    exif[0x010E] = "SECRET"
    with Image.open(file) as image:
        image.copy().save(file, "PNG", pnginfo=text, exif=exif, icc_profile=b"SECRET")
    file.write_bytes(file.read_bytes() + b"SECRET")
    assert file.read_bytes().count(b"SECRET") == 3
    (picture,) = pictures_of(task, 0, 1)
    assert picture is not None
    assert b"SECRET" not in picture
    assert dict(opened(picture).getexif()) == {}
