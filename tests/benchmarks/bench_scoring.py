"""Samples per second that the engine answers, compared with lm-eval's own vLLM backend in the same engine.

Both answer the same requests of lm-eval's tasks in one live engine with prefix caching, whose cache is emptied before
each run, as every swap does. They alternate, and each ratio is the median over the pairs. Seconds are CPU time of the
process, which has the engine with one thread, so that other work on the machine does not count; `wall_ratio` is the
ratio of elapsed time. The engine gets requests that were tokenized once for the task, as in a study; lm-eval's backend
tokenizes its requests each time. Metrics are left out. Values are those of all samples, by the same metrics.

All prompts begin with the same five examples. The model has random weights. The tasks:

- `generation`: greedy completions of up to 48 tokens
- `letters`: four options of one token
- `texts`: four options of about 20 tokens
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAIRS = 5
SAMPLES = {"generation": 48, "letters": 32, "texts": 24}
# Bars as multiples of the speed of lm-eval's backend.
MUST = {"generation": 1.0, "letters": 2.0}
GOAL = {"generation": 1.2, "letters": 3.0}
# The largest difference of two log-likelihoods (natural) that is called equal.
TOLERANCE = 1e-4
SHOTS = 5
# More than all requests, so that lm-eval's backend gives them to vLLM in one batch. Its "auto" does the same, but fails
# where progress bars are off.
EVERYTHING = 1 << 20
MAX_MODEL_LEN = 1024
SHAPES = {"layers": 4, "hidden": 128, "max_position_embeddings": MAX_MODEL_LEN}


class Seconds(NamedTuple):
    """Seconds for answering all requests: CPU time and elapsed time."""

    cpu: float
    wall: float


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mergesearch-scoring-") as directory:
        _write_tasks(Path(directory))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.benchmarks.bench_scoring", directory]
        finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    tasks = json.loads(finished.stdout.splitlines()[-1])
    met = all(row["equal_values"] and row["difference"] <= TOLERANCE for row in tasks.values())
    met &= all(tasks[name]["ratio"] >= least for name, least in MUST.items())
    return {"tasks": tasks, "must": MUST, "goal": GOAL, "tolerance": TOLERANCE, "met": met}


def show(result: dict[str, Any]) -> None:
    print(
        "task        samples  tokens each  ours/s  lm-eval/s  ratio  must  goal  wall ratio  values  largest difference"
    )
    for name, row in result["tasks"].items():
        must, goal = (f"{result[bar][name]:4.1f}" if name in result[bar] else "    " for bar in ("must", "goal"))
        values = "equal" if row["equal_values"] else "DIFFER"
        print(
            f"{name:<11} {row['samples']:>7}  {row['tokens']:>11.0f}  {row['ours_per_s']:6.1f}  "
            f"{row['theirs_per_s']:9.1f}  {row['ratio']:5.2f}  {must}  {goal}  {row['wall_ratio']:10.2f}  {values:<6}  "
            f"{row['difference']:18.2g}"
        )


def _write_tasks(directory: Path) -> None:
    """Write three lm-eval tasks on one set of questions about sums, with five examples before each question."""
    import yaml

    draw = random.Random(0)
    for split, size in (("test", max(SAMPLES.values())), ("train", SHOTS)):
        rows = []
        for _ in range(size):
            a, b = draw.randrange(100, 1000), draw.randrange(100, 1000)
            sums = [a + b, *draw.sample(range(200, 2000), 3)]
            texts = [f"the sum of {a} and {b} is {each}" for each in draw.sample(sums, 4)]
            gold = next(i for i, text in enumerate(texts) if text.endswith(f" {a + b}"))
            rows.append({"question": f"what is the sum of {a} and {b}?", "texts": texts, "gold": gold})
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    listed = "".join(f"\n{letter}. {{{{texts[{i}]}}}}" for i, letter in enumerate("ABCD"))
    choice = {
        "output_type": "multiple_choice",
        "target_delimiter": "",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    tasks: dict[str, dict[str, Any]] = {
        "generation": {
            "output_type": "generate_until",
            "doc_to_text": "Question: {{question}}" + listed + "\nAnswer:",
            "doc_to_target": "{{texts[gold]}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 48, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
        "letters": {
            **choice,
            "doc_to_text": "Question: {{question}}" + listed + "\nAnswer: (",
            "doc_to_choice": list("ABCD"),
        },
        "texts": {**choice, "doc_to_text": "Question: {{question}}\nAnswer: ", "doc_to_choice": "{{texts}}"},
    }
    for name, settings in tasks.items():
        shared = {
            "task": f"bench_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": "test.jsonl", "train": "train.jsonl"}},
            "test_split": "test",
            "fewshot_split": "train",
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": SHOTS,
        }
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(shared | settings))


def measure(directory: Path) -> dict[str, Any]:
    """Figures of each task, in an engine that this process starts."""
    from search_spaces.study.engine import EngineOptions
    from workers.engines.vllm.environment import engine_environment

    options = EngineOptions(max_model_len=MAX_MODEL_LEN, threads=1)
    os.environ.update(engine_environment(options))  # before anything imports torch, as in a replica

    from tests.builders import tiny_family, tiny_qwen2
    from tests.workers.recipes import arithmetic
    from workers.engines.vllm.engine import Engine
    from workers.evaluation.lm_eval import TaskEvaluator
    from workers.types import Span, TaskSpec

    family = tiny_family(directory / "family", build=tiny_qwen2, experts=("math", "text"), noise=0.05, **SHAPES)
    figures = {}
    with Engine(family, options) as engine:
        engine.swap(arithmetic(family, 0.6, 0.3))
        theirs = _lm_eval_backend(engine)
        for name, number in SAMPLES.items():
            evaluator = TaskEvaluator(engine, engine.prompts)
            metric = "exact_match" if name == "generation" else "acc"
            task = TaskSpec(str(directory / f"{name}.yaml"), metric)
            figures[name] = _compare(engine, evaluator, theirs, Span(name, task, 0, number))
    return figures


def _lm_eval_backend(engine: Any) -> Any:
    """Make lm-eval's vLLM backend with the vLLM of `engine`, in place of one that the backend would start."""
    from importlib import metadata
    from unittest import mock

    import vllm

    found = metadata.version
    # It looks for the distribution "vllm"; that for CPU has another name.
    with mock.patch.object(metadata, "version", lambda name: vllm.__version__ if name == "vllm" else found(name)):
        from lm_eval.models import vllm_causallms

        with mock.patch.object(vllm_causallms, "LLM", return_value=engine._llm):
            return vllm_causallms.VLLM(engine.prompts.directory, max_model_len=MAX_MODEL_LEN, batch_size=EVERYTHING)


def _compare(engine: Any, evaluator: Any, theirs: Any, span: Any) -> dict[str, Any]:
    positions = range(span.start, span.stop)
    instances = [each for at in positions for each in evaluator.document(span.task, at).instances]
    requests = [each for at in positions for each in evaluator.requests(span.task, at)]
    is_generated = instances[0].request_type == "generate_until"
    our_answers = engine.generate if is_generated else engine.loglikelihoods
    their_answers = theirs.generate_until if is_generated else theirs.loglikelihood

    def ours() -> tuple[Seconds, list[Any]]:
        taken, answers = _timed(engine, lambda: our_answers(requests))
        return taken, [each.text for each in answers] if is_generated else answers

    def lm_evals() -> tuple[Seconds, list[Any]]:
        return _timed(engine, lambda: their_answers(instances, disable_tqdm=True))

    ours(), lm_evals()  # what the first run takes longer is not counted
    pairs: list[tuple[Seconds, Seconds]] = []
    for pair in range(PAIRS):
        first, second = (lm_evals(), ours()) if pair % 2 else (ours(), lm_evals())
        (our_s, we_said), (their_s, they_said) = (second, first) if pair % 2 else (first, second)
        pairs.append((our_s, their_s))
    return {
        "samples": len(positions),
        "tokens": statistics.mean(len(request.tokens) for request in requests),
        "ours_per_s": len(positions) / statistics.median(our_s.cpu for our_s, _ in pairs),
        "theirs_per_s": len(positions) / statistics.median(their_s.cpu for _, their_s in pairs),
        "ratio": statistics.median(their_s.cpu / our_s.cpu for our_s, their_s in pairs),
        "wall_ratio": statistics.median(their_s.wall / our_s.wall for our_s, their_s in pairs),
        "difference": _largest_difference(we_said, they_said),
        "equal_values": _values(evaluator, span, we_said) == _values(evaluator, span, they_said),
        "pairs": pairs,
    }


def _timed(engine: Any, answer: Callable[[], list[Any]]) -> tuple[Seconds, list[Any]]:
    assert engine._llm.reset_prefix_cache()
    cpu, wall = time.process_time(), time.perf_counter()
    answers = answer()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall), answers


def _largest_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest difference between two log-likelihoods; for completions, 0 if all are equal and 1 otherwise."""
    if isinstance(theirs[0], str):
        return float(ours != theirs)
    return max(abs(float(a) - float(b)) for (a, _), (b, _) in zip(ours, theirs, strict=True))


def _values(evaluator: Any, span: Any, answers: Sequence[Any]) -> list[float]:
    """The metric's value of each sample, from the answers to all of its requests in turn."""
    from workers.evaluation.built_tasks import Answers

    task, left = evaluator.task(span.task), iter(answers)
    grouped = []
    for at in range(span.start, span.stop):
        instances = evaluator.document(span.task, at).instances
        grouped.append(Answers(task.order[at][0], instances[0].doc_id, tuple((next(left),) for _ in instances)))
    return list(evaluator._metrics.values(span.task.digest, grouped))


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
