"""Data series of charts, computed by the same functions for the report and the API.

A module of this package that declares a chart with `@chart` is found automatically.

- `base`: the `Chart` class and the `@chart` decorator
- `history`: the values of each trial at each rung that it finished, and the best trial so far
- `front`: trials at full budget, and the Pareto front
- `holdout`: held-out estimates
- `recipe`: the merge of the best trial
- `budget`: the number of trials at each rung, and the number of samples scored
- `descents`: losses over the gradients of each descent
- `policies`: the mean outcome of each policy's trials in each iteration
- `coefficients`: the best trial's coefficients by layer, component and expert
- `path`: the layer path of the best trial, with the scales of its layers
- `races`: trials that were stopped early, with rung and rule
- `directions`: directions and scales of merges in the space `m3`, and the best merge of each method
- `rungs`: the outcomes of trials at each rung of each bracket
- `hypervolume`: the hypervolume of the front, over the samples spent
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from service.results.series.base import Chart

__all__ = ["CHARTS", "TRIAL_CHARTS"]


def _declared() -> list[Chart[Any]]:
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    charts = [value for module in modules for value in vars(module).values() if isinstance(value, Chart)]
    return sorted(charts, key=lambda chart: chart.place)


CHARTS: dict[str, Chart[Any]] = {chart.name: chart for chart in _declared()}

# Charts of a single trial.
TRIAL_CHARTS = {name: chart for name, chart in CHARTS.items() if chart.of_trial is not None}
