"""`mergesearch run`: one study in one directory, without a server.

The directory holds the study's database, its result files and a lock against a second run. Running the same study in
the same directory again resumes the study.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from search_spaces.study.benchmarks import AddedBenchmarks, Contamination
from search_spaces.study.file import Study, same_but_limits, with_benchmarks
from search_spaces.study.models import AnotherStudy
from service.cluster.node_calls import cluster_machines
from service.cluster.session import check_reachable
from service.disk import artifacts_dir, locked
from service.errors import Conflict, NotFound
from service.jobs.base import Attempt, Resources
from service.jobs.heartbeat import Heartbeat
from service.jobs.search.kind import SEARCH
from service.jobs.search.prepare import prepared
from service.jobs.search.progress import ProgressReporter
from service.jobs.search.work import continue_study
from service.resolved_study import ResolvedStudy
from service.results.files import write_results
from service.results.load import run_record
from service.results.record import RunRecord
from service.results.report import render_report
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.store.documents import BENCHMARKS, BenchmarkFacts, read_benchmarks
from service.studies.benchmarks import study_with
from service.studies.preflight.examine import EXPORT
from service.studies.preflight.models import check_unchanged
from service.studies.preflight.result import PreflightResult
from service.tune.refinement_stage import has_begun
from service.tune.searchers.hm3 import FIRST_GAMMA
from service.types import JobRecord, JobState
from workers.errors import EngineUnavailable

__all__ = ["DATABASE", "evaluate_run", "open_run", "prepared_in", "read_run", "run_study"]

DATABASE = "study.db"

# Defaults of options of `search.hm3` in earlier versions.
EARLIER_DEFAULTS: Mapping[str, tuple[float, ...]] = {
    "archive": (4, 16),
    "epochs": (4,),
    "exploration": (0.1,),
    "gamma": (FIRST_GAMMA,),
    "neighbours": (4, 12),
}


def run_study(
    study: Study,
    directory: Path,
    *,
    view: ProgressReporter,
    exports: bool = False,
    resources: Resources,
    observer: Callable[[str], None] = lambda _: None,
    continues: bool = False,
) -> RunRecord:
    """Run or resume `study` in `directory` until it ends, write its result files, and return all its stored data.

    Args:
        study: The study file.
        directory: Directory of the run, new or from an earlier call with the same study.
        view: Receiver of progress and messages.
        exports: Check also that the best merge can be exported to `directory`/export. Nothing is exported.
        resources: Functions that connect to Ray and open scoring replicas.
        observer: Called after each stored result, with a word for the result, such as "complete", so that tests can
            stop the process at this point.
        continues: Whether a COMPLETE study continues, so that benchmarks that failed are scored.

    Raises:
        InvalidStudy: The study has problems; nothing was started.
        Conflict: The directory is used by another run or study.
        ConnectionError: Ray cannot be reached.
        StudyFailed: The study cannot continue; the result files have the results so far.
        EngineUnavailable: Engines cannot score at the moment; the result files have the results so far.
    """
    if not (directory / DATABASE).exists():  # an existing study may be finished and need no Ray
        check_reachable()
    export_dir = directory / EXPORT if exports else None
    study = _with_stored_benchmarks(directory, _with_stored_defaults(study, directory, note=view.note))
    preflight = prepared_in(directory, study, export_dir=export_dir, note=view.note)
    with locked(directory):
        store = Store(f"sqlite:///{directory / DATABASE}")
        try:
            record = _created_or_resumed(store, study, preflight, directory, continues=continues)
            try:
                if record.state is not JobState.COMPLETE:
                    _continue(store, record, preflight, directory, resources=resources, view=view, observer=observer)
            finally:
                result = run_record(store, record.id)
                write_results(directory, result, report=render_report(result))
            return result
        finally:
            store.close()


def evaluate_run(
    directory: Path,
    added: AddedBenchmarks,
    *,
    view: ProgressReporter,
    resources: Resources,
    observer: Callable[[str], None] = lambda _: None,
) -> RunRecord:
    """Add benchmarks to the study in `directory`, score its merges on them, and return all stored data.

    If the study has not ended, its search is finished first. `added` are the benchmarks. `view` receives progress and
    messages, `resources` are the functions that connect to Ray and open scoring replicas, and `observer` is called
    after each stored result, with a word for the result. Raises Conflict, ConnectionError, StudyFailed and
    EngineUnavailable in the same cases as `run_study`, NotFound if there is no study in `directory`, and InvalidStudy
    if a benchmark does not fit the study.
    """
    with read_run(directory) as (store, record):
        study = study_with(record, added, trials=store.trial_numbers(record.id))
    return run_study(study, directory, view=view, resources=resources, observer=observer, continues=True)


def _continue(
    store: Store,
    record: JobRecord,
    preflight: PreflightResult,
    directory: Path,
    *,
    resources: Resources,
    view: ProgressReporter,
    observer: Callable[[str], None],
) -> None:
    writer = store.open_attempt(record.id)
    try:
        with Heartbeat(writer, record.wall_clock_s) as heartbeat:
            artifacts = ArtifactStore(store, artifacts_dir(directory))
            attempt = Attempt(store, writer, artifacts, directory, heartbeat, resources, view.note)
            continue_study(attempt, preflight, open_study=open_run, view=view, observer=observer)
    except EngineUnavailable as error:
        writer.set_state(JobState.STOPPED, str(error))
        raise


def prepared_in(
    directory: Path, study: Study, *, sources_in: Path | None = None, note: Callable[[str], None], **options: Any
) -> PreflightResult:
    """Check a study, and prepare it to run or to continue in `directory`.

    Source models that are merges of other studies are exported to `sources_in`, or to `directory` if `sources_in` is
    None. `note` is called with messages about the progress. `options` are passed on to the function that makes the
    checks (`service.studies.preflight.examine.examine`). Raises InvalidStudy with every problem.
    """
    before: ResolvedStudy | None = None
    accepted: Study | None = None
    benchmarks: tuple[BenchmarkFacts, ...] = ()
    with suppress(NotFound), read_run(directory) as (store, record):
        before, accepted = ResolvedStudy.of(record), Study.model_validate(record.document)
        benchmarks = read_benchmarks(store.document(record.id, BENCHMARKS))
    return prepared(
        study,
        open_study=open_run,
        directory=sources_in or directory,
        artifacts_in=artifacts_dir(directory),
        before=before,
        accepted=accepted,
        benchmarks=benchmarks,
        note=note,
        machines=cluster_machines(),
        **options,
    )


@contextmanager
def read_run(directory: Path) -> Iterator[tuple[Store, JobRecord]]:
    """Open the database in a directory of `mergesearch run`, and yield the database and its study.

    The directory may be in use by a run. Raises NotFound if the directory holds no study.
    """
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


@contextmanager
def open_run(source: AnotherStudy) -> Iterator[tuple[Store, JobRecord]]:
    if source.dir is None:
        raise Conflict(f"id: {source.id} names a study on a server; give the `dir` of a run")
    with read_run(Path(source.dir)) as found:
        yield found


def _with_stored_benchmarks(directory: Path, study: Study) -> Study:
    """Add to `study`, read from a study file, the benchmarks that were added to the stored study in `directory`.

    Benchmarks of the study file come first. A benchmark that has the same name and task in both studies is scored on
    the trials that either study names. If a name has different tasks, the stored benchmark is left out, and a later
    check refuses the study. Overlaps with search data that were accepted earlier are accepted again.
    """
    with suppress(NotFound), read_run(directory) as (_, record):
        before = Study.model_validate(record.document)
        own = {spec.name: spec for spec in study.benchmarks}
        stored = tuple(spec for spec in before.benchmarks if spec.is_same_task(own.get(spec.name, spec)))
        if stored:
            accepted = before.contamination.model_dump()
            if "max_share" in study.contamination.model_fields_set:
                del accepted["max_share"]
            added = AddedBenchmarks(benchmarks=stored, contamination=Contamination(**accepted))
            return with_benchmarks(study, added)
    return study


def _created_or_resumed(
    store: Store, study: Study, preflight: PreflightResult, directory: Path, *, continues: bool
) -> JobRecord:
    resolved = preflight.resolved()
    studies = store.jobs()
    if not studies:
        return store.create_job(
            kind=SEARCH.name, name=study.name, document=study.canonical(), accepted=resolved.to_json()
        )
    record = studies[0]
    before = Study.model_validate(record.document)
    if differing := same_but_limits(before, study):
        raise Conflict(
            f"{directory}: holds another study ({before.name!r}); these fields differ: {', '.join(differing)}; "
            "only limits, a larger search.max_trials and more benchmarks may change; give another directory"
        )
    check_unchanged(record, resolved)
    if study.search.max_trials > before.search.max_trials and has_begun(store.steps(record.id)):
        raise Conflict(
            f"{directory}: search.max_trials is {study.search.max_trials}, and the search ended at "
            f"{before.search.max_trials} trials, because its front is refined (search.refinement); give another "
            "directory"
        )
    if before != study or (continues and record.state is JobState.COMPLETE):
        writer = store.open_attempt(record.id)
        added = "limits were raised, or trials or benchmarks were added"
        writer.set_document(study.canonical(), reopened=added if record.state is JobState.COMPLETE else None)
        record = store.job(record.id)
    return record


def _with_stored_defaults(given: Study, directory: Path, *, note: Callable[[str], None] = lambda _: None) -> Study:
    """Take options of `search.hm3` from the stored study in `directory` if they are defaults of an earlier version.

    Every study stores all options with their defaults. If a default has changed since, a study file without the option
    would differ from the stored study of the same run. Options that `given`, the study file of the present run, states
    are kept. `note` is called with a message for each option of a study whose searcher is `hm3`.
    """
    with suppress(NotFound), read_run(directory) as (_, record):
        resolved, hm3 = ResolvedStudy.of(record), given.search.hm3
        before = Study.model_validate(record.document).search.hm3
        # A later version stores 0.99 only if the study file states it.
        has_default_gamma = resolved.algorithm != "hm3" or resolved.searcher_version == 1
        for option, defaults in EARLIER_DEFAULTS.items():
            stored, own = getattr(before, option), getattr(hm3, option)
            is_stated = option in hm3.model_fields_set and own is not None
            if is_stated or stored == own or stored not in defaults or (option == "gamma" and not has_default_gamma):
                continue
            hm3 = hm3.model_copy(update={option: stored})
            if resolved.algorithm == "hm3":
                note(f"search.hm3.{option} stays {stored}, the default when the study began")
        return given.model_copy(update={"search": given.search.model_copy(update={"hm3": hm3})})
    return given
