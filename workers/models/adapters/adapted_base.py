"""The base model that a LoRA adapter changes, and a lookup of its tensors by the adapter's names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.components import LAYER, Layout
from workers.models.computed_tensors import SourceTensor
from workers.models.modalities import modality_of

__all__ = ["AdaptedBase"]

# Models that store the stack of their experts as [experts, inputs, outputs].
TRANSPOSED_STACKS = ("gpt_oss",)

# Models whose layers hold transformers' Conv1D, which stores [inputs, outputs].
CONV1D_MODELS = ("gpt2",)


@dataclass(frozen=True)
class AdaptedBase:
    """Base model that a LoRA adapter changes: its directory, configuration, tensors and layout.

    The layout says to which layer and component each tensor belongs.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    layout: Layout

    def name(self, parameter: str) -> str | None:
        """Name of the base's tensor that an adapter calls `parameter`; None if there is none.

        The two names can differ. Files may lack the outermost module ("model."), may have an additional one, or may
        name modules differently than transformers.
        """
        names = self.layout.places
        if parameter in names:
            return parameter
        stored = modality_of(self.config).canonical(self.config, parameter)
        if stored in names:
            return stored
        inner = parameter.partition(".")[2]
        if inner in names:
            return inner
        outer = [name for name in names if name.partition(".")[2] == parameter]
        return outer[0] if len(outer) == 1 else None

    def head(self, parameter: str) -> str | None:
        """Name of the tensor of a task's head that an adapter calls `parameter`; None if it belongs to no such head.

        The base itself may have no head, or one for other classes.
        """
        modality = modality_of(self.config)
        name = modality.canonical(self.config, parameter)
        return name if name in modality.heads else None

    def is_unmerged(self, parameter: str) -> bool:
        """Whether `parameter` belongs to a part of models that is not merged, such as a head or CLIP's text tower."""
        name = modality_of(self.config).canonical(self.config, parameter)
        return name is None or name in self.layout.task_heads or self.head(parameter) is not None

    def stack(self, parameter: str) -> str | None:
        """Name of the stacked MoE tensor of the base that an adapter calls `parameter`; None if there is none.

        A stack joins one matrix of each expert of a layer's mixture of experts (such as all down projections) in one
        tensor. The result is the name of a stored tensor with three dimensions, or a key of the mapping `Layout.stacks`
        if the experts are stored separately. A stack that is not stored as one tensor is found by the layer and the
        last part of the name: the result is None unless exactly one stack of the layer ends with this part.
        """
        if (name := self.name(parameter)) is not None:
            return name if len(self.tensors[name].shape) == 3 else None
        layer, matrix = LAYER.match(parameter), parameter.rpartition(".")[2]
        if layer is None:
            return None
        place = self.layout.name("", int(layer["layer"]))
        found = [name for name in self.layout.stacks if name.startswith(place) and name.endswith(f".{matrix}")]
        return found[0] if len(found) == 1 else None

    @property
    def has_transposed_stacks(self) -> bool:
        return self.config.get("model_type") in TRANSPOSED_STACKS

    def is_transposed(self, name: str) -> bool:
        place = self.layout.places.get(name)
        return self.config.get("model_type") in CONV1D_MODELS and place is not None and place.layer is not None
