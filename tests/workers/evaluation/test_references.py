from __future__ import annotations

import json
from pathlib import Path

import pytest

from search_spaces.study.engine import EngineOptions
from tests.conftest import write_choices
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.evaluation.references import Reading, References, lack_of_references
from workers.types import Family, TaskSpec

OPTIONS = EngineOptions(max_model_len=200)


@pytest.fixture(scope="module")
def prompts(tied_family: Family) -> Prompts:
    return Prompts(tied_family.base.directory, OPTIONS)


def references(prompts: Prompts) -> References:
    return References(TaskEvaluator(None, prompts))


def yaml_task(directory: Path, rows: list[dict[str, object]], **settings: object) -> TaskSpec:
    import yaml

    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    config = {
        "task": "asked",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "Q: {{question}} A:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    file = directory / "asked.yaml"
    file.write_text(yaml.safe_dump(config | settings))
    return TaskSpec(str(file), "exact_match")


def text_of(prompts: Prompts, reading: Reading) -> tuple[str, str]:
    decode = prompts.tokenizer.decode
    return decode(reading.tokens[: reading.num_context]), decode(reading.tokens[reading.num_context :])


def test_an_inline_task_is_read_with_its_prompt_and_answer(prompts: Prompts, sums: TaskSpec) -> None:
    target = references(prompts).targets(sums)[0]
    (reading,) = target.readings
    document = int(text_of(prompts, reading)[0].partition("+")[0])
    assert text_of(prompts, reading) == (f"{document}+{document + 3}=", str(2 * document + 3))
    request = TaskEvaluator(None, prompts).requests(sums, 0)[0]
    assert reading.tokens[: reading.num_context] == request.tokens
    newline = prompts.encode("\n", special_tokens=False)
    assert set(reading.ends) == {*prompts.stop_token_ids, *newline}
    assert (target.right, target.scales) == ((0,), None)
    assert target.size == len(reading.tokens) - reading.num_context + 1


def test_a_generating_task_is_read_with_its_delimiter_and_stops(prompts: Prompts, tmp_path: Path) -> None:
    task = yaml_task(
        tmp_path, [{"question": "one or two?", "answer": "two\nor one"}, {"question": "?", "answer": "a" * 60}]
    )
    by_question = {
        text_of(prompts, target.readings[0])[0]: target.readings[0] for target in references(prompts).targets(task)
    }
    two = by_question["Q: one or two? A:"]
    assert text_of(prompts, two)[1] == " two"  # what follows a stop string is never generated
    assert two.ends
    long = by_question["Q: ? A:"]
    assert len(long.tokens) - long.num_context == 20  # as many as are generated, and then nothing ends it
    assert long.ends == ()


def test_a_models_own_completion_is_read_as_it_was_generated(
    prompts: Prompts, sums: TaskSpec, choices: TaskSpec
) -> None:
    found = references(prompts)
    (reference,) = found.targets(sums)[0].readings
    answer = tuple(prompts.encode("12 is it", special_tokens=False))
    ended = found.of_completion(sums, 0, (*answer, reference.ends[0]))
    assert ended.readings == (
        Reading((*reference.tokens[: reference.num_context], *answer), reference.num_context, reference.ends),
    )
    assert (ended.right, ended.scales) == ((0,), None)
    (cut,) = found.of_completion(sums, 0, answer).readings
    assert (cut.tokens, cut.ends) == (ended.readings[0].tokens, ()), (
        "after the last token that was allowed nothing is read"
    )
    with pytest.raises(InvalidTask, match="sample 0: its answer is an option, not a completion"):
        found.of_completion(choices, 0, answer)


def test_several_answers_are_alternatives(prompts: Prompts, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"question": "?", "answers": ["two", "2", "two"]}]
    task = yaml_task(tmp_path, rows, doc_to_target="answers")
    (target,) = references(prompts).targets(task)
    assert [text_of(prompts, reading)[1] for reading in target.readings] == [" two", " 2"]
    assert (target.right, target.scales) == ((0, 1), None)


def test_a_multiple_choice_is_read_with_all_options(prompts: Prompts, choices: TaskSpec) -> None:
    built = TaskEvaluator(None, prompts)
    found = References(built)
    for position, target in enumerate(found.targets(choices)):
        document = built.document(choices, position).instances[0].doc
        assert [text_of(prompts, reading)[1].strip() for reading in target.readings] == document["options"]
        assert target.right == (document["gold"],)
        assert target.scales == (1.0, 1.0, 1.0)
        assert all(not reading.ends for reading in target.readings)
    assert found.unit(choices) == pytest.approx(1.0986123)  # ln 3


def test_options_are_compared_by_length_where_the_metric_does(prompts: Prompts, tmp_path: Path) -> None:
    metrics = [{"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}]
    task = TaskSpec(str(write_choices(tmp_path, metric_list=metrics)), "acc_norm")
    scales = references(prompts).targets(task)[0].scales
    assert scales == pytest.approx((10 / 3 / 3, 10 / 3 / 2, 10 / 3 / 5))  # yes, no, maybe


def test_a_likelihood_task_is_read_as_it_is_scored(prompts: Prompts, tmp_path: Path) -> None:
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    rows: list[dict[str, object]] = [{"question": "go on", "answer": " now"}]
    task = yaml_task(tmp_path, rows, output_type="loglikelihood", metric_list=metrics)
    task = TaskSpec(task.task, "acc")
    (target,) = references(prompts).targets(task)
    assert [text_of(prompts, reading)[1] for reading in target.readings] == [" now"]
    assert lack_of_references(task) is None


def test_tasks_with_references_lack_nothing(sums: TaskSpec, choices: TaskSpec) -> None:
    assert lack_of_references(sums) is None
    assert lack_of_references(choices) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"doc_to_target": 0}, "task asked: its target is the number 0, not an answer"),
        ({"doc_to_target": " "}, "task asked: its target is an empty text"),
        ({"doc_to_target": "info"}, "task asked: its target cannot be read: TypeError: {'a': 1} is no text"),
    ],
)
def test_what_a_task_lacks_is_said(prompts: Prompts, tmp_path: Path, settings: dict[str, object], message: str) -> None:
    rows: list[dict[str, object]] = [{"question": "?", "answer": "two", "info": {"a": 1}}]
    task = yaml_task(tmp_path, rows, **settings)
    assert lack_of_references(task) == message
    with pytest.raises(InvalidTask, match="document 0: has no reference: its target "):
        references(prompts).targets(task)


def test_a_choice_whose_target_is_no_option_is_said(tmp_path: Path) -> None:
    task = TaskSpec(str(write_choices(tmp_path, doc_to_target="{{gold + 7 * (gold // 2)}}")), "acc")
    assert lack_of_references(task) == "task choices: its target names none of the options"
