"""Image processors: files as they are published, and settings that do not fit the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.vision import image_folder, tiny_clip, tiny_vit
from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.image_tasks import IMAGE_TASKS
from workers.models.checkpoints import open_checkpoint
from workers.models.family import open_family, resolve_family
from workers.models.image_processors import check_processor, needed_size
from workers.types import TaskSpec

MEAN = [0.48145466, 0.4578275, 0.40821073]

# As the models of OpenAI and Google have them on the hub, but for the size.
PUBLISHED: dict[str, dict[str, Any]] = {
    "clip": {
        "crop_size": 28,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": MEAN,
        "image_std": MEAN,
        "resample": 3,
        "size": 28,
    },
    "vit": {"do_normalize": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 28},
}

WRONG: dict[str, tuple[Any, str]] = {
    "other size": (
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 14, "width": 14}},
        "gives images of 14 x 14 for one of 29 x 59, config.json states image_size 28; expected 28 x 28 for every",
    ),
    "one edge": (
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "do_center_crop": False},
        "gives images of 28 x 56 for one of 29 x 59",
    ),
    "no object": ([], "its image processor cannot be loaded: "),
    "no numbers": (
        {"image_processor_type": "ViTImageProcessor", "size": {"height": "28", "width": "28"}},
        "its image processor cannot read images: ",
    ),
}


FIXED = {"image_processor_type": "ViTImageProcessor", "do_resize": False, "size": {"height": 28, "width": 28}}


def with_settings(directory: Path, settings: Any) -> Path:
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_settings_are_read(kind: str, tmp_path: Path) -> None:
    make = {"clip": tiny_clip, "vit": tiny_vit}[kind]
    check_processor(with_settings(make(tmp_path), PUBLISHED[kind]))


def test_processors_that_do_not_resize_need_images_of_one_size(tmp_path: Path) -> None:
    """Such a processor is accepted; an image of another size is named before anything is scored."""
    base = with_settings(tiny_vit(tmp_path / "base"), FIXED)
    check_processor(base)
    assert needed_size(base) == 28
    expert = tiny_vit(tmp_path / "expert", 1)
    assert needed_size(expert) is None
    (expert / "preprocessor_config.json").unlink()
    sources = resolve_family(base, {"a": expert})
    folder = image_folder(tmp_path / "images", per_class=2)
    spec = TaskSpec({"images": str(folder), "head": "a"}, "acc")
    IMAGE_TASKS.check_models(spec, sources)
    Image.new("RGB", (30, 28)).save(folder / "line" / "000.png")
    message = r"line/000\.png: has 28 x 30 pixels; expected 28 x 28, because the base's image processor does not resize"
    with pytest.raises(InvalidTask, match=message):
        IMAGE_TASKS.check_models(spec, sources)


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    """The processor is tried on an image that is not square; the result must have the size that the model reads."""
    settings, message = WRONG[case]
    with pytest.raises(InvalidModel, match=re.escape(message)):
        check_processor(with_settings(tiny_vit(tmp_path), settings))


def test_models_of_gray_images_are_refused(tmp_path: Path) -> None:
    """Images are read with three channels, so a model of one channel is refused before anything starts."""
    with pytest.raises(InvalidModel, match=r"num_channels is 1; expected 3, because images are read in color \(RGB\)"):
        open_family(tiny_vit(tmp_path / "base", num_channels=1), {"a": tiny_vit(tmp_path / "a", 1, num_channels=1)})


def test_pickles_are_converted_by_the_class_of_the_model(tmp_path: Path) -> None:
    """The message about pickles names the class that config.json states, which loads more than text models."""
    base = tiny_clip(tmp_path)
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(InvalidModel, match=r"`CLIPModel\.from_pretrained\(DIR, dtype='auto'\)\.save_pretrained"):
        open_checkpoint(base)


@pytest.mark.parametrize("tower", [None, "x", [1]])
def test_a_clip_model_without_a_vision_tower_is_refused(tower: Any, tmp_path: Path) -> None:
    base = tiny_clip(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "vision_config": tower}))
    message = f"config.json: vision_config is {tower!r}; expected the configuration of the clip_vision_model"
    with pytest.raises(InvalidModel, match=re.escape(message)):
        open_family(base, {"a": tiny_clip(tmp_path / "a", 1)})
