"""Replicas on Ray Serve that complete prompts with the merges of one study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from search_spaces.study.engine import EngineOptions
from service.engine_machines import gpu_need
from service.jobs.completers import Completer, Place
from workers.errors import ServeUnavailable
from workers.serving.application import num_replicas
from workers.serving.deployment import app_name, deploy_scorer, runs_on_gpus, stop
from workers.serving.serve_completer import ServeCompleter
from workers.types import Family

__all__ = ["ServeCompleters", "completers"]

# Requests that Serve sends to a chat's own replica at the same time; the engine generates the completions for one merge
# together.
MAX_ONGOING = 64


class ServeCompleters:
    """Replicas on Ray Serve that complete prompts with merges of the model family `family`.

    Implements `service.jobs.completers.Completers`. `options` are the options of the engines. `own` is the name of the
    Serve application with the replica that belongs to the served study alone. Replicas that are idle for `keep_idle_s`
    seconds are stopped, so that none stays if this process is killed.
    """

    def __init__(self, family: Family, options: EngineOptions, *, own: str, keep_idle_s: float) -> None:
        self._family = family
        self._options = options
        on_gpus = runs_on_gpus(family, gpu_need())
        self._names = {Place.SCORER: app_name(family, options, on_gpus=on_gpus), Place.OWN: own}
        self._keep_idle_s = keep_idle_s

    def running(self) -> Sequence[Place]:
        try:
            return [place for place, name in self._names.items() if num_replicas(name)["RUNNING"]]
        except ServeUnavailable:
            return ()

    def num_gpus(self) -> tuple[float, float]:
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        return float(total.get("GPU", 0)), float(free.get("GPU", 0))

    def open(self, place: Place) -> Completer:
        limits: dict[str, Any] = {"max_replicas": 1, "max_ongoing": MAX_ONGOING} if place is Place.OWN else {}
        limits["gpus"] = gpu_need()
        deploy_scorer(self._family, self._options, name=self._names[place], keep_idle_s=self._keep_idle_s, **limits)
        return ServeCompleter(self._names[place])

    def close(self, place: Place) -> None:
        stop(self._names[place])


@contextmanager
def completers(family: Family, options: EngineOptions, job_id: str, keep_idle_s: float) -> Iterator[ServeCompleters]:
    """Context manager of the replicas that can complete prompts for the served study with the job id `job_id`.

    A replica is a process with one engine, which runs merges of the models in `family` (a base model and its experts)
    with the engine options `options`. A replica that is idle for `keep_idle_s` seconds is stopped. A replica that was
    started for this job alone is stopped at the end of the context.
    """
    found = ServeCompleters(family, options, own=f"chat-{job_id[:12]}", keep_idle_s=keep_idle_s)
    try:
        yield found
    finally:
        if Place.OWN in found.running():
            found.close(Place.OWN)
