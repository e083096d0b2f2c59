"""Everything that can be checked before an engine starts, and the plan that follows from it.

All problems of a study are reported together: first those that headers, configurations and task data tell, and only
where there are none those of the weights, for reading large models takes minutes (and is remembered by content).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from search_spaces.baselines import sources_and_published
from search_spaces.errors import InvalidStudy, Problem
from search_spaces.fidelity import Bracket, bracket_cycle, bracket_plan
from search_spaces.objectives import Objective
from search_spaces.spaces.base import SearchSpace
from search_spaces.spaces.lfs import LfsSpace
from search_spaces.study.file import InlineTask, ObjectiveSpec, Study
from search_spaces.study.sections import EngineOptions
from service.disk import gib, lack_of_space
from service.errors import Conflict
from service.tune.plan import Plan
from service.types import Origin, ResolvedStudy, StudyRecord
from workers.errors import InvalidModel, InvalidTask
from workers.types import CHUNKS_IN_FLIGHT_PER_REPLICA, Family, ModelSource, TaskInfo, TaskSpec

if TYPE_CHECKING:
    from workers.engines.vllm.support import CapabilityProbe

__all__ = [
    "DTYPE_BYTES",
    "EXPORT",
    "MemoryPlan",
    "PreflightResult",
    "check_unchanged",
    "engine_dtype",
    "examine",
    "with_revisions",
]

logger = logging.getLogger(__name__)

# Where in its directory a run exports its best merge.
EXPORT = "export"

# Proposals may run this far ahead of what is in flight.
PROPOSALS_AHEAD = 2

# Samples per request: what a crash can lose, and what a replica does between two looks at its queue.
CHUNK_SAMPLES = 512

# What an engine's process takes beside weights: interpreter, torch, vLLM and its caches on CPU.
ENGINE_OVERHEAD_BYTES = 2 * 2**30
RANK_BYTES = 2  # of each element of an expert, with `engine.rank_cache`

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes one replica needs on this machine, and what there is."""

    bank_bytes: int
    engine_bytes: int
    replicas: int
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        # Replicas on one machine map the same files.
        return self.bank_bytes + self.replicas * self.engine_bytes


@dataclass(frozen=True)
class PreflightResult:
    """A study that can run: its models, its space, its tasks and how much of them each rung takes."""

    study: Study
    family: Family
    space: SearchSpace
    num_layers: int
    num_parameters: int
    objectives: tuple[Objective, ...]
    tasks: Mapping[str, TaskSpec]
    task_infos: Mapping[str, TaskInfo]
    holdout_tasks: Mapping[str, TaskSpec]
    holdout_infos: Mapping[str, TaskInfo]
    rung_samples: tuple[Mapping[str, int], ...]
    cycle: tuple[Bracket, ...]
    memory: MemoryPlan
    export_bytes: int
    """Weights of one merged model, as exported."""
    commits: Mapping[str, str]
    """Of the hub models, as the study calls them."""
    absent_bytes: int
    """Weights that are on the hub and not here: they were not looked into."""
    engine_remark: str
    """What is to be known of how vLLM runs the models; "" if nothing."""

    @property
    def concurrency(self) -> int:
        return CHUNKS_IN_FLIGHT_PER_REPLICA * self.study.engine.replicas

    @property
    def engine_options(self) -> EngineOptions:
        return self.study.engine.options

    def resolved(self) -> ResolvedStudy:
        return ResolvedStudy(
            fingerprints=self.family.fingerprints,
            commits=self.commits,
            num_layers=self.num_layers,
            tasks={name: spec.digest for name, spec in self.tasks.items()},
            holdout_tasks={name: spec.digest for name, spec in self.holdout_tasks.items()},
            rung_samples=self.rung_samples,
            max_staleness=self.concurrency + PROPOSALS_AHEAD,
            objectives=self.objectives,
            version=version("mergesearch"),
        )

    def plan(self, study_id: str, resolved: ResolvedStudy) -> Plan:
        """The driver's plan; `resolved` is what was stored when the study was created, whose staleness it keeps."""
        return Plan(
            study_id=study_id,
            seed=self.study.search.seed,
            objectives=self.objectives,
            tasks=self.tasks,
            holdout_tasks=self.holdout_tasks,
            rung_samples=self.rung_samples,
            holdout_samples={name: info.num_samples for name, info in self.holdout_infos.items()},
            scheduler=self.study.fidelity.scheduler,
            cycle=self.cycle,
            eta=self.study.fidelity.reduction_factor,
            max_trials=self.study.search.max_trials,
            max_staleness=resolved.max_staleness,
            chunk_samples=CHUNK_SAMPLES,
            bank_fingerprint=self.family.fingerprint,
            baselines=self.baselines(),
        )

    def baselines(self) -> tuple[tuple[Origin, str, Any], ...]:
        """Source and published recipes, scored before the search."""
        aliases = tuple(expert.alias for expert in self.family.experts)
        found = sources_and_published(
            base=self.family.base.alias,
            experts=aliases,
            fingerprints=self.family.fingerprints,
            num_layers=self.num_layers,
            tokenizer=self.family.tokenizer,
        )
        return tuple((Origin(origin), label, recipe) for origin, label, recipe in found)

    def expected_samples(self) -> dict[str, int]:
        """Samples the study will score if no trial fails and no two recipes are equal: search, holdout, and what the
        search would cost with every trial at full budget. Under asha the search scores that many at least: what looks
        best early on is promoted, and so is what looks better later."""
        totals = [sum(samples.values()) for samples in self.rung_samples]
        search = len(self.baselines()) * totals[-1]
        for bracket in bracket_plan(self.cycle, self.study.search.max_trials):
            paid = 0
            for rung, size in enumerate(bracket.sizes, start=bracket.first_rung):
                search += size * (totals[rung] - paid)
                paid = totals[rung]
        # The front has a handful of members beside sources and published recipes.
        holdout = sum(info.num_samples for info in self.holdout_infos.values()) * (len(self.baselines()) + 4)
        full = (len(self.baselines()) + self.study.search.max_trials) * totals[-1]
        return {"search": search, "holdout": holdout, "full_budget": full}


def with_revisions(study: Study, resolved: ResolvedStudy) -> Study:
    """The study with its hub models at the commits that it was created with."""

    def name(model: str) -> str:
        commit = resolved.commits.get(model)
        return f"{model.partition('@')[0]}@{commit}" if commit else model

    models = study.models
    experts = {alias: name(model) for alias, model in models.experts.items()}
    return study.model_copy(
        update={"models": models.model_copy(update={"base": name(models.base), "experts": experts})}
    )


def check_unchanged(record: StudyRecord, resolved: ResolvedStudy) -> None:
    """Raises Conflict if models or task data are not what they were when the study was started."""
    for key in ("fingerprints", "tasks", "holdout_tasks"):
        before: Mapping[str, str] = getattr(record.resolved, key)
        now: Mapping[str, str] = getattr(resolved, key)
        if before != now:
            changed = sorted(name for name in now if before.get(name) != now[name])
            raise Conflict(
                f"study {record.name!r}: {key} of {', '.join(changed)} have changed since it was started; results "
                "before and after would not be comparable; start another study, or put the files back"
            )


def examine(
    study: Study,
    *,
    available_bytes: int | None = None,
    export_dir: Path | None = None,
    downloads: bool = True,
    note: Callable[[str], None] = logger.info,
) -> PreflightResult:
    """Check everything that can be checked without an engine.

    `available_bytes` is the memory of one machine; None: this machine's. Where there is an `export_dir`, the best merge
    must fit on its disk. Weights that are on the hub and not here are downloaded once nothing else is wrong, and `note`
    hears of it; without `downloads` all but them is checked. Raises InvalidStudy with every problem.
    """
    from workers.models.hub import absent_bytes

    problems: list[Problem] = []
    inquiry = _inquiry(study)
    models = _examine_models(study, problems)
    tasks, infos = _examine_tasks(study.objectives, "objectives", study, problems)
    holdout_tasks, holdout_infos = _examine_tasks(study.holdout, "holdout", study, problems)
    objectives = _objectives(study, infos, problems)
    rung_samples, cycle = _examine_fidelity(study, infos, problems)
    _examine_devices(study, models, problems)
    memory = _memory(study, models, available_bytes) if models else None
    if models is not None and memory is not None:
        _examine_space(study, models, dict.fromkeys(("base", *study.models.experts), ""), problems)
        _examine_prompts(study, models.result_dir, problems)
        _examine_memory(memory, problems)
        if export_dir is not None and (lack := lack_of_space(export_dir, models.export_bytes(study))):
            problems.append(Problem("", f"--export: {lack}"))
    engine_remark = _examine_engine(study, inquiry, problems)
    if problems or models is None or memory is None:
        raise InvalidStudy(tuple(problems))
    family = _read_weights(study, models, problems, downloads=downloads, note=note)
    space = _examine_space(study, models, family.fingerprints, problems)
    if problems or space is None:
        raise InvalidStudy(tuple(problems))
    return PreflightResult(
        study=study,
        family=family,
        space=space,
        num_layers=models.num_layers,
        num_parameters=models.num_parameters,
        objectives=objectives,
        tasks=tasks,
        task_infos=infos,
        holdout_tasks=holdout_tasks,
        holdout_infos=holdout_infos,
        rung_samples=rung_samples,
        cycle=cycle,
        memory=memory,
        export_bytes=models.export_bytes(study),
        commits=models.commits,
        absent_bytes=absent_bytes(Path(model.directory) for model in family.models),
        engine_remark=engine_remark,
    )


@dataclass(frozen=True)
class _Models:
    """What the headers say of a family."""

    directories: Mapping[str, Path]
    commits: Mapping[str, str]
    result_dir: Path
    num_layers: int
    num_heads: int | None
    num_parameters: int
    bank_bytes: int

    def export_bytes(self, study: Study) -> int:
        return self.num_parameters * DTYPE_BYTES[engine_dtype(study)]


def _examine_models(study: Study, problems: list[Problem]) -> _Models | None:
    from workers.models.checkpoints import aligned, check_family, check_tokenizer, stored_bytes
    from workers.models.hub import commit_of, lack_of_space, locate, named
    from workers.models.merged_files import result_dir

    found: list[str] = []
    checkpoints: tuple[Any, ...] = ()
    tokenizer = study.models.tokenizer
    try:
        checkpoints = check_family(study.models.base, study.models.experts, tokenizer=tokenizer)
        sources = (
            ModelSource(alias, str(checkpoint.directory), "")
            for alias, checkpoint in zip(("base", *study.models.experts), checkpoints, strict=True)
        )
        family = Family(next(sources), tuple(sources), tokenizer)
        if tokenizer != "base":
            check_tokenizer(result_dir(family))
        found += filter(None, [lack_of_space(checkpoint.directory for checkpoint in checkpoints)])
    except InvalidModel as error:
        found += error.problems
    try:
        check_tokenizer(checkpoints[0].directory if checkpoints else locate(study.models.base))
    except InvalidModel as error:
        found += [text for text in map(named, error.problems) if f"base model: {text}" not in found]
    problems.extend(Problem("models", text) for text in found)
    if found:
        return None
    views, _ = aligned(dict(zip(("base", *study.models.experts), checkpoints, strict=True)), tokenizer)
    base = views["base"]
    directories = {alias: Path(checkpoint.directory) for alias, checkpoint in views.items()}
    asked = {"base": study.models.base, **study.models.experts}
    commits = {
        asked[alias]: commit_of(place) for alias, place in directories.items() if not os.path.isdir(asked[alias])
    }
    return _Models(
        directories=directories,
        commits={model: commit for model, commit in commits.items() if commit},
        result_dir=Path(result_dir(family)),
        num_layers=base.layout.num_layers,
        num_heads=base.settings.get("num_attention_heads"),
        num_parameters=sum(math.prod(tensor.shape) for tensor in base.tensors.values()),
        bank_bytes=stored_bytes(checkpoints),
    )


def _inquiry(study: Study) -> CapabilityProbe | None:
    """From now on vLLM is asked whether it can run the base, if that has a configuration; experts are of its kind."""
    from workers.engines.vllm.support import CapabilityProbe
    from workers.models.hub import locate

    try:
        config = json.loads((locate(study.models.base) / "config.json").read_bytes())
    except (InvalidModel, OSError, ValueError, RecursionError):  # `_examine_models` says so
        return None
    return CapabilityProbe([config]) if isinstance(config, dict) else None


def _examine_engine(study: Study, inquiry: CapabilityProbe | None, problems: list[Problem]) -> str:
    """Whether engines can run such models; returns what else is to be known of that."""
    if inquiry is None:
        return ""
    (support,) = inquiry.answers(dtype=engine_dtype(study))
    if support.problem:
        problems.append(Problem("models.base", f"{study.models.base}: {support.problem}"))
    return support.note


def _read_weights(
    study: Study, models: _Models, problems: list[Problem], *, downloads: bool, note: Callable[[str], None]
) -> Family:
    """The family by content; what is wrong with the contents that are here is appended to `problems`."""
    from workers.models.checkpoints import content_problems, open_family, open_sources

    base, *experts = models.directories
    directories = {alias: models.directories[alias] for alias in experts}
    tokenizer = study.models.tokenizer
    try:
        family = open_family(models.directories[base], directories, tokenizer=tokenizer, downloads=downloads, note=note)
        checkpoints = open_sources(family)
    except InvalidModel as error:  # changed since the headers were read
        raise InvalidStudy(tuple(Problem("models", text) for text in error.problems)) from error
    for model in family.models:
        place = "models.base" if model is family.base else f"models.experts.{model.alias}"
        wrong = content_problems(checkpoints[model.alias], model.fingerprint)
        problems.extend(Problem(place, text) for text in wrong)
    return family


def _examine_tasks(
    specs: tuple[ObjectiveSpec, ...], section: str, study: Study, problems: list[Problem]
) -> tuple[dict[str, TaskSpec], dict[str, TaskInfo]]:
    from workers.evaluation.tasks import check_task, content_hash

    tasks: dict[str, TaskSpec] = {}
    infos: dict[str, TaskInfo] = {}
    for index, spec in enumerate(specs):
        try:
            content = None
            task: str | dict[str, Any]
            if isinstance(spec.task, InlineTask):
                task = spec.task.model_dump(mode="json")
                content = content_hash(spec.task.file)
            else:
                task = spec.task
                if Path(task).suffix in (".yaml", ".yml"):
                    content = content_hash(task)
            tasks[spec.name] = TaskSpec(
                task=task,
                metric=spec.metric,
                filter=spec.filter,
                split=spec.split,
                num_fewshot=spec.num_fewshot,
                content=content,
                permutation_seed=study.search.seed,
            )
            infos[spec.name] = check_task(tasks[spec.name])
        except InvalidTask as error:
            problems.append(Problem(f"{section}.{index}.{error.field}", str(error)))
    return tasks, infos


def _examine_prompts(study: Study, directory: Path, problems: list[Problem]) -> None:
    """Whether prompts can be written as the study says, and leave the model room to answer."""
    from workers.evaluation.prompts import Prompts

    prompts = Prompts(str(directory), study.engine.options)
    asked = study.engine.chat_template
    found = prompts.tokenizer.chat_template  # one, or several by name
    names = list(found) if isinstance(found, dict) else ["default"] if found else []
    if asked and ("default" if asked is True else asked) not in names:
        problems.append(
            Problem(
                "engine.chat_template",
                f"{json.dumps(asked)}: the tokenizer of {directory} has "
                + (f"the templates {', '.join(names)}; give one of them" if names else "no template; write false"),
            )
        )
    for section, specs in (("objectives", study.objectives), ("holdout", study.holdout)):
        for index, spec in enumerate(specs):
            if isinstance(spec.task, InlineTask) and spec.task.max_tokens >= prompts.max_length:
                problems.append(
                    Problem(
                        f"{section}.{index}.task.max_tokens",
                        f"{spec.task.max_tokens} leaves no room for a prompt in the {prompts.max_length} tokens that "
                        f"the model reads; give at most {prompts.max_length - 1}, or raise engine.max_model_len where "
                        "that is the limit",
                    )
                )


def _objectives(study: Study, infos: Mapping[str, TaskInfo], problems: list[Problem]) -> tuple[Objective, ...]:
    objectives = []
    for index, spec in enumerate(study.objectives):
        if spec.name not in infos:
            continue
        direction = spec.direction or ("maximize" if infos[spec.name].higher_is_better else "minimize")
        try:
            objectives.append(Objective(spec.name, spec.metric, direction, spec.range))
        except InvalidStudy as error:
            problems.extend(Problem(f"objectives.{index}", problem.message) for problem in error.problems)
    return tuple(objectives)


def _examine_fidelity(
    study: Study, infos: Mapping[str, TaskInfo], problems: list[Problem]
) -> tuple[tuple[Mapping[str, int], ...], tuple[Bracket, ...]]:
    fidelity = study.fidelity
    counts = {spec.name: fidelity.rungs_of(spec) for spec in study.objectives}
    for index, spec in enumerate(study.objectives):
        full, info = counts[spec.name][-1], infos.get(spec.name)
        if info is not None and full is not None and info.num_samples < full:
            place = "fidelity.rungs" if fidelity.rungs else "fidelity.max_samples"
            problems.append(
                Problem(
                    f"objectives.{index}.rungs" if spec.rungs else place,
                    f"{full} samples asked for, objective {spec.name!r} has {info.num_samples}; "
                    f"use at most {info.num_samples}",
                )
            )
    num_rungs = len(counts[study.objectives[0].name])
    samples = tuple(
        {name: counts[name][rung] or info.num_samples for name, info in infos.items()} for rung in range(num_rungs)
    )
    cycle = bracket_cycle(
        fidelity.scheduler,
        num_rungs=num_rungs,
        eta=fidelity.reduction_factor,
        max_trials=study.search.max_trials,
    )
    return samples, cycle


def _examine_space(
    study: Study, models: _Models, fingerprints: Mapping[str, str], problems: list[Problem]
) -> SearchSpace | None:
    spec = study.search_space
    max_layers = study.limits.max_layers
    if max_layers is not None and models.num_layers > max_layers:
        message = f"{max_layers} is below the {models.num_layers} layers that every merge here has"
        problems.append(Problem("limits.max_layers", message))
    try:
        return LfsSpace(
            base="base",
            experts=tuple(study.models.experts),
            fingerprints=fingerprints,
            num_layers=models.num_layers,
            layer_groups=spec.layer_groups,
            component_groups=spec.component_groups,
            methods=spec.methods,
            method_per=spec.method_per,
            preset=spec.preset,
            tokenizer=study.models.tokenizer,
        )
    except InvalidStudy as error:
        problems.extend(error.problems)
        return None


def _examine_devices(study: Study, models: _Models | None, problems: list[Problem]) -> None:
    """GPUs of this machine; of a cluster they are Ray's to know. Whether the models can be split between them."""
    import torch

    engine = study.engine
    if models and models.num_heads and models.num_heads % engine.tensor_parallel_size:
        fitting = [str(number) for number in range(1, models.num_heads + 1) if models.num_heads % number == 0]
        problems.append(
            Problem(
                "engine.tensor_parallel_size",
                f"{engine.tensor_parallel_size} does not divide the models' {models.num_heads} attention heads; "
                f"use one of {', '.join(fitting)}",
            )
        )
    num_needed = engine.replicas * engine.tensor_parallel_size
    num_gpus = torch.cuda.device_count()
    if num_gpus and num_needed > num_gpus and "RAY_ADDRESS" not in os.environ:
        problems.append(
            Problem(
                "engine",
                f"{engine.replicas} replicas of {engine.tensor_parallel_size} GPUs need {num_needed}; "
                f"this machine has {num_gpus}",
            )
        )
    if not num_gpus and engine.tensor_parallel_size > 1 and "RAY_ADDRESS" not in os.environ:
        problems.append(
            Problem(
                "engine.tensor_parallel_size",
                f"{engine.tensor_parallel_size} needs as many GPUs, this machine has none; use 1",
            )
        )


def _memory(study: Study, models: _Models, available_bytes: int | None) -> MemoryPlan:
    import torch

    # Of the host's memory: on CPU vLLM computes from a packed copy, beside the plain weights that are written to.
    copies = 0 if torch.cuda.is_available() else 2
    ranks = RANK_BYTES * len(study.models.experts) if study.engine.rank_cache else 0
    weights = models.num_parameters * (copies * DTYPE_BYTES[engine_dtype(study)] + ranks)
    return MemoryPlan(
        bank_bytes=models.bank_bytes,
        engine_bytes=weights + ENGINE_OVERHEAD_BYTES,
        replicas=study.engine.replicas,
        available_bytes=psutil.virtual_memory().total if available_bytes is None else available_bytes,
    )


def _examine_memory(memory: MemoryPlan, problems: list[Problem]) -> None:
    if memory.needed_bytes > memory.available_bytes:
        problems.append(
            Problem(
                "engine",
                f"needs {gib(memory.needed_bytes)} of memory, {gib(memory.available_bytes)} are available: "
                f"source weights {gib(memory.bank_bytes)} + {memory.replicas} engine(s) of "
                f"{gib(memory.engine_bytes)}; use fewer replicas, a smaller dtype or a larger machine",
            )
        )


def engine_dtype(study: Study) -> str:
    """The dtype that `engine.dtype` means on this machine."""
    import torch

    if study.engine.dtype != "auto":
        return study.engine.dtype
    return "bfloat16" if torch.cuda.is_available() else "float32"
