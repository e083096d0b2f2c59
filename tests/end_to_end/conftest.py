"""What the end-to-end tests with the fake scorer share."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.end_to_end.small_study import write_study


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("small"), name="small", rungs=[12, 40, 120], max_trials=15)


@pytest.fixture(scope="session")
def ray_address(ray_cluster: None) -> str:
    """Of a Ray that outlives the commands: starting one for each takes longer than the study."""
    return str(ray.get_runtime_context().gcs_address)
