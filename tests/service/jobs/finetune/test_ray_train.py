"""Devices of a training's workers, on clusters that are only numbers here."""

from __future__ import annotations

import pytest

from service.errors import Conflict
from service.jobs.finetune.ray_train import trains_on_gpus


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
