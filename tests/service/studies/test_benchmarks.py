"""Benchmarks that are added to a study, and those of a single model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import parse_benchmarks, parse_study
from service.studies.benchmarks import check_added, model_study, study_with
from service.studies.preflight.examine import examine
from service.types import JobRecord, JobState, Origin
from tests.service.resolved import resolved_study, study_document
from workers.file_access import FileAccess
from workers.tiny_family import family_dir


def added(*benchmarks: dict[str, Any], **more: Any) -> Any:
    return parse_benchmarks({"benchmarks": list(benchmarks), **more})


def sums(file: Path, numbers: range, **changes: Any) -> dict[str, Any]:
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in numbers]
    file.write_text("\n".join(lines) + "\n")
    return {"name": file.stem, "task": {"file": str(file), "max_tokens": 8}, "metric": "exact_match", **changes}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobRecord:
    monkeypatch.setenv("MERGESEARCH_CACHE", str(tmp_path / "cache"))
    experts = {name: str(family_dir() / "experts" / name) for name in ("math", "text")}
    document = {
        **study_document(),
        "models": {"base": str(family_dir() / "base"), "experts": experts},
        "objectives": [sums(tmp_path / "search.jsonl", range(100))],
        "engine": {"max_model_len": 64},
    }
    access = FileAccess((str(tmp_path),))
    return JobRecord(
        id="c0ffee",
        name="sums",
        state=JobState.COMPLETE,
        document=parse_study(document).canonical(),
        accepted=resolved_study(access=access).to_json(),
        created_at=0.0,
        kind="search",
    )


def problems(
    stored: JobRecord, *benchmarks: dict[str, Any], access: FileAccess | None = None, **more: Any
) -> list[str]:
    """Problems found by the checks of added benchmarks."""
    try:
        check_added(study_with(stored, added(*benchmarks, **more), trials={0, 1}).canonical(), stored, access)
    except InvalidStudy as error:
        return [f"{problem.field}: {problem.message}" for problem in error.problems]
    return []


def test_added_benchmarks_are_built_and_compared(stored: JobRecord, tmp_path: Path) -> None:
    """A good one is accepted; one of the search data is refused, unless the file allows it; so are wrong metrics."""
    good, seen = sums(tmp_path / "good.jsonl", range(100, 120)), sums(tmp_path / "seen.jsonl", range(20))
    assert problems(stored, good) == []
    (refused,) = problems(stored, good, seen)
    assert refused.startswith(
        "benchmarks.1.task: 20 of the 20 items of seen are also in the search data of search (20)"
    )
    assert problems(stored, good, seen, contamination={"allowed": ["seen"]}) == []
    long = {**good, "task": {**good["task"], "max_tokens": 64}}
    assert problems(stored, long)[0].startswith("benchmarks.0.task.max_tokens: 64 leaves no room for a prompt")
    assert problems(stored, {**good, "metric": "acc"}) == [
        f"benchmarks.0.metric: task {tmp_path}/good.jsonl: unknown metric 'acc'; an inline task has exact_match and "
        "length"
    ]


def test_files_must_be_allowed_now_and_then(stored: JobRecord, tmp_path: Path) -> None:
    """By what the server allows, and by what it allowed when the study was created; both are checked first."""
    good = sums(tmp_path / "good.jsonl", range(100, 120))
    for access, of_study in ((FileAccess(("/nowhere",)), None), (None, FileAccess(("/nowhere",)))):
        facts = resolved_study(access=of_study).to_json()
        (refused,) = problems(replace(stored, accepted=facts), good, access=access)
        assert refused.startswith("benchmarks.0.task.file: ")
        assert "/nowhere" in refused
    (relative,) = problems(stored, {**good, "task": {"file": "good.jsonl"}})
    assert relative.endswith("good.jsonl: is relative; give an absolute path on the server")


def test_a_study_keeps_its_engine(stored: JobRecord, tmp_path: Path) -> None:
    good = sums(tmp_path / "good.jsonl", range(100, 120))
    assert problems(stored, good, engine={"replicas": 2}) == [
        "engine: 'sums' keeps its own engine; leave it out, it is for a model that is no study's"
    ]


def test_groups_have_one_direction_and_range(stored: JobRecord, tmp_path: Path) -> None:
    one = sums(tmp_path / "one.jsonl", range(100, 120), group="all")
    other = sums(tmp_path / "other.jsonl", range(120, 140), group="all", range=[0, 100])
    (refused,) = problems(stored, one, other)
    assert refused == (
        "benchmarks.1.group: all: other (maximize, [0.0, 100.0]) and one (maximize, [0.0, 1.0]) have no common "
        "average; give one of them another group"
    )


@pytest.mark.slow
def test_a_model_alone_is_a_study_without_a_search(tmp_path: Path) -> None:
    """It passes every check of a study, has one trial, and its engine is the file's."""
    good = sums(tmp_path / "good.jsonl", range(100, 120))
    study = model_study(str(family_dir() / "base"), added(good, engine={"max_model_len": 64, "verify": False}))
    found = examine(study)
    ((origin, label, recipe),) = found.baselines()
    assert (origin, label) == (Origin.USER, "base")
    assert {merge.method for merge in recipe.merges()} == {"passthrough"}
    assert found.study.engine.max_model_len == 64
    assert [benchmark.facts.num_samples for benchmark in found.tasks.benchmarks] == [20]
    assert found.expected_samples().search == 0
    assert found.expected_samples().benchmarks == 20
