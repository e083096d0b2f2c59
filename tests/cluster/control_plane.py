"""A real Kubernetes control plane on this machine: etcd, the API server and the controller manager, as processes.

There are no nodes. `Kubelet` stands in for scheduler and kubelets: it binds pods to a node of its own and reports their
containers as running. Pods of Jobs it really runs, as processes of this machine, with the environment that the API
server has for them.

The API server is Debian's, 1.20.2, which knows neither `policy/v1` nor rules in CEL. `chart_for` and `crds_for` make
copies of the chart and of KubeRay's CRDs that it accepts.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy import kuberay
from tests.deploy.chart import CHART
from tests.end_to_end.server import ROOT

__all__ = ["NODE", "ControlPlane", "Kubelet", "chart_for", "control_plane", "crds_for", "reason_to_skip_kubernetes"]

# Directory with kube-apiserver and kube-controller-manager; by default where build-kubernetes.sh leaves them.
VARIABLE = "MERGESEARCH_KUBERNETES"
PROGRAMS = ("kube-apiserver", "kube-controller-manager")
START_S = 120.0
NODE = "node-1"
HOW = "build them with tests/cluster/build-kubernetes.sh (about 10 minutes)"


def _directory() -> Path:
    return Path(os.environ.get(VARIABLE, ROOT / "build" / "kubernetes"))


def reason_to_skip_kubernetes() -> str | None:
    """Why no control plane can be started here; None if it can."""
    if missing := [name for name in PROGRAMS if not (_directory() / name).exists()]:
        return f"no {' and no '.join(missing)} in {_directory()}: {HOW}, or name their directory in {VARIABLE}"
    if (reason := kuberay.reason_to_skip()) is not None:
        return reason
    return None if shutil.which("etcd") else "etcd is not installed (Debian: apt-get install etcd-server)"


def chart_for(directory: Path, *, version: str = "0.1.0") -> Path:
    """A copy of the chart that the API server accepts: `policy/v1beta1`, and no requirement of a newer Kubernetes."""
    copy = directory / f"mergesearch-{version}"
    shutil.copytree(CHART, copy)
    for file in (copy / "templates").glob("*.yaml"):
        file.write_text(file.read_text().replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n"))
    chart = yaml.safe_load((copy / "Chart.yaml").read_text())
    del chart["kubeVersion"]
    (copy / "Chart.yaml").write_text(yaml.safe_dump({**chart, "version": version}))
    return copy


def crds_for(directory: Path) -> list[Path]:
    """Copies of KubeRay's CRDs that the API server accepts: without rules in CEL, and with keys of lists required."""
    found = []
    for name in kuberay.KINDS.values():
        document = yaml.load((Path(os.environ[kuberay.VARIABLE]) / name).read_text(), Loader=yaml.CSafeLoader)
        _simplify(document)
        found.append(directory / name)
        found[-1].write_text(yaml.dump(document, Dumper=yaml.CSafeDumper, sort_keys=False))
    return found


def _simplify(node: Any) -> None:
    if isinstance(node, list):
        for each in node:
            _simplify(each)
    if not isinstance(node, dict):
        return
    node.pop("x-kubernetes-validations", None)
    if "type" in node and node.get("default") == "":
        del node["default"]
    for each in node.values():
        _simplify(each)
    for key in node.get("x-kubernetes-list-map-keys", ()):
        items = node["items"]
        if "default" not in items["properties"][key] and key not in items.get("required", []):
            items.setdefault("required", []).append(key)


@dataclass
class ControlPlane:
    """The running control plane; its API server listens at `address` and is reached at `url`."""

    directory: Path
    address: str
    port: int
    etcd_ports: tuple[int, int]
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def client(self, token: str | None = None) -> httpx.Client:
        """HTTP client of the API server, as administrator or with the token of another account."""
        headers = {"Authorization": f"Bearer {token or self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, verify=False, trust_env=False, timeout=30)

    def start(self) -> None:
        key = self.directory / "account.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (self.directory / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        self._write_kubeconfig()
        client_url, peer_url = (f"http://127.0.0.1:{port}" for port in self.etcd_ports)
        self._launch(
            shutil.which("etcd") or "etcd",
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--unsafe-no-fsync",
        )
        self._launch(
            str(_directory() / "kube-apiserver"),
            f"--etcd-servers={client_url}",
            f"--bind-address={self.address}",
            f"--advertise-address={'10.77.0.1' if self.address.startswith('127.') else self.address}",
            f"--secure-port={self.port}",
            f"--cert-dir={self.directory / 'certificates'}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--enable-admission-plugins=ResourceQuota,Priority",
        )
        self._until_ready()
        self._launch(
            str(_directory() / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={key}",
            "--leader-elect=false",
            "--secure-port=0",
            "--port=0",
        )

    def _write_kubeconfig(self) -> None:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
            "current-context": "here",
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))

    def _launch(self, program: str, *arguments: str) -> None:
        name = Path(program).name
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen([program, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/")
            )

    def _until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        with self.client() as client:
            while True:
                try:
                    if client.get("/readyz").text == "ok":
                        return
                except httpx.TransportError:
                    pass
                log = self.directory / "kube-apiserver.log"
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.5)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def control_plane(address: str = "127.0.0.1") -> Iterator[ControlPlane]:
    """A running control plane whose API server listens at `address`."""
    with tempfile.TemporaryDirectory(prefix="mergesearch-kubernetes-") as name:
        plane = ControlPlane(Path(name), address, _free_port(), (_free_port(), _free_port()))
        try:
            plane.start()
            yield plane
        finally:
            plane.stop()


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class Kubelet(threading.Thread):
    """Scheduler and kubelet of one large node, as far as controllers see them.

    Pods of Jobs run as processes on this machine, with this Python's programs first in PATH, and end as the process
    does; `logs` has their output by pod. Other pods only count as running.
    """

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(name="kubelet", daemon=True)
        self._client = plane.client()
        self._ended = threading.Event()
        self.logs: dict[str, str] = {}
        self.errors: list[str] = []

    def run(self) -> None:
        self._add_node()
        while not self._ended.wait(0.3):
            try:
                self._heartbeat()
                for pod in self._client.get("/api/v1/pods").json()["items"]:
                    self._advance(pod)
            except (httpx.HTTPError, KeyError) as error:
                self.errors.append(repr(error))

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=60)
        self._client.close()

    def _add_node(self) -> None:
        size = {"cpu": "960", "memory": "9000Gi", "nvidia.com/gpu": "80", "pods": "1000"}
        node = {"metadata": {"name": NODE}, "status": {"capacity": size, "allocatable": size}}
        self._client.post("/api/v1/nodes", json=node).raise_for_status()

    def _heartbeat(self) -> None:
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": _now(), "reason": "x", "message": "x"}
        self._patch(f"/api/v1/nodes/{NODE}/status", {"status": {"conditions": [ready]}}, "strategic-merge")

    def _advance(self, pod: Mapping[str, Any]) -> None:
        metadata, status = pod["metadata"], pod["status"]
        place = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if metadata.get("deletionTimestamp"):
            self._client.request("DELETE", place, json={"gracePeriodSeconds": 0})
        elif not pod["spec"].get("nodeName"):
            target = {"metadata": {"name": metadata["name"]}, "target": {"kind": "Node", "name": NODE}}
            self._client.post(f"{place}/binding", json=target)
        elif status.get("phase") == "Pending":
            is_job = any(owner["kind"] == "Job" for owner in metadata.get("ownerReferences", ()))
            self._patch(f"{place}/status", {"status": self._ran(pod) if is_job else _running(pod)}, "merge")

    def _ran(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Run the containers of a Job's pod one after the other, and return the pod's status."""
        namespace, statuses, is_ok = pod["metadata"]["namespace"], [], True
        for container in pod["spec"]["containers"]:
            done = subprocess.run(
                [*container.get("command", ()), *container.get("args", ())],
                env=self._environment(namespace, container),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
            self.logs[pod["metadata"]["name"]] = done.stdout
            is_ok = is_ok and done.returncode == 0
            ended = {"exitCode": done.returncode, "finishedAt": _now(), "startedAt": _now()}
            statuses.append(_container(container, {"terminated": ended}, is_ready=False))
        return {"phase": "Succeeded" if is_ok else "Failed", "containerStatuses": statuses, "startTime": _now()}

    def _environment(self, namespace: str, container: Mapping[str, Any]) -> dict[str, str]:
        found = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        for each in container.get("env", ()):
            if "value" in each:
                found[each["name"]] = each["value"]
            elif reference := each.get("valueFrom", {}).get("secretKeyRef"):
                answer = self._client.get(f"/api/v1/namespaces/{namespace}/secrets/{reference['name']}")
                answer.raise_for_status()
                found[each["name"]] = base64.b64decode(answer.json()["data"][reference["key"]]).decode()
        return {**found, "HOME": tempfile.gettempdir()}

    def _patch(self, place: str, document: object, kind: str) -> None:
        headers = {"Content-Type": f"application/{kind}-patch+json"}
        self._client.patch(place, json=document, headers=headers).raise_for_status()


def _running(pod: Mapping[str, Any]) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": _now()}
    states = [_container(each, {"running": {"startedAt": _now()}}, is_ready=True) for each in pod["spec"]["containers"]]
    return {
        "phase": "Running",
        "podIP": "10.9.9.9",
        "startTime": _now(),
        "conditions": [ready],
        "containerStatuses": states,
    }


def _container(container: Mapping[str, Any], state: Mapping[str, Any], *, is_ready: bool) -> dict[str, Any]:
    fixed = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
    return {**fixed, "ready": is_ready, "started": is_ready, "state": state}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
