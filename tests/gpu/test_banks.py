"""Sources of merges in mapped files, pinned memory and GPU memory; merges on the GPU, and on the CPU beside it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from search_spaces.methods import METHODS
from search_spaces.recipe import Recipe
from tests.builders import lora_adapter
from tests.gpu.conftest import Figure
from tests.workers.merging.methods.examples import EXAMPLES
from tests.workers.merging.test_devices import DELLA, all_of
from tests.workers.recipes import arithmetic, slerp
from workers.merging.bank import Bank
from workers.merging.devices import devices_of, peak_bytes
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.plan import plan_tensors
from workers.models.family import open_family
from workers.types import Family

pytestmark = [pytest.mark.gpu, pytest.mark.bare]

GPU = torch.device("cuda", 0)
PLACEMENTS = ("mapped", "host", "gpu")
BFLOAT16 = torch.bfloat16
BY_DEVICE = frozenset(name for name, method in METHODS.items() if method.depends_on_device)


def recipes(family: Family) -> dict[str, Recipe]:
    """A recipe of every method that merges the family's experts."""
    found = {}
    count = len(family.experts)
    for name, declared in METHODS.items():
        if declared.min_sources <= count <= (declared.max_sources or count):
            given = {c.name: EXAMPLES[c.name] for c in declared.coefficients if c.default is None}
            numbers = {key: value[:count] if isinstance(value, tuple) else value for key, value in given.items()}
            found[name] = all_of(family, name, numbers, 3 if declared.takes_seed else None)  # type: ignore[arg-type]
    return found


def merged(recipe: Recipe, bank: Bank, dtype: torch.dtype = BFLOAT16) -> dict[str, torch.Tensor]:
    """The merge on the bank's device. On the CPU, plain functions compute it, which compile nothing."""
    compiles = bank.device.type != "cpu" or bank.placement == "gpu"
    return {name: tensor.cpu() for name, tensor in merged_tensors(recipe, bank, dtype, compiles=compiles)}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    assert one
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_gpu_is_given_the_sources(small_family: Family, placement: str) -> None:
    """The tensors are those of the files, and magnitudes have the same thresholds."""
    mapped, bank = Bank(small_family), Bank(small_family, placement, device=GPU)
    for name in mapped.base.tensors:
        assert bank.get("math", name).device == GPU
        assert torch.equal(bank.get("math", name).cpu(), mapped.get("math", name))
    assert {tensor.is_pinned() for tensor in bank._stored.values()} == {placement == "host"}
    name = "model.layers.1.self_attn.q_proj.weight"
    sources = [("math", name), ("text", name)]
    pairs = zip(bank.magnitudes(sources, ("base", name)), mapped.magnitudes(sources, ("base", name)), strict=True)
    assert all(ours and theirs and ours.trim(77) == theirs.trim(77) for ours, theirs in pairs)


@pytest.mark.parametrize(("placement", "dtype"), [("mapped", BFLOAT16), ("host", BFLOAT16), ("gpu", torch.float32)])
def test_whole_models_have_the_bits_of_the_cpu(
    small_family: Family, placement: str, dtype: torch.dtype, figure: Figure
) -> None:
    """A GPU merges whole models to the bits of the CPU, by every method, wherever the sources are."""
    bank, on_cpu = Bank(small_family, placement, device=GPU), Bank(small_family)
    other = {}
    every = recipes(small_family)
    for method, recipe in every.items():
        if names := differing(merged(recipe, bank, dtype), merged(recipe, on_cpu, dtype)):
            other[method] = len(names)
    equal = len(every) - len(other)
    figure(f"whole models, sources {placement}, {str(dtype)[6:]}: {equal} of {len(every)} methods equal the CPU")
    assert other.keys() <= BY_DEVICE, other


@pytest.mark.parametrize("method", ["ties", "dare_ties_l1", "breadcrumbs_ties"])
def test_trims_of_whole_models(small_family: Family, method: str) -> None:
    """Thresholds over whole models, and majority signs, are those of the CPU."""
    from dataclasses import replace

    recipe = replace(recipes(small_family)[method], trim="model")
    assert not differing(merged(recipe, Bank(small_family, "gpu", device=GPU)), merged(recipe, Bank(small_family)))


def test_sources_in_gpu_memory_are_merged_on_the_cpu(small_family: Family) -> None:
    """The CPU reads no tensor before its copy from the GPU has ended."""
    recipe = all_of(small_family, *DELLA)
    expected = merged(recipe, Bank(small_family))
    bank = Bank(small_family, "gpu", device=GPU)
    busy = torch.randn(8192, 8192, device=GPU)
    for _ in range(3):
        for _ in range(20):  # work that the device has not done when the copies are asked for
            busy = (busy @ busy).clamp_(-1, 1)
        assert not differing(merged(recipe, bank.on("cpu")), expected)


def test_a_merge_is_divided_between_gpu_and_cpu(small_family: Family) -> None:
    """A tensor that is too large for the room of the GPU is merged on the CPU, with the same bits."""
    recipe = all_of(small_family, *DELLA)
    bank = Bank(small_family, "host", device=GPU)
    plan = plan_tensors(recipe, bank)
    peaks = sorted({peak_bytes(tensor, plan, bank, BFLOAT16) for tensor in plan.tensors})
    bank.room_bytes = peaks[len(peaks) // 2]
    assert set(devices_of(plan, bank, BFLOAT16).values()) == {"cpu", "cuda"}
    expected = merged(recipe, Bank(small_family))
    into = {name: torch.full(t.shape, torch.nan, dtype=t.dtype, device=GPU) for name, t in expected.items()}
    merge_into(recipe, bank, into)
    assert not differing({name: tensor.cpu() for name, tensor in into.items()}, expected)


def test_the_planned_room_is_enough(large_family: Family, figure: Figure) -> None:
    """A merge takes no more GPU memory than the plan of its largest tensor says."""
    shares = {}
    for method in ("della", "ties", "task_arithmetic", "model_stock", "dare_linear_l1"):
        recipe = recipes(large_family)[method]
        bank = Bank(large_family, "host", device=GPU)
        plan = plan_tensors(recipe, bank)
        merged(recipe, bank)  # statistics
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _name, tensor in merged_tensors(plan, bank, BFLOAT16):
            del tensor
        peak = torch.cuda.max_memory_allocated() - before
        shares[method] = peak / max(peak_bytes(tensor, plan, bank, BFLOAT16) for tensor in plan.tensors)
    figure("peak of a merge as a share of its plan: " + ", ".join(f"{n} {s:.2f}" for n, s in shares.items()))
    assert max(shares.values()) <= 1


def test_a_full_gpu_raises_and_the_next_merge_is_right(large_family: Family) -> None:
    """A merge without memory raises OutOfMemoryError; the CPU then merges, and the GPU when it has memory again."""
    recipe = arithmetic(large_family, 0.3, 0.4)
    bank = Bank(large_family, "host", device=GPU)
    expected = merged(recipe, Bank(large_family))
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            merged(recipe, bank)
        assert not differing(merged(recipe, bank.on("cpu")), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not differing(merged(recipe, bank), expected)


def test_adapters_differ_by_the_stated_bound(small_family: Family, tmp_path: Path, figure: Figure) -> None:
    """Tensors that adapters change are within (r + 3) 2^-23 of the sum of their terms' magnitudes."""
    rank, base_dir = 4, small_family.base.directory
    for seed, alias in enumerate(("one", "two")):
        lora_adapter(base_dir, tmp_path / alias, seed, r=rank)
    family = open_family(base_dir, {alias: tmp_path / alias for alias in ("one", "two")}, cache=tmp_path / "cache")
    gpu, cpu = Bank(family, "gpu", device=GPU), Bank(family)
    worst, changed = 0.0, 0
    for name in cpu.base.tensors:
        theirs, ours = cpu.get("one", name), gpu.get("one", name).cpu()
        if theirs.dtype != torch.float32 or not name.endswith(("q_proj.weight", "down_proj.weight")):
            assert torch.equal(ours, theirs)
            continue
        changed += 1
        low = gpu.view("one").tensor(name)
        assert low is not None
        of_base = cpu.get("base", name).float()
        terms = of_base.abs() + _terms(tmp_path / "one", name)
        worst = max(worst, float(((ours - theirs).abs() / (terms * 2.0**-23)).max()))
    figure(f"adapters of rank {rank}: GPU and CPU differ by at most {worst:.2f} 2^-23 of the terms (bound {rank + 3})")
    assert changed == 10
    assert worst <= rank + 3


def _terms(directory: Path, name: str) -> torch.Tensor:
    """The sum of the magnitudes of the terms of a low-rank product, times its scale."""
    import json

    from safetensors.torch import load_file

    stored = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    key = f"base_model.model.{name.removesuffix('.weight')}"
    a, b = stored[f"{key}.lora_A.weight"].float(), stored[f"{key}.lora_B.weight"].float()
    terms: torch.Tensor = b.abs() @ a.abs()
    return terms.mul_(config["lora_alpha"] / config["r"])


def test_speed_of_merges_by_placement(large_family: Family, figure: Figure) -> None:
    """The time of a whole merge, by the place of its sources; no bar, as it is the machine's."""
    for method, recipe in {
        "task_arithmetic": arithmetic(large_family, 0.3, 0.4),
        "slerp": slerp(large_family, 0.4),
    }.items():
        for placement in PLACEMENTS:
            bank = Bank(large_family, placement, device=GPU)
            into = {
                name: torch.empty(tensor.shape, dtype=BFLOAT16, device=GPU)
                for name, tensor in merged_tensors(recipe, bank, BFLOAT16)
            }
            best = float("inf")
            for _ in range(3):
                torch.cuda.synchronize()
                began = time.perf_counter()
                merge_into(recipe, bank, into)
                torch.cuda.synchronize()
                best = min(best, time.perf_counter() - began)
            read = bank.num_bytes / best / 1e9
            figure(f"merge of 76M parameters by {method}, sources {placement}: {1e3 * best:.1f} ms, {read:.1f} GB/s")
