"""The layouts of models that have gradients, and refused layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import workers.training.model
from search_spaces.study.engine import EngineOptions
from tests.layouts import LAYOUTS, layout_family
from tests.workers.recipes import arithmetic
from workers.engines.transformers.merged_models import merged_model
from workers.errors import InvalidModel
from workers.merging.bank import Bank
from workers.training.gradients import CoefficientGradients
from workers.training.model import TrainableModel
from workers.types import TaskSpec

FAST = ("gpt2", "gemma2", "qwen3_moe")  # a prefix, capped scores; experts, which transformers joins


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in LAYOUTS],
)
def test_merges_are_read_as_transformers_reads_them(tmp_path: Path, model_type: str) -> None:
    family = layout_family(tmp_path / "models", model_type)
    file = tmp_path / "task.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a" * i + "=", "answer": str(i)}) + "\n" for i in range(1, 9)))
    tasks = {"count": TaskSpec({"file": str(file), "max_tokens": 4}, "exact_match")}
    trained = CoefficientGradients(
        family, EngineOptions(max_model_len=64, dtype="float32"), tasks, cache=tmp_path, recomputes=True
    )
    recipe = arithmetic(family, 0.4, 0.7)
    found = trained.losses(recipe, {"count": range(8)})["count"]
    model = merged_model(recipe, trained.bank, dtype="float32")
    targets = tuple(trained._of_tasks["count"].at.values())
    unit = sum(target.size for target in targets) / len(targets)
    for loss, target in zip(found, targets, strict=True):
        (reading,) = target.readings
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([reading.tokens])).logits[0].log_softmax(-1)
        answer = torch.tensor(reading.tokens[reading.num_context :])
        expected = -scores[reading.num_context - 1 : -1].gather(-1, answer[:, None]).sum()
        expected -= scores[-1, list(reading.ends)].logsumexp(-1)
        assert loss * unit == pytest.approx(float(expected), rel=1e-4)

    result = trained.loss_and_gradient(recipe, {"count": range(8)}, {"count": 1.0})
    slopes = torch.tensor([list(each.values()) for each in result.by_source.values()])
    assert len(slopes) == len(trained.bank.base.tensors)
    silent = [name for name, each in result.by_source.items() if not all(each.values())]
    assert len([name for name in silent if ".experts." not in name]) < len(slopes) / 10  # no token reaches some experts
    step = 1e-2
    shifted = {
        sign: sum(trained.losses(arithmetic(family, 0.4 + sign * step, 0.7), {"count": range(8)})["count"]) / 8
        for sign in (1, -1)
    }
    assert float(slopes[:, 0].sum()) == pytest.approx((shifted[1] - shifted[-1]) / (2 * step), rel=0.02, abs=1e-3)


def test_changed_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose tensors transformers changes are refused by name."""
    bank = Bank(layout_family(tmp_path / "models", "mixtral"), cache=tmp_path)

    def turned(*arguments: object) -> object:
        model = loaded(*arguments)  # type: ignore[arg-type]
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj.neg_()
        return model

    loaded = workers.training.model._loaded
    monkeypatch.setattr(workers.training.model, "_loaded", turned)
    message = (
        r"MixtralForCausalLM holds model\.layers\.1\.\S+experts\.0\.w2\.weight, .* and 1 more in another form than"
    )
    with pytest.raises(InvalidModel, match=message):
        TrainableModel(bank, torch.float32, device=torch.device("cpu"))
