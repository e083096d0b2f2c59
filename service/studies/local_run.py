"""`mergesearch run`: one study in one directory, without a server.

The directory holds the study's database, its result files and a lock against a second run. Running the same study there
again resumes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from search_spaces.study.file import Study, same_but_limits
from search_spaces.study.sections import AnotherStudy
from service.cluster.session import check_reachable, ray_session
from service.disk import artifacts_dir, locked
from service.errors import Conflict, NotFound
from service.results.files import write_results
from service.results.load import run_record
from service.results.record import RunRecord
from service.results.report import render_report
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.studies.attempt import ALIGNMENTS, execute, with_alignments
from service.studies.chains import with_exported_sources
from service.studies.heartbeat import Heartbeat
from service.studies.policies.start import check_start, with_start
from service.studies.preflight.examine import EXPORT, PreflightResult, examine
from service.studies.preflight.models import check_unchanged, with_revisions
from service.studies.progress import ProgressReporter
from service.types import ChainedSource, JobRecord, JobState, ResolvedStudy
from workers.errors import EngineUnavailable
from workers.serving.deployment import serving
from workers.types import Scorer

__all__ = ["DATABASE", "OpenScorer", "as_started", "open_run", "open_scorer", "read_run", "run_study"]

DATABASE = "study.db"

OpenScorer = Callable[[PreflightResult, ProgressReporter], AbstractContextManager[Scorer]]


@contextmanager
def open_scorer(preflight: PreflightResult, view: ProgressReporter) -> Iterator[Scorer]:
    """Scoring replicas on Ray Serve for the duration of a run. Raises EngineUnavailable if none starts."""
    replicas = preflight.study.engine.replicas
    view.note(f"Starting {replicas} engine{'s' * (replicas > 1)} ...")
    with serving(preflight.family, preflight.engine_options, replicas=replicas) as scorer:
        yield scorer


def run_study(
    study: Study,
    directory: Path,
    *,
    view: ProgressReporter,
    exports: bool = False,
    open_scorer: OpenScorer = open_scorer,
    observer: Callable[[str], None] = lambda _: None,
) -> RunRecord:
    """Run the study in `directory` to its end, or resume it there, and write its result files; `exports` only
    checks that the best merge fits into `directory`/export.

    Raises InvalidStudy (nothing was started), Conflict (the directory is used by another run or study), ConnectionError
    (no Ray), StudyFailed and EngineUnavailable (the result files hold the results so far).
    """
    if not (directory / DATABASE).exists():  # an existing study may be finished and need no Ray
        check_reachable()
    export_dir = directory / EXPORT if exports else None
    started, chained = as_started(study, directory, sources_in=directory, note=view.note)
    preflight = examine(started, export_dir=export_dir, chained=chained, note=view.note)
    if not (directory / DATABASE).exists():  # an existing study has them
        check_start(preflight, open_study=open_run, artifacts_in=artifacts_dir(directory))
    with locked(directory):
        store = Store(f"sqlite:///{directory / DATABASE}")
        try:
            record = _created_or_resumed(store, study, preflight, directory)
            try:
                if record.state is not JobState.COMPLETE:
                    writer = store.open_attempt(record.id)
                    artifacts = ArtifactStore(store, artifacts_dir(directory))
                    preflight = with_start(preflight, store, writer, artifacts=artifacts, open_study=open_run)
                    with Heartbeat(writer, record.wall_clock_s) as heartbeat, ray_session() as session:
                        if session.dashboard_url:
                            view.note(f"Ray dashboard: {session.dashboard_url}")
                        preflight = with_alignments(
                            preflight, store, writer, directory=directory / ALIGNMENTS, note=view.note
                        )
                        with open_scorer(preflight, view) as scorer:
                            execute(
                                store,
                                writer,
                                preflight,
                                scorer,
                                work_dir=directory.resolve() / "ray",
                                artifacts=artifacts,
                                heartbeat=heartbeat,
                                view=view,
                                observer=observer,
                            )
            except EngineUnavailable as error:
                writer.set_state(JobState.STOPPED, str(error))
                raise
            finally:
                result = run_record(store, record.id)
                write_results(directory, result, report=render_report(result))
            return result
        finally:
            store.close()


@contextmanager
def read_run(directory: Path) -> Iterator[tuple[Store, JobRecord]]:
    """The store and the study of a run's directory, also while a run uses it. Raises NotFound."""
    if not (directory / DATABASE).is_file():
        raise NotFound(f"{directory}: no run here (no {DATABASE}); give the directory that `mergesearch run` was given")
    store = Store(f"sqlite:///{directory / DATABASE}")
    try:
        studies = store.jobs()
        if not studies:
            raise NotFound(f"{directory}: its {DATABASE} holds no study")
        yield store, studies[0]
    finally:
        store.close()


def as_started(
    study: Study, directory: Path, *, sources_in: Path, note: Callable[[str], None]
) -> tuple[Study, dict[str, ChainedSource]]:
    """The study with its hub models at the commits of the run in `directory`, if there is one, and the merges of other
    studies exported below `sources_in`, and what these are. Raises InvalidStudy if they cannot be had."""
    before: ResolvedStudy | None = None
    with suppress(NotFound), read_run(directory) as (_, record):
        before = record.resolved
    exported, chained = with_exported_sources(
        study, open_study=open_run, directory=sources_in, before=before, note=note
    )
    if before is not None:
        exported = with_revisions(exported, replace(before, chained={}))
    return exported, chained


@contextmanager
def open_run(source: AnotherStudy) -> Iterator[tuple[Store, JobRecord]]:
    if source.dir is None:
        raise Conflict(f"id: {source.id} names a study on a server; give the dir of a run")
    with read_run(Path(source.dir)) as found:
        yield found


def _created_or_resumed(store: Store, study: Study, preflight: PreflightResult, directory: Path) -> JobRecord:
    resolved = preflight.resolved()
    studies = store.jobs()
    if not studies:
        return store.create_job(name=study.name, document=study.canonical(), resolved=resolved)
    record = studies[0]
    before = Study.model_validate(record.document)
    if differing := same_but_limits(before, study):
        raise Conflict(
            f"{directory}: holds another study ({before.name!r}); these fields differ: {', '.join(differing)}; "
            "only limits and a larger search.max_trials may change; give another directory"
        )
    check_unchanged(record, resolved)
    if before != study:
        writer = store.open_attempt(record.id)
        writer.set_document(study.canonical())
        if record.state is JobState.COMPLETE:
            writer.set_state(JobState.STOPPED, "limits or max_trials were raised")
        record = store.job(record.id)
    return record
