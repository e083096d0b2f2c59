"""Offsets of MergOPT that are computed from the task vectors of real experts, in place of independent noise.

Let theta be the parameters, theta_0 the base's parameters, and let D_j be the task vector of the given expert j. The
merge that a step simulates has K models and the coefficient alpha. There are two kinds of offsets:

    resampled:  (K alpha - 1) z; for each parameter, an expert j is drawn, and z is the parameter's part of D_j
    of merges:  (alpha - 1) (theta - theta_0) + alpha sum_j D_j over K - 1 experts, drawn without repetition

The offset of merges is the offset in equation 5 of the MergOPT paper. The resampled offset and the paper's noise
approximate it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["TaskVectors", "digest_of"]


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """A hash (hex) of the elements of task vectors.

    `tensors` are the whole task vectors of all experts, one expert after the other.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class TaskVectors:
    """Task vectors of experts from which MergOPT's offsets are computed.

    An offset is added to the parameters while gradients are computed, as if the model were merged. `vectors[j][i]` is
    the task vector of expert j on parameter i, in the order, shapes, dtypes and devices of the parameters that get the
    offset. `origin` has the values of these parameters in the base model; the offsets then simulate merges with the
    experts. If `origin` is None, offsets are resampled: for each parameter, the offset is the task vector of a randomly
    drawn expert, times a factor. If parameters are sharded, `vectors` and `origin` have this rank's parts, and
    `known_digest` is the digest of the whole task vectors (function `digest_of`). Raises ValueError if there is no
    expert.
    """

    vectors: Sequence[Sequence[torch.Tensor]]
    origin: Sequence[torch.Tensor] | None = None
    known_digest: str | None = None

    def __post_init__(self) -> None:
        if not self.vectors:
            raise ValueError("mergopt: no task vectors; expected those of at least one expert")

    @property
    def max_models(self) -> int | None:
        """The largest number of models in a simulated merge: one more than the number of experts, or None for no limit.

        If the field `origin` has the base's parameters, a simulated merge has the present model and each expert at most
        once. If the field is None, there is no limit: the offset of each parameter is the task vector of one randomly
        drawn expert, times a factor that depends on the number of models.
        """
        return None if self.origin is None else 1 + len(self.vectors)

    @cached_property
    def digest(self) -> str:
        """A hash (hex) that identifies the task vectors: it is computed from all of their elements."""
        return self.known_digest or digest_of(tensor for vector in self.vectors for tensor in vector)

    def add(self, parameters: Sequence[torch.Tensor], *, alpha: float, num_models: int, key: int) -> None:
        """Change `parameters` in place as a merge of `num_models` models with coefficient `alpha` would change them.

        If the field `origin` has the base's parameters, the result is the merge, by task arithmetic, of the trained
        model and `num_models` - 1 randomly drawn experts. Otherwise each parameter is changed by an offset that
        approximates such a merge: the task vector of one randomly drawn expert, times (`num_models` * `alpha` - 1).
        `key` is the seed of the draws.
        """
        rng = random.Random(f"task vectors {key}")
        if self.origin is None:
            for i, parameter in enumerate(parameters):
                parameter.add_(rng.choice(self.vectors)[i], alpha=num_models * alpha - 1)
            return
        others = rng.sample(self.vectors, num_models - 1)
        for i, (parameter, origin) in enumerate(zip(parameters, self.origin, strict=True)):
            parameter.sub_(origin).mul_(alpha).add_(origin)
            for other in others:
                parameter.add_(other[i], alpha=alpha)
