"""Inline tasks whose completions are code: each is executed with the tests of its sample, in a sandbox.

HumanEval, MBPP and other data of their form are such tasks: a line of the file has the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workers.evaluation.built_tasks import (
    Answers,
    BuiltTask,
    Document,
    PromptSettings,
    documents_here,
    lack_here,
)
from workers.evaluation.execution import Executor
from workers.evaluation.inline_files import InlineRow, program_of

__all__ = ["ExecutedTask"]


class ExecutedTask:
    """An inline task with a program for each sample (`built_tasks.TaskCode`); `built` is the task.

    `task` is the task as lm-eval builds it, `rows` are its samples. Raises InvalidTask if this machine cannot confine
    programs.
    """

    def __init__(self, task: BuiltTask, rows: Sequence[InlineRow]) -> None:
        assert isinstance(task.spec.task, Mapping)
        self._settings: Mapping[str, Any] = task.spec.task
        self._rows = rows
        self._here = task
        self._executor = Executor()
        self.enforced = self._executor.enforced
        self.built = replace(task, code=self)

    def documents(self, settings: PromptSettings) -> tuple[tuple[Document, ...], ...]:
        return documents_here(self._here, settings)

    def lack_of_references(self, num_documents: int) -> str | None:
        return lack_here(self._here, num_documents)

    def values(self, answers: Sequence[Answers]) -> list[float]:
        """1 for each sample whose program runs to its end with the completion, and 0 for others.

        Raises EngineUnavailable if the process that executes programs ends twice.
        """
        programs = [
            program_of(self._settings, self._rows[each.document], str(each.responses[0][0])) for each in answers
        ]
        return [float(reason is None) for reason in self._executor.run(programs)]

    def close(self) -> None:
        self._executor.close()
