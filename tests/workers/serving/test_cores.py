"""Threads of replicas: a share of the cores of the machine on which the replica runs."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from search_spaces.study.engine import EngineOptions
from workers.models.modalities import Modality
from workers.serving.cores import make_worker, num_engines
from workers.types import Family, ModelSource

HEAD = {"NodeID": "head", "Alive": True, "Resources": {"CPU": 4.0}}
GONE = {"NodeID": "gone", "Alive": False, "Resources": {"CPU": 112.0, "GPU": 8.0}}
GPUS = [{"NodeID": name, "Alive": True, "Resources": {"CPU": 112.0, "GPU": 8.0}} for name in ("one", "two")]


@pytest.mark.parametrize(
    ("ranks", "engines", "expected"), [(1, 16, 8), (1, None, 8), (4, None, 2), (1, 2, 2), (8, 16, 1), (16, None, 1)]
)
def test_engines_on_gpus_are_those_that_a_machine_holds(ranks: int, engines: int | None, expected: int) -> None:
    options = EngineOptions(tensor_parallel_size=ranks)
    assert num_engines(options, engines, on_gpus=True, here="one", nodes=[HEAD, GONE, *GPUS]) == expected


def test_engines_on_the_cpu_are_spread_over_machines() -> None:
    found = [
        num_engines(EngineOptions(), engines, on_gpus=False, here="one", nodes=[GONE, *GPUS]) for engines in (1, 4, 5)
    ]
    assert found == [1, 2, 3]


@pytest.mark.parametrize(("threads", "expected"), [(0, "13"), (5, "5")])
def test_threads_are_those_of_the_replicas_machine(
    monkeypatch: pytest.MonkeyPatch, threads: int, expected: str
) -> None:
    """A replica on a machine of 112 cores and 8 GPUs has 13 threads, however few cores the head has."""
    made: list[str] = []

    def worker(family: Family, options: EngineOptions, **own: Any) -> str:
        made.append(os.environ["OMP_NUM_THREADS"])
        return f"worker {own}"

    context = SimpleNamespace(get_node_id=lambda: "two")
    ray = SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: [HEAD, *GPUS])
    set_threads: list[int] = []
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=set_threads.append))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(112)))
    monkeypatch.setattr(Modality, "worker_class", lambda _: worker)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    options, family = EngineOptions(threads=threads), Family(ModelSource("base", "base", "0"), ())
    found: Any = make_worker(family, options, engines=16, on_gpus=True, own={"most_engines": 16})
    assert (found, made) == ("worker {'most_engines': 16}", [expected])
    assert set_threads == ([] if threads else [13])


@pytest.mark.parametrize(
    ("modality", "on_gpus", "expected"),
    [("image", False, {"device": "cpu"}), ("image", True, {"device": "cuda"}), ("text", False, {}), ("text", True, {})],
)
def test_workers_are_given_the_device_of_their_replica(
    monkeypatch: pytest.MonkeyPatch, modality: str, on_gpus: bool, expected: dict[str, str]
) -> None:
    """A GPU that a replica on the CPU sees may be that of another engine."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(Modality, "worker_class", lambda _: lambda family, options, **own: own)
    family = Family(ModelSource("base", "base", "0"), (), modality=modality)
    found: Any = make_worker(family, EngineOptions(threads=1), engines=1, on_gpus=on_gpus, own={})
    assert found == expected
