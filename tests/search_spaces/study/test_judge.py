"""The option `judge` of a benchmark: accepted values, and contradictions to other options of the benchmark."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import Study, parse_study
from tests.service.resolved import study_document

JUDGE = {"url": "http://127.0.0.1:8000/v1/", "model": "qwen"}
CHATS = {"name": "chats", "task": {"file": "/data/chats.jsonl"}, "metric": "win_rate", "judge": JUDGE}


def study(**changes: Any) -> Study:
    return parse_study({**study_document(), "benchmarks": [{**CHATS, **changes}]})


def test_judge_has_defaults() -> None:
    """The shipped prompt asks for a verdict; a judge may be away for an hour."""
    judge = study().benchmarks[0].judge
    assert judge is not None
    assert (judge.url, judge.model) == ("http://127.0.0.1:8000/v1/", "qwen")
    assert (judge.max_tokens, judge.concurrency, judge.timeout_s, judge.wait_s) == (512, 8, 120, 3600)
    for text in ("{{question}}", "{{first}}", "{{second}}", "[[1]]", "[[2]]", "[[tie]]"):
        assert text in judge.prompt


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"judge": None}, "judge", "is missing; the metric win_rate needs one: {url: URL, model: NAME}"),
        ({"metric": "exact_match"}, "metric", "exact_match is not what a judge gives; give win_rate"),
        ({"judge": {**JUDGE, "url": "judge:8000"}}, "judge.url", "judge:8000 is not the URL of an endpoint"),
        ({"judge": {**JUDGE, "url": "http://me:secret@judge/v1"}}, "judge.url", "is not the URL of an endpoint"),
        ({"judge": {**JUDGE, "prompt": "{{question}}?"}}, "judge.prompt", "has no {{first}} and no {{second}}; add it"),
        ({"judge": {**JUDGE, "wait_s": 0}}, "judge.wait_s", "0"),
        ({"attack": {"kind": "stress"}}, "attack", "with a judge cannot be attacked"),
        ({"direction": "minimize", "range": [0, 1]}, "direction", "win_rate is from 0 to 1, and more is better"),
        ({"range": [0, 5]}, "range", "win_rate is from 0 to 1, and more is better"),
        ({"task": {"file": "/d.jsonl", "program": "{{completion}}"}}, "judge", "judged by its execution"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidStudy) as refused:
        study(**changes)
    (problem,) = refused.value.problems
    assert problem.field == f"benchmarks.0.{field}"
    assert message in problem.message


def test_another_judge_is_another_benchmark() -> None:
    """Stored judgments of one judge do not hold for another one."""
    (first,), (second,) = study().benchmarks, study(judge={**JUDGE, "model": "llama"}).benchmarks
    assert first.is_same_task(first)
    assert not first.is_same_task(second)
