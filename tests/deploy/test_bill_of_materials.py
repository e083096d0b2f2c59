"""The script that writes an image's bill of materials, on this environment and on packages made for the test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.deploy.deployed import DEPLOY

SCRIPT = DEPLOY / "docker" / "bill_of_materials.py"
COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Files: *
License: GPL-2+

Files: debian/*
License: Expat
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("bill_of_materials", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def component(name: str, **fields: Any) -> dict[str, Any]:
    found = importlib.metadata.version(name)
    return {"name": name, "version": found, "purl": f"pkg:pypi/{name}@{found}", **fields}


def written(tmp_path: Path, *expected: str, components: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    python = tmp_path / "python.json"
    python.write_text(json.dumps({"bomFormat": "CycloneDX", "components": components}))
    words = [sys.executable, str(SCRIPT), str(python), str(tmp_path / "out"), *expected]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="this system is not Debian")
def test_bill_has_distributions_and_packages(tmp_path: Path) -> None:
    """Both files have each distribution that was given and each Debian package, with licence and text."""
    pytest_version = importlib.metadata.version("pytest")
    licences = [{"license": {"id": "MIT"}}]
    given = [component("pytest", licenses=licences)]
    assert written(tmp_path, f"pytest=={pytest_version}", components=given).returncode == 0
    components = json.loads((tmp_path / "out" / "sbom.json").read_text())["components"]
    packages = subprocess.run(["dpkg-query", "--show"], capture_output=True, text=True).stdout.splitlines()
    assert len(components) == 1 + len(packages)
    dpkg = next(each for each in components if each["name"] == "dpkg")
    assert dpkg["purl"].startswith(f"pkg:deb/debian/dpkg@{dpkg['version']}")
    rows = [line.split("\t") for line in (tmp_path / "out" / "licences.txt").read_text().splitlines()]
    assert rows[1][:3] == ["pytest", pytest_version, "MIT"]
    assert Path(rows[1][3]).read_text().startswith("The MIT License")
    assert len(rows) == 1 + len(components)


def test_wrong_version_of_a_label_is_refused(tmp_path: Path) -> None:
    """A version that is not installed ends the build, with its name."""
    done = written(tmp_path, "pytest==0.1", "ray==2.0", components=[component("pytest")])
    assert done.returncode == 1
    assert done.stderr.startswith("not installed: pytest==0.1, ray==2.0; found: pytest==")
    assert not (tmp_path / "out").exists()


def test_licences_are_read_from_debians_form(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "copyright").write_text(COPYRIGHT)
    assert script.debian_licences(tmp_path) == ["Expat", "GPL-2+"]
    (tmp_path / "copyright").write_text("License: as you like")
    assert script.debian_licences(tmp_path) == []
    assert script.debian_licences(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("licences", "shown"),
    [
        ([{"license": {"id": "MIT"}}, {"license": {"name": "Apache\n  2"}}], "MIT; Apache 2"),
        ([{"expression": "MIT OR Apache-2.0"}], "MIT OR Apache-2.0"),
        ([{"license": {"id": "MIT"}}, {"license": {"id": "MIT"}}], "MIT"),
        ([], "not named"),
    ],
)
def test_licences_are_on_one_line(licences: list[dict[str, Any]], shown: str, script: ModuleType) -> None:
    assert script.licence_of({"licenses": licences}) == shown
