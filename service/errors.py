"""Exceptions of the service. Each class says what the caller does next.

ServiceError
├── NotFound       (KeyError)      the job, trial or file does not exist
├── Conflict       (RuntimeError)  not possible in the current state, e.g. the directory holds another run
│   └── InUse                      another process uses the directory: wait for it
├── InvalidQuery   (ValueError)    reject the request; names the parameter and what is accepted
├── LoginRefused   (RuntimeError)  the identity provider or this server does not let the user in
├── ProviderUnavailable (ConnectionError)  the identity provider does not answer, or not as it should: log in later
├── DatabaseUnavailable (ConnectionError)  the database does not answer: wait for it
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

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from service.schemas.api import FieldProblem, ProblemDocument

__all__ = [
    "Conflict",
    "DatabaseUnavailable",
    "ExportFailed",
    "InUse",
    "InvalidAnswer",
    "InvalidQuery",
    "LoginRefused",
    "NotFound",
    "ProviderUnavailable",
    "RequestRefused",
    "ServerUnreachable",
    "ServiceError",
    "StaleAttempt",
    "StudyFailed",
    "StudyUnusable",
]


class ServiceError(Exception):
    """Base class of the service's exceptions."""


class NotFound(ServiceError, KeyError):
    """Raised if a job, trial or file does not exist; the message names it."""

    def __str__(self) -> str:
        return str(self.args[0])


class Conflict(ServiceError, RuntimeError):
    """Raised if a request is valid but impossible in the current state, such as a download of an unfinished model."""


class InUse(Conflict):
    """Raised if another process uses a directory or a database; the message names it."""


class InvalidQuery(ServiceError, ValueError):
    """Raised if a parameter of a query over results is not accepted.

    Attributes:
        parameter: Name of the parameter.
        reason: Text that says what is wrong, and what is accepted.
    """

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(parameter, reason)
        self.parameter = parameter
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.parameter}: {self.reason}"


class LoginRefused(ServiceError, RuntimeError):
    """Raised if a login with the identity provider is refused; the message is the reason, without secrets.

    `code` is the kind of the reason, which the browser gets instead of the message: "expired" if there is no such login
    (any more), "user" if the user may not log in, and "refused" if the answer of the provider is not accepted.
    """

    def __init__(self, message: str, *, code: Literal["expired", "user", "refused"] = "refused") -> None:
        super().__init__(message)
        self.code = code


class ProviderUnavailable(ServiceError, ConnectionError):
    """Raised if the identity provider cannot be used at the moment; the message says why."""


class DatabaseUnavailable(ServiceError, ConnectionError):
    """Raised if the database does not answer; the message names it."""


class StaleAttempt(ServiceError, RuntimeError):
    """Raised if a driver writes to the store although a newer driver has taken over its job; nothing is written."""


class StudyFailed(ServiceError, RuntimeError):
    """Raised if a study has failed and cannot continue; the message is the reason."""


class StudyUnusable(ServiceError, RuntimeError):
    """Raised if an engine cannot run a study's models or tasks, although they passed the checks before it started."""


class RequestRefused(ServiceError, ValueError):
    """Raised by the client if the server refused a request.

    Attributes:
        problem: The server's problem document (RFC 9457).
        retry_after_s: Seconds after which a retry may succeed (the header Retry-After); None without this header.
    """

    def __init__(self, problem: ProblemDocument, retry_after_s: float | None = None) -> None:
        super().__init__(problem, retry_after_s)
        self.problem = problem
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """HTTP status of the server's response."""
        return self.problem["status"]

    @property
    def problems(self) -> list[FieldProblem]:
        """Problems that the server lists in its response, each with the field of the request that is wrong.

        If the server lists no problems, the result is one problem with an empty field.
        """
        return self.problem.get("problems") or [{"field": "", "message": self.problem["detail"]}]

    def __str__(self) -> str:
        return "\n".join(f"{p['field']}: {p['message']}" if p["field"] else p["message"] for p in self.problems)


class ServerUnreachable(ServiceError, ConnectionError):
    """Raised by the client if no server responds at the address that the message names."""


class InvalidAnswer(ServiceError, RuntimeError):
    """Raised by the client if a response is incomplete, or is not from a mergesearch server.

    The message names the address and what was received.
    """


class ExportFailed(ServiceError, RuntimeError):
    """Raised by the client if the server could not write a merged model; the message is the reason."""
