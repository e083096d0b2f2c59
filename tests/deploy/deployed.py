"""The files in deploy/ as tests read them: pinned versions, instructions of the Containerfile, names of images."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = DEPLOY / "docker" / "Containerfile"


def pinned(name: str) -> str:
    """The version of a distribution in deploy/constraints.txt."""
    (version,) = re.findall(rf"^{re.escape(name)}==(\S+)$", (DEPLOY / "constraints.txt").read_text(), re.MULTILINE)
    return str(version)


def version() -> str:
    """The version of this project."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def image(variant: str) -> str:
    """The name of the project's image, with its tag."""
    return f"localhost/mergesearch:{version()}-ray{pinned('ray')}-{variant}"


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Containerfile, its lines joined, and its stage; the first stage is ""."""

    stage: str
    name: str
    text: str


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of the text of a Containerfile."""
    uncommented = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    stage = ""
    for line in re.sub(r"\\\n\s*", " ", uncommented).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            stage = rest.partition(" AS ")[2]
        if name:
            yield Instruction(stage, name, rest)


def unpinned_images(text: str) -> list[str]:
    """Names of images in a Containerfile or a compose file that have no tag, or the tag `latest`.

    Variables with a default count as their default. Names of stages in a Containerfile are no images.
    """
    whole = re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)
    stages = set(re.findall(r"^FROM .* AS (\S+)$", whole, re.MULTILINE))
    named = re.findall(r"^(?:ARG BASE=|FROM |\s*image: )(\S+)", whole, re.MULTILINE)
    images = [name for name in named if "${" not in name and name not in stages]
    return [name for name in images if not re.search(r":(?!latest\b)[\w.-]+(@sha256:[0-9a-f]{64})?$", name)]
