"""A server that is backed up, drained, stopped, migrated and started again while a study runs, as in an upgrade."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from search_spaces.study.file import load_study
from service.cli.main import main
from service.disk import DATABASE, DRAINED
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.types import EventKind, JobState
from tests.end_to_end.server import serving
from tests.end_to_end.studies import LFS, undisturbed, write_small_study
from tests.service.tune.harness import trial_list

RECOVERY_S = 300.0
COMMAND = ("tests.benchmarks.fake_serve",)


@pytest.mark.timeout(900)
def test_a_study_continues_after_an_upgrade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While the server is drained nothing is scored, also after its restart; the trials are the undisturbed ones.

    A backup that was made while the study ran gives the same trials in an empty place.
    """
    (tmp_path / "models").mkdir()
    file = write_small_study(tmp_path / "models", name="s", rungs=[20, 60], max_trials=5, space=LFS)
    data_dir = tmp_path / "data"
    environment = {"FAKE_SCORER": json.dumps({"sample_delay_s": 0.01}), "FAKE_IN_FLIGHT": "1"}
    environment["FAKE_LATE_CHECKS"] = "1"
    with serving(COMMAND, data_dir, environment=environment) as server:
        study = server.submit(load_study(file).canonical())
        store = Store(f"sqlite:///{data_dir / DATABASE}", waits=True)
        deadline = time.monotonic() + RECOVERY_S
        while len(store.evidence(study)) < 3:
            assert time.monotonic() < deadline, server.story(study)
            time.sleep(0.1)

        assert store.job(study).has_driver(now=store.now())
        assert main(["backup", "--data", str(data_dir), "--out", str(tmp_path / "backup")]) == 0
        assert "1 jobs (1 unfinished)" in capsys.readouterr().out
        assert main(["drain", "--data", str(data_dir)]) == 0
        assert "drained; no job has a driver" in capsys.readouterr().out
        assert (store.job(study).state, store.job(study).reason) == (JobState.STOPPED, "interrupted")
        stored = len(store.evidence(study))
        answer = httpx.get(f"{server.url}/readyz")
        assert (answer.status_code, answer.json()["detail"]) == (503, DRAINED)
        assert server.get(f"/v1/studies/{study}")["waiting_for"] == DRAINED

        assert server.stop() == 0
        assert main(["database", "migrate", str(data_dir)]) == 0
        server.start()
        time.sleep(3.0)  # several rounds of the reconciler
        assert len(store.evidence(study)) == stored

        assert main(["drain", "--data", str(data_dir), "--end"]) == 0
        assert server.wait_until_ended(study, timeout_s=RECOVERY_S)["state"] == "COMPLETE"
        attempts = sum(event.kind == EventKind.ATTEMPT for event in store.events(study))
        resolved = ResolvedStudy.of(store.job(study))
        expected = undisturbed(file, tmp_path / "alone", resolved=resolved)
        assert trial_list(store, study) == expected
        num_evidence = len(store.evidence(study))
        store.close()
        server.stop()
    assert attempts == 2
    assert stored < num_evidence, "it was drained in the middle"

    new = tmp_path / "new"
    assert main(["restore", str(tmp_path / "backup"), "--data", str(new)]) == 0
    store = Store(f"sqlite:///{new / DATABASE}", waits=True)
    backed_up = store.evidence(study)
    assert 3 <= len(backed_up) <= stored
    with serving(COMMAND, new, environment=environment) as server:
        assert server.wait_until_ended(study, timeout_s=RECOVERY_S)["state"] == "COMPLETE", "it goes on at once"
        assert trial_list(store, study) == expected
        assert store.evidence(study)[: len(backed_up)] == backed_up, "stored samples are not scored again"
        assert len(store.evidence(study)) == num_evidence
        server.stop()
    store.close()
