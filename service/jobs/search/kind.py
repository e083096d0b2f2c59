"""Declaration of the job kind study, which searches for merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.jobs.base import Accepted, Attempt, JobKind, RequestContext, View
from service.types import Demand

if TYPE_CHECKING:
    from service.jobs.search.edit import StudyEdit
    from service.store import Store
    from service.store.artifacts import ArtifactStore
    from service.types import JobRecord

__all__ = ["SEARCH"]


def _schemas(template: str) -> Mapping[str, Any]:
    from search_spaces.study.benchmarks import AddedBenchmarks
    from search_spaces.study.file import Study

    schema = Study.model_json_schema(ref_template=template)
    added = AddedBenchmarks.model_json_schema(ref_template=template)
    return {"Study": schema, "AddedBenchmarks": added, **added.pop("$defs", {}), **schema.pop("$defs", {})}


def _load(file: Path) -> Mapping[str, Any]:
    from search_spaces.study.file import load_study

    return load_study(file).canonical()


def _accept(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    from service.jobs.search.request import accept

    return accept(document, context)


def _models(accepted: Accepted) -> Sequence[str]:
    named = accepted.document["models"]
    given = [named["base"], *(model for model in named["experts"].values() if isinstance(model, str))]
    return [*given, *(source["directory"] for source in accepted.facts.get("chained", {}).values())]


def _work(attempt: Attempt) -> None:
    from service.jobs.search.work import work

    work(attempt)


def _documents() -> tuple[type, type]:
    from service.schemas.api import ProgressDocument, StudyDocument

    return StudyDocument, ProgressDocument


def _edit() -> type[StudyEdit]:
    from service.jobs.search.edit import StudyEdit

    return StudyEdit


def _edited(job: JobRecord, edit: StudyEdit, store: Store) -> Mapping[str, Any]:
    from service.jobs.search.edit import edited

    return edited(job, edit, store)


def _view(jobs: Sequence[JobRecord], store: Store, artifacts: ArtifactStore) -> Sequence[View]:
    from service.resolved_study import ResolvedStudy
    from service.results.documents import objective_document

    counts = store.trial_counts(jobs[0].id if len(jobs) == 1 else None)
    return [
        View(
            {
                "algorithm": job.accepted.get("algorithm"),
                "algorithm_reason": job.accepted.get("algorithm_reason"),
                "objectives": [objective_document(objective) for objective in ResolvedStudy.of(job).objectives],
                "trials": dict(counts.get(job.id, {})),
                "progress": None if job.progress is None else dict(job.progress),
            }
        )
        for job in jobs
    ]


def _demand(job: JobRecord) -> Demand:
    """Numbers of replicas (processes with one engine each) and GPUs with which a running study counts towards quotas.

    A replica that runs on CPU cores counts as a replica with one GPU, as in the study's limit `max_gpu_hours`.
    """
    engine = job.document.get("engine", {})
    replicas = engine.get("replicas", 1)
    return Demand(replicas, replicas * engine.get("tensor_parallel_size", 1))


def _time_left_s(job: JobRecord) -> float | None:
    return None if job.progress is None else job.progress.get("time_left_s")


SEARCH = JobKind(
    name="search",
    noun="study",
    resource="study",
    collection="studies",
    document_noun="study file",
    document_link="study",
    schema_name="Study",
    schemas=_schemas,
    is_document=lambda document: "models" in document,
    load=_load,
    accept=_accept,
    models=_models,
    work=_work,
    documents=_documents,
    view=_view,
    links=("study", "trials", "pareto", "summary", "report", "events", "plots", "exports", "log"),
    edit=_edit,
    edited=_edited,
    demand=_demand,
    time_left_s=_time_left_s,
    has_search=True,
    resumable="that has FAILED, that is PAUSED or waits, or with samples of an engine that failed a check later",
)
