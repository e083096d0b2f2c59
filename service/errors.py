"""Errors of running studies. Each class says what the caller does next.

ServiceError
├── NotFound       (KeyError)      there is no such study, trial or file
├── Conflict       (RuntimeError)  the state forbids it: another run or study has the directory
├── StaleAttempt   (RuntimeError)  stop: a newer driver owns the study
├── StudyFailed    (RuntimeError)  the study cannot go on; finished work is kept
└── what a client of the server meets:
    ├── RequestRefused    (ValueError)       fix the request; holds every problem the server found
    ├── ServerUnreachable (ConnectionError)  check that the server is up and the address right, then ask again
    ├── InvalidAnswer     (RuntimeError)     what responds there is no mergesearch server, or was cut off
    └── ExportFailed      (RuntimeError)     the server could not write the merged model
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.schemas.api import FieldProblem, ProblemDocument

__all__ = [
    "Conflict",
    "ExportFailed",
    "InvalidAnswer",
    "NotFound",
    "RequestRefused",
    "ServerUnreachable",
    "ServiceError",
    "StaleAttempt",
    "StudyFailed",
]


class ServiceError(Exception):
    """Root of this package's errors."""


class NotFound(ServiceError, KeyError):
    """There is no such study, trial or file; the message names it and what there is."""

    def __str__(self) -> str:
        return str(self.args[0])


class Conflict(ServiceError, RuntimeError):
    """The request is well formed, but not possible in the present state."""


class StaleAttempt(ServiceError, RuntimeError):
    """A newer attempt at the same study has taken over; nothing was written."""


class StudyFailed(ServiceError, RuntimeError):
    """The study stopped for good; the message is its reason."""


class RequestRefused(ServiceError, ValueError):
    """The server refused: `problem` is its response (RFC 9457), `retry_after_s` how long to wait, if it says."""

    def __init__(self, problem: ProblemDocument, retry_after_s: float | None = None) -> None:
        super().__init__(problem, retry_after_s)
        self.problem = problem
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return self.problem["status"]

    @property
    def problems(self) -> list[FieldProblem]:
        """What is wrong, by field; one without a field if the server names none."""
        return self.problem.get("problems") or [{"field": "", "message": self.problem["detail"]}]

    def __str__(self) -> str:
        return "\n".join(f"{p['field']}: {p['message']}" if p["field"] else p["message"] for p in self.problems)


class ServerUnreachable(ServiceError, ConnectionError):
    """No server answered at the address that the message names."""


class InvalidAnswer(ServiceError, RuntimeError):
    """The response is not what a mergesearch server sends; the message names the address and what was received."""


class ExportFailed(ServiceError, RuntimeError):
    """The server could not write a merged model; the message is its reason."""
