"""`make release`: everything of one version, or the reason why not."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.deployed import image, pinned

ROOT = Path(__file__).parents[2]
PARTS = (
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
    "docs",
    "deploy",
    "service",
    "workers",
)


# Writes the words of each call as a line, and an image of its words.
BUILDER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
case "$1" in
    save) echo "image $2" ;;
    build) echo id ;;
esac
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with this project's files, committed; its docs are one page, as another test builds the site."""
    tree = tmp_path_factory.mktemp("release") / "tree"
    tree.mkdir()
    for name in (*PARTS, "search_spaces", "tests"):
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", "site" if name == "docs" else "")
        shutil.copytree(source, tree / name, ignore=ignored) if source.is_dir() else shutil.copy(source, tree / name)
    page = tree / "service" / "web" / "static" / "index.html"
    if not page.exists():  # where nobody has built the page
        page.parent.mkdir(exist_ok=True)
        page.write_text("<!doctype html>")
    (tree / "docs" / "site").mkdir()
    (tree / "docs" / "site" / "conf.py").write_text("include_patterns = ['index.rst']\n")
    (tree / "index.rst").write_text("Title\n=====\n")
    (tree / ".gitignore").write_text("dist/\nbuild/\n*.egg-info/\n__pycache__/\n")
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "all")):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", *identity, *command], cwd=tree, check=True, capture_output=True)
    return tree


@pytest.fixture
def tree(repository: Path) -> Iterator[Path]:
    yield repository
    for command in (("checkout", "--quiet", "."), ("clean", "--quiet", "-fdx")):
        subprocess.run(["git", *command], cwd=repository, check=True)


def release(tree: Path, programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {"HELM": str(programs / "helm"), "IMAGES": "none", "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", "deploy/release.sh"],
        cwd=tree,
        env={**os.environ, **known, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_release_has_everything_of_one_version(tree: Path, programs: Path, tmp_path: Path) -> None:
    """The wheel has the files that the program reads, images are built as asked, and the checksums have all."""
    builder = tmp_path / "podman"
    builder.write_text(BUILDER)
    builder.chmod(0o755)
    options = "--network=host --isolation=chroot"
    stale = [tree / "build" / "lib" / "service" / "gone.py", tree / "build" / "site" / "gone.html"]
    for file in stale:  # of an earlier version
        file.parent.mkdir(parents=True)
        file.touch()
    done = release(tree, programs, IMAGES="cpu gpu", DOCKER=str(builder), BUILD_OPTIONS=options, COMPRESS="gzip --fast")
    assert done.returncode == 0, done.stderr
    dist, ray = tree / "dist", pinned("ray")
    images = {variant: f"mergesearch-image-0.1.0-ray{ray}-{variant}.tar.gz" for variant in ("cpu", "gpu")}
    names = {
        "mergesearch-0.1.0-py3-none-any.whl",
        "mergesearch-0.1.0.tgz",
        "mergesearch-docs-0.1.0.tar.gz",
        *images.values(),
    }
    assert {file.name for file in dist.iterdir()} == {*names, "SHA256SUMS"}
    info, *calls = (tmp_path / "calls").read_text().splitlines()
    assert (info, len(calls)) == ("info", 4)
    for (variant, archive), build, save in zip(images.items(), calls[::2], calls[1::2], strict=True):
        name = image(variant)
        assert build.startswith(f"build --quiet {options} --file deploy/docker/Containerfile")
        assert f"--build-arg VARIANT={variant} " in build
        assert build.endswith(f"--build-arg RAY_VERSION={ray} --tag {name} .")
        assert save == f"save {name}"
        assert gzip.decompress((dist / archive).read_bytes()) == f"image {name}\n".encode()
    lines = (line.split("  ") for line in (dist / "SHA256SUMS").read_text().splitlines())
    listed = {name: digest for digest, name in lines}
    assert listed == {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in names}
    packed = set(zipfile.ZipFile(dist / "mergesearch-0.1.0-py3-none-any.whl").namelist())
    read = {
        str(file.relative_to(tree))
        for package in ("service", "workers", "search_spaces")
        for file in (tree / package).rglob("*")
        if file.is_file()
        and file.suffix not in (".pyc", ".md")
        and not {"__pycache__", ".vite"} & set(file.parts)
        and not file.is_relative_to(tree / "service" / "web" / "app")  # sources of the page
    }
    assert read - packed == set()
    assert "service/gone.py" not in packed
    with tarfile.open(dist / "mergesearch-0.1.0.tgz") as chart:
        assert {"mergesearch/Chart.yaml", "mergesearch/values.yaml"} <= set(chart.getnames())
    with tarfile.open(dist / "mergesearch-docs-0.1.0.tar.gz") as docs:
        assert "site/index.html" in docs.getnames()
        assert "site/gone.html" not in docs.getnames()


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "deploy/helm/mergesearch/Chart.yaml",
            "version: 0.1.0",
            "version: 0.2.0",
            "Chart.yaml: has no line 'version: 0.1.0'",
        ),
        (
            "deploy/compose/compose.yaml",
            ":0.1.0-ray",
            ":0.0.9-ray",
            "compose.yaml: has no image with the tag 0.1.0-ray",
        ),
        ("CHANGELOG.md", "## 0.1.0", "## 0.1", "CHANGELOG.md: has no section '## 0.1.0'"),
        ("pyproject.toml", 'version = "0.1.0"', 'version = "next"', "pyproject.toml: version is 'next'"),
        ("README.md", "mergesearch", "mergesearch ", "the working tree has changes; commit them first"),
    ],
)
def test_a_release_of_several_versions_is_refused(
    tree: Path, programs: Path, file: str, old: str, new: str, message: str
) -> None:
    """Nothing is built."""
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    refused = release(tree, programs)
    assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
    assert not (tree / "dist").exists()


def test_missing_programs_are_named(tree: Path, programs: Path, tmp_path: Path) -> None:
    assert "not found; install helm" in release(tree, programs, HELM=str(tmp_path / "helm")).stderr
    refused = release(tree, programs, IMAGES="cpu tpu")
    assert (refused.returncode, "there is no variant 'tpu'; give cpu, gpu" in refused.stderr) == (2, True)
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert "docker does not answer" in release(tree, programs, IMAGES="cpu", PATH=path).stderr
    missing = str(tmp_path / "podman")
    refused = release(tree, programs, IMAGES="cpu", COMPRESS="squash --fast")
    assert (refused.returncode, "COMPRESS='squash --fast': squash is not found" in refused.stderr) == (2, True)
    assert f"{missing} does not answer" in release(tree, programs, IMAGES="cpu", DOCKER=missing).stderr


@pytest.mark.parametrize("command", ["build", "save"])
def test_an_image_that_is_not_built_ends_the_release(tree: Path, programs: Path, tmp_path: Path, command: str) -> None:
    """A release whose image cannot be built or saved fails, and has no list of checksums."""
    builder = tmp_path / "podman"
    builder.write_text(f'#!/bin/sh\ntest "$1" != {command}\n')
    builder.chmod(0o755)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nmkdir -p build/site\n")  # neither wheel nor docs
    python.chmod(0o755)
    done = release(tree, programs, IMAGES="cpu", DOCKER=str(builder), PYTHON=str(python))
    assert done.returncode == 1, done.stderr
    assert f"the image {image('cpu')}" in done.stdout
    assert not (tree / "dist" / "SHA256SUMS").exists()
