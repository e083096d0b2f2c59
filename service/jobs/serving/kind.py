"""Declaration of the job kind served study, which completes prompts with the merges of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.jobs.base import Accepted, Attempt, JobKind, RequestContext, View
from service.jobs.serving import NAME
from service.types import Demand

if TYPE_CHECKING:
    from service.store import Store
    from service.store.artifacts import ArtifactStore
    from service.types import JobRecord

__all__ = ["OPENAI", "SERVING"]

# The last part of the link to the routes that are compatible with OpenAI's.
OPENAI = "openai/v1"


def _schemas(template: str) -> Mapping[str, Any]:
    from service.jobs.serving.request import ServingRequest

    return {"Serving": ServingRequest.model_json_schema(ref_template=template)}


def _load(file: Path) -> Mapping[str, Any]:
    from service.jobs.serving.request import load

    return load(file)


def _accept(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    from service.jobs.serving.request import accept

    return accept(document, context)


def _work(attempt: Attempt) -> None:
    from service.jobs.serving.work import work

    work(attempt)


def _documents() -> tuple[type, type]:
    from service.schemas.api import ServedProgressDocument, ServedStudyDocument

    return ServedStudyDocument, ServedProgressDocument


def _view(jobs: Sequence[JobRecord], store: Store, artifacts: ArtifactStore) -> Sequence[View]:
    return [
        View(
            {"study": job.document["study"], "progress": None if job.progress is None else dict(job.progress)},
            {"openai": f"{SERVING.path_of(job.id)}/{OPENAI}"},
        )
        for job in jobs
    ]


def _demand(job: JobRecord) -> Demand:
    """Numbers of replicas and GPUs with which a running served study counts towards quotas: one replica, one GPU."""
    return Demand()


SERVING = JobKind(
    name=NAME,
    noun="served study",
    resource="served",
    collection="served",
    document_noun="serving request",
    document_link="request",
    schema_name="Serving",
    schemas=_schemas,
    is_document=lambda document: "study" in document and "models" not in document,
    load=_load,
    accept=_accept,
    work=_work,
    documents=_documents,
    view=_view,
    demand=_demand,
    time_left_s=lambda job: None,
    links=("request", "events", "log"),
    example={"study": "5f0c1f6e3b1c4b0f9d2a7c8e5f0c1f6e", "idle_minutes": 30},
    takes_place=False,
    study_of=lambda document: str(document["study"]),
)
