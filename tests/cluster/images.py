"""The image of this project, built by buildah on a base that mmdebstrap makes, and run by podman without any rights.

The build needs the package registries and, the first time, ten minutes. Its layers stay in the machine's store of
containers, so that later builds repeat only changed layers; `podman system reset` empties that store.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.deployed import CONTAINERFILE, ROOT

__all__ = ["BASE", "RIGHTLESS", "Image", "base_image", "build", "built", "podman", "reason_to_skip", "settings"]

BASE = "localhost/mergesearch-base:bookworm"
PROGRAMS = {"buildah": "buildah", "podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap"}
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

# An ordinary user, a root file system that cannot be written, no capabilities, no network.
RIGHTLESS = (
    "--user=1000:1000",
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--network=none",
)

# Options that runc needs without systemd and without version 2 of cgroups.
SETTINGS = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""


def reason_to_skip() -> str | None:
    """Why no image can be built here; None if one can."""
    if os.geteuid() != 0:
        return "building an image needs root"
    if missing := sorted(package for name, package in PROGRAMS.items() if shutil.which(name) is None):
        return f"not installed: {', '.join(missing)} (Debian: apt-get install {' '.join(missing)})"
    return None


@dataclass(frozen=True)
class Image:
    """An image, and the environment in which buildah and podman are called."""

    name: str
    environment: Mapping[str, str]

    def inspect(self) -> dict[str, Any]:
        (found,) = json.loads(podman("image", "inspect", self.name, environment=self.environment))
        return dict(found)

    def run(self, *arguments: str, options: Sequence[str] = (), timeout_s: float = 900.0) -> str:
        """Run the image's command with arguments, without rights, and return what it prints."""
        words = ["run", "--rm", *RIGHTLESS, *options, self.name, *arguments]
        return podman(*words, environment=self.environment, timeout_s=timeout_s)

    def call(self, program: str, *arguments: str) -> str:
        """Run another program of the image, as `run` does."""
        return self.run(*arguments, options=(f"--entrypoint={program}",))


def settings(directory: Path) -> dict[str, str]:
    """The environment in which buildah and podman are called; `directory` gets their configuration."""
    file = directory / "containers.conf"
    file.write_text(SETTINGS)
    return {**os.environ, "CONTAINERS_CONF": str(file)}


def podman(*words: str, environment: Mapping[str, str], timeout_s: float = 900.0) -> str:
    """Call podman and return its output. Raises AssertionError with podman's messages if the call fails."""
    return _call("podman", *words, environment=environment, timeout_s=timeout_s)


def base_image(directory: Path, environment: Mapping[str, str]) -> str:
    """Name of the base image, which is made of Debian's packages if it is not there.

    The base image has the certificates that this machine trusts, so that the build can use a site's proxy.
    """
    exists = subprocess.run(["podman", "image", "exists", BASE], env=dict(environment), check=False).returncode == 0
    if not exists:
        archive = directory / "base.tar"
        hook = f"--customize-hook=copy-in {CERTIFICATES} {CERTIFICATES.parent}"
        options = ["--quiet", "--variant=minbase", "--include=ca-certificates", hook]
        _call("mmdebstrap", *options, "bookworm", str(archive), environment=environment)
        podman("import", "--quiet", str(archive), BASE, environment=environment)
        archive.unlink()
    return BASE


def built(name: str, directory: Path, *, variant: str = "cpu") -> Image:
    """Build the image as docs/how-to/containers.md says, on the base image."""
    environment = settings(directory)
    arguments = {"VARIANT": variant}
    volumes = []
    if wheels := os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS"):  # as the Makefile reads them
        arguments["UV_FIND_LINKS"] = wheels
        volumes = [f"--volume={wheels}:{wheels}:ro"]
    given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    build(name, CONTAINERFILE, ROOT, *volumes, *given, base=base_image(directory, environment), environment=environment)
    return Image(name, environment)


def build(name: str, file: Path, context: Path, *options: str, base: str, environment: Mapping[str, str]) -> None:
    """Build the image of a Containerfile on the base image. Layers that were built before are not built again."""
    words = ["build", "--layers", "--network=host", f"--build-arg=BASE={base}", *options]
    _call("buildah", *words, "--file", str(file), "--tag", name, str(context), environment=environment, timeout_s=3000)


def _call(*command: str, environment: Mapping[str, str], timeout_s: float = 900.0) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(environment), timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{command[:3]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
