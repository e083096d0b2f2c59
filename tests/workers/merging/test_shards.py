"""Shards of merges have the same bits as whole merges, for every method and every division of a tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.methods import METHODS
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from tests.builders import tiny_family
from tests.workers.merging.kernels.test_kernels import bits, fused, given_to, merges, operands
from tests.workers.merging.methods.examples import EXAMPLES
from tests.workers.recipes import num_layers
from workers.merging.bank import Bank
from workers.merging.kernels import FUSED, exact_rule, merge_shard
from workers.merging.materialize import in_order_of_rank, merge_into, merged_tensors
from workers.merging.methods.plain import PLAIN, Operands
from workers.merging.plan import merged_names, plan_tensors
from workers.merging.shards import Shard
from workers.types import Family

FLOAT32 = torch.float32


def divided(whole: torch.Tensor, ranks: int) -> Iterator[torch.Tensor]:
    """All parts of a tensor, divided over ranks along each dimension as evenly as possible."""
    for dim in range(whole.dim()):
        yield from (part for part in torch.tensor_split(whole, ranks, dim=dim) if part.numel())


def shards(shape: tuple[int, ...], ranks: int) -> list[Shard]:
    whole = torch.empty(shape)
    found = [Shard.of(part, whole) for part in divided(whole, ranks)]
    assert None not in found
    return [shard for shard in found if shard is not None]


@pytest.mark.parametrize("shape", [(7,), (5, 9), (3, 4, 10), (1, 6), (6, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_shard_has_the_elements_of_its_view(shape: tuple[int, ...], ranks: int) -> None:
    """A shard describes the elements of a view; those of all ranks are each element once a dimension."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros(whole.numel(), dtype=torch.int64)
    for part in divided(whole, ranks):
        shard = Shard.of(part, whole)
        assert shard is not None
        assert torch.equal(shard.view(whole).reshape(-1), part.reshape(-1))
        assert torch.equal(shard.indices(torch.arange(shard.num_elements)), part.reshape(-1))
        assert shard.shape == tuple(part.shape)
        assert shard.is_whole(shape) == (part.numel() == whole.numel())
        seen[part.reshape(-1)] += 1
    assert (seen == len(shape)).all()


def test_other_views_are_no_shards() -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    others = (
        whole.transpose(0, 1),
        whole[:, 1:3, 1:3],
        whole.clone(),
        whole[:0],
        whole.expand(3, 4, 5).flip(0),
        whole.view(torch.int32),
    )
    assert [Shard.of(view, whole) for view in others] == [None] * len(others)
    assert Shard.of(whole[1:2], whole.transpose(0, 1)) is None


@pytest.mark.parametrize("ranks", [2, 4, 8, pytest.param(3, marks=pytest.mark.slow)])
def test_shards_have_the_bits_of_the_whole_merge(ranks: int) -> None:
    """Each kernel computes the elements of every rank as in the whole tensor, and reads no others."""
    given = operands((19, 37), (FLOAT32,) * 3)
    parts = shards((19, 37), ranks)
    cases = list(merges(2)) if ranks == 3 else [case for case in merges(2) if case.method in SOME]
    for merge in cases:
        check_shards(merge, given, parts, FLOAT32)


# Those whose kernels other tests compile, too.
SOME = ("linear", "ties", "breadcrumbs", "dare_ties", "della", "sce", "arcee_fusion")


def check_shards(merge: Merge, given: Operands, parts: Sequence[Shard], dtype: torch.dtype) -> None:
    own = given_to(merge, given)
    whole = fused(merge, given, dtype)
    rule = exact_rule(merge, own)
    for shard in parts:
        memory = torch.full((shard.num_elements + 2,), 7.0, dtype=dtype)
        merge_shard(rule, own.tensors, own.base, memory[1:-1].view(shard.shape), shard)
        assert torch.equal(bits(memory[1:-1]), bits(shard.view(whole).reshape(-1))), (merge, shard)
        assert memory[0] == memory[-1] == 7


def recipe_by(family: Family, name: str, seed: int = 5) -> Recipe:
    """A recipe with one method everywhere, and example values for its coefficients."""
    declared = METHODS[name]
    numbers = {c.name: EXAMPLES[c.name] for c in declared.coefficients if c.default is None}
    numbers = {key: value[:2] if isinstance(value, tuple) else value for key, value in numbers.items()}
    aliases = ("math", "text")[: declared.max_sources or 2]

    def part(layer: int | None) -> Merge:
        found = tuple(Source(alias, layer) for alias in aliases)
        return Merge(name, found, dict(numbers), seed if declared.takes_seed else None)

    layers = tuple(LayerRecipe(part(i), part(i), part(i)) for i in range(num_layers(family)))
    return Recipe(family.fingerprints, "base", layers, part(None), part(None))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    # Model stock by rows refuses rows whose task vectors point in opposite directions, as short random ones do.
    return tiny_family(tmp_path_factory.mktemp("family"), experts=("math", "text"), layers=1, hidden=96)


@pytest.fixture
def ranks(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Bank]:
    """The banks of two ranks of one node."""
    monkeypatch.setattr("workers.merging.node.SHARED_MEMORY", tmp_path)
    return [Bank(family, is_shared=True, cache=tmp_path / "cache") for _ in range(2)]


READS = """
import sys
from pathlib import Path

import torch

from workers.merging import node
from workers.merging.bank import Bank
from workers.models.family import resolve_family

root = Path(sys.argv[1])
node.SHARED_MEMORY = root / "shm"
sources = resolve_family(root / "base", {name: root / name for name in sys.argv[2:]}, cache=root / "cache")
bank = Bank(sources, "host", is_shared=True, cache=root / "cache")
tensors = [(alias, name, model.read(name)) for alias, model in sources.checkpoints.items() for name in model.tensors]
wrong = [name for alias, name, tensor in tensors if not torch.equal(bank.get(alias, name), tensor)]
print(len(wrong), repr(bank.private_because), len([*bank.node.shared.path.iterdir()]), flush=True)
sys.stdin.read()
"""


def test_processes_find_shared_tensors_in_one_order(tmp_path: Path) -> None:
    """Sets have another order in each process, and a study may list its experts in another order."""
    family = tiny_family(tmp_path, experts=("math", "text"), layers=1, hidden=96)
    assert [Path(model.directory).name for model in family.models] == ["base", "math", "text"]
    (tmp_path / "shm").mkdir()
    command = [sys.executable, "-c", READS, str(tmp_path)]
    orders = (["math", "text"], ["text", "math"])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, *order], env={**os.environ, "PYTHONHASHSEED": str(seed)}, **pipes)
        for seed, order in enumerate(orders, start=1)
    ]
    assert [each.stdout.readline() for each in started if each.stdout] == ["0 '' 4\n"] * 2
    for each in started:
        each.communicate("", timeout=60)
    assert list((tmp_path / "shm" / f"mergesearch-{os.getuid()}").iterdir()) == [], "the last process removes it"


def halves(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's half of a tensor: columns of a branch's last matrix, rows of other matrices; norms are whole."""
    if whole.dim() == 1:
        return whole
    return torch.tensor_split(whole, 2, dim=1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)[rank]


QUICK = ("passthrough", "linear", "slerp", "ties", "dare_linear", "della", "arcee_fusion", "pcb", "ramplus_tl")


@pytest.mark.parametrize(
    "name",
    # Compiling the kernel of a rule takes seconds, and those of one kind do the same with shards.
    [name if name in QUICK or name not in FUSED else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
def test_ranks_hold_the_bits_of_one_rank_by_every_method(name: str, family: Family, ranks: list[Bank]) -> None:
    """Two ranks, in their own orders, hold what one rank holds, and read each element of a weighted sum once."""
    alone = Bank(family)
    recipe = recipe_by(family, name)
    whole = dict(merged_tensors(recipe, alone, FLOAT32))
    shapes = merged_names(recipe, alone)
    before, why = alone.elements_read, dict[str, str]()
    merge_into(recipe, alone, {key: torch.empty(shape) for key, shape in shapes.items()})
    of_one = alone.elements_read - before
    for rank, bank in enumerate(ranks):
        parts = {key: halves(key, torch.empty(shape), rank) for key, shape in shapes.items()}
        of = {key: shard_of(part) for key, part in parts.items()}
        shards_ = {key: shard for key, shard in of.items() if not shard.is_whole(shapes[key])}
        found = {key: torch.full(part.shape, 7.0) for key, part in parts.items()}
        why |= merge_into(in_order_of_rank(plan_tensors(recipe, bank), found, rank=rank, ranks=2), bank, found, shards_)
        for key, tensor in found.items():
            assert torch.equal(bits(tensor), bits(halves(key, whole[key], rank).contiguous())), (key, rank)
    twice = sum(torch.Size(shape).numel() for shape in shapes.values() if len(shape) == 1)
    operands_ = len(recipe.head.sources) + METHODS[name].needs_base
    read = sum(bank.elements_read for bank in ranks)
    if name not in FUSED:
        assert set(why.values()) == {f"{name} has no kernel"}
    elif "ranks" not in PLAIN[name].uses:
        assert why == {}
        if not PLAIN[name].uses and name != "ramplus_tl":
            assert read == of_one + twice * operands_
        else:
            # Statistics read whole tensors once, in one of the ranks, and so does what depends on the recipe.
            assert sum(bank.node.num_made for bank in ranks) > 0
            assert ranks[1].node.num_made == 0
            assert ranks[1].elements_read < ranks[0].elements_read


@pytest.mark.parametrize("name", ["ties", "linear"])
def test_ranks_begin_at_other_tensors_for_statistics(name: str, family: Family, ranks: list[Bank]) -> None:
    """Two ranks of a TIES merge each begin where the other has its second half; those of a sum keep one order."""
    plan = plan_tensors(recipe_by(family, name), ranks[0])
    names = list(merged_names(plan, ranks[0]))[1:]
    orders = [[each.name for each in in_order_of_rank(plan, names, rank=r, ranks=2).tensors] for r in range(2)]
    half = len(names) // 2
    assert orders == [names, names[half:] + names[:half] if name == "ties" else names]


def shard_of(view: torch.Tensor) -> Shard:
    found = Shard.of(view, view if view._base is None else view._base)
    assert found is not None
    return found
