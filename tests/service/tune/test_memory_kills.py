"""Trial actors that Ray's memory monitor has ended, as Tune's actor manager learns of them, without Ray's processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.air.execution._internal.actor_manager import RayActorManager
from ray.air.execution._internal.tracked_actor import TrackedActor
from ray.air.execution._internal.tracked_actor_task import TrackedActorTask
from ray.exceptions import OutOfMemoryError, RayActorError

from service.tune.ray_tune import _count_memory_kills_as_deaths

ERROR = OutOfMemoryError("7 worker(s) were killed due to the node running low on memory")


def manager_and_task(heard: list[Exception]) -> tuple[Any, TrackedActorTask]:
    """Tune's actor manager and a task of its only actor; `heard` gets the error when the actor dies."""
    manager: Any = RayActorManager(SimpleNamespace(free_resources=lambda **_: None))
    actor = TrackedActor(actor_id=1, on_error=lambda _, error: heard.append(error))
    manager._live_actors_to_ray_actors_resources[actor] = (None, None)
    return manager, TrackedActorTask(tracked_actor=actor)


def test_memory_kill_is_an_actors_death() -> None:
    """A trial actor that Ray ended for lack of memory is a dead actor for Tune, and not the end of Tune."""
    heard: list[Exception] = []
    manager, task = manager_and_task(heard)
    _count_memory_kills_as_deaths(manager)
    manager._actor_task_failed(task, ERROR)
    (death,) = heard
    assert isinstance(death, RayActorError)
    assert "low on memory" in str(death)
    assert manager.num_live_actors == 0


def test_tune_itself_would_end() -> None:
    """Without the change, Tune raises RuntimeError; if this fails, Ray has repaired it, and the change can go."""
    manager, task = manager_and_task([])
    with pytest.raises(RuntimeError, match="Caught unexpected exception"):
        manager._actor_task_failed(task, ERROR)
