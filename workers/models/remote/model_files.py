"""Selection of a model's files from the file names that the hub or an object store lists."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from workers.models.headers import PICKLES
from workers.models.modalities import MODALITIES

__all__ = ["NEEDED_FILES", "SMALL_FILES", "pickles", "weight_files"]

# The beginnings of file names of whole models and of adapters.
STEMS = ("model", "adapter_model")

INDEX = "{}.safetensors.index.json"

# The files of a model that are downloaded besides its weights. They are neither pickles nor code.
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    *(INDEX.format(stem) for stem in STEMS),
    *(file for modality in MODALITIES.values() for file in modality.files),
)

# The needed files, and the model card, which states the licence.
SMALL_FILES = (*NEEDED_FILES, "README.md")


def weight_files(directory: Path, names: Collection[str]) -> list[str]:
    """Names of the safetensors files with a model's weights, selected from the names of all files of the model.

    If the weights are divided over several files, an index lists these files. The index is read from `directory`, which
    has the model's small files. Other safetensors files, such as a second copy of the weights, are left out. The result
    is empty if the index cannot be read.
    """
    for stem in STEMS:
        if (single := f"{stem}.safetensors") in names:
            return [single]
        if (index := INDEX.format(stem)) in names:
            try:
                files = json.loads((directory / index).read_bytes())["weight_map"].values()
                return sorted({file for file in files if Path(file).name == file and file.endswith(".safetensors")})
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                return []  # `headers` reports why
    return []


def pickles(names: Iterable[str]) -> list[str]:
    """Names of files with pickled weights, selected from `names`; pickles are never read."""
    return [name for name in names if any(Path(name).match(pattern) for pattern in PICKLES)]
