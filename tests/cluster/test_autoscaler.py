"""Ray's own autoscaler against a real Kubernetes API server, with the rights that the chart gives it.

The chart's RayCluster is installed by helm. `Operator` stands in for KubeRay: it makes a pod and starts a real Ray node
in a network namespace (`tests.cluster.machines`) for each worker that the autoscaler asks for.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.cluster.control_plane import NODE, ControlPlane, Kubelet, chart_for, control_plane, reason_to_skip_kubernetes
from tests.cluster.machines import BRIDGE_ADDRESS, GCS_PORT, STORE_BYTES, Cluster, Machine, machines
from tests.cluster.test_helm import Release, add_crds, kubectl_for, name_in_secret
from tests.deploy.chart import NAMESPACE, RELEASE, Helm
from tests.postgresql import PostgreSQL

NAME = f"{RELEASE}-mergesearch"
GROUP = "cpu"
NUM_WORKERS = 2
IDLE_S = 30
WAIT_S = 600.0

# Holds two actors, each as large as a worker, until the file of the third argument exists. Prints their nodes when
# those change.
STUDY = """
import sys, time, pathlib, ray
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)
@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Engine:
    def where(self):
        return f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()}"
engines = [Engine.remote() for _ in range(2)]
before = None
while not pathlib.Path(sys.argv[3]).exists():
    found = sorted(ray.get([engine.where.remote() for engine in engines]))
    if found != before:
        before = found
        print(" ".join(found), flush=True)
    time.sleep(1)
"""


@dataclass
class Operator(threading.Thread):
    """Stand-in for KubeRay's operator: makes as many pods, with Ray nodes in them, as the RayCluster's groups want."""

    plane: ControlPlane
    cluster: Cluster
    pods: dict[str, Machine] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(name="operator", daemon=True)
        self._client = self.plane.client()
        self._made = 0
        self._free = list(self.cluster.workers)

    __hash__ = threading.Thread.__hash__

    def start_head(self) -> None:
        """Start the head's pod as KubeRay does for a cluster with autoscaler v2."""
        machine = self.cluster.head
        self._add_pod(f"{NAME}-head", "head", "headgroup", machine, {"RAY_enable_autoscaler_v2": "1"})
        dashboard = ["--include-dashboard=true", f"--dashboard-host={machine.address}"]
        memory = f"--object-store-memory={STORE_BYTES}"
        machine.start("--head", "--no-monitor", f"--port={GCS_PORT}", "--num-cpus=0", memory, *dashboard)
        self.cluster.wait_for_nodes(1)

    def run(self) -> None:
        while not self._ended.wait(1.0):
            with suppress(httpx.TransportError):
                self._advance()

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=60)
        self._client.close()

    def _advance(self) -> None:
        answer = self._client.get(f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{NAME}").raise_for_status()
        (group,) = answer.json()["spec"]["workerGroupSpecs"]
        unwanted = (group.get("scaleStrategy") or {}).get("workersToDelete") or []
        for name in [name for name in self.pods if name != f"{NAME}-head"]:
            if name in unwanted or not self.pods[name].is_running:
                self._remove_pod(name)
        workers = [name for name in self.pods if name != f"{NAME}-head"]
        for _ in range(group.get("replicas", group["minReplicas"]) - len(workers)):
            self._add_worker()

    def _add_worker(self) -> None:
        machine = self._free.pop(0)
        self._made += 1
        self._add_pod(f"{NAME}-{GROUP}-worker-{self._made}", "worker", GROUP, machine, {})
        machine.start(f"--address={self.cluster.address}", "--num-cpus=1", f"--object-store-memory={STORE_BYTES}")

    def _add_pod(self, name: str, kind: str, group: str, machine: Machine, environment: dict[str, str]) -> None:
        labels = {"ray.io/cluster": NAME, "ray.io/node-type": kind, "ray.io/group": group, "ray.io/is-ray-node": "yes"}
        container = {"name": f"ray-{kind}", "image": "mergesearch"}
        spec = {"containers": [container], "nodeName": NODE, "automountServiceAccountToken": False}
        pod = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        place = f"/api/v1/namespaces/{NAMESPACE}/pods"
        self._client.post(place, json=pod).raise_for_status()
        state = {**container, "ready": True, "restartCount": 0, "imageID": "", "state": {"running": {}}}
        status = {"phase": "Running", "podIP": machine.address, "containerStatuses": [state]}
        headers = {"Content-Type": "application/merge-patch+json"}
        self._client.patch(f"{place}/{name}/status", json={"status": status}, headers=headers).raise_for_status()
        machine.environment = {
            **self.cluster.environment,
            **environment,
            "RAY_CLOUD_INSTANCE_ID": name,
            "RAY_NODE_TYPE_NAME": group,
        }
        self.pods[name] = machine

    def _remove_pod(self, name: str) -> None:
        machine = self.pods.pop(name)
        machine.kill()
        self._free.append(machine)
        self._client.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", json={"gracePeriodSeconds": 0})


@dataclass
class Site:
    operator: Operator
    cluster: Cluster
    directory: Path

    def inside(self, *command: str, log: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command in the head's namespaces."""
        head = self.cluster.head
        target = str(head.processes()[0].pid)
        with (self.directory / log).open("wb") as file:
            return subprocess.Popen(
                ["nsenter", "--target", target, "--all", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**self.cluster.environment, **environment},
            )


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, helm: Helm, programs: Path, _postgresql: PostgreSQL
) -> Iterator[Site]:
    if (reason := reason_to_skip_kubernetes()) is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("autoscaler")
    with (
        machines(directory, num_workers=NUM_WORKERS + 1, environment={}) as cluster,
        control_plane(BRIDGE_ADDRESS) as plane,
    ):
        kubelet, operator = Kubelet(plane), Operator(plane, cluster)
        kubelet.start()
        kubectl = kubectl_for(plane, programs)
        add_crds(kubectl, directory)
        name_in_secret(kubectl, _postgresql.create())
        group = f"ray.cpuGroup.minReplicas=0,ray.cpuGroup.maxReplicas={NUM_WORKERS}"
        options = ["--set", f"database.existingSecret=database,{group}", "--set-string", "ray.cpuGroup.cpu=1"]
        Release(plane, helm).upgrade(chart_for(directory), *options)
        idle = {"spec": {"autoscalerOptions": {"idleTimeoutSeconds": IDLE_S}}}
        kubectl("--namespace", NAMESPACE, "patch", "raycluster", NAME, "--type=merge", "--patch", json.dumps(idle))
        operator.start_head()
        operator.start()
        site = Site(operator, cluster, directory)
        autoscaler = start_autoscaler(site, plane)
        try:
            yield site
        finally:
            print((directory / "autoscaler.log").read_text()[-3000:] if os.environ.get("VERBOSE") else "", end="")
            autoscaler.kill()
            operator.stop()
            kubelet.stop()


def start_autoscaler(site: Site, plane: ControlPlane) -> subprocess.Popen[bytes]:
    """Ray's autoscaler beside the head, with a token of the chart's ServiceAccount and no other rights."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    place = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{NAME}-ray-head/token"
    with plane.client() as client:
        token = client.post(place, json=request).raise_for_status().json()["status"]["token"]
    account = site.directory / "account"
    account.mkdir()
    (account / "token").write_text(token)
    (account / "ca.crt").write_bytes((plane.directory / "certificates" / "apiserver.crt").read_bytes())
    (account / "namespace").write_text(NAMESPACE)
    setup = (
        "mount -t tmpfs tmpfs /run; mkdir -p /run/secrets/kubernetes.io/serviceaccount; "
        f"cp {shlex.quote(str(account))}/* /run/secrets/kubernetes.io/serviceaccount; "
        f"exec ray kuberay-autoscaler --cluster-name {NAME} --cluster-namespace {NAMESPACE}"
    )
    return site.inside(
        *("unshare", "--mount", "bash", "-ec", setup),
        log="autoscaler.log",
        KUBERNETES_SERVICE_HOST=plane.address,
        KUBERNETES_SERVICE_PORT_HTTPS=str(plane.port),
        RAY_CLUSTER_NAME=NAME,
        RAY_CLUSTER_NAMESPACE=NAMESPACE,
        RAY_HEAD_POD_NAME=f"{NAME}-head",
        RAY_ADDRESS=site.cluster.address,
        KUBERAY_CRD_VER="v1",
    )


def seconds_until(condition: Callable[[], bool], site: Site, what: str) -> float:
    started = time.monotonic()
    while not condition():
        log = (site.directory / "autoscaler.log").read_text()
        assert time.monotonic() - started < WAIT_S, f"{what}\n{log[-4000:]}"
        time.sleep(0.5)
    return time.monotonic() - started


@pytest.mark.timeout(2400)
def test_workers_come_go_and_are_replaced(site: Site) -> None:
    """No worker, two for two engines, a new one for one that was killed, and none again when the work has ended."""
    ended = site.directory / "ended"
    arguments = [site.cluster.address, site.cluster.head.address, str(ended)]
    study = site.inside("python", "-c", STUDY, *arguments, log="study.log")
    figures = {}

    def engines() -> list[str]:
        lines = [line for line in (site.directory / "study.log").read_text().splitlines() if line.startswith("10.")]
        return lines[-1].split() if lines else []

    try:
        figures["0 to 2 workers (s)"] = seconds_until(lambda: len(set(engines())) == 2, site, "no two workers")
        lost = engines()[0]
        next(each for each in site.cluster.workers if each.address == lost.split("/")[0]).kill()
        figures["a killed worker replaced (s)"] = seconds_until(
            lambda: lost not in engines() and len(set(engines())) == 2, site, "the killed worker was not replaced"
        )
    finally:
        ended.touch()
        study.wait(timeout=120)
    figures["2 to 0 workers (s)"] = seconds_until(lambda: len(site.operator.pods) == 1, site, "workers stay")
    print("\nautoscaler:", ", ".join(f"{name} {value:.0f}" for name, value in figures.items()))
