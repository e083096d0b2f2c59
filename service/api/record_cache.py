"""Cache of studies' stored data and of results computed from them. An entry is valid until its study changes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from service.results.load import RunReader
from service.results.record import RunRecord
from service.store import Store

__all__ = ["RunRecords"]

# Studies in the cache. The record of a study with 10,000 trials takes about 70 MB.
MAX_STUDIES = 4

# Studies whose results are computed at the same time; requests for other studies wait without taking a thread.
MAX_THREADS = 4

Result = TypeVar("Result")


@dataclass
class _Entry:
    """Cache entry of one study: its run record (all stored data), and results that were computed from the record.

    `reader` reads the whole record first, and later only the data that have changed. `version` has the study's number
    of attempts and the id of its last event when the record was read. The record is read again if one of them has
    changed. The `lock` lets one request at a time use the entry.
    """

    reader: RunReader
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: tuple[int, int] | None = None
    record: RunRecord | None = None
    results: dict[Callable[[RunRecord], Any], Any] = field(default_factory=dict)


class RunRecords:
    """Cache of the run records (all stored data) of recently requested studies, and of results computed from them.

    A run record has all data of a study that its result files and report are computed from. When a study changes, only
    the changed data are read again. Results are computed in separate threads. Concurrent requests for a study share one
    computation. A cache is bound to one asyncio event loop.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._program = version("mergesearch")
        self._threads = anyio.CapacityLimiter(MAX_THREADS)

    async def version(self, study_id: str) -> str:
        """Text that changes whenever results of the study may have changed; used as the version in the header ETag.

        Raises NotFound if there is no such study.
        """
        attempt, event = await anyio.to_thread.run_sync(self._version, study_id)
        return f"{self._program}-{attempt}-{event}"

    async def result(self, study_id: str, function: Callable[[RunRecord], Result]) -> Result:
        """Result of applying `function` to the study's run record, cached by study and function.

        Raises NotFound if there is no such study.
        """
        if (entry := self._entries.get(study_id)) is None:
            entry = self._entries[study_id] = _Entry(RunReader(self._store, study_id))
        self._entries.move_to_end(study_id)
        while len(self._entries) > MAX_STUDIES:
            self._entries.popitem(last=False)
        async with entry.lock:
            result: Result = await anyio.to_thread.run_sync(
                self._computed, entry, study_id, function, limiter=self._threads
            )
            return result

    def _version(self, study_id: str) -> tuple[int, int]:
        return self._store.job(study_id).attempt, self._store.last_event_id(study_id)

    def _computed(self, entry: _Entry, study_id: str, function: Callable[[RunRecord], Result]) -> Result:
        # The version is read first: a result stored between the two reads makes the entry outdated, never wrong.
        version = self._version(study_id)
        if entry.record is None or entry.version != version:
            entry.record, entry.results = entry.reader.read(), {}
            entry.version = version
        if function not in entry.results:
            entry.results[function] = function(entry.record)
        result: Result = entry.results[function]
        return result
