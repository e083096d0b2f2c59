"""Errors of running studies. Each class says what the caller does next.

ServiceError
├── NotFound       (KeyError)      there is no such study, trial or file
├── Conflict       (RuntimeError)  the state forbids it: another run holds the directory, another study lives there
├── StaleAttempt   (RuntimeError)  stop: a newer driver owns the study
└── StudyFailed    (RuntimeError)  the study cannot go on; finished work is kept
"""

from __future__ import annotations

__all__ = ["Conflict", "NotFound", "ServiceError", "StaleAttempt", "StudyFailed"]


class ServiceError(Exception):
    """Root of this package's errors."""


class NotFound(ServiceError, KeyError):
    """There is no such thing; the message names it and what there is."""

    def __str__(self) -> str:
        return str(self.args[0])


class Conflict(ServiceError, RuntimeError):
    """The request is well formed, but not possible in the present state."""


class StaleAttempt(ServiceError, RuntimeError):
    """A newer attempt at the same study has taken over; nothing was written."""


class StudyFailed(ServiceError, RuntimeError):
    """The study stopped for good; the message is its reason."""
