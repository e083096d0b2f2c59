import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from tests.conftest import write_choices
from tests.workers.judged_tasks import KnownAnswers
from workers.errors import InvalidTask, MetricFailed
from workers.evaluation.built_tasks import Answers
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.metric_process import MetricProcess
from workers.evaluation.metrics import LocalMetrics, Metrics
from workers.evaluation.prompts import Prompts
from workers.evaluation.tasks import build_task
from workers.types import Span, TaskSpec

pytestmark = pytest.mark.slow  # the process takes 5 s to import lm-eval


@pytest.fixture(scope="module")
def process() -> Iterator[MetricProcess]:
    process = MetricProcess()
    yield process
    process.stop()


def opened(metrics: Metrics, spec: TaskSpec) -> None:
    task = build_task(spec)
    metrics.open(task, (dict(enumerate(task.subtasks[0].task.eval_docs)),))


def said(*texts: str) -> list[Answers]:
    """A completion for each of the first documents."""
    return [Answers(0, document, ((text,),)) for document, text in enumerate(texts)]


def test_values_are_those_of_this_process(process: MetricProcess, sums: TaskSpec, choices: TaskSpec) -> None:
    texts = said(*(str(2 * index + (3 if index % 3 else 4)) for index in range(400)))
    options = [
        Answers(0, index, tuple(((-float(index * k % 5) / 3, False),) for k in (1, 2, 3))) for index in range(12)
    ]
    local = LocalMetrics()
    for spec, answers in ((sums, texts), (choices, options)):
        opened(local, spec)
        opened(process, spec)
        expected = local.values(spec.digest, answers)
        assert process.values(spec.digest, answers) == expected
        assert set(expected) == {0.0, 1.0}


def test_process_that_was_killed_is_replaced(process: MetricProcess, sums: TaskSpec) -> None:
    opened(process, sums)
    before = process.pid
    os.kill(before, signal.SIGKILL)
    assert process.values(sums.digest, said("3", "5", "6", "9")) == [1.0, 1.0, 0.0, 1.0]
    assert process.pid != before


def test_task_that_the_process_cannot_build_says_why(process: MetricProcess, sums: TaskSpec) -> None:
    task = build_task(sums)
    changed = replace(sums, content="0" * 64)
    process.open(replace(task, spec=changed), ({0: {}},))
    with pytest.raises(InvalidTask, match=r"sums\.jsonl: has changed since the study was planned"):
        process.values(changed.digest, said("3"))
    process.close(changed.digest)


# A regular expression that takes years keeps the interpreter lock: no thread of the process runs meanwhile.
ENDLESS = [
    {"name": "endless", "filter": [{"function": "regex", "regex_pattern": "(a*)*b"}, {"function": "take_first"}]}
]

PARENT = """
import sys
from tests.workers.evaluation.test_metric_process import *

process = MetricProcess()
spec = TaskSpec(sys.argv[1], "exact_match")
opened(process, spec)
process.values(spec.digest, said("b"))
print(process.pid, flush=True)
process.values(spec.digest, said("a" * 60))
"""


def generating(directory: Path, **settings: Any) -> TaskSpec:
    """A task that generates text, without code of its own."""
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    given: dict[str, Any] = {"output_type": "generate_until", "doc_to_choice": None, "metric_list": metrics, **settings}
    return TaskSpec(str(write_choices(directory, **given)), "exact_match")


def test_process_ends_with_its_parent_whatever_a_metric_does(tmp_path: Path) -> None:
    spec = generating(tmp_path, filter_list=ENDLESS)
    assert isinstance(spec.task, str)
    with subprocess.Popen([sys.executable, "-c", PARENT, spec.task], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.5)
        parent.kill()
    try:
        wait_until(lambda: not is_running(pid), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_filter_that_does_not_end_fails_the_sample(
    process: MetricProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = generating(tmp_path, filter_list=ENDLESS)
    monkeypatch.setattr(process, "_sample_limit_s", 1.0)
    opened(process, spec)
    with pytest.raises(MetricFailed, match="did not end within 1 s, twice"):
        process.values(spec.digest, said("b", "a" * 60))
    process.close(spec.digest)


def wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_scoring_goes_through_the_process(
    process: MetricProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = generating(tmp_path, doc_to_text="{{question}}", doc_to_target="me")
    prompts = Prompts(str(tiny_llama(tmp_path / "llama")), EngineOptions(max_model_len=512))
    evaluator = TaskEvaluator(KnownAnswers(prompts, {"even": "me"}), prompts, metrics=process)
    asked: list[str] = []
    values = process.values

    def noted(digest: str, answers: Sequence[Answers]) -> list[float]:
        asked.append(digest)
        return values(digest, answers)

    monkeypatch.setattr(process, "values", noted)
    assert [sample.value for sample in evaluator.score([Span("x", spec, 0, 2)]).samples] == [1.0, 1.0]
    assert asked == [spec.digest]
