"""The benchmark of image merges, at a size that takes a minute: every arm is measured, gradients are the product's."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from search_spaces.study.file import parse_study
from tests.benchmarks import arms, bench_images, image_family, search_runs
from tests.benchmarks.test_image_family import SIZES, drawn
from workers.evaluation.image_tasks import read_image_set

FULL = 12


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The benchmark with a family of made-up images that was hardly trained, and few samples, trials and steps."""
    monkeypatch.setattr(image_family, "read_images", drawn)
    monkeypatch.setattr(image_family, "SPLITS", dict.fromkeys(image_family.TASKS, SIZES))
    monkeypatch.setattr(image_family, "BASE_STEPS", 2)
    monkeypatch.setattr(image_family, "STEPS", dict.fromkeys(image_family.TASKS, 2))
    monkeypatch.setattr(arms, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(search_runs, "CACHE", tmp_path / "search")
    for name, value in {"CACHE": tmp_path / "images", "FULL": FULL, "NUM_TRIALS": 2, "GRID": (0.3,)}.items():
        monkeypatch.setattr(bench_images, name, value)
    monkeypatch.setattr(bench_images, "ADAMERGING", {**bench_images.ADAMERGING, "updates": 3, "batch": 2})
    bench_images.bench.cache_clear()
    yield tmp_path
    bench_images.bench.cache_clear()


def test_adamerging_is_the_published_one() -> None:
    """The study of the arm is accepted, and its descent has the paper's settings."""
    spec = bench_images.adamerging_spec(0)
    document = {**image_family.study_document(), **spec.document()}
    options = parse_study(document).search.gradient
    assert (options.loss, options.steps, options.batch) == ("entropy", 500, 48)
    assert (options.learning_rate, options.schedule, options.start) == (1e-3, "constant", 0.3)


def test_arms_and_searches_depend_on_the_drawn_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed code that draws search images, or another number of them, makes arms and searches older."""
    monkeypatch.setattr(bench_images.ImageBench, "fingerprint", "models")
    bench = bench_images.ImageBench(bench_images.ImageFamily())  # type: ignore[arg-type]
    spec = bench_images.adamerging_spec(0)

    def state() -> tuple[str, str]:
        return bench_images.ImageFamily().digest, bench._key(spec)

    before, source = state(), inspect.getsource(bench_images.ImageFamily)
    assert state() == before
    other = source.replace("found.order[:FULL]", "found.order[-FULL:]")
    assert other != source
    changes: dict[str, Any] = {"FULL": FULL, "inspect": SimpleNamespace(getsource=lambda _: other)}
    for name, changed in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(bench_images, name, changed)
            assert all(now != then for now, then in zip(state(), before, strict=True))
    assert state() == before


@pytest.mark.slow
def test_every_arm_is_measured(small: Path) -> None:
    """All arms read the same search images; AdaMerging and `auto` make the product's gradient steps."""
    tasks = image_family.TASKS
    found = {arm: bench_images.judged_arm(arm, 0) for arm in bench_images.ARMS}
    assert all(tuple(each.answers) == tasks for each in found.values())
    assert found["adamerging"].spent == (3 * 2 * 3 + FULL) * len(tasks)
    (run,) = (small / "search").rglob("adamerging-0.json")
    assert json.loads(run.read_text())["notes"] == [
        "gradients are used: 0 baselines are too few to compare losses with scores"
    ]
    (run,) = (small / "search").rglob("auto-0.json")
    assert any(note.startswith("gradients are") for note in json.loads(run.read_text())["notes"])
    for task in tasks:
        (file,) = (small / "images" / "search_images").glob(f"{task}-0-*.jsonl")
        assert len(read_image_set({"images": str(file), "head": task}).samples) == FULL
    with arms.files_alone():  # otherwise the table measures further seeds
        table = bench_images.arms_table()
    assert "| arm (seeds: 1) |" in table
    assert "| AdaMerging |" in table
