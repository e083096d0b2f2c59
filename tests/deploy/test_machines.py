"""Ray on plain machines: Ray accepts the cluster file, systemd the units, and shells the scripts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.cluster.session import prepare_environment
from service.tune.ray_tune import CHUNK_GRACE_S
from tests.deploy.deployed import DEPLOY, ROOT

CLUSTER = DEPLOY / "ray" / "cluster.yaml"
ENVIRONMENT = DEPLOY / "systemd" / "environment"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SLURM = DEPLOY / "slurm" / "study.sbatch"
PAGE = ROOT / "docs" / "how-to" / "machines.md"
INSTALLED = "/opt/mergesearch/.venv/bin"
# Exposure that `systemd-analyze security` states, from 0 to 10. GPUs, Ray's workers and its ports are needed.
MAX_EXPOSURE = 6.0


def program(name: str, package: str) -> str:
    """Path of a program of a Debian package. If it is not installed, skips the test, except in CI."""
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed (Debian: apt-get install {package})")
    return str(found)


def unknown_options(command: str) -> list[str]:
    """Options after `ray start` in the words of a shell command that Ray does not have."""
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    starts = re.findall(r"\bray start ([^;&|\n]*)", command)
    options = [word.partition("=")[0] for text in starts for word in shlex.split(text) if word.startswith("--")]
    assert starts == [] or options
    return [option for option in options if option not in known]


def read_environment(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {name: shlex.split(value)[0] if value else "" for name, _, value in (line.partition("=") for line in lines)}


# The file of `ray up`.


def prepared(text: str) -> dict[str, Any]:
    """The configuration that `ray up` reads from the text of a cluster file; it raises if Ray refuses the text."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config: dict[str, Any] = prepare_config(yaml.safe_load(text))
    validate_config(config)
    return config


def test_ray_accepts_the_cluster_file() -> None:
    """Ray accepts the file; all of its machines belong to the cluster, and the head runs no engine."""
    config = prepared(CLUSTER.read_text())
    (kind,) = config["available_node_types"].values()
    assert kind["min_workers"] == len(config["provider"]["worker_ips"]) == 2
    head, worker = (config[f"{role}_start_ray_commands"] for role in ("head", "worker"))
    assert [unknown_options(line) for line in (*head, *worker)] == [[], []]
    assert "--num-cpus=0 --num-gpus=0" in head[0]
    assert "--address=$RAY_HEAD_IP:6379" in worker[0]


def test_ray_refuses_a_wrong_cluster_file() -> None:
    import jsonschema

    with pytest.raises(jsonschema.ValidationError, match="head_start_commands"):
        prepared(CLUSTER.read_text().replace("head_start_ray_commands", "head_start_commands"))
    assert unknown_options("ray start --head --num-cpu=0") == ["--num-cpu"]


# Units.


def verified(units: list[Path], directory: Path) -> str:
    """The output of `systemd-analyze verify` for units whose programs are those of this environment."""
    analyze = program("systemd-analyze", "systemd")
    for unit in units:
        (directory / unit.name).write_text(unit.read_text().replace(INSTALLED, str(Path(sys.executable).parent)))
    files = [str(directory / unit.name) for unit in units]
    done = subprocess.run([analyze, "verify", "--man=no", *files], capture_output=True, text=True)
    return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    assert [unit.name for unit in UNITS] == ["mergesearch-ray.service", "mergesearch.service"]
    assert verified(UNITS, tmp_path) == ""


@pytest.mark.parametrize(
    ("old", "new"), [("ProtectSystem=strict", "ProtectSystem=yse"), ("ExecStart=", "ExecStrat="), ("/ray ", "/yar ")]
)
def test_systemd_refuses_a_wrong_unit(old: str, new: str, tmp_path: Path) -> None:
    wrong = tmp_path / "original" / UNITS[0].name
    wrong.parent.mkdir()
    wrong.write_text(UNITS[0].read_text().replace(old, new))
    assert verified([wrong], tmp_path) != ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_have_few_rights(unit: Path, tmp_path: Path) -> None:
    """The units run as an ordinary user, and stay below the limit of exposure; without their settings they do not."""

    def exposure(text: str) -> float:
        file = tmp_path / unit.name
        file.write_text(text)
        command = [program("systemd-analyze", "systemd"), "security", "--offline=true", str(file)]
        said = subprocess.run(command, capture_output=True, text=True).stdout
        return float(re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)[0])

    text = unit.read_text()
    assert "\nUser=mergesearch\n" in text
    assert exposure(text) < MAX_EXPOSURE
    assert exposure(re.sub(r"^(User|NoNew|Capab|Protect|Restrict).*\n", "", text, flags=re.MULTILINE)) > MAX_EXPOSURE


def test_environment_has_the_settings_of_the_servers_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: dict[str, str] = {}
    monkeypatch.setattr("os.environ", expected)
    prepare_environment()
    found = read_environment(ENVIRONMENT)
    assert len(expected) > 3
    assert {name: found.get(name) for name in expected} == expected
    assert float(found["RAY_JOB_STOP_WAIT_TIME_S"]) > CHUNK_GRACE_S


def test_environment_has_no_token_and_ray_knows_its_options() -> None:
    """The environment asks for a token and has none, so that Ray does not start before a token is written there."""
    found = read_environment(ENVIRONMENT)
    assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN"]) == ("token", "")
    others = re.findall(r'^#RAY_START="(.*)"$', ENVIRONMENT.read_text(), re.MULTILINE)
    assert [unknown_options(f"ray start {options}") for options in (found["RAY_START"], *others)] == [[], []]


# Scripts.


@pytest.mark.parametrize("script", [SLURM, DEPLOY / "docker" / "uv-pip"], ids=lambda file: file.name)
def test_scripts_are_free_of_mistakes(script: Path) -> None:
    done = subprocess.run([program("shellcheck", "shellcheck"), str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_mistakes_in_scripts_are_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "study.sbatch"
    wrong.write_text(SLURM.read_text().replace('"$SLURM_JOB_NODELIST"', "$SLURM_JOB_NODELIST"))
    done = subprocess.run([program("shellcheck", "shellcheck"), str(wrong)], capture_output=True, text=True)
    assert "SC2086" in done.stdout


def test_slurm_script_names_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SLURM), "study.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "STUDY_FILE DIRECTORY" in done.stderr
