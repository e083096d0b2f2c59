"""Tensors without a file of their own, such as weights changed by LoRA; they are computed when they are read.

A low-rank adapter's weights are its base's plus a product of two small matrices; the embedding for another vocabulary
has the rows of the stored embedding in another order. Such tensors take only the memory of the tensors that they are
computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.models.headers import TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = [
    "Dora",
    "LowRank",
    "LowRankExpert",
    "LowRankStack",
    "Padded",
    "Read",
    "ReplacedRows",
    "Rows",
    "RowsOfOthers",
    "Shifted",
    "SourceTensor",
    "Stacked",
]

Read = Callable[[TensorInfo], "torch.Tensor"]


class SourceTensor(Protocol):
    """Interface of a model's tensor, stored in a file (class `headers.TensorInfo`) or computed from stored tensors."""

    @property
    def dtype(self) -> str:
        """Name of the tensor's dtype as in safetensors files, such as "BF16"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def stored(self) -> Iterator[TensorInfo]:
        """Yield the tensors in files that are read when the values of this tensor are computed."""
        ...

    def value(self, read: Read) -> torch.Tensor:
        """Contiguous values of the tensor, which must not be written to.

        `read` returns the values of a stored tensor. The result may be the memory that `read` returned.
        """
        ...


@dataclass(frozen=True)
class _Changed:
    """A weight to which a LoRA adapter adds the product of its matrices `a` and `b`, times `scaling`."""

    weight: SourceTensor
    a: TensorInfo
    b: TensorInfo
    scaling: float

    @property
    def dtype(self) -> str:
        return "F32"  # in the weight's own dtype, small changes would be rounded away

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def stored(self) -> Iterator[TensorInfo]:
        yield from self.weight.stored()
        yield self.a
        yield self.b


@dataclass(frozen=True)
class LowRank(_Changed):
    """A weight to which a LoRA adapter adds the product of two small matrices, computed in float32.

    The value is weight + scaling x B A (arXiv:2106.09685, section 4.1). Matrix A (`a`) is [rank, inputs], and matrix B
    (`b`) is [outputs, rank]. The weight is [outputs, inputs], or [inputs, outputs] if `is_transposed`.
    """

    is_transposed: bool

    def value(self, read: Read) -> torch.Tensor:
        import torch

        a, b = read(self.a).float(), read(self.b).float()
        first, second = (a.T, b.T) if self.is_transposed else (b, a)
        return self.weight.value(read).to(torch.float32, copy=True).addmm_(first, second, alpha=self.scaling)


@dataclass(frozen=True)
class LowRankExpert(_Changed):
    """Weight of one expert in an MoE layer, to which a LoRA adapter adds a product of two matrices, in float32.

    The expert is one of `num_experts` in a layer's mixture of experts (MoE). The adapter has two matrices, `a` and `b`,
    for all experts together. The value is weight + scaling x B_e A_e, where A_e and B_e are the parts of `a` and `b`
    for expert e = `number`.

    - `a`: [experts x rank, inputs]; row e x rank + r belongs to expert e
    - `b`: [outputs, rank x experts]; column r x experts + e belongs to expert e
    - `first_row`: the row of the expert's whole matrix [outputs, inputs] at which the weight begins; a weight may be
      stored as a part of this matrix
    """

    number: int
    num_experts: int
    first_row: int

    def value(self, read: Read) -> torch.Tensor:
        import torch

        rank = self.a.shape[0] // self.num_experts
        a = read(self.a)[self.number * rank : (self.number + 1) * rank].float()
        rows = slice(self.first_row, self.first_row + self.shape[0])
        b = read(self.b)[rows, self.number :: self.num_experts].float()
        return self.weight.value(read).to(torch.float32, copy=True).addmm_(b, a, alpha=self.scaling)


@dataclass(frozen=True)
class LowRankStack(_Changed):
    """Stacked weights of all experts in an MoE layer, to which a LoRA adapter adds products of matrices, in float32.

    The weight of expert e becomes weight + scaling x B_e A_e, where A_e and B_e are the expert's parts of the adapter's
    matrices `a` [experts x rank, inputs] and `b` [outputs, rank x experts]. The tensor is [experts, outputs, inputs],
    or [experts, inputs, outputs] if `is_transposed`.
    """

    is_transposed: bool

    def value(self, read: Read) -> torch.Tensor:
        import torch

        num_experts = self.shape[0]
        a, b = read(self.a).float(), read(self.b).float()
        a = a.view(num_experts, -1, a.shape[1])
        b = b.view(len(b), -1, num_experts).permute(2, 0, 1)
        first, second = (a.mT, b.mT) if self.is_transposed else (b, a)
        return self.weight.value(read).to(torch.float32, copy=True).baddbmm_(first, second, alpha=self.scaling)


@dataclass(frozen=True)
class Dora:
    """A weight after the change by a DoRA adapter, which scales each output to a given length.

    The method is equation 5 of arXiv:2402.09353. `magnitude` [outputs] has the lengths. `changed` is the weight after
    the low-rank change. An output is a row of the weight, or a column if the weight is transposed. The result is in
    float32.
    """

    changed: LowRank
    magnitude: TensorInfo

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.changed.shape

    def stored(self) -> Iterator[TensorInfo]:
        yield from self.changed.stored()
        yield self.magnitude

    def value(self, read: Read) -> torch.Tensor:
        import torch

        weight = self.changed.value(read)
        inputs = 0 if self.changed.is_transposed else 1
        lengths = torch.linalg.vector_norm(weight, dim=inputs, keepdim=True)
        return weight.mul_(read(self.magnitude).float().view(lengths.shape) / lengths)


@dataclass(frozen=True)
class Shifted:
    """A bias vector to which a LoRA adapter adds its own bias: vector + scaling x addition, in float32."""

    vector: SourceTensor
    addition: TensorInfo
    scaling: float

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.vector.shape

    def stored(self) -> Iterator[TensorInfo]:
        yield from self.vector.stored()
        yield self.addition

    def value(self, read: Read) -> torch.Tensor:
        return self.vector.value(read).float() + self.scaling * read(self.addition).float()


@dataclass(frozen=True)
class ReplacedRows:
    """A weight with some rows replaced, for adapters that train embedding rows of single tokens.

    Row `numbers[i]` of `weight` is replaced by row i of `rows`.
    """

    weight: SourceTensor
    rows: TensorInfo
    numbers: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.weight.dtype if self.weight.dtype == self.rows.dtype else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def stored(self) -> Iterator[TensorInfo]:
        yield from self.weight.stored()
        yield self.rows

    def value(self, read: Read) -> torch.Tensor:
        import torch

        weight = self.weight.value(read)
        rows = read(self.rows)
        found = weight.to(weight.dtype if self.dtype == self.weight.dtype else torch.float32, copy=True)
        found[list(self.numbers)] = rows.to(found.dtype)
        return found


@dataclass(frozen=True, eq=False)
class RowsOfOthers:
    """Embedding rows from other models, for tokens that the model itself lacks.

    `positions` are the indices of these rows in the embedding, and `donors` are the embeddings of the other models. Row
    `positions[i]` is the mean of one row of each donor; donor k contributes its row `rows[k][i]`. Without donors the
    row is zero.
    """

    positions: NDArray[np.int64]
    donors: tuple[SourceTensor, ...]
    rows: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, eq=False)
class Rows:
    """A tensor that consists of rows of the tensor `own`, in another order, and rows of other models.

    Row i of the result is row `index[i]` of `own`; if `index[i]` is negative, the row comes from one of `others`. The
    dtype is the common dtype of all tensors involved. If the tensors have several dtypes, the dtype is float32, because
    any other dtype would round.
    """

    own: SourceTensor
    index: NDArray[np.int64]
    others: tuple[RowsOfOthers, ...] = ()

    @property
    def dtype(self) -> str:
        dtypes = {self.own.dtype, *(donor.dtype for rows in self.others for donor in rows.donors)}
        return dtypes.pop() if len(dtypes) == 1 else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.index), *self.own.shape[1:]

    def stored(self) -> Iterator[TensorInfo]:
        yield from self.own.stored()
        for rows in self.others:
            for donor in rows.donors:
                yield from donor.stored()

    def value(self, read: Read) -> torch.Tensor:
        import torch

        own = self.own.value(read)
        if not self.others and np.array_equal(self.index, np.arange(len(self.index))):
            return own[: len(self.index)]
        found = own[torch.from_numpy(self.index.clip(min=0)).to(own.device)]
        found = found.to(own.dtype if self.dtype == self.own.dtype else torch.float32)
        for rows in self.others:
            total = torch.zeros((), device=own.device)
            for donor, numbers in zip(rows.donors, rows.rows, strict=True):
                total = total + donor.value(read)[torch.from_numpy(numbers).to(own.device)]
            mean = total / max(1, len(rows.donors))
            found[torch.from_numpy(rows.positions).to(own.device)] = mean.to(found.dtype)
        return found


@dataclass(frozen=True)
class Stacked:
    """MoE matrices of all experts in a layer as one tensor [experts, rows, columns].

    `parts` has, for each expert of the mixture, one or several tensors whose rows together are the expert's matrix. The
    dtype is the common dtype of all tensors, or float32 if they have several dtypes.
    """

    parts: tuple[tuple[SourceTensor, ...], ...]

    @property
    def dtype(self) -> str:
        dtypes = {part.dtype for parts in self.parts for part in parts}
        return dtypes.pop() if len(dtypes) == 1 else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:]

    def stored(self) -> Iterator[TensorInfo]:
        for parts in self.parts:
            for part in parts:
                yield from part.stored()

    def value(self, read: Read) -> torch.Tensor:
        import torch

        return torch.stack([torch.cat([part.value(read) for part in parts]) for parts in self.parts])


@dataclass(frozen=True, eq=False)
class Padded:
    """A tensor extended to `num_rows` rows; each added row is the mean of the first `num_averaged` rows."""

    tensor: SourceTensor
    num_rows: int
    num_averaged: int

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_rows, *self.tensor.shape[1:]

    def stored(self) -> Iterator[TensorInfo]:
        yield from self.tensor.stored()

    def value(self, read: Read) -> torch.Tensor:
        import torch

        found = self.tensor.value(read)
        mean = found[: self.num_averaged].float().mean(dim=0, keepdim=True).to(found.dtype)
        return torch.cat([found, mean.expand(self.num_rows - len(found), *mean.shape[1:])])
