"""Results of a study's closing stages, which the table `documents` has as JSON by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from workers.types import VerificationReport

__all__ = ["CANARIES", "VERIFICATION", "Canaries", "Verification", "read_canaries", "read_verification"]

CANARIES, VERIFICATION = "canaries", "verification"


@dataclass(frozen=True)
class Canaries:
    """The last canaries of the engines.

    `samples_not_checked` counts the samples after the last canary that their engine passed, None before the study's
    end. `skipped` are the reasons of canaries that could not be made, by replica.
    """

    samples_not_checked: int | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verification:
    """The reports of a verification; `reason` is why no trial was to be verified."""

    reports: tuple[VerificationReport, ...] = ()
    reason: str | None = None


_CANARIES = TypeAdapter(Canaries)
_VERIFICATION = TypeAdapter(Verification)


def read_canaries(document: Mapping[str, Any] | None) -> Canaries:
    """The stored canaries; None: nothing is stored."""
    return _CANARIES.validate_python(document or {})


def read_verification(document: Mapping[str, Any] | None) -> Verification:
    """The stored verification; None: nothing is stored. Earlier versions compared values only."""
    found = dict(document or {})
    found["reports"] = [_with_kinds(report) for report in found.get("reports", ())]
    return _VERIFICATION.validate_python(found)


def _with_kinds(report: Mapping[str, Any]) -> dict[str, Any]:
    tolerance = report["tolerance"]
    differences = [
        {"what": "value", "is_beyond": found["top2_gap"] > tolerance, **found} for found in report["differences"]
    ]
    return {**report, "differences": differences}
