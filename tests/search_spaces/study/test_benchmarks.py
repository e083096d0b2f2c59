"""The section `benchmarks`: accepted values, and the addition of benchmarks to a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.benchmarks import EVERY_TRIAL
from search_spaces.study.file import (
    Study,
    load_benchmarks,
    parse_benchmarks,
    parse_study,
    same_but_limits,
    with_benchmarks,
)
from tests.service.resolved import study_document

PIQA = {"name": "piqa", "task": "piqa", "metric": "acc"}
ARC = {"name": "arc", "task": "arc_easy", "metric": "acc", "group": "common sense"}


def study(*benchmarks: dict[str, Any], **changes: Any) -> Study:
    return parse_study({**study_document(), "benchmarks": list(benchmarks), **changes})


def problems(*benchmarks: Any, **changes: Any) -> list[str]:
    with pytest.raises(InvalidStudy) as refused:
        study(*benchmarks, **changes)
    return [f"{problem.field}: {problem.message}" for problem in refused.value.problems]


def test_a_benchmark_needs_no_objective() -> None:
    """Names and metrics of benchmarks are their own; by default, every kind of trial is scored."""
    found = study(PIQA, {**ARC, "trials": ["best", 3]}).benchmarks
    assert [(spec.name, spec.group, spec.trials) for spec in found] == [
        ("piqa", None, EVERY_TRIAL),
        ("arc", "common sense", ("best", 3)),
    ]


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"name": "arc"}, "benchmarks.1.name", "arc is also benchmarks.0"),
        ({"rungs": [3]}, "benchmarks.1.rungs", "rungs"),
        ({"trials": []}, "benchmarks.1.trials", "at least 1"),
        ({"trials": ["winners"]}, "benchmarks.1.trials.0", '"winners"'),
        ({"trials": [-1]}, "benchmarks.1.trials.0", "-1"),
        ({"trials": [True]}, "benchmarks.1.trials.0", "finalists, sources, published, recipes, best or the number"),
        ({"direction": "minimize"}, "benchmarks.1.range", "is missing; acc is minimised"),
        ({"cost": "layers"}, "benchmarks.1.cost", "is no benchmark; leave the entry out"),
        ({"metric": None}, "benchmarks.1.metric", "text"),
    ],
)
def test_mistakes_in_benchmarks_are_named(change: dict[str, Any], field: str, message: str) -> None:
    (problem,) = problems(ARC, {**PIQA, **change})
    assert problem.startswith(f"{field}: ")
    assert message in problem


def test_allowed_names_are_those_of_held_out_data() -> None:
    changes = {"contamination": {"allowed": ["piqa", "pica"]}}
    assert problems(PIQA, **changes) == ["contamination.allowed.1: pica is no holdout entry or benchmark; give piqa"]


def test_a_study_may_get_more_benchmarks(tmp_path: Path) -> None:
    """Benchmarks may be added, and scored on more trials; a known one keeps its task, and none is removed."""
    before = study(ARC)
    assert same_but_limits(before, study(ARC, PIQA)) == ()
    assert same_but_limits(before, study({**ARC, "trials": [4], "group": "other"})) == ()
    assert same_but_limits(before, study({**ARC, "num_fewshot": 5})) == ("benchmarks.arc",)
    assert same_but_limits(before, study(PIQA)) == ("benchmarks.arc",)
    added = with_benchmarks(before, parse_benchmarks({"benchmarks": [PIQA, {**ARC, "trials": [4]}]}))
    assert [(spec.name, spec.trials) for spec in added.benchmarks] == [
        ("arc", (*EVERY_TRIAL, 4)),
        ("piqa", EVERY_TRIAL),
    ]
    shares = {"allowed": ["piqa"], "max_share": 0.5}
    added = with_benchmarks(before, parse_benchmarks({"benchmarks": [PIQA], "contamination": shares}))
    assert (added.contamination.allowed, added.contamination.max_share) == (("piqa",), 0.5)
    assert with_benchmarks(added, parse_benchmarks({"benchmarks": [PIQA]})).contamination == added.contamination
    with pytest.raises(InvalidStudy, match="arc is a benchmark of this study with another task, metric or attack"):
        with_benchmarks(before, parse_benchmarks({"benchmarks": [{**ARC, "metric": "acc_norm"}]}))


def test_a_file_of_benchmarks_is_read_as_a_study_is(tmp_path: Path) -> None:
    """Paths are relative to the file, and mistakes are named as in a study file."""
    file = tmp_path / "benchmarks.yaml"
    file.write_text("benchmarks:\n  - {name: sums, task: {file: sums.jsonl}, metric: exact_match}\n")
    (spec,) = load_benchmarks(file).benchmarks
    assert (
        spec
        == study(
            {**PIQA, "name": "sums", "task": {"file": str(tmp_path / "sums.jsonl")}, "metric": "exact_match"}
        ).benchmarks[0]
    )
    for document, message in (
        ({"benchmarks": []}, "benchmarks"),
        ({}, "benchmarks: is missing"),
        ({"benchmarks": [PIQA, PIQA]}, "piqa is also benchmarks.0"),
        ({"benchmarks": [PIQA], "holdout": []}, "holdout"),
    ):
        with pytest.raises(InvalidStudy, match=message):
            parse_benchmarks(document)
