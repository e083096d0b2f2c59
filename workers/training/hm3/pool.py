"""The steps that a path may take, as tensors: layers of models, and the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths

__all__ = ["allowed_steps", "stop_of"]


def stop_of(paths: LayerPaths) -> int:
    """The number of the end, which follows those of all steps."""
    return paths.num_steps


def allowed_steps(paths: LayerPaths, path: Sequence[int]) -> Tensor:
    """Which steps may follow `path` (steps without the end): [num_steps + 1] bool, the last for the end.

    At least one is allowed. After a path of maximal length only the end is.
    """
    mask = torch.zeros(len(paths.models), paths.num_layers, dtype=torch.bool)
    mask[:, list(paths.next_layers(path))] = True
    return torch.cat([mask.flatten(), torch.tensor([paths.may_end(path)])])
