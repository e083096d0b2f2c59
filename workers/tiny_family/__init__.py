"""Tiny model family, shipped for tests and tutorials: a base and three experts of 0.9M parameters, with tasks.

`study.yaml` merges the experts. `retrain.yaml` trains new experts from the base and merges them. The script that
trained the shipped models is in the repository (tests/benchmarks/family_training.py).
"""

from __future__ import annotations

import pathlib

__all__ = ["RETRAIN_FILE", "STUDY_FILE", "family_dir"]

STUDY_FILE, RETRAIN_FILE = "study.yaml", "retrain.yaml"


def family_dir() -> pathlib.Path:
    """Directory of the tiny model family within the package.

    It contains base/, experts/<skill>/, tasks/<skill>_{search,holdout,train}.jsonl, study.yaml (merges the experts) and
    retrain.yaml (trains new ones).
    """
    return pathlib.Path(__file__).resolve().parent
