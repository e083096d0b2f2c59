"""Dtype in which a study's engine computes, and the bytes of a number in each dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.engine_machines import runs_on_gpus

if TYPE_CHECKING:
    from search_spaces.study.file import Study

__all__ = ["DTYPE_BYTES", "engine_dtype"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def engine_dtype(study: Study) -> str:
    """The dtype in which a study's engines compute.

    If the study file says "auto", it is "bfloat16" if engines run on GPUs, of this machine or of others, else
    "float32".
    """
    if study.engine.dtype != "auto":
        return study.engine.dtype
    return "bfloat16" if runs_on_gpus() else "float32"
