"""Loss of nodes while a study runs: killed, cut off, drained, or the head replaced. The trials stay the same.

Scores are fakes. HTTP server, PostgreSQL, Ray on four machines (`machines`), its jobs and Serve are real. Ray notices a
killed node after about 15 s, and one that is cut off, or a lost head, after about a minute.
"""

from __future__ import annotations

import time

import pytest

from tests.cluster.machines import Machine
from tests.cluster.site import NUM_MACHINES, REPLICA, Site

CUT_S = 90.0
# A notice that ends while the study runs, as that of a spot machine, and one that ends later.
NOTICES_S = (20, 900)


def worker_with_a_replica(site: Site) -> Machine:
    return next(machine for machine in site.cluster.machines_with(REPLICA) if machine in site.cluster.workers)


@pytest.mark.timeout(2400)
def test_killed_worker_changes_no_trial(site: Site) -> None:
    """SIGKILL of a worker node with a replica, whose machine then starts again, changes no trial."""
    study = site.submit("killed")
    worker, since = worker_with_a_replica(site), time.time()
    worker.kill()
    study.figures["Ray notices (s)"] = site.cluster.wait_for_nodes(NUM_MACHINES - 1)
    site.check_ended(study, since=since)
    site.cluster.start_worker(worker)


@pytest.mark.timeout(2400)
def test_cut_and_healed_link_changes_no_trial(site: Site) -> None:
    """A worker with a replica that is cut off, replaced and connected again changes no trial."""
    study = site.submit("cut")
    worker, since = worker_with_a_replica(site), time.time()
    worker.cut()
    study.figures["Ray notices (s)"] = site.cluster.wait_for_nodes(NUM_MACHINES - 1)
    time.sleep(max(CUT_S - (time.time() - since), 0.0))
    worker.heal()
    site.check_ended(study, since=since)
    worker.kill()  # a raylet that was counted as dead ends itself
    site.cluster.start_worker(worker)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("notice_s", NOTICES_S)
def test_drained_worker_changes_no_trial(site: Site, notice_s: int) -> None:
    """A drained worker's replica moves at a chunk border: chunks are scored once, also those that waited there.

    A worker that goes before the study ends may take chunks along, whose trial actors were on it.
    """
    study = site.submit(f"drained-{notice_s}")
    worker, since = worker_with_a_replica(site), time.time()
    site.cluster.drain(worker, notice_s=notice_s)
    while worker in site.cluster.machines_with(REPLICA):
        assert time.time() - since < notice_s, site.server.story(study.id)
        time.sleep(0.2)
    study.figures["the replica has left (s)"] = time.time() - since
    site.check_ended(study, since=since)
    scored = site.num_scored(study)
    print(f"chunks scored twice: {sum(number > 1 for number in scored.values())} of {len(scored)}")
    if notice_s == max(NOTICES_S):
        assert set(scored.values()) == {1}
    worker.kill()
    site.cluster.wait_for_nodes(NUM_MACHINES - 1)
    site.cluster.start_worker(worker)


@pytest.mark.timeout(2400)
def test_replaced_head_changes_no_trial(site: Site) -> None:
    """A head that is lost and replaced, with all workers joining the new one, changes no trial."""
    study = site.submit("head")
    since = time.time()
    site.cluster.head.kill()
    for worker in site.cluster.workers:  # what an operator or KubeRay does: they belong to the lost head
        worker.kill()
    site.cluster.start()
    study.figures["new cluster (s)"] = time.time() - since
    site.check_ended(study, since=since)
