"""The tiny model family: a base and three experts of 0.9M parameters with their tasks, shipped as package data.

- `train`: makes everything in this folder, from fixed seeds
"""

from __future__ import annotations

import pathlib

__all__ = ["family_dir"]


def family_dir() -> pathlib.Path:
    """The folder that holds base/, experts/<skill>/, tasks/<skill>_{search,holdout}.jsonl and study.yaml."""
    return pathlib.Path(__file__).resolve().parent
