"""A task that is ready to be scored: its subtasks, the order of its samples, and its documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from workers.evaluation.right_answers import RightAnswer, right_answer
from workers.types import TaskInfo, TaskSpec

__all__ = [
    "Answers",
    "BuiltTask",
    "Document",
    "PromptSettings",
    "Subtask",
    "TaskCode",
    "documents_here",
    "documents_of",
    "lack_here",
    "lack_of_references",
    "permutation",
]


@dataclass(frozen=True)
class Subtask:
    """One lm-eval task; a task of a study may consist of several lm-eval tasks.

    - `task`: lm-eval's object, or None if it exists only in the sandboxed process that runs the task's own code
    - `filter`: the name of the lm-eval filter whose results are used; `filters` has the names of all filters of the
      task
    - `prefix`: the beginning of the answer, which the task gives to the model at the end of the prompt (`gen_prefix`)
    - `delimiter`: the text between a prompt and its answer
    - `template`: the Jinja template of the prompts, or "" if they come from a function or a column of the data
    - `options`: the answer options, if all samples have the same options
    - `categories`: if the study's task is a group of tasks, the names of the groups within it that contain the subtask,
      such as `mmlu_stem`
    """

    name: str
    task: Any
    filter: str
    num_samples: int
    output_type: str
    higher_is_better: bool
    prefix: str = ""
    delimiter: str = " "
    template: str = ""
    options: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()

    def delimiter_before_answer(self, *, has_template: bool) -> str:
        """The text that lm-eval puts between prompt and answer: the task's delimiter, or "".

        `has_template` says whether the prompt is rendered by a chat template. Without a chat template, the result is
        the delimiter. With a chat template, the result is "", except after a `prefix` that does not end in white space:
        then it is the delimiter as well.
        """
        if has_template and not (self.prefix and not self.prefix[-1:].isspace()):
            return ""
        return self.delimiter


@dataclass(frozen=True)
class Document:
    """One sample of a task, in lm-eval's terms: its requests (objects `Instance`, in order), and its right answers.

    The function `right` finds the right answers when it is called.
    """

    instances: tuple[Any, ...]
    right: Callable[[], RightAnswer]


@dataclass(frozen=True)
class Answers:
    """The answers of a backend to one sample of a task.

    - `subtask`: the index of the sample's lm-eval task in `BuiltTask.subtasks`
    - `document`: lm-eval's `doc_id` of the sample in this task
    - `responses`: `responses[i]` has the answers to the sample's i-th request, several if lm-eval repeats the request
    """

    subtask: int
    document: int
    responses: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class PromptSettings:
    """Settings with which lm-eval builds prompts.

    - `system_prompt`: the system prompt, or None
    - `render`: a function that renders chat messages, with the arguments of `TemplateLM.apply_chat_template`; None if
      there is no chat template
    - `tokenizer_name`: the name under which lm-eval caches prompts of this tokenizer
    - `limit`: the number of documents; None for all documents
    """

    system_prompt: str | None
    render: Callable[..., str] | None
    tokenizer_name: str
    limit: int | None = None


class TaskCode(Protocol):
    """Interface to the sandboxed process of a task that has its own Python functions or executes completions."""

    @property
    def enforced(self) -> str:
        """Names of the mechanisms that restrict the task's process, for example "Landlock 7, seccomp"."""
        ...

    def documents(self, settings: PromptSettings) -> tuple[tuple[Document, ...], ...]: ...

    def lack_of_references(self, num_documents: int) -> str | None: ...

    def begin(self, answers: Answers) -> None:
        """Begin to compute the metric of one sample, whose value the method `values` returns later.

        `answers` are the model's answers. The method returns at once and raises nothing.
        """
        ...

    def forget(self) -> None:
        """Drop the computations that the method `begin` has begun and whose values were not returned yet.

        The results are no longer needed, for example because the scoring of another sample has failed.
        """
        ...

    def values(self, answers: Sequence[Answers]) -> list[float]:
        """The task's metric for each of several samples, in the order of `answers`; all values are finite.

        `answers` has the model's answers to each sample.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BuiltTask:
    """A task that is ready to be scored, and the order of its samples.

    `order[position]` is the sample that is scored at `position`: (index of its lm-eval task among `subtasks`, index of
    the document in this task). All indices begin with 0. `code` is the sandboxed process that computes the metric; None
    if the task neither has its own code nor executes completions.
    """

    spec: TaskSpec
    subtasks: tuple[Subtask, ...]
    order: tuple[tuple[int, int], ...]
    higher_is_better: bool
    output_type: str
    code: TaskCode | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sandboxed process that runs the task's own code, if there is one."""
        if self.code is not None:
            self.code.close()

    def document(self, position: int) -> str:
        """Name of the sample that is scored as number `position`, counted from 0.

        The name is the sample's index in the task's data. If the task consists of several lm-eval tasks, the name of
        the sample's task comes before the index.
        """
        subtask, index = self.order[position]
        return f"{self.subtasks[subtask].name}/{index}" if len(self.subtasks) > 1 else str(index)

    @property
    def info(self) -> TaskInfo:
        groups = {subtask.name: subtask.num_samples for subtask in self.subtasks} if len(self.subtasks) > 1 else {}
        templates = {subtask.template for subtask in self.subtasks}
        options = {subtask.options for subtask in self.subtasks}
        categories: dict[str, tuple[str, ...]] = {}
        for subtask in self.subtasks:
            categories |= {name: (*categories.get(name, ()), subtask.name) for name in subtask.categories}
        return TaskInfo(
            len(self.order),
            self.higher_is_better,
            self.output_type,
            groups=groups,
            filters=next((each.filters for each in self.subtasks if len(each.filters) > 1), ()),
            categories=categories,
            confined_by=self.code.enforced if self.code is not None else "",
            template=templates.pop() if len(templates) == 1 else "",
            options=options.pop() if len(options) == 1 else (),
        )


def permutation(sizes: Mapping[str, int], *, seed: int) -> tuple[tuple[int, int], ...]:
    """Random order of all samples; every prefix of the order has all groups in proportion to their sizes.

    `sizes` maps a group's name to its number of samples. The result contains a pair (index of the group, index of the
    sample in the group) for each sample. In every prefix, the counts of samples of two groups of equal size differ by
    at most one. The order depends only on names, sizes and seed, not on the version of a random generator.
    """

    def draw(name: str, index: int) -> bytes:
        return hashlib.sha256(f"{seed}\0{name}\0{index}".encode()).digest()

    places: list[tuple[float, bytes, int, int]] = []
    for group, (name, size) in enumerate(sizes.items()):
        shuffled = sorted(range(size), key=lambda index, name=name: draw(name, index))  # type: ignore[misc]
        # The j-th of n samples of a group is at (j + 1/2)/n of the whole order; ties are in random order.
        places.extend(((j + 0.5) / size, draw(name, index), group, index) for j, index in enumerate(shuffled))
    return tuple((group, index) for _, _, group, index in sorted(places))


def documents_of(task: BuiltTask, settings: PromptSettings) -> tuple[tuple[Document, ...], ...]:
    """The documents of each subtask (lm-eval task) of a task with their requests, in the order of the data.

    `settings` are the settings with which prompts are built. If the task has a sandboxed process (field `code`), the
    documents come from `code`.
    """
    if task.code is not None:
        return task.code.documents(settings)
    return documents_here(task, settings)


def documents_here(task: BuiltTask, settings: PromptSettings) -> tuple[tuple[Document, ...], ...]:
    """The documents of a task whose lm-eval objects exist in this process, with their requests, grouped by subtask.

    `settings` are the settings with which prompts are built.
    """
    return tuple(_documents(subtask.task, settings) for subtask in task.subtasks)


def lack_of_references(task: BuiltTask, num_documents: int) -> str | None:
    """Reason why losses cannot be computed on a task; None if they can be computed.

    Losses need right answers. The reason names a document whose right answer is missing, or cannot be used for a loss.
    The first `num_documents` documents (samples) of each of the task's lm-eval tasks are checked.
    """
    if task.code is not None:
        return task.code.lack_of_references(num_documents)
    return lack_here(task, num_documents)


def lack_here(task: BuiltTask, num_documents: int) -> str | None:
    """Reason why losses cannot be computed on a task that is built in this process; None if they can be computed.

    The first `num_documents` documents (samples) of each of the task's lm-eval tasks are checked; the lm-eval tasks
    must be in this process. The reason names a document whose right answer is missing, or cannot be used for a loss.
    """
    for subtask in task.subtasks:
        for index in range(min(num_documents, subtask.num_samples)):
            if lack := right_answer(subtask.task, subtask.task.eval_docs[index]).lack:
                return f"task {subtask.name}: {lack}"
    return None


def _documents(task: Any, settings: PromptSettings) -> tuple[Document, ...]:
    has_template = settings.render is not None
    task.build_all_requests(
        limit=settings.limit,
        system_instruction=settings.system_prompt,
        apply_chat_template=has_template,
        fewshot_as_multiturn=has_template,
        chat_template=settings.render,
        tokenizer_name=settings.tokenizer_name,
    )
    by_document: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_document.setdefault(instance.doc_id, []).append(instance)
    return tuple(
        Document(
            tuple(sorted(by_document[index], key=lambda instance: int(instance.idx))),
            partial(right_answer, task, by_document[index][0].doc),
        )
        for index in sorted(by_document)
    )
