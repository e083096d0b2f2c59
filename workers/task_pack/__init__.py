"""The shipped evaluation tasks: lm-eval YAML files that reproduce tables of papers.

There is a directory for each paper. The files name data sets of the hub; the module `workers.evaluation.data_sets`
loads them from the hub or from a local copy.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["pack_dir"]


def pack_dir() -> Path:
    """Directory of this project's evaluation tasks, which are YAML files of lm-eval."""
    return Path(__file__).resolve().parent
