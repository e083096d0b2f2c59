"""Tiny model family, shipped for tests and tutorials: a base and three experts of 0.9M parameters, with tasks.

`study.yaml` merges the experts, `front.yaml` searches for the Pareto front of three objectives, and `lfs.yaml` searches
without gradients. `retrain.yaml` trains new experts from the base and merges them. The script that trained the shipped
models is in the repository (tests/benchmarks/family_training.py).
"""

from __future__ import annotations

import json
import pathlib
import re

__all__ = ["EXAMPLES", "RETRAIN_FILE", "STUDY_FILE", "family_dir", "study_text"]

STUDY_FILE, RETRAIN_FILE = "study.yaml", "retrain.yaml"

# Study files that merge the shipped experts, by name; the first is the usual example.
EXAMPLES = {"study": STUDY_FILE, "front": "front.yaml", "lfs": "lfs.yaml"}


def family_dir() -> pathlib.Path:
    """Directory of the tiny models that this package ships: a base model and experts, with evaluation tasks.

    The directory contains base/, experts/<skill>/, tasks/<skill>_{search,holdout,train}.jsonl, study.yaml (merges the
    experts) and retrain.yaml (trains new experts).
    """
    return pathlib.Path(__file__).resolve().parent


def study_text(name: str = "study") -> str:
    """Text of the shipped study file `name`, with its comments, and with absolute paths, as servers need them.

    Raises KeyError if `name` is not one of EXAMPLES.
    """
    text = (family_dir() / EXAMPLES[name]).read_text("utf-8")
    # A string of JSON is one of YAML, whatever characters the path has.
    return re.sub(
        r"(?<=: )(base|(?:experts|tasks)/[\w.]+)(?=[,}\n])", lambda path: json.dumps(str(family_dir() / path[1])), text
    )
