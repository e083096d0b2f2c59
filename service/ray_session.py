"""Ray for the length of one command: joined where RAY_ADDRESS says so, else started here and taken down again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["RaySession", "ray_session"]

NAMESPACE = "mergesearch"

# What passes through Ray's object store is recipes and sample results; weights never do.
OBJECT_STORE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class RaySession:
    """`is_own`: this process started Ray. `dashboard_url` is None where there is no dashboard."""

    is_own: bool
    dashboard_url: str | None


@contextmanager
def ray_session() -> Iterator[RaySession]:
    """Ray, up and connected. Raises ConnectionError if RAY_ADDRESS names a cluster that does not answer."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A loaded machine may need more than Ray's own minute to bring up its processes.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
    os.environ.setdefault("RAY_agent_register_timeout_ms", "300000")
    # Workers are told their accelerators by us; Ray must not blank CUDA_VISIBLE_DEVICES for actors without a GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)

    if ray.is_initialized():
        yield RaySession(is_own=False, dashboard_url=None)
        return
    address = os.environ.get("RAY_ADDRESS")
    common = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        context = ray.init(address=address, **common)
    else:
        context = ray.init(include_dashboard=True, object_store_memory=OBJECT_STORE_BYTES, **common)
    url = context.dashboard_url
    try:
        yield RaySession(is_own=not address, dashboard_url=f"http://{url}" if url else None)
    finally:
        ray.shutdown()
