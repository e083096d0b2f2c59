"""Edits of stored jobs: changes of the labels, such as name and tags, that jobs of every kind have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from search_spaces.section import Line, Name

__all__ = ["LABELS", "JobEdit", "differences"]

# Options that do not affect the job's work.
LABELS = ("name", "description", "tags", "notes", "priority")


class JobEdit(BaseModel):
    """Body of a request that edits a job; options that are not in the body keep their values."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[Name, Field(max_length=128)] = ""
    description: Annotated[str, Field(max_length=2000, description="What the job is for.")] | None = None
    tags: Annotated[
        list[Annotated[Line, Field(min_length=1, max_length=64)]],
        Field(max_length=20, description="Words to find it by."),
    ] = []
    notes: Annotated[str, Field(max_length=20_000, description="What was learned from it.")] | None = None
    priority: Annotated[
        int,
        Field(
            ge=-100, le=100, description="Waiting jobs with a larger one start first; above 0 is for administrators."
        ),
    ] = 0


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], *, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the options that differ between the documents `before` and `after`, each as (dotted path, old, new value).

    A value is None if the document does not have the option. `prefix` is put before each path.
    """
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, prefix=f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new
