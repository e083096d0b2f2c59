"""State of the Ray Serve application that runs the scoring replicas, as Serve's controller reports it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from workers.errors import EngineUnavailable, ServeUnavailable

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationDetails

__all__ = [
    "answered",
    "application_state",
    "failure_reason",
    "is_deployed",
    "is_known",
    "is_on_cpu",
    "is_ready",
    "num_replicas",
    "replica_state",
]

T = TypeVar("T")

# Seconds within which Serve's controller answers. Ray restarts a controller that died, which takes about as long.
ANSWER_S = 10.0

# Seconds between two questions to a controller that is away.
PAUSE_S = 0.5


def answered(ask: Callable[[], T], *, deadline: float) -> T:
    """Repeat a query of Serve's controller, by calling `ask`, until the controller answers; return the answer.

    `ask` raises ServeUnavailable while the controller does not answer. `deadline` is a time of the clock
    `time.monotonic`; if the controller has not answered by then, ServeUnavailable is raised to the caller.
    """
    while True:
        try:
            return ask()
        except ServeUnavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)


def num_replicas(name: str) -> Counter[str]:
    """Number of replicas of the Serve application `name`, keyed by state ("RUNNING", "STARTING", ...).

    The result is empty if there is no such application. Raises ServeUnavailable if Serve's controller does not answer.
    """
    application = _applications().get(name)
    deployments = application.deployments.values() if application else ()
    return Counter(replica.state.value for deployment in deployments for replica in deployment.replicas)


def is_known(name: str) -> bool:
    """Whether Serve knows the application `name`, which it forgets once the replicas of a deleted one are gone.

    Serve reports no replicas of an application that is being deleted. Raises ServeUnavailable if Serve's controller
    does not answer.
    """
    return name in _applications()


def replica_state(name: str, replica_id: str) -> str | None:
    """State of the replica `replica_id` of the Serve application `name`; None if Serve does not know it any more."""
    application = _applications().get(name)
    deployments = application.deployments.values() if application else ()
    replicas = (replica for deployment in deployments for replica in deployment.replicas)
    return next((replica.state.value for replica in replicas if replica.replica_id == replica_id), None)


def is_deployed(name: str) -> bool:
    """Whether the Serve application `name` runs or is being deployed, so that it need not be deployed again.

    Serve reports UNHEALTHY from the death of a replica until its replacement runs. Such an application counts as
    deployed, because another deployment would restart all its replicas. It does not count if no replica runs and a
    replacement has failed to start: Serve would repeat the start forever, with the environment of the old deployment.
    """
    application = _applications().get(name)
    if application is None:
        return False
    if application.status.value == "UNHEALTHY":
        return _has_running_replica(application) or _is_being_replaced(application)
    return application.status.value in ("RUNNING", "DEPLOYING")


def is_ready(name: str) -> bool:
    """Whether the Serve application `name` answers requests, also while a replica that died is being replaced.

    An application that Serve reports as RUNNING may have no replica; the next request starts one. Raises the errors of
    the function `application_state`.
    """
    application = _usable_application(name)
    if application.status.value == "UNHEALTHY":
        return _has_running_replica(application)
    return bool(application.status.value == "RUNNING")


def is_on_cpu(name: str) -> bool:
    """Whether the Serve application `name` exists and its replicas, also those that are not started yet, get no GPU."""
    application = _applications().get(name)
    deployments = application.deployments.values() if application else ()
    return any(not deployment.required_resources.get("GPU") for deployment in deployments)


def application_state(name: str) -> str:
    """State of the Serve application `name`, such as "RUNNING".

    Raises EngineUnavailable in three cases: there is no application, its deployment failed, or no replica runs because
    the models cannot be used any more. In the third case Serve itself would try to start replicas forever. Raises
    ServeUnavailable, a subclass, if Serve's controller does not answer; the application may be running.
    """
    return str(_usable_application(name).status.value)


def failure_reason(name: str) -> str:
    """Reason why the Serve application `name` failed, or why its state is unknown.

    Serve's message about the failure is shortened to the error of the module `workers.errors` that it contains or, if
    it contains no such error, to its last line.
    """
    try:
        application = _applications().get(name)
    except ServeUnavailable as error:
        return str(error)
    return "there is no such application" if application is None else _reason(application)


def _applications() -> Mapping[str, ApplicationDetails]:
    """Serve's applications, keyed by name; empty if Serve was not started on this Ray.

    The function `ray.serve.status` returns the same, but waits without limit for a controller that is being restarted.
    Raises ServeUnavailable if the controller does not answer within ANSWER_S seconds, or answers with an error.
    """
    import ray
    from ray.exceptions import RayError
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
    from ray.serve.schema import ServeInstanceDetails

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:  # no actor has the name
        return {}
    try:
        details = ray.get(controller.get_serve_instance_details.remote(), timeout=ANSWER_S)
    except RayError as error:
        lines = str(error).splitlines() or [""]
        raise ServeUnavailable(
            f"Ray Serve's controller does not answer ({type(error).__name__}: {lines[-1]}); Ray restarts it if it died"
        ) from error
    applications: Mapping[str, ApplicationDetails] = ServeInstanceDetails(**details).applications
    return applications


def _usable_application(name: str) -> ApplicationDetails:
    """The Serve application `name`. Raises the errors of the function `application_state`."""
    application = _applications().get(name)
    if application is None:
        raise EngineUnavailable(f"{name}: no such application runs on this Ray")
    if application.status.value == "DEPLOY_FAILED" or _has_unusable_sources(application):
        raise EngineUnavailable(_reason(application))
    return application


def _has_running_replica(application: ApplicationDetails) -> bool:
    deployments = application.deployments.values()
    return any(replica.state.value == "RUNNING" for deployment in deployments for replica in deployment.replicas)


def _has_unusable_sources(application: ApplicationDetails) -> bool:
    return not _has_running_replica(application) and any(
        "InvalidModel" in deployment.message for deployment in application.deployments.values()
    )


def _is_being_replaced(application: ApplicationDetails) -> bool:
    """Whether an UNHEALTHY application lacks a replica that died, and no start of a replacement has failed yet."""
    return all(each.status_trigger.value == "HEALTH_CHECK_FAILED" for each in application.deployments.values())


def _reason(application: ApplicationDetails) -> str:
    text = "\n".join([application.message, *(each.message for each in application.deployments.values())])
    reasons = re.findall(r"(?:EngineUnavailable|InvalidModel|EvidenceMismatch|EngineFault)(?:\(.*?\))?: (.+)", text)
    lines = [line for line in text.splitlines() if line.strip()]
    return reasons[-1].strip() if reasons else (lines[-1].strip() if lines else application.status.value)
