"""Merged models for download: written one at a time in a separate process, kept in the data directory."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from service.api.worker_process import WorkerProcess
from service.store import Store
from service.studies.export import export_trial
from service.types import ExportRecord, ExportState

__all__ = ["Exports", "Tar", "export_id"]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
# A tar file ends with two empty blocks and is padded to whole records.
BLOCK, RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE


def export_id(study_id: str, trial: int, dtype: str) -> str:
    """The id of an export: the same trial in the same dtype is one export."""
    return hashlib.sha256(f"{study_id}/{trial}/{dtype}".encode()).hexdigest()[:32]


class Exports:
    """Writes the exports that the store lists as unfinished; an interrupted one continues at the next start."""

    def __init__(self, store: Store, data_dir: Path) -> None:
        self._store = store
        self._data_dir = data_dir
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._process: WorkerProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self) -> None:
        for record in self._store.exports():
            if record.state in (ExportState.WAITING, ExportState.RUNNING):
                self._waiting.put_nowait(record.id)
        self._task = asyncio.create_task(self._run(), name="exports")

    async def stop(self) -> None:
        """Interrupt the export that is being written; it continues at the next start."""
        self._is_stopping = True
        if self._process is not None:
            await anyio.to_thread.run_sync(self._process.stop)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def directory(self, record: ExportRecord) -> Path:
        """Where the model is once the export is COMPLETE; the folder in the archive has the same name."""
        name = self._store.study(record.study).name
        return self._data_dir / "exports" / record.id / f"{name}-trial-{record.trial}"

    async def request(self, study_id: str, *, trial: int, dtype: str) -> ExportRecord:
        """The export, queued if it is new; one that failed, or whose files were removed, is queued again."""
        wanted = ExportRecord(
            id=export_id(study_id, trial, dtype),
            study=study_id,
            trial=trial,
            dtype=dtype,
            state=ExportState.WAITING,
            created_at=time.time(),
        )
        record, is_new = await anyio.to_thread.run_sync(self._stored, wanted)
        if is_new:
            self._waiting.put_nowait(record.id)
        return record

    def _stored(self, wanted: ExportRecord) -> tuple[ExportRecord, bool]:
        record = self._store.add_export(wanted)
        is_gone = record.state is ExportState.COMPLETE and not self.directory(record).is_dir()
        if record.state is ExportState.FAIL or is_gone:
            self._store.set_export_state(record.id, ExportState.WAITING)
            return self._store.export(record.id), True
        return record, record == wanted

    async def _run(self) -> None:
        while True:
            await self._write(await self._waiting.get())

    async def _write(self, name: str) -> None:
        try:
            record = await anyio.to_thread.run_sync(self._store.export, name)
            if record.state not in (ExportState.WAITING, ExportState.RUNNING):
                return
            directory = await anyio.to_thread.run_sync(self._prepare, record)
            if not directory.exists():  # models appear complete or not at all: an earlier server wrote this one
                self._process = WorkerProcess("export")
                await self._process.call(
                    _export, self._store.url, record.study, str(record.trial), directory, dtype=record.dtype
                )
            state, reason = ExportState.COMPLETE, None
        except Exception as error:
            logger.warning("export %s failed", name, exc_info=error)
            state, reason = ExportState.FAIL, str(error) or repr(error)
        finally:
            if self._process is not None:
                await anyio.to_thread.run_sync(self._process.stop)
        if not self._is_stopping:
            await anyio.to_thread.run_sync(self._store.set_export_state, name, state, reason)

    def _prepare(self, record: ExportRecord) -> Path:
        self._store.set_export_state(record.id, ExportState.RUNNING)
        directory = self.directory(record)
        directory.parent.mkdir(parents=True, exist_ok=True)  # holds what an interrupted export continues from
        return directory


def _export(url: str, study_id: str, trial: str, directory: Path, *, dtype: str) -> None:
    store = Store(url)
    try:
        export_trial(store, store.study(study_id), trial, directory, dtype=dtype)
    finally:
        store.close()


@dataclass(frozen=True)
class Tar:
    """An uncompressed archive of the files of `directory`, in one folder of that name. Only one chunk at a time is in
    memory. The same files give the same bytes."""

    directory: Path
    modified_at: float

    @property
    def size(self) -> int:
        """Total bytes that `chunks` yields."""
        total = sum(len(header) + _padded(file.stat().st_size, BLOCK) for file, header in self._members())
        return _padded(total + 2 * BLOCK, RECORD)

    def chunks(self) -> Iterator[bytes]:
        written = 0
        for file, header in self._members():
            yield header
            size = 0
            with file.open("rb") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    size += len(chunk)
                    yield chunk
            padding = _padded(size, BLOCK) - size
            yield bytes(padding)
            written += len(header) + size + padding
        yield bytes(_padded(written + 2 * BLOCK, RECORD) - written)

    def _members(self) -> Iterator[tuple[Path, bytes]]:
        for file in sorted(self.directory.iterdir()):
            member = tarfile.TarInfo(f"{self.directory.name}/{file.name}")
            member.size = file.stat().st_size
            member.mtime = int(self.modified_at)
            yield file, member.tobuf()


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
