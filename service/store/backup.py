"""Backups of a server: its database and the files of its artifacts, consistent with each other, in one directory.

A backup is a directory:

- `backup.json`: version and time of the backup, sha256 of its database, and the number and sha256 of each table's rows
- `database-DIGEST.db`: all tables, read at one moment, as an SQLite file, whatever database the server uses
- `files/blobs/`: the files of all artifacts that the database names, and the alignments of studies, which the server
  keeps with the working files of their drivers; each file is under its sha256

`backup.json` is replaced last. A process that is killed at any moment therefore leaves the previous backup complete. A
later backup into the same directory copies only files that the directory does not have yet.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
from pydantic import Field, TypeAdapter, ValidationError

from service.disk import alignments_dir, job_dir, locked
from service.errors import Conflict
from service.store import schema
from service.store.artifacts import EXPORT_PREFIX, ArtifactStore
from service.store.blobs import BlobStore, DirectoryBlobs, digest_of, open_blobs
from service.store.connection import transaction
from service.store.documents import ALIGNMENTS, ENDPOINT
from service.store.exports import ExportStore
from service.store.move import MovedTable, check_empty, copy_tables
from service.store.sql import Store
from service.types import DeliveryState, JobState
from workers.alignments.files import stored_file
from workers.directories import replacing, sync

__all__ = ["Backup", "Restored", "back_up", "read_backup", "restore"]

MANIFEST, FILES = "backup.json", "files"

# Format of the directory; a program refuses a newer one.
FORMAT = 1

# Files between two messages about progress.
PROGRESS_FILES = 100

# Kind of the jobs that have exports. Experts of fine-tunings have names that users chose, which may begin as those of
# exports do.
EXPORTED = "search"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Backup:
    """Contents of a backup, as the file `backup.json` in the backup's directory describes them.

    - `format`: number of the format of the directory.
    - `revision`: revision of the database's schema.
    - `created_at`: time at which the tables were read, in seconds since the epoch.
    - `database`: sha256 of the SQLite file to which the tables were copied.
    - `tables`: the tables that were read, each with its number of rows and the sha256 of the rows. The copy lacks the
      rows of artifacts whose files are not part of the backup.
    - `jobs`, `unfinished_jobs`: number of all jobs, and number of the jobs that have not ended.
    - `files`, `bytes`: number and total size in bytes of the files of artifacts (models and policies that jobs
      trained) and of alignments.
    """

    format: int
    revision: str
    created_at: float
    database: Sha256
    tables: tuple[MovedTable, ...]
    jobs: int
    unfinished_jobs: int
    files: int
    bytes: int

    @property
    def database_name(self) -> str:
        """Name of the SQLite file with the tables in the backup's directory."""
        return f"database-{self.database[:16]}.db"


@dataclass(frozen=True)
class Restored:
    """Result of restoring a backup.

    `backup` describes the restored backup. `removed_exports` is the number of exports (merged models for download) that
    were not part of the backup, and must be requested again.
    """

    backup: Backup
    removed_exports: int


MANIFESTS = TypeAdapter(Backup)


# -- backing up --------------------------------------------------------------------------------------------------------


def back_up(
    store: Store, files: str | Path, out: Path, *, data_dir: Path, note: Callable[[str], None] = lambda _: None
) -> Backup:
    """Write a backup of a server's database and stored files to the directory `out`.

    `store` is the database. `files` is the directory or object store with the models and policies that jobs have
    trained (artifacts). `data_dir` is the server's data directory, which has the alignments of studies (learned maps
    between layers) if `files` is a directory; an alignment that is missing there, or damaged, is left out. Servers, and
    the processes that work on jobs, may run meanwhile, because all tables are read at one moment. If `files` is a
    directory, files that are deleted meanwhile stay until the backup is complete. If `files` is an object store, an
    artifact that is deleted meanwhile may be left out. Exports (merged models for download) and other working files,
    such as checkpoints of trainings, are not copied. `out` may hold an earlier backup, which is replaced when the new
    backup is complete. `note` is called with messages about the progress, and about artifacts and alignments that are
    left out.

    Raises:
        Conflict: `out` has files that are no part of a backup, or a stored file that jobs still use is gone or has
            changed since it was stored.
        InUse: Another process writes a backup to `out`.
        OSError: A file cannot be written, for example because the disk is full.
    """
    _check_place(out)
    source, target = open_blobs(files), DirectoryBlobs(out / FILES)
    with locked(out), source.storing():
        out.chmod(0o700)
        for left in out.glob(".new-*"):  # by backups that were killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as scratch:
            file = Path(scratch) / "database.db"
            created_at = store.now()
            with contextlib.closing(Store(_sqlite(file))) as copy:
                with store.snapshot() as snapshot:
                    tables = copy_tables(snapshot, copy, change=_remove_exports, note=note)
                digests = _add_artifacts(target, store, copy, files, Path(scratch), note)
                alignments = _alignments(copy)
                num_jobs, num_unfinished = len(copy.jobs()), len(copy.unfinished_jobs())
            for study, names in alignments.items():
                digests |= _add_alignments(target, alignments_dir(job_dir(data_dir, study)), names - digests, note)
            backup = Backup(
                FORMAT, schema.REVISION, created_at, digest_of(file), tuple(tables), num_jobs, num_unfinished,
                len(digests), sum(_size(target, digest) for digest in digests),
            )  # fmt: skip
            file.replace(out / backup.database_name)
        sync(out / backup.database_name)
        with replacing(out / MANIFEST) as new:
            new.write_bytes(MANIFESTS.dump_json(backup, indent=1))
        for old in out.glob("database-*.db"):
            if old.name != backup.database_name:
                old.unlink()
        target.collect(lambda: digests)
    return backup


def _check_place(out: Path) -> None:
    if not out.exists() or (out / MANIFEST).is_file():
        return
    if not out.is_dir():
        raise Conflict(f"--out {out}: is a file; give a new directory, or that of an earlier backup")
    # Files that a first backup leaves behind if it is killed.
    unknown = [
        path.name
        for path in sorted(out.iterdir())
        if path.name != FILES and not path.name.startswith((".lock", ".new-", "database-"))
    ]
    if unknown:
        raise Conflict(
            f"--out {out}: has files that are no backup's, such as {unknown[0]}; give a new directory, or that of an "
            "earlier backup"
        )


def _remove_exports(connection: sa.Connection) -> None:
    """Remove the artifacts that are exports (merged models for download) from the copy of a database.

    Exports are artifacts if the server keeps its files in an object store. The rows of the table of exports stay: they
    tell how many exports must be requested again.
    """
    table, jobs = schema.artifacts, schema.studies
    is_named_so = table.c.name.startswith(EXPORT_PREFIX, autoescape=True)
    exported = sa.select(jobs.c.id).where(jobs.c.kind == EXPORTED)
    connection.execute(sa.delete(table).where(is_named_so & table.c.study.in_(exported)))


def _add_artifacts(
    target: DirectoryBlobs, live: Store, copy: Store, files: str | Path, scratch: Path, note: Callable[[str], None]
) -> set[str]:
    """Copy the files of all artifacts that the database `copy` names from `files` to `target`.

    `live` is the database that was copied. An artifact is removed from `copy` if one of its files is missing and `live`
    does not have the artifact any more; `note` is called with a message about it. Returns the digests of the files of
    the other artifacts, including manifests. `scratch` is a directory for temporary files. Raises Conflict if another
    file is missing or has changed.
    """
    source, artifacts = open_blobs(files), ArtifactStore(copy, files)
    named: dict[str, frozenset[str]] = {}

    def leave_out(left: set[str], missing: str) -> None:
        if left & ArtifactStore(live, files).digests():
            raise _gone(missing, source)
        for artifact in left:
            named.pop(artifact, None)
            note(f"artifact {artifact}: was deleted during the backup, which does not have it")
        with transaction(copy.engine) as connection:
            connection.execute(sa.delete(schema.artifacts).where(schema.artifacts.c.digest.in_(left)))

    for artifact in sorted(artifacts.digests()):
        try:
            named[artifact] = artifacts.file_digests(artifact) | {artifact}
        except FileNotFoundError:
            leave_out({artifact}, artifact)
    digests = sorted(set().union(*named.values()))
    for number, digest in enumerate(digests, 1):
        if not _transfer(source, target, digest, scratch):
            leave_out({artifact for artifact, names in named.items() if digest in names}, digest)
        if number % PROGRESS_FILES == 0 or number == len(digests):
            note(f"files: {number} of {len(digests)}")
    return set().union(*named.values())


def _gone(digest: str, source: BlobStore) -> Conflict:
    return Conflict(f"artifact: file {digest} is gone from {source.place}; nothing was replaced")


def _transfer(source: BlobStore, target: BlobStore, digest: str, scratch: Path) -> bool:
    """Copy a file from one content-addressed store to another, unless `target` has it, and check the copy's digest.

    `digest` is the sha256 of the file, which names it in both stores. `scratch` is a directory for the temporary copy.
    Returns False if the file is missing in `source`. Raises Conflict if the file has changed.
    """
    if target.stored(digest) is not None:
        return True
    file = scratch / "file"
    try:
        source.copy(digest, file)
    except FileNotFoundError:
        return False
    if digest_of(file) != digest:
        raise Conflict(f"artifact: file {digest} in {source.place} has changed since it was stored, or cannot be read")
    target.add(file)
    file.unlink()
    return True


def _alignments(store: Store) -> dict[str, frozenset[str]]:
    """The digests of the alignments (learned maps between layers) of each study that has any, keyed by the study's id.

    A digest is the sha256 of an alignment's file, and also the file's name.
    """
    table = schema.documents.c
    with store.reading() as connection:
        rows = connection.execute(sa.select(table.study, table.document).where(table.name == ALIGNMENTS)).all()
    return {study: frozenset(name for *_, name in document) for study, document in rows}


def _add_alignments(
    target: DirectoryBlobs, directory: Path, names: Collection[str], note: Callable[[str], None]
) -> frozenset[str]:
    """Copy the alignments `names` of a study from its `directory` to `target`, and return the names of those copied.

    An alignment that is missing or damaged is left out, and `note` is called with its name: the study is complete
    without it, but its merges cannot be exported.
    """
    copied = set()
    for name in sorted(names):
        file = stored_file(directory, name)
        with contextlib.suppress(FileNotFoundError):
            if target.stored(name) is None and digest_of(file) == name:
                target.add(file)
        if target.stored(name) is None:
            note(f"{file}: is missing or damaged, so that the backup has no such alignment")
        else:
            copied.add(name)
    return frozenset(copied)


def _size(blobs: BlobStore, digest: str) -> int:
    stored = blobs.stored(digest)
    assert stored is not None
    return stored.num_bytes


def _sqlite(file: Path) -> str:
    return f"sqlite:///{file.absolute()}"


# -- restoring ---------------------------------------------------------------------------------------------------------


def read_backup(directory: Path) -> Backup:
    """Read the description of the backup in `directory`, and check that its database file has not changed.

    Raises:
        Conflict: The directory has no complete backup, the backup is from a newer program, or its database has changed.
    """
    try:
        content = (directory / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Conflict(f"{directory}: has no {MANIFEST}; give a directory that `mergesearch backup` wrote") from error
    try:
        found = json.loads(content).get("format")
        if isinstance(found, int) and found > FORMAT:
            raise Conflict(f"{directory}: is a backup of format {found}, this program reads {FORMAT}; use a newer one")
        backup = MANIFESTS.validate_json(content)
    except (ValueError, AttributeError, ValidationError) as error:
        raise Conflict(f"{directory / MANIFEST}: cannot be read: {' '.join(str(error).split())[:300]}") from error
    file = directory / backup.database_name
    if not file.is_file():
        raise Conflict(f"{directory}: its database, {file.name}, is missing")
    if (digest := digest_of(file)) != backup.database:
        raise Conflict(f"{file}: has changed since the backup (sha256 {digest[:16]}..., not {backup.database[:16]}...)")
    return backup


def restore(
    directory: Path,
    target: Store,
    files: str | Path,
    *,
    data_dir: Path,
    note: Callable[[str], None] = lambda _: None,
) -> Restored:
    """Restore a backup to the empty database of `target`, and the files of jobs to the location `files`.

    `directory` has the backup. The files of jobs are, for example, trained models. Alignments of studies (learned maps
    between layers) that are no artifacts are restored to `data_dir`, the data directory of the new server. The files
    are restored first, and the database last, in one transaction. If a restoration is interrupted, the database is
    still empty, and the same call continues. Jobs that had not ended are continued by the next server. Exports (merged
    models for download) must be requested again, since their files are not part of a backup. `note` is called with
    messages about the progress.

    Raises:
        Conflict: There is no complete backup in `directory`, one of its files is missing or has changed, or the
            database of `target` has data.
    """
    backup = read_backup(directory)
    check_empty(target)
    source, blobs = DirectoryBlobs(directory / FILES), open_blobs(files)
    with tempfile.TemporaryDirectory(prefix="mergesearch-restore-") as scratch, blobs.storing():
        file = Path(shutil.copyfile(directory / backup.database_name, Path(scratch) / "database.db"))
        with contextlib.closing(Store(_sqlite(file))) as copy:  # migrates the copy, if the backup is older
            with transaction(copy.engine) as connection:
                _remove_exports(connection)  # earlier versions left them in backups
            digests = sorted(ArtifactStore(copy, directory / FILES).used())
            for number, digest in enumerate(digests, 1):
                if not _transfer(source, blobs, digest, Path(scratch)):
                    raise _gone(digest, source)
                if number % PROGRESS_FILES == 0 or number == len(digests):
                    note(f"files: {number} of {len(digests)}")
            for study, names in _alignments(copy).items():
                for name in sorted(names.difference(digests)):
                    file = stored_file(alignments_dir(job_dir(data_dir, study)), name)
                    if source.stored(name) is not None and not file.exists():
                        with replacing(file) as new:
                            source.copy(name, new)
            removed = len(ExportStore(copy).exports())
            copy_tables(copy, target, change=_detach, note=note)
    return Restored(backup, removed)


def _detach(connection: sa.Connection) -> None:
    """Remove rows from the copy of a database that concern only the servers and processes of the original.

    - the heartbeats of jobs that have not ended
    - exports: merged models for download, whose files are not in a backup
    - drains: the state in which servers accept and start no jobs, for maintenance
    - notifications that were not sent yet, and the stored changes of jobs from which notifications are made: the
      original server sends them
    - addresses and secrets of the applications of served studies
    """
    finished = [state.value for state in JobState if state.is_finished]
    without_driver = sa.update(schema.studies).where(schema.studies.c.state.not_in(finished))
    connection.execute(without_driver.values(heartbeat_at=None, progressed_at=None, waiting_for=None))
    connection.execute(sa.delete(schema.exports))
    connection.execute(sa.delete(schema.drains))
    connection.execute(sa.delete(schema.notices))
    connection.execute(sa.delete(schema.waits))
    is_waiting = schema.deliveries.c.state == DeliveryState.WAITING.value
    connection.execute(sa.delete(schema.deliveries).where(is_waiting))
    connection.execute(sa.delete(schema.documents).where(schema.documents.c.name == ENDPOINT))
