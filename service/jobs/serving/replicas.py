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
from workers.serving.gpu_shares import whole_gpus
from workers.serving.serve_completer import ServeCompleter
from workers.types import Family

__all__ = ["ServeCompleters", "completers"]

# Requests that Serve sends to a chat's own replica at the same time; the engine generates the completions for one merge
# together.
MAX_ONGOING = 64


class ServeCompleters:
    """Replicas on Ray Serve that complete prompts with merges of the model family `family`.

    The class implements `service.jobs.completers.Completers`. `options` are the options of the engines. `own` is the
    name of the Serve application with the replica that belongs to the served study alone. Replicas that are idle for
    `keep_idle_s` seconds are stopped, so that no replica stays if this process is killed.

    Replicas on GPUs and on the CPU have Serve applications of different names. Machines come and go while a study is
    served, so the name of the application that is shared with searches is computed at each use. The method `close`
    stops the application that was opened last.
    """

    def __init__(self, family: Family, options: EngineOptions, *, own: str, keep_idle_s: float) -> None:
        self._family = family
        self._options = options
        self._own = own
        self._opened: dict[Place, str] = {}
        self._keep_idle_s = keep_idle_s

    def _name(self, place: Place) -> str:
        """Name of the Serve application with the replicas that searches use too (SCORER), or with the own one (OWN).

        The name for SCORER depends on whether the replicas now run on GPUs or on the CPU.
        """
        if place is Place.OWN:
            return self._own
        return app_name(self._family, self._options, on_gpus=runs_on_gpus(self._family, gpu_need()))

    def running(self) -> Sequence[Place]:
        try:
            return [place for place in Place if num_replicas(self._name(place))["RUNNING"]]
        except ServeUnavailable:
            return ()

    def num_gpus(self) -> tuple[float, float]:
        import ray
        from ray._private.state import available_resources_per_node

        free = whole_gpus(available_resources_per_node().values())
        return float(ray.cluster_resources().get("GPU", 0)), float(free)

    def open(self, place: Place) -> Completer:
        limits: dict[str, Any] = {"max_replicas": 1, "max_ongoing": MAX_ONGOING} if place is Place.OWN else {}
        limits["gpus"] = gpu_need()
        options = self._options
        if place is Place.OWN:
            limits["name"] = self._own
            options = options.model_copy(update={"gpu_share_left": 0.0})  # no gradients are computed beside it
        scorer = deploy_scorer(self._family, options, keep_idle_s=self._keep_idle_s, **limits)
        self._opened[place] = scorer.app_name
        return ServeCompleter(scorer.app_name)

    def close(self, place: Place) -> None:
        stop(self._opened.pop(place, "") or self._name(place))


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
