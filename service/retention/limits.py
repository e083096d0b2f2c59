"""Limits on the data kept of ended jobs, as the command line's option `--keep` states them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from service.disk import parse_bytes
from service.errors import Conflict

__all__ = ["FILES", "JOBS", "KINDS", "RESPONSES", "Limit", "limits_of", "parse_keep"]

JOBS, RESPONSES, FILES = "jobs", "responses", "files"

# Descriptions of the kinds of data. If a job is removed, its data of all other kinds are removed too.
KINDS = {
    JOBS: "jobs that have ended, with all their results, models and files",
    RESPONSES: "responses and tokens of scored samples; their values and scores are kept",
    FILES: "files of drivers, such as those of Ray Tune and the checkpoints of trainings",
}

UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@dataclass(frozen=True)
class Limit:
    """Limits on the age and the size of one kind of kept data, such as model responses.

    `age_s` is the largest number of seconds since the job ended. `num_bytes` is the largest size of the data of all
    jobs together. None means no limit.
    """

    age_s: float | None = None
    num_bytes: int | None = None


def parse_keep(text: str) -> tuple[str, Limit]:
    """Parse a limit on kept data, such as "responses=30d" or "jobs=180d,50GB", into the kind of data and the limit.

    Raises ValueError for an invalid text.
    """
    kind, sign, given = text.partition("=")
    if kind not in KINDS or not sign:
        raise ValueError(f"{text!r} is not a limit; write KIND=LIMIT with one of {', '.join(KINDS)}, as responses=30d")
    age_s: float | None = None
    num_bytes: int | None = None
    for part in given.split(","):
        if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", part)) and age_s is None and float(match[1]) > 0:
            age_s = float(match[1]) * UNITS_S[match[2]]
        elif match is None and num_bytes is None:
            try:
                num_bytes = parse_bytes(part)
            except ValueError:
                raise ValueError(_refusal(text, part)) from None
        else:
            raise ValueError(_refusal(text, part))
    return kind, Limit(age_s, num_bytes)


def _refusal(text: str, part: str) -> str:
    return f"{text!r}: {part!r} is not accepted; give an age such as 12h, 30d or 8w, a size such as 5GB, or 30d,5GB"


def limits_of(given: Iterable[tuple[str, Limit]]) -> dict[str, Limit]:
    """Collect limits on kept data in a dict, keyed by kind of data, such as "responses".

    Raises Conflict if a kind is given twice.
    """
    found: dict[str, Limit] = {}
    for kind, limit in given:
        if kind in found:
            raise Conflict(f"--keep {kind} is given twice; write one, with an age and a size as 30d,5GB")
        found[kind] = limit
    return found
