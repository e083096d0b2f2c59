"""The share of its GPU's memory that an engine leaves to gradients, and to verification after the search.

Engines on several GPUs leave none, and neither do engines of images, whose memory is not planned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from search_spaces.study.file import Study
from service.engine_machines import EngineMachines
from service.studies.preflight.dtype import engine_dtype
from workers.engines.transformers.batches import BATCH, batch_bytes
from workers.engines.vllm.memory import (
    CONTEXT_BYTES,
    MANY_TEXTS,
    TEXT_TOKENS,
    MemoryRequirements,
    free_for_engine,
    memory_requirements,
    usable_gpu_bytes,
)
from workers.engines.vllm.paths.sizes import path_requirements
from workers.errors import EngineUnavailable
from workers.models.family import ResolvedFamily
from workers.serving.gpu_verification import verification_bytes

__all__ = ["SharedGpu", "share_with_verification"]

# Engines leave multiples of this share of their GPU's memory, so that similar studies have equal engines, which they
# can use together.
SHARE_STEP = 0.01


class SharedGpu:
    """The smallest GPU of the machines that run a study's engines, if an engine can leave a share of it.

    `study` and `sources` are the study and its models. `total` is the memory of the GPU in bytes; it must be known.
    `max_layers` is the number of layers of the longest merge if merges have any number of layers, else 0. `aligns` says
    whether merges may have alignments.
    """

    def __init__(
        self, study: Study, sources: ResolvedFamily, total: int, *, max_layers: int = 0, aligns: bool = False
    ) -> None:
        self._study = study
        self._sources = sources
        self.total = total
        self._max_layers = max_layers
        self._aligns = aligns

    @staticmethod
    def may_share(study: Study, sources: ResolvedFamily) -> bool:
        """Whether engines of a study may leave a share of their GPU: engines of text, on one GPU each."""
        return study.engine.tensor_parallel_size == 1 and sources.modality.runs_on_vllm

    @staticmethod
    def smallest(machines: Sequence[EngineMachines]) -> int | None:
        """Memory of the smallest GPU of `machines` in bytes; None if it is not known."""
        known = [group.gpu_bytes for group in machines if group.num_gpus and group.gpu_bytes is not None]
        return min(known, default=None)

    def share_of(self, num_bytes: int) -> float:
        """The share of the GPU for a process that needs `num_bytes` bytes and a CUDA context; it may be above 1."""
        return round(SHARE_STEP * math.ceil((num_bytes + CONTEXT_BYTES) / (SHARE_STEP * self.total)), 2)

    def can_leave(self, share: float, num_texts: int) -> bool:
        """Whether an engine that serves `num_texts` texts at once has room beside `share` of the GPU."""
        needs = self._needs(share)
        return needs is not None and needs.engine(num_texts) + needs.beside <= self._usable(share)

    def holds_sources(self, share: float) -> bool:
        """Whether the GPU has room for `share`, an engine that serves many texts at once, and the source weights."""
        needs = self._needs(share)
        return needs is not None and needs.engine(MANY_TEXTS) + needs.beside + needs.bank <= self._usable(share)

    def _usable(self, share: float) -> int:
        return usable_gpu_bytes(free_for_engine(self.total, self.total, share), self.total)

    def _needs(self, share: float) -> MemoryRequirements | None:
        """The memory of an engine beside `share` of the GPU; None if the longest merge has no room there."""
        if share >= 1:
            return None
        config, dtype = self._sources.base.settings, engine_dtype(self._study)
        max_length = self._study.engine.max_model_len
        if not self._max_layers:
            return memory_requirements(self._sources, config=config, dtype=dtype, max_length=max_length)
        try:
            needs, _ = path_requirements(
                self._sources,
                config=config,
                dtype=dtype,
                max_length=max_length,
                ranks=1,
                max_layers=self._max_layers,
                aligns=self._aligns,
                gpu_free=free_for_engine(self.total, self.total, share),
                gpu_total=self.total,
            )
        except EngineUnavailable:
            return None
        return needs


def share_with_verification(
    study: Study,
    sources: ResolvedFamily,
    machines: Sequence[EngineMachines],
    *,
    share: float,
    max_layers: int = 0,
    aligns: bool = False,
) -> float:
    """The share that engines leave, made large enough for verification if engines use every GPU.

    `share` is the share for gradients; 0 if they are computed elsewhere, or not at all. It stays as it is if the study
    verifies nothing, if merges may have alignments (which the engine's process verifies), or if an engine beside the
    larger share would serve few texts at once, or could no longer keep the sources on its GPU. `machines` are the
    groups of machines that can run engines. The other arguments are as in the class `SharedGpu`.

    The share has room for the keys and values of the samples that are completed at once, whose texts are assumed to
    have TEXT_TOKENS tokens, but not more than the engine's largest length. If such a share is too large, the share has
    room for half as many samples, and so on.
    """
    free = sum(group.num_gpus * group.most for group in machines) - study.engine.num_gpus
    total = SharedGpu.smallest(machines)
    if free > 0 or total is None or study.engine.verify is False or aligns or not SharedGpu.may_share(study, sources):
        return share
    gpu = SharedGpu(study, sources, total, max_layers=max_layers, aligns=aligns)
    num_tokens = min(TEXT_TOKENS, study.engine.max_model_len)
    most = min(BATCH, study.engine.verify.samples * len(study.scored_objectives))
    for halved in range(most.bit_length()):
        batch = batch_bytes(sources.base.settings, [(num_tokens, 0)] * (most >> halved))
        verifying = gpu.share_of(verification_bytes(sources.num_parameters, batch))
        if verifying <= share:
            return share
        if gpu.can_leave(verifying, MANY_TEXTS) and (gpu.holds_sources(verifying) or not gpu.holds_sources(share)):
            return verifying
    return share
