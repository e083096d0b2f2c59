"""Every command of deploy/README.md is one that helm, kubectl and mergesearch have, and names what the chart makes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.deploy.chart import CHART, STUDY, Helm, Manifests
from tests.docs.pages import ROOT, Page

README = Page.read(ROOT / "deploy" / "README.md")
SCRIPT = ROOT / "deploy" / "helm" / "archive-images.sh"

HELM = list(README.commands("helm"))
KUBECTL = list(README.commands("kubectl"))
# Each command of a pipe by itself.
PIPED = [each.strip() for line in KUBECTL for each in line.split(" | ") if each.strip().startswith("kubectl ")]
INLINE = [code for code in README.code() if code.startswith(("helm ", "kubectl ")) and "..." not in code]

# Options of `helm install` and `helm upgrade` that `helm template` does not have, with their values.
OF_INSTALL = re.compile(r" --(install|reuse-values|wait|create-namespace)\b| --timeout \S+")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory from which the commands of the page can be called."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "my-values.yaml").write_text("registry: registry.example.org\n")
    for name in ("study", "other"):
        (tmp_path / f"{name}.yaml").write_text(STUDY.read_text())
    return tmp_path


def render(helm: Helm, line: str, place: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(OF_INSTALL.sub("", line))[2:]
    if "my-values.yaml" not in line and "profiles" not in line:  # of a release that has values already
        words += ["--values", str(CHART / "profiles" / "multi-gpu.yaml")]
    command = [str(helm.program), "template", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("line", [line for line in HELM if re.match(r"helm (install|upgrade) ", line)])
def test_installs_and_upgrades_render(line: str, helm: Helm, place: Path) -> None:
    done = render(helm, line, place)
    assert done.returncode == 0, done.stderr
    names = {(each["kind"], each["metadata"]["name"]) for each in Manifests(done.stdout).objects}
    if "kueue" in line:
        assert ("RayJob", "studies-mergesearch-math-code") in names
    else:
        assert {
            ("Deployment", "mergesearch-api"),
            ("RayCluster", "mergesearch"),
            ("Service", "mergesearch-api"),
        } <= names
        revision = "2" if "revision=2" in line else "1"
        assert ("Secret", f"mergesearch-ray-token-{revision}") in names


def test_a_further_study_keeps_the_first(helm: Helm, place: Path) -> None:
    """The second command of the queue has the RayJob of the first one: Helm deletes what a release no longer makes."""
    lines = [line for line in HELM if "profiles/kueue.yaml" in line and line.startswith("helm upgrade")]
    releases = [Manifests(render(helm, line, place).stdout) for line in lines]
    first, both = ({job["metadata"]["name"] for job in release.of("RayJob")} for release in releases)
    assert (first < both, len(both)) == (True, 2)


@pytest.mark.parametrize("line", [*HELM, *(line for line in INLINE if line.startswith("helm "))])
def test_helm_has_the_options(line: str, helm: Helm) -> None:
    verb = shlex.split(line)[1:3] if line.startswith("helm show") else shlex.split(line)[1:2]
    said = helm.run(*verb, "--help").stdout
    assert said, verb
    options = re.findall(r"\s(--[a-z-]+)", line)
    assert [option for option in options if not re.search(rf"{option}\b", said)] == []


@pytest.mark.parametrize("line", [*PIPED, *(line for line in INLINE if line.startswith("kubectl "))])
def test_kubectl_has_the_options(line: str, programs: Path) -> None:
    words = shlex.split(line.partition(" -- ")[0])[1:]
    verb = words[: {"create": 3 if "secret" in words else 2, "rollout": 2}.get(words[0], 1)]
    done = subprocess.run([programs / "kubectl", *verb, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    known = done.stdout + "--namespace"
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [option for option in options if option not in known] == []


def test_secrets_have_the_keys_that_the_chart_reads(programs: Path, helm: Helm, place: Path) -> None:
    lines = [line for line in KUBECTL if "create secret" in line]
    made = {}
    for line in lines:
        command = [str(programs / "kubectl"), *shlex.split(line)[1:], "--dry-run=client", "--output=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={"HOME": str(place)})
        secret = json.loads(done.stdout)
        made[secret["metadata"]["name"]] = set(secret["data"])
    (line,) = [line for line in HELM if "install" in line and "multi-gpu" in line]
    text = render(helm, line, place).stdout
    wanted = {name: {key} for name, key in re.findall(r"secretKeyRef: {name: ([\w-]+), key: (\w+)}", text)}
    del wanted["mergesearch-ray-token-1"]  # the chart's own
    assert "secretRef: {name: mergesearch-object-store}" in text
    assert made == {**wanted, "mergesearch-object-store": {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}}


def test_objects_that_commands_name_are_made(helm: Helm, place: Path) -> None:
    (line,) = [line for line in HELM if "install" in line and "multi-gpu" in line]
    manifests = Manifests(render(helm, line, place).stdout)
    names = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in manifests.objects}
    names.add("service/mergesearch-head-svc")  # KubeRay's, after the RayCluster's name
    named = set(re.findall(r"\b((?:deployment|service)/[a-z-]+)", README.text))
    assert named <= names
    assert named >= {"deployment/mergesearch-api", "service/mergesearch-api"}


def test_messages_of_the_page_are_those_of_the_sources() -> None:
    """What an operator looks for is what is said."""
    sources = (CHART / "templates" / "checks.yaml").read_text()
    sources += "".join(file.read_text() for file in (ROOT / "service").rglob("*.py"))
    for text in (
        "has no CUDA build of vLLM",
        "the server is drained",
        "Ray's dashboard does not answer: ",
        ": does not answer",  # of a database, after its URL
    ):
        assert text in README.text
        assert text in sources


def test_each_of_the_ten_pains_has_its_issue() -> None:
    table = README.section("## Ten pains, and what this chart does")
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) == 10
    for row in rows:
        assert re.search(r"\[[\w./-]+#\d+\]\(https://github\.com/\S+/issues/\d+\)", row), row
    for label, repository, number in re.findall(r"\[([\w./-]+)#\d+\]\(https://github\.com/(\S+)/issues/(\d+)\)", table):
        assert repository.endswith(label)
        assert f"#{number}]" in table


def test_profiles_are_all_described() -> None:
    table = README.text.partition("| profile |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE)) == {
        file.stem for file in (CHART / "profiles").glob("*.yaml")
    }


# The script that carries images to a cluster without a network.


def call(script_arguments: list[str], helm: Helm, place: Path) -> subprocess.CompletedProcess[str]:
    """Call the script with a stand-in for podman, which writes its arguments to the file `calls`."""
    podman = place / "podman"
    podman.write_text(
        '#!/bin/sh\necho "$@" >>"$(dirname "$0")/calls"\n'
        'case "$1 $2" in\n'
        '"image inspect") case "$3" in *mergesearch:*) ;; *) exit 1 ;; esac ;;\n'
        '"tag localhost/localhost/"* | "tag localhost/docker.io/"*) exit 1 ;;\n'
        '"load --input") printf "Loaded image: %s\\n" localhost/mergesearch:1 docker.io/library/postgres:17.6 ;;\n'
        "esac\n"
    )
    podman.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "HOME": str(place), "HELM": str(helm.program), "CONTAINER": str(podman)}
    return subprocess.run([SCRIPT, *script_arguments], capture_output=True, text=True, env=environment, check=False)


def test_the_list_of_images_is_that_of_the_release(helm: Helm, place: Path) -> None:
    """With PostgreSQL only where the release has it, and without the registry that the images will come from."""
    profiles = CHART / "profiles"
    done = call(["list", "--values", str(profiles / "cpu-dev.yaml")], helm, place)
    assert done.stdout.split() == ["docker.io/library/postgres:17.6", "localhost/mergesearch:0.1.0-ray2.60.0-cpu"]
    done = call(["list", "--values", str(profiles / "air-gapped.yaml")], helm, place)
    assert done.stdout.split() == ["mergesearch:0.1.0-ray2.60.0-gpu"]


def test_images_are_saved_and_loaded(helm: Helm, place: Path) -> None:
    """Images that are not here are pulled; all are written to one archive, and pushed to one registry."""
    done = call(["save", "a.tar", "--values", str(CHART / "profiles" / "cpu-dev.yaml")], helm, place)
    assert (done.returncode, done.stdout) == (0, "a.tar: 2 images\n"), done.stderr
    done = call(["load", "a.tar", "registry.internal.example/"], helm, place)
    assert done.stdout.split() == [
        "registry.internal.example/mergesearch:1",
        "registry.internal.example/postgres:17.6",
    ], done.stderr
    assert (place / "calls").read_text().splitlines() == [
        "tag localhost/docker.io/library/postgres:17.6 docker.io/library/postgres:17.6",
        "image inspect docker.io/library/postgres:17.6",
        "pull --quiet docker.io/library/postgres:17.6",
        "tag localhost/localhost/mergesearch:0.1.0-ray2.60.0-cpu localhost/mergesearch:0.1.0-ray2.60.0-cpu",
        "image inspect localhost/mergesearch:0.1.0-ray2.60.0-cpu",
        "save --quiet --multi-image-archive --output a.tar docker.io/library/postgres:17.6 "
        "localhost/mergesearch:0.1.0-ray2.60.0-cpu",
        "load --input a.tar",
        "tag localhost/mergesearch:1 registry.internal.example/mergesearch:1",
        "push --quiet registry.internal.example/mergesearch:1",
        "tag docker.io/library/postgres:17.6 registry.internal.example/postgres:17.6",
        "push --quiet registry.internal.example/postgres:17.6",
    ]


def test_an_image_of_a_release_is_found_by_both_names(helm: Helm, place: Path) -> None:
    """The image that a release names localhost/mergesearch is saved for profiles that name it without a registry.

    An older image that has the name without a registry is replaced.
    """
    done = call(["save", "a.tar", "--values", str(CHART / "profiles" / "air-gapped.yaml")], helm, place)
    assert (done.returncode, done.stdout) == (0, "a.tar: 1 images\n"), done.stderr
    assert (place / "calls").read_text().splitlines() == [
        "tag localhost/mergesearch:0.1.0-ray2.60.0-gpu mergesearch:0.1.0-ray2.60.0-gpu",
        "save --quiet --multi-image-archive --output a.tar mergesearch:0.1.0-ray2.60.0-gpu",
    ]


def test_the_script_says_what_is_wrong(helm: Helm, place: Path) -> None:
    done = call(["list", "--set", "api.replicas=two"], helm, place)
    assert done.returncode == 1
    assert "at '/api/replicas': got string, want integer" in done.stderr
    done = call(["load", "a.tar"], helm, place)
    assert "load: name the registry" in done.stderr
    done = call([], helm, place)
    assert done.returncode == 2
    assert "archive-images.sh save ARCHIVE [HELM OPTIONS]" in done.stderr


def test_the_values_of_the_page_render(helm: Helm, place: Path) -> None:
    (block,) = [block for block in README.blocks_in("") if block.startswith("ray:")]
    (place / "groups.yaml").write_text(block)
    manifests = helm.manifests("multi-gpu", "--values", place / "groups.yaml")
    (cluster,) = manifests.of("RayCluster")
    assert [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]] == ["cpu", "h100", "l40s"]
