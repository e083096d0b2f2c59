"""Queue of exports (merged models for download), which a separate process writes one at a time."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import shutil
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from service.api.limits.exports import ExportLimits, KeptExport, to_remove
from service.disk import alignments_dir, job_dir
from service.errors import Conflict, NotFound
from service.jobs.registry import kind_of
from service.store import Store
from service.store.artifacts import EXPORT_PREFIX, ArtifactStore
from service.store.availability import is_away
from service.store.blobs import StoredFile
from service.store.exports import ExportStore
from service.studies.export import export_trial
from service.threads import Work, in_thread
from service.types import ArtifactRecord, ExportRecord, ExportState, JobRecord
from service.worker_process import WorkerProcess

__all__ = ["Exports", "Tar", "artifact_name", "export_id"]

from workers.telemetry import logs

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
# Seconds between searches for expired exports.
SWEEP_S = 3600.0
# Seconds between searches for exports that other servers have stored, or that could not be written earlier because the
# database did not answer.
LOOK_S = 2.0
# A tar file ends with two empty blocks and is padded to whole records.
BLOCK, RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE


def export_id(study_id: str, trial: int, dtype: str) -> str:
    """Id of an export (a merged model for download): 32 hexadecimal digits of a hash of its study, trial and dtype."""
    return hashlib.sha256(f"{study_id}/{trial}/{dtype}".encode()).hexdigest()[:32]


def artifact_name(name: str) -> str:
    """Name of the artifact that has the files of the export with the id `name`.

    Exports (merged models for download) are artifacts only if the server keeps its files in an object store.
    """
    return f"{EXPORT_PREFIX}{name}"


class Exports:
    """Queue that writes requested exports (merged models), and removes exports that exceed the limits `keep`.

    An interrupted export continues when the queue is started again. If several servers use the same database, only the
    leader (the server for which `is_leader` returns True) writes and removes exports. An export is a directory in
    `data_dir`, which all servers share. If `artifacts`, the store of jobs' files, is in an object store, a finished
    export is moved there.
    """

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        *,
        keep: ExportLimits | None = None,
        artifacts: ArtifactStore | None = None,
        is_leader: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._records = ExportStore(store)
        self._remote = None if artifacts is None else artifacts.remote
        self._artifacts = None if self._remote is None else artifacts
        self._data_dir = data_dir
        self._root = data_dir / "exports"
        self._keep = keep or ExportLimits()
        self._is_leader = is_leader
        # Held while a record and its files change together.
        self._lock = threading.Lock()
        self._downloads: Counter[str] = Counter()
        self._waking = asyncio.Event()
        self._process: WorkerProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="exports")

    async def stop(self) -> None:
        """Stop writing exports, which are merged models for download.

        An export that is being written is interrupted and continues at the next start.
        """
        self._is_stopping = True
        if self._process is not None:
            await in_thread(Work.BACKGROUND, self._process.stop)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def folder(self, record: ExportRecord) -> str:
        """Name of the top folder in the tar archive of a downloaded merged model.

        The name consists of the study's present name and the trial's number. `record` describes the export (the stored
        model).
        """
        return f"{self._store.job(record.study).name}-trial-{record.trial}"

    def files(self, record: ExportRecord) -> Mapping[str, StoredFile] | None:
        """Files of an export's merged model, keyed by their paths in the export's directory.

        Returns None if the files are not written yet or were removed.
        """
        if self._artifacts is None:
            directory = self.directory(record)
            if not directory.is_dir():
                return None
            files = (path for path in directory.rglob("*") if path.is_file())
            return {file.relative_to(directory).as_posix(): StoredFile.of(file) for file in files}
        try:
            artifact = self._artifact(self._artifacts, record)
            return None if artifact is None else self._artifacts.files(artifact)
        except Conflict:
            return None

    def num_bytes(self, record: ExportRecord) -> int | None:
        """Total size in bytes of the files of an export's merged model.

        Returns None if the files are not written yet or were removed.
        """
        if self._artifacts is not None:
            artifact = self._artifact(self._artifacts, record)
            return None if artifact is None else artifact.num_bytes
        files = self.files(record)
        return None if files is None else sum(file.num_bytes for file in files.values())

    def directory(self, record: ExportRecord) -> Path:
        """Directory to which the merged model of an export is written, whether or not it exists already.

        The directory stays the same if the study is renamed: its name has the study's first name.
        """
        job, place = self._store.job(record.study), self._root / record.id
        directory = place / f"{job.first_name or job.name}-trial-{record.trial}"
        if directory.is_dir():
            return directory
        # Earlier versions used the name that the study had at the time. Incomplete models are in hidden directories.
        return next(iter(sorted(place.glob("[!.]*"))), directory)

    def _artifact(self, artifacts: ArtifactStore, record: ExportRecord) -> ArtifactRecord | None:
        try:
            return artifacts.get(record.study, artifact_name(record.id))
        except NotFound:
            return None

    def reading(self, owner: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the parts of a download, and prevent the deletion of its files until the last part was yielded.

        `chunks` are the parts. `owner` is the id of the export, or of the fine-tuning, that the files belong to.
        """
        self._downloads[owner] += 1
        try:
            yield from chunks
        finally:
            self._downloads[owner] -= 1

    async def delete(self, record: ExportRecord, *, note: Callable[[], None] = lambda: None) -> None:
        """Delete an export (a merged model for download) and its files.

        `note` is called in the transaction of the deletion, for example to write the audit log. Raises NotFound if the
        export does not exist, and Conflict if the export is being written or downloaded.
        """
        await in_thread(Work.WRITE, self._delete, (record,), note=note)

    async def delete_job(self, job_id: str, *, noun: str, note: Callable[[], None] = lambda: None) -> None:
        """Delete a job that has ended, with its exports. `noun` is the word for the job in messages, such as "study".

        `note` is called in the transaction of the deletion, for example to write the audit log. Raises NotFound if
        there is no such job, and Conflict if the job has not ended or one of its models is being written or downloaded.
        Nothing is deleted if an error is raised.
        """
        await in_thread(Work.WRITE, self._delete_job, job_id, noun=noun, note=note)

    def delete_job_now(self, job: JobRecord) -> None:
        """Delete a job that has ended, with its exports; unlike `delete_job`, this blocks the calling thread.

        Raises NotFound if there is no such job, and Conflict if the job has not ended or one of its models is being
        written or downloaded.
        """
        self._delete_job(job.id, noun=kind_of(job.kind).noun)

    def _delete_job(self, job_id: str, *, noun: str, note: Callable[[], None] = lambda: None) -> None:
        self._delete(self._records.exports(job_id), job_id=job_id, noun=noun, note=note)

    async def request(
        self,
        study_id: str,
        *,
        trial: int,
        dtype: str,
        check: Callable[[], None] = lambda: None,
        note: Callable[[ExportRecord], None] = lambda _: None,
    ) -> ExportRecord:
        """Return the export of a study's trial in a dtype, and queue it if its files are not written yet.

        An export is a merged model for download. The export is queued if it is new, if writing it has failed, or if its
        files were removed. Before an export is queued, `check` is called, which may refuse the export by an error, for
        example because of a quota. Meanwhile no server with this database queues another export. At the end, `note` is
        called with the export, whether or not it was queued by this call; if `note` raises an error, nothing is stored.
        """
        wanted = ExportRecord(
            id=export_id(study_id, trial, dtype),
            study=study_id,
            trial=trial,
            dtype=dtype,
            state=ExportState.WAITING,
            created_at=time.time(),
        )
        record, is_new = await in_thread(Work.WRITE, self._noted, wanted, check, note)
        if is_new:
            self._waking.set()
        return record

    def _noted(
        self, wanted: ExportRecord, check: Callable[[], None], note: Callable[[ExportRecord], None]
    ) -> tuple[ExportRecord, bool]:
        with self._lock, self._store.admission():
            record, is_new = self._stored(wanted, check)
            note(record)
            return record, is_new

    def _stored(self, wanted: ExportRecord, check: Callable[[], None]) -> tuple[ExportRecord, bool]:
        if not self._is_known(wanted.id):
            check()
        record = self._records.add_export(wanted)
        is_gone = record.state is ExportState.COMPLETE and self.num_bytes(record) is None
        if record.state is ExportState.FAIL or is_gone:
            self._records.set_export_state(record.id, ExportState.WAITING)
            return self._records.export(record.id), True
        return record, record == wanted

    def _is_known(self, export_id: str) -> bool:
        """Whether an export is queued or being written, or has its files."""
        try:
            record = self._records.export(export_id)
        except NotFound:
            return False
        if record.state is ExportState.COMPLETE:
            return self.num_bytes(record) is not None
        return record.state is not ExportState.FAIL

    def _delete(
        self,
        records: Iterable[ExportRecord],
        *,
        job_id: str | None = None,
        noun: str = "",
        note: Callable[[], None] = lambda: None,
    ) -> None:
        with self._lock:
            records = [self._records.export(record.id) for record in records]
            for record in records:
                if record.state in (ExportState.WAITING, ExportState.RUNNING):
                    raise Conflict(f"export {record.id} is {record.state}; it can be deleted once it has ended")
                if self._downloads[record.id]:
                    raise Conflict(f"export {record.id} is being downloaded; it can be deleted afterwards")
            if job_id is not None and self._downloads[job_id]:
                raise Conflict(f"an expert of {job_id} is being downloaded; it can be deleted afterwards")
            with self._store.unit_of_work():
                if job_id is not None:
                    self._store.delete_job(job_id, noun=noun)
                for record in records:
                    self._records.delete_export(record.id)
                    if self._artifacts is not None:
                        self._artifacts.remove(record.study, artifact_name(record.id))
                note()
            # Moved before they are deleted: the same export may be requested again at once.
            removed = [self._set_aside(record.id) for record in records]
        for directory in removed:
            shutil.rmtree(directory, ignore_errors=True)

    def _set_aside(self, name: str) -> Path:
        directory = self._root / f"removed-{time.time_ns()}-{name}"
        with suppress(FileNotFoundError):
            (self._root / name).rename(directory)
        return directory

    def sweep(self, *, collects: bool = True) -> None:
        """Remove exports (merged models) that have expired or exceed the quota, and files that belong to no export.

        If `collects` is True and exports are kept in an object store, files in the object store that no job uses are
        deleted too; this lists all of its files.
        """
        with self._lock:
            places = list(self._root.iterdir()) if self._root.is_dir() else []
            records = self._records.exports()
        known = {record.id for record in records}
        for place in places:
            if place.name not in known:
                shutil.rmtree(place, ignore_errors=True)
        removed = to_remove(
            [self._kept(record) for record in records],
            now=time.time(),
            lifetime_s=self._keep.lifetime_s,
            quota_bytes=self._quota_bytes(),
        )
        for record in removed:
            # Conflict and NotFound: requested again, downloaded or deleted at this moment.
            with suppress(Conflict, NotFound), logs.fields(job=record.study, trial=record.trial):
                self._delete((record,))
                logger.info(
                    "export %s of study %s was removed: it expired or exceeded the quota", record.id, record.study
                )
        if self._artifacts is not None and collects:
            self._artifacts.collect()

    def _quota_bytes(self) -> float:
        if self._keep.quota_bytes is not None:
            return self._keep.quota_bytes
        return math.inf if self._artifacts is not None else shutil.disk_usage(self._data_dir).total // 10

    def _kept(self, record: ExportRecord) -> KeptExport:
        if self._artifacts is not None:
            artifact = self._artifact(self._artifacts, record)
            return KeptExport(record, artifact.created_at, artifact.num_bytes) if artifact else _unwritten(record)
        place = self._root / record.id
        try:
            num_bytes = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
            return KeptExport(record, place.stat().st_mtime, num_bytes)
        except OSError:  # not written yet, or being removed
            return _unwritten(record)

    async def _run(self) -> None:
        sweep_at = 0.0
        while True:
            try:
                if self._is_leader():
                    unfinished = await in_thread(Work.BACKGROUND, self._records.unfinished_exports)
                    for record in unfinished:
                        with logs.fields(job=record.study, trial=record.trial):
                            await self._write(record.id)
                    is_time = time.monotonic() >= sweep_at
                    if is_time or unfinished:  # a new export may exceed the quota
                        await in_thread(Work.BACKGROUND, self.sweep, collects=is_time)
                    if is_time:
                        sweep_at = time.monotonic() + SWEEP_S
            except Exception as error:  # the next round tries again
                if not is_away(error):
                    logger.exception("exports could not be written or removed")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._waking.wait()
            self._waking.clear()

    async def _write(self, name: str) -> None:
        try:
            record = await in_thread(Work.BACKGROUND, self._records.export, name)
            if record.state not in (ExportState.WAITING, ExportState.RUNNING):
                return
            directory = await in_thread(Work.BACKGROUND, self._prepare, record)
            # Models appear complete or not at all: if there is one, an earlier server wrote it.
            if await in_thread(Work.BACKGROUND, self.num_bytes, record) is None:
                self._process = WorkerProcess("export")
                await self._process.call(
                    _export,
                    self._store.url,
                    record,
                    directory,
                    alignments_in=self._alignments(record),
                    artifacts_in=self._remote,
                )
            elif self._artifacts is not None:  # that server ended before it deleted its own copy
                await in_thread(Work.BACKGROUND, shutil.rmtree, directory.parent, ignore_errors=True)
            state, reason = ExportState.COMPLETE, None
        except Exception as error:
            if is_away(error):
                raise
            logger.warning("export %s failed", name, exc_info=error)
            state, reason = ExportState.FAIL, str(error) or repr(error)
        finally:
            if self._process is not None:
                await in_thread(Work.BACKGROUND, self._process.stop)
        if not self._is_stopping:
            await in_thread(Work.BACKGROUND, self._records.set_export_state, name, state, reason)

    def _alignments(self, record: ExportRecord) -> str | Path:
        """Location of the alignments of the exported trial's study: a directory, or the URL of an object store.

        Alignments are maps between layers of different models; some merges need alignments. The location is the study's
        directory of alignments if this directory exists; otherwise, it is the object store.
        """
        directory = alignments_dir(job_dir(self._data_dir, record.study))
        return directory if self._remote is None or directory.is_dir() else self._remote

    def _prepare(self, record: ExportRecord) -> Path:
        self._records.set_export_state(record.id, ExportState.RUNNING)
        directory = self.directory(record)
        directory.parent.mkdir(parents=True, exist_ok=True)  # holds what an interrupted export continues from
        return directory


def _unwritten(record: ExportRecord) -> KeptExport:
    return KeptExport(record, record.created_at, 0)


def _export(
    url: str, export: ExportRecord, directory: Path, *, alignments_in: str | Path, artifacts_in: str | None
) -> None:
    """Write the merged model of an export to `directory`, or to an object store; runs in a process of its own.

    `url` is the URL of the database. `alignments_in` is the directory or the object store with the alignments (maps
    between layers of different models) of the export's study. `artifacts_in` is the URL of the object store to which
    the finished model is moved; None if the model stays in `directory`.
    """
    store = Store(url)
    try:
        job = store.job(export.study)
        export_trial(
            store,
            job,
            str(export.trial),
            directory,
            dtype=export.dtype,
            alignments_in=alignments_in,
            has_directories=False,  # the reader's machine has other directories
        )
        if artifacts_in is not None:
            ArtifactStore(store, artifacts_in).put(export.study, artifact_name(export.id), directory)
            shutil.rmtree(directory.parent)
    finally:
        store.close()


@dataclass(frozen=True)
class Tar:
    """Uncompressed tar archive of one folder, generated while it is sent.

    `folder` is the folder's name. `files` maps paths inside the folder to the files on disk. `modified_at` is the time
    of modification that the archive states for all files, in seconds since the epoch. At most 1 MiB of the archive is
    in memory at a time. The archive of the same files is always the same, byte for byte.
    """

    folder: str
    files: Mapping[str, StoredFile]
    modified_at: float

    @property
    def size(self) -> int:
        """Size of the whole tar archive in bytes, which is known before the archive is generated."""
        total = sum(len(header) + _padded(file.num_bytes, BLOCK) for file, header in self._members())
        return _padded(total + 2 * BLOCK, RECORD)

    def chunks(self) -> Iterator[bytes]:
        written = 0
        for file, header in self._members():
            yield header
            size = 0
            with file.open() as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    size += len(chunk)
                    yield chunk
            padding = _padded(size, BLOCK) - size
            yield bytes(padding)
            written += len(header) + size + padding
        yield bytes(_padded(written + 2 * BLOCK, RECORD) - written)

    def _members(self) -> Iterator[tuple[StoredFile, bytes]]:
        for path, file in sorted(self.files.items()):
            member = tarfile.TarInfo(f"{self.folder}/{path}")
            member.size = file.num_bytes
            member.mtime = int(self.modified_at)
            yield file, member.tobuf()


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
