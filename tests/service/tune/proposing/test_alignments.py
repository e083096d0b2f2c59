"""Alignments learned by Ray tasks: once for each pair, and what the same formulas give in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service.tune.proposing import alignments
from service.tune.proposing.alignments import learn_alignments
from tests.conftest import OPTIONS
from workers.cache import CACHE_VARIABLE
from workers.errors import InvalidTask
from workers.training.hm3.activations import prompts_of, read_activations
from workers.training.hm3.pairs import AlignmentJob, Pair, file_of, fit, found
from workers.types import Family, TaskSpec

PAIRS: tuple[Pair, ...] = ((("math", 1), ("text", 2)), (("text", 4), ("math", 0)))


def test_pairs_are_learned_in_parallel_and_only_once(
    ray_cluster: None, untied_family: Family, sums: TaskSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    job = AlignmentJob(untied_family, OPTIONS, {"sums": sums}, {"sums": range(12)}, "moments")
    names = learn_alignments(job, PAIRS)
    assert set(names) == set(PAIRS)
    assert all(file_of(name).is_file() for name in names.values())
    prompts = prompts_of(untied_family.base.directory, job.options, job.tasks, job.positions)
    math, text = (read_activations(untied_family, alias, prompts, device="cpu") for alias in ("math", "text"))
    expected = fit("moments", math.after(1), text.before[2], math.is_held_out)
    known = found(job, PAIRS[0])
    assert known is not None
    scales = [aligned.alignment.tensors()["scale"] for aligned in (known[1], expected)]
    assert torch.allclose(*scales, rtol=1e-3, atol=1e-4)
    assert known[1].after < known[1].before

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pair that is known is not learned again")

    monkeypatch.setattr(alignments.ray, "remote", refuse)
    assert learn_alignments(job, PAIRS[:1]) == {PAIRS[0]: names[PAIRS[0]]}
    monkeypatch.undo()
    gone = TaskSpec({"file": str(tmp_path / "gone.jsonl")}, "exact_match")
    lost = AlignmentJob(untied_family, OPTIONS, {"gone": gone}, {"gone": range(2)}, "moments")
    with pytest.raises(InvalidTask, match=r"gone\.jsonl"):
        learn_alignments(lost, PAIRS[:1])
