"""Charts as plain HTML and SVG strings: no scripts, nothing loaded from elsewhere.

Horizontal positions are percentages and vertical ones pixels, so a chart fills whatever width it gets while its text
keeps its size. Colours are CSS classes and variables, so that the style sheet handles light and dark mode. Marks have
a title, which browsers show as a tooltip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

__all__ = [
    "Bar",
    "Cell",
    "Interval",
    "Legend",
    "Levels",
    "Plot",
    "Scale",
    "Shape",
    "forest",
    "heatmap",
    "legend",
    "nice_scale",
    "stacked_bar",
]

Shape = Literal["circle", "diamond", "square", "cross"]

# Outlines around (0, 0) of the shapes that are not circles.
OUTLINES = {"diamond": "M-5.5 0 0-5.5 5.5 0 0 5.5Z", "square": "M-4-4H4V4H-4Z", "cross": "M-3-3 3 3M-3 3 3-3"}

# Pixels: room for tick labels and axis title under a plot, for tick labels left of it, and above its highest point.
BOTTOM, LEFT, TOP = 40, 46, 10
ROW = 26

# Letters of a heatmap's column names that are shown.
MAX_HEAD = 13

# Values closer together are drawn as one: a step between them would be too small for a float.
MIN_RANGE = 1e-300


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` with ticks at multiples of `step`."""

    low: float
    high: float
    step: float

    def at(self, value: float) -> float:
        """Position in [0, 1]; values beyond the ends are drawn at the ends."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def ticks(self) -> tuple[float, ...]:
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        return tuple(index * self.step for index in range(first, last + 1))

    def text(self, tick: float) -> str:
        """How a tick is labelled."""
        decimals = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return f"{tick + 0.0:,.{decimals}f}"


@dataclass(frozen=True)
class Levels(Scale):
    """Named values at equal distances: the i-th of `names` is at i + 1."""

    names: tuple[str, ...] = ()

    def text(self, tick: float) -> str:
        return self.names[round(tick) - 1] if 1 <= round(tick) <= len(self.names) else ""


def nice_scale(values: Iterable[float], *, count: int = 5, bounds: tuple[float, float] | None = None) -> Scale:
    """The scale of about `count` round steps (1, 2 or 5 times a power of ten) that holds all `values`.

    It does not reach beyond `bounds`, unless values do. Without values it runs from 0 to 1.
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


class Plot:
    """Builds an x-y chart: add marks in painting order, then `render`."""

    def __init__(
        self, x: Scale, y: Scale, *, label: str, x_title: str = "", y_title: str = "", height: int = 280
    ) -> None:
        """`label` describes the chart in a sentence, for screen readers."""
        self.x, self.y, self.height = x, y, height
        self._label, self._x_title, self._y_title = label, x_title, y_title
        self._parts: list[str] = []

    def _x(self, value: float) -> str:
        return f"{100 * self.x.at(value):.2f}%"

    def _y(self, value: float) -> str:
        return f"{TOP + (1 - self.y.at(value)) * (self.height - TOP - BOTTOM):.1f}"

    def point(
        self,
        x: float,
        y: float,
        *,
        css: str,
        shape: Shape = "circle",
        title: str = "",
        style: str = "",
        size: float = 4,
    ) -> None:
        tip = f"<title>{escape(title)}</title>" if title else ""
        look = f'class="{css}"' + (f' style="{style}"' if style else "")
        if shape == "circle":
            self._parts.append(f'<circle cx="{self._x(x)}" cy="{self._y(y)}" r="{size}" {look}>{tip}</circle>')
        else:
            outline = f'<path d="{OUTLINES[shape]}" {look}>{tip}</path>'
            self._parts.append(f'<svg x="{self._x(x)}" y="{self._y(y)}" overflow="visible">{outline}</svg>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, css: str) -> None:
        self._parts.append(
            f'<line x1="{self._x(x1)}" y1="{self._y(y1)}" x2="{self._x(x2)}" y2="{self._y(y2)}" class="{css}"/>'
        )

    def steps(self, points: Sequence[tuple[float, float]], *, css: str) -> None:
        """A staircase through `points`: from each along x, then along y to the next."""
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            self.line(x1, y1, x2, y1, css=css)
            self.line(x2, y1, x2, y2, css=css)

    def bar(self, x1: float, x2: float, y: float, *, css: str, style: str = "", title: str = "") -> None:
        """A level line from x1 to x2."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        look = f'class="{css}"' + (f' style="{style}"' if style else "")
        at = self._y(y)
        self._parts.append(f'<line x1="{self._x(x1)}" x2="{self._x(x2)}" y1="{at}" y2="{at}" {look}>{tip}</line>')

    def curve(self, points: Sequence[tuple[float, float]], *, css: str, style: str = "") -> None:
        """Straight lines from each of `points` to the next."""
        look = f'class="{css}"' + (f' style="{style}"' if style else "")
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            ends = f'x1="{self._x(x1)}" y1="{self._y(y1)}" x2="{self._x(x2)}" y2="{self._y(y2)}"'
            self._parts.append(f"<line {ends} {look}/>")

    def text(self, x: float, y: float, text: str, *, css: str = "note", dy: float = 0) -> None:
        """Beside the point (x, y), on the side where there is room."""
        # A letter takes about 2.5 % of the narrowest plots.
        is_right = self.x.at(x) + 0.025 * len(text) > 1.02
        anchor, dx = ("end", -9) if is_right else ("start", 9)
        self._parts.append(
            f'<text x="{self._x(x)}" y="{self._y(y)}" dx="{dx}" dy="{dy + 4:.0f}" text-anchor="{anchor}" '
            f'class="{css}">{escape(text)}</text>'
        )

    def render(self) -> Markup:
        left = [
            f'<text x="{LEFT - 8}" y="{self._y(tick)}" dy="4" text-anchor="end">{self.y.text(tick)}</text>'
            for tick in self.y.ticks
        ]
        grid = [
            f'<line x1="0" x2="100%" y1="{self._y(tick)}" y2="{self._y(tick)}" class="grid"/>' for tick in self.y.ticks
        ]
        base = self.height - BOTTOM
        for tick in self.x.ticks:
            at = self._x(tick)
            grid.append(f'<line x1="{at}" x2="{at}" y1="{base}" y2="{base + 4}" class="axis"/>')
            grid.append(f'<text x="{at}" y="{base + 17}" text-anchor="middle">{self.x.text(tick)}</text>')
        grid.append(f'<line x1="0" x2="100%" y1="{base}" y2="{base}" class="axis"/>')
        titles = f'<text x="100%" y="{self.height - 6}" text-anchor="end" class="title">{escape(self._x_title)}</text>'
        above = f'<div class="ytitle">{escape(self._y_title)}</div>' if self._y_title else ""
        return Markup(
            f'{above}<div class="frame" role="img" aria-label="{escape(self._label)}">'
            f'<svg width="{LEFT}" height="{self.height}" aria-hidden="true">{"".join(left)}</svg>'
            f'<svg class="plot" height="{self.height}" aria-hidden="true">{"".join(grid)}{titles}'
            f"{''.join(self._parts)}</svg></div>"
        )


@dataclass(frozen=True)
class Cell:
    """A cell of a heatmap: `share` in [-1, 1] is its colour, from one extreme over none to the other. It spans `span`
    columns.
    """

    column: int
    share: float
    title: str
    span: int = 1


def heatmap(
    rows: Sequence[tuple[str, Sequence[Cell]]], columns: Sequence[str], *, label: str, row_height: int = 18
) -> Markup:
    """Named rows of cells under named columns, whose names are cut where they are long."""
    width = 12 + 7 * max((len(name) for name, _ in rows), default=0)
    heads = [name if len(name) <= MAX_HEAD else f"{name[: MAX_HEAD - 1]}…" for name in columns]
    top = 14 + 5 * max((len(name) for name in heads), default=0)
    height = top + row_height * len(rows) + 4
    share = 100 / max(1, len(columns))
    names, parts = [], []
    for index, (head, name) in enumerate(zip(heads, columns, strict=True)):
        # A nested drawing moves the origin to a percentage, which a rotation cannot.
        text = f'<text transform="rotate(-58)" x="2" y="0">{escape(head)}<title>{escape(name)}</title></text>'
        at = (index + 0.5) * share
        parts.append(f'<svg x="{at:.2f}%" y="{top - 6:.0f}" overflow="visible">{text}</svg>')
    every = max(1, math.ceil(11 / row_height))
    for index, (name, cells) in enumerate(rows):
        y = top + row_height * index
        if index % every == 0:
            place = f'x="{width - 8:.0f}" y="{y + row_height / 2 + 4:.1f}"'
            names.append(f'<text {place} text-anchor="end">{escape(name)}</text>')
        for cell in cells:
            place = f'x="{cell.column * share:.2f}%" width="{cell.span * share:.2f}%" y="{y}" height="{row_height}"'
            css = "cell plus" if cell.share >= 0 else "cell minus"
            style = f"--v:{min(1.0, abs(cell.share)):.0%}"
            parts.append(f'<rect {place} class="{css}" style="{style}"><title>{escape(cell.title)}</title></rect>')
    return Markup(
        f'<div class="frame" role="img" aria-label="{escape(label)}">'
        f'<svg width="{width:.0f}" height="{height:.0f}" aria-hidden="true" class="names">{"".join(names)}</svg>'
        f'<svg class="plot heat" height="{height:.0f}" aria-hidden="true">{"".join(parts)}</svg></div>'
    )


@dataclass(frozen=True)
class Interval:
    """A row of a forest plot. `css` classes its marks, e.g. by origin."""

    label: str
    value: float
    low: float
    high: float
    css: str
    title: str = ""


def forest(
    rows: Sequence[Interval],
    scale: Scale,
    *,
    label: str,
    reference: float | None = None,
    with_bars: bool = False,
    label_width: int = 150,
) -> Markup:
    """One row per interval: its label, a line from low to high, a dot at the value; with a dashed line at `reference`.

    `with_bars` draws a bar from the left end of the scale to each value.
    """
    height = ROW * len(rows) + 26
    base = height - 24

    def at(value: float) -> str:
        return f"{100 * scale.at(value):.2f}%"

    names, parts = [], []
    for tick in scale.ticks:
        x = at(tick)
        parts.append(f'<line x1="{x}" x2="{x}" y1="2" y2="{base}" class="grid"/>')
        parts.append(f'<text x="{x}" y="{base + 16}" text-anchor="middle">{scale.text(tick)}</text>')
    if reference is not None:
        parts.append(f'<line x1="{at(reference)}" x2="{at(reference)}" y1="2" y2="{base}" class="reference"/>')
    for index, row in enumerate(rows):
        y = ROW * index + ROW // 2 + 1
        css = escape(row.css)
        names.append(
            f'<text x="{label_width - 12}" y="{y + 4}" text-anchor="end" class="{css}">{escape(row.label)}</text>'
        )
        tip = f"<title>{escape(row.title or row.label)}</title>"
        if with_bars:
            parts.append(f'<rect x="0" y="{y - 7}" width="{at(row.value)}" height="14" class="bar {css}">{tip}</rect>')
        parts.append(
            f'<line x1="{at(row.low)}" x2="{at(row.high)}" y1="{y}" y2="{y}" class="whisker {css}"/>'
            f'<circle cx="{at(row.value)}" cy="{y}" r="4.5" class="dot {css}">{tip}</circle>'
        )
    return Markup(
        f'<div class="frame" role="img" aria-label="{escape(label)}">'
        f'<svg width="{label_width}" height="{height}" aria-hidden="true" class="names">{"".join(names)}</svg>'
        f'<svg class="plot" height="{height}" aria-hidden="true">{"".join(parts)}</svg></div>'
    )


@dataclass(frozen=True)
class Bar:
    """A part of a stacked bar; `share` is in [0, 1]."""

    label: str
    share: float
    style: str


def stacked_bar(parts: Sequence[Bar]) -> Markup:
    """Parts side by side, as wide as their shares."""
    pieces = "".join(
        f'<i style="width:{100 * part.share:.2f}%;{part.style}" title="{escape(part.label)} {part.share:.0%}"></i>'
        for part in parts
        if part.share > 0
    )
    return Markup(f'<span class="stack" aria-hidden="true">{pieces}</span>')


@dataclass(frozen=True)
class Legend:
    """One entry of a legend: a mark as it is drawn in the chart, and what it means."""

    label: str
    css: str
    shape: Shape | Literal["line"] = "circle"
    style: str = ""


def legend(entries: Sequence[Legend]) -> Markup:
    items = []
    for entry in entries:
        look = f'class="{entry.css}"' + (f' style="{entry.style}"' if entry.style else "")
        if entry.shape == "circle":
            mark = f'<circle cx="8" cy="8" r="4.5" {look}/>'
        elif entry.shape == "line":
            mark = f'<line x1="0" x2="16" y1="8" y2="8" {look}/>'
        else:
            mark = f'<path transform="translate(8 8)" d="{OUTLINES[entry.shape]}" {look}/>'
        items.append(f'<li><svg width="16" height="16" aria-hidden="true">{mark}</svg>{escape(entry.label)}</li>')
    return Markup(f'<ul class="legend">{"".join(items)}</ul>')
