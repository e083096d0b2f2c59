"""Statistics of task vectors over all tensors of a model: magnitude thresholds and the majority sign.

Merges with `trim: model` use them. All tensors of the merged model are included: also the embedding and the output head
(with the rows of the merged vocabulary), tensors that a recipe merges by another method, and elements that an expert
did not change. An output head that is tied to the embedding is the same tensor, and is included once.

Tensors are read one by one, in the order of their names. This module does not depend on how a source is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from workers.merging.methods.consensus import elected_balance
from workers.merging.methods.sparsify import masked_task_vectors, trimmed
from workers.merging.order_statistics import (
    ALL,
    DIGIT_BITS,
    MOST_LEFT,
    Selected,
    Threshold,
    TieOrder,
    Trim,
    Words,
    selected,
)

__all__ = ["ModelMagnitudes", "ModelTensor", "WholeTaskVector", "balance_of"]

# Elements whose words are made at a time, in temporaries of 8 bytes.
CHUNK = 1 << 22
# The dtypes that the compiled functions read.
COMPILED = {torch.float32, torch.bfloat16, torch.float16}


class ModelTensor(NamedTuple):
    """One tensor of an expert, and the same tensor of its base.

    `order` is the rule that breaks ties between elements of equal magnitude. `mask` is the (density, key) of a random
    mask (DARE), where the key is the seed of its random numbers; None is no mask. With a mask, the task vector is
    divided by the density where the mask keeps an element, and is zero elsewhere.
    """

    source: torch.Tensor
    base: torch.Tensor
    order: TieOrder
    mask: tuple[float, int] | None = None

    def task_vector(self) -> torch.Tensor:
        """Compute the tensor's task vector, source minus base, in float32, after its random `mask` if it has one."""
        source, base = self.source.float(), self.base.float()
        if self.mask is None:
            return source - base
        density, key = self.mask
        return masked_task_vectors([source], base, [density], [key])[0]


@dataclass(frozen=True)
class ModelMagnitudes:
    """Magnitude thresholds of one tensor for merges that trim whole models.

    A whole model keeps its largest elements over all tensors, so the thresholds depend on all tensors. The class
    implements `Ranked`, the interface of objects that find the n-th largest magnitude, but ranks count the elements of
    the model, not of the tensor. `num_elements` is the number of elements of the model. `trims` maps each rank that a
    merge uses (the number of elements that the model keeps) to the threshold of this tensor.
    """

    num_elements: int
    trims: Mapping[int, Trim]

    @property
    def num_not_zero(self) -> int:
        raise NotImplementedError("zeros of whole models are not counted")

    def trim(self, rank: int) -> Trim:
        """Threshold of this tensor for a merge that keeps the `rank` largest elements of the whole model.

        The merge keeps the elements of this tensor that reach the threshold. The result contains a lower and an upper
        bound; both are the threshold.
        """
        return self.trims[rank]

    def threshold(self, rank: int, sizes: torch.Tensor, order: TieOrder) -> Threshold:
        """Threshold of this tensor for a merge that keeps the `rank` largest elements of the whole model.

        The parameters `sizes` and `order` are not used; they belong to the interface `Ranked`.
        """
        return self.trims[rank].high


class WholeTaskVector:
    """Task vector of an expert over all of its tensors, whose n-th largest magnitude is found without sorting.

    `names` are the names of the tensors, and `num_elements` is the number of elements of all tensors together. `read`
    returns a tensor by its name. `compiles` says whether compiled kernels may be used. Finding the magnitude of a rank
    n takes two to five passes over the expert and the base. The first pass, which counts elements by the first bits of
    their magnitudes, is the same for all ranks. Its counts (512 KiB) are kept, so that each further rank takes one pass
    less. The results are also kept.
    """

    def __init__(
        self, names: Sequence[str], num_elements: int, read: Callable[[str], ModelTensor], *, compiles: bool = True
    ) -> None:
        self.num_elements = num_elements
        self._places = {name: place for place, name in enumerate(names)}
        self._read = read
        self._tensors = [_Words(name, read, compiles=compiles) for name in names]
        self._first: np.ndarray | None = None
        self._found: dict[int, Selected] = {}

    @property
    def num_bytes(self) -> int:
        return 0 if self._first is None else self._first.nbytes

    def of_tensor(self, name: str, order: TieOrder, ranks: Iterable[int]) -> ModelMagnitudes:
        """Find thresholds of the tensor `name` for merges that keep the largest elements of the whole model.

        For each number n in `ranks`, at least 1, the result has the threshold for keeping the n largest elements of all
        tensors together. Of this tensor, the elements that reach the threshold are kept. `order` is the rule that
        breaks ties between the tensor's elements of equal magnitude.
        """
        return ModelMagnitudes(self.num_elements, {rank: self._trim(name, order, rank) for rank in ranks})

    def _trim(self, name: str, order: TieOrder, rank: int) -> Trim:
        if rank >= self.num_elements:
            return ALL
        found = self._selected(rank)
        # Among elements with equal magnitudes and marks, those of later tensors count as larger.
        is_kept = self._places[name] >= found.tensor
        threshold = found.threshold if is_kept else order.above(found.threshold)
        return Trim.at(threshold, is_tied=found.num_equal > MOST_LEFT)

    def _selected(self, rank: int) -> Selected:
        if rank not in self._found:
            if self._first is None:
                self._first = sum(
                    (each.counts(0, 64 - DIGIT_BITS) for each in self._tensors), np.zeros(1 << DIGIT_BITS, np.int64)
                )
            self._found[rank] = selected(self._tensors, self.num_elements - rank, first=self._first)
        return self._found[rank]


def balance_of(tensors: Sequence[ModelTensor], shares: Sequence[float], known: Sequence[ModelMagnitudes]) -> int:
    """Number of elements of one tensor with a positive elected sign, minus the number with a negative sign.

    The elected sign of an element is the sign of the sum of the experts' trimmed task vectors. Trimming keeps the
    largest elements of each expert's whole task vector. Each argument has an entry for each expert:

    - `tensors`: this tensor of the expert, and the same tensor of its base
    - `shares`: the share of the whole task vector that trimming keeps
    - `known`: the magnitude thresholds of this tensor that follow from the share
    """
    each = zip(tensors, shares, known, strict=True)
    return elected_balance([trimmed(of.task_vector(), share, of.order, table) for of, share, table in each])


class _Words:
    """The elements of one tensor as 64-bit sort keys; sorting elements by key sorts them by magnitude.

    The n-th largest element of a whole model is found by counting the keys that begin with certain bits. Each pass over
    the keys reads the tensor again. The class implements the interface `order_statistics.Words`. `read` returns the
    tensor called `name`, which is read again at each use. `compiles` says whether compiled kernels may be used.
    """

    def __init__(self, name: str, read: Callable[[str], ModelTensor], *, compiles: bool) -> None:
        self._name = name
        self._read = read
        self._compiles = compiles

    def counts(self, prefix: int, shift: int) -> np.ndarray:
        return self._words().counts(prefix, shift)

    def with_prefix(self, prefix: int, shift: int, most: int) -> np.ndarray:
        return self._words().with_prefix(prefix, shift, most)

    def _words(self) -> Words:
        tensor = self._read(self._name)
        is_usual = 0 < tensor.source.numel() < 2**32
        if not (self._compiles and is_usual and {tensor.source.dtype, tensor.base.dtype} <= COMPILED):
            return _PlainWords(tensor)
        from workers.merging.kernels.sorting import magnitude_words

        source, base = tensor.source.contiguous(), tensor.base.contiguous()
        return magnitude_words(source, base, tensor.order.factor, tensor.mask)


class _PlainWords:
    """A tensor's elements as 64-bit sort keys, computed by PyTorch on any device.

    The n-th largest of a whole model's elements is found by counting the keys that begin with certain bits. The class
    implements the interface `order_statistics.Words`. The elements are those of the task vector of `tensor`; sorting
    them by key sorts them by magnitude.
    """

    def __init__(self, tensor: ModelTensor) -> None:
        self._sizes = tensor.task_vector().abs_().flatten()
        self._order = tensor.order

    def counts(self, prefix: int, shift: int) -> np.ndarray:
        counts = torch.zeros(1 << DIGIT_BITS, dtype=torch.int64, device=self._sizes.device)
        for bits, at in self._found(prefix, shift + DIGIT_BITS):
            digits = bits >> (shift - 32) if shift >= 32 else self._order.marks_at(at) >> shift
            counts += torch.bincount(digits & ((1 << DIGIT_BITS) - 1), minlength=1 << DIGIT_BITS)
        found: np.ndarray = counts.cpu().numpy()
        return found

    def with_prefix(self, prefix: int, shift: int, most: int) -> np.ndarray:
        keys = [bits.long() << 32 | self._order.marks_at(at) for bits, at in self._found(prefix, shift)]
        found = torch.cat([*keys, self._sizes.new_empty(0, dtype=torch.int64)])
        words: np.ndarray = found.cpu().numpy().astype(np.uint64)
        return words

    def _found(self, prefix: int, shift: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, chunk by chunk, the elements whose sort keys begin with `prefix`, as (magnitudes, indices).

        The sort key of an element is a number of 64 bits. The upper half is the element's magnitude, and the lower half
        is its mark, by which elements of equal magnitude are ordered. An element is yielded if `prefix` is its sort key
        without the last `shift` bits.

        Each magnitude is given as the int32 that has the same bits as the float32. Marks are computed only if `shift`
        is less than 32, so that `prefix` contains a part of the mark.
        """
        for start in range(0, self._sizes.numel(), CHUNK):
            bits = self._sizes[start : start + CHUNK].view(torch.int32)
            of_magnitude = prefix if shift >= 32 else prefix >> (32 - shift)
            at = (bits >> max(0, shift - 32) == of_magnitude).nonzero().flatten() if shift < 64 else None
            if at is None:
                yield bits, torch.arange(start, start + bits.numel(), device=bits.device)
                continue
            if shift < 32:
                marks = self._order.marks_at(start + at)
                at = at[marks >> shift == prefix & ((1 << (32 - shift)) - 1)]
            yield bits[at], start + at
