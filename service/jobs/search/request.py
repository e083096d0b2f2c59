"""Reads and checks a submitted study before the server stores it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import Study, parse_study
from search_spaces.study.models import AnotherStudy
from service.errors import Conflict
from service.jobs.base import Accepted, RequestContext
from service.jobs.search.prepare import prepared
from service.store import Store
from service.store.database_url import known_url
from service.studies.chains import OpenStudy, on_server
from service.studies.preflight.dtype import DTYPE_BYTES
from service.studies.preflight.files import (
    attack_models,
    check_files,
    file_path_problem,
    model_path_problem,
    no_file_problem,
    task_files,
)
from service.types import JobRecord

__all__ = ["accept", "read_study", "studies_of"]


def read_study(document: Mapping[str, Any], context: RequestContext) -> Study:
    """Read the study that a submitted `document` describes, and check its file names.

    `context` says which files the study may refer to. Raises InvalidStudy with every problem, including files that have
    relative paths or may not be read.
    """
    study = parse_study(dict(document))
    models = {"base": study.models.base} | {f"experts.{alias}": model for alias, model in study.models.named.items()}
    found = {f"models.{place}": model_path_problem(model) for place, model in models.items()}
    found |= {place: model_path_problem(model) for place, model in attack_models(study)}
    found |= {place: file_path_problem(file) for place, file in task_files(study)}
    _refuse(found)
    check_files(study, context.access)
    _refuse({place: no_file_problem(file) for place, file in task_files(study, folders=False)})
    return study


def accept(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    """Check a submitted study without downloading weights, and return it in its stored form.

    `document` is the study file, and `context` says which files and other studies the study may read. Raises
    InvalidStudy with every problem.
    """
    study = read_study(document, context)
    preflight = prepared(
        study,
        open_study=studies_of(context),
        directory=context.data_dir or Path(),
        artifacts_in=context.files,
        access=context.access,
        downloads=False,
        machines=context.machines,
        before_weights=context.lift_limits,
    )
    num_parameters = preflight.models.export_bytes // DTYPE_BYTES[preflight.dtype]
    resolved = preflight.resolved().to_json()
    return Accepted(study.name, study.canonical(), resolved, export_parameters=num_parameters)


def studies_of(context: RequestContext) -> OpenStudy:
    """Make a function that opens the study of the server with a given id, so that its merges or results can be used.

    `context` has the server's database and the rights of the user who sent the request. The returned function also
    lifts the limits of memory and processor time of the current process, because a process that opens a study then
    writes merges of it.
    """

    @contextmanager
    def open_study(source: AnotherStudy) -> Iterator[tuple[Store, JobRecord]]:
        if context.store_url is None and context.data_dir is None:
            raise Conflict("requests here cannot name other studies")
        url = context.store_url or known_url(context.data_dir or Path())
        context.lift_limits()
        store = Store(url)
        try:
            with on_server(store, reader=context.reader)(source) as found:
                yield found
        finally:
            store.close()

    return open_study


def _refuse(found: Mapping[str, str | None]) -> None:
    if problems := tuple(Problem(place, text) for place, text in found.items() if text):
        raise InvalidStudy(problems)
