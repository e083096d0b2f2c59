"""Void samples: those that an engine scored after the last canary it passed, and before it failed a check."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from service.store import schema

__all__ = ["void_samples"]


def void_samples(*columns: Any) -> sa.Select[Any]:
    """Select columns of the void samples, of their `evidence` and of the `engine_faults` that void them."""
    samples, evidence, faults = schema.samples, schema.evidence, schema.engine_faults
    return (
        sa.select(*columns)
        .select_from(samples)
        .join(evidence, evidence.c.id == samples.c.evidence)
        .join(faults, (faults.c.replica == evidence.c.replica) & (evidence.c.canaries >= faults.c.canaries))
    )
