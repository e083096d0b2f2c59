"""Tensors of a model that no file holds, computed from stored tensors whenever they are read.

A low-rank adapter's weights are its base's plus a product of two small matrices; the embedding of a model with other
tokens is its rows in another order. They take only the memory of the tensors that they are computed from.
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
    """A tensor of a model: stored as it is (`headers.TensorInfo`), or computed from what is stored."""

    @property
    def dtype(self) -> str:
        """The name of the dtype in safetensors."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def stored(self) -> Iterator[TensorInfo]:
        """The stored tensors that `value` reads."""
        ...

    def value(self, read: Read) -> torch.Tensor:
        """The contents of the tensor, contiguous.

        They may be what `read` returned: never write to them.
        """
        ...


@dataclass(frozen=True)
class _Changed:
    """A weight that a LoRA adapter changes, and the two matrices whose product, times `scaling`, is added to it."""

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
    """A weight as a LoRA adapter changes it: weight + scaling x B A, in float32 (arXiv:2106.09685, section 4.1).

    `a` is [rank, inputs] and `b` [outputs, rank]; `weight` is [outputs, inputs], [inputs, outputs] if `is_transposed`.
    """

    is_transposed: bool

    def value(self, read: Read) -> torch.Tensor:
        import torch

        a, b = read(self.a).float(), read(self.b).float()
        first, second = (a.T, b.T) if self.is_transposed else (b, a)
        return self.weight.value(read).to(torch.float32, copy=True).addmm_(first, second, alpha=self.scaling)


@dataclass(frozen=True)
class LowRankExpert(_Changed):
    """A matrix of one expert of a mixture as a LoRA adapter changes it: weight + scaling x B_e A_e, in float32.

    The adapter changes the stack of the matrices of all `num_experts`; this one is of expert `number`. `a` is [experts
    x rank, inputs] and `b` [outputs, rank x experts], whose columns have the experts innermost; `weight` is the rows
    from `first_row` on of the expert's [outputs, inputs].
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
    """`LowRankExpert` of all experts, for weights that are stored as one tensor.

    The tensor is [experts, outputs, inputs], [experts, inputs, outputs] if `is_transposed`.
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
    """A weight with each output scaled to the length in `magnitude`, in float32: DoRA (arXiv:2402.09353, eq. 5).

    `magnitude` is [outputs]. The outputs are the rows of `changed`, or its columns if it is transposed.
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
    """A bias as a LoRA adapter with a bias of its own changes it: vector + scaling x addition, in float32."""

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
    """A weight with row `numbers[i]` replaced by row i of `rows`, for adapters that train single tokens."""

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
    """Rows taken from other models: row `positions[i]` is the mean of row `rows[k][i]` of each `donors[k]`.

    Without donors it is zero.
    """

    positions: NDArray[np.int64]
    donors: tuple[SourceTensor, ...]
    rows: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of `own` in another order: row i is row `index[i]` of it, or, where that is negative, one of `others`.

    The dtype is that of all tensors involved; float32 if they have several, because any other would round.
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
    """The experts of a layer as one tensor [experts, rows, columns]; the `parts` of each expert are joined by rows."""

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
    """A tensor with rows added, `num_rows` in all; each added row is the mean of the first `num_averaged` rows."""

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
