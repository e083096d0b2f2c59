"""Declaration of the job kind fine-tuning, which trains experts and may create a study that merges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.jobs.base import Accepted, Attempt, JobKind, RequestContext, View
from service.types import Demand

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


def _is_used(job: JobRecord, store: Store) -> bool:
    """Whether a study was created to merge the experts of a fine-tuning."""
    from service.jobs.finetune.study import study_of

    return study_of(store, job.id) is not None


def _demand(job: JobRecord) -> Demand:
    """Number of workers and GPUs with which a running fine-tuning counts towards its team's quotas.

    A worker is a training process. The specification's `parallel_experts` is the number of experts that train at the
    same time. If experts have different numbers of workers, the experts with the most workers are counted. Each worker
    counts as one GPU.
    """
    experts = job.document.get("experts", {"": job.document})
    workers = sorted((expert.get("workers", 1) for expert in experts.values()), reverse=True)
    num_workers = sum(workers[: job.document.get("parallel_experts") or 1])
    return Demand(num_workers, num_workers)


def _time_left_s(job: JobRecord) -> float | None:
    """Estimate the seconds that a fine-tuning still takes, from its progress.

    Only a fine-tuning that trains a single expert has an estimate. The result is None for other fine-tunings, and
    before the training has reported progress.
    """
    begun = list((job.progress or {}).get("experts", {}).values())
    if len(begun) != 1 or set(job.document) & {"experts", "analysis"}:
        return None
    return float((begun[0]["steps"] - begun[0]["step"]) * begun[0]["seconds"])


FINETUNE = JobKind(
    name="finetune",
    noun="fine-tuning",
    resource="finetune",
    collection="finetunes",
    document_noun="specification",
    names_artifacts=True,
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
    is_used=_is_used,
    clean_up=_clean_up,
    demand=_demand,
    time_left_s=_time_left_s,
)
