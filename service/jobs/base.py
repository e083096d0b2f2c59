"""Interface of a kind of job (study, fine-tuning or served study), and the objects that a driver of the job receives.

The server stores jobs, runs them on the cluster and shows them. A job is a study, which searches, a fine-tuning, which
trains, or a served study, which answers prompts. Everything that differs between kinds of job is in the `JobKind` that
the package of the kind declares. The module `registry` lists all kinds. Every command imports the declarations, so they
import heavy modules inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from service.types import Demand

if TYPE_CHECKING:
    from search_spaces.study.engine import EngineOptions
    from service.cluster.session import RaySession
    from service.engine_machines import EngineMachines
    from service.jobs.completers import Completers
    from service.jobs.edit import JobEdit
    from service.jobs.heartbeat import Heartbeat
    from service.store import JobWriter, Store
    from service.store.artifacts import ArtifactStore
    from service.types import Account, JobRecord
    from workers.file_access import FileAccess
    from workers.training.finetuning.spec import FinetuneSpec
    from workers.types import Family, Scorer

__all__ = ["Accept", "Accepted", "Attempt", "JobKind", "RequestContext", "Resources", "View"]


def _nothing(*_: object) -> None:
    pass


def _labels() -> type[JobEdit]:
    from service.jobs.edit import JobEdit

    return JobEdit


@dataclass(frozen=True)
class RequestContext:
    """Context in which a submitted job is checked: readable files, the server's other jobs, and limits.

    - `access`: the files that the job may read; None is no limit
    - `store_url`: the URL of the server's database; None for the database that drivers on this machine use
    - `data_dir`: the server's data directory. If this and `store_url` are None, a job cannot refer to other jobs
    - `files`: the location of the server's artifacts, a directory or the URL of an object store; None is a directory in
      `data_dir`
    - `machines`: the cluster's machines that can run engines; empty if none are known
    - `reader`: the rights of the user who sent the request, with which the job may refer to other jobs; None is every
      right
    - `lift_limits`: function that removes the checking process's limits of memory and processor time. Checks call it
      before they read weights or write merges of other studies
    """

    access: FileAccess | None = None
    store_url: str | None = None
    data_dir: Path | None = None
    files: str | Path | None = None
    machines: Sequence[EngineMachines] = ()
    reader: Account | None = None
    lift_limits: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Accepted:
    """A submitted job that passed every check and can be created.

    `document` is the submitted document in canonical form. `facts` are the findings of the checks as JSON.
    `artifact_bytes` estimates the total size of the artifacts that the job will store. `export_parameters` is the
    number of parameters that an exported merge of a study has; 0 for other jobs.
    """

    name: str
    document: Mapping[str, Any]
    facts: Mapping[str, Any]
    artifact_bytes: int = 0
    export_parameters: int = 0

    def stored_facts(self) -> dict[str, Any]:
        """Findings of the checks in the form that is stored with the job, as JSON.

        The document contains the entries of `facts` and, if they are above 0, the expected size of the job's artifacts
        (`artifact_bytes`) and the number of parameters of an exported merge (`export_parameters`).
        """
        sizes = {"artifact_bytes": self.artifact_bytes, "export_parameters": self.export_parameters}
        return {**self.facts, **{name: size for name, size in sizes.items() if size}}


Accept: TypeAlias = Callable[[Mapping[str, Any], RequestContext], Accepted]
"""The checks of a parsed document; they raise InvalidStudy with every problem."""


@dataclass(frozen=True)
class View:
    """Fields and links that a kind of job adds to the JSON document of a job, as the server sends it to clients.

    `fields` are further fields of the document, keyed by name. `links` are further links, as URL paths, keyed by name.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """Functions through which drivers connect to Ray, scoring replicas and Ray Train; tests replace them.

    - `ray`: connects to Ray.
    - `scorer`: opens scoring replicas. Its arguments are the models, the engine's options and the number of replicas.
      Raises EngineUnavailable.
    - `fit`: trains an expert on Ray Train. Its arguments are the specification, the directory for the result, the files
      that may be read, and the number of experts that train at the same time. If the files are None, all files may be
      read.
    - `cluster`: the numbers of CPU cores and GPUs of the cluster to which Ray is connected, under the keys "CPU" and
      "GPU".
    - `completers`: opens the replicas that complete prompts. Its arguments are the models, the engine's options, the id
      of the job, and the seconds after which idle replicas are stopped.
    """

    ray: Callable[[], AbstractContextManager[RaySession]]
    scorer: Callable[[Family, EngineOptions, int], AbstractContextManager[Scorer]]
    fit: Callable[[FinetuneSpec, Path, FileAccess | None, int], None]
    cluster: Callable[[], Mapping[str, float]]
    completers: Callable[[Family, EngineOptions, str, float], AbstractContextManager[Completers]]


@dataclass(frozen=True)
class Attempt:
    """One driver's work on a job, with the objects that the driver needs.

    - `store`: the database with the job
    - `writer`: stores the results of this attempt
    - `artifacts`: the files that jobs store, such as trained experts
    - `work_dir`: the job's directory for files
    - `heartbeat`: reports that the driver is alive
    - `resources`: the functions with which the driver uses the cluster
    - `note`: shows a message in the job's log or in a terminal
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
        """Read the job of this driver (the process that works on it) from the store, in its present state."""
        return self.store.job(self.writer.job_id)

    def progressed(self, text: str) -> None:
        """Show the message `text` to the user, and store that the job makes progress.

        A driver, the process that works on a job, is replaced if it reports no progress for too long.
        """
        self.heartbeat.progressed()
        self.note(text)


@dataclass(frozen=True)
class JobKind:
    """Declaration of one kind of job, such as the study.

    - `name`: name of the kind, stored with each job.
    - `noun`: word for a job of this kind in messages, such as "fine-tuning".
    - `resource`, `collection`: singular and plural in routes and operation ids: `/v1/studies/{study_id}`.
    - `document_noun`: word for the document that users submit, such as "study file".
    - `document_link`: last part of the route of the submitted document: `/v1/studies/{study_id}/study`.
    - `schema_name`: name of the JSON Schema of the submitted document.
    - `schemas`: returns the JSON Schema of the submitted document and the schemas that it refers to, keyed by name. Its
      argument is the template of references, as in pydantic.
    - `example`: a submitted document, shown in the API's documentation.
    - `is_document`: whether a parsed document describes a job of this kind, for clients that know only the file.
    - `load`: reads a file that describes a job; returns its document in canonical form, with absolute paths.
    - `accept`: checks a parsed document. Raises InvalidStudy with every problem. The function must be defined at the
      top level of a module, because the server calls it in another process.
    - `models`: returns the directories, hub ids and URLs of the models that an accepted job reads; if such a model is
      an artifact of another job, it becomes an artifact of the new job too.
    - `work`: continues a stored job from its stored state to its end, and stores how the job ended.
    - `view`: returns one `View` for each of the given jobs.
    - `documents`: returns the TypedDicts of two documents: the server's document of a job, and the progress of its
      driver.
    - `edit`: returns the model of the body that edits a job, a `JobEdit`.
    - `edited`: returns the document of a stored job with the options that an editing request gives; labels such as the
      name are changed elsewhere. Raises Conflict if the options cannot change now, and InvalidStudy with every problem.
    - `links`: last parts of the routes below a job that the job's document links to.
    - `demand`: returns the numbers of replicas and GPUs that a stored job occupies while it runs.
    - `time_left_s`: returns the seconds that a running job still takes, as of its last heartbeat; None if the progress
      allows no estimate.
    - `has_search`: whether a job has a search that can be stopped early, after which the job's other stages follow.
    - `names_artifacts`: whether users choose the names of the artifacts that jobs of this kind store, such as experts.
    - `takes_place`: whether a running job counts towards the number of jobs that may run at the same time.
    - `study_of`: returns, for the document of a job, the id of the study whose team and sharing the job always has. The
      field `study_of` is None if jobs of this kind have a team and sharing of their own.
    - `is_used`: whether a job must be kept because another job was made from it without naming it in its document.
    - `resumable`: which jobs of this kind can be resumed, as words that follow `noun` in an error message, such as
      "that has FAILED".
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
    accept: Accept
    work: Callable[[Attempt], None]
    documents: Callable[[], tuple[type, type]]
    view: Callable[[Sequence[JobRecord], Store, ArtifactStore], Sequence[View]] = lambda jobs, *_: [View()] * len(jobs)
    models: Callable[[Accepted], Sequence[str]] = lambda _: ()
    edit: Callable[[], type[JobEdit]] = _labels
    edited: Callable[[JobRecord, Any, Store], Mapping[str, Any]] = lambda job, *_: job.document
    demand: Callable[[JobRecord], Demand] = lambda _: Demand()
    time_left_s: Callable[[JobRecord], float | None] = lambda _: None
    links: Sequence[str] = ()
    example: Mapping[str, Any] | None = None
    has_search: bool = False
    names_artifacts: bool = False
    takes_place: bool = True
    study_of: Callable[[Mapping[str, Any]], str] | None = None
    is_used: Callable[[JobRecord, Store], bool] = lambda *_: False
    resumable: str = "that has FAILED, is PAUSED or waits"
    clean_up: Callable[[Store, Path], None] = _nothing

    def page_of(self, job: JobRecord) -> str:
        """Path of a job's page in the web application; a job that serves a study has the page of the study."""
        if self.study_of is not None:
            return f"/studies/{self.study_of(job.document)}"
        return f"/{self.collection}/{job.id}"

    @property
    def belongs_to_study(self) -> bool:
        """Whether each job of this kind belongs to a study, whose team and sharing it always has."""
        return self.study_of is not None

    @property
    def plural(self) -> str:
        """Plural of the word for a job of this kind, such as "studies"."""
        return f"{self.noun[:-1]}ies" if self.noun.endswith("y") else f"{self.noun}s"

    @property
    def path(self) -> str:
        """URL path of the list of all jobs of this kind, such as `/v1/studies`."""
        return f"/v1/{self.collection}"

    def path_of(self, job_id: str) -> str:
        """URL path of the job with the id `job_id`, such as `/v1/studies/5f0c...`."""
        return f"{self.path}/{job_id}"
