"""Unstable tokens: rounding explains the effect of another order of sums, but not of another merge."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from workers.engines.transformers.backend import Reference, logprobs
from workers.engines.transformers.rounding import MOST, explained, rounding_bounds
from workers.engines.transformers.verification import texts_to_read, verify
from workers.engines.vllm.canary import Calibration
from workers.errors import EvidenceMismatch
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.types import Span, TaskSpec, VerificationReport

pytestmark = pytest.mark.slow

OPTIONS = EngineOptions(max_model_len=128, dtype="float32")
TOKENS = [1, *((37 * i) % 120 + 3 for i in range(60))]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(str(tiny_llama(tmp_path_factory.mktemp("llama"), 4, layers=4, hidden=64)), OPTIONS)


def unstable(model: Any, *, by: float) -> Any:
    """The model with scaled queries, so that attention chooses between nearly equal keys and rounding errors grow."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for layer in found.model.layers:
            layer.self_attn.q_proj.weight *= by
    return found


def in_other_order(model: Any, seed: int) -> Any:
    """A model of the same function with another order of sums over the MLP's columns and within attention heads."""
    found = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in found.model.layers:
            mlp, attention = layer.mlp, layer.self_attn
            order = torch.randperm(mlp.up_proj.weight.shape[0], generator=draw)
            for rows in (mlp.up_proj, mlp.gate_proj):
                rows.weight.copy_(rows.weight[order])
            mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])
            size = attention.head_dim
            order = torch.cat([h * size + torch.randperm(size, generator=draw) for h in range(2)])
            attention.v_proj.weight.copy_(attention.v_proj.weight[order])
            attention.o_proj.weight.copy_(attention.o_proj.weight[:, order])
    return found


def test_stable_tokens_have_small_bounds(reference: Reference) -> None:
    """In a usual model no token may differ by more than the tolerance, and bounds repeat."""
    bounds = rounding_bounds(reference.model, TOKENS)
    assert len(bounds) == len(TOKENS) - 1
    assert 0 < max(bounds) < TOLERANCE / 2
    assert bounds == rounding_bounds(reference.model, TOKENS)


def test_other_orders_of_sums_are_within_the_bounds(reference: Reference) -> None:
    """Another order of sums changes log-probabilities within the bounds, also where rounding errors are large."""
    within = total = largest = 0.0
    for by in (1.0, 30.0, 300.0):
        model = unstable(reference.model, by=by)
        theirs, bounds = logprobs(model, TOKENS), rounding_bounds(model, TOKENS)
        for seed in range(3):
            for ours, other, bound in zip(logprobs(in_other_order(model, seed), TOKENS), theirs, bounds, strict=True):
                within, total = within + (abs(ours - other) <= bound), total + 1
                largest = max(largest, abs(ours - other))
    assert largest > 1e-5, "rounding errors are amplified"
    assert within >= 0.995 * total


def test_a_few_unstable_tokens_are_explained() -> None:
    """Differences within their bounds are left out, if there are few of them; others count."""
    theirs = [-1.0] * 100
    ours = [*theirs[:-1], -1.002]
    bounds = [1e-4] * 99 + [0.004]
    assert explained(ours, theirs, bounds, tolerance=TOLERANCE) == (0.0, 1)
    largest, count = explained([-1.0005, *ours[1:]], theirs, bounds, tolerance=TOLERANCE)
    assert (round(largest, 6), count) == (0.0005, 1)
    largest, count = explained(ours, theirs, [1e-4] * 100, tolerance=TOLERANCE)
    assert (round(largest, 6), count) == (0.002, 0)
    many = [-1.002] * 3 + theirs[3:]
    assert explained(many, theirs, [0.004] * 100, tolerance=TOLERANCE)[1] == 0
    assert math.isnan(explained([math.nan], [-1.0], [0.004], tolerance=TOLERANCE)[0])


@pytest.mark.parametrize("change", ["one tensor", "all tensors a little", "a norm"])
def test_another_merge_is_not_explained(reference: Reference, change: str) -> None:
    """A wrong merge moves stable tokens, too, so that its differences have no explanation."""
    model = reference.model
    wrong = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if change == "one tensor":
            weight = wrong.model.layers[2].mlp.up_proj.weight
            weight += 0.02 * torch.randn(weight.shape, generator=draw)
        elif change == "a norm":
            wrong.model.layers[1].input_layernorm.weight *= 1.01
        else:
            for parameter in wrong.parameters():
                parameter *= 1 + 0.003 * torch.randn(parameter.shape, generator=draw)
    ours, theirs = logprobs(wrong, TOKENS), logprobs(model, TOKENS)
    largest, count = explained(ours, theirs, rounding_bounds(model, TOKENS), tolerance=TOLERANCE)
    assert count == 0
    assert largest > TOLERANCE


def verified(reference: Reference, file: Path, *, off: float, at: int) -> VerificationReport:
    """Verification report for completions in which the engine's log-probability of one token differs by `off`."""
    file.write_text("\n".join(json.dumps({"prompt": f"{i}+{i}={'x' * 30}", "answer": "?"}) for i in range(8)))
    spec = TaskSpec({"file": str(file), "max_tokens": 5}, "exact_match")
    spans = (Span("sums", spec, 0, 8),)
    evaluator = TaskEvaluator(reference, Prompts(reference.prompts.directory, OPTIONS))
    samples = evaluator.score(spans).samples
    known = {text: logprobs(reference.model, text) for text in texts_to_read(evaluator, samples, spans)}
    first = next(iter(known))
    known[first][at] += off
    directory = reference.prompts.directory
    return verify(
        "digest", directory, OPTIONS, samples=samples, spans=spans, dtype="float32", engine_logprobs=known,
        model=reference.model,
    )  # fmt: skip


def test_verification_counts_unstable_tokens(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference beyond the tolerance fails on a stable token, and is counted on an unstable one."""
    file = tmp_path / "sums.jsonl"
    report = verified(reference, file, off=0.002, at=7)
    assert (report.num_beyond, report.num_unstable) == (1, 0)
    place = "workers.engines.transformers.verification.rounding_bounds"
    monkeypatch.setattr(place, lambda model, text: [0.004 if i == 7 else 1e-5 for i in range(len(text) - 1)])
    report = verified(reference, file, off=0.002, at=7)
    assert (report.num_equal, report.num_beyond, report.num_unstable) == (8, 0, 1)
    assert report.max_logprob_difference < 1e-5
    assert verified(reference, file, off=0.002, at=8).num_beyond == 1
    assert verified(reference, file, off=2 * MOST, at=7).num_beyond == 1


def test_canary_explains_unstable_tokens() -> None:
    """A canary in float32 passes with few unstable tokens, asks for bounds only then, and fails otherwise."""
    calibration = Calibration("float32", (-2.0,) * 60, None)
    theirs = [-1.0] * 60
    asked = []

    def bounds() -> list[float]:
        asked.append(1)
        return [0.004, *[1e-5] * 59]

    assert calibration.check(theirs, theirs, of="this merge", bounds=bounds) == 0
    assert not asked
    assert calibration.check([-1.002, *theirs[1:]], theirs, of="this merge", bounds=bounds) == 0
    assert asked
    with pytest.raises(EvidenceMismatch, match=r"differ by 0\.002"):
        calibration.check([*theirs[1:], -1.002], theirs, of="this merge", bounds=bounds)
