"""Remote function calls on chosen nodes of a Ray cluster, each as a Ray Job.

Nodes may have access to files, such as models, that a server on another machine cannot read. Their machines may also
have a different amount of memory. Therefore the server runs some functions on these nodes. The server stores each call
as a file, named by the sha256 of its content, among the artifacts, to which servers and nodes have access. The Ray Job
receives this sha256, stores the result in the same way, and writes the sha256 of the result to its log.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import pickle
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import psutil

from service.cluster.job_client import ANSWER_S
from service.cluster.session import check_reachable
from service.disk import artifacts_dir
from service.engine_machines import EngineMachines
from service.store.blobs import BlobStore, open_blobs
from service.threads import Work, limiter
from service.worker_process import NO_LIMITS, CallLimits, WorkerProcess
from workers.object_store import is_object_url
from workers.telemetry import logs

__all__ = ["Node", "NodeCalls", "cluster_machines", "main", "nodes_of"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

POLL_S = 0.2

# Most nodes that are listed, which is the most that Ray lists; its default is 100.
MAX_NODES = 10_000

# Seconds that a job may take beyond its call: until it runs, and until its end is known.
START_GRACE_S = 300.0

# The line in a job's log that has the sha256 of the result.
TOLD = re.compile(r"^result of the call: ([0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster: its id, its machine's address, and the GPUs, CPUs and memory in bytes that Ray may use.

    `is_head` says whether the node is the head of the cluster, on which Ray Jobs start by default.
    """

    id: str
    address: str
    num_gpus: float
    num_cpus: float
    is_head: bool = False
    memory_bytes: int = 0

    @property
    def runs_engines(self) -> bool:
        return self.num_gpus > 0 or self.num_cpus > 0


def nodes_of(dashboard_url: str | None) -> tuple[Node, ...]:
    """Find the living nodes of the Ray cluster whose dashboard is at `dashboard_url`.

    Raises ConnectionError if the dashboard does not answer, or wants a token that this process does not have.
    """
    from ray.exceptions import AuthenticationError
    from ray.util.state import list_nodes
    from ray.util.state.exception import RayStateApiException

    try:
        alive = [("state", "=", "ALIVE")]
        found = list_nodes(dashboard_url, filters=alive, limit=MAX_NODES, raise_on_missing_output=False)
    except (RayStateApiException, RuntimeError, AuthenticationError) as error:
        raise ConnectionError(f"Ray's dashboard does not list its nodes: {error}") from error
    return tuple(
        Node(
            node.node_id,
            node.node_ip,
            num_gpus=float(node.resources_total.get("GPU", 0)),
            num_cpus=float(node.resources_total.get("CPU", 0)),
            is_head=node.is_head_node,
            # Ray sets aside a part for its object store, of which mergesearch uses little.
            memory_bytes=int(sum(node.resources_total.get(name, 0) for name in ("memory", "object_store_memory"))),
        )
        for node in found
    )


def cluster_machines() -> tuple[EngineMachines, ...]:
    """The machines that can run engines in the Ray cluster that the environment variable RAY_ADDRESS names.

    The result contains the GPUs and memory of each machine whose node is alive. The result is empty without the
    variable, if this machine is the only machine, and if the cluster does not answer.
    """
    if "RAY_ADDRESS" not in os.environ:
        return ()
    try:
        check_reachable()
        return _machines(nodes_of(None))
    except (ConnectionError, ValueError) as error:  # the latter for addresses that Ray cannot resolve
        logger.warning("the machines of the Ray cluster are not known: %s", error)
        return ()


def _machines(nodes: Sequence[Node]) -> tuple[EngineMachines, ...]:
    """Machines that can run engines among `nodes`; empty if the cluster has only this machine."""
    own = _own_addresses()
    machines = {"" if node.address in own else node.address: node for node in nodes if node.runs_engines}
    if machines.keys() == {""}:
        return ()
    return tuple(EngineMachines(int(node.num_gpus), node.memory_bytes or None) for node in machines.values())


class NodeCalls:
    """Calls of Python functions on chosen nodes of a Ray cluster, each as a Ray Job.

    `connected` returns Ray's client of jobs and the dashboard's URL; the client is None while Ray does not answer.
    `data_dir` is the server's data directory. `files` is the directory or object store, which server and nodes share,
    through which calls and results are exchanged; None is a directory in `data_dir`.
    """

    def __init__(
        self, connected: Callable[[], tuple[Any, str | None]], data_dir: Path, files: str | Path | None = None
    ) -> None:
        self._connected = connected
        self._data_dir = data_dir
        self._files = files

    def place(self) -> tuple[Node | None, tuple[EngineMachines, ...]]:
        """Select the node on which submitted jobs are checked, and list the machines that can run inference engines.

        The node is the head of the cluster. The process that later works on a job also runs there, and needs the same
        models and database. The node is None if the head is on this machine, which then checks jobs itself. It is also
        None if the cluster does not answer, unless this machine and the head share files only through an object store:
        then ConnectionError is raised.

        The list contains the GPUs and memory of each machine whose node is alive. It is empty if the cluster has only
        this machine, or if the cluster does not answer.
        """
        try:
            client, url = self._connected()
            if client is None:
                raise ConnectionError("Ray's dashboard does not answer")
            nodes = nodes_of(url)
            head = next((node for node in nodes if node.is_head), None)
            if head is None:
                raise ConnectionError("Ray's dashboard lists no head")
        except ConnectionError:
            if self._files is not None and is_object_url(str(self._files)):
                raise
            return None, ()
        return None if head.address in _own_addresses() else head, _machines(nodes)

    async def call(
        self,
        function: Callable[..., Result],
        *args: Any,
        node: Node,
        timeout_s: float,
        limits: CallLimits = NO_LIMITS,
        **kwargs: Any,
    ) -> Result:
        """Run `function` with the given arguments on the node `node`, and return its result or raise its error.

        `function` must be defined at the top level of a module, and all arguments must be picklable. The arguments must
        hold no secrets, because they are stored. `timeout_s` and `limits` limit the seconds, the processor time and the
        memory of the call. If this coroutine is cancelled, the function is not stopped: it runs until it returns or
        reaches a limit.

        Raises:
            ConnectionError: The cluster does not answer, or did not run the call.
            ProcessDied: The process that ran the function ended before it returned.
            TimeoutError: The function did not return within `timeout_s` seconds.
            LimitExceeded: The function needed more processor time or memory than `limits` allow.
        """
        call = pickle.dumps((timeout_s, limits, pickle.dumps((function, args, kwargs))))
        limit_s = timeout_s + START_GRACE_S + ANSWER_S  # `_run` ends earlier, unless a request of its does not
        with anyio.move_on_after(limit_s):
            result: Result = await anyio.to_thread.run_sync(
                self._call, call, node, timeout_s, abandon_on_cancel=True, limiter=limiter(Work.RAY)
            )
            return result
        raise ConnectionError(f"the cluster did not answer within {limit_s:g} s")

    def _call(self, call: bytes, node: Node, timeout_s: float) -> Any:
        blobs = open_blobs(self._files or artifacts_dir(self._data_dir))
        with blobs.storing():
            is_result, value = pickle.loads(_read(blobs, self._run(blobs.add_bytes(call), node, timeout_s)))
        if is_result:
            return value
        raise value

    def _run(self, digest: str, node: Node, timeout_s: float) -> str:
        """Run a stored function call on `node` as a Ray Job, and return the sha256 of its stored result.

        `digest` is the sha256 under which the call is stored. Raises ConnectionError if Ray does not answer, if the Ray
        Job ends without a result, or if it has not ended START_GRACE_S seconds after the call's limit of `timeout_s`
        seconds.
        """
        client, _ = self._connected()
        if client is None:
            raise ConnectionError("Ray's dashboard does not answer")
        command = ["python", "-m", "service.cluster.node_calls", "--data", str(self._data_dir), "--call", digest]
        if self._files is not None:
            command += ["--files", str(self._files)]
        name = f"check-{uuid.uuid4().hex[:16]}"
        deadline = time.monotonic() + timeout_s + START_GRACE_S
        try:
            client.submit_job(
                entrypoint=shlex.join(command),
                submission_id=name,
                metadata={"job_name": "check"},
                entrypoint_label_selector={"ray.io/node-id": node.id},
            )
            while (status := str(client.get_job_info(name).status.value)) in ("PENDING", "RUNNING"):
                if time.monotonic() > deadline:
                    client.stop_job(name)
                    raise ConnectionError(f"Ray job {name} did not end within {timeout_s + START_GRACE_S:.0f} s")
                time.sleep(POLL_S)
            log = client.get_job_logs(name)
            told = TOLD.findall(log)
            if not told:
                logger.error("Ray job %s on the node %s has ended (%s): %s", name, node.address, status, log)
                raise ConnectionError(
                    f"Ray job {name} on the node {node.address} has ended without a result ({status}); its log is in "
                    "that of the server"
                )
            with suppress(RuntimeError, ConnectionError):
                client.delete_job(name)
            return str(told[-1])
        except RuntimeError as error:  # of Ray's client
            raise ConnectionError(f"Ray's dashboard does not answer: {error}") from error


def _own_addresses() -> set[str]:
    return {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}


def _read(blobs: BlobStore, digest: str) -> bytes:
    """Content of the file with the given sha256 (`digest`) in the content-addressed store `blobs`.

    Raises ConnectionError if the file is missing or was changed.
    """
    try:
        content = blobs.read(digest)
    except FileNotFoundError as error:
        raise ConnectionError(f"{blobs.place}: has no file {digest}; the server and the nodes must share it") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ConnectionError(f"{blobs.place}: the file {digest} has changed")
    return content


def main() -> int:
    """Run, on this node, the function call that the command line names, and print the sha256 of the stored result.

    The caller stored the call in a content-addressed store, which server and nodes share. Returns the exit code 0.
    """
    parser = argparse.ArgumentParser(prog="python -m service.cluster.node_calls")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--files")
    parser.add_argument("--call", required=True)
    options = parser.parse_args()
    logs.log_to_stderr()
    blobs = open_blobs(options.files or artifacts_dir(options.data))
    timeout_s, limits, call = pickle.loads(_read(blobs, options.call))
    process = WorkerProcess("call")
    try:
        reply = True, asyncio.run(process.call(_called, call, timeout_s=timeout_s, limits=limits))
    except Exception as error:  # of the function, or of its process
        reply = False, error
    finally:
        process.stop()
    digest = blobs.add_bytes(pickle.dumps(reply))
    print(f"result of the call: {digest}", flush=True)
    return 0


def _called(call: bytes) -> Any:
    function, args, kwargs = pickle.loads(call)
    return function(*args, **kwargs)


if __name__ == "__main__":
    # The functions of the module as others import it, so that classes are the same.
    from service.cluster import node_calls

    sys.exit(node_calls.main())
