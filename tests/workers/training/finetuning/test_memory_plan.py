"""The memory plan of a training: Llama-3-8B from its configuration, and the message if it does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from workers.models.config import in_common_names
from workers.training.finetuning.memory_plan import lack_of_memory, recomputes, training_memory
from workers.training.finetuning.spec import FinetuneSpec, parse_spec

GIB = 1 << 30
PARAMETERS = 8_030_261_248


@pytest.fixture(scope="module")
def llama_3_8b() -> Any:
    return headers()


def headers() -> Any:
    """The headers of Llama-3-8B, without weights."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: SimpleNamespace(shape=tuple(p.shape)) for name, p in model.named_parameters()}
    return SimpleNamespace(tensors=tensors, settings=in_common_names(config.to_dict()))


def spec_of(**options: Any) -> FinetuneSpec:
    document = {"name": "a", "base": "b", "data": {"file": "c"}, "training": {"steps": 1}}
    return parse_spec({**document, **options})


def test_shards_divide_everything_but_the_rows(llama_3_8b: Any) -> None:
    """MergOPT holds weights, gradients, two moments and a copy in float32: 20 bytes a weight, over all workers."""
    one = training_memory(spec_of(), llama_3_8b, is_bfloat16=True)
    assert one.state == 20 * PARAMETERS
    assert one.gathered == 0
    eight = training_memory(spec_of(workers=8), llama_3_8b, is_bfloat16=True)
    assert eight.state == pytest.approx(one.state / 8, rel=1e-6)
    assert eight.activations == one.activations
    assert 0 < eight.gathered < 10 * GIB
    assert training_memory(spec_of(method={"kind": "adamw"}), llama_3_8b, is_bfloat16=True).state == 16 * PARAMETERS
    in_layers = training_memory(spec_of(method={"in_layers": True}), llama_3_8b, is_bfloat16=True)
    assert in_layers.state == 16 * PARAMETERS


def test_an_adapters_base_takes_two_bytes_a_weight(llama_3_8b: Any) -> None:
    """LoRA holds the base in bfloat16; MergOPT has a copy of the weights that adapters change."""
    plan = training_memory(spec_of(adapter={"rank": 16}, method={"kind": "adamw"}), llama_3_8b, is_bfloat16=True)
    adapters = 41_943_040  # of rank 16 on all linear modules, as peft counts them
    assert plan.weights == 2 * PARAMETERS + 4 * adapters
    assert (plan.gradients, plan.optimizer, plan.offset) == (4 * adapters, 8 * adapters, 0)
    mergopt = training_memory(spec_of(adapter={}), llama_3_8b, is_bfloat16=True)
    assert mergopt.offset == 2 * (PARAMETERS - 2 * 128_256 * 4096 - 65 * 4096)


def test_what_does_not_fit_is_said_with_what_would(llama_3_8b: Any) -> None:
    """One GPU of 80 GiB cannot hold a full training of 8B weights; the message says what takes it, and what fits."""
    lack = lack_of_memory(spec_of(), llama_3_8b, 80 * GIB, is_bfloat16=True)
    assert lack == (
        "training takes 154.6 GiB (weights 29.9, gradients 29.9, optimizer 59.8, offsets 29.9, activations 5.0) on "
        "each of 1 workers, which have 80.0 GiB each; what fits is workers: 4 or an adapter"
    )
    assert lack_of_memory(spec_of(workers=4), llama_3_8b, 80 * GIB, is_bfloat16=True) is None
    assert lack_of_memory(spec_of(adapter={}), llama_3_8b, 80 * GIB, is_bfloat16=True) is None


def test_activations_are_recomputed_if_they_do_not_fit(llama_3_8b: Any) -> None:
    """With `gradient_checkpointing: auto`, activations are computed twice exactly where the plan is too large."""
    few = {"training": {"steps": 1, "micro_batch": 1}, "workers": 8}
    assert recomputes(spec_of(workers=8), llama_3_8b, 80 * GIB, is_bfloat16=True)
    assert not recomputes(spec_of(**few), llama_3_8b, 80 * GIB, is_bfloat16=True)
    forced = {"training": {"steps": 1, "micro_batch": 1, "gradient_checkpointing": True}, "workers": 8}
    assert recomputes(spec_of(**forced), llama_3_8b, 80 * GIB, is_bfloat16=True)
    never = spec_of(training={"steps": 1, "gradient_checkpointing": False})
    assert not recomputes(never, llama_3_8b, 80 * GIB, is_bfloat16=True)
