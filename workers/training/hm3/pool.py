"""The steps that a path may take as tensors: layers of models, and the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths

__all__ = ["allowed_steps", "stop_of"]


def stop_of(paths: LayerPaths) -> int:
    """The number of the end: that after all steps."""
    return paths.num_steps


def allowed_steps(paths: LayerPaths, path: Sequence[int]) -> Tensor:
    """[num_steps + 1] bool: what may come after `path` (steps without the end); the last is the end. After a path of
    maximal length the end alone may; something always may."""
    mask = torch.zeros(len(paths.models), paths.num_layers, dtype=torch.bool)
    mask[:, list(paths.next_layers(path))] = True
    return torch.cat([mask.flatten(), torch.tensor([paths.may_end(path)])])
