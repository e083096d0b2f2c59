"""Attacks of benchmarks in preflight: refused settings, and the limit on their cost."""

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

TEMPLATE = "Decide whether {{question}} has the answer yes or no."
CHOICES: dict[str, Any] = {"doc_to_text": TEMPLATE, "doc_to_choice": ["yes", "no", "maybe"]}


def study(file: Path, **changes: Any) -> Study:
    benchmark = {"name": "even", "task": str(file), "metric": "acc", "attack": {"kind": "deepwordbug"}, **changes}
    return parse_study({**study_document(), "benchmarks": [benchmark]})


def checked(study: Study) -> tuple[tuple[Benchmark, ...], list[Problem]]:
    problems: list[Problem] = []
    tasks, infos = check_tasks(dict(enumerate(study.benchmarks)), "benchmarks", study, problems, is_new=True)
    return benchmarks_of(study, tasks, infos, problems), problems


def test_attack_is_planned_with_its_cost(tmp_path: Path) -> None:
    """The plan has the template with its labels fixed; each of its words may cost five templates of all samples."""
    (benchmark,), problems = checked(study(write_choices(tmp_path, **CHOICES)))
    assert not problems
    assert benchmark.attack is not None
    original = benchmark.attack.original
    assert [original.pieces[i].text for i in original.words] == ["Decide", "whether", "answer"]
    assert benchmark.most_samples == 12 * (1 + 3 * 5)
    assert benchmark.facts.template == TEMPLATE
    json.dumps(benchmark.facts.attack)
    limited = study(write_choices(tmp_path, **CHOICES), attack={"kind": "deepwordbug", "max_queries": 4})
    assert checked(limited)[0][0].most_samples == 12 * 5


@pytest.mark.parametrize(
    ("task", "attack", "field", "message"),
    [
        ({"doc_to_choice": "{{options}}"}, {}, "attack.labels", "benchmark even: no label is protected"),
        ({"doc_to_text": "{{question}} is it yes?"}, {}, "attack", "has no words that an attack may change"),
        ({"doc_to_text": "question"}, {}, "attack", "no single Jinja template"),
        ({}, {"kind": "bert", "model": "/no/such/bert"}, "attack.model", "/no/such/bert"),
    ],
)
def test_attacks_that_cannot_run_are_refused(
    tmp_path: Path, task: dict[str, Any], attack: dict[str, Any], field: str, message: str
) -> None:
    """Each is refused with its place before any engine starts."""
    file = write_choices(tmp_path, **{**CHOICES, **task})
    _, (problem,) = checked(study(file, attack={"kind": "deepwordbug", **attack}))
    assert problem.field == f"benchmarks.0.{field}"
    assert message in problem.message


def test_metric_of_which_less_is_better_is_refused(tmp_path: Path) -> None:
    """The drop rate is of a metric that falls when a model gets worse."""
    file = write_choices(tmp_path, **CHOICES)
    _, (problem,) = checked(study(file, direction="minimize", range=[0, 1]))
    assert (problem.field, "less" in problem.message) == ("benchmarks.0.attack", True)


def test_models_of_attacks_must_be_readable(tmp_path: Path) -> None:
    """A fill-mask model outside the directories that a study may read is refused like a model of the study."""
    attack = {"kind": "bert", "model": str(tmp_path / "bert"), "encoder": str(tmp_path / "encoder")}
    for name in ("bert", "encoder"):
        (tmp_path / name).mkdir()
    given = study(tmp_path / "even.yaml", attack=attack)
    with pytest.raises(FilesRefused) as refused:
        check_files(given, FileAccess(("/nowhere",)))
    places = {problem.field for problem in refused.value.problems}
    assert {"benchmarks.0.attack.model", "benchmarks.0.attack.encoder"} <= places
