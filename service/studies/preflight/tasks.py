"""Checks of a study's tasks: data, objectives, and whether the context length is sufficient for prompt and answer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from search_spaces.constraints import parse_constraint
from search_spaces.costs import ModelSize
from search_spaces.errors import InvalidStudy, Problem
from search_spaces.objectives import Objective
from search_spaces.study.benchmarks import BenchmarkSpec
from search_spaces.study.file import Study
from search_spaces.study.objectives import CostSpec, DescribedTask, InlineTask, ScoredTask
from service.store.documents import BenchmarkFacts
from service.tune.plan import Benchmark
from workers.errors import InvalidTask
from workers.evaluation.attacks.checks import prepared_attack
from workers.evaluation.attacks.search import PromptAttack
from workers.evaluation.judging import judged_items
from workers.evaluation.lm_eval_tasks import content_hash, is_file, yaml_content
from workers.evaluation.prompts import Prompts
from workers.evaluation.sample_metrics import LENGTH
from workers.evaluation.task_reader import reader_of
from workers.evaluation.tasks import check_task
from workers.file_access import FileAccess
from workers.models.family import ResolvedFamily
from workers.models.modalities import modality_of_task
from workers.models.tokenizers import check_tokenizer
from workers.types import TaskInfo, TaskSpec

__all__ = [
    "benchmarks_of",
    "check_modality",
    "check_prompts",
    "check_tasks",
    "earlier_form",
    "objectives_of",
    "task_spec",
]


def check_tasks(
    specs: Mapping[int, ScoredTask],
    section: str,
    study: Study,
    problems: list[Problem],
    *,
    is_new: bool,
    access: FileAccess | None = None,
    stored: Collection[str] = (),
) -> tuple[dict[str, TaskSpec], dict[str, TaskInfo]]:
    """Check the tasks in a section of the study file, "objectives", "holdout" or "benchmarks".

    `specs` maps positions in the section to entries. Returns two mappings, keyed by the entry's name: the tasks in the
    form from which engines' processes build them, and facts about their data. Problems that are found are added to
    `problems`. `access` limits the files that task files may refer to; None is no limit. `stored` has the digests of
    the tasks that were stored with the study (function `task_spec`).

    An lm-eval task may define several filters, which are ways to extract the answer from a completion. In a new study
    (`is_new`), the entry of such a task must name one of its filters. In a stored study, an entry that names no filter
    uses the first filter of the task.
    """
    tasks: dict[str, TaskSpec] = {}
    infos: dict[str, TaskInfo] = {}
    for index, spec in specs.items():
        try:
            tasks[spec.name] = task_spec(spec, seed=study.search.seed, access=access, stored=stored)
            infos[spec.name] = check_task(tasks[spec.name])
            if is_new and spec.filter is None and (filters := infos[spec.name].filters):
                message = f"is missing; task {spec.task} has several: give one of {', '.join(filters)}"
                problems.append(Problem(f"{section}.{index}.filter", message))
        except InvalidTask as error:
            field, message = error.field, str(error)
            if field == "metric" and tasks[spec.name].metric != spec.metric:  # it was chosen here, for a judge
                field, message = "judge", f"compares generated text, and the task generates none: {error}"
            problems.append(Problem(f"{section}.{index}.{field}", message))
    return tasks, infos


def task_spec(spec: ScoredTask, *, seed: int, access: FileAccess | None, stored: Collection[str] = ()) -> TaskSpec:
    """Convert a task entry of the study file to the specification that engines' processes build the task from.

    `seed` fixes the order of the task's samples. `access` limits the files that the task may read; None is no limit.
    The metric of a benchmark with a judge (an LLM that compares answers) is the length of completions, because engines
    only generate the completions, and the judge compares them later.

    `stored` has the digests of the tasks that were stored with the study. Earlier versions stored the content of a YAML
    file alone, without the other files that it reads; if `stored` has the digest of this form, the result has this
    form. Raises InvalidTask if a file of the task cannot be read.
    """
    content = None
    task: str | dict[str, Any]
    if isinstance(spec.task, DescribedTask):
        task = spec.task.description()
        content = reader_of(task).content(task, access)
    else:
        task = spec.task
    made = TaskSpec(
        task=task,
        metric=LENGTH if isinstance(spec, BenchmarkSpec) and spec.judge is not None else spec.metric,
        filter=spec.filter,
        split=spec.split,
        num_fewshot=spec.num_fewshot,
        max_tokens=spec.max_tokens,
        until=spec.until,
        content=content,
        permutation_seed=seed,
        access=access,
    )
    if not isinstance(task, str) or not is_file(task):
        return made
    if stored and (earlier := earlier_form(made)).digest in stored:
        return earlier
    return replace(made, content=yaml_content(task, access))


def earlier_form(spec: TaskSpec) -> TaskSpec:
    """The specification that earlier versions made of the task `spec`, whose digest is stored with their studies.

    It differs for YAML files only: its content is the sha256 of the YAML file, without the other files that it reads.
    """
    if not isinstance(spec.task, str) or not is_file(spec.task):
        return spec
    return replace(spec, content=content_hash(spec.task))


def benchmarks_of(
    study: Study, tasks: Mapping[str, TaskSpec], infos: Mapping[str, TaskInfo], problems: list[Problem]
) -> tuple[Benchmark, ...]:
    """Make the benchmarks of a study, each with its direction of optimisation and range of values.

    `tasks` and `infos` have the benchmarks' tasks and facts about their data, keyed by name. A benchmark whose task
    could not be built is left out. Benchmarks of a group must have equal directions and ranges, because their values
    are averaged. Problems that are found are added to `problems`.
    """
    found: list[Benchmark] = []
    groups: dict[str, Objective] = {}
    for index, spec in enumerate(study.benchmarks):
        if spec.name not in infos:
            continue
        info, task = infos[spec.name], tasks[spec.name]
        attack = _attack(spec, info, f"benchmarks.{index}", problems)
        reference_length = _reference_length(spec, task, f"benchmarks.{index}", problems)
        facts = BenchmarkFacts(
            name=spec.name,
            metric=spec.metric,
            direction=spec.direction or ("maximize" if info.higher_is_better else "minimize"),
            range=spec.range or info.value_range,
            task_digest=task.digest,
            num_samples=info.num_samples,
            subtasks=tuple(info.groups.items()),
            categories=info.categories,
            seed=study.search.seed,
            attack=None if spec.attack is None else spec.attack.model_dump(mode="json"),
            template="" if spec.attack is None else info.template,
            judge=None if spec.judge is None else spec.judge.model_dump(mode="json"),
            reference_length=reference_length,
        )
        try:
            objective = facts.objective
        except InvalidStudy as error:
            problems.extend(Problem(f"benchmarks.{index}", problem.message) for problem in error.problems)
            continue
        found.append(Benchmark(facts, task, spec.trials, attack, spec.judge))
        if spec.group is None:
            continue
        first = groups.setdefault(spec.group, objective)
        if (objective.direction, objective.bounds) != (first.direction, first.bounds):
            problems.append(
                Problem(
                    f"benchmarks.{index}.group",
                    f"{spec.group}: {spec.name} ({objective.direction}, {list(objective.bounds)}) and {first.name} "
                    f"({first.direction}, {list(first.bounds)}) have no common average; give one of them another group",
                )
            )
    return tuple(found)


def _attack(spec: BenchmarkSpec, info: TaskInfo, place: str, problems: list[Problem]) -> PromptAttack | None:
    """Prepare the attack on a benchmark's prompts; None if the benchmark has no attack, or the attack is impossible.

    An attack searches for the prompt template with the worst metric. `spec` is the benchmark's entry in the study file,
    `place` is the entry's location, such as "benchmarks.0", and `info` has facts about its task. Reasons why the attack
    is impossible are added to `problems`.
    """
    if spec.attack is None:
        return None
    if spec.direction == "minimize" or (spec.direction is None and not info.higher_is_better):
        message = (
            f"{spec.metric} is better where it is less; the performance drop needs a metric of which more is better"
        )
        problems.append(Problem(f"{place}.attack", message))
    try:
        return prepared_attack(spec.attack, info)
    except InvalidTask as error:
        problems.append(Problem(f"{place}.{error.field}", f"benchmark {spec.name}: {error}"))
        return None


def _reference_length(spec: BenchmarkSpec, task: TaskSpec, place: str, problems: list[Problem]) -> float:
    """Mean length of a judged benchmark's reference answers, in characters; a judge is an LLM that compares answers.

    `spec` is the benchmark's entry in the study file, `place` is the entry's location, such as "benchmarks.0", and
    `task` is its task. The result is 0 for a benchmark without a judge, and for a task that cannot be judged. The
    reason why a task cannot be judged is added to `problems`.
    """
    if spec.judge is None:
        return 0.0
    try:
        items = judged_items(task)
    except InvalidTask as error:
        problems.append(Problem(f"{place}.{error.field}", f"benchmark {spec.name}: {error}"))
        return 0.0
    return sum(len(item.reference) for item in items) / len(items)


def check_modality(
    study: Study, tasks: Mapping[str, Mapping[str, TaskSpec]], sources: ResolvedFamily, problems: list[Problem]
) -> None:
    """Check that a study's tasks have the modality (texts or images) of its models, and that the models fit the tasks.

    `tasks` has the tasks that could be read, keyed by section of the study file and then by name. `sources` are the
    models. A task of images needs, for example, a head. Problems that are found are added to `problems`.
    """
    for place, spec in study.with_tasks():
        task = tasks[place.partition(".")[0]].get(spec.name)
        if task is None:
            continue
        own = modality_of_task(task.task)
        if own is not sources.modality:
            message = f"is a task of the modality {own.name}; the models are of the modality {sources.modality.name}"
            problems.append(Problem(f"{place}.task", message))
            continue
        try:
            reader_of(task.task).check_models(task, sources)
        except InvalidTask as error:
            problems.append(Problem(f"{place}.{error.field}", str(error)))


def check_prompts(study: Study, directory: str, problems: list[Problem]) -> None:
    """Check that the tokenizer has the study's chat template, and that answers are shorter than the context length.

    A task states the largest length of an answer as `max_tokens`. `directory` holds the tokenizer and the configuration
    of the merged model. Problems that are found are added to `problems`.
    """
    prompts = Prompts(directory, study.engine.options)
    asked = study.engine.chat_template
    names = check_tokenizer(directory)
    if asked and ("default" if asked is True else asked) not in names:
        problems.append(
            Problem(
                "engine.chat_template",
                f"{json.dumps(asked)}: the tokenizer of {directory} has "
                + (f"the templates {', '.join(names)}; give one of them" if names else "no template; write false"),
            )
        )
    for place, spec in study.with_tasks():
        if isinstance(spec.task, InlineTask) and spec.task.max_tokens >= prompts.max_length:
            problems.append(
                Problem(
                    f"{place}.task.max_tokens",
                    f"{spec.task.max_tokens} leaves no room for a prompt in the {prompts.max_length} tokens that the "
                    f"model reads; give at most {prompts.max_length - 1}, or raise engine.max_model_len where that is "
                    "the limit",
                )
            )


def objectives_of(
    study: Study, infos: Mapping[str, TaskInfo], size: ModelSize | None, problems: list[Problem]
) -> tuple[Objective, ...]:
    """Make the objectives of a study, each with its direction of optimisation, range of values and constraints.

    `infos` contains facts about the objectives' tasks, keyed by name. An objective whose task could not be built is
    left out. Objectives may also be costs that count a merge's layers or parameters. `size` has the models' numbers of
    layers and parameters, from which the ranges of costs are computed; if it is None, costs are left out. Problems that
    are found are added to `problems`.
    """
    objectives = []
    constraints = [parse_constraint(text) for text in study.search.constraints]
    for index, spec in enumerate(study.objectives):
        own = tuple(constraint for constraint in constraints if constraint.objective == spec.name)
        if isinstance(spec, CostSpec):
            if size is not None:
                most = (0.0, size.most(spec.cost))
                objectives.append(Objective(spec.name, spec.cost, "minimize", most, own, cost_of_recipe=spec.cost))
            continue
        if spec.name not in infos:
            continue
        direction = spec.direction or ("maximize" if infos[spec.name].higher_is_better else "minimize")
        try:
            values = spec.range or infos[spec.name].value_range
            objectives.append(Objective(spec.name, spec.metric, direction, values, own))
        except InvalidStudy as error:
            problems.extend(Problem(f"objectives.{index}", problem.message) for problem in error.problems)
    return tuple(objectives)
