"""A study without any shared directory: models in an object store, PostgreSQL by TCP, two servers; killed at random.

Each machine has an empty directory where the servers and the other machines have theirs. Scores are fakes; drivers,
servers, Ray, Serve, PostgreSQL and the downloads of models are real. The tasks are files of the installed package.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
import yaml

from search_spaces.study.file import load_study
from service.store import Store
from service.store.database_url import VARIABLE
from tests.builders import tiny_family
from tests.cluster.machines import BRIDGE_ADDRESS, DASHBOARD_PORT, NETWORK, Cluster, Machine, machines
from tests.cluster.site import REPLICA
from tests.end_to_end.server import Server, drivers, serving
from tests.end_to_end.studies import EXPERTS, undisturbed
from tests.postgresql import postgresql_server
from tests.s3_server import CREDENTIALS, S3, serving_s3
from tests.service.tune.harness import trial_list
from workers.cache import CACHE_VARIABLE
from workers.object_store import ObjectStore
from workers.tiny_family import family_dir

NUM_WORKERS = 2
NUM_KILLS, SEED = 10, 0
RECOVERY_S = 900.0
# A worker's machine takes longest to return, so it is drawn less often.
WEIGHTS = {"driver": 3, "replica": 3, "server": 3, "worker": 1}


@dataclass
class Apart:
    """Two servers and a cluster. Its machines share no directory with the servers or each other."""

    cluster: Cluster
    servers: list[Server]
    store: Store
    s3: S3
    bucket: str

    def kill(self, part: str, study: str, draw: random.Random) -> bool:
        """Kill a part of the system; False if the part does not exist at the moment."""
        if part == "server":
            server = draw.choice(self.servers)
            server.kill()
            server.start(timeout_s=300)
            return True
        if part == "worker":
            worker: Machine = draw.choice(self.cluster.workers)
            worker.kill()
            self.cluster.wait_for_nodes(NUM_WORKERS)
            self.cluster.start_worker(worker)
            return True
        found = drivers(study) if part == "driver" else self.cluster.processes(REPLICA)
        for process in found[:1] if part == "replica" else found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(found)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    site = tmp_path / "site"
    site.mkdir()
    common = {
        **CREDENTIALS,
        "FAKE_SCORER": json.dumps({"sample_delay_s": 0.05}),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        CACHE_VARIABLE: str(site / "cache"),
    }
    with ExitStack() as stack:
        postgresql = stack.enter_context(contextmanager(postgresql_server)())
        postgresql.listen(NETWORK)
        url = sa.make_url(postgresql.migrated()).set(host=BRIDGE_ADDRESS, port=5432, query={})
        database = url.render_as_string(hide_password=False)
        common[VARIABLE] = database
        cluster = stack.enter_context(
            machines(site, num_workers=NUM_WORKERS, environment=common, shares_directory=False)
        )
        s3 = stack.enter_context(serving_s3(BRIDGE_ADDRESS))
        for machine in cluster.machines:
            machine.environment = {**machine.environment, "AWS_ENDPOINT_URL": s3.url}
        cluster.start()
        bucket = s3.bucket()
        environment = {
            **{name: value for name, value in cluster.environment.items() if name.startswith("RAY_")},
            **common,
            "RAY_ADDRESS": f"http://{cluster.head.address}:{DASHBOARD_PORT}",
            "AWS_ENDPOINT_URL": s3.url,
        }
        command = ["tests.benchmarks.fake_serve", "--allow-url", bucket, "--files", f"{bucket}/files"]
        servers = [
            stack.enter_context(serving(command, site / f"server-{number}", environment=environment))
            for number in range(2)
        ]
        store = Store(database, waits=True)
        stack.callback(store.close)
        yield Apart(cluster, servers, store, s3, bucket)


def write_study(file: Path, locate: Callable[[str], str]) -> Path:
    """A study of two fake replicas; `locate` says where its models are."""

    def objective(split: str) -> dict[str, Any]:
        data = family_dir() / "tasks" / f"math_{split}.jsonl"
        return {"name": "sums", "task": {"file": str(data), "max_tokens": 6}, "metric": "exact_match"}

    document = {
        "name": "apart",
        "models": {"base": locate("base"), "experts": {alias: locate(alias) for alias in EXPERTS}},
        "search_space": {"kind": "lfs", "layer_groups": 2},
        "search": {"algorithm": "random", "max_trials": 60},
        "fidelity": {"scheduler": "hyperband", "rungs": [20, 60, 180]},
        "objectives": [objective("search")],
        "holdout": [objective("holdout")],
        "engine": {"max_model_len": 64, "replicas": 2},
    }
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.mark.timeout(3600)
def test_kills_without_a_shared_directory_change_no_trial(apart: Apart, tmp_path: Path) -> None:
    """Kills of drivers, replicas, servers and nodes leave the trials of an undisturbed run with local models."""
    models = tmp_path / "models"
    tiny_family(models, experts=EXPERTS)
    shutil.rmtree(models / "cache")
    for directory in models.iterdir():
        sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in directory.iterdir())
        (directory / "SHA256SUMS").write_text("".join(list(sums)))
        objects = ObjectStore(f"{apart.bucket}/{directory.name}")
        for file in directory.iterdir():
            objects.upload(file, file.name)
    document = load_study(write_study(tmp_path / "apart.yaml", lambda alias: f"{apart.bucket}/{alias}")).canonical()
    study = apart.servers[0].submit(document)

    draw = random.Random(SEED)
    kills: Counter[str] = Counter()
    started = time.monotonic()
    while kills.total() < NUM_KILLS:
        goal, deadline = len(apart.store.evidence(study)) + 2, time.monotonic() + RECOVERY_S
        while len(apart.store.evidence(study)) < goal:
            assert time.monotonic() < deadline, apart.servers[0].story(study)
            time.sleep(0.2)
        time.sleep(draw.uniform(0.0, 1.0))
        (part,) = draw.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
        kills[part] += apart.kill(part, study, draw)
    ended = apart.servers[0].wait_until_ended(study, timeout_s=RECOVERY_S)
    assert ended["state"] == "COMPLETE", apart.servers[0].story(study)
    attempts = apart.store.job(study).attempt
    print(f"\nno shared directory: {dict(kills)}, {attempts} drivers, {time.monotonic() - started:.0f} s")
    assert apart.servers[1].get(f"/v1/studies/{study}")["state"] == "COMPLETE"

    local = write_study(tmp_path / "local.yaml", lambda alias: str(models / alias))
    assert trial_list(apart.store, study) == undisturbed(local, tmp_path / "alone")
    weights = [path for method, path in apart.s3.requests if method == "GET" and "model.safetensors" in path]
    assert weights, "no machine downloaded a model"
