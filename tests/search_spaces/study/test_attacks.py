"""The option `attack` of a benchmark: accepted values, and their reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.attacks import BertAttack, DeepWordBugAttack, StressAttack
from search_spaces.study.file import Study, load_benchmarks, parse_study, same_but_limits
from tests.service.resolved import study_document

SST2 = {"name": "sst2", "task": "sst2", "metric": "acc"}


def study(attack: Any) -> Study:
    return parse_study({**study_document(), "benchmarks": [{**SST2, "attack": attack}]})


def test_kinds_have_the_defaults_of_promptbench() -> None:
    """30 edits, 48 candidates and a similarity of 0.8; no limit of queries, and labels are the task's options."""
    kinds = ({"kind": "stress"}, {"kind": "deepwordbug"}, {"kind": "bert", "model": "/bert"})
    assert [study(kind).benchmarks[0].attack for kind in kinds] == [
        StressAttack(kind="stress", labels=None, max_queries=None),
        DeepWordBugAttack(kind="deepwordbug", labels=None, max_queries=None, max_edits=30),
        BertAttack(kind="bert", model="/bert", encoder=None, candidates=48, min_similarity=0.8),
    ]
    assert parse_study({**study_document(), "benchmarks": [SST2]}).benchmarks[0].attack is None


@pytest.mark.parametrize(
    ("attack", "field", "message"),
    [
        ({"kind": "textfooler"}, "", "give {kind: stress}, {kind: deepwordbug} or {kind: bert, model: DIR}"),
        ("stress", "", "give {kind: stress}"),
        ({"labels": ["a"]}, "", "give {kind: stress}"),
        ({"kind": "bert"}, ".model", "is missing"),
        ({"kind": "stress", "model": "/bert"}, ".model", "unknown key"),
        ({"kind": "stress", "labels": []}, ".labels", "at least 1"),
        ({"kind": "deepwordbug", "max_edits": 0}, ".max_edits", "1"),
        ({"kind": "deepwordbug", "max_queries": 0}, ".max_queries", "1"),
        ({"kind": "bert", "model": "/bert", "min_similarity": 2}, ".min_similarity", "1"),
    ],
)
def test_mistakes_in_attacks_are_named(attack: Any, field: str, message: str) -> None:
    """Each mistake is reported once, with its place and what is accepted."""
    with pytest.raises(InvalidStudy) as refused:
        study(attack)
    (problem,) = refused.value.problems
    assert problem.field == f"benchmarks.0.attack{field}"
    assert message in problem.message


def test_models_of_attacks_are_relative_to_the_file(tmp_path: Path) -> None:
    """A directory is relative to the file, like those of the study's models; a hub id stays."""
    file = tmp_path / "benchmarks.yaml"
    attack = "{kind: bert, model: ./bert, encoder: sentence-transformers/all-MiniLM-L6-v2}"
    file.write_text(f"benchmarks:\n  - {{name: sst2, task: sst2, metric: acc, attack: {attack}}}\n")
    (spec,) = load_benchmarks(file).benchmarks
    assert isinstance(spec.attack, BertAttack)
    assert (spec.attack.model, spec.attack.encoder) == (
        str(tmp_path / "bert"),
        "sentence-transformers/all-MiniLM-L6-v2",
    )


def test_a_benchmark_keeps_its_attack() -> None:
    """An attack of a stored benchmark is not changed, because its results are stored under the benchmark's name."""
    before = study({"kind": "stress"})
    assert same_but_limits(before, study({"kind": "stress"})) == ()
    assert same_but_limits(before, study({"kind": "deepwordbug"})) == ("benchmarks.sst2",)
