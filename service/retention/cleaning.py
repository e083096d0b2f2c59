"""Removal of data of ended jobs that exceed the limits of retention.

Nothing is removed from a job that has not ended, or that another job uses. A job uses another job if its source models
are merges or experts of the other job, or if its search starts from policies or results of the other job. A failed job
keeps its responses and files, because it may be resumed.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.disk import alignments_dir, job_dir
from service.errors import Conflict, NotFound
from service.jobs.registry import KINDS, kind_of
from service.retention.limits import FILES, JOBS, RESPONSES, Limit
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.types import JobRecord, JobState
from workers.object_store import blobs_in

__all__ = ["UNUSED", "Cleaner", "Removal", "clean_up"]

logger = logging.getLogger(__name__)

# Stored files of artifacts that no job uses, such as those of deleted jobs.
UNUSED = "unused files"

# Ids of jobs in the documents of jobs.
NAMES = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


@dataclass(frozen=True)
class Removal:
    """Data of one kind that are to be removed, or were removed, from a job.

    - `kind`: the kind of data, such as "responses"
    - `job`, `name`: the id and the name of the job; empty for unused files, which are files of trained models that no
      job uses any more
    - `count`: the number of samples whose responses are removed, or of removed files of a job; 1 for a whole job, None
      for unused files
    - `num_bytes`: the size of the data
    - `because`: the reason, as text for messages
    """

    kind: str
    job: str
    name: str
    count: int | None
    num_bytes: int
    because: str

    def __str__(self) -> str:
        of = f" of {self.name} ({self.job})" if self.kind != JOBS and self.job else ""
        what = f"job {self.name} ({self.job})" if self.kind == JOBS else f"{self.kind}{of}"
        return f"{what}, {self.num_bytes:,} bytes: {self.because}"


@dataclass(frozen=True)
class _Kept:
    """Stored data of one kind, such as model responses, that belong to one job.

    `count` is the number of samples, files or jobs that the data consist of, and `num_bytes` is their size. `age_s` is
    the number of seconds since the job ended. If `is_protected` is True, the data may not be removed, for example
    because another job uses the job's results.
    """

    job: JobRecord
    count: int
    num_bytes: int
    age_s: float
    is_protected: bool


class Cleaner:
    """Remover of data of a server's ended jobs that exceed limits of age and size.

    `limits` has the limit of each kind of data, such as "responses". `data_dir` is the server's directory with the
    files of jobs, and `artifacts` has the models and policies that jobs have trained. `delete_job` is a function that
    deletes a job that has ended, with its exports (merged models for download); it raises Conflict or NotFound if the
    job cannot be deleted at the moment.
    """

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        artifacts: ArtifactStore,
        limits: Mapping[str, Limit],
        *,
        delete_job: Callable[[JobRecord], None],
    ) -> None:
        self._store = store
        self._data_dir = data_dir
        self._artifacts = artifacts
        self._limits = limits
        self._delete_job = delete_job

    def plan(self) -> tuple[Removal, ...]:
        """List the data that exceed the limits now, grouped by kind of data, the oldest job's data first.

        Nothing is removed; the method `carry_out` does that.
        """
        jobs, now = self._store.jobs(), self._store.now()
        protected = self._referred_to(jobs) | {job.id for job in jobs if not job.state.is_finished}
        ages = {job.id: now - self._store.state_since(job.id) for job in jobs}
        texts = self._store.text_sizes()
        files = {job.id: _sizes(self._files(job)) for job in jobs}
        removals: list[Removal] = []
        removed: set[str] = set()
        for kind in (JOBS, RESPONSES, FILES):
            if (limit := self._limits.get(kind)) is None:
                continue
            kept = []
            for job in jobs:
                if job.id in removed:
                    continue
                count, num_bytes = 1, self._job_bytes(job, texts) if kind == JOBS else 0
                if kind != JOBS:
                    count, num_bytes = (texts if kind == RESPONSES else files).get(job.id, (0, 0))
                may_resume = job.state is JobState.FAILED or (kind == RESPONSES and self._has_void(job.id))
                is_protected = job.id in protected or (kind != JOBS and may_resume)
                if count:
                    kept.append(_Kept(job, count, num_bytes, ages[job.id], is_protected))
            found = list(_exceeding(kind, kept, limit))
            removed |= {removal.job for removal in found if kind == JOBS}
            removals += found
        if num_bytes := self._artifacts.collect(deletes=False):
            removals.append(Removal(UNUSED, "", "", None, num_bytes, "no job uses them"))
        return tuple(removals)

    def carry_out(self, removals: Sequence[Removal]) -> tuple[Removal, ...]:
        """Remove the data in `removals`, and return the removals that succeeded; failures are logged."""
        done = []
        referred_to = self._referred_to(self._store.jobs())
        for removal in removals:
            try:
                if removal.job in referred_to:
                    raise Conflict("another job refers to it now")
                self._carry_out(removal)
            except (Conflict, NotFound) as error:
                logger.info("not removed: %s: %s", removal, error)
                continue
            done.append(removal)
            logger.info("removed %s", removal)
        return tuple(done)

    def _carry_out(self, removal: Removal) -> None:
        if removal.kind == UNUSED:
            self._artifacts.collect()
            return
        job = self._store.job(removal.job)
        if removal.kind == JOBS:
            self._delete_job(job)
            clean_up(self._store, self._artifacts, self._data_dir, job.id)
        elif removal.kind == RESPONSES:
            self._store.remove_texts(job.id, num_samples=removal.count or 0, num_bytes=removal.num_bytes)
        else:
            if job.state not in (JobState.COMPLETE, JobState.CANCELLED):
                raise Conflict(f"it is {job.state}, and may need its files to continue")
            for file in self._files(job):
                file.unlink(missing_ok=True)

    def _files(self, job: JobRecord) -> Iterator[Path]:
        """Files that the drivers of a job (the processes that worked on it) wrote, without alignments.

        Alignments are maps between layers of different models; exports of the job's trials still need them.
        """
        root = job_dir(self._data_dir, job.id)
        kept = alignments_dir(root)
        return (file for file in root.rglob("*") if file.is_file() and not file.is_relative_to(kept))

    def _has_void(self, job_id: str) -> bool:
        """Whether a job has void samples, which must be scored again because their engine later failed a check.

        A job with void samples may be resumed, and then needs its responses.
        """
        return self._store.num_engine_faults() > 0 and self._store.has_void(job_id)

    def _job_bytes(self, job: JobRecord, texts: Mapping[str, tuple[int, int]]) -> int:
        """Bytes of a job's model responses, files, and artifacts (models and policies that it has trained).

        `texts` contains the number and the bytes of the responses of each job, keyed by the job's id. The job's other
        database rows are too small to count.
        """
        root = job_dir(self._data_dir, job.id)
        stored = sum(artifact.num_bytes for artifact in self._artifacts.of(job.id))
        return stored + texts.get(job.id, (0, 0))[1] + _sizes(f for f in root.rglob("*") if f.is_file())[1]

    def _referred_to(self, jobs: Sequence[JobRecord]) -> set[str]:
        """Ids of the jobs among `jobs` that must be kept because other jobs use their results.

        A job uses another job if its stored document, or the findings of its checks, name the other job's id or the
        digest of an artifact (trained model) of the other job. A fine-tuning is also kept while a study that merges its
        models exists.
        """
        owners = {job.id: job.id for job in jobs}
        for job in jobs:
            owners |= {artifact.digest: job.id for artifact in self._artifacts.of(job.id)}
        found = {job.id for job in jobs if kind_of(job.kind).is_used(job, self._store)}
        for job in jobs:
            text = json.dumps([dict(job.document), dict(job.accepted)])
            names = {*NAMES.findall(text), *(digest for _, digest in blobs_in(text))}
            found |= {owners[name] for name in names if name in owners and owners[name] != job.id}
        return found


def _exceeding(kind: str, kept: Sequence[_Kept], limit: Limit) -> Iterator[Removal]:
    """Choose the data of one kind to remove so that `limit` is not exceeded any more, the oldest job's data first.

    `kind` is the kind of data, such as "responses". `kept` describes the stored data of this kind, with an entry for
    each job. Data that are protected, because another job needs them, are not removed, but count towards the total
    size.
    """
    total = sum(each.num_bytes for each in kept)
    for each in sorted(kept, key=lambda each: -each.age_s):
        is_old = limit.age_s is not None and each.age_s > limit.age_s
        is_over = limit.num_bytes is not None and total > limit.num_bytes and each.num_bytes > 0
        if each.is_protected or not (is_old or is_over):
            continue
        total -= each.num_bytes
        because = (
            f"ended {each.age_s / 86400:.1f} days ago" if is_old else f"all {kind} exceed {limit.num_bytes:,} bytes"
        )
        yield Removal(kind, each.job.id, each.job.name, each.count, each.num_bytes, because)


def _sizes(files: Iterator[Path]) -> tuple[int, int]:
    """Number of `files` and their total size in bytes; files that are deleted in the meantime do not count."""
    count = num_bytes = 0
    for file in files:
        try:
            num_bytes += file.stat().st_size
        except FileNotFoundError:
            continue
        count += 1
    return count, num_bytes


def clean_up(store: Store, artifacts: ArtifactStore, data_dir: Path, job_id: str) -> None:
    """Delete the files of the job `job_id`, whose rows in the database have been deleted already.

    Files of artifacts (models and policies that jobs have trained) that no remaining job uses are deleted too.
    `data_dir` is the server's directory with the files of jobs.
    """
    shutil.rmtree(job_dir(data_dir, job_id), ignore_errors=True)
    artifacts.collect()
    for kind in KINDS.values():
        kind.clean_up(store, data_dir)
