"""A cache of run records and reports, each valid until its study changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from service.results.files import RunRecord
from service.results.load import run_record
from service.results.report import render_report
from service.store import Store

__all__ = ["RunRecords"]

# Studies in the cache; the record of a large study takes about ten MB.
MAX_STUDIES = 4


@dataclass
class _Entry:
    version: tuple[int, int]
    record: RunRecord
    report: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class RunRecords:
    """Run records and reports of recently requested studies. Thread-safe; concurrent requests share one computation."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, study_id: str) -> RunRecord:
        """Raises NotFound."""
        return self._entry(study_id).record

    def report(self, study_id: str) -> str:
        """The study's report.html. Raises NotFound."""
        entry = self._entry(study_id)
        with entry.lock:
            if entry.report is None:
                entry.report = render_report(entry.record)
            return entry.report

    def _entry(self, study_id: str) -> _Entry:
        with self._lock:
            # The version is read first: a result stored between the two reads makes the entry outdated, never wrong.
            version = (self._store.study(study_id).attempt, self._store.last_event_id(study_id))
            entry = self._entries.get(study_id)
            if entry is None or entry.version != version:
                entry = _Entry(version, run_record(self._store, study_id))
                self._entries[study_id] = entry
            self._entries.move_to_end(study_id)
            while len(self._entries) > MAX_STUDIES:
                self._entries.popitem(last=False)
            return entry
