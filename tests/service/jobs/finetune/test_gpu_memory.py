"""Trainings that do not fit into the memory of the GPUs are refused before they start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.engine_machines import VARIABLE
from service.errors import Conflict
from service.jobs.finetune import gpu_memory, ray_train
from service.jobs.finetune.directory import FAILURE_FILE, SPEC_FILE, SUMMARY_FILE
from service.jobs.finetune.gpu_memory import check_gpu_memory, largest_gpu_bytes
from service.jobs.finetune.training import run_finetune, run_fleet
from tests.service.jobs.finetune.test_training import spec_of, with_fit
from tests.workers.training.finetuning.test_memory_plan import headers
from tests.workers.training.finetuning.test_memory_plan import spec_of as spec_of_8b
from workers.errors import TrainingFailed
from workers.training.finetuning import trainer
from workers.training.finetuning.history import CHECKPOINTS
from workers.training.finetuning.spec import FinetuneSpec

GB = 10**9


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The check of a training of Llama-3-8B on GPUs of 80 GB."""
    found = headers()
    monkeypatch.setattr(gpu_memory, "locate", lambda base: base)
    monkeypatch.setattr(gpu_memory, "open_checkpoint", lambda _: found)
    return lambda **options: check_gpu_memory(spec_of_8b(**options), 80 * GB)


def test_a_training_that_may_not_fit_is_refused(check: Callable[..., None]) -> None:
    """AdamW of 8B on two GPUs of 80 GB: the state alone would fit, and gathered weights do not."""
    adamw = {"kind": "adamw"}
    message = (
        r"a: training takes 7\d\.\d GiB \(.*gathered weights.*\) on each of 2 GPUs, and may use 67\.1 of 74\.5 GiB; "
        "what fits is workers: 4 or an adapter$"
    )
    with pytest.raises(Conflict, match=message):
        check(method=adamw, workers=2)
    check(method=adamw, workers=4)
    check(method=adamw, workers=2, adapter={})
    for count in (4, 8):
        check(workers=count)
    ways = (
        "what fits is training.gradient_checkpointing: auto or training.micro_batch: 4 or workers: 4 or an adapter with"
    )
    with pytest.raises(Conflict, match=re.escape(ways)):
        check(adapter={}, method=adamw, training={"steps": 1, "gradient_checkpointing": False})
    with pytest.raises(Conflict, match=r"GiB$"):
        check(method={"kind": "tangent"})


def test_the_memory_is_of_stated_or_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stated machines have precedence; unknown memory of any of them, or GPUs of other machines, are not guessed."""
    monkeypatch.setenv(VARIABLE, "gpus=8,gpu_memory=80GB,nodes=2 gpus=4,gpu_memory=40GB memory=350GiB")
    assert largest_gpu_bytes(0) == 80 * GB
    monkeypatch.setenv(VARIABLE, "gpus=8,gpu_memory=80GB gpus=4")
    assert largest_gpu_bytes(12) is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("service.jobs.finetune.gpu_memory.smallest_gpu_bytes", lambda: 24 * GB)
    assert [largest_gpu_bytes(count) for count in (0, 2, 3)] == [None, 24 * GB, None]


def test_a_refused_specification_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained or stored; a training with a checkpoint has fitted before, and is not checked."""
    monkeypatch.setenv(VARIABLE, "gpus=1,gpu_memory=1MiB")
    trained: list[str] = []

    def fit(spec: FinetuneSpec, directory: Path, *_: Any) -> None:
        trained.append(spec.name)
        (directory / SUMMARY_FILE).write_text("{}")

    resources = replace(with_fit(fit), cluster=lambda: {"CPU": 4.0, "GPU": 1.0})
    spec, out = spec_of(tmp_path), tmp_path / "out"
    with pytest.raises(Conflict, match=r"sums: training takes .* on each of 1 GPUs, and may use 0\.0 of 0\.0 GiB"):
        run_finetune(spec, out, resources=resources)
    assert not (out / SPEC_FILE).exists()
    fleet = {alias: spec.model_copy(update={"name": alias}) for alias in ("one", "two")}
    with pytest.raises(Conflict, match="one: training takes"):
        run_fleet(fleet, {alias: tmp_path / alias for alias in fleet}, resources=resources)
    assert trained == []
    (out / CHECKPOINTS / "step-1").mkdir(parents=True)
    (out / CHECKPOINTS / "step-1" / "state.json").write_text("{}")
    run_finetune(spec, out, resources=resources)
    monkeypatch.setenv(VARIABLE, "gpus=1,gpu_memory=1GiB")
    run_fleet(fleet, {alias: tmp_path / alias for alias in fleet}, resources=resources)
    assert sorted(trained) == ["one", "sums", "two"]


@pytest.mark.parametrize(("workers", "is_writer"), [(1, True), (2, True), (2, False)])
def test_lack_of_gpu_memory_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, is_writer: bool
) -> None:
    """The process that runs out of memory stores the reason; a process that replaces it does not train again."""
    calls: list[int] = []

    def train(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr(trainer, "train", train)
    spec = spec_of(tmp_path).model_copy(update={"workers": workers})

    def once() -> None:
        ray_train.train_here(spec, tmp_path, report=lambda _: None, is_writer=is_writer)

    if workers > 1:  # Ray Train then ends the others, which wait for this one
        with pytest.raises(torch.OutOfMemoryError):
            once()
    once()
    if workers > 1:
        once()
    assert calls == [1]
    failure = json.loads((tmp_path / FAILURE_FILE).read_text())
    assert failure["error"] == TrainingFailed.__name__
    assert "the GPU ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)" in failure["message"]
    assert "training.micro_batch (now 8)" in failure["message"]
