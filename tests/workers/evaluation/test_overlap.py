"""Items that two tasks share: equal items, and items with 13 consecutive words in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from workers.evaluation.overlap import Item, SearchItems, items_of, overlapping
from workers.types import TaskSpec

WORDS = [f"word{i}" for i in range(40)]


def items(*texts: str) -> list[Item]:
    return [Item(str(index), text) for index, text in enumerate(texts)]


def text(start: int, stop: int) -> str:
    return " ".join(WORDS[start:stop])


def write(file: Path, prompts: Sequence[str]) -> TaskSpec:
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "yes"}) + "\n" for prompt in prompts))
    return TaskSpec({"file": str(file), "prompt": "{{prompt}}", "answer": "{{answer}}"}, "exact_match", content=None)


def test_equal_items_overlap_however_short() -> None:
    """Case and white space do not matter; another answer is another item."""
    found = SearchItems({"sums": items("1 + 1 =\n2", "1 + 2 =\n3")}).overlapping(items("1 +  1 = 2", "1 + 2 =\n4"))
    assert (found.num_items, found.num_exact, found.num_overlapping) == (2, 1, 1)
    assert found.examples == ("0",)


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not() -> None:
    index = SearchItems({"a": items(text(0, 20), "other"), "b": items("x", "y")})
    found = index.overlapping(items(f"before, {text(3, 16).upper()}! after", f"before {text(3, 15)} after"))
    assert (found.num_exact, found.num_overlapping) == (0, 1)
    assert found.by_other == {"a": 1}


@pytest.mark.parametrize(("num_repeats", "num_overlapping"), [(10, 1), (11, 0)])
def test_words_of_the_task_itself_do_not_count(num_repeats: int, num_overlapping: int) -> None:
    """An instruction is in more than ten items, so items of other data with it do not overlap."""
    searched = [f"{text(0, 13)} question{i}" if i < num_repeats else f"question{i}" for i in range(40)]
    found = SearchItems({"a": items(*searched)}).overlapping(items(f"{text(0, 13)} another"))
    assert found.num_overlapping == num_overlapping


def test_an_instruction_of_a_small_task_does_not_count() -> None:
    found = SearchItems({"a": items(*(f"{text(0, 13)} q{i}" for i in range(4)))}).overlapping(
        items(f"{text(0, 13)} another")
    )
    assert found.num_overlapping == 0


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    sentence = "太郎は市場で林檎を七つ買いました"
    found = SearchItems({"ja": items(f"問題一。{sentence}。", "別の問題")}).overlapping(items(f"問題二。{sentence}か"))
    assert (found.num_exact, found.num_overlapping) == (0, 1)


def test_tasks_are_compared_by_their_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and answers of a JSONL file; the result is found again in the cache, and not when a file has changed."""
    monkeypatch.setenv("MERGESEARCH_CACHE", str(tmp_path / "cache"))
    search = write(tmp_path / "search.jsonl", [f"{i} is even?" for i in range(20)])
    other = write(tmp_path / "other.jsonl", [f"{i} is even?" for i in range(15, 25)])
    assert next(items_of(other)).text == "15 is even?\nyes"
    found = overlapping({"even": search}, {"other": other})["other"]
    assert (found.num_items, found.num_exact, found.by_other) == (10, 5, {"even": 5})
    assert overlapping({"even": search}, {"other": other})["other"] == found


def test_prompts_of_lm_eval_tasks_have_no_examples(tmp_path: Path) -> None:
    """An item of an lm-eval task is its document alone, with options and answers, and without few-shot examples."""
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"q": f"What is {i}?", "options": ["odd", "even"], "a": i % 2}) + "\n" for i in range(6))
    )
    (tmp_path / "parity.yaml").write_text(
        "task: parity\ndataset_path: json\ndataset_kwargs: {data_files: {test: data.jsonl}}\ntest_split: test\n"
        "fewshot_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{options}}'\n"
        "doc_to_target: '{{a}}'\nmetric_list: [{metric: acc}]\n"
    )
    found = list(items_of(TaskSpec(str(tmp_path / "parity.yaml"), "acc", num_fewshot=2)))
    assert [item.name for item in found] == [str(i) for i in range(6)]
    assert found[0].text == "What is 0?\n odd\n even"
