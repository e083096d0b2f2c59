"""Preparation of a study: its sources that are merges of other studies are exported, and every check runs.

The server's checks, drivers, `mergesearch run` and `mergesearch run --check` all prepare a study here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.study.file import Study
from service.disk import artifacts_dir
from service.resolved_study import ResolvedStudy
from service.store.documents import BenchmarkFacts
from service.studies.chains import OpenStudy, with_exported_sources
from service.studies.policies.start import check_start
from service.studies.preflight.contamination import check_overlaps, unsearched_names
from service.studies.preflight.examine import examine
from service.studies.preflight.models import with_revisions
from service.studies.preflight.result import PreflightResult, StudyTasks
from service.studies.warm_start import check_warm_start
from workers.file_access import FileAccess

__all__ = ["prepared"]

logger = logging.getLogger(__name__)


def prepared(
    study: Study,
    *,
    open_study: OpenStudy,
    directory: Path,
    artifacts_in: str | Path | None = None,
    before: ResolvedStudy | None = None,
    accepted: Study | None = None,
    benchmarks: Sequence[BenchmarkFacts] = (),
    access: FileAccess | None = None,
    before_weights: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = logger.info,
    **options: Any,
) -> PreflightResult:
    """Prepare a study: export its sources that are merges of other studies, run every check, and return the result.

    Args:
        study: The study file.
        open_study: Opens the other studies, whose merges, policies (trained networks) or results the study uses.
        directory: Directory of the run or of the server, to which merges of other studies are exported.
        artifacts_in: Location of the artifacts, such as policies of other studies. By default they are in a directory
            below `directory`. If it is an object store, merges of other studies are stored there.
        before: For a study that continues, the resolved study that was stored when the study was created, with the
            commits of its hub models. None for a new study.
        accepted: The study file that was accepted before, for a study that continues; its held-out data and benchmarks
            are not compared with search data again. None for a new study.
        benchmarks: The stored descriptions of the benchmarks that a study that continues has begun to score.
        access: The files that may be read besides the exported merges; None means all files.
        before_weights: Called when only the checks of the weights are left.
        note: Called with messages about the progress.
        **options: Further arguments of `service.studies.preflight.examine.examine`.

    Raises:
        InvalidStudy: The study has problems; the error lists all of them.
    """
    artifacts_in = artifacts_in or artifacts_dir(directory)
    exported, chained = with_exported_sources(
        study, open_study=open_study, directory=directory, artifacts_in=artifacts_in, before=before, note=note
    )
    if access is not None:
        access = access.allowing(source.directory for source in chained.values())
    if before is not None:
        exported = with_revisions(exported, replace(before, chained={}))
    known = () if accepted is None else unsearched_names(accepted)

    def finish_tasks(tasks: StudyTasks) -> None:
        check_overlaps(study, tasks.search, tasks.unsearched, accepted=known)
        before_weights()

    preflight = examine(
        exported,
        chained=chained,
        is_new=before is None,
        stored_tasks=() if before is None else (*before.task_digests, *(facts.task_digest for facts in benchmarks)),
        access=access,
        before_weights=finish_tasks,
        note=note,
        **options,
    )
    if before is None:
        check_start(preflight, open_study=open_study, artifacts_in=artifacts_in)
        check_warm_start(preflight, open_study=open_study)
    return preflight
