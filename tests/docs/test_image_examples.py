"""The examples of image classifiers are accepted with a family as `make image-family` makes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.cli.main import main
from tests.benchmarks import image_family
from tests.benchmarks.image_family import TASKS, Images, build_family, train_here
from workers.training.finetuning.fleet import load_pipeline
from workers.training.finetuning.trainer import check

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "images"
MADE = "../../../runs/image-family"  # where the examples expect the family
STUDIES = sorted(file.name for file in EXAMPLES.glob("*.yaml") if file.name != "finetune.yaml")

pytestmark = pytest.mark.slow  # models are trained


def drawn(task: str) -> Images:
    """Random images of ten classes."""
    random = np.random.default_rng(len(task))
    return Images(random.integers(0, 256, (1100, 28, 28), dtype=np.uint8), np.arange(1100) % 10)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family in the form of the script's, with noise as images and models that have hardly been trained."""
    place = tmp_path_factory.mktemp("image-family")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_family, "read_images", drawn)
        sizes = {"holdout": 300, "search": 300, "validation": 300}
        patch.setattr(image_family, "SPLITS", dict.fromkeys(TASKS, sizes))
        patch.setattr(image_family, "BASE_STEPS", 1)
        patch.setattr(image_family, "STEPS", dict.fromkeys(TASKS, 1))
        build_family(place, train=train_here)
    return place


def of_family(name: str, family: Path, directory: Path) -> Path:
    """Copy of an example that names the models and images of `family`."""
    text = (EXAMPLES / name).read_text()
    assert MADE in text
    copy = directory / name
    copy.write_text(text.replace(MADE, str(family)))
    return copy


@pytest.mark.parametrize("name", STUDIES)
def test_an_image_study_is_accepted(
    name: str, family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["run", str(of_family(name, family, tmp_path)), "--out", str(tmp_path / "run"), "--check"])
    printed, errors = capsys.readouterr()
    assert (code, errors) == (0, "")
    assert ": nothing is wrong with it\n" in printed
    assert "base + 3 experts" in printed


def test_there_are_image_studies() -> None:
    assert {"auto.yaml", "layerwise.yaml", "lfs.yaml"} <= set(STUDIES)


def test_the_image_fine_tuning_is_accepted(family: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(of_family("finetune.yaml", family, tmp_path))
    assert set(pipeline.experts) == set(TASKS)
    for spec in pipeline.experts.values():
        check(spec)
