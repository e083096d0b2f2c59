"""The shipped tasks: each builds from rows in the right format, with the prompts and metrics of its source."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sacrebleu
import yaml

from tests.workers.task_pack.rows import ROWS, in_memory, shipped_index, write_data
from workers.evaluation import task_index
from workers.evaluation.built_tasks import Answers, BuiltTask, PromptSettings, documents_of
from workers.evaluation.data_sets import DATA_VARIABLE
from workers.evaluation.lm_eval_tasks import build, prepare
from workers.evaluation.metrics import LocalMetrics
from workers.evaluation.sample_metrics import METRICS
from workers.evaluation.tasks import build_task
from workers.file_access import FileAccess
from workers.task_pack import pack_dir
from workers.types import TaskSpec

NUM_ROWS = 10

# Data with more rows: their search part has the first 1,000.
HELD_BACK = {"baber/piqa": 1000 + NUM_ROWS, "lighteval/siqa": 1000 + NUM_ROWS}

ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
STEP_BY_STEP = "### Response: Let's think step by step."
FILES = {file.stem: file for file in sorted(pack_dir().glob("*/*.yaml"))}


class _Loader(yaml.SafeLoader):
    """Reads a YAML file of a task without its functions and includes."""


_Loader.add_constructor("!function", lambda loader, node: str(node.value))


def written(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.load(FILES[name].read_text(), _Loader)
    return content


def facts(name: str) -> dict[str, Any]:
    found: dict[str, Any] = written(name)["metadata"]
    return found


@pytest.fixture(scope="module", autouse=True)
def _index() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_index, "_given", shipped_index())
        yield


@pytest.fixture(autouse=True)
def _data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use rows in memory instead of the hub, and execute code without a sandbox, since it is this file's own code."""
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", in_memory(NUM_ROWS, HELD_BACK))
    evaluate = ModuleType("evaluate")
    evaluate.__dict__["load"] = lambda name: SimpleNamespace(compute=_code_eval)
    monkeypatch.setitem(sys.modules, "evaluate", evaluate)


def _code_eval(*, predictions: Sequence[Sequence[str]], references: Sequence[str], **_: Any) -> Any:
    passed = []
    for tries, test in zip(predictions, references, strict=True):
        try:
            exec(f"{tries[0]}\n{test}", {})
            passed.append(1.0)
        except Exception:
            passed.append(0.0)
    return {"pass@1": sum(passed) / len(passed)}, None


def built(name: str, metric: str | None = None, **options: Any) -> BuiltTask:
    """The task, built in this process as its confined process would build it."""
    spec = TaskSpec(name, metric or facts(name)["metric"], **options)
    return build(spec, prepared=prepare(spec))


def prompts(task: BuiltTask, count: int = 3) -> list[str]:
    first = task.subtasks[0].task
    return [first.fewshot_context(first.eval_docs[i], 0) for i in range(count)]


def value(task: BuiltTask, document: int, answer: str) -> float:
    metrics = LocalMetrics()
    metrics.open(task, tuple(dict(enumerate(each.task.eval_docs)) for each in task.subtasks))
    return metrics.value(task.spec.digest, Answers(0, document, ((answer,),)))


NEEDS_IFEVAL = {"m3_livebench_instruction"}


@pytest.mark.parametrize("name", FILES)
def test_every_task_builds_and_says_what_it_is(name: str) -> None:
    """Its facts are complete, and it builds from hand-made rows with the metric that it states."""
    if name in NEEDS_IFEVAL:
        pytest.importorskip("langdetect")
    assert facts(name).keys() == {"version", "paper", "licence", "sizes", "metric", "data"}
    assert written(name).get("task", name) == name or written(name)["group"] == name
    spec = TaskSpec(name, facts(name)["metric"])
    prepared = prepare(spec)
    assert {json.loads(key)[0] for key in prepared.datasets} == {*facts(name)["data"]}
    task = build(spec, prepared=prepared)
    assert len(task.order) > 0
    assert task.info.higher_is_better


def test_sizes_of_the_parts() -> None:
    """The search part and the rest of a split have no document in common, and together have all."""
    for name in ("hm3_gsm8k", "hm3_mathqa", "hm3_xnli", "hm3_wmt"):
        parts = [built(name, split=split) for split in ("search", "test")]
        texts = [{json.dumps(dict(row)) for row in part.subtasks[0].task.eval_docs} for part in parts]
        assert [len(each) for each in texts] == [7, 3]
        assert not texts[0] & texts[1]
    assert len(built("lfs_mbpp_search").order) == 3 * NUM_ROWS  # at most 200 of "train", all of the two others


GSM8K, MATH = ROWS["openai/gsm8k"], ROWS["EleutherAI/hendrycks_math"]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("lfs_gsm8k", lambda i: f"{ALPACA}### Instruction:\n{GSM8K(i)['question']}\n\n{STEP_BY_STEP}"),
        (
            "lfs_gsm_plus",
            lambda i: f"{ALPACA}### Instruction:\n{ROWS['qintongli/GSM-Plus'](i)['question']}\n\n{STEP_BY_STEP}",
        ),
        ("lfs_math", lambda i: f"{ALPACA}### Instruction:\n{MATH(i)['problem']}\n\n{STEP_BY_STEP}"),
        ("lfs_mgsm_ja", lambda i: f"問題： りんごが{i}個あります。\nステップごとの答え:"),
        ("lfs_mgsm_ja_search", lambda i: f"問題： 本が{i}冊あります。\nステップごとの答え:"),
        (
            "lfs_logiqa",
            lambda i: (
                f"Passage: There are {i} cats.\nQuestion: Which follows?\nChoices:\n"
                "A. 0 cats.\nB. 1 cats.\nC. 2 cats.\nD. 3 cats.\nAnswer:"
            ),
        ),
        ("lfs_openbookqa_facts", lambda i: f"fact {i}\nThe sun is {i}"),
        (
            "m3_cola",
            lambda i: (
                "As a grammar identification system, examine the provided sentence and respond with 'acceptable' for "
                f"grammatically correct sentences or 'unacceptable' for incorrect ones.\nSentence:Sentence {i} is good."
                "\nPlease respond with 'acceptable' or 'unacceptable'."
            ),
        ),
        (
            "m3_sst2",
            lambda i: (
                "Evaluate the sentiment of the given text and classify it as 'positive' or 'negative': \n"
                f"Question:Sentence {i} is good.\nAnswer:"
            ),
        ),
        ("m3_livebench_coding", lambda i: f"Add the numbers and {2 * i}."),
        (
            "m3_livebench_typos",
            lambda i: (
                f"{ALPACA}### Instruction:\nPlease fix the errors.\n\n### Text with errors:\n"
                f"This is an eror {2 * i + 1}.\n\nAnd anothr.\n\n### Response: the corrected paragraph is:"
            ),
        ),
        ("trace_fomc", lambda i: f"FOMC: what about {i}?"),
        ("trace_20minuten", lambda i: f"20Minuten: what about {i}?"),
    ],
)
def test_prompts_are_those_of_the_papers_code(name: str, prompt: Any) -> None:
    assert prompts(built(name)) == [prompt(i) for i in range(3)]


def test_prompts_of_code_are_those_of_the_papers_code() -> None:
    """Indentation is by tabs, and the prompt of task 493 shows its call alone."""
    head = f"{ALPACA}\n### Instruction:\nCreate a Python script for this problem:\n"
    mbpp, humaneval = ROWS["google-research-datasets/mbpp"], ROWS["openai/openai_humaneval"]
    tests = ["\n".join(mbpp(i)["test_list"]) for i in range(3)]
    tests[1] = "calculate_polygons(startx, starty, endx, endy, radius)"
    assert prompts(built("lfs_mbpp")) == [
        f"{head}\n{mbpp(i)['text']}\nTest examples:\n{tests[i]}\n\n### Response:" for i in range(3)
    ]
    assert prompts(built("lfs_humaneval")) == [
        f"{head}{humaneval(i)['prompt']}\n\n### Response:".replace("    ", "\t") for i in range(3)
    ]


@pytest.mark.parametrize(
    ("name", "original", "metric"),
    [
        ("lfs_openbookqa", "openbookqa", "acc_norm"),
        ("lfs_piqa", "piqa", "acc"),
        ("lfs_social_iqa", "social_iqa", "acc"),
        ("lfs_mmlu", "mmlu_abstract_algebra", "acc"),
        ("hm3_mathqa", "mathqa", "acc"),
        ("hm3_xnli", "xnli_ar", "acc"),
        ("hm3_glue", "cola", "acc"),
    ],
)
def test_choices_are_lm_evals(name: str, original: str, metric: str) -> None:
    """Prompts, options and values are those of lm-eval's task, on the same documents and answers."""
    split = "search" if name in ("lfs_piqa", "lfs_social_iqa", "hm3_mathqa", "hm3_xnli", "hm3_glue") else None
    ours = built(name, metric, split=split).subtasks
    first = next(each.task for each in ours if each.name in (name, original))
    theirs = built(original, metric).subtasks[0].task
    for i in range(3):
        document = first.eval_docs[i]
        assert document == theirs.eval_docs[i]
        assert first.fewshot_context(document, 0) == theirs.fewshot_context(document, 0)
        assert first.doc_to_choice(document) == theirs.doc_to_choice(document)
        for best in range(len(first.doc_to_choice(document))):
            scores = [(-float(n != best), n == best) for n in range(len(first.doc_to_choice(document)))]
            assert first.process_results(document, scores)[metric] == theirs.process_results(document, scores)[metric]


def published_number(completion: str) -> str | None:
    """The published code's rule: the number (rounded, or a fraction's value) after the last "The answer is: "."""
    *before, last = completion.split("The answer is: ")
    match = re.search(r"[\-+]?\d*[\.,/]?\d+", last.strip()) if before else None
    if match is None:
        return None
    above, _, below = match[0].replace(",", "").partition("/")
    return str(round(float(above) / float(below or 1)))


@pytest.mark.parametrize(
    "answer",
    [
        "He has 2. The answer is: 2",
        "The answer is: 3. No. The answer is: $2.00",
        "The answer is: 1,002",
        "The answer is: -2",
        "The answer is: +2.",
        "2",
        "The answer is: two",
        "The answer is: 2 apples, not 3",
        "the answer is: 2",
        "",
    ],
)
@pytest.mark.parametrize("name", ["lfs_gsm8k", "lfs_gsm_plus"])
def test_word_problems_are_judged_as_published(name: str, answer: str) -> None:
    """Values are those of the published rule, except for the answers of the next test."""
    task = built(name)
    first = task.subtasks[0].task
    document = next(i for i in range(NUM_ROWS) if first.doc_to_target(first.eval_docs[i]) == "2")
    assert value(task, document, answer) == float(published_number(answer) == "2")


def test_fractions_are_not_computed() -> None:
    """The published code rounds 4/2 to 2, and 1.6 too; here neither is the answer 2."""
    task = built("lfs_gsm8k")
    for answer in ("The answer is: 4/2", "The answer is: 1.6"):
        assert published_number(answer) == "2"
        assert value(task, 0, answer) == 0.0


def test_math_is_judged_by_lm_eval() -> None:
    ours, theirs = built("lfs_math"), built("hendrycks_math", "exact_match")
    assert len(ours.subtasks) == 7
    for answer in ("The answer is $1$.", "$\\frac{2}{2}$", "$\\boxed{1}$", "1"):
        assert value(ours, 0, answer) == value(theirs, 0, answer)
    assert ours.subtasks[0].task.config.generation_kwargs["max_gen_toks"] == 2048


GOOD, BAD = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (GOOD, True),
        (f"Here it is.\n```python\n{GOOD}\n```\nDone.", True),
        (f"```python\n{GOOD}\n", True),
        (f'{GOOD}\nif __name__ == "__main__":\n    raise SystemExit', True),
        (f"{GOOD}\n# Example usage\nadd(1)", True),
        (f"The solution is:\n{GOOD}\n\nThe answer is: as above", True),
        (f"### Response:\n{GOOD}".replace("    ", "\t"), True),
        (BAD, False),
        ("I do not know.", False),
    ],
)
def test_programs_are_found_in_completions(answer: str, passes: bool) -> None:
    assert value(built("lfs_mbpp"), 3, answer) == float(passes)


@pytest.mark.slow
def test_code_tasks_run_confined(tmp_path: Path) -> None:
    """The shipped filters and lm-eval's metric run in a confined process, also for studies with limits."""
    spec = TaskSpec("lfs_mbpp", "pass_at_1", access=FileAccess((str(tmp_path),)))
    with build_task(spec) as task:
        assert task.info.confined_by
        documents = documents_of(task, PromptSettings(None, None, "none", limit=5))
        assert documents[0][0].instances[0].args[0].startswith(ALPACA)
        assert task.code is not None
        assert task.code.values([Answers(0, 3, ((text,),)) for text in (f"```python\n{GOOD}\n```", BAD)]) == [1.0, 0.0]


def test_functions_are_found_or_continued() -> None:
    """A completion that defines the function stands alone; another continues the problem's prompt."""
    task = built("lfs_humaneval")
    assert value(task, 0, "```python\ndef add_0(a, b):\n    return a + b\n```") == 1.0
    assert value(task, 0, "    return a + b") == 1.0
    assert value(task, 0, "    return a * b") == 0.0


@pytest.mark.parametrize(
    ("answer", "is_right"), [("'Acceptable'.", 1.0), ("It is acceptable", 1.0), ("unacceptable", 0.0)]
)
def test_last_word_is_judged(answer: str, is_right: float) -> None:
    assert value(built("m3_cola"), 1, answer) == is_right


def test_corrected_text_is_in_the_last_line() -> None:
    task = built("m3_livebench_typos")
    assert len(task.order) == NUM_ROWS // 2  # LiveBench's task "typos" alone
    assert value(task, 0, "Yes:\nSo: This is an error 1. And another.\n") == 1.0
    assert value(task, 0, "This is an error 1. And another.\nGood luck!") == 0.0


def test_translations_are_judged_by_chrf() -> None:
    task = built("hm3_wmt", split="search")
    wanted = sacrebleu.sentence_chrf("This is a sentence 0.", ["This is sentence 0."]).score / 100
    assert value(task, 0, "This is a sentence 0.") == pytest.approx(wanted, abs=0.02)  # the target begins with a space


@pytest.mark.parametrize("name", ["meetingbank", "20minuten", "py150"])
def test_trace_is_judged_by_its_metrics(name: str) -> None:
    task = built(f"trace_{name}")
    metric = METRICS[facts(f"trace_{name}")["metric"]]
    prompt = prompts(task, 1)[0]
    assert value(task, 0, "answer 0") == metric(prompt, ["answer number 0"], "answer 0")


def test_trace_compares_answers_and_options() -> None:
    """TRACE's accuracy is equality; of ScienceQA only the first character counts."""
    for answer in ("answer number 0", "answer number 0.", "answer"):
        assert value(built("trace_fomc"), 0, answer) == float(answer == "answer number 0")
    task = built("trace_scienceqa")
    for answer, is_right in (("A\nBecause of this.", 1.0), ("A", 1.0), ("B\nBecause 0.", 0.0), ("", 0.0)):
        assert value(task, 0, answer) == is_right


@pytest.mark.slow
def test_data_of_ones_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts, sums of splits, filters and files are what the package `datasets` makes of them."""
    import datasets

    monkeypatch.undo()  # the package's own load_dataset
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = tmp_path / "data"

    def rows(path: str, count: int = 4) -> list[Any]:
        return [ROWS[path](i) for i in range(count)]

    mbpp, piqa = "google-research-datasets/mbpp", "baber/piqa"
    write_data(
        root / mbpp,
        {"full": {"train": rows(mbpp, 203), "validation": rows(mbpp), "test": rows(mbpp), "prompt": rows(mbpp)}},
    )
    write_data(root / piqa, {"default": {"train": rows(piqa), "validation": rows(piqa, 1003)}})
    write_data(root / "livebench/language", {"default": {"test": rows("livebench/language")}})
    trace = root / "TRACE" / "LLM-CL-Benchmark" / "FOMC"
    trace.mkdir(parents=True)
    for name, count in (("train", 5), ("eval", 3), ("test", 4)):
        (trace / f"{name}.json").write_text(json.dumps([ROWS["TRACE/LLM-CL-Benchmark/FOMC"](i) for i in range(count)]))
    prepared = prepare(TaskSpec("lfs_mbpp_search", "pass_at_1"))
    assert [len(split["search"]) for split in prepared.datasets.values()] == [200 + 4 + 4]
    assert [len(built("lfs_piqa", split=split).order) for split in ("search", "test")] == [1000, 3]
    assert len(built("m3_livebench_typos").order) == 2
    assert [len(built("trace_fomc", split=split).order) for split in ("train", "validation", "test")] == [5, 3, 4]
