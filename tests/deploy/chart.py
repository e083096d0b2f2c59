"""The chart, its profiles, and the manifests that the real helm renders from them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tests.end_to_end.server import ROOT

__all__ = ["CHART", "NAMESPACE", "PROFILES", "RELEASE", "Helm", "Manifests", "Pod"]

CHART = ROOT / "deploy" / "helm" / "mergesearch"
PROFILES = tuple(sorted(file.stem for file in (CHART / "profiles").glob("*.yaml")))
RELEASE, NAMESPACE = "demo", "searches"

# Values that a profile needs besides its file: a queue of studies has at least one study.
STUDIES = ("--set", "kueue.studies[0].name=math-code", "--set-file", "kueue.studies[0].study={study}")
STUDY = ROOT / "docs" / "examples" / "quickstart.yaml"


@dataclass(frozen=True)
class Pod:
    """A pod of the manifests; `where` is its place in them. `containers` include KubeRay's autoscaler."""

    where: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    containers: Sequence[Mapping[str, Any]]

    @property
    def component(self) -> str:
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def is_ray(self) -> bool:
        return self.component in ("ray-head", "ray-worker")


class Manifests:
    """The objects of one release."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.objects: list[dict[str, Any]] = [
            document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document
        ]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    @cached_property
    def clusters(self) -> list[dict[str, Any]]:
        """Specs of all RayClusters, including those inside RayJobs."""
        return [
            *(each["spec"] for each in self.of("RayCluster")),
            *(each["spec"]["rayClusterSpec"] for each in self.of("RayJob")),
        ]

    @cached_property
    def pods(self) -> list[Pod]:
        return list(self._pods())

    def _pods(self) -> Iterator[Pod]:
        for each in self.objects:
            where = f"{each['kind']}/{each['metadata']['name']}"
            if each["kind"] == "Pod":
                yield _pod(where, each)
            elif each["kind"] in ("Deployment", "StatefulSet", "Job"):
                yield _pod(where, each["spec"]["template"])
            elif each["kind"] == "RayJob":
                yield _pod(f"{where}/submitter", each["spec"]["submitterPodTemplate"])
        for spec in self.clusters:
            head = spec["headGroupSpec"]["template"]
            autoscaler = [{"name": "autoscaler", **spec["autoscalerOptions"]}] if "autoscalerOptions" in spec else []
            yield _pod("ray/head", head, autoscaler)
            for group in spec["workerGroupSpecs"]:
                yield _pod(f"ray/{group['groupName']}", group["template"])


def _pod(where: str, template: Mapping[str, Any], more: Sequence[Mapping[str, Any]] = ()) -> Pod:
    spec = template["spec"]
    containers = [*spec["containers"], *spec.get("initContainers", ()), *more]
    return Pod(where, template["metadata"].get("labels", {}), spec, containers)


@dataclass(frozen=True)
class Helm:
    """The program helm at `program`. It uses no cluster unless options name one."""

    program: Path
    home: Path

    def run(self, *arguments: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        command = [str(self.program), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)

    def template(self, profile: str, *arguments: str | Path, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
        """Render a profile; `arguments` are further options of `helm template`, which overrule the profile's."""
        place = ["--namespace", NAMESPACE]
        return self.run("template", RELEASE, chart, *place, *values_of(profile), *arguments)

    def manifests(self, profile: str, *arguments: str | Path, chart: Path = CHART) -> Manifests:
        done = self.template(profile, *arguments, chart=chart)
        assert done.returncode == 0, done.stderr
        return Manifests(done.stdout)


def values_of(profile: str) -> list[str | Path]:
    """Options that give helm a profile's values."""
    studies = [part.format(study=STUDY) for part in STUDIES] if profile == "kueue" else []
    return ["--values", CHART / "profiles" / f"{profile}.yaml", *studies]
