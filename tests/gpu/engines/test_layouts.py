"""Engines of other layouts: mixtures of experts, layer paths, and a model for which a GPU's memory is too small."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import workers.merging.materialize
from search_spaces.recipe import Recipe
from tests.gpu.conftest import Figure, engines_on
from tests.gpu.engines.answers import OPTIONS, Answers, answers, check
from tests.gpu.engines.conftest import Engines
from tests.gpu.engines.test_swaps import addresses, lack
from tests.workers.engines.vllm.paths.test_path_engine import MAX_LAYERS, some_path
from tests.workers.merging.test_devices import DELLA, all_of
from tests.workers.recipes import aligned, arithmetic, path, random_alignment, slerp
from workers.alignments.files import write_alignment
from workers.engines.vllm.engine import Engine
from workers.errors import EngineCrashed
from workers.types import Family

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

# Enough for checksums, which take 24 bytes for each 8 bytes of a tensor, and too little for the largest merged tensor.
LEFT_BYTES = 64 << 20


def answered(engine: Engine, recipe: Recipe) -> Answers:
    """The answers of a merge, once they were compared with transformers."""
    report = engine.swap(recipe)
    assert engine.held_digest == report.digest == recipe.digest
    found = answers(engine)
    check(found, recipe, engine)
    return found


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_mixture_of_experts(engines: Engines, mixture: Family, runner: str) -> None:
    """Merges of a mixture of experts are those of transformers, also where only one layer changes."""
    if reason := lack(runner, "eager"):
        pytest.skip(reason)
    options = OPTIONS.model_copy(update={"model_runner": runner})
    engine = engines.start(f"Qwen2-MoE, {runner}", mixture, options)
    before = addresses(engine)
    first, other = arithmetic(mixture, 0.4, 0.9), arithmetic(mixture, 1.0, -0.5)
    last_layer = replace(first, layers=(*first.layers[:-1], other.layers[-1]))
    found = [answered(engine, recipe) for recipe in (first, slerp(mixture, 0.3), first, last_layer)]
    assert found[2] == found[0]
    assert len({found[0], found[1], found[3]}) == 3, "the merges differ"
    assert addresses(engine) == before


def test_paths(engines: Engines, aligned_family: Family, figure: Figure) -> None:
    """Paths of any length, with foreign and repeated layers, merges, scales and alignments, are right."""
    options = OPTIONS.model_copy(update={"max_layers": MAX_LAYERS})
    engine = engines.start("small Llama, paths", aligned_family, options)
    before = addresses(engine)
    hidden = int(engine.prompts.config["hidden_size"])
    digests = [
        write_alignment(aligned_family.alignments_dir, random_alignment(kind, hidden, 7))
        for kind in ("projection", "moments")
    ]
    steps: list[tuple[str, int]] = [("math", 0), ("text", 1), ("text", 3), ("base", 2), ("math", 4)]
    recipes = [
        some_path(aligned_family, seed, merges=0.3 if seed % 2 else 0.0, scales_mlps=seed > 3) for seed in range(6)
    ]
    recipes += [aligned(path(aligned_family, steps), digest) for digest in digests]
    first = {recipe.digest: answered(engine, recipe) for recipe in recipes}
    assert len(set(first.values())) == len(recipes), "the paths differ"
    for recipe in recipes[::-1]:
        engine.swap(recipe)
        assert answers(engine) == first[recipe.digest]
    assert addresses(engine) == before
    seconds = sorted(engine.swap_s[-len(recipes) :])
    figure(f"paths: {1000 * seconds[len(seconds) // 2]:.1f} ms a change of path (median of {len(recipes)})")


@contextmanager
def without_memory() -> Iterator[None]:
    """Context in which merges have too little memory.

    On a GPU this process may take LEFT_BYTES beyond what it has. On the CPU a stand-in writes three tensors of a merge,
    and then raises the error of PyTorch.
    """
    if engines_on() == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LEFT_BYTES) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    write = workers.merging.materialize.merge_into

    def merge_into(plan: Any, bank: Any, memory: dict[str, torch.Tensor], *rest: Any) -> Any:
        write(plan, bank, dict(itertools.islice(memory.items(), 3)), *rest)
        raise torch.OutOfMemoryError("the stand-in has no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.merging.materialize, "merge_into", merge_into)
        yield


def test_out_of_memory_and_then_correct(engines: Engines, request: pytest.FixtureRequest, figure: Figure) -> None:
    """Without memory on a GPU the CPU merges, which the report says, and then the GPU again; both are right.

    An engine on the CPU fails instead, holds nothing, and then writes every tensor.
    """
    on_gpu = engines_on() == "cuda"
    family: Family = request.getfixturevalue("large_family" if on_gpu else "small_family")  # 76M or 0.6M parameters
    engine = engines.start("Llama without memory", family, OPTIONS)
    before = addresses(engine)
    first, second = all_of(family, *DELLA), all_of(family, "della", {**DELLA[1], "density": 0.8}, 4)
    expected = answered(engine, first)
    if on_gpu:
        with without_memory():
            report = engine.swap(second)
        figure(f"a full GPU: {report.off_device}")
        assert report.off_device.startswith("the CPU merged ")
        check(answers(engine), second, engine)
    else:
        with without_memory(), pytest.raises(EngineCrashed, match="the stand-in has no memory"):
            engine.swap(second)
        assert engine.held_digest is None
    report = engine.swap(first)
    assert report.off_device == ""
    assert answers(engine) == expected
    answered(engine, second)
    assert addresses(engine) == before
