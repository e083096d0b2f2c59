"""Evaluation during a training: the logits that it computes, what it reads, and what is refused before the training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.builders import tiny_llama
from workers.errors import InvalidTask, TrainingFailed
from workers.training.finetuning import text
from workers.training.finetuning.evaluation import Evaluator
from workers.training.finetuning.sharding import ShardedModel
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.finetuning.target_loss import TargetLoss
from workers.training.finetuning.text import TEXT_TRAINING
from workers.training.finetuning.trainer import check

OBJECTIVE: dict[str, Any] = {"name": "sums", "task": {"file": "data.jsonl", "max_tokens": 4}, "metric": "exact_match"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluation")
    tiny_llama(directory / "base")
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1), "answer": str(i + 1)} for i in range(8)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def spec_of(place: Path, *objectives: dict[str, Any], **options: Any) -> FinetuneSpec:
    document = {
        "name": "sums",
        "base": "base",
        "data": {"file": "data.jsonl", "max_length": 16},
        "training": {"steps": 1},
        "evaluation": {"objectives": objectives or (OBJECTIVE,), **options},
    }
    return parse_spec(document, place)


@pytest.mark.parametrize("kind", ["whole", "adapter", "sharded"])
def test_logits_are_computed_at_the_last_position(place: Path, kind: str) -> None:
    """The logits of a prompt at all positions could take more memory than the weights."""
    model = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    widths: list[int] = []
    model.lm_head.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[1]))
    trained = get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"])) if kind == "adapter" else model
    called = ShardedModel(TargetLoss(trained), trained) if kind == "sharded" else None
    section = spec_of(place).evaluation
    assert section is not None
    Evaluator(section, place / "base", trained, max_length=64, seed=0, called=called).values()
    assert set(widths) == {1}


def test_prompts_may_be_longer_than_training_rows(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations and analyses read prompts as studies do by default, whatever the length of training rows."""
    (place / "long.jsonl").write_text(json.dumps({"prompt": "1" * 300, "answer": "1"}) + "\n")
    spec = spec_of(place, {**OBJECTIVE, "task": {"file": "long.jsonl", "max_tokens": 8}})
    model = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    widths: list[int] = []
    model.model.register_forward_hook(
        lambda _, __, given, ___: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    TEXT_TRAINING.evaluation(spec, place / "base", model, model, None).values()
    assert widths[0] == 301
    lengths: list[int] = []
    monkeypatch.setattr(text, "MergeLosses", lambda *_, max_length, **__: lengths.append(max_length))
    longer = spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": 4096})})
    for experts in ({"one": spec}, {"one": spec, "two": longer}):
        TEXT_TRAINING.merge_losses(experts, {}, {}, samples=1, is_linearized=False)
    assert lengths == [2048, 4096]


def test_sampling_is_refused_before_the_training(place: Path) -> None:
    """Transformers completes prompts greedily, so a task that draws completions would end at the first evaluation."""
    task = {
        "task": "sampled",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(place / "data.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}],
    }
    greedy, sampled = place / "greedy.yaml", place / "sampled.yaml"
    for file, drawing in ((greedy, {}), (sampled, {"do_sample": True, "temperature": 0.8})):
        arguments = {"until": ["\n"], "max_gen_toks": 4, **drawing}
        file.write_text(json.dumps({**task, "generation_kwargs": arguments}))
    check(spec_of(place, {**OBJECTIVE, "task": str(greedy)}))
    message = "sums: evaluation.objectives.1.task: samples completions at the temperature 0.8; evaluations during a tr"
    with pytest.raises(InvalidTask, match=re.escape(message)):
        check(spec_of(place, OBJECTIVE, {**OBJECTIVE, "name": "sampled", "task": str(sampled)}))


def test_prompts_without_room_are_refused_or_reported(place: Path) -> None:
    """The base reads 512 tokens: a prompt that does not fit beside its completion is reported, and cut."""
    rows = [{"prompt": "1" * length, "answer": "1"} for length in (3, 509, 600)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = check(
        spec_of(place, OBJECTIVE, {**OBJECTIVE, "name": "b", "task": {"file": "rows.jsonl", "max_tokens": 4}})
    )
    message = "sums: evaluation.objectives.1: 2 of 3 prompts lose their beginning, because a prompt and its completion"
    assert [note[: len(message)] for note in notes] == [message]
    message = "sums: evaluation.objectives.0.task: 512 new tokens leave no room for a prompt in the 512 tokens that are"
    with pytest.raises(InvalidTask, match=re.escape(message)):
        check(spec_of(place, {**OBJECTIVE, "task": {"file": "data.jsonl", "max_tokens": 512}}))


def test_a_missing_chat_template_is_refused(place: Path) -> None:
    message = "sums: evaluation.chat_template: true; the tokenizer of .*base has no chat template; write false"
    with pytest.raises(InvalidTask, match=message):
        check(spec_of(place, chat_template=True))
    assert check(spec_of(place, chat_template=False)) == ()


def test_a_lack_of_gpu_memory_names_the_evaluation(place: Path) -> None:
    def out_of_memory(**_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation")

    model = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    model.forward = out_of_memory
    section = spec_of(place, samples=1).evaluation
    assert section is not None
    with pytest.raises(
        TrainingFailed, match=r"evaluation: the GPU ran out of memory \(CUDA out of memory\.\); shorter"
    ):
        Evaluator(section, place / "base", model, max_length=64, seed=0).values()
