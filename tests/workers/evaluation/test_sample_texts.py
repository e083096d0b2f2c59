"""Prompts and right answers of samples as text."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import write_choices
from tests.workers.evaluation.test_judging import inline
from workers.evaluation.sample_texts import sample_texts
from workers.evaluation.tasks import build_task
from workers.types import TaskSpec


def test_texts_are_in_the_order_of_scoring(tmp_path: Path) -> None:
    """Position i has the prompt and the right answer of the sample that engines score at position i."""
    spec = inline(tmp_path)
    with build_task(spec) as task:
        documents = [int(task.document(position)) for position in range(7)]
    assert documents != sorted(documents)
    expected = tuple((f"Say {n}.", f"number {n}") for n in documents)
    assert sample_texts(spec, 0, 7) == expected
    assert sample_texts(spec, 3, 7) == expected[3:]
    assert len(sample_texts(spec, 0, 10**6)) == 12


def test_a_multiple_choice_has_its_right_option(tmp_path: Path) -> None:
    spec = TaskSpec(str(write_choices(tmp_path)), "acc")
    texts = sample_texts(spec, 0, 3)
    assert len(texts) == 3
    with build_task(spec) as task:
        for position, (prompt, reference) in enumerate(texts):
            _, index = task.order[position]
            built = task.subtasks[0].task
            document = built.eval_docs[index]
            assert prompt == built.doc_to_text(document)
            assert reference == str(built.doc_to_choice(document)[built.doc_to_target(document)]).strip()
