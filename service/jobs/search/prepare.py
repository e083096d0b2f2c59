"""Preparation of a study: exports sources that are merges of other studies, and runs every check.

The server's checks, drivers, `mergesearch run` and `mergesearch run --check` all prepare a study here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.study.file import Study
from service.disk import artifacts_dir
from service.resolved_study import ResolvedStudy
from service.studies.chains import OpenStudy, with_exported_sources
from service.studies.policies.start import check_start
from service.studies.preflight.examine import examine
from service.studies.preflight.models import with_revisions
from service.studies.preflight.result import PreflightResult

__all__ = ["prepared"]

logger = logging.getLogger(__name__)


def prepared(
    study: Study,
    *,
    open_study: OpenStudy,
    directory: Path,
    artifacts_in: str | Path | None = None,
    before: ResolvedStudy | None = None,
    note: Callable[[str], None] = logger.info,
    **options: Any,
) -> PreflightResult:
    """Export the study's sources that are merges of other studies, and check the study with their directories.

    `open_study` opens the other studies. `directory` is that of the run or of the server; merges are exported below it.
    `artifacts_in` has the policies of other studies (None: the artifacts of `directory`). `before` is what a study that
    continues was resolved to: its hub models keep their commits. `options` are those of `examine`. Raises InvalidStudy
    with every problem.
    """
    exported, chained = with_exported_sources(
        study, open_study=open_study, directory=directory, before=before, note=note
    )
    if before is not None:
        exported = with_revisions(exported, replace(before, chained={}))
    preflight = examine(exported, chained=chained, note=note, **options)
    if before is None:
        check_start(preflight, open_study=open_study, artifacts_in=artifacts_in or artifacts_dir(directory))
    return preflight
