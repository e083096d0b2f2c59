import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.errors import InvalidRecipe
from tests.workers.recipes import random_alignment
from workers.alignments.files import write_alignment
from workers.engines.vllm.paths.held import _Aligned, _combined
from workers.engines.vllm.paths.pool import Hop
from workers.merging.residual_scales import BranchFactors

HIDDEN = 8


@pytest.fixture
def bank(tmp_path: Path) -> Any:
    return SimpleNamespace(alignments_dir=str(tmp_path), base=SimpleNamespace(config={"hidden_size": HIDDEN}))


def written(bank: Any, count: int) -> Sequence[str]:
    return [write_alignment(bank.alignments_dir, random_alignment("moments", HIDDEN, seed)) for seed in range(count)]


def test_as_many_are_kept_as_the_longest_path_may_have(bank: Any) -> None:
    aligned = _Aligned(torch.zeros(1, dtype=torch.bfloat16), most=3)
    names = written(bank, 4)
    assert aligned.read((None, names[0], names[1], names[0]), bank).keys() == set(names[:2])
    assert aligned.read((None, names[2]), bank)[names[2]].tensors()["scale"].dtype == torch.bfloat16
    for file in Path(bank.alignments_dir).iterdir():
        if file.stem in names[:3]:
            file.unlink()  # those that are kept are not read again
    held = aligned.read((None, names[0]), bank)
    assert aligned.read((None, names[3], names[0]), bank)[names[0]] is held[names[0]]
    assert aligned.digests.keys() == {names[0], names[2], names[3]}
    with pytest.raises(InvalidRecipe, match=f"layer 1: alignment '{names[1][:12]}': .* cannot be read"):
        aligned.read((None, names[0], names[1]), bank)
    aligned.clear()
    assert not aligned.digests


def test_paths_that_differ_in_an_alignment_have_other_checksums(bank: Any) -> None:
    aligned = _Aligned(torch.zeros(1), most=3)
    first, second = written(bank, 2)
    aligned.read((None, first, second), bank)
    paths = [
        (Hop(0), Hop(1)),
        (Hop(0), Hop(1, alignment=first)),
        (Hop(0), Hop(1, alignment=second)),
        (Hop(0, alignment=first), Hop(1)),
    ]
    assert len({_combined("", path, {0: "a", 1: "b"}, aligned.digests) for path in paths}) == 4


def test_paths_that_differ_in_a_factor_have_other_checksums() -> None:
    factors = (BranchFactors(), BranchFactors(2.0, 2.0), BranchFactors(2.0, 1.0), BranchFactors(1.0, 2.0))
    checksums = [_combined("", (Hop(0, each),), {0: "a"}, {}) for each in factors]
    assert len(set(checksums)) == 4
    # Checksums of paths without scales of MLPs are compared with stored ones.
    assert checksums[1] == hashlib.sha256(b"\n0:a:2.0\n").hexdigest()
