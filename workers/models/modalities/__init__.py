"""Modalities: the kinds of data that models read, text and images, with one declaration for each.

A declaration states the model types of the modality, the layout of their tensors, the tensors of task heads, the files
besides weights that define a model, the worker that scores models, and the reader of evaluation tasks. All other code
uses the declaration, and does not compare a modality's name.

- `base`: `Modality`, the declaration
- `text`: decoder-only language models
- `image`: image classifiers

`MODALITIES` has the declarations, keyed by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.models.modalities.base import Modality
from workers.models.modalities.image import IMAGE
from workers.models.modalities.text import TEXT

__all__ = ["IMAGE", "MODALITIES", "TEXT", "Modality", "modality_at", "modality_of", "modality_of_task"]

MODALITIES: Mapping[str, Modality] = {modality.name: modality for modality in (TEXT, IMAGE)}


def modality_of(config: Mapping[str, Any]) -> Modality:
    """The modality of a model, by the field `model_type` of its config.json; text if no other modality declares it."""
    kind = str(config.get("model_type"))
    return next((each for each in MODALITIES.values() if kind in each.model_types), TEXT)


def modality_at(directory: str | Path) -> Modality:
    """The modality of the model in `directory`; text if its config.json cannot be read."""
    try:
        config = json.loads((Path(directory) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return TEXT
    return modality_of(config) if isinstance(config, dict) else TEXT


def modality_of_task(task: str | Mapping[str, Any]) -> Modality:
    """The modality of an evaluation task, which is a registered name (always text) or a description.

    In a description, the key that names the data determines the modality.
    """
    if isinstance(task, str):
        return TEXT
    return next((each for each in MODALITIES.values() if each.task_key is not None and each.task_key in task), TEXT)
