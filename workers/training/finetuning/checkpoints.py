"""Checkpoints of a training on disk: trained weights, the optimizer's state, and the step, without pickle.

A checkpoint's directory appears only when it is complete (`workers.directories`), so the newest checkpoint can always
be loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from workers.directories import appearing

__all__ = ["KEPT", "latest", "load", "optimizer_state", "save", "step_of"]

# The number of checkpoints that are kept, the newest.
KEPT = 2

PREFIX = "step-"
WEIGHTS, MOMENTS, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


def save(directory: Path, *, step: int, trained: Mapping[str, torch.Tensor], optimizer: Optimizer, loss: float) -> Path:
    """Write a checkpoint of a training below `directory`, after `step` updates, and return its directory.

    `trained` are the trained weights by name; `loss` is the loss of the last update. An existing checkpoint is not
    changed. Only the newest KEPT checkpoints are kept.
    """
    out = directory / f"{PREFIX}{step:08}"
    if not out.exists():
        tensors, rest = _split(optimizer.state_dict())
        with appearing(out, "checkpoint") as place:
            save_file({name: p.detach().cpu().contiguous() for name, p in trained.items()}, place / WEIGHTS)
            save_file(tensors, place / MOMENTS)
            (place / STATE).write_text(json.dumps({"step": step, "loss": loss, "optimizer": rest}))
    for old in _all(directory)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return out


def latest(directory: Path) -> Path | None:
    """The directory of the newest complete checkpoint below `directory`; None if there is none."""
    found = _all(directory)
    return found[-1] if found else None


def step_of(checkpoint: Path | None) -> int:
    """The number of updates after which a checkpoint was written; 0 if `checkpoint` is None."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix(PREFIX))


def optimizer_state(checkpoint: Path) -> Mapping[str, Any]:
    """The optimizer's state in a checkpoint without its tensors, with the keys of the optimizer's `state_dict`."""
    state: Mapping[str, Any] = json.loads((checkpoint / STATE).read_text())["optimizer"]
    return state


@torch.no_grad()
def load(checkpoint: Path, *, trained: Mapping[str, torch.Tensor], optimizer: Optimizer) -> None:
    """Copy the trained weights of a checkpoint into `trained`, and restore the optimizer's state.

    Raises ValueError if the checkpoint has other parameters than `trained`.
    """
    weights = load_file(checkpoint / WEIGHTS)
    if weights.keys() != trained.keys():
        raise ValueError(f"{checkpoint}: holds other parameters than are trained; expected those of this specification")
    for name, parameter in trained.items():
        parameter.copy_(weights[name])
    optimizer.load_state_dict(_joined(optimizer_state(checkpoint), load_file(checkpoint / MOMENTS)))


def _all(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(f"{PREFIX}*") if path.is_dir()) if directory.is_dir() else []


def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state (`state_dict`) into its tensors and the rest as plain data.

    A tensor's name is "N.NAME", where N is the number of the parameter and NAME the name in the optimizer's state.
    """
    tensors, plain = {}, {}
    for number, entries in state["state"].items():
        plain[str(number)] = {name: value for name, value in entries.items() if not isinstance(value, torch.Tensor)}
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}.{name}"] = value.detach().cpu().contiguous()
    return tensors, {**state, "state": plain}


def _joined(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    entries: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in plain["state"].items()}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        entries[int(number)][name] = value
    return {**plain, "state": entries}
