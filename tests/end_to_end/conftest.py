"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import ray

from tests.conftest import record_engine_start
from tests.end_to_end.processes import mergesearch, started
from tests.end_to_end.studies import SFS, shipped_study, write_small_study

START_S = 300.0  # Ray, Serve and an engine, on two busy cores


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished `mergesearch run` of `shipped_study` with seed 1, which has exported its best merge.

    The study file is in the parent directory.
    """
    directory = tmp_path_factory.mktemp("shipped")
    study = directory / "study.json"
    study.write_text(json.dumps(shipped_study(directory, name="shipped", seed=1)))
    out = directory / "run"
    with started(mergesearch("run", study, "--out", out, "--export", "best"), directory=out) as run:
        run.wait_for_rows(1, timeout_s=START_S)
        record_engine_start("shipped family, a run", time.monotonic() - run.started_at)
        assert run.wait(timeout_s=START_S) == 0, run.log
    return out


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    return write_small_study(directory, name="small", rungs=[12, 40, 120], max_trials=15, space=SFS)


@pytest.fixture(scope="session")
def ray_address(ray_cluster: None) -> str:
    """Address of a Ray that outlives the commands: to start one for each command takes longer than its study."""
    return str(ray.get_runtime_context().gcs_address)
