"""Serve's state of the application that has the replicas of a family."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from workers.errors import EngineUnavailable

__all__ = ["application_state", "failure_reason", "num_replicas"]


def num_replicas(name: str) -> Counter[str]:
    """The number of replicas of a Serve application by state ("RUNNING", "STARTING", ...).

    The result is empty if there is no such application.
    """
    from ray import serve

    application = serve.status().applications.get(name)
    counts: Counter[str] = Counter()
    for deployment in application.deployments.values() if application else ():
        counts.update(deployment.replica_states)
    return counts


def application_state(name: str) -> str:
    """The state of a Serve application, such as "RUNNING".

    Raises EngineUnavailable if there is no application, if its deployment failed, or if no replica runs because its
    models cannot be used any more. In this case Serve would retry without end.
    """
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None:
        raise EngineUnavailable(f"{name}: no such application runs on this Ray")
    if application.status == "DEPLOY_FAILED" or _has_unusable_sources(application):
        raise EngineUnavailable(failure_reason(name))
    return str(application.status.value)


def _has_unusable_sources(application: Any) -> bool:
    deployments = application.deployments.values()
    is_running = any(deployment.replica_states.get("RUNNING") for deployment in deployments)
    return not is_running and any("InvalidModel" in deployment.message for deployment in deployments)


def failure_reason(name: str) -> str:
    """The reason why a Serve application failed.

    It is an error of `workers.errors` in Serve's message, else the message's last line.
    """
    from ray import serve

    application = serve.status().applications[name]
    text = "\n".join([application.message, *(each.message for each in application.deployments.values())])
    reasons = re.findall(r"(?:EngineUnavailable|InvalidModel|EvidenceMismatch|EngineFault)(?:\(.*?\))?: (.+)", text)
    lines = [line for line in text.splitlines() if line.strip()]
    return reasons[-1].strip() if reasons else (lines[-1].strip() if lines else str(application.status))
