"""An alignment of HM3: a map from the output of one layer to the input of the next, and its tensors.

The output of layer t, h, is mapped to the input of layer t + 1:

    projection    W h + b,      W [hidden, hidden], b [hidden]
    moments       a * h + b,    a, b [hidden], for each channel

b is optional. The paper "HM3: Hierarchical Multi-Objective Model Merging for Pretrained Models" fits such maps between
layers of different models.

If layers have scales, engines and transformers compute with g = h / c, where c is the product of the scales so far
(module `workers.merging.residual_scales`). The projection of g is W g + b / c: only the shift is divided by c.

The weights of an ordinary checkpoint cannot contain an alignment: a norm divides by the length of its input, and
multiplication by W or a changes this length by a factor that depends on h. Therefore the function
`residual_scales.branch_factors` refuses alignments, and exports contain a separate model class (module
`workers.alignments.export`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

__all__ = ["Alignment"]


@dataclass(frozen=True, eq=False)
class Alignment:
    """Map of the residual stream between two layers: a matrix or a scale for each channel, and optionally a shift.

    An alignment has either a `projection` [hidden, hidden] or a `scale` [hidden]; the `shift` [hidden] is optional.
    Raises ValueError if the tensors or shapes differ from this, or if values are NaN or infinite.
    """

    projection: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.projection is None) == (self.scale is None):
            raise ValueError("expected a projection or a scale, and not both")
        hidden = self.hidden_size
        for name, tensor in self.tensors().items():
            expected = (hidden, hidden) if name == "projection" else (hidden,)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} is {list(tensor.shape)}; expected {list(expected)}")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} has values that are NaN or infinite")

    @property
    def hidden_size(self) -> int:
        of = self.scale if self.projection is None else self.projection
        assert of is not None
        return of.shape[-1] if of.ndim else 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the alignment, keyed by name: "projection" or "scale", and "shift" if there is a shift.

        An alignment is a map of the residual stream between two layers.
        """
        named = {"projection": self.projection, "scale": self.scale, "shift": self.shift}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, *, device: torch.device | str = "cpu", dtype: torch.dtype) -> Self:
        """Copy the tensors of the alignment (a map of the residual stream) to `device`, rounded to `dtype`."""
        return type(self)(**{name: tensor.to(device, dtype) for name, tensor in self.tensors().items()})

    def __call__(self, stream: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Map a residual stream [..., hidden] by this alignment: multiply it by the matrix or scale, and add the shift.

        `factor` multiplies the shift. In a merge, layers may have scales, which are factors on the residual stream
        after them. Then `stream` is the residual stream divided by the product of the scales of all layers before the
        alignment, and `factor` is one over this product. In other models `factor` is 1.
        """
        shift = self.shift if self.shift is None or factor == 1 else self.shift * factor
        if self.projection is not None:
            return torch.nn.functional.linear(stream, self.projection, shift)
        assert self.scale is not None
        scaled = stream * self.scale
        return scaled if shift is None else scaled + shift
