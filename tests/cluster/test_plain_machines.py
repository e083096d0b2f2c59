"""The commands of docs/how-to/machines.md on machines that are network namespaces; scores are fakes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from search_spaces.study.file import load_study
from service.cli.main import main
from service.jobs.search.local_run import read_run
from service.store import EvidenceRecord
from service.store.database_url import VARIABLE
from service.types import Origin
from tests.cluster.machines import BRIDGE_ADDRESS, STORE_BYTES, Cluster, Machine, machines
from tests.deploy.test_machines import CLUSTER, INSTALLED, PAGE, SLURM
from tests.deploy.test_machines import ENVIRONMENT as ENVIRONMENT_FILE
from tests.docs.pages import Page
from tests.end_to_end.server import ROOT, serving
from tests.end_to_end.studies import write_small_study
from tests.postgresql import PostgreSQL

ENVIRONMENT = {
    "FAKE_SCORER": json.dumps({"sample_delay_s": 0.01}),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
MEMORY = f"--object-store-memory={STORE_BYTES}"


def commands(cluster: Cluster) -> tuple[list[str], list[str], str]:
    """Arguments of `ray start` for the head and for the others, and the server's RAY_ADDRESS, as on the page."""
    text = PAGE.read_text().replace("HEAD", cluster.head.address)
    head, worker = (shlex.split(line)[2:] for line in Page(PAGE, text).commands("ray") if line.startswith("ray start"))
    (address,) = re.findall(r"^export RAY_ADDRESS=(\S+)$", text, re.MULTILINE)
    return head, worker, address


@pytest.fixture
def postgresql_url(_postgresql: PostgreSQL) -> str:
    """URL of a new database, reached by a unix socket, which is a file on the shared disk."""
    if not _postgresql.is_running:
        _postgresql.start()
    return _postgresql.migrated()


@pytest.mark.timeout(1200)
def test_page_starts_a_cluster_that_runs_a_study(tmp_path: Path, postgresql_url: str) -> None:
    """The commands start a head that runs no engines and a machine that does; a server there completes a study."""
    database = postgresql_url
    with machines(tmp_path, num_workers=1, environment={**ENVIRONMENT, VARIABLE: database}) as cluster:
        head, worker, address = commands(cluster)
        cluster.head.start(*head, MEMORY)
        cluster.wait_for_nodes(1)
        cluster.workers[0].start(*worker, MEMORY)
        cluster.wait_for_nodes(2)
        study_dir = tmp_path / "study"
        study_dir.mkdir()
        study = write_small_study(study_dir, name="machines", rungs=[20, 60], max_trials=4)
        environment = {name: value for name, value in cluster.environment.items() if name.startswith("RAY_")}
        environment |= {"RAY_ADDRESS": address, VARIABLE: database, **ENVIRONMENT}
        with serving(["tests.benchmarks.fake_serve"], tmp_path / "data", environment=environment) as server:
            document = server.wait_until_ended(server.submit(load_study(study).canonical()), timeout_s=600)
            assert document["state"] == "COMPLETE", server.story(document["id"])


@contextmanager
def sshd(machine: Machine, directory: Path) -> Iterator[None]:
    """Context in which a machine takes SSH connections with the key `directory`/key."""
    server = [str(shutil.which("sshd", path="/usr/sbin")), "-D", "-e", "-f", "none", "-h", str(directory / "key")]
    settings = [f"AuthorizedKeysFile={directory}/key.pub", "StrictModes=no", "UsePAM=no", "PidFile=none"]
    command = [*machine.inside(), *server, *(word for setting in settings for word in ("-o", setting))]
    with (machine.directory / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(machine.environment))
    try:
        yield
    finally:
        process.kill()  # and so everything on the machine
        process.wait()


@pytest.fixture
def cluster_file(tmp_path: Path) -> Iterator[Path]:
    """The file of `ray up` with this user, a new key and the machines of this test, which are removed at its end."""
    if missing := [name for name in ("ssh-keygen", "rsync") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: apt-get install openssh-server rsync)")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    name = f"mergesearch-{secrets.token_hex(4)}"
    text = CLUSTER.read_text()
    replaced = {
        "cluster_name: mergesearch": f"cluster_name: {name}",
        "ssh_user: mergesearch": "ssh_user: root",
        "~/.ssh/mergesearch": str(tmp_path / "key"),
        "192.0.2.": "10.77.0.",
        "/etc/mergesearch/environment": str(tmp_path / "environment"),
        INSTALLED: str(Path(sys.executable).parent),
        "--disable-usage-stats": f"--disable-usage-stats {MEMORY}",
    }
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    left = [Path.home() / f"ray_bootstrap_{each}" for each in ("config.yaml", "key.pem")]
    assert not any(each.exists() for each in left)
    yield file
    for each in (*left, Path(f"/tmp/ray/cluster-{name}.state"), Path(f"/tmp/ray/cluster-{name}.lock")):
        each.unlink(missing_ok=True)


@pytest.mark.timeout(1200)
def test_ray_up_starts_all_machines(tmp_path: Path, cluster_file: Path) -> None:
    """`ray up` starts the head and both others over SSH, with the token and the settings of the environment file."""
    Path("/run/sshd").mkdir(exist_ok=True)
    with machines(tmp_path, num_workers=2, environment=ENVIRONMENT) as cluster, ExitStack() as stack:
        token = cluster.environment["RAY_AUTH_TOKEN"]
        environment = ENVIRONMENT_FILE.read_text().replace("RAY_AUTH_TOKEN=", f"RAY_AUTH_TOKEN={token}")
        (tmp_path / "environment").write_text(environment)
        for machine in cluster.machines:
            # Ray takes the address of the default route; without one it would take 127.0.0.1.
            route = ["ip", "-n", machine.name, "route", "add", "default", "via", BRIDGE_ADDRESS]
            subprocess.run(route, check=True)
            stack.enter_context(sshd(machine, tmp_path))
        command = [str(Path(sys.executable).with_name("ray")), "up", "--yes", "--no-config-cache", str(cluster_file)]
        done = subprocess.run(command, env=dict(cluster.environment), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        cluster.wait_for_nodes(3, timeout_s=600)


STAND_INS = {
    # One task on each machine, which the name of a variable says; the exit code is the first that is not 0.
    "srun": r"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
code=0
pids=()
for inside in "$STAND_IN_DIR"/machine-*.sh; do bash "$inside" "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
""",
    "scontrol": r"""#!/bin/bash
[[ "$*" == "show hostnames $SLURM_JOB_NODELIST" ]] && tr , "\n" <<< "$SLURM_JOB_NODELIST"
""",
}


@pytest.mark.timeout(1200)
def test_slurm_script_runs_and_continues_a_study(tmp_path: Path) -> None:
    """The batch script runs a study on two machines; called again with more trials, it scores what these add."""
    programs, venv = tmp_path / "programs", tmp_path / "venv" / "bin"
    for directory in (programs, venv):
        directory.mkdir(parents=True)
    fake = f"{shlex.quote(sys.executable)} -m tests.end_to_end.fake_run '{{}}'"
    scripts = {programs / name: text for name, text in STAND_INS.items()}
    scripts[venv / "mergesearch"] = f'#!/bin/bash\nexec {fake} "$@"\n'
    for file, text in scripts.items():
        file.write_text(text)
        file.chmod(0o755)
    (venv / "ray").symlink_to(Path(sys.executable).with_name("ray"))
    study = write_small_study(tmp_path, name="slurm", rungs=[20, 60], max_trials=3)
    run_dir = tmp_path / "run"
    stored: list[tuple[EvidenceRecord, ...]] = []
    with machines(tmp_path, num_workers=1, environment=ENVIRONMENT) as cluster:
        addresses = ",".join(machine.address for machine in cluster.machines)
        environment = {
            **{name: value for name, value in cluster.environment.items() if not name.startswith("RAY_AUTH")},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "STAND_IN_DIR": str(tmp_path),
            "MERGESEARCH_VENV": str(venv.parent),
            "SLURM_JOB_NODELIST": addresses,
            "SLURM_JOB_NUM_NODES": str(len(cluster.machines)),
        }
        for trials in (3, 5):
            study.write_text(re.sub(r"max_trials: \d+", f"max_trials: {trials}", study.read_text()))
            for machine in cluster.machines:
                prefix = shlex.join(machine.inside())
                (tmp_path / f"machine-{machine.number}.sh").write_text(f'exec {prefix} "$@"\n')
            done = subprocess.run(
                ["bash", str(SLURM), str(study), str(run_dir)],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "Head node started." in done.stdout
            assert main(["trials", str(run_dir), "--json"]) == 0
            with read_run(run_dir) as (store, record):
                searched = [trial for trial in store.trials(record.id) if trial.origin is Origin.SEARCH]
                stored.append(store.evidence(record.id))
            assert len(searched) == trials
    before, after = stored
    assert 0 < len(before) < len(after)
    assert after[: len(before)] == before, "what the first call scored stays as it was"
    chunks = Counter((each.recipe_digest, key) for each in after for key in each.prompts)
    assert max(chunks.values()) == 1, "and is not scored again"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["state"] == "COMPLETE"
