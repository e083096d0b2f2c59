"""Conclusions from the states that Ray Serve's controller reports, without Ray's processes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from ray.serve._private.common import ReplicaState
from ray.serve.schema import ApplicationStatus, DeploymentStatusTrigger

from workers.errors import EngineUnavailable
from workers.serving import application
from workers.serving.application import is_deployed, is_ready

DIED, FAILS = DeploymentStatusTrigger.HEALTH_CHECK_FAILED, DeploymentStatusTrigger.REPLICA_STARTUP_FAILED


@pytest.mark.parametrize(
    ("status", "trigger", "replicas", "deployed", "ready"),
    [
        ("RUNNING", DeploymentStatusTrigger.AUTOSCALING, [], True, True),
        ("DEPLOYING", DeploymentStatusTrigger.CONFIG_UPDATE_STARTED, ["STARTING"], True, False),
        ("UNHEALTHY", DIED, ["RUNNING", "STARTING"], True, True),
        ("UNHEALTHY", FAILS, ["RUNNING", "STARTING"], True, True),
        ("UNHEALTHY", DIED, ["STARTING"], True, False),
        ("UNHEALTHY", FAILS, ["STARTING"], False, False),
        ("DELETING", DeploymentStatusTrigger.DELETING, ["STOPPING"], False, False),
    ],
)
def test_applications_with_dead_replicas_stay_deployed(
    status: str,
    trigger: DeploymentStatusTrigger,
    replicas: Sequence[str],
    deployed: bool,
    ready: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An application that lost a replica is used as it is, unless none runs and the replacements fail to start."""
    states = [SimpleNamespace(state=ReplicaState(state)) for state in replicas]
    deployment = SimpleNamespace(status_trigger=trigger, replicas=states, message="it failed")
    found = SimpleNamespace(status=ApplicationStatus(status), message="", deployments={"scorer": deployment})
    monkeypatch.setattr(application, "_applications", lambda: {"scorer-a": found})
    assert is_deployed("scorer-a") == deployed
    assert is_ready("scorer-a") == ready
    assert not is_deployed("scorer-b")
    with pytest.raises(EngineUnavailable, match="scorer-b: no such application runs on this Ray"):
        is_ready("scorer-b")
