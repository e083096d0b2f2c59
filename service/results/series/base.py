"""Class `Chart`: a function that computes a chart's data series from a study, with a name and a title."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter

from service.results.record import RunRecord
from service.types import JobRecord, TrialRecord

__all__ = ["Chart", "chart"]

Series = TypeVar("Series")


@dataclass(frozen=True)
class Chart(Generic[Series]):
    """Chart of a study: a function that computes the chart's data series from the study's run record.

    The function's name is the chart's name, and its docstring is the chart's title. The series is a frozen dataclass,
    whose fields are the keys of the API's JSON. `place` is the chart's position in lists of charts: lists are sorted by
    `place`. `of_trial` is a function that computes the series of a given trial; it is None if the chart does not show a
    single trial.
    """

    compute: Callable[[RunRecord], Series]
    place: int
    of_trial: Callable[[JobRecord, TrialRecord], Series] | None = None

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
        """Compute the chart's data for `run` as JSON text.

        Fields that the class of the data declares with pydantic's `exclude` are left out.
        """
        return self._adapter.dump_json(self(run))

    def trial_json(self, study: JobRecord, trial: TrialRecord) -> bytes:
        """Compute the chart's data for one trial of a study as JSON text; the chart must have `of_trial`."""
        assert self.of_trial is not None
        return self._adapter.dump_json(self.of_trial(study, trial))

    def document(self, run: RunRecord) -> Any:
        """Compute the chart's data for `run` as JSON types.

        Fields that the class of the data declares with pydantic's `exclude` are left out.
        """
        return self._adapter.dump_python(self(run))


def chart(
    *, place: int, of_trial: Callable[[JobRecord, TrialRecord], Any] | None = None
) -> Callable[[Callable[[RunRecord], Series]], Chart[Series]]:
    """Make a decorator that declares a function as a chart.

    The function's name is the chart's name, its docstring is the title, and its return type is the type of the series.
    `place` is the chart's position in lists of charts, which are sorted by it. A chart of a single trial shows the best
    trial of a run, and needs `of_trial`, which computes the series of any other trial; for charts of several trials,
    `of_trial` is None.
    """

    def declare(compute: Callable[[RunRecord], Series]) -> Chart[Series]:
        return Chart(compute, place, of_trial)

    return declare
