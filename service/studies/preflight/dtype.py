"""Dtype in which a study's engines compute, and the size in bytes of a number in each dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.engine_machines import runs_on_gpus

if TYPE_CHECKING:
    from search_spaces.study.engine import EngineOptions
    from search_spaces.study.file import Study
    from service.resolved_study import ResolvedStudy
    from workers.models.family import ResolvedFamily

__all__ = ["DTYPE_BYTES", "dtype_note", "engine_dtype", "with_stored_dtype"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def engine_dtype(study: Study, resolved: ResolvedStudy | None = None) -> str:
    """The dtype in which a study's engines compute.

    This is the dtype in the study file, unless it is "auto". For "auto", it is the dtype that was stored when the study
    was checked (`resolved.dtype`). If none is stored, it is "bfloat16" if engines run on GPUs, of this machine or of
    other machines, and "float32" otherwise.
    """
    if study.engine.dtype != "auto":
        return study.engine.dtype
    if resolved is not None and resolved.dtype is not None:
        return resolved.dtype
    return "bfloat16" if runs_on_gpus(on_vllm=study.engine.backend == "vllm") else "float32"


def with_stored_dtype(options: EngineOptions, stored: str | None, *, on_gpus: bool) -> EngineOptions:
    """Options of engines that compute in the dtype which the study has stored.

    `stored` is this dtype; None for a study that an earlier version stored. It replaces the option `dtype` if this is
    "auto" and engines on the present machines, with GPUs or without (`on_gpus`), would choose another dtype. Otherwise
    `options` is returned unchanged, so that studies with equal options share their replicas.
    """
    if options.dtype != "auto" or stored in (None, "bfloat16" if on_gpus else "float32"):
        return options
    return options.model_copy(update={"dtype": stored})


def dtype_note(study: Study, sources: ResolvedFamily | None) -> str:
    """Warning if a study's `dtype: auto` makes engines compute in bfloat16 while its models are stored in float16.

    The result is "" otherwise. bfloat16 has 8 significant bits, and float16 has 11 significant bits. `sources` are the
    models; None if the models cannot be read.
    """
    if sources is None or study.engine.dtype != "auto":
        return ""
    if engine_dtype(study) != "bfloat16":
        return ""
    finer = [
        alias
        for alias, checkpoint in sources.checkpoints.items()
        if any(info.dtype == "F16" for info in checkpoint.own)
    ]
    if not finer:
        return ""
    return (
        f"dtype: auto is bfloat16 on GPUs, and {', '.join(finer)} are stored in float16: merges are rounded to 8 "
        "significant bits in place of 11; write engine: {dtype: float16} to keep them"
    )
