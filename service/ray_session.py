"""Ray for the length of one command: joined where RAY_ADDRESS says so, else started here and taken down again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["RaySession", "ray_session"]

NAMESPACE = "mergesearch"

# What passes through Ray's object store is recipes and sample results; weights never do.
OBJECT_STORE_BYTES = 256 * 2**20

# A loaded machine may miss Ray's own deadlines: a raylet whose agent takes more than 15 s to come up ends itself, and
# `ray.init` waits for it all the same.
START_ATTEMPTS = 3
START_WAIT_S = 60

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RaySession:
    """`is_own`: this process started Ray. `dashboard_url` is None where there is no dashboard."""

    is_own: bool
    dashboard_url: str | None


@contextmanager
def ray_session() -> Iterator[RaySession]:
    """Ray, up and connected. Raises ConnectionError if RAY_ADDRESS names a cluster that does not answer."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(START_WAIT_S))
    os.environ.setdefault("RAY_agent_register_timeout_ms", "300000")
    # Workers are told their accelerators by us; Ray must not blank CUDA_VISIBLE_DEVICES for actors without a GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield RaySession(is_own=False, dashboard_url=None)
        return
    address = os.environ.get("RAY_ADDRESS")
    context = _started(address)
    url = context.dashboard_url
    try:
        yield RaySession(is_own=not address, dashboard_url=f"http://{url}" if url else None)
    finally:
        ray.shutdown()


def _started(address: str | None) -> Any:
    import ray

    common = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        return ray.init(address=address, **common)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            return ray.init(include_dashboard=True, object_store_memory=OBJECT_STORE_BYTES, **common)
        except Exception as error:  # what Ray raises when its own processes are slow has no class of its own
            if attempt == START_ATTEMPTS or "timed out" not in str(error):
                raise ConnectionError(f"Ray did not start on this machine: {error}") from error
            logger.warning("Ray did not start in time; trying once more")
            ray.shutdown()
    raise AssertionError
