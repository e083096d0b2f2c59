"""Alignments between layers, learned by Ray tasks: a task for each model reads texts, one for each pair fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from search_spaces.spaces.base import LayerPair
from service.errors import StudyFailed
from workers.errors import EngineUnavailable, InvalidModel, InvalidTask
from workers.merging.alignments import is_stored, store_alignment
from workers.models.family import open_sources
from workers.training.hm3.pairs import AlignmentJob, file_of, fit, found, keep

__all__ = ["alignments_in", "learn_alignments"]

# CPUs that Ray reserves for a task, which has one thread.
TASK_CPUS = 1

# Seconds between two notes of progress.
NOTE_S = 5.0


def alignments_in(
    directory: Path,
    job: AlignmentJob,
    pairs: Iterable[LayerPair],
    *,
    before: Mapping[LayerPair, str],
    note: Callable[[str], None] = lambda _: None,
) -> dict[LayerPair, str]:
    """Learn alignments as `learn_alignments` does, and copy their files to `directory`.

    Alignments in `before`, whose names are given, are not learned again where their files exist. Raises StudyFailed
    where a file was lost and learning again gives another alignment.
    """
    whole = {name for name in set(before.values()) if is_stored(directory, name)}
    kept = {pair: name for pair, name in before.items() if name in whole}
    learned = learn_alignments(job, [pair for pair in pairs if pair not in kept], note=note)
    changed = [pair for pair, name in learned.items() if before.get(pair, name) != name]
    if changed:
        (first, layer), (second, after) = changed[0]
        raise StudyFailed(
            f"{len(changed)} of {len(before)} alignments were lost, and are others when they are learned again, as "
            f"that from {first} {layer} to {second} {after}: the study's paths cannot be made again; start a new study"
        )
    for name in sorted(set(learned.values())):
        store_alignment(directory, file_of(name).read_bytes())
    return {**kept, **learned}


def learn_alignments(
    job: AlignmentJob, pairs: Iterable[LayerPair], *, note: Callable[[str], None] = lambda _: None
) -> dict[LayerPair, str]:
    """The name of each pair's alignment (`workers.training.hm3.pairs.file_of`), learned where it is not known yet.

    Only models of missing alignments are opened. `note` gets messages about the progress. Raises InvalidModel and
    InvalidTask if models or task data cannot be used, EngineUnavailable where processes die.
    """
    every = tuple(pairs)
    names = {pair: before[0] for pair in every if (before := found(job, pair)) is not None}
    missing = [pair for pair in every if pair not in names]
    if not missing:
        return names
    known = f", {len(names)} are known" if names else ""
    note(f"Learning {len(missing)} alignments between layers{known} ...")
    # Engines start later, so a GPU is free.
    num_gpus = 1 if ray.available_resources().get("GPU", 0) >= 1 else 0
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
    # The activations before each layer are an object of their own, so that a task fetches the two that it needs.
    rows = {
        alias: read.options(num_cpus=TASK_CPUS, num_gpus=num_gpus, num_returns=len(wanted) + 1).remote(
            job, alias, tuple(wanted)
        )
        for alias, wanted in places.items()
    }
    waiting = {}
    for pair in missing:
        (first, handing), (second, receiving) = pair
        x = rows[first][places[first][handing + 1]]
        y = rows[second][places[second][receiving]]
        waiting[pair] = fitted.remote(job.kind, x, y, rows[first][-1])
    noted_at = time.monotonic()
    try:
        for number, (pair, content) in enumerate(waiting.items(), 1):
            names[pair] = keep(job, pair, ray.get(content))
            if time.monotonic() - noted_at >= NOTE_S:
                noted_at = time.monotonic()
                note(f"{number} of {len(missing)} alignments are learned.")
    except RayTaskError as error:
        if isinstance(error.cause, (InvalidModel, InvalidTask)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise EngineUnavailable(f"an alignment cannot be learned: {error}") from error
    return names


def _read(job: AlignmentJob, alias: str, places: tuple[int, ...]) -> list[Any]:
    """The activations before each of the layers in `places`, as arrays, and the mask of the held-out rows."""
    from workers.training.hm3.activations import prompts_of, read_activations

    _one_thread()
    sources = open_sources(job.family)  # its directory may be temporary
    prompts = prompts_of(sources.result_dir, job.options, job.tasks, job.positions)
    activations = read_activations(job.family, job.pool[alias], prompts)
    return [*(activations.before[place].numpy() for place in places), activations.is_held_out.numpy()]


def _fit(kind: Any, x: Any, y: Any, is_held_out: Any) -> bytes:
    import torch

    _one_thread()
    rows = (torch.tensor(each) for each in (x, y, is_held_out))
    return fit(kind, *rows).to_bytes()


def _one_thread() -> None:
    """Use one thread: as many as Ray reserves, and the same bits on machines with any number of CPUs."""
    import torch

    torch.set_num_threads(TASK_CPUS)
