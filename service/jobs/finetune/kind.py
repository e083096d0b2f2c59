"""Declaration of the job kind fine-tuning, which trains experts and may create a study that merges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.jobs.base import Accepted, Attempt, JobKind, RequestContext, View

if TYPE_CHECKING:
    from service.store import Store
    from service.store.artifacts import ArtifactStore
    from service.types import JobRecord

__all__ = ["FINETUNE"]

EXAMPLE: Mapping[str, Any] = {
    "name": "family",
    "base": "/models/base",
    "data": {"max_length": 256},
    "training": {"steps": 500, "batch": 32, "learning_rate": 2e-5},
    "experts": {
        "math": {"data": {"file": "/data/math_train.jsonl"}},
        "text": {"data": {"file": "/data/text_train.jsonl"}, "training": {"steps": 800}},
    },
}


def _schemas(template: str) -> Mapping[str, Any]:
    from service.schemas.json_schemas import pipeline_schemas

    return pipeline_schemas(template)


def _load(file: Path) -> Mapping[str, Any]:
    from workers.training.finetuning.fleet import load_pipeline

    return load_pipeline(file).canonical()


def _accept(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    from service.jobs.finetune.request import accept

    return accept(document, context)


def _work(attempt: Attempt) -> None:
    from service.jobs.finetune.work import work

    work(attempt)


def _documents() -> tuple[type, type]:
    from service.schemas.api import FinetuneDocument, TrainingProgressDocument

    return FinetuneDocument, TrainingProgressDocument


def _view(jobs: Sequence[JobRecord], store: Store, artifacts: ArtifactStore) -> Sequence[View]:
    from service.jobs.finetune.view import view

    return [view(job, store, artifacts, path=FINETUNE.path_of(job.id)) for job in jobs]


def _clean_up(store: Store, data_dir: Path) -> None:
    from service.jobs.finetune.study import collect_sources

    collect_sources(store, data_dir)


FINETUNE = JobKind(
    name="finetune",
    noun="fine-tuning",
    resource="finetune",
    collection="finetunes",
    document_noun="specification",
    document_link="specification",
    schema_name="Finetuning",
    schemas=_schemas,
    is_document=lambda document: "base" in document and "models" not in document,
    load=_load,
    accept=_accept,
    work=_work,
    documents=_documents,
    view=_view,
    links=("specification", "curves", "report", "events", "log"),
    example=EXAMPLE,
    clean_up=_clean_up,
)
