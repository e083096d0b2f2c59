"""Connections of drivers to Ray, scoring replicas and Ray Train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from service.cluster.session import RaySession, ray_session
from service.engine_machines import gpu_need
from service.jobs.base import Resources
from service.jobs.finetune.ray_train import cluster, fit
from service.jobs.serving.replicas import completers
from workers.serving.deployment import deploy_scorer, serving

if TYPE_CHECKING:
    from search_spaces.study.engine import EngineOptions
    from workers.types import Family, Scorer

__all__ = ["OWN", "SHARED"]

# Seconds after which replicas that no job uses are stopped.
KEEP_IDLE_S = 600.0


@contextmanager
def _shared_scorer(family: Family, options: EngineOptions, replicas: int) -> Iterator[Scorer]:
    yield deploy_scorer(family, options, replicas=replicas, keep_idle_s=KEEP_IDLE_S, gpus=gpu_need())


@contextmanager
def _own_scorer(family: Family, options: EngineOptions, replicas: int) -> Iterator[Scorer]:
    with serving(family, options, replicas=replicas, gpus=gpu_need()) as scorer:
        yield scorer


@contextmanager
def _shared_ray() -> Iterator[RaySession]:
    """Context with a connection to the Ray cluster of the server, without the address of Ray's dashboard.

    The address is left out because users open the dashboard through the server.
    """
    with ray_session() as session:
        yield replace(session, dashboard_url=None)


def _own_ray() -> AbstractContextManager[RaySession]:
    return ray_session()


# For a server: replicas are kept for the next job with the same models.
SHARED = Resources(ray=_shared_ray, scorer=_shared_scorer, fit=fit, cluster=cluster, completers=completers)

# For one command: its replicas stop when it ends.
OWN = Resources(ray=_own_ray, scorer=_own_scorer, fit=fit, cluster=cluster, completers=completers)
