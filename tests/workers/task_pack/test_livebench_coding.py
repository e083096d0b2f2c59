"""LiveBench's coding category: a solution passes if it passes all test cases, and it runs only in the sandbox."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.task_pack.rows import ROWS, compressed, in_memory, shipped_index
from workers.errors import MetricFailed
from workers.evaluation import task_index
from workers.evaluation.built_tasks import Answers, BuiltTask, PromptSettings, documents_of
from workers.evaluation.confined_task import ConfinedTask
from workers.evaluation.execution import Executor
from workers.evaluation.tasks import build_task
from workers.task_pack.m3 import livebench_coding
from workers.types import TaskSpec

ROW = ROWS["livebench/coding"]
NUM_ROWS = 12
GENERATION, COMPLETION = 0, 1  # subtasks
CALL, PROGRAM = 0, 1  # documents of a subtask
HARMFUL, WRONG = 2, 4  # further documents, whose private test cases are of another form


class Harm:
    """An object whose pickle executes code when it is loaded."""

    def __reduce__(self) -> Any:
        return exec, ("import os; os.environ['MERGESEARCH_HARMED'] = 'yes'",)


def rows(i: int) -> Any:
    if i == 2 * HARMFUL:
        return {**ROW(i), "private_test_cases": compressed(Harm())}
    return {**ROW(i), "private_test_cases": compressed(["[]"])} if i == 2 * WRONG else ROW(i)


@pytest.fixture(scope="module")
def task() -> Iterator[BuiltTask]:
    """The task in its confined process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_index, "_given", shipped_index())
        patch.setitem(ROWS, "livebench/coding", rows)
        patch.setattr("datasets.load_dataset", in_memory(NUM_ROWS, {}))
        with build_task(TaskSpec("m3_livebench_coding", "pass_at_1")) as task:
            documents_of(task, PromptSettings(None, None, "none"))
            yield task


def value(task: BuiltTask, subtask: int, document: int, answer: str) -> float:
    assert task.code is not None
    return task.code.values([Answers(subtask, document, ((answer,),))])[0]


SOLUTION = "class Solution:\n    def total(self, pair: List[int], more):\n        return sum(pair) + more"
READER = "import sys\nn, *numbers = sys.stdin.read().split()\nprint(sum(map(int, numbers)))\nprint(2)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (SOLUTION, True),
        (f"So:\n```python\npass\n```\nOr:\n```python\n{SOLUTION}\n```\nDone.", True),
        (f"<think>```python\nno\n```</think>{SOLUTION}\n```", True),
        ("def total(pair, more):\n    return reduce(add, pair) + more", True),  # names of the prelude
        (SOLUTION.replace("sum(pair) + more", "tuple(pair)"), False),
        (f"{SOLUTION} + 0.0", True),
        (SOLUTION.replace("sum(pair) + more", "abs(sum(pair) + more)"), False),  # passes the public case
        (SOLUTION.replace("total", "sum"), False),
        (SOLUTION.replace("List[int]", "Unknown"), False),
        (SOLUTION.replace("return", "sys.exit() #"), False),
        ("I do not know.", False),
    ],
)
def test_functions_pass_if_they_return_the_right_values(task: BuiltTask, answer: str, passes: bool) -> None:
    assert value(task, GENERATION, CALL, answer) == float(passes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (READER, True),
        ("input()\na, b = map(int, input().split())\nprint(a + b, ' ')\nprint('2.0')\nexit()\nprint()", True),
        (
            "def main():\n    input()\n    print(f'{sum(map(int, input().split()))}\\n2')\n\n"
            "if __name__ == '__main__':\n    main()",
            True,
        ),
        ("lines = list(sys.stdin)\nprint(sum(map(int, lines[1].split())))\nprint(2)", True),
        (f"from sys import stdin\n{READER.replace('sys.', '')}", True),
        (READER.replace("print(2)", "print(3)"), False),
        (READER.replace("print(2)", "pass"), False),
        (READER.replace("print(2)", "print('two')"), False),
        (READER.replace("print(sum", "print(abs(sum").replace("numbers)))", "numbers))))"), False),
        (READER.replace("stdin", "stdin.buffer"), False),  # as in the published code, there are no bytes
        ("print(3)\nprint(2)", False),  # passes the public case
        ("def (:", False),
    ],
)
def test_programs_pass_if_they_print_the_right_lines(task: BuiltTask, answer: str, passes: bool) -> None:
    assert value(task, GENERATION, PROGRAM, answer) == float(passes)


@pytest.mark.slow
def test_completions_continue_the_partial_solution_or_repeat_it(task: BuiltTask) -> None:
    for document in (CALL, PROGRAM):
        row = ROW(2 * document + 1)
        assert value(task, COMPLETION, document, row["remainder"]) == 1.0
        assert value(task, COMPLETION, document, f"```python\n{row['solution']}\n```") == 1.0
        assert value(task, COMPLETION, document, "") == 0.0


@pytest.mark.slow
def test_solution_that_does_not_end_fails(task: BuiltTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution is ended; programs with the task's limit have one second here instead of six."""
    assert isinstance(task.code, ConfinedTask)
    with contextlib.closing(Executor(cpu_s=1)) as executor:
        monkeypatch.setitem(task.code._executors, livebench_coding.TEST_S, executor)
        for document, answer in (
            (CALL, SOLUTION.replace("return", "while True: pass #")),
            (PROGRAM, "while True: pass"),
        ):
            assert value(task, GENERATION, document, answer) == 0.0


@pytest.mark.slow
def test_solution_has_six_seconds(task: BuiltTask) -> None:
    """The kernel's limit of processor time is six seconds, more than the three of other tasks."""
    limited = "import resource\nassert resource.getrlimit(resource.RLIMIT_CPU)[0] == {}\n" + SOLUTION
    assert [value(task, GENERATION, CALL, limited.format(seconds)) for seconds in (6, 3)] == [1.0, 0.0]


@pytest.mark.slow
def test_solution_writes_no_file(task: BuiltTask, tmp_path: Path) -> None:
    harm = f"open({str(tmp_path / 'written')!r}, 'w')"
    assert value(task, GENERATION, CALL, f"{harm}\n{SOLUTION}") == 0.0
    assert not (tmp_path / "written").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("document", "operation"), [(HARMFUL, "STACK_GLOBAL"), (WRONG, "EMPTY_LIST")])
def test_pickle_that_is_no_text_is_refused(task: BuiltTask, document: int, operation: str) -> None:
    with pytest.raises(MetricFailed, match=f"a pickle with the operation {operation}; only a text is read"):
        value(task, GENERATION, document, SOLUTION)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", "[1, 'ä\\n']", "x" * 70_000])
def test_pickled_texts_are_read(text: str, protocol: int) -> None:
    assert livebench_coding._pickled_text(pickle.dumps(text, protocol)) == text


def name(content: object) -> str:
    """A test id for an object, equal in every process."""
    return "harm" if isinstance(content, Harm) else repr(content)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("content", [Harm(), os.system, ["text"], {"a": 1}, b"[]", 1, None, ("a", "b")], ids=name)
def test_other_pickles_are_refused_without_being_loaded(content: object, protocol: int) -> None:
    with pytest.raises(ValueError, match="private_test_cases: a pickle with"):
        livebench_coding._pickled_text(pickle.dumps(content, protocol))
    assert "MERGESEARCH_HARMED" not in os.environ


def test_pickle_that_is_cut_or_has_several_texts_is_refused() -> None:
    for data in (pickle.dumps("text")[:-1], b"", b"\x8c\x01a\x8c\x01b."):
        with pytest.raises(ValueError, match="pickle"):
            livebench_coding._pickled_text(data)


def test_private_cases_are_plain_or_compressed() -> None:
    cases = [{"input": "1", "output": "2", "testtype": "stdin"}]
    text = json.dumps(cases)
    assert livebench_coding._private(text) == cases
    assert livebench_coding._private(compressed(text)) == cases
    with pytest.raises(zlib.error):
        livebench_coding._private(base64.b64encode(b"text").decode())


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("a\n```python\nb\nc\n```\nd", "b\nc"),
        ("```\nb\n```\n```python\nc\n```", "c"),
        ("`a`", "a"),
        ("a\nb\n```\n", "a\nb"),
        ("```python\na\n", "```python\na"),
        ("  a\n\n", "  a"),
        ("", ""),
    ],
)
def test_code_is_the_last_block(completion: str, code: str) -> None:
    assert livebench_coding._code(completion) == code
