"""Time limits for the work of a replica; a replica that exceeds them is regarded as hung.

Nothing can interrupt the engine's thread. A replica whose work is overdue fails its health checks, and Serve replaces
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from workers.models.remote import absent_bytes
from workers.types import Family, ScoreRequest

__all__ = ["TIME_LIMITS", "TimeLimits", "Watchdog", "weight_bytes"]

GB = 1e9

# Seconds for each GB of the weights of all models, above which work counts as hung; small models have the limits of
# `TimeLimits`. They are several times what slow machines take, as a limit that is too short ends a working replica.
# For a start: a download at 100 MB/s takes 10 s, hashes, the search for NaN and the copy to shared memory 1 to 2 s each
# from a slow disk, and all ranks pin the memory. The first chunk computes statistics of all sources on the CPU.
START_S_PER_GB = 30.0
# A chunk may include a comparison with transformers, which waits for those of the machine's other engines.
CHUNK_S_PER_GB = 10.0
OTHER_S_PER_GB = 100.0
# Four models of 70B (564 GB) are planned to take up to 1,245 s for each verified sample of 256 tokens on the CPU.
VERIFIED_SAMPLE_S_PER_GB = 6.0


@dataclass(frozen=True)
class TimeLimits:
    """Time limits, in seconds, for the work of a replica. The defaults are those for small models.

    - `start_s`: the start of the replica's worker, with downloads and compilation
    - `first_chunk_s`: scoring a chunk (the samples of one request) with a task or a merge method that is new to
      the replica, for which data are prepared and kernels compiled
    - `chunk_factor`, `chunk_s`: any other chunk may take `chunk_factor` times the time expected from the chunks
      measured so far, and at least `chunk_s`
    - `other_s`: other work, such as describing tasks and verification
    - `verified_sample_s`: verification may take as long for each of its samples, and at least `other_s`
    """

    start_s: float = 1800.0
    first_chunk_s: float = 1800.0
    chunk_s: float = 60.0
    chunk_factor: float = 10.0
    other_s: float = 7200.0
    verified_sample_s: float = 0.0

    @classmethod
    def of_bytes(cls, num_bytes: int) -> Self:
        """Limits for models whose weights have `num_bytes` bytes together; none is below the default."""
        size = num_bytes / GB
        return cls(
            start_s=max(cls.start_s, START_S_PER_GB * size),
            first_chunk_s=max(cls.first_chunk_s, START_S_PER_GB * size),
            chunk_s=max(cls.chunk_s, CHUNK_S_PER_GB * size),
            other_s=max(cls.other_s, OTHER_S_PER_GB * size),
            verified_sample_s=VERIFIED_SAMPLE_S_PER_GB * size,
        )

    @classmethod
    def of_family(cls, family: Family) -> Self:
        """Limits for the models of `family`, by the sizes of their files (function `weight_bytes`)."""
        return cls.of_bytes(weight_bytes(family))

    def verification_s(self, num_samples: int) -> float:
        return max(self.other_s, num_samples * self.verified_sample_s)


TIME_LIMITS = TimeLimits()


def weight_bytes(family: Family) -> int:
    """Bytes of the weights of all models in `family`, with those that are still to be downloaded.

    A model that this machine knows nothing of counts as 0 bytes.
    """
    adapted = (model.adapts for model in family.models if model.adapts is not None)
    directories = {Path(each) for each in (*(model.directory for model in family.models), *adapted)}
    here = (file.stat().st_size for directory in directories for file in directory.glob("*.safetensors"))
    return sum(here) + absent_bytes(directories)


class Watchdog:
    """Timer of a replica's work, which reports work beyond its time limit.

    The engine's thread enters the context `chunk` when it scores a chunk (the samples of one request), and the context
    `work` for other work. Any thread may call the method `overdue`. `limits` are the time limits. `start_s` is the
    number of seconds that the start of the replica's worker took. A chunk may always take at least this long, because
    it may include a comparison with transformers, as the start does.
    """

    def __init__(self, limits: TimeLimits, *, start_s: float) -> None:
        self._limits = limits
        self._chunk_s = max(limits.chunk_s, start_s)
        self._known: set[str] = set()
        self._slowest_s = 0.0
        self._slowest_sample_s = 0.0
        self._current: tuple[float, float, str] | None = None

    @contextmanager
    def chunk(self, request: ScoreRequest) -> Iterator[None]:
        kinds = {span.task.digest for span in request.spans} | {merge.method for merge in request.recipe.merges()}
        expected_s = max(self._slowest_s, request.num_samples * self._slowest_sample_s)
        limit_s = max(self._chunk_s, self._limits.chunk_factor * expected_s)
        if not kinds <= self._known:
            limit_s = max(limit_s, self._limits.first_chunk_s)
        started = time.monotonic()
        with self.work(limit_s, f"a chunk of {request.num_samples} samples"):
            yield
        elapsed_s = time.monotonic() - started
        self._known |= kinds
        self._slowest_s = max(self._slowest_s, elapsed_s)
        self._slowest_sample_s = max(self._slowest_sample_s, elapsed_s / max(request.num_samples, 1))

    @contextmanager
    def work(self, limit_s: float, what: str) -> Iterator[None]:
        self._current = (time.monotonic(), limit_s, what)
        try:
            yield
        finally:
            self._current = None

    def overdue(self) -> str | None:
        """Describe the running work that exceeded its time limit; None if there is no such work."""
        if (current := self._current) is None:
            return None
        started, limit_s, what = current
        elapsed_s = time.monotonic() - started
        if elapsed_s <= limit_s:
            return None
        return f"it has worked on {what} for {elapsed_s:.0f} s; expected: at most {limit_s:.0f} s"
