"""Studies over HTTP on real Ray, with fakes in the replicas: what survives which process being killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from search_spaces.study import load_study
from service.store import Store
from service.study_job import DATABASE
from tests.end_to_end.server import drivers, replicas, serving
from tests.end_to_end.small_study import undisturbed
from tests.service.harness import trial_list

START_S = 240.0  # Ray, a job, Serve and replicas, on two busy cores


@pytest.mark.timeout(1200)
def test_studies_survive_the_death_of_driver_replica_ray_and_server(small: Path, tmp_path: Path) -> None:
    document = load_study(small).canonical()
    environment = {"FAKE_SCORER": json.dumps({"sample_delay_s": 0.02})}
    with serving(["tests.end_to_end.fake_serve"], tmp_path / "data", environment=environment) as server:
        study = server.submit(document)
        server.wait_for_events(study, 2, "rung", timeout_s=START_S)

        (replica,) = replicas(server)
        replica.kill()
        server.wait_for_events(study, 2, "replica", timeout_s=START_S)

        for driver in drivers(study):
            driver.kill()
        server.wait_for_events(study, 2, "attempt", timeout_s=START_S)
        num_rungs = Counter(event["kind"] for event in server.events(study))["rung"]
        server.wait_for_events(study, num_rungs + 1, "rung", timeout_s=START_S)

        (gcs,) = (p for p in psutil.Process(server.host.process).children(recursive=True) if p.name() == "gcs_server")
        gcs.kill()
        server.wait_for_events(study, 3, "attempt", timeout_s=START_S)
        server.kill()
        server.start()
        assert server.wait_until_ended(study, timeout_s=2 * START_S)["state"] == "COMPLETE", server.story(study)
        reasons = [event["payload"]["because"] for event in server.events(study) if event["kind"] == "attempt"]
        of_ray = psutil.Process(server.host.process).children(recursive=True)
        assert server.stop() == 0
        assert psutil.wait_procs(of_ray, timeout=30)[1] == []
    assert reasons[0] is None
    assert "its driver ended" in reasons[1]
    assert "Ray was started anew" in reasons[2]
    store = Store(f"sqlite:///{server.data_dir / DATABASE}")
    assert trial_list(store, study) == undisturbed(small, tmp_path / "undisturbed")
    assert chunks_scored_twice(store, study) == []
    store.close()


def chunks_scored_twice(store: Store, study: str) -> list[Any]:
    """Recipes of which more samples were stored as scored than there are."""
    stored = {split: store.sample_values(study, split) for split in ("search", "holdout")}
    scored: Counter[tuple[str, str]] = Counter()
    for row in store.evidence(study):
        split = next(iter(row["prompts"])).split()[0]
        scored[row["recipe_digest"], split] += row["num_samples"]
    return [
        (digest, split)
        for (digest, split), count in scored.items()
        if count != sum(map(len, stored[split][digest].values()))
    ]
