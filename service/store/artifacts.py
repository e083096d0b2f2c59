"""Artifacts: files and directories that drivers create, stored once by their content, with a row each in SQL.

    DIR/blobs/ab/cdef...    a file, named by its sha256
    DIR/blobs/12/3456...    a manifest: {"path": {"digest": ..., "bytes": ...}} as JSON; its sha256 is the artifact's
    DIR/.lock               locked, shared, while files are stored; exclusively, while unused files are deleted

Files of equal content, such as the tokenizers of a fleet of experts, are stored once. A file appears under its name
once it is complete; a process that is killed leaves at most a temporary file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from service.errors import Conflict, NotFound
from service.store import schema
from service.store.attempt_writer import insert
from service.store.sql import Store
from service.types import ArtifactRecord
from workers.directories import appearing, replacing, write_file

__all__ = ["ArtifactStore"]

BLOBS, LOCK = "blobs", ".lock"


class ArtifactStore:
    """Artifacts of the jobs in `store`, with their files below `directory`.

    Every process may use it.
    """

    def __init__(self, store: Store, directory: Path) -> None:
        self.directory = directory
        self._engine = store.engine
        self._reads = self._engine.execution_options(read_only=True)
        self._blobs = directory / BLOBS

    def put(self, study_id: str, name: str, source: Path, *, facts: Mapping[str, Any] | None = None) -> ArtifactRecord:
        """Store the directory `source` as an artifact of the job.

        An earlier artifact of that name is replaced.

        Raises:
            Conflict: The directory holds no file, or a file changed while it was stored.
        """
        with self._locked(fcntl.LOCK_SH):
            return self._put(study_id, name, source, dict(facts or {}))

    def _put(self, study_id: str, name: str, source: Path, facts: dict[str, Any]) -> ArtifactRecord:
        manifest: dict[str, dict[str, Any]] = {}
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            digest, num_bytes = self._add(file)
            manifest[file.relative_to(source).as_posix()] = {"digest": digest, "bytes": num_bytes}
        if not manifest:
            raise Conflict(f"{source}: holds no file that could be stored")
        record = ArtifactRecord(
            study=study_id,
            name=name,
            digest=self._add_bytes(json.dumps(manifest, sort_keys=True).encode()),
            num_bytes=sum(entry["bytes"] for entry in manifest.values()),
            created_at=time.time(),
            facts=facts,
        )
        table = schema.artifacts
        row = {"study": study_id, "name": name, "digest": record.digest, "num_bytes": record.num_bytes}
        changed = {"facts": dict(record.facts), "created_at": record.created_at}
        with self._engine.begin() as connection:
            connection.execute(
                insert(connection, table)
                .values({**row, **changed})
                .on_conflict_do_update(
                    index_elements=[table.c.study, table.c.name],
                    set_={**changed, "digest": record.digest, "num_bytes": record.num_bytes},
                )
            )
        return record

    def get(self, study_id: str, name: str) -> ArtifactRecord:
        """Return the record of an artifact.

        Raises:
            NotFound: The job has no artifact of that name.
        """
        found = [record for record in self.of(study_id) if record.name == name]
        if not found:
            raise NotFound(f"artifact {name!r}: study {study_id} has no such artifact")
        return found[0]

    def of(self, study_id: str) -> tuple[ArtifactRecord, ...]:
        """Artifacts of a job, by name."""
        table = schema.artifacts
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.name))
            return tuple(ArtifactRecord(**row) for row in rows.mappings())

    def files(self, record: ArtifactRecord) -> dict[str, Path]:
        """Return the artifact's files by their paths in it.

        Raises:
            Conflict: A file is missing, or the manifest has changed.
        """
        found = {path: self._file(entry["digest"]) for path, entry in self._manifest(record).items()}
        if gone := [path for path, file in found.items() if not file.is_file()]:
            raise Conflict(f"artifact {record.name!r}: {gone[0]} is gone from {self._blobs}")
        return found

    def write_to(self, record: ArtifactRecord, out: Path) -> Path:
        """Copy the artifact to the new directory `out`, which appears once it is complete.

        Returns:
            `out`.

        Raises:
            Conflict: A stored file is missing or has another content than when it was stored.
        """
        with appearing(out, f"artifact-{record.digest[:16]}") as place:
            for path, entry in self._manifest(record).items():
                target = place / path
                target.parent.mkdir(parents=True, exist_ok=True)
                self._copy(entry["digest"], target)
        return out

    def num_bytes(self) -> int:
        """Size of all stored files together."""
        found = 0
        for file in self._blobs.glob("*/*"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                found += file.stat().st_size
        return found

    def collect(self) -> int:
        """Delete files that no artifact uses, such as those of deleted jobs.

        Nothing is deleted while another process stores an artifact; the next call deletes it.

        Returns:
            Number of bytes that were freed.
        """
        try:
            with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
                return self._collect()
        except BlockingIOError:  # the next call finds them
            return 0

    def _collect(self) -> int:
        with self._reads.connect() as connection:
            digests = set(connection.execute(sa.select(schema.artifacts.c.digest)).scalars())
        used = set(digests)
        for digest in digests:
            used |= {entry["digest"] for entry in json.loads(self._file(digest).read_bytes()).values()}
        freed = 0
        for file in list(self._blobs.glob("*/*")):
            if file.parent.name + file.name not in used:
                freed += file.stat().st_size
                file.unlink(missing_ok=True)
        return freed

    @contextmanager
    def _locked(self, operation: int) -> Iterator[None]:
        """Hold the lock of the files: shared while storing, exclusively while deleting."""
        self._blobs.parent.mkdir(parents=True, exist_ok=True)
        with (self._blobs.parent / LOCK).open("a") as file:
            fcntl.flock(file, operation)
            yield

    def _manifest(self, record: ArtifactRecord) -> dict[str, dict[str, Any]]:
        try:
            content = self._file(record.digest).read_bytes()
        except FileNotFoundError as error:
            raise Conflict(f"artifact {record.name!r}: its files are gone from {self._blobs}") from error
        if hashlib.sha256(content).hexdigest() != record.digest:
            raise Conflict(f"artifact {record.name!r}: its manifest has changed since it was stored")
        manifest: dict[str, dict[str, Any]] = json.loads(content)
        return manifest

    def _copy(self, digest: str, target: Path) -> None:
        try:
            shutil.copyfile(self._file(digest), target)
        except FileNotFoundError as error:
            raise Conflict(f"artifact: file {digest} of {target.name} is gone from {self._blobs}") from error
        if _digest_of(target) != digest:
            raise Conflict(f"artifact: {target.name} has changed since it was stored, or cannot be read")

    def _add(self, file: Path) -> tuple[str, int]:
        """Store a file and return its digest and size."""
        digest = _digest_of(file)
        if not self._file(digest).exists():
            with replacing(self._file(digest)) as new:
                shutil.copyfile(file, new)
                if _digest_of(new) != digest:
                    raise Conflict(f"{file}: changed while it was stored")
        return digest, file.stat().st_size

    def _add_bytes(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        write_file(self._file(digest), content)
        return digest

    def _file(self, digest: str) -> Path:
        return self._blobs / digest[:2] / digest[2:]


def _digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
