"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray

from tests.conftest import record_engine_start
from tests.end_to_end.processes import mergesearch, started
from tests.end_to_end.server import Server, serving
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


@pytest.fixture(scope="session")
def fake_server(
    tmp_path_factory: pytest.TempPathFactory, at_end_of_lane: Callable[[str, Callable[[], None]], None]
) -> Iterator[Server]:
    """A server with one place and one trial actor, which it takes away at once for urgent studies.

    Fakes score language models. The models of studies are beside its data directory.
    """
    settings = {
        "FAKE_SCORER": {"sample_delay_s": 0.02},
        "FAKE_QUEUE": {"KEEPS_PLACE_S": 0.0},
        "FAKE_LATE_CHECKS": 1,
        "FAKE_IN_FLIGHT": 1,
    }
    environment = {name: json.dumps(value) for name, value in settings.items()}
    command = ("tests.benchmarks.fake_serve", "--max-running", "1")
    with ExitStack() as stack:
        data_dir = tmp_path_factory.mktemp("fake_server") / "data"
        server = stack.enter_context(serving(command, data_dir, environment=environment))
        at_end_of_lane("fake_server", stack.close)
        yield server
