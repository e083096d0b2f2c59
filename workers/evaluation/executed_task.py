"""Inline tasks whose completions are code, which is executed with each sample's tests in a sandbox.

HumanEval and MBPP are tasks of this kind: each line of the JSONL file has the tests of its sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workers.errors import EngineUnavailable, InvalidTask
from workers.evaluation.built_tasks import (
    Answers,
    BuiltTask,
    Document,
    PromptSettings,
    documents_here,
    lack_here,
)
from workers.evaluation.execution import Executor, pass_at_k
from workers.evaluation.inline_files import InlineRow, program_of
from workers.evaluation.lm_eval_tasks import PASS_AT

__all__ = ["ExecutedTask"]


class ExecutedTask:
    """Inline task (JSONL file) whose completions are programs, which are executed with their samples' tests.

    The class implements the interface `built_tasks.TaskCode`. `task` is the task as lm-eval built it, and `rows` are
    its samples. The attribute `built` is the same task with this object as its field `code`. Raises InvalidTask if this
    machine has no sandbox for programs.
    """

    def __init__(self, task: BuiltTask, rows: Sequence[InlineRow]) -> None:
        assert isinstance(task.spec.task, Mapping)
        self._settings: Mapping[str, Any] = task.spec.task
        self._rows = rows
        self._here = task
        self._executor = Executor()
        self._begun: dict[Answers, int] = {}  # the number of programs of each sample, in their order in the executor
        self._judged: dict[Answers, float] = {}  # values, until `forget`
        self._k = int(task.spec.metric.removeprefix(PASS_AT))
        self.enforced = self._executor.enforced
        self.built = replace(task, code=self)

    def documents(self, settings: PromptSettings) -> tuple[tuple[Document, ...], ...]:
        return documents_here(self._here, settings)

    def lack_of_references(self, num_documents: int) -> str | None:
        return lack_here(self._here, num_documents)

    def begin(self, answers: Answers) -> None:
        """Begin to execute the completions of one sample, which are in `answers`, and return at once."""
        with contextlib.suppress(InvalidTask):  # `values` raises it
            self._begin(answers)

    def forget(self) -> None:
        if self._begun:
            self._executor.drop()
        self._begun.clear()
        self._judged.clear()

    def values(self, answers: Sequence[Answers]) -> list[float]:
        """The metric pass@k of each sample: an estimate of the probability that one of k completions passes its tests.

        `answers` has the completions of each sample. A completion passes if its program runs to its end. If the process
        that executes programs ends, it is started again once, and all programs are executed again. Raises
        EngineUnavailable if the new process does not start, or ends as well.
        """
        for each in answers:
            if each not in self._judged and each not in self._begun:
                self._begin(each)
        begun, self._begun = self._begun, {}
        found = self._executor.outcomes()
        if len(found) != sum(begun.values()):
            raise EngineUnavailable(f"{len(found)} outcomes of {sum(begun.values())} programs")
        outcomes = iter(found)
        for each, num_programs in begun.items():
            num_passed = sum(next(outcomes) is None for _ in range(num_programs))
            self._judged[each] = pass_at_k(num_programs, num_passed, self._k)
        return [self._judged[each] for each in answers]

    def _begin(self, answers: Answers) -> None:
        if answers in self._begun or answers in self._judged:
            return  # two objectives may have one task, and their samples the same answers
        row = self._rows[answers.document]
        programs = [program_of(self._settings, row, str(text)) for text in answers.responses[0]]
        self._executor.submit(programs)
        self._begun[answers] = len(programs)

    def close(self) -> None:
        self._executor.close()
