"""The registry as a table for people; README.md beside this file holds it."""

from __future__ import annotations

from workers.merge_methods import METHODS, MergeMethod

__all__ = ["table"]


def table() -> str:
    """Markdown: each method with its operands, coefficients, source, variant and mergekit's name for it."""
    rows = [
        ("method", "sources", "coefficients", "source", "what it is, and where it deviates", "in mergekit"),
        ("---",) * 6,
        *(_row(method) for method in METHODS.values()),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _row(method: MergeMethod) -> tuple[str, ...]:
    spec = method.spec
    count = f"{spec.min_sources}" if spec.max_sources == spec.min_sources else f"{spec.min_sources} or more"
    operands = f"{count}{', in order' if spec.is_ordered else ''}{', base' if spec.needs_base else ''}"
    coefficients = [
        f"{c.name}{' (per model)' if c.per_model else ''}{'' if c.default is None else f' = {c.default:g}'}"
        for c in spec.coefficients
    ] + (["seed"] if spec.takes_seed else [])
    return (
        f"`{method.name}`",
        operands,
        ", ".join(coefficients) or "none",
        method.source,
        method.variant,
        method.peer or "not there",
    )
