"""The worker extension on a plain transformers model: the tensors that it writes, and its evidence."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.recipe import Merge, Recipe, Source
from tests.builders import opposed_family
from tests.conftest import OPTIONS
from tests.workers.delayed_copies import GPU, DelayedCopies
from tests.workers.recipes import arithmetic, model_stock, slerp
from workers.cache import CACHE_VARIABLE
from workers.engines.source_recipes import base_recipe
from workers.engines.transformers import backend
from workers.engines.transformers.merged_models import merged_model
from workers.engines.vllm import canary
from workers.engines.vllm.checksum import checksum
from workers.engines.vllm.engine import Engine
from workers.engines.vllm.plugin import IS_PACKED, PACK
from workers.engines.vllm.worker_extension import MergeExtension, family_to_json, open_bank
from workers.errors import EvidenceMismatch, TrialFailed
from workers.evaluation.prompts import Prompts
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.merging.plan import TensorPlan
from workers.serving.engine_worker import EngineWorker
from workers.types import CanaryReport, Family, Placement, ScoreRequest


class Extension(MergeExtension):
    """The extension, with a model that loads tensors by name and counts them."""

    rank = 0

    def __init__(self, family: Family) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(family.base.directory, dtype=torch.float32)
        self.loaded: list[str] = []
        self.transformed: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.changed_later: list[str] = []
        self.parameters = dict(model.named_parameters())
        model.compute_logits = lambda hidden: hidden
        model.load_weights = self.load_weights
        self.model_runner = SimpleNamespace(
            get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32), kv_caches=[]
        )
        self.mergesearch_open(family_to_json(family))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.loaded = []
        for name, tensor in weights:
            self.parameters[name].copy_(self.transformed.get(name, lambda same: same)(tensor))
            self.loaded.append(name)
        for name in self.changed_later:
            self.parameters[name][1:].mul_(3)
        return set(self.loaded)

    def apply(self, recipe: Recipe) -> dict[str, Any]:
        return self.mergesearch_apply(json.dumps(recipe.to_json()))


@pytest.fixture
def extension(tied_family: Family) -> Extension:
    return Extension(tied_family)


def holds(extension: Extension, recipe: Recipe, family: Family) -> bool:
    expected = dict(merged_tensors(recipe, open_bank(family_to_json(family)), torch.float32))
    return all(torch.equal(extension.parameters[name], tensor) for name, tensor in expected.items())


def test_only_what_is_computed_differently_is_written(extension: Extension, tied_family: Family) -> None:
    first = arithmetic(tied_family, 0.3, 0.5)
    layers = list(first.layers)
    sources = (Source("math", 1), Source("text", 1))
    layers[1] = replace(layers[1], mlp=Merge("linear", sources, {"weight": (0.25, 0.75)}))
    second = replace(first, layers=tuple(layers))

    assert extension.apply(first)["tensors_written"] == len(extension.parameters)
    before = {name: parameter.detach().clone() for name, parameter in extension.parameters.items()}
    report = extension.apply(second)
    rewritten = {name for name, parameter in extension.parameters.items() if not torch.equal(parameter, before[name])}
    assert all(name.startswith("model.layers.1.mlp.") for name in rewritten)
    assert report["tensors_written"] == len(rewritten) == 3
    assert report["digest"] == second.digest
    assert holds(extension, second, tied_family)
    assert report["checksum"] == checksum(extension.parameters) == extension.mergesearch_checksum()

    apart = Extension(tied_family)
    assert apart.apply(second)["checksum"] == report["checksum"]
    assert apart.apply(first)["checksum"] != report["checksum"]


def test_merges_are_written_where_the_loader_was_seen_to_write(extension: Extension, tied_family: Family) -> None:
    extension.apply(base_recipe(tied_family))
    assert set(extension.loaded) == set(extension.parameters)
    recipe = arithmetic(tied_family, 0.3, 0.5)
    extension.loaded = []
    extension.apply(recipe)
    assert extension.loaded == []
    assert holds(extension, recipe, tied_family)

    # A parameter in other memory is observed again; those of which the loader makes something else are the loader's.
    tripled = "model.layers.0.mlp.down_proj.weight"
    extension.changed_later = [tripled]
    moved, turned = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
    extension.parameters[moved].data = extension.parameters[moved].detach().clone()
    square = "model.layers.2.self_attn.o_proj.weight"
    extension.transformed = {turned: lambda tensor: tensor * 2, square: lambda tensor: tensor.t()}
    extension._mergesearch_weights.destinations = {}
    extension.mergesearch_forget()
    extension.apply(base_recipe(tied_family))
    extension.parameters[moved].data = extension.parameters[moved].detach().clone()
    extension.apply(recipe)
    assert sorted(extension.loaded) == [tripled, turned, square]
    expected = dict(merged_tensors(recipe, open_bank(family_to_json(tied_family)), torch.float32))
    assert torch.equal(extension.parameters[turned], expected[turned] * 2)
    assert torch.equal(extension.parameters[square], expected[square].t())
    assert torch.equal(extension.parameters[moved], expected[moved])
    assert torch.equal(extension.parameters[tripled][1:], expected[tripled][1:] * 3)


def test_a_merge_that_fails_on_the_way_is_forgotten(
    extension: Extension, tied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = arithmetic(tied_family, 0.3, 0.5), slerp(tied_family, 0.4)
    extension.apply(first)
    with monkeypatch.context() as patch:
        patch.setattr("workers.merging.materialize.merge_stored", lambda *operands: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            extension.apply(second)
    assert extension.mergesearch_held()["digest"] is None
    assert extension.apply(first)["tensors_written"] == len(extension.parameters)
    assert holds(extension, first, tied_family)


def test_a_recipe_that_cannot_be_merged_writes_nothing(extension: Extension, tied_family: Family) -> None:
    first = arithmetic(tied_family, 0.3, 0.5)
    extension.apply(first)
    answer = extension.apply(arithmetic(tied_family, 0.3, 0.5, layers=99))
    assert "the models have layers 0..2" in answer["refused"]
    assert answer["digest"] is None
    assert extension.mergesearch_held()["digest"] is None
    assert extension.apply(first)["tensors_written"] == 0
    assert holds(extension, first, tied_family)


@pytest.fixture
def own_family(tied_family: Family, tmp_path: Path) -> Family:
    """A copy of the family, whose files a test may change."""
    copies = {
        model.alias: str(shutil.copytree(model.directory, tmp_path / model.alias)) for model in tied_family.models
    }
    base, *experts = (replace(model, directory=copies[model.alias]) for model in tied_family.models)
    return replace(tied_family, base=base, experts=tuple(experts))


def overwrite(family: Family) -> Path:
    """Write other weights of the same size into the file of the last expert."""
    file = Path(family.experts[-1].directory) / "model.safetensors"
    contents = file.read_bytes()
    with file.open("r+b") as stream:
        stream.write(contents[:-100] + bytes(100))
    return file


def engine_of(extension: Extension, family: Family) -> Engine:
    """An engine whose vLLM is `extension`, called as it is through `collective_rpc`."""

    def call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [getattr(extension, method)(*args, **kwargs)]

    engine = object.__new__(Engine)
    vllm = SimpleNamespace(has_unfinished_requests=lambda: False)
    engine._llm = SimpleNamespace(collective_rpc=call, llm_engine=vllm, reset_prefix_cache=lambda: True)
    engine.family, engine.prompts, engine.swap_s = family, Prompts(family.base.directory, OPTIONS), []
    engine.name, engine._fault, engine.options, engine._new_tokenizer = "engine", None, OPTIONS, None
    engine._state = {"checksum": "", "swaps": 0, "off_device": ""}
    engine._contents = SimpleNamespace(refusal=lambda recipe: None)  # type: ignore[assignment]
    engine.canary = SimpleNamespace(is_due=lambda swap_count: False, num_passed=0)  # type: ignore[assignment]
    return engine


def test_overwritten_sources_stop_the_study(own_family: Family) -> None:
    """Sources that were overwritten are not scored but stop the study."""
    extension = Extension(own_family)
    engine, recipes = engine_of(extension, own_family), [arithmetic(own_family, n, 0.5) for n in (0.3, 0.4)]
    engine.swap(recipes[0])
    assert engine.held_digest == recipes[0].digest
    file = overwrite(own_family)
    for _ in range(2):
        with pytest.raises(
            EvidenceMismatch, match=f"model 'text' has changed since it was opened: {file}: it was modif"
        ):
            engine.swap(recipes[1])
        assert engine.held_digest is None


def test_sources_that_are_overwritten_during_a_swap_are_not_held(
    own_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension = Extension(own_family)
    load = extension.load_weights

    def loaded(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        written = load(weights)
        overwrite(own_family)
        return written

    monkeypatch.setattr(extension.model_runner.get_model(), "load_weights", loaded)
    answer = extension.apply(arithmetic(own_family, 0.3, 0.5))
    assert "model 'text' has changed" in answer.get("changed", "")
    assert extension.mergesearch_held()["digest"] is None
    assert extension.apply(arithmetic(own_family, 0.3, 0.5))["digest"] is None


def test_model_stock_pole_fails_candidate(tmp_path: Path) -> None:
    """A ratio of Model Stock near its pole fails the candidate."""
    family = opposed_family(tmp_path)
    engine = engine_of(Extension(family), family)
    with pytest.raises(TrialFailed) as caught:
        engine.swap(model_stock(family))
    assert str(caught.value).startswith("the merge cannot be computed: model.")
    assert "; expected -2 to 1: leave out a model, or use another method" in str(caught.value)
    engine.swap(base_recipe(family))
    assert engine.held_digest == base_recipe(family).digest


def test_parameters_that_a_merge_does_not_reach_are_an_error(extension: Extension, tied_family: Family) -> None:
    extension.model_runner.get_model().register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(RuntimeError, match="left 1 parameters unwritten, for example extra"):
        extension.apply(arithmetic(tied_family, 0.3, 0.5))
    assert extension.mergesearch_held()["digest"] is None


def test_weights_of_the_start_that_no_merge_writes_are_an_error(extension: Extension, tied_family: Family) -> None:
    """An engine starts with random weights: a part of a parameter that the loader leaves is not held as a merge."""
    held, name = extension._mergesearch_weights, "model.layers.1.mlp.down_proj.weight"
    assert all(bool(parameter.isnan().all()) for parameter in extension.parameters.values())

    def without_the_last_row(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:-1], held._unwritten[name][-1:]])

    extension.transformed[name] = without_the_last_row
    with pytest.raises(RuntimeError, match=re.escape(f"left {extension.parameters[name].shape[1]} of ")) as caught:
        extension.apply(arithmetic(tied_family, 0.3, 0.5))
    assert f"elements of {name} unwritten" in str(caught.value)
    assert extension.mergesearch_held()["digest"] is None
    del extension.transformed[name]
    held.destinations = {}
    assert extension.apply(arithmetic(tied_family, 0.3, 0.5))["tensors_written"] == len(extension.parameters)
    assert not held._unwritten


def test_random_buffers_that_no_merge_writes_are_an_error(tied_family: Family) -> None:
    """VLLM's random weights are also in buffers; those that it computes afterwards are left as they are."""
    extension = Extension(tied_family)
    model = extension.model_runner.get_model()
    for name, value in (("scale", 1.0), ("zero", 0.0), ("random", 4e-4)):
        model.register_buffer(name, torch.full((2,), value))
    extension.mergesearch_open(family_to_json(tied_family))
    assert (float(model.scale[0]), float(model.zero[0])) == (1, 0)
    with pytest.raises(RuntimeError, match="left 2 of 2 elements of random unwritten"):
        extension.apply(arithmetic(tied_family, 0.3, 0.5))


def test_a_copy_that_is_not_packed_again_is_seen_at_the_swap(extension: Extension, tied_family: Family) -> None:
    layer = extension.model_runner.get_model().model.layers[1].mlp.up_proj
    packed = {}

    def pack() -> None:
        packed["copy"] = layer.weight.detach().clone()

    extension.apply(base_recipe(tied_family))
    pack()
    setattr(layer, PACK, pack)
    setattr(layer, IS_PACKED, lambda: torch.equal(packed["copy"], layer.weight))
    extension.mergesearch_open(family_to_json(tied_family))
    first, second = arithmetic(tied_family, 0.3, 0.5), arithmetic(tied_family, 0.4, 0.5)
    assert extension.apply(first)["digest"] == first.digest
    setattr(layer, PACK, lambda: None)
    answer = extension.apply(second)
    assert answer["digest"] is None
    assert answer["mismatch"] == "the packed weights of model.layers.1.mlp.up_proj differ from the merge"
    assert extension.mergesearch_held()["digest"] is None
    setattr(layer, PACK, pack)
    assert extension.apply(second)["tensors_written"] == len(extension.parameters)


@pytest.fixture
def gpu(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Moves the bank of `extension` into the memory of a GPU, which is simulated on the CPU.

    The weights stay on the CPU. `is_full` says whether merging on the GPU fails, `free` is the GPU's free memory,
    `segments` has torch's memory segments, and `devices` has the devices on which merges began.
    """
    import workers.merging.materialize

    write, stream = workers.merging.materialize.merged_tensors, DelayedCopies()
    found = SimpleNamespace(is_full=False, free=0, segments=[], devices=[], stream=stream)

    def merged_tensors(recipe: Recipe, bank: Bank, *rest: Any, **names: Any) -> Any:
        found.devices.append(bank.device.type)
        if bank.device.type == "cuda" and found.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if bank.device.type == "cuda":
            return write(recipe, own, torch.float32, names=names["names"])
        return write(recipe, bank, *rest, **names)

    into_memory = workers.merging.materialize.merge_into

    def merge_into(recipe: Recipe, bank: Bank, *rest: Any) -> Any:
        found.devices.append(bank.device.type)
        return into_memory(recipe, bank, *rest)

    own, bank = (Bank(extension._mergesearch_bank.family) for _ in range(2))
    extension._mergesearch_bank = bank
    bank.device, bank.placement = GPU, Placement.GPU
    bank._stored = {info: stream.on_gpu(tensor) for info, tensor in bank._stored.items()}
    monkeypatch.setattr(workers.merging.materialize, "merged_tensors", merged_tensors)
    monkeypatch.setattr(workers.merging.materialize, "merge_into", merge_into)
    monkeypatch.setattr(workers.merging.materialize, "Scratch", lambda bank, dtype: SimpleNamespace(tensor=None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (found.free, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found.segments)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    extension._mergesearch_scratch_bytes = 10**9
    return found


def test_cpu_merges_what_a_full_gpu_holds(extension: Extension, tied_family: Family, gpu: SimpleNamespace) -> None:
    """A merge that moved to the CPU reads sources only once they have arrived there, and its evidence says so."""
    first, second = arithmetic(tied_family, 0.3, 0.5), slerp(tied_family, 0.4)
    gpu.is_full = True
    answer = extension.apply(first)
    assert answer["digest"] == first.digest
    assert holds(extension, first, tied_family)
    count = len(extension.parameters)
    said = f"the CPU merged {count} of {count} tensors, for which the GPU had too little memory"
    assert answer["off_device"] == said
    assert extension.apply(second)["off_device"] == said
    assert holds(extension, second, tied_family)
    assert (gpu.devices[0], set(gpu.devices[1:])) == ("cuda", {"cpu"}), "while it is full the GPU is not tried again"
    assert gpu.stream.num_delayed == 0


def test_canary_on_a_full_gpu_merges_on_the_cpu(
    extension: Extension,
    tied_family: Family,
    gpu: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A comparison with transformers, and the measurement of the base, need no memory of a GPU that is full."""
    recipe, base = arithmetic(tied_family, 0.3, 0.5), base_recipe(tied_family)
    own = Bank(tied_family)
    models = {each.digest: merged_model(each, own, dtype="float32") for each in (recipe, base)}
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(canary, "open_bank", lambda family: extension._mergesearch_bank)
    full = sys.modules["workers.merging.materialize"].merged_tensors
    monkeypatch.setattr("workers.engines.transformers.merged_models.merged_tensors", full)
    made = canary.Canary(tied_family, base=base, replica="a", dtype="float32", vocabulary=104, max_length=64)
    gpu.is_full = True

    def read(model: Any, texts: Sequence[Sequence[int]]) -> list[Any]:
        return [backend.logprobs(model, text) for text in texts]

    for number, each in enumerate((base, recipe), 1):
        report = made.make(each, partial(read, models[each.digest]), free_bytes=lambda: 1 << 40, swap_count=1)
        assert (report.canaries, report.skipped) == (number, "")
    assert gpu.devices == ["cuda", "cpu"] * 2


def test_gpu_merges_again_once_it_has_room(extension: Extension, tied_family: Family, gpu: SimpleNamespace) -> None:
    """After a merge on the CPU, the GPU merges again when it has the planned memory; older tensors are still named."""
    first, second = arithmetic(tied_family, 0.3, 0.5), arithmetic(tied_family, 0.4, 0.5)
    layers = (replace(first.layers[0], mlp=second.layers[0].mlp), *first.layers[1:])
    gpu.is_full = True
    extension.apply(first)
    gpu.is_full, gpu.free = False, 10**9
    answer = extension.apply(replace(first, layers=layers))
    assert gpu.devices[-1] == "cuda"
    count = len(extension.parameters)
    assert answer["tensors_written"] == 3
    assert answer["off_device"].startswith(f"the CPU merged {count - 3} of {count} tensors")
    assert extension.apply(second)["off_device"].startswith("the CPU merged 3 of") is False
    assert holds(extension, second, tied_family)


def segment(size: int, *, used: int = 0, pool: tuple[int, int] = (0, 0), device: int = 0) -> dict[str, Any]:
    """A segment of torch's memory snapshot, with the fields that tell whether torch can return it to the GPU."""
    return {"device": device, "segment_pool_id": pool, "total_size": size, "active_size": used}


def test_memory_of_cuda_graphs_is_no_room(extension: Extension, tied_family: Family, gpu: SimpleNamespace) -> None:
    """Only whole unused segments of the default pool count as room, beside the memory that the GPU has free."""
    gpu.is_full, gpu.free = True, 5 * 10**8
    extension.apply(arithmetic(tied_family, 0.3, 0.5))
    gpu.is_full = False
    not_for_merges = [
        segment(4 * 10**9, pool=(0, 1)),  # of CUDA graphs
        segment(4 * 10**9, used=1),
        segment(4 * 10**9, device=1),
    ]
    gpu.segments = not_for_merges
    extension.apply(arithmetic(tied_family, 0.4, 0.5))
    assert gpu.devices[-1] == "cpu"
    gpu.segments = [*not_for_merges, segment(5 * 10**8)]
    extension.apply(arithmetic(tied_family, 0.5, 0.5))
    assert gpu.devices[-1] == "cuda"


def test_small_gpu_merges_again_with_the_room_that_it_had(
    extension: Extension, tied_family: Family, gpu: SimpleNamespace
) -> None:
    """A GPU that never had the memory of the largest tensor, which the CPU merges, is tried again all the same."""
    extension._mergesearch_bank.room_bytes = 10**8
    gpu.is_full = True
    extension.apply(arithmetic(tied_family, 0.3, 0.5))
    gpu.is_full, gpu.free = False, 8 * 10**7
    extension.apply(arithmetic(tied_family, 0.4, 0.5))
    assert gpu.devices[-1] == "cpu"
    gpu.free = 10**8
    extension.apply(arithmetic(tied_family, 0.5, 0.5))
    assert gpu.devices[-1] == "cuda"


def test_verified_weights_are_those_of_exports(
    extension: Extension, tied_family: Family, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification exports on the CPU, as users do, and not from the bank that merges on the engine's GPU."""
    exported: list[torch.device] = []

    def export(recipe: Recipe, bank: Bank, directory: str, *, dtype: torch.dtype) -> None:
        exported.append(bank.device)
        raise InterruptedError

    monkeypatch.setattr("workers.export.checkpoint.export", export)
    monkeypatch.setattr("workers.engines.transformers.verification.nothing_to_compare", lambda *_, **__: "")
    monkeypatch.setattr("workers.engines.transformers.verification.texts_to_read", lambda *_: [])
    bank = extension._mergesearch_bank
    monkeypatch.setattr("workers.engines.vllm.worker_extension._opened", {family_to_json(tied_family): bank})
    worker = object.__new__(EngineWorker)
    worker.engine, worker.evaluator = engine_of(extension, tied_family), SimpleNamespace()  # type: ignore[assignment]
    worker.engine.dtype = "float32"
    with pytest.raises(InterruptedError):
        worker.verify(arithmetic(tied_family, 0.3, 0.5), (), ())
    assert bank.device == GPU
    assert exported == [torch.device("cpu")]


def test_seconds_of_a_merge_are_those_of_its_work(
    extension: Extension, tied_family: Family, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`materialise_s` includes the work that a GPU has only queued when the merge returns."""
    waits: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        waits.append(device)
        time.sleep(0.01)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    answer = extension.apply(arithmetic(tied_family, 0.3, 0.5))
    assert len(waits) >= len(extension.parameters)
    assert answer["materialise_s"] >= 0.01 * len(waits)


def test_tensors_without_room_are_merged_on_the_cpu(
    extension: Extension, tied_family: Family, gpu: SimpleNamespace
) -> None:
    """A tensor that needs more memory than the GPU has is not tried there, and the evidence counts it."""
    extension._mergesearch_bank.room_bytes = 0
    answer = extension.apply(arithmetic(tied_family, 0.3, 0.5))
    count = len(extension.parameters)
    assert answer["off_device"] == f"the CPU merged {count} of {count} tensors, for which the GPU had too little memory"
    assert holds(extension, arithmetic(tied_family, 0.3, 0.5), tied_family)


def test_evidence_names_what_the_cpu_merged(extension: Extension, tied_family: Family, gpu: SimpleNamespace) -> None:
    """The evidence of samples says that the CPU merged, also while the engine holds the merge for later chunks."""
    engine = engine_of(extension, tied_family)
    recipe = arithmetic(tied_family, 0.3, 0.5)
    gpu.is_full = True
    worker = object.__new__(EngineWorker)
    worker.engine, worker.name, worker.busy_s = engine, "replica", 0.0
    engine.dtype, engine.sources, engine.bank_fingerprint = "bfloat16", "1.00 GB of sources", tied_family.fingerprint
    worker.evaluator = SimpleNamespace(  # type: ignore[assignment]
        score=lambda spans: SimpleNamespace(samples=(), prompts={}), confined_by=lambda spans: ""
    )
    for _ in range(2):
        evidence = worker.score(ScoreRequest("study", recipe, ())).evidence
        assert evidence.engine.startswith("vllm, bfloat16, 1.00 GB of sources, the CPU merged ")
    gpu.is_full, gpu.free = False, 10**9
    extension.mergesearch_forget()
    evidence = worker.score(ScoreRequest("study", base_recipe(tied_family), ())).evidence
    assert evidence.engine == "vllm, bfloat16, 1.00 GB of sources"


def test_sources_go_where_there_is_room_and_the_summary_says_why(
    tied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    import workers.merging.bank

    placing, tried = workers.merging.bank._placing, []

    def full(placement: Placement, *rest: Any) -> Any:
        tried.append(placement)
        if placement is Placement.GPU:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if placement is Placement.HOST:
            raise torch.AcceleratorError("no pinned memory")
        return placing(placement, *rest)

    monkeypatch.setattr(workers.merging.bank, "_placing", full)
    monkeypatch.setattr("workers.engines.vllm.worker_extension._opened", {})
    placements = (Placement.GPU, Placement.HOST, Placement.MAPPED)
    bank = open_bank(family_to_json(tied_family), placements, "cuda:0")
    assert tried == [*placements]
    assert (bank.placement, bank.device) == ("mapped", torch.device("cuda", 0))

    extension = Extension(tied_family)  # the bank of this process is used as it is
    extension.mergesearch_open(family_to_json(tied_family), placements, 0, "there is much room")
    found = extension.apply(base_recipe(tied_family))["bank"]
    assert found["placement"] == "mapped"
    assert found["reason"] == "there is much room; in GPU memory there was too little left once the engine ran"


def test_closed_engine_leaves_no_shared_memory(
    extension: Extension, own_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is closed removes its sources from shared memory, although its bank is still referenced."""
    monkeypatch.setattr("workers.merging.node.SHARED_MEMORY", tmp_path)
    extension.mergesearch_open(family_to_json(own_family), [Placement.HOST], is_shared=True)
    engine = engine_of(extension, own_family)
    engine._llm.llm_engine.engine_core = SimpleNamespace(shutdown=lambda: None)
    (own,) = tmp_path.glob("mergesearch-*")
    assert [(each / "sources").exists() for each in own.iterdir()] == [True]
    engine.close()
    assert list(own.iterdir()) == []
    engine.close()
    assert open_bank(family_to_json(own_family)) is not extension._mergesearch_bank


@pytest.mark.parametrize("ranks", [1, 4])
def test_canary_has_the_threads_of_all_ranks(
    extension: Extension, tied_family: Family, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Canaries compute on the CPU with the threads of all ranks, which wait; later merges have those of one rank."""
    engine = engine_of(extension, tied_family)
    engine.options = OPTIONS.model_copy(update={"tensor_parallel_size": ranks})
    seen: list[int] = []

    def compare(*_: Any, **__: Any) -> CanaryReport:
        seen.append(torch.get_num_threads())
        return CanaryReport("engine", 1)

    engine.canary = SimpleNamespace(make=compare, compare=compare)  # type: ignore[assignment]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(100)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine.swap(arithmetic(tied_family, 0.3, 0.5), check=True)
        engine.check_against_transformers(arithmetic(tied_family, 0.3, 0.5))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [2 * ranks] * 2


def test_a_swap_plans_its_recipe_once(
    extension: Extension, tied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    import workers.merging.plan

    plan, planned = workers.merging.plan._plan, []

    def counted(recipe: Recipe, canonical: Recipe, bank: Bank) -> Any:
        planned.append(recipe.digest)
        return plan(recipe, canonical, bank)

    monkeypatch.setattr(workers.merging.plan, "_plan", counted)
    first, second = arithmetic(tied_family, 0.3, 0.5), arithmetic(tied_family, 0.4, 0.5)
    extension.apply(first)
    extension.apply(second)
    assert planned == [first.digest, second.digest]


def test_infinite_rows_are_counted_once(extension: Extension) -> None:
    """Rows of NaN or infinity are counted once and leave no caches."""
    model = extension.model_runner.get_model()
    with torch.inference_mode():
        caches = torch.ones(3), torch.ones(2), torch.ones(1)
        extension.model_runner.kv_caches = [caches[0], [*caches[1:]]]
        model.compute_logits(torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 1.0]]))
    assert extension.mergesearch_bad_rows() == [1, 1]
    assert [torch.count_nonzero(cache) for cache in caches] == [0, 0, 0]
    assert extension.mergesearch_bad_rows() == [0, 0]


def engine_over(extension: Extension, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose model answers every batch with `logits`; vLLM is left out."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(TokensPrompt=dict))
    compute_logits = extension.model_runner.get_model().compute_logits
    waiting: list[str] = []

    def enqueue(prompts: list[Any], parameters: list[Any], use_tqdm: bool) -> list[str]:
        waiting.extend(map(str, range(len(prompts))))
        return [f"{name}-x" for name in waiting]

    def step() -> list[Any]:
        compute_logits(logits)
        return [SimpleNamespace(request_id=waiting.pop(), finished=True)]

    engine = Engine.__new__(Engine)
    engine._llm = SimpleNamespace(
        collective_rpc=lambda method, args, kwargs: [getattr(extension, method)(*args, **kwargs)],
        enqueue=enqueue,
        llm_engine=SimpleNamespace(has_unfinished_requests=lambda: bool(waiting), step=step),
        reset_prefix_cache=lambda: True,
    )
    engine._fault = None
    return engine


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "seen"),
    [
        ([[1.0, INF, 2.0], [1.0, 2.0, 3.0]], "infinite (1 rows in 1 prompts)"),
        ([[1.0, INF, -INF]], "infinite (1 rows in 1 prompts)"),
        ([[-INF, -INF, -INF]], "infinite (1 rows in 1 prompts)"),
        ([[1.0, NAN, INF], [NAN, -INF, 1.0]], "NaN (2 rows in 1 prompts)"),
        ([[1.0, NAN, 1.0], [1.0, INF, 1.0]], "NaN (1 rows in 1 prompts) and infinite (1 rows in 1 prompts)"),
    ],
)
def test_infinite_logits_fail_the_candidate(
    extension: Extension, monkeypatch: pytest.MonkeyPatch, rows: list[list[float]], seen: str, dtype: torch.dtype
) -> None:
    engine = engine_over(extension, torch.tensor(rows, dtype=dtype), monkeypatch)
    with pytest.raises(TrialFailed, match=f"^the merged model's logits are {re.escape(seen)}$"):
        engine._run([[1, 2]], [None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_logits_do_not_fail_the_candidate(
    extension: Extension, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[-INF, -3.0, -INF], [2.0, -INF, 3e38]], dtype=dtype)
    assert len(engine_over(extension, logits, monkeypatch)._run([[1, 2]], [None])) == 1


def test_what_attention_keeps_of_weights_is_made_again(extension: Extension, tied_family: Family) -> None:
    made: list[Any] = []
    sinks = SimpleNamespace(process_weights_after_loading=made.append)
    extension.model_runner.get_model().model.layers[1].self_attn.impl = sinks
    extension.mergesearch_open(family_to_json(tied_family))
    extension.apply(arithmetic(tied_family, 0.3, 0.5))
    assert made == [torch.float32]


def test_ranks_merge_in_their_own_orders(
    tied_family: Family, monkeypatch: pytest.MonkeyPatch, extension: Extension
) -> None:
    """A rank of several begins at another tensor than the first rank, and holds the same merge."""
    import workers.merging.materialize

    orders: list[list[str]] = []
    write = workers.merging.materialize.merge_into

    def merge_into(plan: TensorPlan, *rest: Any) -> Any:
        orders.append([tensor.name for tensor in plan.tensors])
        return write(plan, *rest)

    monkeypatch.setattr(workers.merging.materialize, "merge_into", merge_into)
    recipe = model_stock(tied_family)
    extension.apply(recipe)
    extension.rank = 1
    extension.mergesearch_open(family_to_json(tied_family), ranks=2)
    extension.apply(recipe)
    assert holds(extension, recipe, tied_family)
    first, second = orders
    half = len(first) // 2
    assert second == first[half:] + first[:half]
