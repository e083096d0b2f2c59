"""Specification files of fine-tunings: of one expert, or of several experts, one per task (a fleet).

In a fleet's specification, `experts` has the options that differ between the experts, section by section, keyed by
alias. `study` is optional: a study that merges the trained experts, without the section `models`, because its models
are the fleet's base and experts. With the optional `analysis`, the trained experts are analysed at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.section import NAME, Section
from search_spaces.study.checks import HINTS
from search_spaces.study.file import Study, parse_study
from search_spaces.study.validation import problems_of
from search_spaces.study.yaml import read_document
from workers.training.finetuning.spec import ALL_LINEAR, FinetuneSpec, parse_spec

__all__ = [
    "ANALYSIS",
    "EXPERTS",
    "OPTIONAL_SECTIONS",
    "SECTIONS",
    "SIDE_BY_SIDE",
    "STUDY",
    "Analysis",
    "Pipeline",
    "fleet_noise",
    "is_pipeline",
    "load_pipeline",
    "parse_pipeline",
    "repeated_objectives",
]

# Keys of a fleet, and the directories of its results.
EXPERTS, STUDY = "experts", "study"

# Keys of a specification besides the options of experts.
ANALYSIS, SIDE_BY_SIDE = "analysis", "parallel_experts"

# Options that are the same for all experts of a fleet.
COMMON = ("name", "base")

# Sections whose options an expert may override one by one.
SECTIONS, OPTIONAL_SECTIONS = ("data", "method", "training"), ("adapter", "evaluation")


class Analysis(Section):
    """Options of the analysis of trained experts: the distribution of task vectors, and the losses of merges."""

    samples: Annotated[int, Field(ge=1)] = 100
    """The number of samples of each evaluation task by which coefficients of merges are chosen. Merges are reported on
    as many further samples."""
    wudi: bool = False
    """Whether WUDI-Merging is one of the merge methods. It takes several hundred matrix products for each matrix."""


@dataclass(frozen=True)
class Pipeline:
    """The experts to train, and optionally a study that merges them and an analysis.

    - `name`: the name of the fleet (the experts that one file defines), or of the single expert
    - `experts`: the specification of each expert, keyed by alias
    - `study`: the content of a study file without the key `models`, which the trained experts replace; None if no study
      is to be created
    - `directory`: the directory to which relative paths in `study` are relative
    - `is_fleet`: whether the experts were given as a fleet, which may also have only one expert
    - `analysis`: the options of the analysis of the trained experts; None if no analysis is requested
    - `parallel_experts`: the number of experts that train at the same time; None means as many as the cluster has GPUs
      for
    """

    name: str
    experts: Mapping[str, FinetuneSpec]
    study: Mapping[str, Any] | None
    directory: Path | None
    is_fleet: bool
    analysis: Analysis | None = None
    parallel_experts: int | None = None

    def places(self, out: Path) -> dict[str, Path]:
        """Directories for training the experts (models to be merged), keyed by the expert's name (alias).

        The directory of a single expert is `out`; each of several experts has a separate directory below `out`.
        """
        return {alias: out / EXPERTS / alias if self.is_fleet else out for alias in self.experts}

    def field_of(self, alias: str, field: str = "") -> str:
        """Dotted path of the option `field` of one expert in the specification file, such as "experts.math.data".

        `alias` is the expert. Messages name options by this path. If `field` is "", the result is the path of the
        expert.
        """
        return ".".join(filter(None, [*((EXPERTS, alias) if self.is_fleet else ()), field]))

    def canonical(self) -> dict[str, Any]:
        """Convert the pipeline (experts to train, and perhaps a study that merges them) to plain data.

        All defaults are filled in, and paths are absolute. The function `parse_pipeline` returns an equal pipeline from
        these data, except that the field `directory` may differ.
        """
        specs = {alias: spec.canonical() for alias, spec in self.experts.items()}
        analysis = {} if self.analysis is None else {ANALYSIS: self.analysis.model_dump(mode="json")}
        if not self.is_fleet:
            return {**specs[self.name], **analysis}
        base = next(iter(specs.values()))["base"]
        own = {alias: {k: v for k, v in spec.items() if k not in COMMON} for alias, spec in specs.items()}
        parallel = {} if self.parallel_experts is None else {SIDE_BY_SIDE: self.parallel_experts}
        document = {"name": self.name, "base": base, EXPERTS: own, **parallel, **analysis}
        study = self.study_of({alias: Path(alias) for alias in self.experts})
        if study is not None:
            document[STUDY] = {key: value for key, value in study.canonical().items() if key != "models"}
        return document

    def study_of(self, experts: Mapping[str, Path | str]) -> Study | None:
        """Make the study that merges the trained experts; None if the specification file has no study.

        `experts` has the directory or URL of each trained expert, keyed by alias. Raises InvalidStudy with every
        problem found.
        """
        if self.study is None:
            return None
        base = next(iter(self.experts.values())).base
        models = {"base": base, "experts": {alias: _model(place) for alias, place in experts.items()}}
        return parse_study({**self.study, "models": models}, self.directory)


def _model(place: Path | str) -> str:
    return place if isinstance(place, str) else str(place.absolute())


def is_pipeline(document: Mapping[str, Any]) -> bool:
    """Whether a document describes a fine-tuning rather than a study.

    A study has the key `models`; a fine-tuning has the key `base` instead.
    """
    return "base" in document and "models" not in document


def load_pipeline(file: Path) -> Pipeline:
    """Read the specification of a fine-tuning of one or several experts from a YAML or JSON file.

    Relative paths are relative to the file's directory. A single expert's alias is the specification's name. Raises
    InvalidStudy with every problem found.
    """
    pipeline = parse_pipeline(read_document(file), file.absolute().parent)
    if problems := tuple(repeated_objectives(pipeline)):
        raise InvalidStudy(problems)
    return pipeline


def parse_pipeline(document: Mapping[str, Any], directory: Path | None = None) -> Pipeline:
    """Read the specification of a fine-tuning of one or several experts from a parsed document.

    Relative paths are relative to `directory`; if `directory` is None, they are left as they are. Raises InvalidStudy
    with every problem found.
    """
    problems: list[Problem] = []
    analysis = _analysis(document.get(ANALYSIS), problems)
    if EXPERTS not in document:
        try:
            spec = parse_spec({key: value for key, value in document.items() if key != ANALYSIS}, directory)
        except InvalidStudy as error:
            raise InvalidStudy((*error.problems, *problems)) from error
        if problems:
            raise InvalidStudy(tuple(problems))
        return Pipeline(spec.name, {spec.name: spec}, None, directory, is_fleet=False, analysis=analysis)
    shared = {key: value for key, value in document.items() if key not in (EXPERTS, STUDY, ANALYSIS, SIDE_BY_SIDE)}
    experts: dict[str, FinetuneSpec] = {}
    given, name = document[EXPERTS], document.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        problems.append(Problem("name", f"{name!r:.60} is no name; give letters, digits, '.', '_' and '-'"))
    for key in (*SECTIONS, *OPTIONAL_SECTIONS):
        if not isinstance(shared.get(key, {}), Mapping) and not (shared[key] is None and key in OPTIONAL_SECTIONS):
            problems.append(Problem(key, f"{shared[key]!r:.60} is no mapping; give the options that experts share"))
    if not isinstance(given, Mapping) or not given:
        raise InvalidStudy((Problem(EXPERTS, "expected a mapping of aliases to the options of each expert"),))
    for alias, own in given.items():
        field = f"{EXPERTS}.{alias}"
        if not re.fullmatch(NAME, alias) or alias == "base":
            problems.append(Problem(field, f"{alias!r} is no alias; give letters, digits, '.', '_' and '-', not base"))
        elif not isinstance(own, Mapping):
            problems.append(Problem(field, f"{own!r:.60} is no mapping; give what is different for this expert"))
        elif common := sorted(own.keys() & set(COMMON)):
            problems.append(Problem(f"{field}.{common[0]}", "is that of the whole fleet; give it outside of experts"))
        else:
            try:
                experts[alias] = parse_spec({**_laid_over(shared, own), "name": alias}, directory)
            except InvalidStudy as error:
                problems += [Problem(f"{field}.{p.field}" if p.field else field, p.message) for p in error.problems]
    experts = _with_noise_of_fleet(experts)
    parallel = document.get(SIDE_BY_SIDE)
    if parallel is not None and (isinstance(parallel, bool) or not isinstance(parallel, int) or parallel < 1):
        problems.append(Problem(SIDE_BY_SIDE, f"{parallel!r:.60}; expected a number of experts, at least 1"))
    study = document.get(STUDY)
    if study is not None and (not isinstance(study, Mapping) or "models" in study):
        problems.append(Problem(STUDY, "expected a study without models, which are those of the fleet"))
    if problems:
        raise InvalidStudy(tuple(problems))
    pipeline = Pipeline(
        str(name), experts, study, directory, is_fleet=True, analysis=analysis, parallel_experts=parallel
    )
    try:
        pipeline.study_of({alias: Path("unknown") for alias in experts})
    except InvalidStudy as error:
        raise InvalidStudy(
            tuple(Problem(f"{STUDY}.{p.field}" if p.field else STUDY, p.message) for p in error.problems)
        ) from error
    return pipeline


def repeated_objectives(pipeline: Pipeline) -> Iterator[Problem]:
    """Yield a problem for each evaluation objective that has the name of an earlier objective of the same expert.

    The values of an evaluation are stored by name. New specifications with such objectives are refused. The function
    `parse_pipeline` accepts them, because earlier versions stored them.
    """
    for alias, spec in pipeline.experts.items():
        first: dict[str, int] = {}
        for index, objective in enumerate(spec.evaluation.objectives if spec.evaluation is not None else ()):
            if first.setdefault(objective.name, index) != index:
                field = pipeline.field_of(alias, f"evaluation.objectives.{index}.name")
                yield Problem(field, f"{objective.name} is the name of two objectives; give another name")


def fleet_noise(experts: Mapping[str, FinetuneSpec]) -> dict[str, Any]:
    """The options of MergOPT that say where a fleet's merges change weights, for experts whose files do not say it.

    MergOPT adds noise while it computes gradients, to simulate a later merge of `experts`, which are keyed by alias.
    Merges change all layers that any of the experts trains, and all modules that any of their adapters changes. The
    result is empty if any of the experts trains all weights, or if the experts themselves have noise in the right
    weights. It is also empty if adapters differ of which one names its modules by a pattern.
    """
    layers = [spec.training.layers for spec in experts.values()]
    if all(spec.adapter is None for spec in experts.values()) and all(each is not None for each in layers):
        return {"noise_layers": tuple(sorted({layer for each in layers for layer in each or ()}))}
    targets = {spec.adapter.targets for spec in experts.values() if spec.adapter is not None}
    has_adapters = all(spec.adapter is not None for spec in experts.values())
    if not has_adapters or len(targets) < 2 or any(isinstance(each, str) and each != ALL_LINEAR for each in targets):
        return {}
    if ALL_LINEAR in targets:
        return {"noise_targets": ALL_LINEAR}
    return {"noise_targets": tuple(sorted({name for each in targets for name in each}))}


def _with_noise_of_fleet(experts: Mapping[str, FinetuneSpec]) -> dict[str, FinetuneSpec]:
    """Set the weights to which MergOPT adds noise (function `fleet_noise`), for experts that do not state them."""
    options = fleet_noise(experts)
    if not options:
        return dict(experts)
    (name,) = options
    return {
        alias: spec
        if getattr(spec.method, name) is not None
        else spec.model_copy(update={"method": spec.method.model_copy(update=options)})
        for alias, spec in experts.items()
    }


def _analysis(given: Any, problems: list[Problem]) -> Analysis | None:
    """Read the options of the analysis of trained experts, and append their errors to `problems`.

    Returns None if no analysis is requested (`given` is None), or if the options are not valid.
    """
    if given is None:
        return None
    try:
        return Analysis.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        found = problems_of(error.errors(include_url=False), Analysis.model_json_schema(), HINTS)
        problems += [Problem(".".join(filter(None, (ANALYSIS, p.field))), p.message) for p in found]
        return None


def _laid_over(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the shared options of a fleet with the options of one expert, which have precedence.

    A fleet consists of the experts that one specification file defines. If both `shared` and `own` have a section, the
    section of the result has the expert's own options, and those shared options that the expert does not state.
    """
    merged = dict(shared)
    for key, value in own.items():
        below = shared.get(key)
        merged[key] = {**below, **value} if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
