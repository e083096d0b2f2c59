"""The contamination guard: refused and allowed overlaps, and the decision kept by a study that continues."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import Study, parse_study
from service.studies.preflight.contamination import check_overlaps, overlaps_of, unsearched_names
from service.studies.preflight.tasks import task_spec
from tests.service.resolved import study_document


def entry(directory: Path, name: str, numbers: Iterable[int], file: str) -> dict[str, Any]:
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in numbers]
    (directory / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return {"name": name, "task": {"file": str(directory / f"{file}.jsonl")}, "metric": "exact_match"}


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A study that searches 2 of its 40 held-out sums, and 10 of the 20 sums of its benchmark."""
    monkeypatch.setenv("MERGESEARCH_CACHE", str(tmp_path / "cache"))
    return {
        **study_document(),
        "objectives": [entry(tmp_path, "sums", range(100), "search")],
        "holdout": [entry(tmp_path, "sums", range(98, 138), "holdout")],
        "benchmarks": [entry(tmp_path, "more", range(90, 110), "more")],
    }


def check(study: Study, **options: Any) -> None:
    check_overlaps(study, *tasks_of(study), **options)


def tasks_of(study: Study) -> Any:
    def specs(entries: Iterable[Any]) -> Any:
        return {spec.name: task_spec(spec, seed=0, access=None) for spec in entries}

    return specs(study.objectives), {"holdout": specs(study.holdout), "benchmarks": specs(study.benchmarks)}


def test_too_much_overlap_is_refused_with_numbers(document: dict[str, Any]) -> None:
    """A share of 5 % is accepted by default, a larger one is not; the message says how to accept it."""
    with pytest.raises(InvalidStudy) as refused:
        check(parse_study(document))
    (problem,) = refused.value.problems
    assert problem.field == "benchmarks.0.task"
    assert problem.message == (
        "10 of the 20 items of more are also in the search data of sums (10): 10 are equal, the others have 13 words "
        "in a row in common; that is 50.0%, above contamination.max_share=0.05. Use other data, or accept it: "
        "contamination: {allowed: [more]}"
    )


def test_a_share_may_be_allowed(document: dict[str, Any]) -> None:
    """By name or by a larger share; a smaller one refuses more."""
    check(parse_study({**document, "contamination": {"allowed": ["more"]}}))
    check(parse_study({**document, "contamination": {"max_share": 0.5}}))
    with pytest.raises(InvalidStudy) as refused:
        check(parse_study({**document, "contamination": {"max_share": 0}}))
    assert [problem.field for problem in refused.value.problems] == ["holdout.0.task", "benchmarks.0.task"]


def test_what_was_accepted_is_not_refused_later(document: dict[str, Any]) -> None:
    """A study that continues is not refused, but a benchmark that it gets is."""
    study = parse_study(document)
    check(study, accepted=unsearched_names(study))
    with pytest.raises(InvalidStudy):
        check(study, accepted=unsearched_names(parse_study({**document, "benchmarks": []})))


def test_overlaps_are_reported_for_every_entry(document: dict[str, Any]) -> None:
    study = parse_study({**document, "contamination": {"allowed": ["more"]}})
    found = overlaps_of(study, *tasks_of(study))
    assert [(each.section, each.name, each.num_ngrams, each.share, each.is_allowed) for each in found] == [
        ("holdout", "sums", 2, 0.05, False),
        ("benchmarks", "more", 10, 0.5, True),
    ]
