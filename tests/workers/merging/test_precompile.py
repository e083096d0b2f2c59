"""Kernels compiled at installation: those of fused methods, in both variants if elements may be tied."""

from __future__ import annotations

import pytest
import torch

from search_spaces.recipe import Merge
from workers.merging import precompile
from workers.merging.kernels import FUSED, is_fused
from workers.merging.methods.plain import Operands, merge_tensors


def test_usual_kernels_are_fused() -> None:
    """The usual kernels are of merges that are fused and tied as they say."""
    cases = list(precompile.usual())
    assert {case.merge.method for case in cases} >= {"linear", "ties", "dare_ties", "sce_mergekit"}
    kinds = {}
    for case in cases:
        case.merge.check()
        stored = precompile.operands(case)
        assert is_fused(case.merge, stored, case.dtype)
        if case.merge.method == "ties":
            rule = FUSED["ties"](case.merge, stored)
            kinds[case.dtype, case.is_tied] = type(rule.sparse.by).__name__  # type: ignore[attr-defined]
    assert kinds == {
        (torch.bfloat16, True): "ByMark",
        (torch.float32, True): "ByMark",
        (torch.float32, False): "ByMagnitude",
    }


def test_every_usual_kernel_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[tuple[str, int, torch.dtype]] = []

    def merge_stored(merge: Merge, stored: Operands, out: torch.Tensor) -> None:
        run.append((merge.method, len(stored.tensors), out.dtype))
        assert torch.isfinite(merge_tensors(merge, stored.in_float32())).all()

    monkeypatch.setattr(precompile, "merge_stored", merge_stored)
    precompile.compile_kernels()
    assert len(run) == len(list(precompile.usual()))
    assert {("ties_weighted", 3, torch.bfloat16), ("linear", 2, torch.float32)} <= set(run)
