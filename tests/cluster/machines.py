"""Several "machines" made of this one: each has its own network, processes, mounts, /dev/shm and /tmp/ray.

Network namespaces are joined by a bridge, through which this process and the machines reach each other. The disk is
shared. Needs root. Ray nodes are started one at a time, because a raylet gives up when its start takes too long.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.end_to_end.server import ROOT

__all__ = ["BRIDGE_ADDRESS", "DASHBOARD_PORT", "NETWORK", "Cluster", "Machine", "machines", "reason_to_skip"]

BRIDGE, PREFIX = "msbridge", "10.77.0"
BRIDGE_ADDRESS, NETWORK = f"{PREFIX}.1", f"{PREFIX}.0/24"
HEAD, FIRST_WORKER = 10, 11
GCS_PORT, DASHBOARD_PORT = 6379, 8265
STORE_BYTES = 80_000_000
START_S = 180.0
STARTS = 5
POLL_S = 0.5
PROGRAMS = ("ip", "unshare", "mount")
BIN = Path(sys.executable).parent
RAY = str(BIN / "ray")


def reason_to_skip() -> str | None:
    """Why no machines can be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    name = f"ms-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    return None


@dataclass
class Machine:
    """A machine that runs one Ray node at a time. `directory` has its log and its /tmp/ray.

    Each node finds an empty directory of its own in place of `hidden`.
    """

    number: int
    directory: Path
    environment: Mapping[str, str]
    hidden: Path | None
    _process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"ms{self.number}"

    @property
    def address(self) -> str:
        return f"{PREFIX}.{self.number}"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def plug_in(self) -> None:
        """Make the machine's network, and connect it with the bridge."""
        outer, inner = f"v{self.name}", "eth0"
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", self.name)
        _run("ip", "link", "set", outer, "master", BRIDGE, "up")
        _run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", inner)
        for link in (inner, "lo"):
            _run("ip", "-n", self.name, "link", "set", link, "up")

    def cut(self) -> None:
        """Cut the machine's link. Its processes continue, and nothing tells them or others that the link is cut."""
        _run("ip", "link", "set", f"v{self.name}", "nomaster")

    def heal(self) -> None:
        _run("ip", "link", "set", f"v{self.name}", "master", BRIDGE)

    def start(self, *arguments: str) -> None:
        """Start a Ray node (`ray start` with further arguments), as the only processes of the machine."""
        node = [RAY, "start", f"--node-ip-address={self.address}", "--block", *arguments]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self.inside(), *node],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                start_new_session=True,
            )

    def inside(self) -> list[str]:
        """Words before a command that run it as the machine's only processes, with an empty /tmp/ray."""
        ray_dir = self.directory / "ray"
        shutil.rmtree(ray_dir, ignore_errors=True)
        ray_dir.mkdir(parents=True)
        setup = (
            f"hostname {self.name}; mount -t proc proc /proc; mount -t tmpfs -o size=512m tmpfs /dev/shm; "
            f"mkdir -p /tmp/ray; mount --bind {shlex.quote(str(ray_dir))} /tmp/ray; "
        )
        if self.hidden is not None:
            setup += f"mount -t tmpfs -o size=2g tmpfs {shlex.quote(str(self.hidden))}; "
        setup += 'exec "$@"'
        namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc"]
        return ["ip", "netns", "exec", self.name, *namespaces, "bash", "-ec", setup, self.name]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The machine's processes whose command begins with `name`, as this machine sees them."""
        if self._process is None:
            return []
        found = []
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "".join(process.cmdline()[:1]).startswith(name):
                        found.append(process)
        return found

    def kill(self) -> None:
        """Kill all processes of the machine at once by SIGKILL, as in a power failure."""
        if self._process is None:
            return
        for process in (*self.processes(), psutil.Process(self._process.pid) if self.is_running else None):
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def unplug(self) -> None:
        self.kill()
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", f"v{self.name}"], capture_output=True, check=False)


@dataclass
class Cluster:
    """A Ray cluster of a head and workers, with one CPU each."""

    head: Machine
    workers: Sequence[Machine]
    environment: Mapping[str, str] = field(repr=False)

    @property
    def address(self) -> str:
        return f"{self.head.address}:{GCS_PORT}"

    @property
    def machines(self) -> Sequence[Machine]:
        return (self.head, *self.workers)

    def start_head(self) -> None:
        dashboard = ["--include-dashboard=true", f"--dashboard-host={self.head.address}"]
        memory = f"--object-store-memory={STORE_BYTES}"
        self.head.start("--head", f"--port={GCS_PORT}", "--num-cpus=1", memory, *dashboard)
        self.wait_for_nodes(1)

    def start_worker(self, worker: Machine) -> None:
        """Start Ray on a worker, and again if it gives up, as systemd does: `ray start` waits 30 s for its node."""
        before = self.num_nodes()
        for _ in range(STARTS):
            worker.start(f"--address={self.address}", "--num-cpus=1", f"--object-store-memory={STORE_BYTES}")
            while worker.is_running:
                if self.num_nodes() > before:
                    return
                time.sleep(POLL_S)
        self.wait_for_nodes(before + 1, timeout_s=0.0)

    def start(self) -> None:
        self.start_head()
        for worker in self.workers:
            self.start_worker(worker)

    def nodes(self) -> dict[str, str]:
        """Ids of the nodes that Ray's head counts as alive, by their addresses; none if it does not answer."""
        code = (
            "import json, sys; from ray._raylet import GcsClient; "
            "nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5).values(); "
            "print(json.dumps({node.node_manager_address: node.node_id.hex() for node in nodes if node.state == 0}))"
        )  # 0: GcsNodeInfo.ALIVE
        asked = self._ask(sys.executable, "-c", code, self.address)
        return dict(json.loads(asked.stdout.splitlines()[-1])) if asked.returncode == 0 else {}

    def num_nodes(self) -> int:
        return len(self.nodes())

    def drain(self, worker: Machine, *, notice_s: int) -> None:
        """Tell Ray that the worker is taken away in `notice_s` seconds, as a notice of preemption does."""
        reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a spot notice"]
        node = [f"--node-id={self.nodes()[worker.address]}", f"--deadline-remaining-seconds={notice_s}"]
        done = self._ask(RAY, "drain-node", f"--address={self.address}", *node, *reason)
        assert done.returncode == 0, done.stdout + done.stderr

    def _ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=dict(self.environment), timeout=180
        )

    def wait_for_nodes(self, number: int, *, timeout_s: float = START_S) -> float:
        """Wait until Ray's head counts that many nodes as alive, and return the seconds that it took."""
        started = time.monotonic()
        while (found := self.num_nodes()) != number:
            logs = "\n".join(f"{each.name}: {each.log[-1500:]}" for each in self.machines if each.is_running)
            assert time.monotonic() - started < timeout_s, f"{found} nodes, not {number}:\n{logs}"
            time.sleep(POLL_S)
        return time.monotonic() - started

    def processes(self, name: str) -> list[psutil.Process]:
        """The processes of all machines whose command begins with `name`."""
        return [process for machine in self.machines for process in machine.processes(name)]

    def machines_with(self, name: str) -> list[Machine]:
        """The machines of processes whose command begins with `name`, one for each process."""
        return [machine for machine in self.machines for _ in machine.processes(name)]


@contextmanager
def machines(
    directory: Path, *, num_workers: int, environment: Mapping[str, str], shares_directory: bool = True
) -> Iterator[Cluster]:
    """Context manager with a cluster of so many machines, none of them started; at its end nothing of them is left.

    `environment` are variables of all processes on the machines. `directory` has the machines' files; if they do not
    share it, each machine finds an empty directory of its own there.
    """
    outer = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    whole = {
        **outer,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_agent_register_timeout_ms": "300000",
        "RAY_prestart_worker_first_driver": "0",
        **environment,
    }
    made = [
        Machine(number, directory / f"machine-{number}", whole, None if shares_directory else directory)
        for number in range(HEAD, FIRST_WORKER + num_workers)
    ]
    for machine in made:
        machine.directory.mkdir(parents=True)
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    try:
        _run("ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for machine in made:
            machine.plug_in()
        yield Cluster(made[0], made[1:], whole)
    finally:
        for machine in made:
            machine.unplug()
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")
