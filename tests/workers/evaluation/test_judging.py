"""The text that a judge reads about a task's samples, and the verdicts in its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.study.judge import JudgeSpec
from tests.conftest import write_choices
from workers.errors import InvalidTask
from workers.evaluation.judging import JudgedItem, judge_prompt, judged_items, preference_of, prompt_digest
from workers.evaluation.tasks import build_task
from workers.types import TaskSpec

PROMPT = JudgeSpec(url="http://j/v1", model="m").prompt


def inline(tmp_path: Path, count: int = 12, **options: Any) -> TaskSpec:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Say {n}.", "answer": f"number {n}"} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskSpec({"file": str(file), **options}, "length", permutation_seed=3)


def test_items_are_in_the_order_of_scoring(tmp_path: Path) -> None:
    """Position i has the question and the reference answer of the sample that engines score at position i."""
    spec = inline(tmp_path)
    items = judged_items(spec)
    with build_task(spec) as task:
        documents = [int(task.document(position)) for position in range(12)]
    assert documents != sorted(documents)
    assert items == tuple(JudgedItem(f"Say {n}.", f"number {n}") for n in documents)


def test_questions_have_no_few_shot_examples(tmp_path: Path) -> None:
    spec = inline(tmp_path)
    few = TaskSpec(spec.task, "length", num_fewshot=3, permutation_seed=3)
    assert judged_items(few) == judged_items(spec)


def test_task_that_does_not_generate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match="output type multiple_choice; a judge compares generated text"):
        judged_items(TaskSpec(str(write_choices(tmp_path)), "acc"))


def test_task_with_repeats_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"q": "a", "a": "b"}\n')
    file = tmp_path / "t.yaml"
    file.write_text(
        f"task: t\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\nrepeats: 4\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    with pytest.raises(InvalidTask, match="document 0: draws 4 completions of a prompt; a judge compares one"):
        judged_items(TaskSpec(str(file), "length"))


def test_prompt_has_both_orders_and_copies_texts_literally() -> None:
    """A text that itself looks like a placeholder is not replaced."""
    item = JudgedItem("What is {{first}}?", "{{second}}")
    straight = judge_prompt("{{question}} | {{ first }} | {{second}}", item, " mine ", is_swapped=False)
    swapped = judge_prompt("{{question}} | {{first}} | {{second}}", item, " mine ", is_swapped=True)
    assert straight == "What is {{first}}? | mine | {{second}}"
    assert swapped == "What is {{first}}? | {{second}} | mine"
    assert prompt_digest(straight) != prompt_digest(swapped)
    assert prompt_digest("half a pair \ud83d")


@pytest.mark.parametrize(
    ("answer", "straight", "swapped"),
    [
        ("[[1]]", 1.0, 0.0),
        ("Not [[1]], rather:\n[[ 2 ]]", 0.0, 1.0),
        ("both are good [[TIE]]", 0.5, 0.5),
        ("[1] is better", None, None),
        ("[[3]]", None, None),
        ("", None, None),
    ],
)
def test_last_verdict_counts(answer: str, straight: float | None, swapped: float | None) -> None:
    assert preference_of(answer, is_swapped=False) == straight
    assert preference_of(answer, is_swapped=True) == swapped


def test_shipped_prompt_has_each_text_once() -> None:
    prompt = judge_prompt(PROMPT, JudgedItem("QQ", "RR"), "CC", is_swapped=False)
    assert [prompt.count(text) for text in ("QQ", "RR", "CC")] == [1, 1, 1]
    assert prompt.index("CC") < prompt.index("RR")
