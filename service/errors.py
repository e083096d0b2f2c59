"""Errors of the service. Each class says what the caller does next.

ServiceError
├── NotFound       (KeyError)      the job, trial or file does not exist
├── Conflict       (RuntimeError)  not possible in the current state, e.g. the directory holds another run
│   └── InUse                      another process uses the directory: wait for it
├── StaleAttempt   (RuntimeError)  stop: a newer driver owns the job
├── StudyFailed    (RuntimeError)  the study cannot continue; finished work is kept
├── StudyUnusable  (RuntimeError)  an engine cannot use its models or a task: run preflight again
└── raised by the client of the server:
    ├── RequestRefused    (ValueError)       fix the request; holds every problem the server found
    ├── ServerUnreachable (ConnectionError)  check that the server runs and the address is right, then retry
    ├── InvalidAnswer     (RuntimeError)     the response is not from a mergesearch server, or is incomplete
    └── ExportFailed      (RuntimeError)     the server could not write the merged model
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.schemas.api import FieldProblem, ProblemDocument

__all__ = [
    "Conflict",
    "ExportFailed",
    "InUse",
    "InvalidAnswer",
    "NotFound",
    "RequestRefused",
    "ServerUnreachable",
    "ServiceError",
    "StaleAttempt",
    "StudyFailed",
    "StudyUnusable",
]


class ServiceError(Exception):
    """Base class of the service's errors."""


class NotFound(ServiceError, KeyError):
    """The job, trial or file that the message names does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])


class Conflict(ServiceError, RuntimeError):
    """The request is well formed but not possible in the current state."""


class InUse(Conflict):
    """Another process, which the message names, uses the directory."""


class StaleAttempt(ServiceError, RuntimeError):
    """A newer attempt at the same job has taken over; nothing was written."""


class StudyFailed(ServiceError, RuntimeError):
    """The study failed and cannot continue; the message is the reason."""


class StudyUnusable(ServiceError, RuntimeError):
    """An engine cannot use the study's models or a task, although they were checked before; the message says why."""


class RequestRefused(ServiceError, ValueError):
    """The server refused the request.

    Attributes:
        problem: The server's problem document (RFC 9457).
        retry_after_s: Seconds after which a retry may succeed (the header Retry-After); None if the server names none.
    """

    def __init__(self, problem: ProblemDocument, retry_after_s: float | None = None) -> None:
        super().__init__(problem, retry_after_s)
        self.problem = problem
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """HTTP status of the response."""
        return self.problem["status"]

    @property
    def problems(self) -> list[FieldProblem]:
        """Problems with their fields; one problem with an empty field if the server lists none."""
        return self.problem.get("problems") or [{"field": "", "message": self.problem["detail"]}]

    def __str__(self) -> str:
        return "\n".join(f"{p['field']}: {p['message']}" if p["field"] else p["message"] for p in self.problems)


class ServerUnreachable(ServiceError, ConnectionError):
    """No server responds at the address that the message names."""


class InvalidAnswer(ServiceError, RuntimeError):
    """The response is not one of a mergesearch server; the message names the address and what was received."""


class ExportFailed(ServiceError, RuntimeError):
    """The server could not write a merged model; the message is the reason."""
