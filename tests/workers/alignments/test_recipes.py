"""The places in a recipe that may have alignments, and the error for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Merge, Source
from tests.workers.recipes import aligned, path, random_alignment
from workers.alignments.alignment import Alignment
from workers.alignments.files import write_alignment
from workers.alignments.recipes import alignments_before, unaligned
from workers.engines.transformers.backend import logprobs
from workers.engines.transformers.merged_models import merged_model
from workers.merging.bank import Bank
from workers.merging.plan import check_recipe
from workers.types import Family

TOKENS = [7919 * i % 100 for i in range(40)]


def test_alignments_where_none_is_needed_are_refused(untied_family: Family) -> None:
    recipe = path(untied_family, [("math", 0), ("math", 1), ("text", 1), ("text", 1)])
    assert alignments_before(aligned(recipe, None, "a", "b")) == (None, None, "a", "b")
    with pytest.raises(InvalidRecipe, match="layer 0: alignment 'a': layers 0 and 1 follow each other in their own"):
        alignments_before(aligned(recipe, "a"))
    with pytest.raises(InvalidRecipe, match="layer 3: alignment 'a': no layer follows; expected none"):
        alignments_before(aligned(recipe, None, None, None, "a"))

    def merged(layer: int, weight: float) -> Merge:
        return Merge("task_arithmetic", (Source("math", layer), Source("text", layer)), {"lambda": (weight, 0.5)})

    same = path(untied_family, [merged(0, 0.4), merged(1, 0.4)])
    with pytest.raises(InvalidRecipe, match="layers 0 and 1 follow each other in their own models"):
        alignments_before(aligned(same, "a"))
    assert alignments_before(aligned(path(untied_family, [merged(0, 0.4), merged(1, 0.6)]), "a")) == (None, "a")


@pytest.fixture
def bank(untied_family: Family, tmp_path: Path) -> Bank:
    return Bank(replace(untied_family, alignments_dir=str(tmp_path / "alignments")), cache=tmp_path)


STEPS: list[tuple[str, int] | Merge] = [("math", 0), ("text", 1), ("text", 2), ("math", 1)]


@pytest.mark.slow
def test_transformers_computes_what_the_recipe_says(bank: Bank) -> None:
    """With scales the folded model, whose shifts are divided, is the model whose stream is multiplied and aligned."""
    hidden = int(bank.base.config["hidden_size"])
    modules = [random_alignment("projection", hidden), random_alignment("moments", hidden)]
    digests = [write_alignment(bank.alignments_dir, module) for module in modules]
    scales = (0.6, 1.4, 0.8, 1.2)
    plain = path(bank.family, STEPS)
    recipe = aligned(path(bank.family, STEPS, scales), digests[0], None, digests[1])
    stated = merged_model(plain, bank, dtype="float32")

    def hook(scale: float, module: Alignment | None) -> Callable[..., torch.Tensor]:
        def change(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            return output * scale if module is None else module(output * scale)

        return change

    for layer, scale, module in zip(stated.model.layers, scales, (modules[0], None, modules[1], None), strict=True):
        layer.register_forward_hook(hook(scale, module))
    theirs = logprobs(stated, TOKENS)
    assert logprobs(merged_model(recipe, bank, dtype="float32"), TOKENS) == pytest.approx(theirs, abs=1e-4)
    for other in (unaligned(recipe), aligned(recipe, digests[0]), aligned(recipe, digests[1], None, digests[0])):
        found = logprobs(merged_model(other, bank, dtype="float32"), TOKENS)
        assert max(abs(a - b) for a, b in zip(found, theirs, strict=True)) > 0.01, "the alignments matter"


def test_the_weights_of_an_ordinary_checkpoint_refuse_alignments(bank: Bank) -> None:
    digest = write_alignment(bank.alignments_dir, random_alignment("moments", int(bank.base.config["hidden_size"])))
    recipe = aligned(path(bank.family, STEPS), digest)
    message = rf"layer 0: alignment '{digest[:12]}': a module between layers cannot be folded into the weights"
    with pytest.raises(InvalidRecipe, match=message):
        check_recipe(recipe, bank)
    check_recipe(unaligned(recipe), bank)
