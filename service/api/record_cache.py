"""Cache of studies' stored data and of results computed from them. An entry is valid until its study changes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread

from service.results.load import RunReader
from service.results.record import RunRecord
from service.store import Store
from service.types import TrialResult

__all__ = ["RunRecords", "Version", "program_version"]

# Studies in the cache. The record of a study with 10,000 trials takes about 70 MB.
MAX_STUDIES = 4

# Studies whose results are computed at the same time; requests for other studies wait without taking a thread.
MAX_THREADS = 4

# Large reads of the store that run at the same time, such as the texts of samples; others wait without taking a thread.
MAX_LARGE_READS = 2

Result = TypeVar("Result")


@cache
def program_version() -> str:
    """Version of mergesearch, which is read once per process: it takes 10 ms."""
    return version("mergesearch")


class Version(NamedTuple):
    """Version of a study's results: it grows whenever the results may have changed.

    `attempt` is the number of processes (drivers) that have worked on the study, and `event` is the id of the study's
    last event.
    """

    attempt: int
    event: int


@dataclass
class _Entry:
    """Cache entry of one study: its run record (all stored data), and results that were computed from the record.

    `reader` reads the whole record first, and later only the data that have changed. The record has at least the
    changes up to `version`. `trials` has the results of the trials, with at least the changes up to `trials_version`.
    The `lock` lets one request at a time use the entry.
    """

    reader: RunReader
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: Version | None = None
    record: RunRecord | None = None
    trials_version: Version | None = None
    trials: tuple[TrialResult, ...] | None = None
    results: dict[Callable[[RunRecord], Any], Any] = field(default_factory=dict)


class RunRecords:
    """Cache of the run records of recently requested studies, and of results computed from them.

    A run record has all data of a study from which its result files and report are computed. When a study changes, only
    the changed data are read again. Results are computed in separate threads. Concurrent requests for a study share one
    computation. A cache is bound to one asyncio event loop.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._program = program_version()
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        self._large_reads = anyio.CapacityLimiter(MAX_LARGE_READS)

    def version(self, study_id: str) -> Version:
        """Read the present version of a study's results from the store. Raises NotFound if there is no such study."""
        return Version(*self._store.result_version(study_id))

    def tag(self, version: Version) -> str:
        """Value of the header ETag of responses with results of the given version."""
        return f'"{self._program}-{version.attempt}-{version.event}"'

    async def result(
        self, study_id: str, function: Callable[[RunRecord], Result], *, since: Version | None = None
    ) -> Result:
        """Result of applying `function` to the study's run record (all its stored data), cached by study and function.

        The result contains at least the changes up to the version `since`, which the caller has just read. If `since`
        is None, the present version is read from the database. Raises NotFound if there is no such study.
        """
        entry = self._entry(study_id)
        async with entry.lock:
            result: Result
            if function in entry.results and _has(entry.version, since):
                result = entry.results[function]
            else:
                result = await anyio.to_thread.run_sync(
                    self._computed, entry, study_id, function, since, limiter=self._threads
                )
            return result

    async def trials(self, study_id: str, *, since: Version) -> tuple[TrialResult, ...]:
        """Results of all trials of the study. If the study is cached, only trials that may have changed are read again.

        `since` is the version of the study that the caller has just read; the results contain all changes up to it.
        """
        entry = self._entry(study_id)
        async with entry.lock:
            if entry.trials is None or not _has(entry.trials_version, since):
                entry.trials = await anyio.to_thread.run_sync(entry.reader.read_trials, limiter=self._threads)
                entry.trials_version = since
            return entry.trials

    async def large_read(self, function: Callable[[], Result]) -> Result:
        """Call `function`, which reads much data from the store, and return its result; few such calls run at a time.

        The result is not cached.
        """
        return await anyio.to_thread.run_sync(function, limiter=self._large_reads)

    def _entry(self, study_id: str) -> _Entry:
        """Find or add the cache entry of a study.

        If the cache then has more than MAX_STUDIES entries, the least recently used entry is removed.
        """
        if (entry := self._entries.get(study_id)) is None:
            entry = self._entries[study_id] = _Entry(RunReader(self._store, study_id))
        self._entries.move_to_end(study_id)
        while len(self._entries) > MAX_STUDIES:
            self._entries.popitem(last=False)
        return entry

    def _computed(
        self, entry: _Entry, study_id: str, function: Callable[[RunRecord], Result], since: Version | None
    ) -> Result:
        # The version is read first: a result stored between the two reads makes the entry outdated, never wrong.
        version = self.version(study_id) if since is None else since
        if entry.record is None or not _has(entry.version, version):
            entry.record, entry.results = entry.reader.read(), {}
            entry.version = version
        if function not in entry.results:
            entry.results[function] = function(entry.record)
        result: Result = entry.results[function]
        return result


def _has(version: Version | None, since: Version | None) -> bool:
    """Whether data of the given `version` have all changes up to `since`; False if either version is not known."""
    return version is not None and since is not None and version >= since
