"""Interface of a kind of job: what the kind declares, and what its drivers receive.

A job is what the server stores, runs on the cluster and shows: a study, which searches, or a fine-tuning, which trains.
Everything that differs between kinds is in the `JobKind` that the package of the kind declares; `registry` lists them.
Every command imports the declarations, so they import heavy modules inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search_spaces.study.engine import EngineOptions
    from service.cluster.session import RaySession
    from service.jobs.heartbeat import Heartbeat
    from service.store import JobWriter, Store
    from service.store.artifacts import ArtifactStore
    from service.types import JobRecord
    from workers.file_access import FileAccess
    from workers.training.finetuning.spec import FinetuneSpec
    from workers.types import Family, Scorer

__all__ = ["Accepted", "Attempt", "JobKind", "RequestContext", "Resources", "View"]


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class RequestContext:
    """Context of a request's checks: readable files, the server's other jobs, and limits.

    `access` limits the files that the job may read (None: no limit). `store_url` and `data_dir` are the server's, for
    requests that name other jobs (None: requests cannot). `files` is the location of the server's artifacts (None: in
    `data_dir`). `lift_limits` ends the limits of memory and processor time;
    it is called before work whose amount the sender does not choose.
    """

    access: FileAccess | None = None
    store_url: str | None = None
    data_dir: Path | None = None
    files: str | Path | None = None
    lift_limits: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Accepted:
    """A request that passed every check, as the job to create.

    `document` is the canonical form of the request, `facts` are the checks' findings as JSON; both are stored.
    `artifact_bytes` estimates the size of the artifacts that the job will store; it becomes a fact.
    """

    name: str
    document: Mapping[str, Any]
    facts: Mapping[str, Any]
    artifact_bytes: int = 0

    def stored_facts(self) -> dict[str, Any]:
        """The facts in the form in which the job stores them, as its `accepted`."""
        return {**self.facts, **({"artifact_bytes": self.artifact_bytes} if self.artifact_bytes else {})}


@dataclass(frozen=True)
class View:
    """Fields and links (by name) that a kind adds to the server's document of a job."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """Resources that drivers use on the cluster; tests pass their own.

    `ray` connects to Ray. `scorer` opens scoring replicas of a family: its arguments are the family, the engine's
    options and the number of replicas; it raises EngineUnavailable. `fit` trains an expert in a directory on Ray Train;
    it reads only the files that the access allows (None: all).
    """

    ray: Callable[[], AbstractContextManager[RaySession]]
    scorer: Callable[[Family, EngineOptions, int], AbstractContextManager[Scorer]]
    fit: Callable[[FinetuneSpec, Path, FileAccess | None], None]


@dataclass(frozen=True)
class Attempt:
    """A driver's attempt to work on a job, which `writer` has taken over.

    `work_dir` is the job's directory for files. `note` shows a message in the job's log or in a terminal.
    """

    store: Store
    writer: JobWriter
    artifacts: ArtifactStore
    work_dir: Path
    heartbeat: Heartbeat
    resources: Resources
    note: Callable[[str], None]

    @property
    def job(self) -> JobRecord:
        """The job as it is stored at the moment."""
        return self.store.job(self.writer.job_id)

    def progressed(self, text: str) -> None:
        """Show a message and count it as progress of the driver."""
        self.heartbeat.progressed()
        self.note(text)


@dataclass(frozen=True)
class JobKind:
    """Declaration of one kind of job.

    - `name`: stored with each job and part of its documents.
    - `noun`: what messages call a job of this kind.
    - `resource`, `collection`: singular and plural in addresses and operation ids: `/v1/studies/{study_id}`.
    - `document_noun`, `document_link`: what the submitted document is called, and its address below the job.
    - `schema_name`: the name of the JSON Schema of the submitted document.
    - `schemas`: a function from a template of references to that schema and those it refers to, by name.
    - `example`: a submitted document, shown in the API's documentation.
    - `is_document`: whether a parsed document is of this kind, for clients that know only the file.
    - `load`: reads a file with such a document; returns it in canonical form, with absolute paths.
    - `accept`: checks a parsed document; raises InvalidStudy with every problem.
    - `work`: continues a stored job from its stored state to its end, and stores how it ended.
    - `view`: what this kind adds to the server's documents of the given jobs, one `View` each.
    - `documents`: the TypedDict of the server's document of a job, and that of the driver's progress.
    - `links`: names of addresses below a job, for links that every job of this kind has.
    - `resumable`: the jobs that can be resumed, as the end of the sentence "only a study ...".
    - `clean_up`: deletes files in the server's data directory that no job needs any more; called after a job was
      deleted.
    """

    name: str
    noun: str
    resource: str
    collection: str
    document_noun: str
    document_link: str
    schema_name: str
    schemas: Callable[[str], Mapping[str, Any]]
    is_document: Callable[[Mapping[str, Any]], bool]
    load: Callable[[Path], Mapping[str, Any]]
    accept: Callable[[Mapping[str, Any], RequestContext], Accepted]
    work: Callable[[Attempt], None]
    documents: Callable[[], tuple[type, type]]
    view: Callable[[Sequence[JobRecord], Store, ArtifactStore], Sequence[View]] = lambda jobs, *_: [View()] * len(jobs)
    links: Sequence[str] = ()
    example: Mapping[str, Any] | None = None
    resumable: str = "that has FAILED or waits"
    clean_up: Callable[[Store, Path], None] = _nothing

    @property
    def plural(self) -> str:
        """The plural of `noun`, for messages."""
        return f"{self.noun[:-1]}ies" if self.noun.endswith("y") else f"{self.noun}s"

    @property
    def path(self) -> str:
        """Path of the collection of jobs, below the server's address."""
        return f"/v1/{self.collection}"

    def path_of(self, job_id: str) -> str:
        """Path of one job, below the server's address."""
        return f"{self.path}/{job_id}"
