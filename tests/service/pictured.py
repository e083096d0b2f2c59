"""A study of images with held-out results and pictures, as a driver would have stored it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from service.store import JobWriter, SampleText, Store
from service.types import EventKind, JobRecord, TrialRecord
from tests.service.api.harness import finished_study
from tests.service.synthetic_run import EXPERTS
from workers.evaluation.image_pictures import picture_of
from workers.types import Evidence, SampleResult, ScoreResult, Split

__all__ = [
    "CLASSES",
    "NUM_PICTURES",
    "NUM_SAMPLES",
    "class_of",
    "picture",
    "pictured_study",
    "text_of",
    "write_samples",
]

CLASSES = ("cat", "dog", "bird")
# Held-out samples of each objective, and those of them that have pictures: the others could not be read.
NUM_SAMPLES, NUM_PICTURES = 20, 17


def class_of(position: int) -> str:
    return CLASSES[position % 3]


def picture(position: int) -> bytes:
    """A picture in a colour of its own."""
    made = picture_of(Image.new("RGB", (28, 28), (12 * position, 255 - 12 * position, 90)))
    assert made is not None
    return made


def pictured_study(store: Store, *, name: str = "pictures", metrics: Mapping[str, str] | None = None) -> JobRecord:
    """A COMPLETE study of images: its trials have different samples right, and most samples have pictures.

    `metrics` are the metrics of objectives by name; other objectives have the metric acc.
    """

    def tasks(split: str) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "task": {"images": f"/data/{split}/{name}", "head": name},
                "metric": (metrics or {}).get(name, "acc"),
            }
            for name in EXPERTS
        ]

    record = finished_study(store, name=name, score=write_samples, objectives=tasks("search"), holdout=tasks("holdout"))
    writer = store.open_attempt(record.id)
    for objective in EXPERTS:
        writer.add_prompts(Split.HOLDOUT, objective, [text_of(objective, position) for position in range(NUM_SAMPLES)])
    return record


def text_of(objective: str, position: int) -> SampleText:
    """File, class and picture of a held-out sample; the last samples have no picture."""
    file = f"/data/holdout/{objective}/{class_of(position)}/{position}.png"
    return SampleText(file, class_of(position), picture(position) if position < NUM_PICTURES else None)


def write_samples(writer: JobWriter, trial: TrialRecord) -> None:
    """Answers of a trial: a wrong one has another class, and each its own probability."""
    draws = np.random.default_rng(trial.number).random((len(EXPERTS), NUM_SAMPLES))

    def sample(objective: str, position: int, draw: float) -> SampleResult:
        is_right = draw < 0.6
        first = class_of(position) if is_right else class_of(position + 1)
        probability = 0.5 + draw / 2.5
        top = [(first, probability), (class_of(position + 2), 1 - probability)]
        response = json.dumps({"top": [[name, round(float(np.log(share)), 6)] for name, share in top]})
        return SampleResult(objective, position, f"{class_of(position)}/{position}.png", float(is_right), response)

    samples = tuple(
        sample(objective, position, draws[row, position])
        for row, objective in enumerate(EXPERTS)
        for position in range(NUM_SAMPLES)
    )
    prompts = {f"holdout {name}": "0" for name in EXPERTS}
    evidence = Evidence(trial.recipe.digest, "bank", prompts, "sum", "replica-1", trial.number, "torch")
    writer.record_chunk(trial.number, Split.HOLDOUT, ScoreResult(samples, evidence, {"score": 0.5, "swap": 0.02}))
    writer.add_event(EventKind.HOLDOUT_SCORED, {"trial": trial.number})
