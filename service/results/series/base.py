"""Class `Chart`: a function that computes a chart's data series from a study, with a name and a title."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter

from service.results.record import RunRecord

__all__ = ["Chart", "chart"]

Series = TypeVar("Series")


@dataclass(frozen=True)
class Chart(Generic[Series]):
    """A function that computes a chart's data series from a study's run record; it has a name and a title.

    The series is a frozen dataclass, whose fields are the keys of the API's JSON. Lists of charts are sorted by
    `place`.
    """

    compute: Callable[[RunRecord], Series]
    place: int

    def __call__(self, run: RunRecord) -> Series:
        return self.compute(run)

    @property
    def name(self) -> str:
        return self.compute.__name__

    @property
    def title(self) -> str:
        return (self.compute.__doc__ or "").strip()

    @cached_property
    def series_type(self) -> Any:
        return get_type_hints(self.compute)["return"]

    @cached_property
    def _adapter(self) -> TypeAdapter[Series]:
        return TypeAdapter(self.series_type)

    def json(self, run: RunRecord) -> bytes:
        """Compute the series of `run` as JSON text, without the fields that are declared with `exclude`."""
        return self._adapter.dump_json(self(run))

    def document(self, run: RunRecord) -> Any:
        """Compute the series of `run` as JSON types, without the fields that are declared with `exclude`."""
        return self._adapter.dump_python(self(run))


def chart(*, place: int) -> Callable[[Callable[[RunRecord], Series]], Chart[Series]]:
    """Make a decorator that declares a function as a chart.

    The function's name is the chart's name, its docstring is the title, and its return type is the type of the series.
    Lists of charts are sorted by `place`.
    """

    def declare(compute: Callable[[RunRecord], Series]) -> Chart[Series]:
        return Chart(compute, place)

    return declare
