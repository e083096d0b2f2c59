"""Connection of one command to a Ray cluster, or a Ray started on this machine for the command's duration.

The cluster is named by RAY_ADDRESS, or is started and stopped by the command.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from workers.merging.node import remove_leftovers

__all__ = ["RaySession", "check_reachable", "prepare_environment", "ray_session", "start_ray"]

NAMESPACE = "mergesearch"

# Recipes and sample results pass through Ray's object store, weights never do.
OBJECT_STORE_BYTES = 256 * 2**20

# A busy machine may miss Ray's own deadlines: a raylet whose agent takes more than 15 s to start ends itself, and
# `ray.init` keeps waiting for it.
START_ATTEMPTS = 3
START_WAIT_S = 60

# How long the cluster that RAY_ADDRESS names may take to accept a connection and answer.
ANSWER_WAIT_S = 5.0

# First bytes of an HTTP/2 connection, by the client and by the server; Ray's protocol (gRPC) uses HTTP/2.
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
SETTINGS_FRAME = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RaySession:
    """Connection of this process to a Ray cluster.

    `is_own` says whether the current process started Ray. `dashboard_url` is the URL of Ray's dashboard; None if there
    is none that the user of this process may open. `dashboard_host` is the address of the machine on which the
    dashboard listens; None if there is no dashboard.
    """

    is_own: bool
    dashboard_url: str | None
    dashboard_host: str | None = None


@contextmanager
def ray_session() -> Iterator[RaySession]:
    """Context with a connection to the Ray cluster that the environment variable RAY_ADDRESS names.

    If the variable is not set, Ray is started on this machine and stopped at the end of the context. Then the source
    weights are removed from shared memory that killed processes have left there. Raises ConnectionError if Ray cannot
    be reached or started.
    """
    prepare_environment()
    import ray

    if ray.is_initialized():
        yield RaySession(is_own=False, dashboard_url=None)
        return
    address = os.environ.get("RAY_ADDRESS")
    context = _joined(address) if address else start_ray()
    url = context.dashboard_url
    try:
        host = urlsplit(f"http://{url}").hostname if url else None
        yield RaySession(is_own=not address, dashboard_url=f"http://{url}" if url else None, dashboard_host=host)
    finally:
        ray.shutdown()
        if not address:  # its processes have ended, some of them by a kill
            remove_leftovers()


def prepare_environment() -> None:
    """Set environment variables that Ray reads when it is imported or started, unless they are set already."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # else the dashboard lists no runs
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(START_WAIT_S))
    os.environ.setdefault("RAY_agent_register_timeout_ms", "300000")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # else Ray starts an idle process for each core
    # Below: seconds that a driver has to end, longer than it waits for its chunks (CHUNK_GRACE_S of
    # `service.tune.ray_tune`); and Ray must not empty CUDA_VISIBLE_DEVICES for actors without a GPU, because the
    # deployment requests GPUs for replicas.
    os.environ.setdefault("RAY_JOB_STOP_WAIT_TIME_S", "90")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def check_reachable(*, timeout_s: float = ANSWER_WAIT_S) -> None:
    """Check that a Ray cluster answers at the address in the environment variable RAY_ADDRESS.

    Raises ConnectionError if no program that could be Ray answers within `timeout_s` seconds. Without this check,
    `ray.init` would try for minutes.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto" and the like: Ray resolves them
    advice = "start Ray there, correct RAY_ADDRESS, or unset it to have Ray started on this machine"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                return
            connection.settimeout(timeout_s)
            connection.sendall(HTTP2_GREETING)
            frame = connection.recv(9)
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"RAY_ADDRESS={address}: no Ray answers there ({error}); {advice}") from error
    if len(frame) < 4 or frame[3] != SETTINGS_FRAME:
        raise ConnectionError(f"RAY_ADDRESS={address}: the program that answers there is not Ray; {advice}")


def _joined(address: str) -> Any:
    import ray

    check_reachable()
    try:
        return ray.init(address=address, **_COMMON)
    except (RuntimeError, ValueError, OSError) as error:  # another version, another kind of address, no permission
        raise ConnectionError(f"RAY_ADDRESS={address}: cannot be joined: {error}") from error


def start_ray(**options: Any) -> Any:
    """Start Ray and its dashboard on this machine, as part of the current process, and return the result of `ray.init`.

    `options` are further arguments of `ray.init`. Raises ConnectionError if Ray does not start.
    """
    prepare_environment()
    import ray

    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            # "local": never one that `ray start` left running on this machine.
            return ray.init(
                "local", include_dashboard=True, object_store_memory=OBJECT_STORE_BYTES, **_COMMON, **options
            )
        except Exception as error:  # Ray has no exception class for processes that start too slowly
            if attempt == START_ATTEMPTS or "timed out" not in str(error):
                raise ConnectionError(f"Ray did not start on this machine: {error}") from error
            logger.warning("Ray did not start in time; trying again")
            ray.shutdown()
    raise AssertionError


_COMMON = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
