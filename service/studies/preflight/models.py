"""Checks of a study's models, and of whether models and task data have changed since the study's creation."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping

from search_spaces.costs import ModelSize
from search_spaces.errors import InvalidStudy, Problem
from search_spaces.recipe import COMPONENTS
from search_spaces.searchers import SEARCHERS
from search_spaces.spaces.base import Part, SearchedModels, TensorLocation
from search_spaces.study.file import Study
from service.errors import Conflict
from service.resolved_study import ResolvedStudy
from service.studies.preflight.dtype import engine_dtype
from service.studies.preflight.files import task_files
from service.types import JobRecord
from workers.engines.vllm.paths.geometry import path_problems
from workers.engines.vllm.support import CapabilityProbe
from workers.errors import InvalidModel
from workers.merging.residual_scales import SCALABLE
from workers.models.family import LocatedFamily, ResolvedFamily, locate_family
from workers.models.modalities import modality_at, modality_of
from workers.models.remote import named
from workers.models.tokenizers import check_tokenizer

__all__ = [
    "check_engine",
    "check_layers",
    "check_models",
    "check_unchanged",
    "check_weights",
    "model_size",
    "searched_models",
    "start_probe",
    "unchanged_models",
    "with_revisions",
]

logger = logging.getLogger(__name__)


def with_revisions(study: Study, resolved: ResolvedStudy) -> Study:
    """Pin the models in a study file to the versions of the study's creation, which `resolved` records.

    A hub model gets the commit that it had at that time. A source that is a merge of another study is replaced by the
    directory to which it was exported.
    """

    def name(model: str) -> str:
        commit = resolved.commits.get(model)
        return f"{model.partition('@')[0]}@{commit}" if commit else model

    models = study.models
    experts = {alias: name(model) for alias, model in models.named.items()}
    experts |= {alias: own.directory for alias, own in resolved.chained.items()}
    experts = {alias: experts[alias] for alias in models.experts if alias in experts}
    base = resolved.chained["base"].directory if "base" in resolved.chained else name(models.base)
    return study.model_copy(update={"models": models.model_copy(update={"base": base, "experts": experts})})


def unchanged_models(stored: JobRecord) -> tuple[Study, ResolvedFamily]:
    """Open the models of a stored study, and check that their weights are unchanged since the study's creation.

    Returns the study file with its models pinned to their versions, and the models. Missing weights are not downloaded.
    Raises InvalidStudy with every problem.
    """
    resolved = ResolvedStudy.of(stored)
    study = with_revisions(Study.model_validate(stored.document), resolved)
    problems: list[Problem] = []
    located = check_models(locate_family(study.models.base, study.models.named), study, problems)
    if located is None:
        raise InvalidStudy(tuple(problems))
    sources = check_weights(located, problems, downloads=False)
    if dict(sources.fingerprints) != dict(resolved.fingerprints):
        problems.append(Problem("models", "their weights have changed since the study was created; restore them"))
    if problems:
        raise InvalidStudy(tuple(problems))
    return study, sources


def check_unchanged(record: JobRecord, resolved: ResolvedStudy) -> None:
    """Raise Conflict if models, task data or recipes of a stored study have changed since it was created.

    `record` is the study's job, with the fingerprints (hashes of files) that were stored at that time; `resolved` has
    the present fingerprints. Also raises Conflict if this program does not have the version of the searcher or of the
    scheduler that the study was created with.
    """
    stored = ResolvedStudy.of(record)
    known = SEARCHERS[stored.algorithm].version if stored.algorithm in SEARCHERS else 1
    if stored.searcher_version > known:
        raise Conflict(
            f"study {record.name!r}: was created with version {stored.searcher_version} of the searcher "
            f"{stored.algorithm}, this program has versions up to {known}; continue it with the program that created it"
        )
    if stored.scheduler_version > resolved.scheduler_version:
        raise Conflict(
            f"study {record.name!r}: was created with version {stored.scheduler_version} of its scheduler, this "
            f"program has versions up to {resolved.scheduler_version}; continue it with the program that created it"
        )
    for key in ("fingerprints", "tasks", "holdout_tasks", "recipes"):
        before: Mapping[str, str] = getattr(stored, key)
        now: Mapping[str, str] = getattr(resolved, key)
        if before != now:
            changed = sorted(name for name in now if before.get(name) != now[name])
            raise Conflict(
                f"study {record.name!r}: {key} of {', '.join(changed)} have changed since it was started; results "
                "before and after would not be comparable; start another study, or restore the files"
                f"{_files_of_tasks(record, key, changed)}"
            )


def _files_of_tasks(record: JobRecord, key: str, names: Collection[str]) -> str:
    """Text that names the files of the tasks `names` in the study of `record`; "" if none of them has a file.

    `key` is "tasks" or "holdout_tasks", the field of ResolvedStudy that has the tasks; other fields have no tasks.
    """
    section = {"tasks": "objectives.", "holdout_tasks": "holdout."}.get(key)
    if section is None:
        return ""
    study = Study.model_validate(record.document)
    entries = {place: spec.name for place, spec in study.with_tasks() if place.startswith(section)}
    files = {
        f"{file} or the files that it reads" if file.endswith((".yaml", ".yml")) else file: None
        for place, file in task_files(study)
        if any(place.startswith(f"{entry}.task") and name in names for entry, name in entries.items())
    }
    return f": {', '.join(files)}" if files else ""


def check_models(located: LocatedFamily, study: Study, problems: list[Problem]) -> ResolvedFamily | None:
    """Check the headers, configurations and tokenizers of a study's models, whose directories `located` has.

    Returns the opened models, or None if problems were found, which are added to `problems`.
    """
    found: list[str] = []
    sources: ResolvedFamily | None = None
    try:
        sources = located.resolve(tokenizer=study.models.tokenizer)
        if study.models.tokenizer != "base":
            check_tokenizer(sources.result_dir)
        found += filter(None, [sources.lack_of_space])
    except InvalidModel as error:
        found += error.problems
    if located.base_dir is not None:
        try:
            modality_at(located.base_dir).check_files(located.base_dir)
        except InvalidModel as error:
            found += map(named, error.problems)
    problems.extend(Problem("models", text) for text in found)
    return None if found else sources


def check_layers(study: Study, sources: ResolvedFamily, problems: list[Problem]) -> None:
    """Check that the layers of the models `sources` can be reordered and scaled, if the study's search space does so.

    To scale a layer is to multiply its output by a factor. Reasons why this is impossible are added to `problems`.
    """
    section = study.search_space
    if section.changes_layers and sources.modality.runs_on_vllm:
        problems.extend(Problem("models", text) for text in path_problems(sources))
    model_type = sources.base.config.get("model_type")
    if section.scaled_by is not None and model_type not in SCALABLE:
        option = section.scaled_by
        other = "another space" if option == "kind" else f"{option}: false"
        message = (
            f"gives layers scales, which cannot be folded into the weights of models of type {model_type!r}; use "
            f"models of one of the types {', '.join(SCALABLE)}, or {other}"
        )
        problems.append(Problem(f"search_space.{option}", message))


def check_weights(
    sources: ResolvedFamily,
    problems: list[Problem],
    *,
    downloads: bool,
    note: Callable[[str], None] = logger.info,
) -> ResolvedFamily:
    """Read the weights of the models `sources`, after downloading missing weights if `downloads` is True.

    Returns the models with their content fingerprints. A problem is added to `problems` for each model with invalid
    weights. `note` is called with messages about downloads. Raises InvalidStudy if weights cannot be read.
    """
    try:
        sources = sources.fetched(note=note) if downloads else sources
        contents = sources.content_problems()
    except InvalidModel as error:
        raise InvalidStudy(tuple(Problem("models", text) for text in error.problems)) from error
    for alias, wrong in contents.items():
        place = "models.base" if alias == sources.base_alias else f"models.experts.{alias}"
        problems.extend(Problem(place, text) for text in wrong)
    return sources


def searched_models(
    sources: ResolvedFamily,
    fingerprints: Mapping[str, str],
    *,
    max_layers: int | None = None,
    preferences: tuple[Mapping[str, float], ...] = (),
) -> SearchedModels:
    """Collect the facts about a study's models that its search space depends on.

    `preferences` are the preference vectors, each with the weights, keyed by objective. `sources` are the models, and
    `fingerprints` are the hashes of their files, keyed by the model's name in the study file (alias). A merge may have
    at most `max_layers` layers, or any number of layers if `max_layers` is None.
    """
    layout, sizes = sources.layout, {name: math.prod(header.shape) for name, header in sources.base.tensors.items()}
    base, *experts = sources.checkpoints
    parts: list[tuple[Part, int | None]] = [("embedding", None)]
    parts += [(component, layer) for layer in range(layout.num_layers) for component in COMPONENTS]
    tensors = {
        layout.name(suffix, layer): TensorLocation(part, layer, suffix)
        for part, layer in (*parts, ("head", None))
        for suffix in layout.suffixes(part, layer)
    }
    # The embedding of tokens is larger than that of positions.
    embedding = max(layout.suffixes("embedding"), key=lambda name: sizes[name], default=None)
    return SearchedModels(
        base=base,
        experts=tuple(experts),
        fingerprints=fingerprints,
        num_layers=layout.num_layers,
        tensors=tensors,
        tied={layout.tied_head: embedding} if layout.tied_head and embedding else {},
        tokenizer=sources.tokenizer,
        max_layers=max_layers,
        preferences=preferences,
    )


def model_size(sources: ResolvedFamily, max_layers: int) -> ModelSize:
    """Count the parameters of a merge of the models `sources`: in each layer, and outside layers.

    All these models, a base and its experts, have the same size. The result also has `max_layers`, the largest number
    of layers that a merge may have.
    """
    layout, sizes = sources.layout, {name: math.prod(header.shape) for name, header in sources.base.tensors.items()}
    components = {
        component: tuple(
            sum(sizes[layout.name(suffix, layer)] for suffix in layout.suffixes(component, layer))
            for layer in range(layout.num_layers)
        )
        for component in COMPONENTS
    }
    in_layers = sum(map(sum, components.values()))
    return ModelSize(sources.num_parameters - in_layers, components, max_layers)


def start_probe(located: LocatedFamily) -> CapabilityProbe | None:
    """Start a process that asks vLLM whether it can run the base model; the answer holds for the experts too.

    Experts have the architecture of the base. `located` has the directories of the models. Returns None if vLLM does
    not score models of their modality, or if the base's configuration cannot be read, which `check_models` reports.
    """
    if located.base_dir is None:
        return None
    try:
        config = json.loads((located.base_dir / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or not modality_of(config).runs_on_vllm:
        return None
    return CapabilityProbe([config])


def check_engine(study: Study, probe: CapabilityProbe | None, problems: list[Problem]) -> str:
    """Check that the engines of a study can run its models, and add a problem to `problems` if they cannot.

    `probe` is the process that asks vLLM about the base model; None if vLLM was not asked. Returns a message for the
    user, or "" if there is nothing to say.
    """
    if probe is None:
        return ""
    (capability,) = probe.answers(dtype=engine_dtype(study))
    if capability.problem:
        problems.append(Problem("models.base", f"{study.models.base}: {capability.problem}"))
    return capability.note
