"""docker-compose runs the services of deploy/compose on podman, and a study in them.

Debian's PostgreSQL and Prometheus stand in for the images of others, which cannot be downloaded here. Nothing stands in
for Grafana.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.images import base_image, build, built, reason_to_skip
from tests.deploy.deployed import DEPLOY
from tests.deploy.deployed import image as name_of

FILE = DEPLOY / "compose" / "compose.yaml"
STAND_INS = Path(__file__).with_name("stand_ins")
STAND_IN = {
    "database": ("docker.io/library/postgres", "POSTGRES_TAG"),
    "prometheus": ("docker.io/prom/prometheus", "PROMETHEUS_TAG"),
}
TAG = "stand-in"
SERVICES = ("secrets", "database", "ray", "api", "prometheus")
START_S = 600.0


@dataclass
class Project:
    """The services of the compose file, called by docker-compose."""

    name: str
    environment: dict[str, str]

    def call(self, *words: str, timeout_s: float = 900.0) -> str:
        command = ["docker-compose", "--project-name", self.name, "--file", str(FILE), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=timeout_s)
        assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['PORT']}"

    def wait_until_ready(self) -> float:
        """Wait until the server says that it is ready, and return the seconds that it took."""
        started = time.monotonic()
        said = "nothing"
        while time.monotonic() - started < START_S:
            try:
                response = httpx.get(f"{self.url}/readyz", timeout=10)
                if response.status_code == 200:
                    return time.monotonic() - started
                said = response.text
            except httpx.TransportError as error:
                said = str(error)
            time.sleep(1)
        raise AssertionError(f"not ready: {said}\n{self.call('logs', '--tail=40')}")

    def check_health(self, ended: threading.Event) -> None:
        """Run the health checks of all services until `ended` is set.

        Normally systemd runs podman's health checks. Without systemd, services would never count as healthy.
        """
        if Path("/run/systemd/system").exists():
            return
        names = ["podman", "ps", "--quiet", "--filter", f"label=com.docker.compose.project={self.name}"]
        while not ended.wait(2):
            found = subprocess.run(names, capture_output=True, text=True, env=self.environment, check=False)
            for container in found.stdout.split():
                command = ["podman", "healthcheck", "run", container]
                subprocess.run(command, capture_output=True, env=self.environment, check=False)

    @property
    def token(self) -> str:
        """The token of the first administrator."""
        return self.call("exec", "-T", "api", "cat", "/secrets/admin-token").strip()

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        response = httpx.get(f"{self.url}{path}", headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    if missing := [name for name in ("docker-compose", "iptables") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: apt-get install {' '.join(missing)})")
    directory = tmp_path_factory.mktemp("compose")
    environment = dict(built(name_of("cpu"), directory).environment)
    for name, (repository, variable) in STAND_IN.items():
        context = STAND_INS / name
        base = base_image(directory, environment)
        build(f"{repository}:{TAG}", context / "Containerfile", context, base=base, environment=environment)
        environment[variable] = TAG
    place = directory / "podman.sock"
    service = subprocess.Popen(["podman", "system", "service", "--time=0", f"unix://{place}"], env=environment)
    environment |= {"DOCKER_HOST": f"unix://{place}", "PORT": str(free_port())}
    made = Project(f"mergesearch-{secrets.token_hex(4)}", environment)
    ended = threading.Event()
    checks = threading.Thread(target=made.check_health, args=(ended,))
    checks.start()
    try:
        while not place.exists():
            time.sleep(0.1)
        made.call("up", "--detach", *SERVICES)
        print(f"\nready after {made.wait_until_ready():.0f} s")
        yield made
    finally:
        made.call("down", "--volumes", "--timeout=10")
        ended.set()
        checks.join()
        service.terminate()
        service.wait()


@pytest.mark.timeout(4000)
def test_services_run_the_shipped_study(project: Project) -> None:
    """The page's commands log in and complete the shipped study, with drivers and engines in the service `ray`."""
    assert httpx.get(f"{project.url}/v1/studies", timeout=60).status_code == 401
    project.call("exec", "-T", "api", "mergesearch", "login", "--token-file", "/secrets/admin-token")
    started = time.monotonic()
    project.call("exec", "-T", "api", "mergesearch", "submit", "/opt/example/study.yaml", "--watch", timeout_s=1700)
    print(f"\nstudy: {time.monotonic() - started:.0f} s")
    (study,) = project.get("/v1/studies")["studies"]
    assert study["state"] == "COMPLETE"
    log = project.call("logs", "api")
    assert "database postgresql://mergesearch@database/mergesearch" in log


def test_prometheus_scrapes_server_and_ray(project: Project) -> None:
    """Prometheus has read the rules, and both targets answer it."""
    deadline = time.monotonic() + 120
    targets: dict[str, str] = {}
    while set(targets.values()) != {"up"}:
        assert time.monotonic() < deadline, targets
        said = project.call("exec", "-T", "api", "wget", "-qO-", "http://prometheus:9090/api/v1/targets")
        targets = {each["labels"]["job"]: each["health"] for each in json.loads(said)["data"]["activeTargets"]}
        time.sleep(2)
    assert set(targets) == {"mergesearch", "ray"}
    said = project.call("exec", "-T", "api", "wget", "-qO-", "http://prometheus:9090/api/v1/rules")
    assert json.loads(said)["data"]["groups"] != []


def test_passwords_are_made_once_and_are_their_owners(project: Project) -> None:
    """Another start keeps token and passwords, which only user 1000 may read, and all results."""
    listing = "cd /secrets && stat --format='%n %a %u' * && sha256sum *"
    before = project.call("exec", "-T", "api", "sh", "-c", listing)
    names = ("admin-token", "database-password", "grafana-password", "pgpass", "ray-token")
    assert before.splitlines()[: len(names)] == [f"{name} 600 1000" for name in names]
    studies = project.get("/v1/studies")
    project.call("up", "--detach", "--force-recreate", *SERVICES)
    project.wait_until_ready()
    assert project.call("exec", "-T", "api", "sh", "-c", listing) == before
    assert project.get("/v1/studies") == studies


def test_only_the_server_is_reached_from_outside(project: Project) -> None:
    """One port is published, on 127.0.0.1, and the database has no way out of its network."""
    published = [line for line in project.call("ps").splitlines() if "->" in line]
    assert len(published) == 1
    assert f"127.0.0.1:{project.environment['PORT']}->8080/tcp" in published[0]
    assert [has_default_route(project, name) for name in ("api", "database")] == [True, False]


def has_default_route(project: Project, service: str) -> bool:
    """Whether the service's network leads out of this machine."""
    routes = project.call("exec", "-T", service, "cat", "/proc/net/route").splitlines()[1:]
    return "00000000" in (route.split()[1] for route in routes)
