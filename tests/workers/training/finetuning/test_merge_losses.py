"""The analysis of experts: histograms of task vectors, measured landscapes and tables, and the model's losses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from search_spaces.recipe import Merge, Source
from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from workers.engines.transformers.backend import Reference
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Generation, Prompts
from workers.evaluation.references import References
from workers.training.finetuning.merge_losses import (
    MergeLosses,
    candidates,
    landscape,
    landscapes,
    losses_of_experts,
    merge_table,
    mixed_table,
)
from workers.training.finetuning.modality import MergeReport
from workers.training.finetuning.spec import FinetuneSpec, parse_spec, task_of
from workers.training.finetuning.task_vectors import accumulated_vector, task_vector
from workers.training.losses import sample_losses
from workers.training.mergopt.tangent import TangentModel

SCALE = 0.002
ITEMS = 6


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two experts with Laplace noise added to it, and a task for each."""
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
    found = losses_of_experts(
        {name: spec(family, name) for name in names}, {name: family / name for name in names}, samples=samples
    )
    assert isinstance(found, MergeLosses)
    return found


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


MATH_ALONE = Merge("task_arithmetic", (Source("math"), Source("text")), {"lambda": (1.0, 0.0)})


def test_losses_are_those_of_the_models(family: Path) -> None:
    """Coefficients are chosen on the first half of the samples, and merges are reported on the other half."""
    measuring = losses(family)
    chosen_by, reported = measuring.of(MATH_ALONE), measuring.report(MATH_ALONE).losses
    model = AutoModelForCausalLM.from_pretrained(family / "math", dtype=torch.float32).eval()
    prompts = Prompts(str(family / "base"), EngineOptions(max_model_len=64))
    for name in ("math", "text"):
        evaluation = spec(family, name).evaluation
        assert evaluation is not None
        targets = References(TaskEvaluator(None, prompts)).targets(task_of(evaluation.objectives[0], seed=0))
        for measured, samples in ((chosen_by, targets[: ITEMS // 2]), (reported, targets[ITEMS // 2 :])):
            total, num_tokens = 0.0, 0
            for (reading,) in (target.readings for target in samples):
                with torch.no_grad():
                    scores = model(torch.tensor([reading.tokens])).logits[0].log_softmax(-1)
                answer = range(reading.num_context, len(reading.tokens))
                total -= sum(float(scores[place - 1, reading.tokens[place]]) for place in answer)
                total -= float(scores[-1, list(reading.ends)].logsumexp(0))
                num_tokens += len(answer) + 1
            assert measured[name] == pytest.approx(total / num_tokens, rel=1e-3)


def test_prompts_of_chats_are_written_by_the_chat_template(family: Path, tmp_path: Path) -> None:
    """Losses of a merge on the task of an expert that was trained on chats are those of the template's prompts."""
    place = tmp_path / "family"
    shutil.copytree(family, place)
    for name in ("base", "math", "text"):
        (place / name / "chat_template.jinja").write_text(
            "<s>{% for m in messages %}Q: {{ m.content }}\nA: {% endfor %}"
        )
    templated = [f"Q: math{i}=\nA: " for i in range(ITEMS)]
    (place / "plain.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "answer": str(i)}) + "\n" for i, prompt in enumerate(templated))
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (place / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")

    def loss(data: str, task: str) -> float:
        objective = {"name": "math", "task": {"file": task, "max_tokens": 4}, "metric": "exact_match"}
        document = {
            "name": "math",
            "base": "base",
            "data": {"file": data, "completion": "{{answer}}"},
            "training": {"steps": 1},
            "evaluation": {"objectives": [objective]},
        }
        specs = {"math": parse_spec(document, place), "text": spec(place, "text")}
        measuring = losses_of_experts(specs, {name: place / name for name in specs}, samples=ITEMS)
        # Tasks choose other halves of their samples.
        return (measuring.of(MATH_ALONE)["math"] + measuring.report(MATH_ALONE).losses["math"]) / 2

    chats = loss("chats.jsonl", "math.jsonl")
    assert chats == pytest.approx(loss("plain.jsonl", "plain.jsonl"), rel=1e-5)
    assert abs(chats - loss("math.jsonl", "math.jsonl")) > 0.01


def test_metrics_are_those_of_the_merge_on_the_reported_samples(family: Path, tmp_path: Path) -> None:
    """Tasks whose answers are what one expert writes, all or none of them."""
    prompts = [f"text{i}=" for i in range(ITEMS)]
    options = EngineOptions(max_model_len=64)
    writer = Reference(str(family / "math"), options)
    requests = [Generation(tuple(writer.prompts.encode(prompt)), max_tokens=4) for prompt in prompts]
    answers = [completion.text for completion in writer.generate(requests)]
    document = {
        "name": "math",
        "base": str(family / "base"),
        "training": {"steps": 1},
        "data": {"file": str(family / "math.jsonl")},
    }
    found = {}
    for name, right in (("all", ITEMS), ("none", 0)):
        rows = [{"prompt": p, "answer": answers[i] if i < right else "no"} for i, p in enumerate(prompts)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"file": f"{name}.jsonl", "max_tokens": 4}
        objective = {"name": "n", "task": task, "metric": "exact_match"}
        of = parse_spec({**document, "evaluation": {"objectives": [objective]}}, tmp_path)
        specs = {"math": of, "text": of}
        measuring = losses_of_experts(specs, {each: family / each for each in specs}, samples=ITEMS)
        found[name] = measuring.report(MATH_ALONE).values["math"]
    assert found == {"all": 1.0, "none": 0.0}


def test_linearized_merges_are_scored_as_linearizations(family: Path) -> None:
    """At the base both are the base; at an expert the loss is that of the linearized model, not of the expert."""
    specs = {name: spec(family, name) for name in ("math", "text")}
    places = {name: family / name for name in specs}
    plain, linearized = (
        losses_of_experts(specs, places, samples=ITEMS, is_linearized=is_linearized) for is_linearized in (False, True)
    )
    base = Merge("task_arithmetic", MATH_ALONE.sources, {"lambda": (0.0, 0.0)})
    assert linearized.of(base) == pytest.approx(plain.of(base), rel=1e-4)
    far = Merge("task_arithmetic", MATH_ALONE.sources, {"lambda": (5.0, 0.0)})
    assert linearized.of(far)["math"] != pytest.approx(plain.of(far)["math"], rel=1e-3)
    model = AutoModelForCausalLM.from_pretrained(family / "base", dtype=torch.float32, attn_implementation="eager")
    tangent = TangentModel(model.eval())
    expert = load_file(family / "math" / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 5 * (expert[name].float() - parameter)
    options = EngineOptions(max_model_len=64)
    references = References(TaskEvaluator(None, Prompts(str(family / "base"), options)))
    task = task_of(specs["math"].evaluation.objectives[0], seed=0)  # type: ignore[union-attr]
    targets = references.targets(task)[: ITEMS // 2]
    device = torch.device("cpu")
    scored = SimpleNamespace(device=device, logits=lambda tokens, last: tangent(input_ids=tokens)[:, -last:])
    with torch.no_grad():
        expected = float(sample_losses(scored, targets).mean()) / references.unit(task)
    assert linearized.of(far)["math"] == pytest.approx(expected, rel=1e-3)


def test_a_task_of_one_sample_cannot_choose_a_coefficient(family: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "1=", "answer": "1"}) + "\n")
    objective = {"name": "n", "task": {"file": "one.jsonl", "max_tokens": 4}, "metric": "exact_match"}
    document = {
        "name": "math",
        "base": str(family / "base"),
        "training": {"steps": 1},
        "data": {"file": str(family / "math.jsonl")},
    }
    of = parse_spec({**document, "evaluation": {"objectives": [objective]}}, tmp_path)
    with pytest.raises(InvalidTask, match=r"one.jsonl.*: has 1 samples; expected at least 2"):
        losses_of_experts({"math": of}, {"math": family / "math"}, samples=1)


def test_the_sum_of_task_vectors_is_measured(family: Path) -> None:
    """The sum of two independent Laplace vectors has a Gaussian scale that is larger by the root of two."""
    one = task_vector("math", family / "base", family / "math")
    both = accumulated_vector(family / "base", [family / "math", family / "text"])
    assert both.expert == "sum of all"
    assert both.fits[1].scale == pytest.approx(math.sqrt(2) * one.fits[1].scale, rel=0.05)


def test_only_the_first_samples_count(family: Path) -> None:
    merge = next(iter(candidates(["math", "text"]))).merge
    assert losses(family, 1).of(merge) != losses(family).of(merge)


def test_an_expert_without_evaluation_is_named(family: Path) -> None:
    bare = spec(family, "math").model_copy(update={"evaluation": None})
    with pytest.raises(InvalidTask, match="math: has no evaluation"):
        losses_of_experts({"math": bare}, {"math": family / "math"}, samples=1)


def bowl(merge: Merge) -> Mapping[str, float]:
    """Losses that are least at coefficient 0.4 for one expert, and 0.6 for the other."""
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


def test_landscapes_are_of_four_pairs() -> None:
    def measure(merge: Merge) -> Mapping[str, float]:
        return {source.model: 1.0 for source in merge.sources}

    found = landscapes(measure, ["a", "b", "c", "d", "e"], grid=(0.0, 1.0))
    assert [each.experts for each in found] == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c")]
    assert [each.experts for each in landscapes(measure, ["a", "b"], grid=(0.0,))] == [("a", "b")]


def test_what_is_reported_is_measured_apart() -> None:
    """The coefficient is chosen by `measure`; losses and metrics of a row are those of `report` at it."""

    def report(merge: Merge) -> MergeReport:
        value = merge.coefficients.get("lambda", 0.0)
        assert isinstance(value, float)
        return MergeReport({"math": 10 + value, "text": 20 + value}, {"math": value, "text": value / 2})

    rows = {row.method: row for row in merge_table(bowl, ["math", "text"], report=report, wudi=True)}
    assert list(rows) == ["weight averaging", "task arithmetic", "TIES", "DARE", "WUDI"]
    row = rows["task arithmetic"]
    assert row.coefficient == 0.5
    assert row.mean == pytest.approx(15.5)
    assert row.losses == {"math": 10.5, "text": 20.5}
    assert row.values == {"math": 0.5, "text": 0.25}
    assert row.value == pytest.approx(0.375)
    assert [coefficient for coefficient, _ in row.tried] == [round(0.1 * i, 1) for i in range(1, 11)] + [1.25, 1.5, 2.0]
    assert min(row.tried, key=lambda each: each[1])[0] == 0.5
    assert rows["WUDI"].coefficient == 0.5


def test_small_task_vectors_get_coefficients_above_one() -> None:
    """Experts that moved half as far have their best merges at twice the coefficients, by every method."""

    def flat_bowl(merge: Merge) -> Mapping[str, float]:
        value = merge.coefficients.get("lambda", 0.0)
        assert isinstance(value, float)
        return {"math": (value - 1.5) ** 2}

    rows = {row.method: row.coefficient for row in merge_table(flat_bowl, ["math", "text"], wudi=True)}
    assert rows == {"weight averaging": None, "task arithmetic": 1.5, "TIES": 1.5, "DARE": 1.5, "WUDI": 1.5}


def test_pairs_are_mixed_of_two_trainings() -> None:
    """Every pair is merged twice, with the one or the other expert of the second training."""
    merged = set()

    def measure(merge: Merge) -> Mapping[str, float]:
        merged.add(tuple(source.model for source in merge.sources))
        return {source.model: float(source.model.endswith("2")) for source in merge.sources}

    def report(merge: Merge) -> MergeReport:
        return MergeReport(measure(merge), {source.model: 10.0 for source in merge.sources})

    rows = mixed_table(measure, {"a": "a2", "b": "b2", "c": "c2"}, report=report)
    assert merged == {("a", "b2"), ("a2", "b"), ("a", "c2"), ("a2", "c"), ("b", "c2"), ("b2", "c")}
    assert [row.method for row in rows] == ["weight averaging", "task arithmetic", "TIES", "DARE"]
    for row in rows:
        assert row.losses == {"a": 0.5, "b": 0.5, "c": 0.5}
        assert row.values == {"a": 10.0, "b": 10.0, "c": 10.0}
        assert row.num_experts == 2


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
