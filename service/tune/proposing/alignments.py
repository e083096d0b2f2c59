"""Alignments between layers, learned by Ray tasks: one that reads the texts for each model, one for each pair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayTaskError

from workers.errors import EngineUnavailable, InvalidModel, InvalidTask
from workers.models.family import open_sources
from workers.training.hm3.pairs import AlignmentJob, Pair, fit, found, keep

__all__ = ["learn_alignments"]

# What Ray reserves for a task on a CPU, which has one thread.
TASK_CPUS = 1


def learn_alignments(job: AlignmentJob, pairs: Iterable[Pair]) -> dict[Pair, str]:
    """The name of each pair's alignment (`workers.training.hm3.pairs.file_of`). Those that were learned before are
    read; models of which nothing is missing are not opened. Raises InvalidModel and InvalidTask if models or task data
    cannot be used, EngineUnavailable where processes die."""
    every = tuple(pairs)
    names = {pair: known[0] for pair in every if (known := found(job, pair)) is not None}
    missing = [pair for pair in every if pair not in names]
    if not missing:
        return names
    read: Any = ray.remote(_read)
    fitted: Any = ray.remote(_fit).options(num_cpus=TASK_CPUS)
    aliases = sorted({model for pair in missing for model, _ in pair})
    places = {
        alias: {
            at: slot
            for slot, at in enumerate(
                sorted(
                    {layer + 1 for (model, layer), _ in missing if model == alias}
                    | {layer for _, (model, layer) in missing if model == alias}
                )
            )
        }
        for alias in aliases
    }
    # Each place is an object of its own, so that a task fetches the two that it needs.
    rows = {
        alias: read.options(num_cpus=TASK_CPUS, num_returns=len(wanted) + 1).remote(job, alias, tuple(wanted))
        for alias, wanted in places.items()
    }
    waiting = {}
    for pair in missing:
        (first, handing), (second, receiving) = pair
        x = rows[first][places[first][handing + 1]]
        y = rows[second][places[second][receiving]]
        waiting[pair] = fitted.remote(job.kind, x, y, rows[first][-1])
    try:
        for pair, content in waiting.items():
            names[pair] = keep(job, pair, ray.get(content))
    except RayTaskError as error:
        if isinstance(error.cause, (InvalidModel, InvalidTask)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise EngineUnavailable(f"an alignment cannot be learned: {error}") from error
    return names


def _read(job: AlignmentJob, alias: str, places: tuple[int, ...]) -> list[Any]:
    """The activations before each of these layers, as arrays, and which rows are held out."""
    from workers.training.hm3.activations import prompts_of, read_activations

    _one_thread()
    sources = open_sources(job.family)  # its directory may be temporary
    prompts = prompts_of(sources.result_dir, job.options, job.tasks, job.positions)
    activations = read_activations(job.family, alias, prompts, device="cpu")
    return [*(activations.before[place].numpy() for place in places), activations.is_held_out.numpy()]


def _fit(kind: Any, x: Any, y: Any, is_held_out: Any) -> bytes:
    import torch

    _one_thread()
    rows = (torch.tensor(each) for each in (x, y, is_held_out))
    return fit(kind, *rows).to_bytes()


def _one_thread() -> None:
    """As many as Ray reserves, and equal bits whatever the machine has."""
    import torch

    torch.set_num_threads(TASK_CPUS)
