"""Devices of a training's workers, on clusters given only by numbers."""

from __future__ import annotations

import pytest

from service.errors import Conflict
from service.jobs.finetune.ray_train import num_side_by_side, trains_on_gpus
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
