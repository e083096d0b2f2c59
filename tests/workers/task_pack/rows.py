"""Rows in the format of each data set of the shipped tasks, made by hand, with stand-ins for the hub and lm-eval."""

from __future__ import annotations

import base64
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ROWS", "Row", "compressed", "in_memory", "shipped_index", "write_data"]

Row = Mapping[str, Any]

# The splits of a data set, where they are not "train", "validation" and "test".
SPLITS: Mapping[str, tuple[str, ...]] = {
    "qintongli/GSM-Plus": ("test", "testmini"),
    "google-research-datasets/mbpp": ("train", "validation", "test", "prompt"),
    "cais/mmlu": ("test", "validation", "dev"),
    "glue/mnli": ("train", "validation_matched", "validation_mismatched"),
}


def _mbpp(i: int) -> Row:
    tests = [f"assert add({n}, {i}) == {n + i}" for n in range(3)]
    text = f"Write a function that adds {i} to a number."
    return {
        "task_id": 493 if i == 1 else i,
        "text": text,
        "code": "def add(a, b):\n    return a + b",
        "test_list": tests,
    }


def _humaneval(i: int) -> Row:
    return {
        "task_id": f"HumanEval/{i}",
        "prompt": f'def add_{i}(a, b):\n    """Return a + b."""\n',
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": f"add_{i}",
    }


def _translation(i: int) -> Row:
    return {"translation": {"de": f"Das ist der Satz {i}.", "en": f"This is sentence {i}."}}


def compressed(content: object) -> str:
    """Private test cases in the format of LiveBench's data."""
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


def _coding(i: int) -> Row:
    """A row: 0 and 1 ask for a function, 2 and 3 for a program; 1 and 3 give the beginning of a solution."""
    is_call, is_begun = i % 4 < 2, i % 2 == 1

    def case(a: int, b: int) -> Row:
        if is_call:
            return {"input": f"[{a}, {b}]\n{i}", "output": str(a + b + i), "testtype": "functional"}
        return {"input": f"2\n{a} {b}\n", "output": f"{a + b}\n{i}\n", "testtype": "stdin"}

    begun = "class Solution:\n    def total(self, pair, more):" if is_call else "count = int(input())"
    rest = "        return sum(pair) + more" if is_call else f"print(sum(map(int, input().split())))\nprint({i})"
    private = json.dumps([case(5, -7), case(10**6, 1)])
    return {
        "question_id": str(i),
        "category": "coding",
        "task": "coding_completion" if is_begun else "LCB_generation",
        "turns": [f"Add the numbers and {i}."],
        "question_title": f"sum {i}",
        "public_test_cases": json.dumps([case(1, 2)]),
        "private_test_cases": private if i == 0 else compressed(private),
        "original_json": {"metadata": json.dumps({"func_name": "total"} if is_call else {})},
        "partial_solution": begun if is_begun else None,
        "remainder": rest if is_begun else None,
        "solution": f"{begun}\n{rest}",
    }


ROWS: Mapping[str, Callable[[int], Row]] = {
    "openai/gsm8k": lambda i: {
        "question": f"Tom has {i} apples and gets 2. How many?",
        "answer": f"He has {i} + 2.\n#### {i + 2}",
    },
    "qintongli/GSM-Plus": lambda i: {
        "question": f"Ann has {i} pears and eats none. How many?",
        "solution": f"She has {i}.\n#### {i}",
        "answer": str(i),
        "perturbation_type": "numerical variation",
    },
    "EleutherAI/hendrycks_math": lambda i: {
        "problem": f"What is ${i} + 1$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": f"It is $\\boxed{{{i + 1}}}$.",
    },
    "google-research-datasets/mbpp": _mbpp,
    "openai/openai_humaneval": _humaneval,
    "cais/mmlu": lambda i: {
        "question": f"Which is {i}?",
        "subject": "anatomy",
        "choices": [str(i + n) for n in range(4)],
        "answer": i % 4,
    },
    "lucasmccabe/logiqa": lambda i: {
        "context": f"There are {i} cats.",
        "query": "Which follows?",
        "options": [f"{n} cats." for n in range(4)],
        "correct_option": i % 4,
    },
    "allenai/openbookqa": lambda i: {
        "id": str(i),
        "question_stem": f"The sun is {i}",
        "choices": {"text": ["hot", "cold", "wet", "dry"], "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[i % 4],
        "fact1": f"fact {i}",
    },
    "baber/piqa": lambda i: {"goal": f"Open jar {i}", "sol1": "Turn the lid.", "sol2": "Eat the lid.", "label": i % 2},
    "lighteval/siqa": lambda i: {
        "context": f"Kai met {i} friends.",
        "question": "How does Kai feel?",
        "answerA": "glad",
        "answerB": "sad",
        "answerC": "ill",
        "label": str(i % 3 + 1),
    },
    "juletxara/mgsm": lambda i: {
        "question": f"りんごが{i}個あります。",
        "answer": None,
        "answer_number": i,
        "equation_solution": None,
    },
    "SakanaAI/gsm8k-ja-test_250-1319": lambda i: {"question": f"本が{i}冊あります。", "answer_number": i},
    "nyu-mll/glue": lambda i: {
        "sentence": f"Sentence {i} is good.",
        "sentence1": f"One {i}.",
        "sentence2": f"Two {i}.",
        "question1": f"Why {i}?",
        "question2": f"How {i}?",
        "question": f"What is {i}?",
        "premise": f"It is {i}.",
        "hypothesis": "It is a number",
        "label": i % 2,
        "idx": i,
    },
    "facebook/xnli": lambda i: {"premise": f"Es ist {i}.", "hypothesis": "Es ist eine Zahl.", "label": i % 3},
    "livebench/language": lambda i: {
        "question_id": str(i),
        "category": "language",
        "task": "typos" if i % 2 else "connections",
        "turns": [f"Please fix the errors.\n\nThis is an eror {i}.\n\nAnd anothr."],
        "ground_truth": f"This is an error {i}. And another.",
    },
    "livebench/coding": _coding,
    "livebench/instruction_following": lambda i: {
        "question_id": str(i),
        "turns": [f"Write {i} words without commas."],
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{"num_words": None}],
        "task": "story_generation",
    },
    "regisss/math_qa": lambda i: {
        "Problem": f"what is {i} ?",
        "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5",
        "correct": "abcde"[i % 5],
    },
    "wmt/wmt16": _translation,
    **{
        f"TRACE/LLM-CL-Benchmark/{name}": lambda i, name=name: {  # type: ignore[misc]
            "prompt": f"{name}: what about {i}?",
            "answer": f"{'ABC'[i % 3]}\nBecause {i}." if name == "ScienceQA" else f"answer number {i}",
        }
        for name in (
            "C-STANCE",
            "FOMC",
            "MeetingBank",
            "Py150",
            "ScienceQA",
            "NumGLUE-cm",
            "NumGLUE-ds",
            "20Minuten",
        )
    },
}


def write_data(place: Path, parts: Mapping[str, Mapping[str, Sequence[Row]]]) -> Path:
    """Write a directory in the hub's format: a Parquet file per split, and a card that names them for each part."""
    import datasets

    card = []
    for part, splits in parts.items():
        (place / part).mkdir(parents=True)
        for split, rows in splits.items():
            datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(place / part / f"{split}.parquet")
        files = [{"split": split, "path": f"{part}/{split}.parquet"} for split in splits]
        card.append({"config_name": part, "data_files": files})
    (place / "README.md").write_text(f"---\n{json.dumps({'configs': card})}\n---\n")
    return place


# The folders of lm-eval that shipped tasks refer to; indexing all of lm-eval takes a minute.
REFERRED = "gsm8k hendrycks_math mbpp humaneval mmlu/default openbookqa piqa siqa glue xnli ifeval mathqa"


def shipped_index() -> dict[str, Any]:
    """The index of the shipped tasks and of the lm-eval tasks to which they refer."""
    from lm_eval.tasks._index import TaskIndex

    from workers.evaluation.task_index import shipped_dirs
    from workers.task_pack import pack_dir

    places = [shipped_dirs()[0] / place for place in (*REFERRED.split(), "translation")]
    return {**TaskIndex.build(places), **TaskIndex.build([pack_dir()], resolve_includes=False)}


FURTHER = 12 * 10_000  # from a row of a split to the row at its place in the next one


def in_memory(num_rows: int, others: Mapping[str, int], *, distinct: bool = False) -> Callable[..., Any]:
    """A stand-in for `datasets.load_dataset` with `num_rows` rows per split, or the number in `others` for a path.

    With `distinct`, no two splits of a data set have a row in common.
    """

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
        import datasets

        names = SPLITS.get("glue/mnli" if name == "mnli" else path, ("train", "validation", "test"))
        splits: dict[str, Sequence[Row]] = {}
        for number, split in enumerate(names):
            first = number * FURTHER if distinct else 0
            rows = [ROWS[path](i) for i in range(first, first + others.get(path, num_rows))]
            if "filters" in options:
                rows = [row for row in rows if all(row[key] == value for ((key, _, value),) in options["filters"])]
            splits[split] = rows
        if "split" in options:
            splits = {each: _selected(text, splits) for each, text in options["split"].items()}
        made = {each: datasets.Dataset.from_list([dict(row) for row in found]) for each, found in splits.items()}
        return datasets.DatasetDict(made)

    return load_dataset


def _selected(text: str, splits: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Rows for an expression such as `train[:200]+validation`, as the package `datasets` selects them."""
    found: list[Row] = []
    for part in text.split("+"):
        match = re.fullmatch(r"(\w+)(?:\[(\d*)(%?):(\d*)(%?)\])?", part)
        assert match
        rows = splits[match[1]]

        def place(number: str | None, percent: str | None, default: int, rows: Sequence[Row] = rows) -> int:
            return default if not number else round(int(number) * len(rows) / 100) if percent else int(number)

        found += rows[place(match[2], match[3], 0) : place(match[4], match[5], len(rows))]
    return found
