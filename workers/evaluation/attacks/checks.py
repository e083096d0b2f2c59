"""Checks, before a study starts, that the prompts of a task can be attacked."""

from __future__ import annotations

from search_spaces.study.attacks import AttackSpec, BertAttack, StressAttack
from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.attacks.masked_model import check_masked_model
from workers.evaluation.attacks.search import PromptAttack
from workers.evaluation.attacks.templates import Template
from workers.types import TaskInfo

__all__ = ["prepared_attack"]


def prepared_attack(option: AttackSpec, info: TaskInfo) -> PromptAttack:
    """Build the prompt attack of one task, a search for a changed prompt template that worsens a model's metric.

    `option` is the description of the attack in the study file, and `info` has facts about the task.

    Raises:
        InvalidTask: The task cannot be attacked. Possible reasons: it has no template that can be changed; the answers
            (labels), whose words must stay unchanged, are not known; a model that the attack needs does not exist. The
            error names the field of `option` that is wrong.
    """
    if not info.template:
        raise InvalidTask(
            "the task has no single Jinja template for its prompts, which come from a function, from a column of its "
            "data, or from several templates; give a YAML file whose doc_to_text is a template, or an inline task",
            "attack",
        )
    labels = option.labels or info.options
    if not labels:
        raise InvalidTask(
            "no label is protected, and the task has no fixed options that could be; give the words of the template "
            "that name its answers, for example labels: [positive, negative]",
            "attack.labels",
        )
    attack = PromptAttack(option, Template.of(info.template, labels=labels))
    if not isinstance(option, StressAttack) and not attack.original.words:
        raise InvalidTask(
            f"the prompt template {info.template!r} has no words that an attack may change: apart from placeholders, "
            "labels and stop words there are none; give a template with an instruction",
            "attack",
        )
    if isinstance(option, BertAttack):
        for field, model in (("model", option.model), ("encoder", option.encoder)):
            try:
                if model is not None:
                    check_masked_model(model, is_encoder=field == "encoder")
            except InvalidModel as error:
                raise InvalidTask(str(error), f"attack.{field}") from error
    return attack
