"""Judges of benchmarks in preflight: plans, and studies that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import Problem
from search_spaces.study.file import Study, parse_study
from service.studies.preflight.files import FilesRefused, check_files
from service.studies.preflight.tasks import benchmarks_of, check_tasks
from service.tune.plan import Benchmark
from tests.conftest import write_choices
from tests.service.resolved import study_document
from workers.file_access import FileAccess

JUDGE = {"url": "http://127.0.0.1:8000/v1", "model": "qwen"}


def study(task: Any, **changes: Any) -> Study:
    benchmark = {"name": "chats", "task": task, "metric": "win_rate", "judge": JUDGE, **changes}
    return parse_study({**study_document(), "benchmarks": [benchmark]})


def checked(study: Study) -> tuple[tuple[Benchmark, ...], list[Problem]]:
    problems: list[Problem] = []
    tasks, infos = check_tasks(dict(enumerate(study.benchmarks)), "benchmarks", study, problems, is_new=True)
    return benchmarks_of(study, tasks, infos, problems), problems


def test_engines_report_lengths(tmp_path: Path) -> None:
    """Replicas are asked for the lengths of completions; the benchmark's metric is the win rate."""
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": "p", "answer": "a" * n}) + "\n" for n in (2, 4)))
    (benchmark,), problems = checked(study({"file": str(file)}))
    assert not problems
    assert (benchmark.task.metric, benchmark.facts.metric) == ("length", "win_rate")
    assert benchmark.facts.objective.bounds == (0, 1)
    assert benchmark.facts.reference_length == 3
    assert benchmark.facts.judge is not None
    assert benchmark.facts.judge["model"] == "qwen"


def test_task_that_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    _, problems = checked(study(str(write_choices(tmp_path))))
    assert [problem.field for problem in problems] == ["benchmarks.0.judge"]
    assert "compares generated text, and the task generates none" in problems[0].message


def test_server_asks_only_allowed_judges(tmp_path: Path) -> None:
    """A study could otherwise send requests to any address that its driver reaches."""
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "p", "answer": "a"}\n')
    given = study({"file": str(file)})
    with pytest.raises(FilesRefused) as refused:
        check_files(given, FileAccess((str(tmp_path),), judges=("http://127.0.0.1:8000/v2",)))
    fields = {problem.field: problem.message for problem in refused.value.problems}
    assert "can add it with --allow-judge" in fields["benchmarks.0.judge.url"]
    with pytest.raises(FilesRefused) as refused:  # its models are elsewhere
        check_files(given, FileAccess((str(tmp_path),), judges=("http://127.0.0.1:8000/v1/",)))
    assert "benchmarks.0.judge.url" not in {problem.field for problem in refused.value.problems}
