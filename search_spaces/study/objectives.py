"""Entries of a study file by which trials are scored: metrics on tasks (objectives, holdout data), and costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from search_spaces.objectives import Cost
from search_spaces.section import Line, Name, Section, one_of

__all__ = ["AnyObjective", "CostSpec", "InlineTask", "ObjectiveSpec", "Rungs", "ScoredTask"]

Rungs = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]


class InlineTask(Section):
    """A task that consists of samples in a JSONL file, each a prompt and an answer.

    A sample is right if the whole greedy completion of the prompt equals the answer, apart from white space around it.
    With `program`, the completion is code, which is inserted into this program. The sample is then right if the program
    runs to its end.
    """

    file: Line
    prompt: Annotated[str, Field(min_length=1)] = "{{prompt}}"
    """The prompt, as a Jinja template over the keys of a line."""
    answer: Annotated[str, Field(min_length=1)] = "{{answer}}"
    """The answer, as a Jinja template over the keys of a line."""
    until: tuple[Annotated[str, Field(min_length=1)], ...] = ("\n",)
    """A completion ends at the first of these strings, or at the end of text."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    program: Annotated[str, Field(min_length=1)] | None = None
    """A program in Python, as a Jinja template over the keys of a line and `completion`; executed in a sandbox."""
    repeats: Annotated[int, Field(ge=1)] | None = None
    """With program: completions of each prompt, drawn at temperature. Default: 1. The metric pass@k needs k or more."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """With program: the sampling temperature. Default: greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """With temperature: the probability mass of the tokens that are drawn from. Default: 1."""

    def description(self) -> dict[str, Any]:
        """The task as a JSON object, without keys that have no value.

        The description of a task in a stored study therefore stays the same if a later version adds keys.
        """
        return self.model_dump(mode="json", exclude_none=True)


def _tag_of_task(value: object) -> str | None:
    return "<name>" if isinstance(value, str) else "<inline>" if isinstance(value, Mapping | InlineTask) else None


class ScoredTask(Section):
    """A named metric on the samples of a task."""

    name: Name
    task: Annotated[
        Annotated[Line, Tag("<name>")] | Annotated[InlineTask, Tag("<inline>")],
        one_of(_tag_of_task, "the name of an lm-eval task, a YAML file or {file: data.jsonl}"),
    ]
    """An lm-eval task's name, an lm-eval YAML file, or a JSONL file written inline."""
    metric: Line
    filter: Line | None = None
    """The task's filter that is used; required if the task has several."""
    split: Line | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The longest completion of an lm-eval task, in tokens. Default: the task's, or 256."""
    until: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """A completion of an lm-eval task ends at the first of these strings. Default: the task's."""
    direction: Literal["maximize", "minimize"] | None = None
    """The direction of optimisation. Default: as the task's metric says."""
    range: tuple[float, float] | None = None
    """The metric's lowest and highest value, if these are not 0 and 1."""


class ObjectiveSpec(ScoredTask):
    rungs: Rungs | None = None
    """The number of samples of this objective at each rung, in place of those of fidelity; the number of rungs is the
    same. It may stop growing ([100, 300, 300]) where another objective's grows.
    """


class CostSpec(Section):
    """An objective that is a cost of the merged model, such as its number of layers; less is better.

    It needs no data, because its value follows from the recipe.
    """

    name: Name
    cost: Cost
    """The cost of a merge, in spaces that change it: its number of layers, or its number of parameters."""


def _tag_of_objective(value: object) -> str:
    is_cost = isinstance(value, CostSpec) or (isinstance(value, Mapping) and "cost" in value)
    return "<cost>" if is_cost else "<task>"


if TYPE_CHECKING:
    AnyObjective = ObjectiveSpec | CostSpec
else:
    AnyObjective = Annotated[
        Annotated[ObjectiveSpec, Tag("<task>")] | Annotated[CostSpec, Tag("<cost>")], Discriminator(_tag_of_objective)
    ]
