"""Fields and links that the server shows for a fine-tuning."""

from __future__ import annotations

from service.jobs.base import View
from service.jobs.finetune.study import study_of
from service.jobs.search.kind import SEARCH
from service.results.training import stored_analysis
from service.schemas.api import ExpertDocument
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.types import JobRecord, JobState
from workers.training.finetuning.fleet import ANALYSIS, EXPERTS, STUDY

__all__ = ["view"]


def view(job: JobRecord, store: Store, artifacts: ArtifactStore, *, path: str) -> View:
    """Build the part of the server's JSON document of a fine-tuning that documents of other jobs do not have.

    This part has the experts, with links to the experts that are stored in `artifacts`. It also has links to the
    analysis and to the study that merges the experts, if these are stored. `path` is the URL path of the fine-tuning.
    """
    progress = (job.progress or {}).get("experts", {})
    trained = {artifact.name: artifact for artifact in artifacts.of(job.id)}
    experts: dict[str, ExpertDocument] = {
        alias: {
            "method": spec["method"]["kind"],
            "progress": progress.get(alias),
            "bytes": trained[alias].num_bytes if alias in trained else None,
            "links": {"download": f"{path}/experts/{alias}/download"} if alias in trained else {},
        }
        for alias, spec in job.document.get(EXPERTS, {job.name: job.document}).items()
    }
    links = {}
    if job.document.get(ANALYSIS) is not None and stored_analysis(store, job.id) is not None:
        links["analysis"] = f"{path}/analysis"
    # Only a pipeline that is COMPLETE has a study.
    if STUDY in job.document and job.state is JobState.COMPLETE and (study := study_of(store, job.id)) is not None:
        links["study"] = SEARCH.path_of(study.id)
    return View({"experts": experts}, links)
