"""Artifacts: directories of files that drivers create, stored by content hash, with a database row each.

The files of an artifact are listed in its manifest, a JSON file: {"path": {"digest": ..., "bytes": ...}}. The manifest
and the listed files are in a `BlobStore`; the manifest's sha256 is the artifact's digest. Files of equal content, such
as the tokenizers of a fleet of experts, are stored once. If a process is killed, files may remain that no artifact
uses.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from service.errors import Conflict, NotFound
from service.store import schema
from service.store.availability import repeated
from service.store.blobs import StoredFile, digest_of, open_blobs
from service.store.connection import insert, reading, transaction
from service.store.sql import Store
from service.types import ArtifactRecord
from workers.directories import appearing
from workers.object_store import blob_at, blob_path

__all__ = ["EXPORT_PREFIX", "SOURCE_PREFIX", "ArtifactStore"]

# Digits of an artifact's digest in the name under which another job keeps it.
DIGEST_DIGITS = 16

# Names of artifacts that are exported models begin with this.
EXPORT_PREFIX = "export-"

# Beginning of the names of source models: "source-DIGEST" of a study that has the source, and "source-DIGEST-DTYPE" of
# the study whose merge was exported for it.
SOURCE_PREFIX = "source-"


@repeated
class ArtifactStore:
    """Store of artifacts. An artifact is a directory of files that a job made, such as a fine-tuned model.

    The database of `store` has a record of each artifact. The files are at `location`, a directory or the URL of an
    object store, which several processes may use at the same time. Methods that read or write files raise OSError if
    the location cannot be used.
    """

    def __init__(self, store: Store, location: str | Path) -> None:
        self.location = location
        self._engine = store.engine
        self._reads = reading(self._engine)
        self._blobs = open_blobs(location)
        # Digests of the files of each artifact, by its own digest, since a manifest never changes.
        self._named: Mapping[str, frozenset[str]] = {}

    def put(self, job_id: str, name: str, source: Path, *, facts: Mapping[str, Any] | None = None) -> ArtifactRecord:
        """Copy the directory `source`, such as a trained model, to the store as an artifact of the job.

        Returns the artifact's stored name, digest, size and facts. An earlier artifact of the job with the same `name`
        is replaced. `facts` are properties to store with the artifact, as JSON; None stores no properties.

        Raises:
            Conflict: The directory holds no file, or a file changed while it was stored.
        """
        with self._blobs.storing():
            return self._put(job_id, name, source, dict(facts or {}))

    def _put(self, job_id: str, name: str, source: Path, facts: dict[str, Any]) -> ArtifactRecord:
        manifest: dict[str, dict[str, Any]] = {}
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            digest, num_bytes = self._blobs.add(file)
            manifest[file.relative_to(source).as_posix()] = {"digest": digest, "bytes": num_bytes}
        if not manifest:
            raise Conflict(f"{source}: holds no file that could be stored")
        digest = self._blobs.add_bytes(json.dumps(manifest, sort_keys=True).encode())
        return self._record(job_id, name, digest, manifest, facts)

    def keep(self, job_id: str, name: str, digest: str) -> ArtifactRecord:
        """Let the job `job_id` share an artifact (a trained model or other files) of another job; return the new row.

        `digest` identifies the artifact's files, and `name` is the name that the artifact gets in the job `job_id`. The
        files then stay even if the other job is deleted. Raises Conflict if the files have been deleted already.
        """
        return self._record(job_id, name, digest, self._manifest(name, digest), {})

    def kept_names(self, models: Iterable[str]) -> dict[str, str]:
        """Find which source models of a new job were trained by earlier jobs and are stored as artifacts of this store.

        `models` are the directories, hub ids and URLs of the source models. Returns the digests of the artifacts that
        were found, keyed by name. A name is "source-" and the beginning of the digest. The new job keeps the artifact
        under this name, so that its files are not deleted. This method itself stores nothing.
        """
        found = (blob_at(model.rstrip("/")) for model in models)
        return {
            f"{SOURCE_PREFIX}{digest[:DIGEST_DIGITS]}": digest
            for place, digest in filter(None, found)
            if place == self.remote
        }

    def _record(
        self, job_id: str, name: str, digest: str, manifest: Mapping[str, Mapping[str, Any]], facts: dict[str, Any]
    ) -> ArtifactRecord:
        """Add a database row for an artifact whose files are stored already, and return the row as a record.

        An artifact is a directory of files that a job made. `manifest` lists its files: the digest and the size of each
        file, keyed by its path. `digest` is the digest of this list, which identifies the artifact. `facts` are
        properties that are stored with the artifact. An earlier row of the same job and name is replaced.
        """
        num_bytes = sum(entry["bytes"] for entry in manifest.values())
        record = ArtifactRecord(job_id, name, digest, num_bytes, time.time(), facts)
        table = schema.artifacts
        row = {"study": job_id, "name": name, "digest": record.digest, "num_bytes": record.num_bytes}
        changed = {"facts": dict(record.facts), "created_at": record.created_at}
        with transaction(self._engine) as connection:
            connection.execute(
                insert(connection, table)
                .values({**row, **changed})
                .on_conflict_do_update(
                    index_elements=[table.c.study, table.c.name],
                    set_={**changed, "digest": record.digest, "num_bytes": record.num_bytes},
                )
            )
        return record

    def get(self, job_id: str, name: str) -> ArtifactRecord:
        """Return the digest, size and facts of an artifact: the files, such as a model, that a job stored as `name`.

        Raises:
            NotFound: The job has no artifact of this name.
        """
        found = self._records((schema.artifacts.c.study == job_id) & (schema.artifacts.c.name == name))
        if not found:
            raise NotFound(f"artifact {name!r}: job {job_id} has no such artifact")
        return found[0]

    def of(self, job_id: str) -> tuple[ArtifactRecord, ...]:
        """Read the names, digests, sizes and facts of all artifacts of a job, ordered by name.

        An artifact is a directory of files that a job made, such as a fine-tuned model.
        """
        return self._records(schema.artifacts.c.study == job_id)

    def _records(self, where: sa.ColumnElement[bool]) -> tuple[ArtifactRecord, ...]:
        table = schema.artifacts
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.name))
            return tuple(ArtifactRecord(**row) for row in rows.mappings())

    def files(self, record: ArtifactRecord) -> dict[str, StoredFile]:
        """Return the files of an artifact (a directory of files that a job made), keyed by their path in the directory.

        Raises:
            Conflict: A file is missing, or the artifact's manifest (the stored list of its files) has changed.
        """
        found = {}
        for path, entry in self._manifest(record.name, record.digest).items():
            file = self._blobs.stored(entry["digest"])
            if file is None:
                raise Conflict(f"artifact {record.name!r}: {path} is gone from {self._blobs.place}")
            found[path] = file
        return found

    def url(self, record: ArtifactRecord) -> str | None:
        """URL by which a study on any machine can use an artifact (a stored directory of files).

        Returns None if this store keeps its files in a directory.
        """
        return self.remote and f"{self.remote}/{blob_path(record.digest)}"

    @property
    def remote(self) -> str | None:
        """URL of the object store in which this store keeps its files; None if the files are in a directory."""
        return self._blobs.remote

    def content(self, digest: str) -> bytes:
        """Content of the stored file whose sha256 is `digest`. Raises FileNotFoundError if there is no such file."""
        return self._blobs.read(digest)

    def write_to(self, record: ArtifactRecord, out: Path) -> Path:
        """Copy the files of an artifact (a stored directory of files) to the new directory `out`, and return `out`.

        The directory appears only when all files are copied.

        Raises:
            Conflict: A stored file is missing, or its content has changed.
        """
        with appearing(out, f"artifact-{record.digest[:16]}") as place:
            for path, entry in self._manifest(record.name, record.digest).items():
                target = place / path
                target.parent.mkdir(parents=True, exist_ok=True)
                self._copy(entry["digest"], target)
        return out

    def remove(self, job_id: str, name: str) -> None:
        """Delete the database row of the artifact (a directory of files) that a job stored as `name`, if it exists.

        The method `collect` later deletes the artifact's files if no other job uses them.
        """
        table = schema.artifacts
        with transaction(self._engine) as connection:
            connection.execute(sa.delete(table).where(table.c.study == job_id, table.c.name == name))

    def num_bytes(self) -> int:
        """Total size in bytes of all stored files, including files that no job uses any more."""
        return self._blobs.num_bytes()

    def num_bytes_of_team(self, team: str, *, with_job: str | None = None, named_by_users: Collection[str] = ()) -> int:
        """Total size in bytes of the artifacts of a team's jobs.

        An artifact is a directory of files that a job made, such as a trained model. If several jobs of the team have
        stored the same artifact, it counts once. Exports of studies for download do not count. A merge that a study
        exported as a source of another study counts for the team of that other study while it is stored, and else for
        the exporting study's team. If `with_job` is the id of a job, the artifacts of this job are counted too; the
        result is then the size after the job has moved to the team.

        Exports and exported sources are recognized by their names. `named_by_users` are the kinds of job whose
        artifacts have names that users chose, such as experts; each of their artifacts counts, whatever its name is.
        """
        table, jobs = schema.artifacts, schema.studies
        other = table.alias()
        is_used = sa.exists().where((other.c.digest == table.c.digest) & (other.c.study != table.c.study))
        is_export = table.c.name.startswith(EXPORT_PREFIX)
        is_source = table.c.name.like(f"{SOURCE_PREFIX}%-%") & is_used
        query = (
            sa.select(table.c.digest, table.c.num_bytes)
            .join(jobs, jobs.c.id == table.c.study)
            .where((jobs.c.team == team) | (jobs.c.id == with_job))
            .where(jobs.c.kind.in_(named_by_users) | ~(is_export | is_source))
            .distinct()
        )
        with self._reads.connect() as connection:
            return sum(num_bytes for _, num_bytes in connection.execute(query))

    def capacity(self) -> int | None:
        """Size in bytes of the disk on which this store keeps its files.

        Returns None for an object store, whose size has no limit.
        """
        return self._blobs.capacity()

    def collect(self, *, deletes: bool = True) -> int:
        """Delete stored files that no job uses, such as files of deleted jobs, and return the number of bytes freed.

        If the files are in a directory, nothing is deleted while a process stores an artifact (a directory of files
        that a job made). If the files are in an object store, files that were written in the last 24 h are kept,
        because a process may be about to use them. A later call deletes them if they are still unused. If `deletes` is
        False, nothing is deleted, and the result is the number of bytes that would be freed.
        """
        return self._blobs.collect(self.used, deletes=deletes)

    def used(self) -> set[str]:
        """Digests of all stored files that jobs use, including manifests (lists of an artifact's files).

        An artifact is a directory of files that a job made, such as a fine-tuned model.
        """
        digests = self.digests()
        self._named = {digest: self._named.get(digest) or self.file_digests(digest) for digest in digests}
        return digests.union(*self._named.values())

    def digests(self) -> set[str]:
        """Digests (sha256) of the manifests of all artifacts, which are directories of files that jobs made."""
        with self._reads.connect() as connection:
            return set(connection.execute(sa.select(schema.artifacts.c.digest)).scalars())

    def file_digests(self, digest: str) -> frozenset[str]:
        """Digests (sha256) of the files of an artifact, a directory of files that a job made.

        `digest` identifies the artifact's manifest, a stored file that lists the artifact's files with their digests.
        Raises FileNotFoundError if the manifest is gone.
        """
        return frozenset(entry["digest"] for entry in json.loads(self._blobs.read(digest)).values())

    def _manifest(self, name: str, digest: str) -> dict[str, dict[str, Any]]:
        try:
            content = self._blobs.read(digest)
        except FileNotFoundError as error:
            raise Conflict(f"artifact {name!r}: its files are gone from {self._blobs.place}") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise Conflict(f"artifact {name!r}: its manifest has changed since it was stored")
        manifest: dict[str, dict[str, Any]] = json.loads(content)
        return manifest

    def _copy(self, digest: str, target: Path) -> None:
        try:
            self._blobs.copy(digest, target)
        except FileNotFoundError as error:
            raise Conflict(f"artifact: file {digest} of {target.name} is gone from {self._blobs.place}") from error
        if digest_of(target) != digest:
            raise Conflict(f"artifact: {target.name} has changed since it was stored, or cannot be read")
