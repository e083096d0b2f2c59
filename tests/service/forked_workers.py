"""Worker processes of tests are forks of one process that has imported what they import, for 5 s of a core each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["ForkingContext"]

# What the processes of the server import for their first call: the validators' and the exports' modules.
MODULES = ("lm_eval.tasks", "service.api.export_queue", "service.api.preflight_process", "torch", "transformers")

# Variables that these modules read when they are imported begin so, but lm-eval sets one of them.
READ_AT_IMPORT = ("CUDA_VISIBLE", "HF_", "HUGGINGFACE_", "OMP_", "TRANSFORMERS_", "XDG_")
SET_BY_IMPORT = "HF_XET_HIGH_PERFORMANCE"


class ForkingContext:
    """Takes the place of the multiprocessing context of worker processes: each begins as a fork of a server of forks.

    The server of forks starts with the first process, and ends with this process. A fork gets the present environment.
    If a variable has changed that is read by imports, the process is spawned, as outside of tests.
    """

    def __init__(self) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(list(MODULES))
        self._read = _read_at_import()
        self.Pipe = self._spawn.Pipe

    def Process(self, *, target: Callable[..., object], args: Iterable[Any], **options: Any) -> BaseProcess:  # noqa: N802
        if _read_at_import() != self._read:
            return self._spawn.Process(target=target, args=tuple(args), **options)
        return self._fork.Process(target=_run, args=(dict(os.environ), target, *args), **options)


def _read_at_import() -> dict[str, str]:
    read = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT)}
    read.pop(SET_BY_IMPORT, None)
    return read


def _run(environment: Mapping[str, str], target: Callable[..., object], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
