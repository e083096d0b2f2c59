"""Metrics in a replica, whose engine has its own thread; metrics that need a main thread get one."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from tests.workers.judged_tasks import (
    MATH_ANSWERS,
    MATH_CODE,
    MATH_DOCUMENTS,
    MATH_VALUES,
    KnownAnswers,
    write_task,
)
from workers.engines.source_recipes import base_recipe
from workers.engines.vllm.engine import SwapReport
from workers.errors import TrialFailed
from workers.evaluation import tasks
from workers.evaluation.confined_task import ConfinedTask
from workers.evaluation.execution import Executor
from workers.evaluation.lm_eval import BackendLM
from workers.evaluation.lm_eval_tasks import build, prepare
from workers.evaluation.prompts import Prompts
from workers.serving import engine_worker
from workers.serving.replica import ScoringReplica
from workers.types import Family, ModelSource, ScoreRequest, Span, TaskSpec

pytestmark = pytest.mark.slow  # a process that imports lm-eval takes 5 s

OPTIONS = EngineOptions(max_model_len=512)


class KnownEngine(KnownAnswers):
    """A stand-in with the parts of an engine that EngineWorker uses."""

    held_digest: str | None = None
    bank_fingerprint = dtype = sources = "known"
    canary = SimpleNamespace(num_passed=1)

    def swap(self, recipe: Any) -> SwapReport:
        self.held_digest = recipe.digest
        return SwapReport(recipe.digest, 1, "known", 0.0, 0.0, 0.0, is_new=True)


class Replica:
    """A scoring replica with an engine that gives known answers."""

    def __init__(self, directory: str, patch: pytest.MonkeyPatch, *, sample_limit_s: float) -> None:
        self.family = Family(ModelSource("base", directory, "fingerprint"), ())
        self.prompts = Prompts(directory, OPTIONS)
        self.engine = KnownEngine(self.prompts, {})
        self.confined_by = Executor().enforced
        patch.setattr(engine_worker, "Engine", lambda family, options, **_: self.engine)
        patch.setattr(tasks, "ConfinedTask", partial(ConfinedTask, sample_limit_s=sample_limit_s))
        self.replica = ScoringReplica(partial(engine_worker.EngineWorker, self.family, OPTIONS))

    def score(self, spec: TaskSpec, answers: dict[str, str]) -> dict[str, float] | Exception:
        """The values by document, or the error that scoring raises."""
        self.engine.answers = answers
        span = Span("x", spec, 0, len(answers))
        request = ScoreRequest("study", base_recipe(self.family), (span,))
        try:
            scored = asyncio.run(self.replica.score(request))
            assert scored.evidence.engine == f"vllm, known, known, code of tasks confined by {self.confined_by}"
            return {sample.document: sample.value for sample in scored.samples}
        except Exception as error:
            return error

    def is_healthy(self) -> bool:
        try:
            asyncio.run(self.replica.check_health())
        except RuntimeError:
            return False
        return True


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("llama"), 1))


# What the MATH tasks do with an answer, without the part that raises in other threads.
SYMPY_ALONE = """
from lm_eval.tasks.minerva_math.utils import (
    get_unnormalized_answer, is_equiv, normalize_final_answer, process_docs,
)

def process_results(doc, results):
    said = normalize_final_answer(get_unnormalized_answer(results[0]))
    return {"exact_match": int(is_equiv(said, doc["answer"]))}
"""


# The metric is the answer itself, as a number.
NUMBERS = """
import os, signal, time

def process_docs(dataset):
    return dataset

def process_results(doc, results):
    if results[0] == "wait":
        time.sleep(20)
        return {"exact_match": 1.0}
    if results[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"acc": 1.0} if results[0] == "nothing" else {"exact_match": float(results[0])}
"""


def test_math_scores_of_a_replica_are_those_of_lm_eval(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.evaluator import evaluate

    replica = Replica(llama, monkeypatch, sample_limit_s=5.0)
    for name, code, metric in (
        ("alone", SYMPY_ALONE, "exact_match"),
        ("exact", MATH_CODE, "exact_match"),
        ("verified", MATH_CODE, "math_verify"),
    ):
        spec = write_task(tmp_path, name, code, MATH_DOCUMENTS, metric=metric)
        model = BackendLM(KnownAnswers(replica.prompts, MATH_ANSWERS), replica.prompts)
        theirs = evaluate(model, {name: build(spec, prepared=prepare(spec)).subtasks[0].task}, bootstrap_iters=0)
        expected = {str(sample["doc_id"]): float(sample[metric]) for sample in theirs["samples"][name]}
        assert replica.score(spec, MATH_ANSWERS) == expected, name
        assert expected == MATH_VALUES
    assert replica.is_healthy()


def test_failing_metric_fails_the_candidate(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that fails on an answer fails the candidate and not the engine."""
    replica = Replica(llama, monkeypatch, sample_limit_s=1.0)
    good = {"first": "1", "second": "0.5", "third": "0"}
    spec = write_task(tmp_path, "numbers", NUMBERS, [{"problem": each, "solution": ""} for each in good])
    for answer, what in (
        ("many", r"raised ValueError: could not convert string to float: 'many'; the answer was \(\('many',\),\)"),
        ("nothing", "is not among what the task gave: acc"),
        ("nan", "gave nan, not a finite number"),
        ("wait", "did not end within 1 s, twice"),
        ("kill", r"ended its process \(signal SIGKILL\), twice"),
    ):
        failed = replica.score(spec, {**good, "second": answer})
        assert isinstance(failed, TrialFailed), failed
        assert re.match(f"task numbers, document 1: metric 'exact_match' {what}", str(failed))
        assert replica.is_healthy()
        assert replica.score(spec, good) == {"0": 1.0, "1": 0.5, "2": 0.0}
