"""Chains of studies: merged models of one study as sources of another.

A source that is a trial of another study becomes an exported checkpoint in the data directory, as `export` writes it,
and from then on is a directory like any other. The trial and its recipe are those of when the study was created, and
the checkpoint's fingerprint is checked as that of all sources is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import FromStudy, Study
from service.errors import Conflict, NotFound
from service.results.selection import best_trial
from service.store import Store
from service.studies.export import export_trial
from service.studies.preflight.dtype import engine_dtype
from service.studies.preflight.models import with_revisions
from service.types import ChainedSource, ResolvedStudy, StudyRecord
from workers.errors import InvalidModel

__all__ = ["SOURCES", "OpenStudy", "on_server", "with_exported_sources"]

logger = logging.getLogger(__name__)

# The directory of exported sources, in that of a run or a server.
SOURCES = "sources"

DIGEST_DIGITS = 16

OpenStudy: TypeAlias = Callable[[FromStudy], AbstractContextManager[tuple[Store, StudyRecord]]]
"""Opens the study that a source is from. Raises NotFound, or Conflict if it cannot be named so here."""


def with_exported_sources(
    study: Study,
    *,
    open_study: OpenStudy,
    directory: Path,
    before: ResolvedStudy | None = None,
    note: Callable[[str], None] = logger.info,
) -> tuple[Study, dict[str, ChainedSource]]:
    """The study with directories in place of the merges of other studies, which are written below `directory` where
    they are not there yet, and what these are. `before` is what a study that goes on resolved to.

    Raises InvalidStudy with every merge that cannot be had."""
    found: dict[str, ChainedSource] = {}
    problems: list[Problem] = []
    for alias, source in study.models.chained.items():
        known = None if before is None else before.chained.get(alias)
        try:
            with open_study(source) as (store, record):
                note(f"Exporting the source {alias} from study {record.name!r} ...")
                found[alias] = _exported(store, record, source, known, directory)
        except (NotFound, Conflict, InvalidModel, InvalidStudy) as error:
            problems.append(Problem(f"models.experts.{alias}.from_study", str(error)))
    if problems:
        raise InvalidStudy(tuple(problems))
    return _with_directories(study, found), found


def _with_directories(study: Study, found: Mapping[str, ChainedSource]) -> Study:
    experts = {**study.models.experts, **{alias: source.directory for alias, source in found.items()}}
    return study.model_copy(update={"models": study.models.model_copy(update={"experts": experts})})


def _exported(
    store: Store, record: StudyRecord, source: FromStudy, known: ChainedSource | None, directory: Path
) -> ChainedSource:
    trials = store.trials(record.id)
    if known is not None:
        number = known.trial
    elif source.trial == "best":
        best = best_trial(trials, record.resolved.objectives)
        if best is None:
            raise NotFound(f"study {record.name!r}: no trial has reached the full budget yet, so there is no best one")
        number = best.number
    else:
        number = source.trial
    if number >= len(trials):
        raise NotFound(f"study {record.name!r}: has no trial {number}; its trials are 0 to {len(trials) - 1}")
    recipe = trials[number].recipe
    if known is not None and recipe.digest != known.recipe_digest:
        raise Conflict(f"study {record.name!r}: trial {number} is not the one that this study was created with")
    study = with_revisions(Study.model_validate(record.document), record.resolved)
    dtype = engine_dtype(study)
    out = directory.resolve() / SOURCES / f"{recipe.digest[:DIGEST_DIGITS]}-{dtype}"
    export_trial(store, record, str(number), out, dtype=dtype)
    return ChainedSource(record.id, record.name, number, recipe.digest, str(out))


def on_server(store: Store) -> OpenStudy:
    """Studies of a server, by id."""

    @contextmanager
    def open_study(source: FromStudy) -> Iterator[tuple[Store, StudyRecord]]:
        if source.id is None:
            raise Conflict(f"dir: {source.dir} names a run's directory; on a server, give the id of one of its studies")
        yield store, store.study(source.id)

    return open_study
