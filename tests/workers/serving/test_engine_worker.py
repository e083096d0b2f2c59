"""Verification by a replica's worker, with stand-ins for the engine and for the comparison with transformers."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from tests.workers.recipes import arithmetic
from workers.engines.transformers import merged_models, verification
from workers.serving import engine_worker
from workers.serving.engine_worker import EngineWorker
from workers.types import Family, VerificationReport

FOUND = VerificationReport("digest", 2, 2, 0.0, 1e-3, (), 0)


class Aligned:
    """A stand-in for a recipe with an alignment at each layer; it has the fields that verification reads."""

    def __init__(self, recipe: Recipe) -> None:
        self.digest = recipe.digest
        self.layers = [SimpleNamespace(alignment="of another layer")] * len(recipe.layers)


@pytest.fixture
def worker(tied_family: Family, monkeypatch: pytest.MonkeyPatch) -> EngineWorker:
    """A worker on a machine whose disks are full."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "1.0 GiB of temporary files fit on no disk")

    monkeypatch.setattr(engine_worker, "scratch", full)
    monkeypatch.setattr(verification, "nothing_to_compare", lambda *_, **__: None)
    monkeypatch.setattr(verification, "texts_to_read", lambda *_: ((1, 2),))
    made = EngineWorker.__new__(EngineWorker)
    made.engine = SimpleNamespace(  # type: ignore[assignment]
        family=tied_family,
        dtype="float32",
        options=EngineOptions(max_model_len=64),
        prompts=SimpleNamespace(directory=Path(tied_family.base.directory), config={}),
        swap=lambda recipe: None,
        logprobs=lambda texts: [[-1.0] for _ in texts],
    )
    made.evaluator = SimpleNamespace()  # type: ignore[assignment]
    return made


def test_a_merge_with_alignments_is_verified_without_a_disk(
    worker: EngineWorker, tied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not exported, so a full disk is no reason to leave it out."""
    asked: list[dict[str, Any]] = []

    def verify(*_: Any, **options: Any) -> VerificationReport:
        asked.append(options)
        return FOUND

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(merged_models, "merged_model", lambda *_, dtype: f"the model in {dtype}")
    recipe: Any = Aligned(arithmetic(tied_family, 0.3, 0.5))
    assert worker.verify(recipe, (), ()) is FOUND
    ((options),) = asked
    assert (options["model"], options["engine_logprobs"]) == ("the model in float32", {(1, 2): [-1.0]})


def test_verification_has_the_threads_of_all_ranks(
    worker: EngineWorker, tied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of four ranks verifies on the CPU with four times its threads, if there are cores, and gives them back.

    The merge is written into the engine with its own threads.
    """
    seen: list[int] = []

    def verify(*_: Any, **__: Any) -> VerificationReport:
        seen.append(torch.get_num_threads())
        return FOUND

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(merged_models, "merged_model", lambda *_, dtype: "the model")
    monkeypatch.setattr(worker.engine, "swap", lambda recipe: seen.append(torch.get_num_threads()))
    worker.engine.options = worker.engine.options.model_copy(update={"tensor_parallel_size": 4})
    recipe: Any = Aligned(arithmetic(tied_family, 0.3, 0.5))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for cores in (100, 7, 2):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
            worker.verify(recipe, (), ())
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 8, 2, 6, 2, 2]


def test_an_export_that_fits_on_no_disk_is_not_verified(worker: EngineWorker, tied_family: Family) -> None:
    recipe = arithmetic(tied_family, 0.3, 0.5)
    found = worker.verify(recipe, (), ())
    assert (found.recipe_digest, found.num_samples) == (recipe.digest, 0)
    assert "the export of the merge cannot be written: [Errno 28] 1.0 GiB of temporary files" in (found.reason or "")


def test_the_share_that_the_engine_leaves_is_offered(
    worker: EngineWorker, tied_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that verifies elsewhere may use the part of the GPU that this engine leaves."""
    asked: list[float] = []

    def elsewhere(*_: Any, share: float, **__: Any) -> VerificationReport:
        asked.append(share)
        return FOUND

    monkeypatch.setattr(engine_worker, "scratch", lambda *_, **__: nullcontext(tmp_path))
    monkeypatch.setattr("workers.export.checkpoint.export", lambda *_, **__: None)
    worker._verify_elsewhere = elsewhere
    for share in (0.0, 0.4):
        worker.engine.options = EngineOptions(max_model_len=64, gpu_share_left=share)
        assert worker.verify(arithmetic(tied_family, 0.3, 0.5), (), ()) is FOUND
    assert asked == [0.0, 0.4]
