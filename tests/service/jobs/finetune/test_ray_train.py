"""Devices of a training's workers, on clusters given only by numbers."""

from __future__ import annotations

import pytest
import ray

from service.engine_machines import VARIABLE
from service.errors import Conflict
from service.jobs.finetune.ray_train import cluster, cores_of_each, num_side_by_side, trains_on_gpus
from workers.training.finetuning.spec import FinetuneSpec, parse_spec


def test_workers_get_a_gpu_each_or_none_has_one() -> None:
    """Every worker trains on a GPU of its own where there are GPUs, and on CPU cores where there are none."""
    assert trains_on_gpus(4, {"CPU": 8.0, "GPU": 4.0})
    assert not trains_on_gpus(4, {"CPU": 8.0})


def test_fewer_gpus_than_workers_are_an_error() -> None:
    """Workers without a GPU each are refused, instead of all of them training on CPU cores."""
    message = "workers: 4; the cluster has 2 GPUs, and each worker needs one; give at most 2 workers"
    with pytest.raises(Conflict, match=message):
        trains_on_gpus(4, {"CPU": 8.0, "GPU": 2.0})
    with pytest.raises(Conflict, match="workers: 4; the cluster has 3 CPU cores, and each worker needs one"):
        trains_on_gpus(4, {"CPU": 3.0, "GPU": 8.0})


def test_gpus_that_are_asked_for_are_not_replaced() -> None:
    """With `device: gpu`, a cluster without GPUs is an error that says both numbers; `device: cpu` uses none."""
    with pytest.raises(
        Conflict, match="workers: 4; the cluster has 0 GPUs, and each worker needs one; give device: cpu"
    ):
        trains_on_gpus(4, {"CPU": 8.0}, "gpu")
    assert not trains_on_gpus(4, {"CPU": 8.0, "GPU": 2.0}, "cpu")


def experts(count: int, **options: object) -> list[FinetuneSpec]:
    document = {"name": "a", "base": "b", "data": {"file": "c"}, "training": {"steps": 1}, **options}
    return [parse_spec(document)] * count


@pytest.mark.parametrize(
    ("resources", "wanted", "expected"),
    [
        ({"CPU": 8.0}, None, 1),
        ({"CPU": 8.0}, 2, 2),
        ({"CPU": 8.0}, 9, 3),
        ({"CPU": 8.0, "GPU": 4.0}, None, 2),
        ({"CPU": 8.0, "GPU": 8.0}, None, 3),
        ({"CPU": 8.0, "GPU": 8.0}, 1, 1),
    ],
)
def test_experts_train_side_by_side_where(resources: dict[str, float], wanted: int | None, expected: int) -> None:
    """Of three experts with two workers each, as many train at the same time as there are GPUs for, or as asked for."""
    assert num_side_by_side(experts(3, workers=2), resources, wanted) == expected


def test_too_many_experts_side_by_side_are_refused() -> None:
    """More experts at the same time than there are GPUs for are an error that says both numbers."""
    message = "parallel_experts: 3 with 2 workers each need 6 GPUs; the cluster has 4; give at most 2"
    with pytest.raises(Conflict, match=message):
        num_side_by_side(experts(3, workers=2), {"CPU": 8.0, "GPU": 4.0}, 3)


def test_gpus_of_stated_machines_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an autoscaled cluster has no GPU node, trainings wait for one instead of using CPU cores."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "memory": 1e9})
    assert not trains_on_gpus(2, cluster())
    monkeypatch.setenv(VARIABLE, "gpus=8,nodes=2 memory=350GiB,nodes=8")
    resources = cluster()
    assert (resources["GPU"], resources["CPU"]) == (16.0, 16.0)
    assert trains_on_gpus(8, resources)
    assert trains_on_gpus(8, resources, "gpu")
    assert not trains_on_gpus(2, resources, "cpu")
    assert num_side_by_side(experts(3, workers=8), resources) == 2
    with pytest.raises(Conflict, match="workers: 17; the cluster has 16"):
        trains_on_gpus(17, resources)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 90.0, "GPU": 24.0})
    assert cluster() == {"CPU": 90.0, "GPU": 24.0}


def test_workers_ask_for_cores_that_a_node_has() -> None:
    """Free cores are shared, but no worker asks for more than a node with room for it has."""
    assert cores_of_each(2, 16, [{"CPU": 16.0}], has_gpus=False) == 8
    assert cores_of_each(1, 0, [{"CPU": 16.0}], has_gpus=False) == 1
    assert cores_of_each(2, 16, [{"CPU": 8.0}, {"CPU": 8.0}], has_gpus=False) == 8
    assert cores_of_each(1, 16, [{"CPU": 8.0}, {"CPU": 8.0}], has_gpus=False) == 8
    assert cores_of_each(3, 72, [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 4.0}], has_gpus=True) == 2
    assert cores_of_each(2, 72, [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 1.0}], has_gpus=True) == 1, "another one may come"
    assert cores_of_each(2, 4, [{"CPU": 4.0}], has_gpus=True) == 1
