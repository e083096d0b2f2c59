"""The compose files: docker-compose reads them; services have no needless rights, open ports or plain passwords."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from service.disk import DRAINED
from tests.deploy.deployed import DEPLOY, image, unpinned_images
from tests.service.api.harness import ApiServer
from workers.file_access import FileAccess

COMPOSE = DEPLOY / "compose"
FILE, GPU = COMPOSE / "compose.yaml", COMPOSE / "gpu.yaml"
OURS = ("secrets", "ray", "accounts", "api")
RAY_PORTS = {6379, 8265, 8090, 10001, 52365}
# Variables that tell a program the file with a password.
POINTERS = ("_FILE", "__FILE", "_PATH")

Services = Mapping[str, Mapping[str, Any]]


def configuration(*files: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The configuration that docker-compose reads from the files. Without docker-compose, skips the test, not in CI."""
    program = shutil.which("docker-compose")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("docker-compose is not installed")
        pytest.skip("docker-compose is not installed (Debian: apt-get install docker-compose)")
    named = [word for file in files for word in ("--file", str(file))]
    outer = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    done = subprocess.run(
        [program, *named, "config"], capture_output=True, text=True, env={**outer, **(environment or {})}
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = yaml.safe_load(done.stdout)
    return read


def services_of(text: str) -> Services:
    """The services in the text of a compose file, with the content of anchors included."""
    read: Services = yaml.safe_load(text)["services"]
    return read


def rights(text: str) -> list[str]:
    """Services that could write to their image, or that have unnecessary rights."""
    problems = []
    for name, service in services_of(text).items():
        expected = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
        problems += [f"{name}: {key}" for key, value in expected.items() if service.get(key) != value]
        refused = ("privileged", "cap_add", "pid", "ipc", "devices", "userns_mode")
        problems += [f"{name}: {key}" for key in refused if key in service]
        if service.get("network_mode", "none") != "none":
            problems.append(f"{name}: network_mode")
        if str(service.get("user", "1000")).split(":")[0] in ("0", "root"):
            problems.append(f"{name}: user")
    return problems


def open_ports(text: str) -> list[str]:
    """Published ports that other machines can reach, or that belong to Ray or to the database."""
    problems = []
    for name, service in services_of(text).items():
        for port in service.get("ports", ()):
            if name not in ("api", "grafana") or not str(port).startswith("127.0.0.1:"):
                problems.append(f"{name}: {port}")
            if int(str(port).rpartition(":")[2]) in RAY_PORTS:
                problems.append(f"{name}: {port}")
    return problems


def passwords(text: str) -> list[str]:
    """Variables that contain passwords or tokens instead of their places."""
    problems = []
    for name, service in services_of(text).items():
        for variable, value in service.get("environment", {}).items():
            is_secret = re.search(r"PASSWORD|TOKEN|SECRET", variable) and not variable.endswith(POINTERS)
            if is_secret or re.search(r"://[^/@]+:[^/@]+@", str(value)):
                problems.append(f"{name}: {variable}")
    return problems


def unlimited(text: str) -> list[str]:
    """Services whose logs may fill the disk, or which are not restarted."""
    needed = {"secrets": ("logging",), "accounts": ("logging",)}
    return [
        f"{name}: {key}"
        for name, service in services_of(text).items()
        for key in needed.get(name, ("logging", "restart"))
        if key not in service or service[key] == "no"
    ]


CHECKS: Sequence[tuple[Callable[[str], list[str]], str, str]] = [
    (rights, "read_only: true", "read_only: false"),
    (rights, "cap_drop: [ALL]", "cap_drop: []"),
    (rights, "no-new-privileges:true", "no-new-privileges:false"),
    (rights, "hostname: ray", "privileged: true"),
    (rights, "hostname: ray", "network_mode: host"),
    (rights, 'user: "1000:0"', 'user: "0:0"'),
    (open_ports, '["127.0.0.1:${PORT:-8080}:8080"]', '["${PORT:-8080}:8080"]'),
    (open_ports, "hostname: ray", 'ports: ["127.0.0.1:8265:8265"]'),
    (open_ports, "${PORT:-8080}:8080", "${PORT:-8080}:8265"),
    (open_ports, "shm_size: 256m", 'ports: ["127.0.0.1:5432:5432"]'),
    (passwords, "POSTGRES_PASSWORD_FILE: /secrets/database-password", "POSTGRES_PASSWORD: merge"),
    (passwords, "RAY_AUTH_TOKEN_PATH: /secrets/ray-token", "RAY_AUTH_TOKEN: 4711"),
    (passwords, "mergesearch@database", "mergesearch:merge@database"),
    (unpinned_images, "${POSTGRES_TAG:-17.6}", "latest"),
    (unpinned_images, ":${GRAFANA_TAG:-11.6.0}", ""),
    (unlimited, "  restart: unless-stopped\n", ""),
    (unlimited, '  logging: {driver: json-file, options: {max-size: 20m, max-file: "3"}}\n', ""),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _, _ in CHECKS), ids=lambda check: check.__name__)
def test_nothing_is_wrong(check: Callable[[str], list[str]]) -> None:
    assert check(FILE.read_text()) == []


@pytest.mark.parametrize(("check", "old", "new"), CHECKS)
def test_a_change_for_the_worse_is_noticed(check: Callable[[str], list[str]], old: str, new: str) -> None:
    text = FILE.read_text()
    assert old in text
    assert check(text.replace(old, new, 1)) != []


def test_docker_compose_reads_the_files() -> None:
    """docker-compose accepts the file, alone and with that for GPUs, and the project's services share one image."""
    for files, variant in (((FILE,), "cpu"), ((FILE, GPU), "gpu")):
        services = configuration(*files)["services"]
        assert set(services) == {*OURS, "database", "prometheus", "grafana"}
        assert {services[name]["image"] for name in OURS} == {image(variant)}
    (device,) = services["ray"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_docker_compose_refuses_a_wrong_file(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("read_only: true", "read_onyl: true"))
    with pytest.raises(AssertionError, match="read_onyl"):
        configuration(wrong)


def test_variables_name_images_by_digest() -> None:
    """Each image can be named by its digest, the project's by its whole name."""
    digest = f"@sha256:{'0' * 64}"
    third = {f"{name}_DIGEST": digest for name in ("POSTGRES", "PROMETHEUS", "GRAFANA")}
    services = configuration(FILE, environment={**third, "MERGESEARCH_IMAGE": f"registry/m:1{digest}"})["services"]
    assert [name for name, service in services.items() if not service["image"].endswith(digest)] == []


def test_options_of_the_server_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from service.cli.main import main

    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    known = capsys.readouterr().out
    options = [word.partition("=")[0] for word in services_of(FILE.read_text())["api"]["command"][1:]]
    assert len(options) > 3
    assert [option for option in options if f"{option} " not in known] == []


def test_nobody_logs_in_as_the_administrator() -> None:
    """A person called admin at an identity provider is no administrator by that."""
    from service.cli.main import _parser

    added = _parser().parse_args(services_of(FILE.read_text())["accounts"]["command"])
    assert (added.name, added.login, added.token_scope) == ("admin", "known", "admin")


def test_options_of_ray_are_those_of_the_command() -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    options = [word.partition("=")[0] for word in services_of(FILE.read_text())["ray"]["command"][1:]]
    assert len(options) > 3
    assert [option for option in options if option not in known] == []


def test_prometheus_scrapes_names_of_services() -> None:
    """Prometheus asks services of the file, on the ports on which they listen, under names that the server accepts."""
    services = services_of(FILE.read_text())
    jobs = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {target for job in jobs for config in job["static_configs"] for target in config["targets"]}
    assert targets == {"api:8080", "ray:8090"}
    assert "--allow-host=api" in services["api"]["command"]
    assert "--metrics-export-port=8090" in services["ray"]["command"]


def test_a_drained_server_is_healthy(tmp_path: Path) -> None:
    """`up --wait` succeeds while jobs cannot continue, as after `mergesearch drain`."""
    *_, url = services_of(FILE.read_text())["api"]["healthcheck"]["test"]
    with ApiServer(tmp_path) as server:
        server.cluster.reason = DRAINED
        statuses = {path: httpx.get(server.url + path).status_code for path in (urlsplit(url).path, "/readyz")}
    assert statuses == {"/healthz": 200, "/readyz": 503}


def test_studies_may_name_models_of_the_hub_and_of_the_server() -> None:
    """`--allow-dir` replaces the default directories, so it names the data directory and the image's hub cache."""
    (home,) = re.findall(r"^ENV HOME=(\S+)", (DEPLOY / "docker" / "Containerfile").read_text(), re.MULTILINE)
    program = "from workers.models.remote import hub_cache; print(hub_cache())"
    environment = {"HOME": home, "PYTHONPATH": str(DEPLOY.parent)}
    cache = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    command = services_of(FILE.read_text())["api"]["command"]
    access = FileAccess(tuple(word.partition("=")[2] for word in command if word.startswith("--allow-dir=")))
    for place in ("/data/sources/merge", f"{cache.stdout.strip()}/models--owner--name", "/models/mine", "/opt/example"):
        assert access.refusal(place) is None
    assert access.refusal("/secrets/database-password") is not None


def test_mounted_files_are_there() -> None:
    """Files and folders of this repository that services read are there."""
    mounted = [
        source
        for service in services_of(FILE.read_text()).values()
        for volume in service.get("volumes", ())
        if (source := str(volume).split(":")[0]).startswith(".")
    ]
    assert len(mounted) == 5
    assert [source for source in mounted if not (COMPOSE / source).exists()] == []
