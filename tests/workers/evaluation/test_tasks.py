import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from tests.conftest import write_choices
from workers.errors import InvalidTask
from workers.evaluation.built_tasks import PromptSettings, documents_of, permutation
from workers.evaluation.inline_files import read_inline
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Generation, Prompts
from workers.evaluation.tasks import build_task, check_task
from workers.types import TaskSpec

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'


def inline(file: Path, text: str | bytes, **task: object) -> dict[str, object]:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return {"file": str(file), **task}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + '{"prompt": "x", "answer"\n', r"line 2: not JSON \(.* at column 25\)"),
        (GOOD + "\n[1, 2]\n", "line 3: expected a JSON object, found list"),
        (
            GOOD + '{"prompt": "x"}\n',
            "line 2: answer template '{{answer}}': 'answer' is undefined; fields here are prompt",
        ),
        (GOOD + '{"prompt": "", "answer": "x"}\n', "line 2: the prompt is empty"),
        (GOOD.encode() + b'{"prompt": "\xff", "answer": "x"}\n', "line 2: not UTF-8"),
        ("", "holds no samples"),
        ("\n \n", "holds no samples"),
    ],
)
def test_bad_line_is_named_with_its_number(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidTask, match=message):
        check_task(TaskSpec(inline(tmp_path / "a.jsonl", text), "exact_match"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=r"no\.jsonl: cannot be read"):
        check_task(TaskSpec({"file": str(tmp_path / "no.jsonl")}, "exact_match"))


def test_templates_are_rendered_and_broken_ones_refused(tmp_path: Path) -> None:
    task = inline(tmp_path / "a.jsonl", '{"q": "why", "a": {"text": "so"}}\n', prompt="Q: {{q}}\n", answer="{{a.text}}")
    assert [(row.prompt, row.answer) for row in read_inline(task)] == [("Q: why\n", "so")]
    with pytest.raises(InvalidTask, match=r"prompt template '\{\{q' is not valid"):
        read_inline({**task, "prompt": "{{q"})


@pytest.mark.parametrize(
    "template",
    [
        "{{ {}[key] }}",
        "{{ key.nothing }}",
        "{{ [].index(key) }}",
        "{{ {}.pop(key) }}",
        "{{ 1 / key }}",
        "{{ key | int(x) }}",
    ],
)
def test_messages_about_templates_do_not_quote_the_data(tmp_path: Path, template: str) -> None:
    task = inline(tmp_path / "kaggle.json", '{"user": "someone", "key": "SECRET-0123"}\n', prompt=template, answer="x")
    with pytest.raises(InvalidTask, match=r"line 1: prompt template .*: ") as caught:
        check_task(TaskSpec(task, "exact_match"))
    assert "SECRET" not in str(caught.value)


def test_lines_that_are_no_objects_are_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=r"line 1: expected a JSON object, found str$"):
        check_task(TaskSpec(inline(tmp_path / "token.json", '"SECRET-0123"\n'), "exact_match"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "acc"}, "unknown metric 'acc'; an inline task has exact_match"),
        ({"filter": "strict"}, "unknown filter 'strict'"),
        ({"split": "test"}, "an inline file has no splits"),
        ({"num_fewshot": 1}, "num_fewshot 1 needs more than its 1 samples"),
        ({"content": "0" * 64}, "has changed since the study was planned"),
    ],
)
def test_inline_task_refuses_what_it_has_not(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    task = inline(tmp_path / "a.jsonl", GOOD)
    fields: dict[str, Any] = {"task": task, "metric": "exact_match", **changes}
    with pytest.raises(InvalidTask, match=message):
        check_task(TaskSpec(**fields))
    assert check_task(TaskSpec(task, "exact_match", content=hashlib.sha256(GOOD.encode()).hexdigest())).num_samples == 1


def test_inline_answers_are_compared_as_stripped_text(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": " [1, 2] "}, {"prompt": "b", "answer": "7"}, {"prompt": "c", "answer": "x y"}]
    task = build_task(TaskSpec(inline(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))), "exact_match"))
    lm_task = task.subtasks[0].task

    def value(index: int, completion: str) -> float:
        return float(lm_task.process_results(lm_task.eval_docs[index], [completion])["exact_match"])

    assert value(0, "[1, 2]") == 1.0
    assert value(1, " 7\n") == 1.0
    assert value(1, "07") == 0.0
    assert value(2, "xy") == 0.0


def test_few_shot_leaves_the_sample_out(tmp_path: Path) -> None:
    """Few-shot prompts of an inline task leave out the asked sample."""
    rows = [{"prompt": f"{i}?", "answer": f"<{i}>"} for i in range(4)]
    spec = TaskSpec(inline(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))), "exact_match", num_fewshot=3)
    task = build_task(spec).subtasks[0].task
    task.build_all_requests()
    for i, instance in enumerate(task.instances):
        context = instance.args[0]
        assert context.endswith(f"{i}?")
        assert context.count("<") == 3
        assert f"<{i}>" not in context


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 3))
def test_every_prefix_holds_the_groups_in_proportion(sizes: list[int], seed: int) -> None:
    order = permutation({f"g{i}": size for i, size in enumerate(sizes)}, seed=seed)
    assert sorted(order) == sorted((group, i) for group, size in enumerate(sizes) for i in range(size))
    total, counts = sum(sizes), Counter[int]()
    for length, (group, _) in enumerate(order, start=1):
        counts[group] += 1
        for each, size in enumerate(sizes):
            # Rounding each group leaves the prefix at most half a sample per group away from its exact place.
            assert abs(counts[each] - length * size / total) <= 0.5 + len(sizes) * 0.5 * size / total
        if len(set(sizes)) == 1:
            assert (
                max(counts[each] for each in range(len(sizes))) - min(counts[each] for each in range(len(sizes))) <= 1
            )


def test_permutation_depends_on_the_seed_and_on_nothing_else() -> None:
    assert permutation({"a": 50}, seed=1) == permutation({"a": 50}, seed=1)
    assert permutation({"a": 50}, seed=1) != permutation({"a": 50}, seed=2)
    # Pinned: stored studies refer to positions.
    assert [index for _, index in permutation({"a": 8}, seed=0)] == [3, 5, 2, 6, 4, 0, 1, 7]


def test_yaml_task_is_built_from_files_beside_it(choices: TaskSpec) -> None:
    info = check_task(choices)
    assert (info.num_samples, info.higher_is_better, info.output_type) == (12, True, "multiple_choice")
    train = TaskSpec(choices.task, "acc", split="train")
    assert check_task(train).num_samples == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "f2"}, "unknown metric 'f2'; it has acc"),
        ({"filter": "strict-match"}, "unknown filter 'strict-match'; it has none"),
        ({"split": "dev"}, "no split 'dev'; its data has test, train"),
    ],
)
def test_yaml_task_refuses_what_it_has_not(choices: TaskSpec, changes: dict[str, str], message: str) -> None:
    fields: dict[str, Any] = {"task": choices.task, "metric": "acc", **changes}
    with pytest.raises(InvalidTask, match=message):
        check_task(TaskSpec(**fields))


def test_metric_that_is_no_mean_is_refused_by_its_aggregation(tmp_path: Path) -> None:
    file = write_choices(
        tmp_path, metric_list=[{"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False}]
    )
    with pytest.raises(InvalidTask, match="'brier_score' is aggregated by brier_score, not by the mean"):
        check_task(TaskSpec(str(file), "brier_score"))


def test_flag_and_name_of_a_task_do_not_matter_without_code(tmp_path: Path) -> None:
    """A task is confined if and only if its files name Python functions."""
    file = write_choices(tmp_path, name="mbpp_choices", unsafe_code=True)
    assert check_task(TaskSpec(str(file), "acc")).confined_by == ""


@pytest.mark.parametrize("stated", [{}, {"max_gen_toks": 7, "until": ["."]}, {"max_new_tokens": 7}])
def test_objective_limits_the_length_of_completions(tmp_path: Path, stated: dict[str, Any]) -> None:
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    extra: dict[str, Any] = {"generation_kwargs": stated} if stated else {}
    generates: dict[str, Any] = {"output_type": "generate_until", "doc_to_choice": None, "metric_list": metrics}
    file = str(write_choices(tmp_path, **generates, **extra))
    prompts = Prompts(str(tiny_llama(tmp_path / "llama")), EngineOptions(max_model_len=2048))

    def longest(spec: TaskSpec) -> tuple[int, tuple[str, ...]]:
        (request,) = TaskEvaluator(None, prompts).requests(spec, 0)
        assert isinstance(request, Generation)
        return request.max_tokens, request.stop

    before, stop = longest(TaskSpec(file, "exact_match"))
    assert before == (7 if stated else 256)
    assert longest(TaskSpec(file, "exact_match", max_tokens=400)) == (400, stop)
    assert longest(TaskSpec(file, "exact_match", until=("Q:", "\n\n"))) == (before, ("Q:", "\n\n"))


def test_filters_of_a_task_are_named_if_it_has_several(tmp_path: Path) -> None:
    steps = [{"function": "regex", "regex_pattern": "(\\d+)"}, {"function": "take_first"}]
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    generates: dict[str, Any] = {"output_type": "generate_until", "doc_to_choice": None, "metric_list": metrics}
    one = [{"name": "strict-match", "filter": steps}]
    file = str(write_choices(tmp_path, **generates, filter_list=[*one, {"name": "flexible", "filter": steps}]))
    assert check_task(TaskSpec(file, "exact_match")).filters == ("strict-match", "flexible")
    assert check_task(TaskSpec(str(write_choices(tmp_path, **generates, filter_list=one)), "exact_match")).filters == ()


def test_options_have_no_longest_completion(choices: TaskSpec) -> None:
    fields: dict[str, Any] = {"max_tokens": 400, "until": ("x",)}
    for field, value in fields.items():
        with pytest.raises(InvalidTask, match=f"{field} .*: the task scores options and generates no text") as error:
            check_task(replace(choices, **{field: value}))
        assert error.value.field == field


def test_digests_of_tasks_without_new_fields_do_not_change() -> None:
    digest = "e4ebf657c7ab4d7f173e24f7f70bb49daf3229d7e052c85a228c6608ea968a66"
    assert TaskSpec("gsm8k", "exact_match", "strict-match", "test", 5, None, 3).digest == digest
    assert TaskSpec("gsm8k", "exact_match", "strict-match", "test", 5, None, 3, max_tokens=256).digest != digest
    assert TaskSpec("gsm8k", "exact_match", "strict-match", "test", 5, None, 3, template="{{q}}").digest != digest
    assert TaskSpec("gsm8k", "exact_match", "strict-match", "test", 5, None, 3, until=("x",)).digest != digest


def first_prompt(spec: TaskSpec) -> str:
    """The prompt of the sample at position 0, without its options."""
    with build_task(spec) as task:
        subtask, index = task.order[0]
        return str(documents_of(task, PromptSettings(None, None, "x"))[subtask][index].instances[0].args[0])


def test_template_replaces_that_of_a_yaml_task(tmp_path: Path) -> None:
    """Prompts and few-shot examples have the other template; nothing else changes, not even the samples' order."""
    file = str(write_choices(tmp_path, doc_to_text="Question: {{question}}"))
    spec = TaskSpec(file, "acc", num_fewshot=2)
    other = replace(spec, template="Qestion: {{question}}")
    assert check_task(spec).template == "Question: {{question}}"
    assert check_task(other).template == "Qestion: {{question}}"
    assert other.digest != spec.digest
    assert first_prompt(spec).count("Question: Is") == 3
    assert first_prompt(other) == first_prompt(spec).replace("Question: Is", "Qestion: Is")


def test_few_shot_template_of_its_own_is_kept(tmp_path: Path) -> None:
    """Examples that have another template than the prompt keep it."""
    file = str(write_choices(tmp_path, fewshot_config={"doc_to_text": "Example: {{question}}"}))
    prompt = first_prompt(TaskSpec(file, "acc", num_fewshot=1, template="Hm {{question}}"))
    assert prompt.count("Example: Is") == 1
    assert prompt.count("Hm Is") == 1


def test_template_replaces_that_of_an_inline_task(tmp_path: Path) -> None:
    """The prompts of an inline task have the other template."""
    spec = TaskSpec(inline(tmp_path / "a.jsonl", GOOD, prompt="Say {{prompt}}"), "exact_match")
    assert check_task(spec).template == "Say {{prompt}}"
    assert first_prompt(spec) == "Say 1+1="
    assert first_prompt(replace(spec, template="Sya {{prompt}}")) == "Sya 1+1="
    assert check_task(TaskSpec(inline(tmp_path / "a.jsonl", GOOD), "exact_match")).template == "{{prompt}}"


def test_options_are_known_where_all_samples_have_the_same(tmp_path: Path) -> None:
    """Fixed options are facts of a task, as a list or a mapping; options from the data are not."""
    for options in (["no", "yes"], {"0": "no", "1": "yes"}):
        file = write_choices(tmp_path, name="fixed", doc_to_choice=options, doc_to_target="{{0}}")
        assert check_task(TaskSpec(str(file), "acc")).options == ("no", "yes")
    assert check_task(TaskSpec(str(write_choices(tmp_path)), "acc")).options == ()


def test_column_of_the_data_is_no_template(tmp_path: Path) -> None:
    """A prompt that is a column of the data has no template, and none can replace it; nor do differing subtasks."""
    spec = TaskSpec(str(write_choices(tmp_path, doc_to_text="question")), "acc")
    assert check_task(spec).template == ""
    with pytest.raises(InvalidTask, match="its prompts come from no template"):
        check_task(replace(spec, template="{{question}}"))
    write_choices(tmp_path, name="first")
    write_choices(tmp_path, name="second", doc_to_text="Q: {{question}}")
    (tmp_path / "both.yaml").write_text("group: both_of_them\ntask: [first, second]\n")
    assert check_task(TaskSpec(str(tmp_path / "both.yaml"), "acc")).template == ""


def test_attacked_templates_are_forgotten_first(tmp_path: Path) -> None:
    """A task with another template than its own is kept only while it is in use; others stay."""
    spec = TaskSpec(inline(tmp_path / "a.jsonl", GOOD), "exact_match")
    evaluator = TaskEvaluator(None, Prompts(str(tiny_llama(tmp_path / "llama")), EngineOptions()))
    attacked = [replace(spec, template=f"{word} {{{{prompt}}}}") for word in ("a", "b")]
    for each in (spec, *attacked):
        evaluator.describe(each)
    assert set(evaluator._prepared) == {spec.digest, attacked[1].digest}


def test_broken_yaml_and_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: [unclosed\n")
    (tmp_path / "b.yaml").write_text("name: study\n")
    for name, message in (("a", "not an lm-eval task"), ("b", "neither `task` nor `group`"), ("c", "no such file")):
        with pytest.raises(InvalidTask, match=message):
            check_task(TaskSpec(str(tmp_path / f"{name}.yaml"), "acc"))


def test_group_is_one_task_stratified_by_its_subtasks(tmp_path: Path) -> None:
    write_choices(tmp_path, name="first")
    write_choices(tmp_path, name="second", test_split="train")
    (tmp_path / "both.yaml").write_text("group: both_of_them\ntask: [first, second]\n")
    task = build_task(TaskSpec(str(tmp_path / "both.yaml"), "acc"))
    assert task.info.num_samples == 18
    assert task.info.groups == {"first": 12, "second": 6}
    assert Counter(group for group, _ in task.order[:9]) == {0: 6, 1: 3}
    assert task.document(0).split("/")[0] in ("first", "second")


def test_groups_within_a_group_are_its_categories(tmp_path: Path) -> None:
    """As those of MMLU: each group within the task has the names of its subtasks, by lm-eval's name of the group."""
    for name in ("first", "second", "third"):
        write_choices(tmp_path, name=name)
    (tmp_path / "inner.yaml").write_text("group: inner\ntask: [first, second]\n")
    (tmp_path / "outer.yaml").write_text("group: outer\ntask:\n  - inner\n  - {group: other, task: [third]}\n")
    task = build_task(TaskSpec(str(tmp_path / "outer.yaml"), "acc"))
    assert task.info.groups.keys() == {"first", "second", "third"}
    assert {name: set(members) for name, members in task.info.categories.items()} == {
        "inner": {"first", "second"},
        "outer::other": {"third"},
    }


@pytest.mark.slow
def test_unknown_task_names_the_nearest() -> None:
    """The message names the nearest task for an unknown name, and the remedy for missing data."""
    with pytest.raises(InvalidTask, match="'gsm8kk': lm-eval knows no such task; nearest are gsm8k"):
        check_task(TaskSpec("gsm8kk", "exact_match"))
    with pytest.raises(InvalidTask, match=r"task 'gsm8k': its data cannot be fetched .* inline JSONL task"):
        check_task(TaskSpec("gsm8k", "exact_match"))
