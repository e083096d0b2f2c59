"""The CPU image runs the shipped study without rights; the image for GPUs is not built here."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path

import pytest

from tests.cluster.images import Image, built, podman, reason_to_skip
from tests.deploy.deployed import ROOT, pinned, version
from tests.deploy.deployed import image as name_of

HOME = "/home/mergesearch"
LAST_LAYER_BYTES = 35_000_000  # 27.2 MB were seen: 8.3 MB are the shipped models, 2.1 MB the page, the rest is code
SBOM = "/opt/bill-of-materials/sbom.json"
LICENCES = "/opt/bill-of-materials/licences.txt"

# Prints each distribution of the image.
DISTRIBUTIONS = """
import importlib.metadata
for found in importlib.metadata.distributions():
    print(f"{found.name.lower().replace('_', '-').replace('.', '-')}=={found.version}")
"""

# Prints the sha256 of each module of the project in the image.
MODULES = """
import hashlib, pathlib, service
root = pathlib.Path(service.__file__).parents[1]
for package in ("search_spaces", "service", "workers"):
    for file in sorted((root / package).rglob("*.py")):
        print(file.relative_to(root), hashlib.sha256(file.read_bytes()).hexdigest())
"""

# Prints what a process in the image may do.
RIGHTS = """
import os, pathlib
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
capabilities = [int(status[name], 16) for name in ("CapEff", "CapBnd")]
print(os.getuid(), os.getgid(), *capabilities, *sorted(os.listdir("/sys/class/net")))
for place in ("/", "/opt/venv", "/data"):
    try:
        pathlib.Path(place, "new").touch()
        print("written")
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    started = time.monotonic()
    made = built(name_of("cpu"), tmp_path_factory.mktemp("image"))
    print(f"\nimage: {made.inspect()['Size'] / 1e9:.1f} GB, built in {time.monotonic() - started:.0f} s")
    return made


@pytest.mark.timeout(3600)
def test_image_has_the_code_of_this_folder(image: Image) -> None:
    """An image that is built again has the present code, whatever layers of an earlier one are used again."""
    files = [file for name in ("search_spaces", "service", "workers") for file in sorted((ROOT / name).rglob("*.py"))]
    here = [f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    assert image.call("python", "-c", MODULES).splitlines() == here


@pytest.mark.timeout(3600)
def test_image_says_what_it_is(image: Image) -> None:
    """Labels have the versions of the project and of Ray, and processes run as an ordinary user."""
    found = image.inspect()
    assert found["Labels"]["org.opencontainers.image.version"] == version()
    assert found["Labels"]["mergesearch.ray-version"] == pinned("ray")
    assert found["Config"]["User"] == "1000:1000"
    assert pinned("ray") in image.call("ray", "--version")


def test_processes_have_no_rights(image: Image) -> None:
    """Processes are those of user 1000, without capabilities and network, and can write to no part of the image."""
    who, *places = image.call("python", "-c", RIGHTS).splitlines()
    assert who == "1000 1000 0 0 lo"
    assert places == ["Read-only file system"] * 3


def test_demo_runs_without_rights(image: Image, tmp_path: Path) -> None:
    """`mergesearch demo` completes the shipped study with real engines, and exports its best merge."""
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    options = ["--tmpfs=/tmp:mode=1777,exec", "--shm-size=1g", f"--volume={home}:{HOME}"]
    started = time.monotonic()
    printed = image.run("demo", "--out", f"{HOME}/demo", options=options, timeout_s=1700)
    print(f"\ndemo in the image: {time.monotonic() - started:.0f} s")
    summary = json.loads((home / "demo" / "summary.json").read_text())
    assert summary["state"] == "COMPLETE"
    assert "is better than the best single model" in printed
    assert re.search(r"^verification: +equal: (\d+) of \1 samples", printed, re.MULTILINE)
    assert (home / "demo" / "export" / "model.safetensors").stat().st_size > 1_000_000


def test_bill_of_materials_is_complete(image: Image) -> None:
    """The bill has every distribution and Debian package, and the texts that it names are in the image."""
    document = json.loads(image.call("cat", SBOM))
    components = document["components"]
    assert document["bomFormat"] == "CycloneDX"
    assert len(components) > 300
    of_python = {
        f"{each['name'].lower().replace('_', '-').replace('.', '-')}=={each['version']}"
        for each in components
        if not each.get("purl", "").startswith("pkg:deb/")
    }
    assert of_python == set(image.call("python", "-c", DISTRIBUTIONS).split())
    packages = image.call("dpkg-query", "--show", "--showformat=${Package} ${Version}\\n").splitlines()
    assert sorted(packages) == sorted(
        f"{each['name']} {each['version']}" for each in components if each.get("purl", "").startswith("pkg:deb/")
    )
    rows = [line.split("\t") for line in image.call("cat", LICENCES).splitlines()[1:]]
    assert len(rows) == len(components)
    texts = [text for *_, places in rows for text in places.split()]
    code = f"import os; print(*[text for text in {texts!r} if not os.path.isfile(text)])"
    assert image.call("python", "-c", code).split() == []
    unknown = [name for name, _, licence, places in rows if licence == "not named" and not places]
    print(f"\nneither licence nor text: {', '.join(unknown) or 'none'}")
    assert len(unknown) < len(rows) / 20


def test_code_is_a_small_layer(image: Image) -> None:
    """What changes with each version of the code is one small layer above the others."""
    layers = json.loads(podman("history", "--format=json", image.name, environment=image.environment))
    sizes = {layer["CreatedBy"]: layer["size"] for layer in layers}
    (of_code,) = (size for text, size in sizes.items() if "bill_of_materials.py" in text)
    assert 100_000 < of_code < LAST_LAYER_BYTES
    assert max(sizes.values()) > 50 * of_code
