"""Nodes lost while a study runs: killed, cut off and healed, and the head replaced. Trials stay the undisturbed ones.

Scores are fakes. HTTP server, PostgreSQL, Ray on four machines (`machines`), its jobs and Serve are real. Ray notices a
killed node after about 15 s, and one that is cut off, or a lost head, after about a minute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from search_spaces.study.file import load_study
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.store.database_url import VARIABLE
from tests.cluster.machines import DASHBOARD_PORT, Cluster, machines
from tests.end_to_end.server import Server, serving
from tests.end_to_end.studies import undisturbed, write_small_study
from tests.postgresql import PostgreSQL
from tests.service.tune.harness import trial_list

NUM_WORKERS = 3
RECOVERY_S = 600.0
CUT_S = 90.0
REPLICA = "ray::ServeReplica"
ENVIRONMENT = {
    "FAKE_SCORER": json.dumps({"sample_delay_s": 0.05}),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Site:
    """A cluster, the server that uses it, and its database."""

    cluster: Cluster
    server: Server
    store: Store
    directory: Path

    def submit(self, name: str) -> str:
        """Submit a study of its own for each test, and wait until it has stored three chunks."""
        directory = self.directory / name
        directory.mkdir()
        file = write_small_study(directory, name=name, rungs=[20, 60], max_trials=12)
        study = self.server.submit(load_study(file).canonical())
        self.until_stored(study, 3)
        return study

    def num_stored(self, study: str) -> int:
        return len(self.store.evidence(study))

    def until_stored(self, study: str, number: int) -> float:
        """Wait until the study has stored that many chunks, and return the seconds that it took."""
        started = time.monotonic()
        while self.num_stored(study) < number:
            assert time.monotonic() - started < RECOVERY_S, self.server.story(study)
            time.sleep(0.2)
        return time.monotonic() - started

    def check_ended(self, study: str, name: str) -> None:
        """The study ends with the trials of an undisturbed run, and no sample is stored twice."""
        document = self.server.wait_until_ended(study, timeout_s=RECOVERY_S)
        assert document["state"] == "COMPLETE", self.server.story(study)
        resolved = ResolvedStudy.of(self.store.job(study))
        file = self.directory / name / "study.yaml"
        assert trial_list(self.store, study) == undisturbed(file, self.directory / f"{name}-alone", resolved=resolved)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, _postgresql: PostgreSQL) -> Iterator[Site]:
    """A site whose machines reach PostgreSQL by its unix socket, which is a file on the shared disk."""
    directory = tmp_path_factory.mktemp("site")
    if not _postgresql.is_running:
        _postgresql.start()
    database = _postgresql.migrated()
    with machines(directory, num_workers=NUM_WORKERS, environment=ENVIRONMENT) as cluster:
        cluster.start()
        environment = {
            **{name: value for name, value in cluster.environment.items() if name.startswith("RAY_")},
            "RAY_ADDRESS": f"http://{cluster.head.address}:{DASHBOARD_PORT}",
            VARIABLE: database,
            **ENVIRONMENT,
        }
        with serving(["tests.benchmarks.fake_serve"], directory / "data", environment=environment) as server:
            store = Store(database, waits=True)
            yield Site(cluster, server, store, directory)
            store.close()


@pytest.mark.timeout(1800)
def test_killed_worker_changes_no_trial(site: Site) -> None:
    """SIGKILL of the worker node with the replica, whose machine then starts again, changes no trial."""
    study = site.submit("killed")
    worker = site.cluster.worker_with(REPLICA)
    stored = site.num_stored(study)
    worker.kill()
    print(f"\nworker killed: the next chunk is stored after {site.until_stored(study, stored + 2):.0f} s")
    site.check_ended(study, "killed")
    site.cluster.wait_for_nodes(NUM_WORKERS)
    site.cluster.start_worker(worker)


@pytest.mark.timeout(1800)
def test_cut_and_healed_link_changes_no_trial(site: Site) -> None:
    """A worker with the replica that is cut off, replaced and connected again changes no trial."""
    study = site.submit("cut")
    worker = site.cluster.worker_with(REPLICA)
    stored = site.num_stored(study)
    worker.cut()
    cut_at = time.monotonic()
    print(f"\nlink cut: the next chunk is stored after {site.until_stored(study, stored + 2):.0f} s")
    time.sleep(max(CUT_S - (time.monotonic() - cut_at), 0.0))
    worker.heal()
    site.check_ended(study, "cut")
    worker.kill()  # a raylet that was counted as dead ends itself
    site.cluster.wait_for_nodes(NUM_WORKERS)
    site.cluster.start_worker(worker)


@pytest.mark.timeout(1800)
def test_replaced_head_changes_no_trial(site: Site) -> None:
    """A head that is lost and replaced, with all workers joining the new one, changes no trial."""
    study = site.submit("head")
    stored = site.num_stored(study)
    site.cluster.head.kill()
    for worker in site.cluster.workers:  # what an operator or KubeRay does: they belong to the lost head
        worker.kill()
    site.cluster.start()
    print(f"\nhead replaced: the next chunk is stored after {site.until_stored(study, stored + 1):.0f} s")
    site.check_ended(study, "head")
