"""Tolerances that are measured on a model, and verification with them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from workers.alignments.alignment import Alignment
from workers.alignments.hooks import add_alignments
from workers.alignments.recipes import PlacedAlignment
from workers.engines.transformers import tolerance
from workers.engines.transformers.backend import ATTENTION, Reference, logprobs
from workers.engines.transformers.tolerance import Tolerance, measured_tolerance
from workers.engines.transformers.verification import texts_to_read, verify
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.types import Span, TaskSpec, VerificationReport

pytestmark = pytest.mark.slow  # transformers generates

OPTIONS = EngineOptions(max_model_len=128)
TEXTS = [tuple(range(3, 60)), tuple(range(40, 90))]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model in float32 whose weights have bfloat16 values, as in an export."""
    reference = Reference(str(tiny_llama(tmp_path_factory.mktemp("llama"), 4)), OPTIONS)
    for parameter in reference.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    reference.model.save_pretrained(reference.prompts.directory)
    return reference


def test_the_tolerance_is_a_multiple_of_rounding(reference: Reference) -> None:
    exact = torch.tensor([value for text in TEXTS for value in logprobs(reference.model, text)])
    rounded_model = AutoModelForCausalLM.from_pretrained(
        reference.prompts.directory, dtype=torch.bfloat16, attn_implementation=ATTENTION
    ).eval()
    rounded = torch.tensor([value for text in TEXTS for value in logprobs(rounded_model, text)])
    rounding = float((rounded - exact).square().mean().sqrt())
    found = measured_tolerance(reference.model, TEXTS, dtype="bfloat16")
    assert found.rounding == pytest.approx(rounding, rel=1e-4)
    assert found.value == max(2.5 * rounding, 0.01) < found.of(40) < found.of(1)
    assert found.gap >= found.value


def test_without_a_measurement_the_tolerance_is_a_constant(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_tolerance(reference.model, TEXTS, dtype="float32") == Tolerance("float32")
    assert measured_tolerance(reference.model, [(1,), ()], dtype="bfloat16") == Tolerance("bfloat16")
    assert Tolerance("bfloat16").of(1) == Tolerance("bfloat16").gap == Tolerance("bfloat16").value == 0.3
    before = {name: weights.clone() for name, weights in reference.model.state_dict().items()}

    def read(model: Any, text: Sequence[int], likeliest: torch.Tensor | None = None) -> Any:
        if model.dtype is not torch.float32:
            raise RuntimeError("no kernel")
        return original(model, tuple(text), likeliest)

    original = tolerance._read
    monkeypatch.setattr(tolerance, "_read", read)
    assert measured_tolerance(reference.model, TEXTS, dtype="float16") == Tolerance("float16")
    assert all(torch.equal(weights, before[name]) for name, weights in reference.model.state_dict().items())


@pytest.mark.parametrize("kind", ["projection", "scale"])
def test_alignments_are_rounded_too(tmp_path: Path, kind: str) -> None:
    """Rounding is measured on models with alignments, which are then computed in the same dtype."""
    model = Reference(str(tiny_llama(tmp_path, 4)), OPTIONS).model
    plain = measured_tolerance(model, TEXTS, dtype="bfloat16")
    hidden = model.config.hidden_size
    alignment = Alignment(**{kind: 1.7 * torch.eye(hidden) if kind == "projection" else torch.full((hidden,), 1.7)})
    add_alignments(model, {1: PlacedAlignment("a", alignment, 1.0)})
    before = logprobs(model, TEXTS[0])
    found = measured_tolerance(model, TEXTS, dtype="bfloat16")
    assert found.rounding is not None
    assert found != plain
    assert logprobs(model, TEXTS[0]) == before


def test_weights_are_the_same_after_a_measurement(reference: Reference) -> None:
    weights = next(reference.model.parameters())
    finer, original = weights.data * (1 + 2.0**-20), weights.data
    weights.data = finer.clone()
    try:
        measured_tolerance(reference.model, TEXTS, dtype="bfloat16")
        assert torch.equal(weights.data, finer)
        assert not torch.equal(finer.bfloat16().float(), finer)
    finally:
        weights.data = original


def test_few_tokens_are_read_in_16_bits(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def read(model: Any, text: Sequence[int], likeliest: torch.Tensor | None = None) -> Any:
        lengths.append(len(text))
        return original(model, tuple(text), likeliest)

    original = tolerance._read
    monkeypatch.setattr(tolerance, "_read", read)
    monkeypatch.setattr(tolerance, "MOST_TOKENS", 80)
    measured_tolerance(reference.model, [*TEXTS, *TEXTS], dtype="bfloat16")
    assert lengths == [57, 23, 57, 23]


def test_rounding_that_hides_wrong_merges_is_too_large() -> None:
    assert Tolerance("bfloat16").too_large is None
    assert Tolerance("bfloat16", 0.24, 0.24).too_large is None
    assert Tolerance("float16", 0.04, 0.04).too_large is None
    for wrong in (0.25, math.inf, math.nan):
        for found in (Tolerance("bfloat16", wrong, 0.01), Tolerance("bfloat16", 0.01, wrong)):
            reason = found.too_large
            assert reason is not None
            assert "rounding to bfloat16 alone changes the log-probabilities of this model by" in reason
            assert "a wrong merge is only found up to 0.24" in reason


def test_a_wrong_merge_does_not_pass_by_large_rounding(reference: Reference, tmp_path: Path) -> None:
    """Logits in the thousands are far apart in bfloat16. Garbage would be within the tolerance measured on them."""
    steep = Reference(reference.prompts.directory, OPTIONS)
    output = steep.model.get_output_embeddings()
    output.weight = torch.nn.Parameter(output.weight.data * 1000)
    (tmp_path / "a.jsonl").write_text('{"prompt": "what is 1 and 1?", "answer": "?"}\n')
    spans = (Span("sums", TaskSpec({"file": str(tmp_path / "a.jsonl"), "max_tokens": 5}, "exact_match"), 0, 1),)
    evaluator = TaskEvaluator(steep, Prompts(reference.prompts.directory, OPTIONS))
    samples = evaluator.score(spans).samples
    (text,) = texts_to_read(evaluator, samples, spans)
    measured = measured_tolerance(steep.model, [text], dtype="bfloat16")
    assert measured.rounding is not None
    off = [value + 0.9 * measured.value for value in logprobs(steep.model, text)]
    found = verify(
        "digest",
        reference.prompts.directory,
        OPTIONS,
        samples=samples,
        spans=spans,
        dtype="bfloat16",
        engine_logprobs={text: off},
        model=steep.model,
    )
    assert (found.num_samples, found.is_equal, found.tolerance) == (0, False, 0.3)
    assert found.reason == measured.too_large
    assert found.reason is not None


def test_a_small_difference_of_all_samples_is_found(reference: Reference, tmp_path: Path) -> None:
    """Errors like those of bfloat16 pass; some times as large ones do not, though they are far below 0.3."""
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"what is {i} and {i}?", "answer": "?"}) for i in range(8)))
    spans = (Span("sums", TaskSpec({"file": str(file), "max_tokens": 5}, "exact_match"), 0, 8),)
    evaluator = TaskEvaluator(reference, Prompts(reference.prompts.directory, OPTIONS))
    samples = evaluator.score(spans).samples
    texts = texts_to_read(evaluator, samples, spans)
    exact = {text: torch.tensor(logprobs(reference.model, text)) for text in texts}
    rounding = measured_tolerance(reference.model, texts, dtype="bfloat16").rounding
    assert rounding is not None
    scale = max(rounding, 0.004)  # the tolerance is at least 0.01
    draw = torch.Generator().manual_seed(0)

    def check(times: float) -> VerificationReport:
        return verify(
            "digest",
            reference.prompts.directory,
            OPTIONS,
            samples=samples,
            spans=spans,
            dtype="bfloat16",
            engine_logprobs={
                text: (values + times * scale * torch.randn(len(values), generator=draw)).tolist()
                for text, values in exact.items()
            },
        )

    right, wrong = check(1.0), check(4.5)
    assert right.num_beyond == 0
    assert right.num_equal == 8
    assert wrong.num_beyond == 8
    assert wrong.max_logprob_difference < 0.3
