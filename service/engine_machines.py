"""Machines for inference engines, as the operator of an installation declares them.

Studies are checked on the machine where drivers run. This machine often has no GPU, and an autoscaled cluster may add
nodes with GPUs only when a study waits for them. The environment variable MERGESEARCH_ENGINE_NODES therefore states the
machines, for the server and for the head of its cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from service.disk import parse_bytes
from service.errors import Conflict
from workers.types import GpuNeed

__all__ = [
    "VARIABLE",
    "EngineMachines",
    "gpu_need",
    "has_gpus",
    "known_machines",
    "parse_machines",
    "planned_for",
    "runs_on_gpus",
    "stated_machines",
]

VARIABLE = "MERGESEARCH_ENGINE_NODES"

ACCEPTED = 'give groups such as "gpus=8,memory=900GiB,gpu_memory=80GB,nodes=4 gpus=4,memory=350GiB,nodes=8"'


@dataclass(frozen=True)
class EngineMachines:
    """A group of equal machines that can run engines.

    Attributes:
        num_gpus: Number of GPUs of each machine.
        memory_bytes: Host memory of each machine for engines, in bytes; None if it is not known.
        gpu_bytes: Memory of each GPU in bytes; None if it is not known.
        most: Largest number of machines in the group.
    """

    num_gpus: int = 0
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    most: int = 1


# Machines of a plan, which replace those of the variable and of this installation; empty where nothing is planned.
_planned: ContextVar[tuple[EngineMachines, ...]] = ContextVar("planned machines", default=())

# Machines of the Ray cluster, if they are known where a study is checked.
_known: ContextVar[tuple[EngineMachines, ...]] = ContextVar("known machines", default=())


def has_gpus(machines: Sequence[EngineMachines]) -> bool:
    """Whether any of `machines` has a GPU."""
    return any(group.num_gpus for group in machines)


@contextmanager
def known_machines(machines: Sequence[EngineMachines]) -> Iterator[None]:
    """Context in which checks of studies take `machines` as the machines of the Ray cluster.

    Inside the context, the function `runs_on_gpus` takes the GPUs of these machines into account, so that a machine
    without GPUs can check studies for machines with GPUs.
    """
    token = _known.set(tuple(machines))
    try:
        yield
    finally:
        _known.reset(token)


@contextmanager
def planned_for(machines: Sequence[EngineMachines]) -> Iterator[None]:
    """Context in which studies are checked for the machines in `machines` instead of the existing machines.

    Inside the context, the function `stated_machines` returns `machines`, so that a study can be planned for machines
    of another kind.
    """
    token = _planned.set(tuple(machines))
    try:
        yield
    finally:
        _planned.reset(token)


def stated_machines() -> tuple[EngineMachines, ...]:
    """Machines that run this installation's engines, in groups of equal machines, as the operator stated them.

    Inside a context of `planned_for`, the result is the machines given to this context. Otherwise the environment
    variable MERGESEARCH_ENGINE_NODES states them; without it, the result is empty.

    Raises:
        Conflict: The variable cannot be read.
    """
    if planned := _planned.get():
        return planned
    return parse_machines(os.environ.get(VARIABLE, ""))


def parse_machines(text: str) -> tuple[EngineMachines, ...]:
    """Parse groups of machines: texts such as `gpus=8,memory=900GiB,nodes=4`, separated by spaces.

    Raises:
        Conflict: A field is unknown, or has a wrong value.
    """
    return tuple(_parsed(group) for group in text.split())


def _parsed(group: str) -> EngineMachines:
    fields = {"gpus": "num_gpus", "memory": "memory_bytes", "gpu_memory": "gpu_bytes", "nodes": "most"}
    found: dict[str, int] = {}
    for field in group.split(","):
        name, _, value = field.partition("=")
        if name not in fields:
            raise Conflict(
                f"{VARIABLE}: {field!r} is not one of {', '.join(f'{each}=' for each in fields)}; {ACCEPTED}"
            )
        try:
            found[fields[name]] = parse_bytes(value) if name.endswith("memory") else int(value)
        except ValueError as error:
            raise Conflict(f"{VARIABLE}: {field!r}: {error}; {ACCEPTED}") from error
    if found.get("num_gpus", 0) < 0 or found.get("most", 1) < 1:
        raise Conflict(f"{VARIABLE}: {group!r} has fewer than 0 GPUs or than 1 machine; {ACCEPTED}")
    return EngineMachines(**found)


def gpu_need() -> GpuNeed:
    """Whether the engines of this installation need GPUs, and whether machines with GPUs may be added for them.

    Engines wait for machines that may be added; these are machines that the operator has stated for this installation.
    """
    if not runs_on_gpus():
        return GpuNeed.IF_ANY
    return GpuNeed.MAY_COME if has_gpus(stated_machines()) else GpuNeed.NEEDED


def runs_on_gpus(*, on_vllm: bool = True) -> bool:
    """Whether the engines of this installation run on GPUs, of this machine or of other machines.

    `on_vllm` says whether the engines are vLLM. On this machine, vLLM runs on GPUs if the installed PyTorch is a build
    for GPUs; other engines run on GPUs if a GPU is present. Other machines are the stated ones (`stated_machines`) and
    those of the Ray cluster (context `known_machines`).

    Inside a context of `planned_for`, the result says instead whether the machines given to that context have GPUs.
    """
    if planned := _planned.get():
        return has_gpus(planned)
    import torch

    is_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
    is_here = is_gpu_build if on_vllm else torch.cuda.is_available()
    return is_here or has_gpus(stated_machines()) or has_gpus(_known.get())
