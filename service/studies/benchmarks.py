"""Addition of benchmarks to an existing study: the extended study file, and the checks of the new benchmarks."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.benchmarks import AddedBenchmarks
from search_spaces.study.file import Study, parse_study, with_benchmarks
from service.resolved_study import ResolvedStudy
from service.studies.preflight.contamination import check_overlaps, unsearched_names
from service.studies.preflight.files import (
    attack_models,
    check_files,
    file_path_problem,
    model_path_problem,
    no_file_problem,
    task_files,
)
from service.studies.preflight.models import with_revisions
from service.studies.preflight.tasks import benchmarks_of, check_prompts, check_tasks, task_spec
from service.types import JobRecord
from workers.file_access import FileAccess
from workers.models.family import locate_family

__all__ = ["check_added", "model_study", "study_with"]

logger = logging.getLogger(__name__)


def study_with(record: JobRecord, added: AddedBenchmarks, *, trials: Collection[int]) -> Study:
    """Extend the study file of a stored study by the benchmarks `added`.

    `record` is the study's job. `trials` are the numbers of the study's trials. Raises InvalidStudy if a benchmark
    names a trial that the study does not have, or has the name of one of the study's benchmarks with another task or
    metric.
    """
    study = with_benchmarks(Study.model_validate(record.document), added)
    if added.engine is not None:
        message = f"{record.name!r} keeps its own engine; leave it out, it is for a model that is no study's"
        raise InvalidStudy((Problem("engine", message),))
    unknown = [
        Problem(f"benchmarks.{index}.trials.{place}", f"{choice} is not the number of a trial of {record.name!r}")
        for index, spec in enumerate(added.benchmarks)
        for place, choice in enumerate(spec.trials)
        if isinstance(choice, int) and choice not in trials
    ]
    if unknown:
        raise InvalidStudy(tuple(unknown))
    return study


def check_added(document: Mapping[str, Any], stored: JobRecord, access: FileAccess | None) -> None:
    """Check benchmarks that are to be added to a stored study on a server.

    `document` is the study file that includes the added benchmarks. A file that the benchmarks name is allowed only if
    two lists of permissions allow it: `access`, which is the server's present list, and the list that was stored with
    the study. If a list is None, it allows every file. The study's other tasks are not checked again. Only the
    tokenizer of the study's models is read. Raises InvalidStudy with every problem, each with its place in `document`.
    """
    study, resolved = Study.model_validate(document), ResolvedStudy.of(stored)
    before = resolved.access
    of_benchmarks = {place: file for place, file in task_files(study) if place.startswith("benchmarks.")}
    found = {place: file_path_problem(file) for place, file in of_benchmarks.items()}
    _refuse(found | {place: model_path_problem(model) for place, model in attack_models(study)})
    for allowed in (access, before):
        check_files(study, allowed, section="benchmarks")
    of_files = {place for place, _ in task_files(study, folders=False)}
    _refuse({place: no_file_problem(file) for place, file in of_benchmarks.items() if place in of_files})
    problems: list[Problem] = []
    try:
        specs = dict(enumerate(study.benchmarks))
        tasks, infos = check_tasks(specs, "benchmarks", study, problems, is_new=True, access=access)
        benchmarks_of(study, tasks, infos, problems)
        if not problems:
            pinned = with_revisions(study, resolved).models
            sources = locate_family(pinned.base, pinned.named).resolve(tokenizer=pinned.tokenizer)
            check_prompts(study, sources.result_dir, problems)
        if problems:
            raise InvalidStudy(tuple(problems))
        seed, known = study.search.seed, unsearched_names(Study.model_validate(stored.document))
        made = partial(task_spec, seed=seed, access=before, stored=resolved.task_digests)
        search = {spec.name: made(spec) for spec in study.scored_objectives.values()}
        check_overlaps(study, search, {"benchmarks": tasks}, accepted=known)
    except InvalidStudy:
        raise
    except Exception as error:  # a task is code and data of any origin, and the driver would fail too
        logger.exception("benchmarks could not be checked")
        message = f"the benchmarks could not be checked: {type(error).__name__}: {error}"
        raise InvalidStudy((Problem("benchmarks", message),)) from error


def _refuse(found: Mapping[str, str | None]) -> None:
    if problems := tuple(Problem(place, text) for place, text in found.items() if text):
        raise InvalidStudy(problems)


def model_study(model: str, added: AddedBenchmarks) -> Study:
    """Make a study that scores the benchmarks `added` on a single model, without a search.

    `model` is a directory or hub id. The study's only objective is the model's number of parameters, which needs no
    samples.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model.partition("@")[0]).name).strip("-._")[:63] or "model"
    whole = {"merge_method": "linear", "models": [{"model": "base", "parameters": {"weight": 1.0}}]}
    document = {
        "name": name,
        "models": {"base": model, "experts": {"model": model}},
        "search": {"baselines": "none", "recipes": [{"name": name, "recipe": whole}]},
        "fidelity": {"scheduler": "none"},
        "objectives": [{"name": "parameters", "cost": "parameters"}],
        "engine": {"verify": False},
    }
    engine = {} if added.engine is None else {"engine": added.engine}
    return with_benchmarks(parse_study(document, Path.cwd()), added).model_copy(update=engine)
