"""Checks of a study's tasks: their data, their objectives, and whether prompts leave room for an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search_spaces.constraints import parse_constraint
from search_spaces.costs import ModelSize
from search_spaces.errors import InvalidStudy, Problem
from search_spaces.objectives import Objective
from search_spaces.study.file import Study
from search_spaces.study.objectives import CostSpec, InlineTask, ObjectiveSpec
from workers.errors import InvalidTask
from workers.evaluation.lm_eval_tasks import content_hash
from workers.evaluation.prompts import Prompts
from workers.evaluation.tasks import check_task
from workers.file_access import FileAccess
from workers.models.tokenizers import check_tokenizer
from workers.types import TaskInfo, TaskSpec

__all__ = ["check_prompts", "check_tasks", "objectives_of"]


def check_tasks(
    specs: Mapping[int, ObjectiveSpec],
    section: str,
    study: Study,
    problems: list[Problem],
    *,
    is_new: bool,
    access: FileAccess | None = None,
) -> tuple[dict[str, TaskSpec], dict[str, TaskInfo]]:
    """Check the tasks in a section of the study file, "objectives" or "holdout".

    `specs` are the section's entries by position. Returns two mappings by the objective's name: the tasks in the form
    from which replicas build them, and facts about their data. A study that `is_new` must choose a filter where a task
    has several; earlier ones got the first. `access` limits the files that task files may refer to;
    None is no limit.
    """
    tasks: dict[str, TaskSpec] = {}
    infos: dict[str, TaskInfo] = {}
    for index, spec in specs.items():
        try:
            content = None
            task: str | dict[str, Any]
            if isinstance(spec.task, InlineTask):
                task = spec.task.description()
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
                max_tokens=spec.max_tokens,
                until=spec.until,
                content=content,
                permutation_seed=study.search.seed,
                access=access,
            )
            infos[spec.name] = check_task(tasks[spec.name])
            if is_new and spec.filter is None and (filters := infos[spec.name].filters):
                message = f"is missing; task {task} has several, whose values differ: give one of {', '.join(filters)}"
                problems.append(Problem(f"{section}.{index}.filter", message))
        except InvalidTask as error:
            problems.append(Problem(f"{section}.{index}.{error.field}", str(error)))
    return tasks, infos


def check_prompts(study: Study, directory: str, problems: list[Problem]) -> None:
    """Check that the tokenizer has the study's chat template, and that prompts leave the model room to answer.

    `directory` holds the tokenizer and the configuration of the merged model.
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
    """The objectives of a study, each with its direction, range and constraints.

    An objective whose task could not be built is left out. The range of a cost depends on the `size` of the models.
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
            objectives.append(Objective(spec.name, spec.metric, direction, spec.range, own))
        except InvalidStudy as error:
            problems.extend(Problem(f"objectives.{index}", problem.message) for problem in error.problems)
    return tuple(objectives)
