"""Verification with transformers on one GPU, and on two between which the layers are divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from search_spaces.study.engine import EngineOptions
from tests.workers.recipes import arithmetic
from workers.engines.transformers.backend import Reference, logprobs
from workers.engines.transformers.verification import texts_to_read
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.export.checkpoint import export
from workers.merging.bank import Bank
from workers.serving.gpu_verification import GpuVerifier
from workers.types import Family, Span, TaskSpec

pytestmark = [pytest.mark.gpu, pytest.mark.bare]

DEVICE = "cuda"
NUM_SAMPLES = 16


@pytest.mark.parametrize("number", [1, 2])
def test_right_samples_pass_and_a_wrong_one_does_not(
    float_family: Family, sums: TaskSpec, tmp_path: Path, number: int
) -> None:
    """Samples that the CPU scored are verified on each number of GPUs; one that was changed is not."""
    if (count := torch.cuda.device_count()) < number:
        pytest.skip(f"needs {number} GPUs, this machine has {count}")
    options, recipe = EngineOptions(max_model_len=64), arithmetic(float_family, 0.3, 0.5)
    directory = str(tmp_path / "merge")
    export(recipe, Bank(float_family), Path(directory), dtype=torch.float32)
    reference, spans = Reference(directory, options), (Span("sums", sums, 0, NUM_SAMPLES),)
    evaluator = TaskEvaluator(reference, Prompts(directory, options))
    samples = evaluator.score(spans).samples
    texts = texts_to_read(evaluator, samples, spans)
    read = {text: logprobs(reference.model, text) for text in texts}
    verifier = GpuVerifier(DEVICE, number)
    assert verifier.num_needed(1) == number

    def num_beyond(*changed: int) -> tuple[int, int]:
        found = tuple(replace(s, value=1.0 - s.value) if s.position in changed else s for s in samples)
        report = verifier.verify(
            recipe.digest, directory, options, samples=found, spans=spans, dtype="float32", engine_logprobs=read
        )
        assert report.num_logprobs > NUM_SAMPLES
        return report.num_samples, report.num_beyond

    assert num_beyond() == (NUM_SAMPLES, 0)
    assert num_beyond(3) == (NUM_SAMPLES, 1)
