"""Axis scales of charts: from values to positions, with ticks at round values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Levels", "Scale", "nice_scale"]

# Values closer together are drawn as one: a step between them would be too small for a float.
MIN_RANGE = 1e-300


@dataclass(frozen=True)
class Scale:
    """Scale of a chart's axis: values from `low` to `high`, with ticks at the multiples of `step`."""

    low: float
    high: float
    step: float

    def at(self, value: float) -> float:
        """Position of a value on the axis, in [0, 1]; a value outside the scale is at the nearest end."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def at_each(self, values: ArrayLike) -> NDArray[np.float64]:
        """Positions of many values on the axis, in [0, 1]; a value outside the scale is at the nearest end."""
        return np.clip((np.asarray(values, dtype=np.float64) - self.low) / (self.high - self.low), 0.0, 1.0)

    @property
    def ticks(self) -> tuple[float, ...]:
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        return tuple(index * self.step for index in range(first, last + 1))

    def text(self, tick: float) -> str:
        """Text at the axis for the value `tick`, with the decimals that the distance between ticks requires."""
        decimals = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return f"{tick + 0.0:,.{decimals}f}"


@dataclass(frozen=True)
class Levels(Scale):
    """Axis scale for named levels, such as models, at equal distances: the levels `names` are at 1, 2, 3 and so on."""

    names: tuple[str, ...] = ()

    def text(self, tick: float) -> str:
        return self.names[round(tick) - 1] if 1 <= round(tick) <= len(self.names) else ""


def nice_scale(values: Iterable[float], *, count: int = 5, bounds: tuple[float, float] | None = None) -> Scale:
    """Choose an axis scale with about `count` ticks at round values that contains all `values`.

    The step between ticks is 1, 2 or 5 times a power of ten. The scale does not reach beyond `bounds`, unless values
    lie beyond them. Without values, the scale runs from 0 to 1.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if high - low < MIN_RANGE:
        around = 0.5 * max(abs(low), abs(high)) if max(abs(low), abs(high)) >= MIN_RANGE else 0.5
        low, high = low - around, high + around
        if bounds is not None:
            low, high = max(low, min(bounds[0], finite[0])), min(high, max(bounds[1], finite[0]))
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    nice_low, nice_high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if bounds is not None:
        nice_low, nice_high = max(nice_low, min(bounds[0], low)), min(nice_high, max(bounds[1], high))
    return Scale(nice_low, nice_high, step)
