"""Rendered pods in a real container runtime, podman with runc, with a small stand-in for the image.

The tests replace the kubelet: they insert the values of Secrets, and leave out ConfigMaps and projected volumes. They
check the rights that the kernel gives the processes: user, capabilities, system calls, and writable places.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import Manifests, Pod
from tests.deploy.conftest import Rendered

pytestmark = pytest.mark.slow  # each starts a container

IMAGE = "localhost/stand-in:1"
PYTHON = Path("/usr/bin/python3")
PROGRAMS = {"sh": Path("/bin/sh"), "sleep": Path("/bin/sleep"), "python": PYTHON}

# Nothing is shared with other stores of podman: not even locks, which it otherwise keeps in one place for all.
CONFIGURATION = """
[containers]
default_ulimits = []
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
infra_image = "{image}"
lock_type = "file"
tmp_dir = "{directory}/tmp"
"""


@dataclass(frozen=True)
class Podman:
    """Podman with a store of its own below `directory`."""

    directory: Path

    def run(self, *arguments: str, content: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        place = [f"--root={self.directory / 'root'}", f"--runroot={self.directory / 'run'}", "--storage-driver=vfs"]
        environment = {**os.environ, "CONTAINERS_CONF": str(self.directory / "containers.conf")}
        return subprocess.run(
            ["podman", *place, *arguments],
            input=content,
            capture_output=True,
            timeout=120,
            env=environment,
            check=False,
        )

    def play(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Run a pod of one container, and return what the stand-in printed."""
        file = self.directory / "pod.yaml"
        file.write_text(yaml.safe_dump(dict(pod)))
        done = self.run("kube", "play", "--network=none", str(file))
        assert done.returncode == 0, done.stderr.decode()
        name = f"{pod['metadata']['name']}-{pod['spec']['containers'][0]['name']}"
        deadline = time.monotonic() + 30
        while not (log := self.run("logs", name).stdout.decode()).endswith("}\n"):
            assert time.monotonic() < deadline, log
            time.sleep(0.1)
        found: dict[str, Any] = json.loads(log.splitlines()[0])
        return found


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """Podman with the stand-in's image. The test is skipped where podman does not work."""
    if os.geteuid() != 0:
        pytest.skip("podman needs root here")
    if missing := [name for name in ("podman", "runc") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if missing := [str(file) for file in PROGRAMS.values() if not file.exists()]:
        pytest.skip(f"the stand-in needs {', '.join(missing)}")
    directory = Path(tempfile.mkdtemp(prefix="mspod-", dir="/tmp"))  # paths of sockets have at most 107 characters
    try:
        (directory / "containers.conf").write_text(CONFIGURATION.format(image=IMAGE, directory=directory))
        podman = Podman(directory)
        changes = ['--change=ENTRYPOINT ["/usr/bin/sleep", "600"]', "--change=ENV PATH=/usr/bin"]
        done = podman.run("import", *changes, "-", IMAGE, content=_root())
        assert done.returncode == 0, done.stderr.decode()
        works = podman.run("run", "--rm", "--network=none", "--entrypoint=sh", IMAGE, "-c", ":")
        if works.returncode != 0:
            pytest.skip(f"podman runs no container here: {works.stderr.decode()[-300:]}")
        yield podman
        podman.run("kill", "--all")
        podman.run("pod", "rm", "--force", "--all")
        podman.run("volume", "rm", "--force", "--all")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _root() -> bytes:
    """A root file system, as a tar archive: Debian's Python with its libraries, a shell, and the stand-in."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:

        def folder(name: str, *, mode: int = 0o755, user: int = 0) -> None:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, mode, user, user
            archive.addfile(member)

        for name in ("usr", "usr/bin", "proc", "sys", "dev", "etc", "var", "var/lib", "models"):
            folder(name)
        folder("tmp", mode=0o1777)
        folder("home/mergesearch", user=1000)
        library = PYTHON.resolve().name
        archive.add(f"/usr/lib/{library}", f"usr/lib/{library}", filter=_without_tests)
        needed: set[str] = set()
        for name, file in PROGRAMS.items():
            archive.add(file.resolve(), f"usr/bin/{name}")
            needed |= set(re.findall(r"(/\S+)", subprocess.check_output(["ldd", file], text=True)))
        for shared in sorted(needed):
            archive.add(Path(shared).resolve(), shared.lstrip("/"))
        archive.add(Path(__file__).with_name("stand_in.py"), "usr/bin/mergesearch", filter=_executable)
    return content.getvalue()


def _without_tests(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if re.search(r"/(test|__pycache__|idlelib|lib2to3|config-[^/]*)$", member.name) else member


def _executable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode = 0o755
    return member


def as_kubelet(pod: Pod, manifests: Manifests) -> dict[str, Any]:
    """The pod as the kubelet would start it, but with the stand-in as its image and as the command of Ray's pods."""
    secrets = {each["metadata"]["name"]: each["data"] for each in manifests.of("Secret")}
    spec = copy.deepcopy(dict(pod.spec))
    kept = {each["name"] for each in spec.get("volumes", ()) if {"emptyDir", "persistentVolumeClaim"} & set(each)}
    spec["volumes"] = [each for each in spec.get("volumes", ()) if each["name"] in kept]
    for container in spec["containers"]:
        container["image"] = IMAGE
        container.pop("ports", None)  # the pod has no network
        container.pop("envFrom", None)
        container["volumeMounts"] = [each for each in container.get("volumeMounts", ()) if each["name"] in kept]
        for each in container.get("env", ()):
            if "valueFrom" in each:
                reference = each.pop("valueFrom")["secretKeyRef"]
                value = secrets.get(reference["name"], {}).get(reference["key"], "")
                each["value"] = base64.b64decode(value).decode()
        if pod.is_ray:
            container["command"] = ["mergesearch", "ray"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{uuid.uuid4().hex[:8]}"}, "spec": spec}


PODS = ("Deployment/demo-mergesearch-api", "Job/demo-mergesearch-migrate", "ray/head", "ray/cpu")


@pytest.mark.parametrize("where", PODS)
@pytest.mark.parametrize("profile", ["cpu-dev", "air-gapped"])
def test_pods_have_no_rights_and_room_to_write(profile: str, where: str, podman: Podman, rendered: Rendered) -> None:
    """Processes are user 1000 without any capability, and may write where they must, and nowhere else."""
    manifests = rendered[profile]
    (pod,) = [pod for pod in manifests.pods if pod.where == where]
    found = podman.play(as_kubelet(pod, manifests))
    assert found["user"] == [1000, 1000]
    assert found["capabilities"] == [0, 0, 0]
    assert (found["no_new_privileges"], found["seccomp"]) == ("1", "2")
    room = ["/tmp", "/home/mergesearch"]
    if pod.component != "migrate":
        room += ["/cache", "/var/lib/mergesearch"]
    assert [place for place in found["writable"] if place != "/dev/shm"] == room
    assert found["environment"]["HOME"] == "/home/mergesearch"
    if profile == "cpu-dev" and where != "ray/cpu":
        password = re.search(r"//mergesearch:(\w{32})@", found["environment"]["MERGESEARCH_DATABASE"])
        assert password is not None


def test_the_api_answers_its_probes(podman: Podman, rendered: Rendered) -> None:
    manifests = rendered["multi-gpu"]
    (pod,) = [pod for pod in manifests.pods if pod.component == "api"]
    started = as_kubelet(pod, manifests)
    found = podman.play(started)
    assert found["arguments"][0] == "serve"
    (container,) = pod.spec["containers"]
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "http")
    assert f"--port={port}" in found["arguments"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        url = f"http://127.0.0.1:{port}{asked['path']}"
        program = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=5)"
        done = podman.run("exec", f"{started['metadata']['name']}-api", "python", "-c", program)
        assert (asked["port"], done.returncode) == ("http", 0), done.stderr.decode()
    stop = container["lifecycle"]["preStop"]["exec"]["command"]
    assert podman.run("exec", f"{started['metadata']['name']}-api", stop[0], "0").returncode == 0


def test_a_root_that_may_be_written_is_noticed(podman: Podman, rendered: Rendered) -> None:
    """The stand-in sees a pod that has more rights."""
    manifests = rendered["cpu-dev"]
    (pod,) = [pod for pod in manifests.pods if pod.component == "migrate"]
    changed = as_kubelet(pod, manifests)
    changed["spec"]["securityContext"] = {}
    changed["spec"]["containers"][0]["securityContext"] = {"runAsUser": 0}
    found = podman.play(changed)
    assert found["user"][0] == 0
    assert {"/", "/usr"} <= set(found["writable"])
    assert found["capabilities"][0] != 0
