"""Markdown table of the merge methods, for the README.md in this folder.

Run the module to print the table: `python -m workers.merging.methods.table`.
"""

from __future__ import annotations

from search_spaces.methods import METHODS
from search_spaces.methods.base import Coefficient, MergeMethod, PairShare, Range

__all__ = ["table"]


def table() -> str:
    """The merge methods as a Markdown table with one row for each method.

    The columns are the sources, the coefficients, the ranges in which studies search the coefficients, the publication,
    the variant of the method, and the name of the same method in mergekit.
    """
    rows = [
        ("method", "sources", "coefficients", "searched", "source", "what it is, and where it deviates", "in mergekit"),
        ("---",) * 7,
        *(_row(method) for method in METHODS.values()),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _row(method: MergeMethod) -> tuple[str, ...]:
    count = f"{method.min_sources}" if method.max_sources == method.min_sources else f"{method.min_sources} or more"
    sources = f"{count}{', in order' if method.is_ordered else ''}{', base' if method.needs_base else ''}"
    coefficients = [
        f"{c.name}{' (per model)' if c.per_model else ''}{'' if c.default is None else f' = {c.default:g}'}"
        for c in method.coefficients
    ] + (["seed"] if method.takes_seed else [])
    return (
        f"`{method.name}`",
        sources,
        ", ".join(coefficients) or "none",
        ", ".join(filter(None, map(_searched, method.coefficients))) or "nothing",
        method.source,
        method.variant,
        _in_mergekit(method),
    )


def _searched(coefficient: Coefficient) -> str | None:
    match coefficient.searched:
        case Range(low=low, high=high, per_expert=per_expert):
            return f"{coefficient.name} {low:g} to {high:g}{' per expert' if per_expert else ''}"
        case PairShare(low=low, high=high):
            return f"t {low:g} to {high:g}"
        case _:
            return None


def _in_mergekit(method: MergeMethod) -> str:
    counterpart = method.mergekit
    if counterpart is None:
        return "not there"
    settings = (f"{name}: {str(value).lower()}" for name, value in counterpart.written_settings.items())
    others = (other.mergekit for other in METHODS.values() if other.mergekit is not None)
    has_choice = any(other.method == counterpart.method and other.base != counterpart.base for other in others)
    with_base = " with base_model" if has_choice and counterpart.base == "recipe" else ""
    return ", ".join([counterpart.method, *settings]) + with_base


if __name__ == "__main__":
    print(table(), end="")
