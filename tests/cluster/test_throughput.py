"""Chunks a second with 1, 2 and 4 fake replicas on four machines, compared with that multiple of one replica's."""

from __future__ import annotations

import os

import pytest

from tests.cluster.site import SAMPLE_S, Site

REPLICAS = (1, 2, 4)
CHUNK_SAMPLES = 20
CHUNKS_PER_REPLICA = 200
# Least share of its time that a replica scores, and least ratio of rates to those of as many single replicas.
BUSY = EFFICIENCY = 0.9


@pytest.mark.timeout(2400)
def test_replicas_on_several_machines_are_busy(site: Site) -> None:
    """Replicas score for at least 0.9 of the time, and two and four at least 0.9 times as much as single ones."""
    chunk_s = SAMPLE_S * CHUNK_SAMPLES
    rates = {replicas: rate(site, replicas) for replicas in REPLICAS}
    print(f"\nchunks of {chunk_s:.0f} s; load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    print("replicas  chunks a second  busy  efficiency")
    efficiency = {replicas: found / rates[1] / replicas for replicas, found in rates.items()}
    busy = {replicas: found * chunk_s / replicas for replicas, found in rates.items()}
    for replicas, found in rates.items():
        print(f"{replicas:8}  {found:15.2f}  {busy[replicas]:4.2f}  {efficiency[replicas]:10.2f}")
    assert min(busy.values()) >= BUSY
    assert min(efficiency.values()) >= EFFICIENCY


def rate(site: Site, replicas: int) -> float:
    """Chunks a second of a study with this number of replicas of its own, in its second half without the last chunks.

    In the first half processes of replicas and trial actors are still being started: two cores need up to two minutes.
    """
    study = site.run(
        f"rate-{replicas}",
        engine={"replicas": replicas, "max_model_len": 64 + replicas},  # other options, other replicas
        search={"max_trials": CHUNKS_PER_REPLICA * replicas},
        fidelity={"scheduler": "none", "rungs": [CHUNK_SAMPLES]},
    )
    stored = sorted(each.finished_at for each in site.store.evidence(study) if each.num_samples == CHUNK_SAMPLES)
    middle = stored[len(stored) // 2 : -4 * replicas]
    return (len(middle) - 1) / (middle[-1] - middle[0])
