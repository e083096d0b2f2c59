"""The chart on a real Kubernetes API server: installation, upgrade, rollback, a failing migration, quotas and rights.

Nodes and containers are stand-ins (`tests.cluster.control_plane.Kubelet`), but for Jobs: the migration really runs, on
a real PostgreSQL.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from service.store import Store, schema
from tests.cluster.control_plane import (
    ControlPlane,
    Kubelet,
    chart_for,
    control_plane,
    crds_for,
    reason_to_skip_kubernetes,
)
from tests.deploy.chart import NAMESPACE, PROFILES, RELEASE, Helm, values_of
from tests.postgresql import PostgreSQL

# Rights of each ServiceAccount: what it may do in the release's namespace, and what it may not.
ALLOWED = {"ray-head": [("list", "pods"), ("watch", "pods"), ("patch", f"rayclusters.ray.io/{RELEASE}-mergesearch")]}
NEVER = [
    ("get", "secrets"),
    ("list", "secrets"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("patch", "rayclusters.ray.io/another"),
    ("list", "rayclusters.ray.io"),
    ("list", "nodes"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("impersonate", "users"),
]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    if (reason := reason_to_skip_kubernetes()) is not None:
        pytest.skip(reason)
    with control_plane() as plane:
        kubelet = Kubelet(plane)
        kubelet.start()
        try:
            yield plane
        finally:
            kubelet.stop()


def kubectl_for(plane: ControlPlane, programs: Path) -> Callable[..., str]:
    """Function that calls kubectl and returns what it prints, its errors too if it is to fail."""

    def call(*arguments: str | Path, input: str | None = None, fails: bool = False) -> str:
        command = [str(programs / "kubectl"), "--kubeconfig", str(plane.kubeconfig), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, input=input, check=False)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + (done.stderr if fails else "")

    return call


def add_crds(kubectl: Callable[..., str], directory: Path) -> None:
    """Add KubeRay's CRDs and the release's namespace to a new control plane."""
    for file in crds_for(directory):
        kubectl("create", "--filename", file)
        name = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)["metadata"]["name"]
        kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s")
    kubectl("create", "namespace", NAMESPACE)


@pytest.fixture(scope="module")
def kubectl(plane: ControlPlane, programs: Path) -> Callable[..., str]:
    return kubectl_for(plane, programs)


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, kubectl: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> ControlPlane:
    """The control plane with KubeRay's CRDs and the release's namespace."""
    add_crds(kubectl, tmp_path_factory.mktemp("crds"))
    return plane


# The API server's version refuses server-side apply of ports that name no protocol.
CLIENT_SIDE = "--server-side=false"


class Release:
    """One release of the chart, installed by the real helm."""

    def __init__(self, plane: ControlPlane, helm: Helm) -> None:
        self._helm = helm
        self._place: list[str | Path] = ["--kubeconfig", plane.kubeconfig, "--namespace", NAMESPACE]

    def helm(self, *arguments: str | Path, fails: bool = False) -> str:
        done = self._helm.run(*arguments, *self._place, timeout_s=300)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def upgrade(self, chart: Path, *options: str | Path, fails: bool = False) -> str:
        """Install or upgrade the release; returns what helm prints."""
        values = [*values_of("cpu-dev"), "--set", "database.trial.enabled=false"]
        return self.helm(
            *("upgrade", "--install", RELEASE, chart, *values, *options, CLIENT_SIDE, "--timeout", "120s"), fails=fails
        )

    def revisions(self) -> list[tuple[int, str]]:
        """Number and status of each revision."""
        found = json.loads(self.helm("history", RELEASE, "--output", "json"))
        return [(each["revision"], each["status"]) for each in found]


@pytest.fixture
def release(cluster: ControlPlane, kubectl: Callable[..., str], helm: Helm) -> Iterator[Release]:
    release = Release(cluster, helm)
    yield release
    release.helm("uninstall", RELEASE, "--ignore-not-found", "--wait")
    kubectl("--namespace", NAMESPACE, "delete", "pvc,secrets", "--selector", f"app.kubernetes.io/instance={RELEASE}")


@pytest.fixture
def database(postgresql: PostgreSQL, kubectl: Callable[..., str], cluster: ControlPlane) -> Iterator[str]:
    """URL of an empty database, which the Secret `database` names."""
    url = postgresql.create()
    name_in_secret(kubectl, url)
    yield url
    kubectl("--namespace", NAMESPACE, "delete", "secret", "database")
    postgresql.drop(url)


def name_in_secret(kubectl: Callable[..., str], url: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "database"}, "stringData": {"url": url}}
    kubectl("--namespace", NAMESPACE, "apply", "--filename", "-", input=json.dumps(secret))


USES_DATABASE = ("--set", "database.existingSecret=database")


def objects(kubectl: Callable[..., str], kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kubectl("--namespace", NAMESPACE, "get", kind, "--output", "json"))[
        "items"
    ]
    return found


def revision_of(url: str) -> str | None:
    """The revision of a database's schema; None if the database has no tables."""
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), poolclass=sa.NullPool)
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        return str(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one())


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_are_accepted(
    cluster: ControlPlane, kubectl: Callable[..., str], helm: Helm, tmp_path: Path, profile: str
) -> None:
    """The API server accepts every object of every profile whose kind it knows (`--dry-run=server`)."""
    manifests = helm.manifests(profile, chart=chart_for(tmp_path))
    known = {line.split()[-1] for line in kubectl("api-resources", "--no-headers").splitlines()}
    accepted = [each for each in manifests.objects if each["kind"] in known]
    assert {each["kind"] for each in manifests.objects} - known <= {
        *("ServiceMonitor", "PodMonitor", "PrometheusRule"),
        *("LocalQueue", "ResourceFlavor", "ClusterQueue"),
    }
    accounts = yaml.safe_dump_all(each for each in accepted if each["kind"] == "ServiceAccount")
    others = [each for each in accepted if each["kind"] != "ServiceAccount"]
    create = ("--namespace", NAMESPACE, "create", "--filename", "-")
    kubectl(*create, input=accounts)  # pods are refused without theirs
    try:
        answer = kubectl(*create, "--dry-run=server", input=yaml.safe_dump_all(others))
    finally:
        kubectl("--namespace", NAMESPACE, "delete", "--filename", "-", input=accounts)
    assert len([line for line in answer.splitlines() if "server dry run" in line]) == len(others) > 0


def test_an_unknown_field_is_refused(
    cluster: ControlPlane, kubectl: Callable[..., str], helm: Helm, tmp_path: Path
) -> None:
    """The API server refuses a manifest whose value has a wrong type, so that a dry run can fail."""
    manifests = helm.manifests("cpu-dev", chart=chart_for(tmp_path))
    (deployment,) = (each for each in manifests.of("Deployment"))
    deployment["spec"]["replicas"] = "many"
    kubectl(
        "--namespace",
        NAMESPACE,
        "create",
        "--dry-run=server",
        "--filename",
        "-",
        input=json.dumps(deployment),
        fails=True,
    )


def test_installation_migrates_and_upgrades(
    release: Release, kubectl: Callable[..., str], database: str, tmp_path: Path
) -> None:
    """An installation makes the tables before any pod starts; an upgrade keeps data, Ray's token and the volume.

    The volume stays also when the release is removed.
    """
    first, second = chart_for(tmp_path), chart_for(tmp_path, version="0.2.0")
    release.upgrade(first, *USES_DATABASE)
    assert revision_of(database) == schema.REVISION
    store = Store(database)
    job = store.create_job(kind="search", name="kept", document={}, accepted={})
    secrets = {each["metadata"]["name"]: each.get("data") for each in objects(kubectl, "secrets")}
    volumes = {each["metadata"]["name"]: each["metadata"]["uid"] for each in objects(kubectl, "pvc")}
    release.upgrade(second, *USES_DATABASE, "--set", "api.keep={responses=30d}")
    assert release.revisions() == [(1, "superseded"), (2, "deployed")]
    assert [each.id for each in store.jobs()] == [job.id]
    store.close()
    tokens = {name: data for name, data in secrets.items() if "-ray-token-" in name}
    assert tokens, "the chart makes a Secret with Ray's token"
    assert (
        tokens.items() <= {each["metadata"]["name"]: each.get("data") for each in objects(kubectl, "secrets")}.items()
    )
    assert volumes
    assert {each["metadata"]["name"]: each["metadata"]["uid"] for each in objects(kubectl, "pvc")} == volumes
    (deployment,) = objects(kubectl, "deployments")
    assert "--keep=responses=30d" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    (ray,) = objects(kubectl, "rayclusters")
    assert ray["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    release.helm("uninstall", RELEASE, "--wait")
    assert {each["metadata"]["name"]: each["metadata"]["uid"] for each in objects(kubectl, "pvc")} == volumes
    assert objects(kubectl, "deployments") == []


def test_a_failing_migration_leaves_the_release(
    release: Release, kubectl: Callable[..., str], database: str, tmp_path: Path
) -> None:
    """While its database does not answer, an upgrade fails before it changes anything, and it can be tried again."""
    first, second = chart_for(tmp_path), chart_for(tmp_path, version="0.2.0")
    release.upgrade(first, *USES_DATABASE)
    before = [each["metadata"]["generation"] for each in objects(kubectl, "deployments")]
    name_in_secret(kubectl, "postgresql://tests:secret@127.0.0.1:9/none")
    said = release.upgrade(second, *USES_DATABASE, "--set", "api.exportDays=9", fails=True)
    assert "pre-upgrade" in said
    assert [each["metadata"]["generation"] for each in objects(kubectl, "deployments")] == before
    assert release.revisions()[-1] == (2, "failed")
    release.helm("rollback", RELEASE, "1", "--no-hooks", CLIENT_SIDE, "--timeout", "60s")
    name_in_secret(kubectl, database)
    release.upgrade(second, *USES_DATABASE, "--set", "api.exportDays=9")
    assert release.revisions()[-1][1] == "deployed"
    (deployment,) = objects(kubectl, "deployments")
    assert "--export-days=9" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_a_quota_is_said(release: Release, kubectl: Callable[..., str], database: str, tmp_path: Path) -> None:
    """When a quota of the namespace keeps the API's pods away, the Deployment says so."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"limits.memory": "3Gi"}},
    }
    kubectl("--namespace", NAMESPACE, "create", "--filename", "-", input=json.dumps(quota))
    try:
        release.upgrade(chart_for(tmp_path), *USES_DATABASE)

        def is_said() -> bool:
            (deployment,) = objects(kubectl, "deployments")
            conditions = deployment.get("status", {}).get("conditions", ())
            return any("exceeded quota: small" in each.get("message", "") for each in conditions)

        until(is_said, "the Deployment does not name the quota")
    finally:
        kubectl("--namespace", NAMESPACE, "delete", "resourcequota", "small")


def test_one_server_at_a_time_may_be_evicted(
    release: Release, kubectl: Callable[..., str], plane: ControlPlane, database: str, tmp_path: Path
) -> None:
    """The PodDisruptionBudget lets one of two servers be evicted, and the second only when the first was replaced."""
    release.upgrade(
        chart_for(tmp_path), *USES_DATABASE, "--set", "api.replicas=2", "--set", "data.accessMode=ReadWriteMany"
    )

    def servers() -> list[str]:
        pods = objects(kubectl, "pods")
        return [
            each["metadata"]["name"]
            for each in pods
            if each["metadata"]["labels"].get("app.kubernetes.io/component") == "api"
            and any(
                state["type"] == "Ready" and state["status"] == "True" for state in each["status"].get("conditions", ())
            )
        ]

    def allowed() -> int:
        return sum(each.get("status", {}).get("disruptionsAllowed", 0) for each in objects(kubectl, "pdb"))

    until(lambda: len(servers()) == 2 and allowed() == 1, "two servers are ready, and one may be evicted")
    first, second = servers()
    assert evict(plane, first).status_code == 201
    refused = evict(plane, second)
    assert refused.status_code == 429, refused.text
    until(lambda: allowed() == 1, "the first server was replaced")
    assert evict(plane, second).status_code == 201


def evict(plane: ControlPlane, pod: str) -> Any:
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
    with plane.client() as client:
        return client.post(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction", json=eviction)


def test_accounts_have_the_least_rights(
    release: Release, kubectl: Callable[..., str], database: str, tmp_path: Path
) -> None:
    """The API server allows each ServiceAccount what Ray's autoscaler needs, in the head, and nothing else."""
    release.upgrade(chart_for(tmp_path), *USES_DATABASE)
    accounts = [each["metadata"]["name"] for each in objects(kubectl, "serviceaccounts")]
    accounts = [name for name in accounts if name.startswith(RELEASE)]
    assert len(accounts) >= 3

    def may(account: str, verb: str, resource: str) -> bool:
        who = f"--as=system:serviceaccount:{NAMESPACE}:{account}"
        question: Sequence[str] = ("--namespace", NAMESPACE, "auth", "can-i", verb, resource, who, "--quiet")
        try:
            kubectl(*question)
        except AssertionError:
            return False
        return True

    for account in accounts:
        component = account.removeprefix(f"{RELEASE}-mergesearch-")
        for verb, resource in ALLOWED.get(component, ()):
            assert may(account, verb, resource), (account, verb, resource)
        for verb, resource in NEVER:
            assert not may(account, verb, resource), (account, verb, resource)
    others = [name for name in accounts if "ray-head" not in name]
    assert not [name for name in others if may(name, "list", "pods")]
