"""Metrics of single answers: their values, and the tasks that have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from tests.conftest import write_choices
from workers.errors import InvalidTask
from workers.evaluation.built_tasks import Answers
from workers.evaluation.metrics import LocalMetrics
from workers.evaluation.sample_metrics import METRICS, sari
from workers.evaluation.tasks import build_task, check_task
from workers.types import TaskSpec

SOURCE = "About 95 species are currently accepted."
SIMPLER = (
    "About 95 species are currently known.",
    "About 95 species are now accepted.",
    "95 species are now accepted.",
)


def test_sari_has_the_published_value() -> None:
    """The example of the metric's publication, as Hugging Face's metric documents it."""
    assert sari(SOURCE, SIMPLER, "About 95 you now get in.") == pytest.approx(0.26953601953601954)


@pytest.mark.parametrize(
    ("answer", "references", "value"),
    [
        ("b c", ["b c"], 1.0),  # everything that was to be kept is, and what was to be deleted is gone
        # The source unchanged: 2 of 3 words, 1 of 2 pairs and 0 of 1 triple are kept rightly, and all that could be;
        # nothing is deleted or added.
        ("a b c", ["b c"], ((4 / 5 + 1 + 1) + (2 / 3 + 1 + 1) + (0 + 1 + 1) + (1 + 1 + 1)) / 12),
    ],
)
def test_sari_by_hand(answer: str, references: list[str], value: float) -> None:
    assert sari("a b c", references, answer) == pytest.approx(value)


def test_chrf_of_a_sentence_is_sacrebleus() -> None:
    """The value is a hundredth of sacrebleu's, with the best of several references."""
    value = METRICS["sentence_chrf"]
    for answer in ("the cat sat", "a dog", ""):
        wanted = sacrebleu.sentence_chrf(answer, ["the cat sat down", "a cat"]).score / 100
        assert value("", ["the cat sat down", "a cat"], answer) == pytest.approx(wanted)


def test_rouge_l_is_the_f_measure_of_the_longest_part() -> None:
    """By hand: 3 of 4 words of the answer and 3 of 6 of the reference are common, in order."""
    assert METRICS["rouge_l"]("", ["police killed the gunman last night"], "police kill the gunman") == pytest.approx(
        0.6
    )
    assert METRICS["rouge_l"]("", ["x", "a b"], "a b") == 1.0


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("x = <NUM_LIT:1>", "x = 1", 1.0),
        ("print(<STR_LIT>)", "print()", 1.0),
        ("abcd", "bcde", 0.75),  # 2 * 3 of 8 characters
        ("", "a", 0.0),
    ],
)
def test_edit_similarity_of_code(answer: str, reference: str, value: float) -> None:
    assert METRICS["edit_similarity"]("", [reference], answer) == value


def generating(directory: Path, **settings: Any) -> str:
    rows = [{"source": SOURCE, "simple": SIMPLER[0]}, {"source": "A b c d.", "simple": "A b."}]
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "fewshot_split": None,
        "output_type": "generate_until",
        "doc_to_text": "{{source}}",
        "doc_to_choice": None,
        "doc_to_target": "{{simple}}",
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return str(write_choices(directory, **(config | settings)))


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_generating_task_has_them(tmp_path: Path, metric: str) -> None:
    """The value of a sample is the metric of prompt, right answer and completion."""
    spec = TaskSpec(generating(tmp_path), metric)
    task = build_task(spec)
    assert task.info.higher_is_better
    metrics = LocalMetrics()
    metrics.open(task, (dict(enumerate(task.subtasks[0].task.eval_docs)),))
    text = "About 95 species are known."
    (value,) = metrics.values(spec.digest, [Answers(0, 0, ((text,),))])
    assert value == METRICS[metric](SOURCE, [SIMPLER[0]], text)


@pytest.mark.parametrize("metric", ["chrf", "bleu", "ter"])
@pytest.mark.parametrize("stated", [{}, {"aggregation": "mean"}])
def test_corpus_metrics_are_refused_with_what_to_use(tmp_path: Path, metric: str, stated: dict[str, str]) -> None:
    """A metric of all answers has no value for one, also where a file says `aggregation: mean`."""
    file = generating(tmp_path, metric_list=[{"metric": metric, "higher_is_better": True, **stated}])
    with pytest.raises(
        InvalidTask, match=r"metric .* (aggregated by|not a number).*; use sentence_chrf instead"
    ) as error:
        check_task(TaskSpec(file, metric))
    assert error.value.field == "metric"
    assert check_task(TaskSpec(file, "sentence_chrf")).num_samples == 2


@pytest.mark.parametrize("metric", ["mcc", "f1", "brier_score", "likelihood"])
def test_choices_have_the_accuracy(tmp_path: Path, metric: str) -> None:
    """Tasks with F1 or Matthews' correlation alone, as in GLUE, have the accuracy, with lm-eval's values."""
    listed = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
    file = str(write_choices(tmp_path, metric_list=listed))
    with pytest.raises(InvalidTask, match=r"not a number.*; use acc instead"):
        check_task(TaskSpec(file, metric))
    spec = TaskSpec(file, "acc")
    task = build_task(spec)
    metrics = LocalMetrics()
    metrics.open(task, (dict(enumerate(task.subtasks[0].task.eval_docs)),))
    scores = (((-1.0, False),), ((-0.5, False),), ((-2.0, False),))
    assert metrics.values(spec.digest, [Answers(0, i, scores) for i in range(3)]) == [0.0, 1.0, 0.0]


def test_checking_a_metric_changes_no_examples(tmp_path: Path) -> None:
    """The made-up answer by which a metric is checked draws no few-shot examples."""
    spec = TaskSpec(str(write_choices(tmp_path)), "acc", num_fewshot=2)
    prompts = []
    for _ in range(2):
        task = build_task(spec).subtasks[0].task
        task.build_all_requests()
        prompts.append([instance.args[0] for instance in task.instances])
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests()
    assert prompts[0] == prompts[1] == [instance.args[0] for instance in task.instances]


def test_metrics_of_other_tasks_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=r"unknown metric 'sari'; it has acc$"):
        check_task(TaskSpec(str(write_choices(tmp_path)), "sari"))
    with pytest.raises(InvalidTask, match="it has exact_match, and every such task sentence_chrf, rouge_l, sari"):
        check_task(TaskSpec(generating(tmp_path), "acc"))
