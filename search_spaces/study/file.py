"""The study file: the models to merge, the space to search, the objectives, and the limits of cost.

All problems of a study are reported together. This module reads only the study file; other modules do the validation
that needs models or tasks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.section import Name, Section
from search_spaces.study.attacks import BertAttack
from search_spaces.study.benchmarks import AddedBenchmarks, BenchmarkSpec, Contamination
from search_spaces.study.checks import HINTS, ValidParts, contradictions, without_consequences
from search_spaces.study.engine import Engine
from search_spaces.study.fidelity import Fidelity
from search_spaces.study.image_suites import with_described_suites
from search_spaces.study.models import Chained, Models, Trained
from search_spaces.study.objectives import AnyObjective, CostSpec, DescribedTask, ObjectiveSpec, ScoredTask
from search_spaces.study.search import DEFAULT_SPACE, Search, SearchSpaceSpec
from search_spaces.study.validation import at_most, in_file_order, problems_of
from search_spaces.study.yaml import read_document

__all__ = [
    "Limits",
    "Study",
    "load_benchmarks",
    "load_study",
    "parse_benchmarks",
    "parse_study",
    "resolved_file",
    "resolved_model",
    "resolved_objective",
    "same_but_limits",
    "study_json_schema",
    "with_benchmarks",
]

AnySection = TypeVar("AnySection", bound=Section)
AnyTask = TypeVar("AnyTask", bound=ScoredTask)


class Limits(Section):
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """The largest number of samples that the search may use: those that are scored, for baselines too, and those that
    gradients are charged as. Nothing starts that could exceed it.
    """
    max_gpu_hours: Annotated[float, Field(gt=0)] | None = None
    max_wall_clock_s: Annotated[float, Field(gt=0)] | None = None
    keep_responses: bool = True
    """Whether a complete study keeps the responses and tokens of all samples, which are most of what it stores. If
    false, it keeps those of baselines, of trials in the held-out table, and of verified trials.
    """
    max_layers: Annotated[int, Field(ge=1)] | None = None
    """The largest number of layers of a merged model, in spaces that change the number of layers. Default: 1.25 times
    the sources'.
    """


class Study(Section):
    """A study file as written by a user: models, search, objectives and limits."""

    name: Name
    models: Models
    search_space: SearchSpaceSpec = DEFAULT_SPACE
    search: Search = Search()
    fidelity: Fidelity = Fidelity()
    objectives: Annotated[tuple[AnyObjective, ...], Field(min_length=1)]
    """What the search optimises; several give a Pareto front. At least one has a task."""
    holdout: tuple[ObjectiveSpec, ...] = ()
    """Other data for the same objectives, by name. Finalists are scored on it at the end; it is not used for selection.
    """
    benchmarks: tuple[BenchmarkSpec, ...] = ()
    """Tasks that are scored once, after the search, on finalists and baselines. They are not used for selection, and
    need no objective of their name. More may be added to a study that has ended.
    """
    contamination: Contamination = Contamination()
    engine: Engine = Engine()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _backend_of_tasks(self) -> Self:
        """Set the option `engine.backend` to the program that scores the study's tasks.

        A stored study of images may have the value "vllm", because earlier versions stored this value for all studies.
        """
        tasks = [spec.task for _, spec in self.with_tasks() if isinstance(spec.task, DescribedTask)]
        backend = next((task.backend for task in tasks if task.backend != "vllm"), self.engine.backend)
        if backend != self.engine.backend:
            object.__setattr__(self, "engine", self.engine.model_copy(update={"backend": backend}))
        return self

    @property
    def scored_objectives(self) -> Mapping[int, ObjectiveSpec]:
        """The objectives that are scored on a task's samples. The keys are their positions in the file.

        The other objectives are costs of the recipe.
        """
        return {index: spec for index, spec in enumerate(self.objectives) if isinstance(spec, ObjectiveSpec)}

    def with_tasks(self) -> Iterator[tuple[str, ScoredTask]]:
        """Yield each objective, holdout entry and benchmark that has a task, with its place in the file.

        Each result is a pair of the place, such as "objectives.0", and the entry.
        """
        yield from ((f"objectives.{index}", spec) for index, spec in self.scored_objectives.items())
        yield from ((f"holdout.{index}", spec) for index, spec in enumerate(self.holdout))
        yield from ((f"benchmarks.{index}", spec) for index, spec in enumerate(self.benchmarks))

    def canonical(self) -> dict[str, Any]:
        """The study as plain data in which all defaults are written out.

        The function `parse_study` returns the same study from this data.
        """
        return self.model_dump(mode="json")


class _SpaceOnly(Section):
    search_space: SearchSpaceSpec = DEFAULT_SPACE


@cache
def study_json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the study file.

    The schema is made once, in 20 ms. The function returns the same object to all callers, so they must not change it.
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Study.model_json_schema()}


def load_study(file: Path | str) -> Study:
    """Read a study from a YAML or JSON file.

    Relative paths in the file are relative to the file's directory. Raises InvalidStudy with every problem found.
    """
    file = Path(file)
    return parse_study(read_document(file), file.absolute().parent)


def parse_study(document: Mapping[str, Any], directory: Path | None = None) -> Study:
    """Make a study from `document`, plain data such as a parsed YAML file, after checking the data.

    Relative paths are resolved against `directory`; with `directory` None they are left unchanged. Raises InvalidStudy
    with every problem found.
    """
    if not isinstance(document, Mapping):
        raise InvalidStudy((Problem("", f"a study is a mapping (key: value), not {document!r:.60}"),))
    document = with_described_suites(document)
    try:
        text = json.dumps(document)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidStudy((Problem("", f"the study is not plain data: {error}"),)) from error
    study: Study | None = None
    errors: list[ErrorDetails] = []
    try:
        # Validated as JSON, so that types are strict in terms of a study file: 3 is not text, "3" not a number, true
        # not 1.
        study = Study.model_validate_json(text, strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems = without_consequences(problems_of(errors, study_json_schema() if errors else {}, HINTS))
    found = at_most(contradictions(_valid_parts(document)))
    problems += [problem for problem in found if problem not in problems]
    if problems or study is None:
        raise InvalidStudy(in_file_order(problems, document))
    return study if directory is None else _resolved(study, directory)


def load_benchmarks(file: Path) -> AddedBenchmarks:
    """Read benchmarks that are to be added to a study from a YAML or JSON file.

    The file has the key `benchmarks` and may have the key `contamination`, both as in a study file. Relative paths in
    the file are relative to its directory. Raises InvalidStudy with every problem found.
    """
    return parse_benchmarks(read_document(file), file.absolute().parent)


def parse_benchmarks(document: Mapping[str, Any], directory: Path | None = None) -> AddedBenchmarks:
    """Make the benchmarks that are to be added to a study from `document`, plain data, after checking the data.

    Relative paths are resolved against `directory`; with `directory` None they are left unchanged. Raises InvalidStudy
    with every problem found.
    """
    document = with_described_suites(document)
    try:
        found = AddedBenchmarks.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        problems = problems_of(error.errors(include_url=False), AddedBenchmarks.model_json_schema(), HINTS)
        raise InvalidStudy(in_file_order(problems, document)) from error
    parts = ValidParts(benchmarks=dict(enumerate(found.benchmarks)), contamination=found.contamination)
    if contradictory := tuple(at_most(contradictions(parts))):
        raise InvalidStudy(in_file_order(contradictory, document))
    if directory is None:
        return found
    specs = tuple(resolved_objective(spec, directory) for spec in found.benchmarks)
    return found.model_copy(update={"benchmarks": specs})


def with_benchmarks(study: Study, added: AddedBenchmarks) -> Study:
    """A copy of the study to which benchmarks are added.

    Each benchmark lists the trials that are scored on it. A benchmark in `added` may have the name of a benchmark of
    the study, if both have the same task, metric, prompt attack and judge (an LLM that rates completions); the copy's
    benchmark then has the trials of both benchmarks. `added` may also change the limits on contamination, which is the
    overlap of benchmarks with the data of the search. The option `contamination.allowed` has the names of benchmarks
    that may overlap; these names are added to the study's names. The option `contamination.max_share`, the largest
    share of items that may overlap, replaces the study's value. Raises InvalidStudy if a task, metric, attack or judge
    differs.
    """
    known = {spec.name: spec for spec in study.benchmarks}
    problems = []
    for index, spec in enumerate(added.benchmarks):
        before = known.setdefault(spec.name, spec)
        if not spec.is_same_task(before):
            message = f"{spec.name} is a benchmark of this study with another task, metric or attack; give another name"
            problems.append(Problem(f"benchmarks.{index}.name", message))
        trials = tuple(dict.fromkeys((*before.trials, *spec.trials)))
        known[spec.name] = before.model_copy(update={"trials": trials, "group": before.group or spec.group})
    if problems:
        raise InvalidStudy(tuple(problems))
    own, given = study.contamination, added.contamination
    contamination = own.model_copy(
        update={
            "allowed": tuple(dict.fromkeys((*own.allowed, *given.allowed))),
            "max_share": given.max_share if "max_share" in given.model_fields_set else own.max_share,
        }
    )
    return study.model_copy(update={"benchmarks": tuple(known.values()), "contamination": contamination})


def same_but_limits(stored: Study, given: Study) -> tuple[str, ...]:
    """Fields in which a new version of a study differs from the stored study, although they must not change.

    `stored` is the stored study, and `given` is the new version. If the result is empty, the study may be resumed as
    `given` states it. The fields are dotted paths; the path of a benchmark has its name, as in "benchmarks.mmlu".

    The sections `limits` and `contamination` may change, `search.max_trials` may become larger, and benchmarks may be
    added. A stored benchmark must keep its task, metric, prompt attack and judge (an LLM that rates completions). In a
    space that changes the number of layers, `limits.max_layers` must not change either, because it is part of the
    space.
    """
    before, after = _flat(stored.canonical()), _flat(given.canonical())
    absent = object()
    changed = {name for name in before.keys() | after.keys() if before.get(name, absent) != after.get(name, absent)}
    of_space = {"limits.max_layers"} if given.search_space.changes_layers else set()
    may_differ = ("limits.", "contamination.", "benchmarks")
    changed = {name for name in changed if not name.startswith(may_differ) or name in of_space}
    known = {spec.name: spec for spec in given.benchmarks}
    for spec in stored.benchmarks:
        if spec.name not in known or not spec.is_same_task(known[spec.name]):
            changed.add(f"benchmarks.{spec.name}")
    if given.search.max_trials > stored.search.max_trials:
        changed.discard("search.max_trials")
    return tuple(sorted(changed))


def _valid_parts(document: Mapping[str, Any]) -> ValidParts:
    def valid(section: type[AnySection], value: Any) -> AnySection | None:
        try:
            return section.model_validate_json(json.dumps(value), strict=True)
        except ValidationError:
            return None

    def entries(key: str) -> list[Any]:
        values = document.get(key)
        return list(values) if isinstance(values, list | tuple) else []

    def specs(key: str, section: type[AnySection]) -> dict[int, AnySection]:
        found = enumerate(valid(section, value) for value in entries(key))
        return {index: spec for index, spec in found if spec is not None}

    space = valid(_SpaceOnly, {key: value for key, value in document.items() if key == "search_space"})
    return ValidParts(
        models=valid(Models, document.get("models")),
        search_space=None if space is None else space.search_space,
        search=valid(Search, document.get("search", {})),
        fidelity=valid(Fidelity, document.get("fidelity", {})),
        objectives=specs("objectives", ObjectiveSpec),
        costs=specs("objectives", CostSpec),
        holdout=specs("holdout", ObjectiveSpec),
        benchmarks=specs("benchmarks", BenchmarkSpec),
        contamination=valid(Contamination, document.get("contamination", {})),
        engine=valid(Engine, document.get("engine", {})),
        objective_names=tuple(str(e["name"]) for e in entries("objectives") if isinstance(e, Mapping) and "name" in e),
    )


# Paths.


def _resolved(study: Study, directory: Path) -> Study:
    models, search = study.models, study.search
    if search.hm3.start is not None and search.hm3.start.dir is not None:
        start = search.hm3.start.model_copy(update={"dir": _absolute(search.hm3.start.dir, directory)})
        search = search.model_copy(update={"hm3": search.hm3.model_copy(update={"start": start})})
    if search.warm_start is not None and search.warm_start.dir is not None:
        warm_start = search.warm_start.model_copy(update={"dir": _absolute(search.warm_start.dir, directory)})
        search = search.model_copy(update={"warm_start": warm_start})
    if search.recipes:
        given = tuple(
            each if each.file is None else each.model_copy(update={"file": resolved_file(each.file, directory)})
            for each in search.recipes
        )
        search = search.model_copy(update={"recipes": given})
    experts = {alias: _resolved_expert(value, directory) for alias, value in models.experts.items()}
    path_of = models.path_of
    if path_of is not None and path_of.dir is not None:
        path_of = path_of.model_copy(update={"dir": _absolute(path_of.dir, directory)})
    base = resolved_model(models.base, directory)
    return study.model_copy(
        update={
            "search": search,
            "models": models.model_copy(update={"base": base, "experts": experts, "path_of": path_of}),
            "objectives": tuple(
                resolved_objective(spec, directory) if isinstance(spec, ObjectiveSpec) else spec
                for spec in study.objectives
            ),
            "holdout": tuple(resolved_objective(spec, directory) for spec in study.holdout),
            "benchmarks": tuple(resolved_objective(spec, directory) for spec in study.benchmarks),
        }
    )


def resolved_model(value: str, directory: Path) -> str:
    """The absolute path of the directory that `value` in a study file names, or `value` itself for a remote model.

    A `value` with "://" is the URL of a folder in an object store. A `value` of the form `name` or `owner/name` is a
    hub id, unless a directory of this name exists. Relative directories are relative to `directory`.
    """
    if "://" in value:
        return value
    file = _absolute(value, directory)
    looks_like_path = value.startswith(("/", ".", "~")) or value.endswith("/") or value.count("/") > 1
    return file if looks_like_path or os.path.isdir(file) else value


def _resolved_expert(value: str | Chained | Trained, directory: Path) -> str | Chained | Trained:
    """Copy an expert of a study file; relative paths in it are relative to `directory` and become absolute."""
    if isinstance(value, str):
        return resolved_model(value, directory)
    return _run(value, directory) if isinstance(value, Chained) else value


def _run(value: Chained, directory: Path) -> Chained:
    """Copy a reference to another study's merge, and make the directory in it absolute.

    The reference `value` names the directory of the other study's run, or the id of a study on a server. A relative
    directory is relative to `directory`. A reference by id is returned unchanged.
    """
    source = value.from_study
    if source.dir is None:
        return value
    return Chained(from_study=source.model_copy(update={"dir": _absolute(source.dir, directory)}))


def resolved_objective(spec: AnyTask, directory: Path) -> AnyTask:
    """A copy of `spec` with absolute paths of its task's files. URLs stay unchanged.

    `spec` is an objective, a holdout entry or a benchmark. Relative paths are relative to `directory`.
    """
    task: DescribedTask | str
    if isinstance(spec.task, DescribedTask):
        task = spec.task if spec.task.is_on_hub else spec.task.at(resolved_file(spec.task.place, directory))
    else:
        is_file = spec.task.endswith((".yaml", ".yml"))
        task = resolved_file(spec.task, directory) if is_file else spec.task
    update: dict[str, Any] = {"task": task}
    if isinstance(spec, BenchmarkSpec) and isinstance(spec.attack, BertAttack):
        models = {"model": spec.attack.model, "encoder": spec.attack.encoder}
        found = {key: resolved_model(value, directory) for key, value in models.items() if value is not None}
        update["attack"] = spec.attack.model_copy(update=found)
    return spec.model_copy(update=update)


def resolved_file(value: str, directory: Path) -> str:
    """Make the path `value` of a file absolute; a relative path begins at `directory`, and a URL is left unchanged."""
    return value if "://" in value else _absolute(value, directory)


def _absolute(value: str, directory: Path) -> str:
    return os.path.abspath(directory / Path(value).expanduser())


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """The values in nested mappings and lists, keyed by the dotted path from `place`, such as "objectives.0.name".

    An empty mapping or list counts as a value.
    """
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if not pairs:
        return {place: value}
    flat: dict[str, Any] = {}
    for key, inner in pairs:
        flat |= _flat(inner, f"{place}.{key}" if place else str(key))
    return flat
