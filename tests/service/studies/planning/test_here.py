"""Speeds of this machine: of data sheets on GPUs, measured on the CPU and on idle GPUs without a data sheet."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.studies.planning import here
from service.studies.planning.here import speeds_of_idle_gpu, this_machine
from service.studies.planning.profiles import KINDS, PRODUCTS

GB = 10**9
SPEEDS = {"flops": 7e13, "bandwidth": 9e11}
LOOPS = 3e7


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Devices that are measured in this process, with the speeds SPEEDS."""
    devices: list[str] = []

    def measure(threads: int, *, device: str) -> dict[str, float]:
        devices.append(device)
        return SPEEDS if device == "cuda" else SPEEDS | {"loops": LOOPS}

    monkeypatch.setattr(here, "measured_speeds", measure)
    this_machine.cache_clear()
    yield devices
    this_machine.cache_clear()


def with_gpus(monkeypatch: pytest.MonkeyPatch, name: str, *, answer: str | None = None) -> list[Any]:
    """Pretend that the machine has two GPUs, and that a subprocess that measures them prints `answer` or fails.

    The result lists the subprocesses that were started.
    """
    properties = SimpleNamespace(name=name, total_memory=48 * GB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    started: list[Any] = []

    def run(command: Any, **_: Any) -> Any:
        started.append(command)
        return SimpleNamespace(returncode=int(answer is None), stdout=answer)

    monkeypatch.setattr(subprocess, "run", run)
    return started


@pytest.mark.parametrize("kind", sorted(PRODUCTS))
def test_a_gpu_has_the_speeds_of_its_data_sheet(
    kind: str, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    """An engine may use the GPU, so it is not measured."""
    started = with_gpus(monkeypatch, PRODUCTS[kind])
    found, one = this_machine(), KINDS[kind]
    assert (found.gpu_flops, found.gpu_flops_float32) == (one.gpu_flops, one.gpu_flops_float32)
    assert (found.gpu_bandwidth, found.link_bandwidth) == (one.gpu_bandwidth, one.link_bandwidth)
    assert (found.name, found.source, found.gpus, found.gpu_bytes) == (f"{kind}x2", one.source, 2, 48 * GB)
    assert (measured, started) == ([], [])


def test_an_idle_gpu_without_a_data_sheet_is_measured(monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    """It is measured in another process, as a CUDA context would stay in this one."""
    started = with_gpus(monkeypatch, "NVIDIA H100 PCIe", answer=json.dumps(SPEEDS))
    found = this_machine()
    assert (found.name, found.gpu_flops, found.gpu_bandwidth) == ("here", 7e13, 9e11)
    assert (measured, len(started)) == ([], 1)


@pytest.mark.parametrize("answer", ["null", None], ids=["busy", "failed"])
def test_a_busy_gpu_without_a_data_sheet_counts_as_an_h100(
    answer: str | None, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    with_gpus(monkeypatch, "NVIDIA A10G", answer=answer)
    found = this_machine()
    assert (found.name, found.source) == ("this machine, as fast as H100s", "speeds of an H100 are assumed")
    assert (found.gpus, found.gpu_bytes, found.gpu_flops) == (2, 48 * GB, KINDS["h100"].gpu_flops)
    assert measured == []


def test_a_gpu_in_use_is_not_measured(monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    for free, expected in ((8 * GB, None), (47 * GB, SPEEDS)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 48 * GB))
        assert speeds_of_idle_gpu(1) == expected
    assert measured == ["cuda"]


def test_a_cpu_is_measured(monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = this_machine()
    assert (found.name, found.gpus, measured) == ("here", 0, ["cpu"])
    assert found.core_loops == LOOPS


def test_time_of_other_processes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of CPU seconds counts on a CPU: it includes slow repetitions, but no waiting for other processes."""
    monkeypatch.setattr(here, "MEASURED_S", 0.2)
    waits = iter([0.0] * 2 + [0.05] * 100)
    assert here._mean_alone(lambda: time.sleep(next(waits))) < 0.005
    numbers = iter([1, 1, 3] * 1000)  # in hundreds of thousands

    def work() -> None:
        for _ in range(100_000 * next(numbers)):
            pass

    assert here._mean_alone(work) > 1.2 * here._fastest(work)
