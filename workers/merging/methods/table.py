"""The registry as a table for people; README.md beside this file holds it."""

from __future__ import annotations

from search_spaces.parameters import Float
from search_spaces.spaces.lfs_methods import ComponentGroup
from search_spaces.spaces.lfs_ranges import METHODS as SEARCHED
from workers.merging.methods import METHODS, MergeMethod

__all__ = ["table"]


def table() -> str:
    """Markdown: each method with its operands, coefficients, the ranges in which studies search them, source, variant
    and mergekit's name for it."""
    rows = [
        ("method", "sources", "coefficients", "searched", "source", "what it is, and where it deviates", "in mergekit"),
        ("---",) * 7,
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
        _searched(method.name),
        method.source,
        method.variant,
        method.mergekit_equivalent or "not there",
    )


def _searched(name: str) -> str:
    if name not in SEARCHED:
        return "no"
    ranges = {}
    for parameter in SEARCHED[name].parameters(ComponentGroup("g", "base", ("one", "two"), (), {"one": (), "two": ()})):
        assert isinstance(parameter, Float)
        coefficient, *expert = parameter.name.removeprefix(f"g.{name}.").split(".")
        ranges[coefficient] = f"{coefficient} {parameter.low:g} to {parameter.high:g}{' per expert' if expert else ''}"
    return ", ".join(ranges.values()) or "nothing"
