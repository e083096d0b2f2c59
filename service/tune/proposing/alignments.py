"""Ray tasks that fit a study's alignments: maps of the residual stream between two layers.

One task for each model reads the texts, and one task for each pair of layers fits the pair's alignment. Texts are read
on GPUs if the models fit into their memory, else on the CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private.state import available_resources_per_node
from ray.exceptions import RayTaskError

from search_spaces.recipe import Recipe
from search_spaces.spaces.base import LayerPair
from service.disk import gib
from service.errors import StudyFailed
from workers.alignments.activations import FLOAT32_BYTES, Activations, activation_bytes, read_activations
from workers.alignments.files import is_stored, store_alignment
from workers.alignments.fitting import fit_alignment
from workers.alignments.pairs import AlignmentInputs, alignment_file, find_alignment, keep_alignment
from workers.alignments.samples import prompts_of
from workers.engines.vllm.memory import usable_gpu_bytes
from workers.errors import EngineUnavailable, InvalidModel, InvalidTask
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into
from workers.models.family import on_this_machine, open_sources
from workers.serving.gpu_shares import whole_gpus
from workers.serving.gpu_verification import is_of_gpu
from workers.training.model import TrainableModel
from workers.types import Family, Placement

__all__ = ["alignments_in", "learn_alignments"]

log = logging.getLogger(__name__)

# CPUs that Ray reserves for a task, which uses as many threads.
TASK_CPUS = 1

# Seconds between two notes of progress.
NOTE_S = 5.0


def alignments_in(
    directory: Path,
    inputs: AlignmentInputs,
    pairs: Iterable[LayerPair],
    *,
    before: Mapping[LayerPair, str],
    gpu_bytes: int | None,
    note: Callable[[str], None] = lambda _: None,
) -> dict[LayerPair, str]:
    """Store the alignments of layer pairs in `directory`, and return the name of each pair's alignment.

    An alignment is a map from the residual stream after the pair's first layer to the stream before its second layer.
    Layer paths (sequences of layers of several models) need an alignment where one model's layer follows another
    model's layer. `inputs` has the models and the texts from which alignments are learned. `before` contains the names
    of the alignments that the study already has, keyed by pair. An alignment of `before` is used again if its file is
    in `directory`; all other alignments are learned. `gpu_bytes` is the memory of the cluster's smallest GPU; None if
    it is not known. `note` is called with messages about the progress.

    Raises StudyFailed if the file of an alignment of `before` is missing, and learning this alignment again gives
    another one. Raises InvalidModel and InvalidTask if models or task data cannot be used, and EngineUnavailable if a
    Ray task cannot be completed.
    """
    whole = {name for name in set(before.values()) if is_stored(directory, name)}
    kept = {pair: name for pair, name in before.items() if name in whole}
    learned = learn_alignments(inputs, [pair for pair in pairs if pair not in kept], gpu_bytes=gpu_bytes, note=note)
    changed = [pair for pair, name in learned.items() if before.get(pair, name) != name]
    if changed:
        (first, layer), (second, after) = changed[0]
        raise StudyFailed(
            f"{len(changed)} of {len(before)} alignments were lost, and are different when they are learned again, for "
            f"example from {first} {layer} to {second} {after}: the study's paths cannot be made again; start a new "
            "study"
        )
    for name in sorted(set(learned.values())):
        store_alignment(directory, alignment_file(name).read_bytes())
    return {**kept, **learned}


def learn_alignments(
    inputs: AlignmentInputs,
    pairs: Iterable[LayerPair],
    *,
    gpu_bytes: int | None,
    note: Callable[[str], None] = lambda _: None,
) -> dict[LayerPair, str]:
    """Learn the alignments of layer pairs that are not in the cache, and return the name of each pair's alignment.

    An alignment is a map from the residual stream after the pair's first layer to the stream before its second layer.
    The cache has the alignments of all studies on this machine. `inputs` has the models and the texts. A model is
    opened only if an alignment of one of its layers is missing. `gpu_bytes` is the memory of the cluster's smallest
    GPU; None if it is not known. Texts are read on GPUs if a model and its activations fit into this memory. `note` is
    called with messages about the progress. Raises InvalidModel and InvalidTask if models or task data cannot be used,
    and EngineUnavailable if a Ray task cannot be completed, for example because its process died.
    """
    every = tuple(pairs)
    names = {pair: stored[0] for pair in every if (stored := find_alignment(inputs, pair)) is not None}
    missing = [pair for pair in every if pair not in names]
    if not missing:
        return names
    known = f", {len(names)} are known" if names else ""
    note(f"Learning {len(missing)} alignments between layers{known} ...")
    device, why = _device_for(inputs, gpu_bytes)
    if why:
        note(why)
    fitted = _start_tasks(inputs, missing, device=device)
    noted_at = time.monotonic()
    try:
        for number, (pair, content) in enumerate(fitted.items(), 1):
            names[pair] = keep_alignment(inputs, pair, ray.get(content))
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


def _device_for(inputs: AlignmentInputs, gpu_bytes: int | None) -> tuple[str, str]:
    """Choose the device on which the models of `inputs` are read: "cuda" or "cpu"; also return the reason, or "".

    A GPU is chosen if one is free, and if a model in float32 and its activations fit into `gpu_bytes`, the memory of
    the cluster's smallest GPU, because Ray may give a task any GPU. If this memory is not known (None), a GPU is tried.
    There is a reason only if GPUs are free and the CPU is chosen. Raises InvalidModel if the models cannot be opened.
    """
    # Engines start later, so that a GPU is free.
    if not whole_gpus(available_resources_per_node().values()):
        return "cpu", ""
    if gpu_bytes is None:
        return "cuda", ""
    sources = open_sources(on_this_machine(inputs.family))
    needed = FLOAT32_BYTES * sources.num_parameters + activation_bytes(
        sources.base.settings,
        num_prompts=sum(map(len, inputs.positions.values())),
        max_tokens=inputs.options.max_model_len,
    )
    if needed <= usable_gpu_bytes(gpu_bytes, gpu_bytes):
        return "cuda", ""
    return "cpu", (
        f"The CPU computes the activations for alignments: a model in float32 needs {gib(needed)} of a GPU, which has "
        f"{gib(gpu_bytes)}."
    )


def _start_tasks(inputs: AlignmentInputs, pairs: Sequence[LayerPair], *, device: str) -> dict[LayerPair, Any]:
    """Start the Ray tasks that learn the alignments of `pairs`, and return references to their results, keyed by pair.

    An alignment is a map from the residual stream after the pair's first layer to the stream before its second layer.
    `inputs` has the models and the texts. One task for each model computes activations on `device` (function `_read`).
    After that, one task for each pair fits the pair's alignment to the activations.
    """
    num_gpus = 1 if device == "cuda" else 0
    read: Any = ray.remote(num_cpus=TASK_CPUS, num_gpus=num_gpus)(_read)
    fit: Any = ray.remote(num_cpus=TASK_CPUS)(_fit)
    needed: dict[str, set[int]] = {}
    for (first, layer), (second, after) in pairs:
        needed.setdefault(first, set()).add(layer + 1)
        needed.setdefault(second, set()).add(after)
    # The activations before each layer, those of first tokens apart, are an object of their own, so that a task fetches
    # the two that it needs.
    rows: dict[tuple[str, int], Any] = {}
    is_held_out: dict[str, Any] = {}
    for alias in sorted(needed):
        before = sorted(needed[alias])
        *found, is_held_out[alias] = read.options(num_returns=len(before) + 1).remote(inputs, alias, before, device)
        rows |= zip([(alias, layer) for layer in before], found, strict=True)
    return {
        ((first, layer), (second, after)): fit.remote(
            inputs.kind, rows[first, layer + 1], rows[second, after], is_held_out[first]
        )
        for (first, layer), (second, after) in pairs
    }


def _read(inputs: AlignmentInputs, alias: str, before: Sequence[int], device: str) -> list[Any]:
    """Compute one model's activations before each of certain layers; runs as a Ray task on `device`.

    `alias` is the model's name in `inputs.pool`, and `before` has the indices of the layers. The caller gives the
    device, because GPUs are visible even to tasks that have reserved no GPU. If a GPU fails, for example because its
    memory is full, the CPU computes the activations.

    Returns a list with a pair of NumPy arrays for each of these layers: the activations of all tokens except the first
    of each text (one row a token), and the activations of the first tokens. The last element of the list is not a pair,
    but a boolean array with an entry for each row of the first arrays: True for a token that is held out, so that
    alignments are tested on it and not fitted to it.

    Raises InvalidModel or InvalidTask if the model or the task data cannot be used.
    """
    torch.set_num_threads(TASK_CPUS)  # equal bits on every machine
    family = on_this_machine(inputs.family)
    sources = open_sources(family)  # its directory may be temporary
    prompts = prompts_of(sources.result_dir, inputs.options, inputs.tasks, inputs.positions)
    activations = None
    try:
        activations = _activations(family, inputs.pool[alias], prompts, device)
    except RuntimeError as error:
        if device == "cpu" or not is_of_gpu(error):
            raise
        message = "%s: the CPU computes the activations for alignments, because a GPU failed: %s"
        log.warning(message, alias, str(error).partition("\n")[0])
    if activations is None:  # not within `except`, where the error still holds the memory of the model
        activations = _activations(family, inputs.pool[alias], prompts, "cpu")
    found = [(activations.before[layer].numpy(), activations.first[layer].numpy()) for layer in before]
    return [*found, activations.is_held_out.numpy()]


def _activations(family: Family, recipe: Recipe, prompts: Sequence[Sequence[int]], device: str) -> Activations:
    """Compute the activations for `prompts` of the merge of `recipe`, in float32 on `device`."""
    bank = Bank(family, Placement.MAPPED, device=device)
    model = TrainableModel(bank, torch.float32, device=torch.device(device))
    with torch.no_grad():
        merge_into(recipe, bank, model.memory)
    return read_activations(model.module, prompts)


def _fit(kind: Any, x: tuple[Any, Any], y: tuple[Any, Any], is_held_out: Any) -> bytes:
    torch.set_num_threads(TASK_CPUS)  # equal bits on every machine
    rows_x, first_x, rows_y, first_y, held_out = map(torch.tensor, (*x, *y, is_held_out))
    return fit_alignment(kind, rows_x, rows_y, held_out, first=(first_x, first_y)).to_bytes()
