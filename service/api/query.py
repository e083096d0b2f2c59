"""Refusal of query parameters that are given several times where one value is expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from fastapi import Request
from fastapi.dependencies.utils import get_flat_dependant

from service.errors import InvalidQuery

__all__ = ["refuse_repetitions"]


async def refuse_repetitions(request: Request) -> None:
    """Raise InvalidQuery if a parameter of one value is given several times in the query of `request`.

    FastAPI would take the last value, and ignore the others without a word.
    """
    counts = Counter(name for name, _ in request.query_params.multi_items())
    if len(counts) == counts.total():
        return
    fields = get_flat_dependant(request.scope["route"].dependant).query_params
    single = {field.alias for field in fields if not any(map(_is_list, _kinds(field.field_info.annotation)))}
    for name, count in counts.items():
        if count > 1 and name in single:
            raise InvalidQuery(name, f"given {count} times; give it once")


def _kinds(annotation: Any) -> Iterator[Any]:
    """The type that `annotation` names and, of a union, its members; generic types without their arguments."""
    yield get_origin(annotation) or annotation
    for part in get_args(annotation):
        yield get_origin(part) or part


def _is_list(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, list | tuple | set | frozenset)
