"""The place where gradients are computed, on machines given only by numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from search_spaces.study.file import parse_study
from service.engine_machines import EngineMachines
from service.studies.preflight.dtype import dtype_note
from service.studies.preflight.gradients import (
    GradientPlace,
    gradient_gpu_bytes,
    gradient_place,
    reduction_bytes,
)
from service.studies.preflight.resources import MemoryPlan, gradient_activation_bytes, plan_memory
from tests.workers.merging.test_devices import peak_of
from workers.engines.images.classifiers import new_encoder
from workers.engines.vllm.memory import usable_gpu_bytes
from workers.models.family import open_sources
from workers.models.headers import TensorInfo
from workers.models.modalities.text import TEXT
from workers.training.memory import activation_bytes, pass_bytes
from workers.types import Family

GB, TB = 10**9, 10**12
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
}
EMBEDDING = TensorInfo("BF16", (128_256, 4_096), Path(), "")
LAYER = TensorInfo("BF16", (218_112_000,), Path(), "")
PLACES = {"embedding": None, "head": None} | {f"layers.{index}": index for index in range(32)}
TENSORS = {name: EMBEDDING if layer is None else LAYER for name, layer in PLACES.items()}
EIGHT_B: Any = SimpleNamespace(
    base=SimpleNamespace(settings=LLAMA_3_8B, tensors=TENSORS),
    num_parameters=8_030_000_000,
    modality=SimpleNamespace(runs_on_vllm=False, pass_bytes=0),  # engines that share no GPU
    layout=SimpleNamespace(
        num_layers=32, places={name: SimpleNamespace(layer=layer) for name, layer in PLACES.items()}
    ),
    views={name: SimpleNamespace(base=None, tensors=TENSORS) for name in ("base", "math", "code")},
)


def study(**engine: Any) -> Any:
    objective = {"name": "a", "task": {"file": "/a.jsonl"}, "metric": "exact_match"}
    models = {"base": "/b", "experts": {"math": "/m", "code": "/c"}}
    options = {"name": "s", "models": models, "fidelity": {"scheduler": "none"}, "objectives": [objective]}
    return parse_study({**options, "engine": engine})


def placed(*machines: EngineMachines, replicas: int = 1, host: int = TB) -> tuple[GradientPlace | None, str]:
    """The place of gradients of Llama-3-8B, and a message. Engines need 100 GB of the host's memory beside them."""

    def plan(place: GradientPlace | None) -> MemoryPlan:
        gradients = 0 if place is None else GB if place.device == "cuda" else 35 * GB
        return MemoryPlan(0, 100 * GB, 1, host, gradient_bytes=gradients)

    return gradient_place(study(replicas=replicas), EIGHT_B, machines, plan=plan)


def test_gradients_take_a_gpu_that_no_engine_uses() -> None:
    """A GPU of their own computes gradients, twice through the activations if those do not fit otherwise."""
    place, _ = placed(EngineMachines(8, TB, 80 * GB), replicas=7)
    assert place is not None
    assert (place.device, place.recomputes) == ("cuda", True)
    assert place.reason.startswith("a GPU without an engine computes them in ")
    place, _ = placed(EngineMachines(8, TB, 192 * GB), replicas=7)
    assert place is not None
    assert (place.device, place.recomputes) == ("cuda", False)
    place, _ = placed(EngineMachines(8, TB), replicas=7)
    assert place is not None
    assert (place.device, place.recomputes) == ("cuda", True)
    assert "its memory is not known" in place.reason


def test_the_sources_of_a_tensor_are_counted() -> None:
    """Converting a gradient copies the tensor of every model to the GPU; those of adapters are in float32."""
    assert reduction_bytes(EIGHT_B) == 3 * EMBEDDING.num_bytes + 24 * 2**22
    changed = TENSORS | {"embedding": SimpleNamespace(shape=EMBEDDING.shape)}
    adapted = SimpleNamespace(base=EIGHT_B.base, tensors=changed)
    sources: Any = SimpleNamespace(base=EIGHT_B.base, views={**EIGHT_B.views, "code": adapted})
    assert reduction_bytes(sources) == (2 + 4) * EMBEDDING.num_bytes + 24 * 2**22


def test_the_cpu_computes_gradients_where_no_gpu_can() -> None:
    """The plan says why the CPU is used: engines that share no GPU have all, or gradients do not fit into one."""
    place, _ = placed(EngineMachines(8, TB, 80 * GB), replicas=8)
    assert place == GradientPlace("cpu", reason="the CPU computes them, as engines use all 8 GPUs")
    place, _ = placed(EngineMachines(2, TB, 16 * GB))
    assert place is not None
    assert place.device == "cpu"
    assert "of a GPU, which has 14.9 GiB" in place.reason
    assert placed(EngineMachines(0, TB)) == (GradientPlace("cpu"), "")


@pytest.mark.parametrize(
    ("host", "recomputes", "tokens"),
    [(1_000, False, 16_384), (300, False, 8_192), (105, False, 2_048), (100, True, 16_384), (71, True, 512)],
)
def test_memory_of_the_host_limits_passes_on_the_cpu(host: int, recomputes: bool, tokens: int) -> None:
    """Passes get fewer tokens, and then activations are recomputed, until the host's memory has room for them."""

    def plan(place: GradientPlace | None) -> MemoryPlan:
        taken = 0 if place is None else 34 * GB + gradient_activation_bytes(study(), EIGHT_B, place)
        return MemoryPlan(0, 36 * GB, 1, host * GB, gradient_bytes=taken)

    place, _ = gradient_place(study(), EIGHT_B, [EngineMachines(0, host * GB)], plan=plan)
    assert place is not None
    assert (place.device, place.recomputes, place.tokens) == ("cpu", recomputes, tokens)
    assert ("for lack of memory" in place.reason) == (host < 1_000)
    assert ("activations computed twice" in place.reason) == recomputes
    none, lack = gradient_place(
        study(), EIGHT_B, [EngineMachines(0)], plan=lambda place: replace(plan(place), available_bytes=60 * GB)
    )
    assert none is None
    assert lack.startswith("they need ")


def test_passes_are_small_where_memory_is_not_known() -> None:
    """On a CPU whose memory is not known, activations of a pass take at most 8 GiB."""
    memory = MemoryPlan(0, 0, 1, None)
    place, _ = gradient_place(study(), EIGHT_B, [EngineMachines(0)], plan=lambda place: memory)
    assert place is not None
    assert (place.recomputes, place.tokens) == (True, 4_096)
    assert gradient_activation_bytes(study(), EIGHT_B, place) <= 8 * 2**30


def test_memory_of_the_host_counts_activations(tied_family: Family) -> None:
    """The memory plan counts the activations of the planned passes on the CPU, and none of passes on a GPU."""
    sources = open_sources(tied_family)

    def planned(place: GradientPlace) -> int:
        return plan_memory(study(), sources, [EngineMachines(0, TB)], gradients=place).gradient_bytes

    large, small = GradientPlace("cpu"), GradientPlace("cpu", recomputes=True, tokens=2048)
    sizes = [
        pass_bytes(sources.base.settings, place.tokens, 4, recomputes=place.recomputes) for place in (large, small)
    ]
    assert planned(large) - planned(small) == sizes[0] - sizes[1] > 0
    assert planned(GradientPlace("cuda")) < planned(small) - sizes[1]


def test_several_gpus_share_the_layers_of_a_large_model() -> None:
    """Where one GPU has no room, smaller passes are planned, and then the fewest GPUs of one machine that have."""
    one, _ = placed(EngineMachines(8, TB, 24 * GB))
    assert one is not None
    assert (one.device, one.num_gpus, one.recomputes) == ("cuda", 1, True)
    assert 2048 <= one.tokens < 16_384
    assert "with activations computed twice in passes of" in one.reason
    found, _ = placed(EngineMachines(8, TB, 16 * GB))
    assert found is not None
    assert (found.device, found.num_gpus) == ("cuda", 2)
    assert found.reason.startswith("2 GPUs share the layers and compute them in ")
    for place, total in ((one, 24 * GB), (found, 16 * GB)):
        assert gradient_gpu_bytes(study(dtype="bfloat16"), EIGHT_B, place) <= usable_gpu_bytes(total, total)
    alone = gradient_gpu_bytes(study(dtype="bfloat16"), EIGHT_B, replace(found, num_gpus=1))
    assert alone > usable_gpu_bytes(16 * GB, 16 * GB), "one GPU has no room for the same"
    # Seven of eight GPUs of one machine have engines; so have all of the first machine, and one of the second.
    few, _ = placed(EngineMachines(8, TB, 16 * GB), replicas=7)
    assert few is not None
    assert few.device == "cpu"
    other, _ = placed(EngineMachines(8, TB, 16 * GB, most=2), replicas=9)
    assert other is not None
    assert (other.device, other.num_gpus) == ("cuda", 2)


def test_lack_of_room_for_gradients_is_said() -> None:
    """Where neither a GPU nor the host has room beside the engines, there is no place, and the reason has the sizes."""
    place, lack = placed(EngineMachines(1, 120 * GB, 80 * GB), host=120 * GB)
    assert place is None
    assert lack == (
        "they need 32.6 GiB of memory beside the engines, 125.7 GiB in all, and 111.8 GiB are available; engines use "
        "the only GPU"
    )
    assert placed(EngineMachines(1, 90 * GB, 80 * GB), host=90 * GB)[0] is not None, "engines have no room themselves"


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_activations_take_what_is_planned(recomputes: bool) -> None:
    """A backward pass takes at most the planned memory, and at least two thirds of it."""
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config).train(recomputes)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    tokens = torch.zeros(8, 128, dtype=torch.long)

    def step() -> None:
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=4).logits
        logits.float().logsumexp(-1).sum().backward()

    taken = peak_of(step)
    planned = activation_bytes(config.to_dict(), tokens.numel(), 4, recomputes=recomputes)
    assert taken <= planned <= 1.5 * taken


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_activations_of_images_take_what_is_planned(recomputes: bool) -> None:
    """A backward pass through an encoder of images takes at most the planned memory, and at least two fifths of it."""
    config = {
        "model_type": "vit",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "image_size": 88,
        "patch_size": 8,
    }
    encoder = new_encoder(config, layers=8, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in encoder.module.parameters():
            parameter.fill_(0.01)
    if recomputes:
        encoder.module.train().gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in encoder.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    pixels = torch.zeros(8, 3, 88, 88)

    def step() -> None:
        torch.autograd.backward(encoder.differentiable_features(pixels).logsumexp(-1).sum())

    taken = peak_of(step)
    planned = activation_bytes(config, 8 * 122, 4, recomputes=recomputes)
    assert taken <= planned <= 2.5 * taken


def test_float16_models_are_named_where_auto_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dtype: auto` says that engines on GPUs round models in float16 to bfloat16."""

    def stored(dtype: str) -> Any:
        return SimpleNamespace(own=(SimpleNamespace(dtype=dtype),))

    sources: Any = SimpleNamespace(modality=TEXT, checkpoints={"base": stored("BF16"), "math": stored("F16")})
    monkeypatch.setenv("MERGESEARCH_ENGINE_NODES", "gpus=1")
    note = dtype_note(study(), sources)
    assert note.startswith("dtype: auto is bfloat16 on GPUs, and math are stored in float16")
    assert dtype_note(study(dtype="bfloat16"), sources) == dtype_note(study(dtype="float16"), sources) == ""
    sources.checkpoints = {"base": stored("BF16")}
    assert dtype_note(study(), sources) == ""
