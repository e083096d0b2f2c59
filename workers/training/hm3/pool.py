"""Possible steps of a layer path (layers of models, and the path's end) as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths

__all__ = ["allowed_steps", "stop_of"]


def stop_of(paths: LayerPaths) -> int:
    """Number that stands for the end of a layer path among the numbers of a policy's possible steps.

    A layer path is a sequence of layers of several models, and describes a new model. A policy builds it step by step:
    each step is the next layer, or the end of the path. The layers of all models of `paths` are numbered from 0, and
    the end has the first number after them.
    """
    return paths.num_steps


def allowed_steps(paths: LayerPaths, path: Sequence[int]) -> Tensor:
    """Say for each possible step whether it may follow the steps `path`, the beginning of a layer path.

    A layer path is a sequence of layers of several models; each layer is a step of the path. `paths` has the limits of
    layer paths. The result is a bool tensor [num_steps + 1]. Its first num_steps elements stand for the layers of all
    models, and the last element stands for the end of the path. At least one step is allowed. After a path of maximal
    length only the end is allowed.
    """
    mask = torch.zeros(len(paths.models), paths.num_layers, dtype=torch.bool)
    mask[:, list(paths.next_layers(path))] = True
    return torch.cat([mask.flatten(), torch.tensor([paths.may_end(path)])])
