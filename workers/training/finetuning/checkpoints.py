"""Checkpoints of a training on disk: trained weights, the optimizer's state, and the step, without pickle.

All ranks write a checkpoint together by torch.distributed.checkpoint: each writes its shards to a safetensors file. Any
number of ranks can load it. A checkpoint's directory appears only when it is complete (module `workers.directories`),
so the newest checkpoint can always be loaded. Checkpoints of earlier versions, which one rank wrote, are also loaded.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from workers.directories import appearing
from workers.training.finetuning.sharding import local, part_of

__all__ = ["KEPT", "latest", "load", "optimizer_state", "save", "sources", "step_of"]

# The number of checkpoints that are kept, the newest.
KEPT = 2

PREFIX = "step-"
STATE = "state.json"
SOURCES = "sources"
# In a checkpoint, the weights NAME and the optimizer's states of parameter number N.
OF_WEIGHTS, OF_OPTIMIZER = "weights.", "optimizer."
# The files of earlier versions.
WEIGHTS, MOMENTS = "weights.safetensors", "optimizer.safetensors"


def save(
    directory: Path,
    *,
    step: int,
    trained: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    loss: float,
    sources: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint of a training below `directory`, after `step` updates, and return its directory.

    All ranks of the process group must call this function. `trained` are the trained weights, keyed by name, and
    `optimizer` is the optimizer whose state is stored; `loss` is the loss of the last update. `sources` are the hashes
    of the training's inputs, which only rank 0 must know. An existing checkpoint is not changed. The oldest checkpoints
    beyond the newest KEPT are removed.
    """
    out = directory / f"{PREFIX}{step:08}"
    is_writer, is_alone = _rank() == 0, not dist.is_initialized()
    if not _agreed(out.exists()):
        tensors, rest = _split(optimizer.state_dict())
        content = {OF_WEIGHTS + name: p.detach() for name, p in trained.items()} | tensors
        with _appearing(out) as place:
            with _quiet():
                state_dict_saver.save(
                    content,
                    storage_writer=HuggingFaceStorageWriter(str(place), save_distributed=True),
                    no_dist=is_alone,
                )
            if is_writer:
                state = {"step": step, "loss": loss, SOURCES: dict(sources or {}), "optimizer": rest}
                (place / STATE).write_text(json.dumps(state))
    for old in _all(directory)[:-KEPT] if is_writer else ():
        shutil.rmtree(old, ignore_errors=True)
    if not is_alone:
        dist.barrier()
    return out


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Context manager that yields a hidden directory to write to, and renames it to `out` at the end.

    All ranks get the same directory. If a killed training left files in it, they are removed first, because that
    training may have had another number of ranks.
    """
    if _rank() != 0:
        yield Path(_of_writer(None))
        dist.barrier()
        return
    with appearing(out, "checkpoint") as place:
        for file in place.iterdir():
            file.unlink()
        yield Path(_of_writer(str(place)))
        if dist.is_initialized():
            dist.barrier()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _of_writer(value: Any) -> Any:
    """Send the `value` of rank 0 to all ranks, and return it. All ranks must call this function."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _agreed(value: bool) -> bool:
    return bool(_of_writer(value))


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that hides warnings of torch about checkpoints.

    One of these warnings appears whenever a process without a process group saves or loads a checkpoint.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def latest(directory: Path) -> Path | None:
    """Directory of the newest complete checkpoint below `directory`; None if there is none."""
    found = _all(directory)
    return found[-1] if found else None


def step_of(checkpoint: Path | None) -> int:
    """Number of updates of the training when the checkpoint was written; 0 if `checkpoint` is None."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix(PREFIX))


def optimizer_state(checkpoint: Path) -> Mapping[str, Any]:
    """Read the optimizer's state in a checkpoint, except its tensors.

    The result has the keys of the optimizer's `state_dict`.
    """
    state: Mapping[str, Any] = json.loads((checkpoint / STATE).read_text())["optimizer"]
    return state


def sources(checkpoint: Path) -> Mapping[str, str]:
    """Read the hashes of the training's inputs in a checkpoint; empty for checkpoints of earlier versions."""
    found: Mapping[str, str] = json.loads((checkpoint / STATE).read_text()).get(SOURCES, {})
    return found


@torch.no_grad()
def load(checkpoint: Path, *, trained: Mapping[str, torch.Tensor], optimizer: Optimizer) -> None:
    """Copy the trained weights of a checkpoint into `trained`, and restore the optimizer's state.

    Shards of another number of ranks are put together. All ranks of the process group must call this function. Raises
    ValueError if the checkpoint has other parameters than `trained`.
    """
    if (checkpoint / WEIGHTS).exists():
        weights, moments = load_file(checkpoint / WEIGHTS), load_file(checkpoint / MOMENTS)
        _check_names(checkpoint, weights, trained)
        for name, parameter in trained.items():
            local(parameter).copy_(part_of(weights[name], parameter))
        tensors = {OF_OPTIMIZER + key: value for key, value in moments.items()}
        found = {}
        for key, place in _places(tensors, trained).items():
            local(place).copy_(part_of(tensors[key], place))
            found[key] = place
    else:
        reader = HuggingFaceStorageReader(str(checkpoint))
        stored = reader.read_metadata().state_dict_metadata
        kept = {name.removeprefix(OF_WEIGHTS) for name in stored if name.startswith(OF_WEIGHTS)}
        _check_names(checkpoint, kept, trained)
        sizes: dict[str, Any] = {
            key: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            for key, each in stored.items()
            if key.startswith(OF_OPTIMIZER) and isinstance(each, TensorStorageMetadata)
        }
        found = _places(sizes, trained)
        with _quiet():
            state_dict_loader.load(
                {OF_WEIGHTS + name: p.detach() for name, p in trained.items()} | found,
                storage_reader=reader,
                no_dist=not dist.is_initialized(),
            )
    optimizer.load_state_dict(_joined(optimizer_state(checkpoint), found))


def _check_names(checkpoint: Path, names: Any, trained: Mapping[str, torch.Tensor]) -> None:
    if set(names) != set(trained):
        raise ValueError(f"{checkpoint}: holds other parameters than are trained; expected those of this specification")


def _places(stored: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make tensors of zeros, into which an optimizer's state can be loaded from a checkpoint.

    `stored` has the tensors of the checkpoint, keyed by name; only their shapes and dtypes are used. The result has the
    same keys. `trained` are the trained parameters. Each stored tensor belongs to one of them; if it has the
    parameter's shape, it is sharded like the parameter.
    """
    parameters = list(trained.values())
    found = {}
    for key, like in stored.items():
        parameter = parameters[int(key.removeprefix(OF_OPTIMIZER).split(".", 1)[0])]
        if like.shape == parameter.shape:
            found[key] = torch.zeros_like(parameter, dtype=like.dtype, requires_grad=False)
        else:
            found[key] = torch.zeros(like.shape, dtype=like.dtype)
    return found


def _all(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(f"{PREFIX}*") if path.is_dir()) if directory.is_dir() else []


def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state (`state_dict`) into its tensors and the rest as plain data.

    A tensor's name is "optimizer.N.NAME", where N is the number of the parameter and NAME is the name in the
    optimizer's state.
    """
    tensors, plain = {}, {}
    for number, entries in state["state"].items():
        plain[str(number)] = {name: value for name, value in entries.items() if not isinstance(value, torch.Tensor)}
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OF_OPTIMIZER}{number}.{name}"] = value.detach()
    return tensors, {**state, "state": plain}


def _joined(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    entries: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in plain["state"].items()}
    for key, value in tensors.items():
        number, name = key.removeprefix(OF_OPTIMIZER).split(".", 1)
        entries[int(number)][name] = value
    return {**plain, "state": entries}
