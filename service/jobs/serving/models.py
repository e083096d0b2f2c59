"""Models and engine options of a stored study, for starting replicas for its merges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.spaces.base import AlignedSpace, LayeredSpace
from search_spaces.study.engine import EngineOptions
from search_spaces.study.file import Study
from service.disk import alignments_dir, job_dir
from service.errors import Conflict
from service.resolved_study import ResolvedStudy
from service.store.artifacts import ArtifactStore
from service.store.documents import ALIGNMENTS
from service.studies.preflight.examine import built_space
from service.studies.preflight.files import check_files
from service.studies.preflight.models import with_revisions
from service.studies.preflight.resources import merges_parts
from service.types import JobRecord
from workers.models.family import resolve_family
from workers.types import Family

__all__ = ["engine_models"]


def engine_models(
    record: JobRecord, *, artifacts: ArtifactStore, data_dir: Path, note: Callable[[str], None]
) -> tuple[Family, EngineOptions]:
    """Find the models and the engine options of the study `record`.

    In some search spaces, merges need alignments (maps between layers of different models). The study's alignments are
    in `artifacts` or `data_dir`. `note` is called with lines about downloads of models. Raises Conflict if the models
    have changed since the study was created, and InvalidStudy if the study may no longer read its models, or if its
    search space cannot be built from them.
    """
    resolved = ResolvedStudy.of(record)
    study = with_revisions(Study.model_validate(record.document), resolved)
    check_files(study, resolved.access, section="models")
    sources = resolve_family(study.models.base, study.models.named, tokenizer=study.models.tokenizer)
    sources = sources.fetched(note=note)
    if sources.fingerprints != resolved.fingerprints:
        changed = sorted(a for a, f in sources.fingerprints.items() if resolved.fingerprints.get(a) != f)
        raise Conflict(f"models {', '.join(changed)} have changed since the study; its merges cannot be served")
    problems: list[Problem] = []
    space = built_space(study, sources, sources.fingerprints, problems)
    if space is None:
        raise InvalidStudy(tuple(problems))
    # An engine of the study, which may still run, is an engine with the same options.
    family = sources.family
    left: dict[str, Any] = {"gpu_share_left": resolved.gpu_share_left, "merges_parts": merges_parts(study, sources)}
    options = study.engine.options.model_copy(update=left)
    if isinstance(space, AlignedSpace) and space.alignment != "none":
        # A study that was restored from a backup, or is older than the object store, has its alignments on the disk.
        is_remote = any(artifact.name == ALIGNMENTS for artifact in artifacts.of(record.id))
        own = str(alignments_dir(job_dir(data_dir, record.id)).resolve())
        family = replace(family, alignments_dir=(is_remote and artifacts.remote) or own)
    if isinstance(space, LayeredSpace):
        options = options.model_copy(update={"max_layers": space.max_layers})
    return family, options
