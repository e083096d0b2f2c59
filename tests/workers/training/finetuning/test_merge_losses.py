"""Histograms hold what task vectors are, landscapes and tables what is measured, and losses are those of the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from search_spaces.recipe import Merge, Source
from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.evaluation.references import References
from workers.training.finetuning.merge_losses import MergeLosses, candidates, landscape, losses_of_experts, merge_table
from workers.training.finetuning.spec import FinetuneSpec, parse_spec, task_of
from workers.training.finetuning.task_vectors import task_vector

SCALE = 0.002
ITEMS = 6


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two experts at Laplace noise from it, and a task for each."""
    root = tmp_path_factory.mktemp("family")
    tiny_llama(root / "base")
    for number, name in enumerate(("math", "text")):
        tiny_llama(root / name)
        generator = torch.Generator().manual_seed(number)
        weights = load_file(root / "base" / "model.safetensors")
        for tensor in weights.values():
            size = torch.empty(tensor.shape).exponential_(1 / SCALE, generator=generator)
            sign = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            tensor.copy_((tensor.float() + size * sign).to(tensor.dtype))
        save_file(weights, root / name / "model.safetensors", metadata={"format": "pt"})
        lines = [json.dumps({"prompt": f"{name}{i}=", "answer": str(i)}) for i in range(ITEMS)]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def spec(family: Path, name: str) -> FinetuneSpec:
    objective = {"name": name, "task": {"file": f"{name}.jsonl", "max_tokens": 4}, "metric": "exact_match"}
    document = {
        "name": name,
        "base": "base",
        "data": {"file": f"{name}.jsonl", "completion": "{{answer}}", "max_length": 64},
        "training": {"steps": 1},
        "evaluation": {"objectives": [objective]},
    }
    return parse_spec(document, family)


def losses(family: Path, samples: int = ITEMS) -> MergeLosses:
    names = ("math", "text")
    return losses_of_experts(
        {name: spec(family, name) for name in names}, {name: family / name for name in names}, samples=samples
    )


def test_the_histogram_and_the_better_fit_are_those_of_the_noise(family: Path) -> None:
    found = task_vector("math", family / "base", family / "math")
    laplace, gaussian = found.fits
    assert laplace.scale == pytest.approx(SCALE, rel=0.05)
    assert laplace.distance < 0.5 * gaussian.distance
    width = found.edges[1] - found.edges[0]
    assert sum(found.density) * width == pytest.approx(1, abs=0.02)
    middle = len(found.density) // 2
    assert found.density[middle] == max(found.density)
    assert found.density[middle] == pytest.approx(1 / (2 * SCALE), rel=0.2)


def test_losses_are_those_of_the_models(family: Path) -> None:
    measured = losses(family).of(Merge("task_arithmetic", (Source("math"), Source("text")), {"lambda": (1.0, 0.0)}))
    model = AutoModelForCausalLM.from_pretrained(family / "math", dtype=torch.float32).eval()
    prompts = Prompts(str(family / "base"), EngineOptions(max_model_len=64))
    for name in ("math", "text"):
        evaluation = spec(family, name).evaluation
        assert evaluation is not None
        targets = References(TaskEvaluator(None, prompts)).targets(task_of(evaluation.objectives[0], seed=0))
        total, num_tokens = 0.0, 0
        for (reading,) in (target.readings for target in targets):
            with torch.no_grad():
                scores = model(torch.tensor([reading.tokens])).logits[0].log_softmax(-1)
            answer = range(reading.num_context, len(reading.tokens))
            total -= sum(float(scores[place - 1, reading.tokens[place]]) for place in answer)
            total -= float(scores[-1, list(reading.ends)].logsumexp(0))
            num_tokens += len(answer) + 1
        assert measured[name] == pytest.approx(total / num_tokens, rel=1e-3)


def test_only_the_first_samples_count(family: Path) -> None:
    merge = next(iter(candidates(["math", "text"]))).merge
    assert losses(family, 1).of(merge) != losses(family).of(merge)


def test_an_expert_without_evaluation_is_named(family: Path) -> None:
    bare = spec(family, "math").model_copy(update={"evaluation": None})
    with pytest.raises(InvalidTask, match="math: has no evaluation"):
        losses_of_experts({"math": bare}, {"math": family / "math"}, samples=1)


def bowl(merge: Merge) -> Mapping[str, float]:
    """Losses whose best coefficients are 0.4 for one expert, and 0.6 for the other."""
    value = merge.coefficients.get("lambda", 1.0)
    first, second = value if isinstance(value, tuple) else (value, value)
    assert isinstance(first, float)
    assert isinstance(second, float)
    return {"math": 1 + (first - 0.4) ** 2, "text": 1 + (second - 0.6) ** 2}


def test_a_landscape_is_the_sum_of_both_losses() -> None:
    found = landscape(bowl, ("math", "text"), grid=(0.0, 0.4, 0.6))
    assert found.losses[1][2] == pytest.approx(2.0)
    assert found.losses[0][0] == pytest.approx(2 + 0.16 + 0.36)
    assert min(min(row) for row in found.losses) == found.losses[1][2]


def test_a_table_has_each_methods_best_coefficient() -> None:
    rows = {row.method: row for row in merge_table(bowl, ["math", "text"])}
    assert list(rows) == ["weight averaging", "task arithmetic", "TIES", "DARE"]
    assert rows["weight averaging"].coefficient is None
    assert rows["weight averaging"].spread == 0
    assert (rows["task arithmetic"].coefficient, rows["DARE"].coefficient, rows["TIES"].coefficient) == (0.5, 0.5, 0.5)
    assert rows["task arithmetic"].mean == pytest.approx(1.01)
    assert rows["task arithmetic"].spread > 0


def test_of_three_experts_pairs_are_merged_too() -> None:
    best = {"math": 0.4, "text": 0.6, "code": 1.0}

    def measure(merge: Merge) -> Mapping[str, float]:
        value = merge.coefficients.get("lambda", 0.5)
        assert isinstance(value, float)
        return {source.model: (value - best[source.model]) ** 2 for source in merge.sources}

    rows = merge_table(measure, list(best))
    assert [(row.num_experts, row.method) for row in rows[::4]] == [(2, "weight averaging"), (3, "weight averaging")]
    for row in (rows[1], rows[5]):  # the same, as every expert is in as many pairs
        assert row.coefficient == 0.7
        assert row.losses == pytest.approx({"math": 0.09, "text": 0.01, "code": 0.09})
        assert row.mean == pytest.approx(0.19 / 3)


def test_a_coefficient_whose_losses_are_nan_is_not_the_best() -> None:
    rows = merge_table(lambda merge: {"math": math.nan if merge.coefficients.get("lambda") == 0.1 else 1.0}, ["math"])
    assert [row.coefficient for row in rows] == [None, 0.2, 0.3, 0.2]
