"""Charts as plain HTML and SVG strings, without scripts or external files.

Horizontal positions are percentages and vertical positions are pixels, so a chart fills the available width while its
text keeps its size. Colours are CSS classes and variables, so that the style sheet handles light and dark mode. Marks
have a title, which browsers show as a tooltip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

from service.results.report.scales import Scale

__all__ = [
    "Bar",
    "Cell",
    "Interval",
    "Legend",
    "Plot",
    "Shape",
    "forest",
    "heatmap",
    "legend",
    "stacked_bar",
]

Shape = Literal["circle", "diamond", "square", "cross"]

# Outlines around (0, 0) of the shapes that are not circles.
OUTLINES = {"diamond": "M-5.5 0 0-5.5 5.5 0 0 5.5Z", "square": "M-4-4H4V4H-4Z", "cross": "M-3-3 3 3M-3 3 3-3"}

# Room under a plot for tick labels and axis title, left of it for tick labels, and above its highest point, in pixels.
BOTTOM, LEFT, TOP = 40, 46, 10
ROW = 26

# Maximum length of a heatmap's column names, of other names in charts, and of an axis title, in characters.
MAX_HEAD, MAX_NAME, MAX_TITLE = 13, 20, 34

# Size of a letter, and the width of the narrowest plots, in pixels: texts that are apart there are apart in all plots.
LETTER, LINE, NARROWEST = 7.2, 13, 230

# A plot of more ticks than this leaves out every second one's text on narrow screens.
MAX_NARROW_TICKS = 5


class Plot:
    """Builder of an x-y chart: its methods add shapes in painting order, and the method `render` returns the chart."""

    def __init__(
        self, x: Scale, y: Scale, *, label: str, x_title: str = "", y_title: str = "", height: int = 280
    ) -> None:
        """Start an empty chart.

        Args:
            x: Horizontal scale.
            y: Vertical scale.
            label: Sentence that describes the chart to screen readers.
            x_title: Title of the horizontal axis.
            y_title: Title above the vertical axis.
            height: Height in pixels.
        """
        self.x, self.y, self.height = x, y, height
        self._label, self._x_title, self._y_title = label, x_title, y_title
        self._parts: list[str] = []
        self._texts: list[_Text] = []

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
        """Draw a staircase through `points`: from each point along x, then along y to the next point.

        `css` is the CSS class of the lines.
        """
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            self.line(x1, y1, x2, y1, css=css)
            self.line(x2, y1, x2, y2, css=css)

    def bar(self, x1: float, x2: float, y: float, *, css: str, style: str = "", title: str = "") -> None:
        """Draw a horizontal line from (x1, y) to (x2, y), in the values of the axes.

        `css` is the line's CSS class, `style` is its inline style, and `title` is the text that browsers show at the
        line.
        """
        tip = f"<title>{escape(title)}</title>" if title else ""
        look = f'class="{css}"' + (f' style="{style}"' if style else "")
        at = self._y(y)
        self._parts.append(f'<line x1="{self._x(x1)}" x2="{self._x(x2)}" y1="{at}" y2="{at}" {look}>{tip}</line>')

    def curve(self, points: Sequence[tuple[float, float]], *, css: str, style: str = "") -> None:
        """Draw a polyline: straight lines from each of `points` to the next.

        `css` is the CSS class of the lines, and `style` is their inline style.
        """
        look = f'class="{css}"' + (f' style="{style}"' if style else "")
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            ends = f'x1="{self._x(x1)}" y1="{self._y(y1)}" x2="{self._x(x2)}" y2="{self._y(y2)}"'
            self._parts.append(f"<line {ends} {look}/>")

    def text(
        self, x: float, y: float, text: str, *, css: str = "note", dy: float = 0, is_movable: bool = False
    ) -> None:
        """Write text to the right of the point (x, y), or to the left if the text would leave the plot.

        `css` is the text's CSS class. `dy` moves the text down, in pixels. If a text with `is_movable` would overlap
        another text, it is written elsewhere around its point. If it would overlap another text at every place, it is
        left out. Texts of the class "strong" are placed first.
        """
        self._texts.append(_Text(self.x.at(x), float(self._y(y)), text, css=css, dy=dy, is_movable=is_movable))

    def _placed_texts(self) -> list[str]:
        taken: list[_Box] = []
        parts = []
        for text in sorted(self._texts, key=lambda text: "strong" not in text.css):
            for place in text.places(bottom=self.height - BOTTOM):
                if not text.is_movable or not any(place.overlaps(other) for other in taken):
                    taken.append(place)
                    parts.append(text.at(place))
                    break
        return parts

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
        grid += _tick_texts(self.x, base + 17)
        grid.append(f'<line x1="0" x2="100%" y1="{base}" y2="{base}" class="axis"/>')
        x_title = _cut(self._x_title, MAX_TITLE)
        titles = f'<text x="100%" y="{self.height - 6}" text-anchor="end" class="title">{x_title}</text>'
        above = f'<div class="ytitle">{escape(self._y_title)}</div>' if self._y_title else ""
        return Markup(
            f'{above}<div class="frame" role="img" aria-label="{escape(self._label)}">'
            f'<svg width="{LEFT}" height="{self.height}" aria-hidden="true">{"".join(left)}</svg>'
            f'<svg class="plot" height="{self.height}" aria-hidden="true">{"".join(grid)}{titles}'
            f"{''.join(self._parts)}{''.join(self._placed_texts())}</svg></div>"
        )


@dataclass(frozen=True)
class _Box:
    """Rectangle that a text would cover on the narrowest screen, in pixels from the plot's upper left corner.

    `anchor` is "start" if the text begins beside the point that it labels, and "end" if the text ends there. `dy` moves
    the text down, in pixels.
    """

    left: float
    right: float
    baseline: float
    anchor: Literal["start", "end"]
    dy: float

    def overlaps(self, other: _Box) -> bool:
        return self.left < other.right and other.left < self.right and abs(self.baseline - other.baseline) < LINE


@dataclass(frozen=True)
class _Text:
    """Text at a point of a plot: `x` is the share of the plot's width, and `y` is in pixels."""

    x: float
    y: float
    text: str
    css: str
    dy: float
    is_movable: bool

    def places(self, *, bottom: float) -> list[_Box]:
        """Possible positions of the text around its point, the best first.

        Positions below `bottom`, the height of the horizontal axis, are left out, because other texts are there.
        """
        width = LETTER * min(len(self.text), MAX_NAME)
        at = NARROWEST * self.x
        right = at + 9 + width <= NARROWEST + 8
        anchors: tuple[Literal["start", "end"], ...] = ("start", "end") if right else ("end", "start")
        if not self.is_movable:
            anchors = anchors[:1]
        found = []
        for dy in (self.dy, -self.dy) if self.is_movable else (self.dy,):
            for anchor in anchors:
                left = at + 9 if anchor == "start" else at - 9 - width
                box = _Box(left, left + width, self.y + dy + 4, anchor, dy)
                is_inside = box.left >= -LEFT and box.right <= NARROWEST + 8 and box.baseline <= bottom
                if is_inside or not self.is_movable:
                    found.append(box)
        return found

    def at(self, place: _Box) -> str:
        dx = 9 if place.anchor == "start" else -9
        return (
            f'<text x="{100 * self.x:.2f}%" y="{self.y:.1f}" dx="{dx}" dy="{place.dy + 4:.0f}" '
            f'text-anchor="{place.anchor}" class="{self.css}">{_cut(self.text, MAX_NAME)}</text>'
        )


def _tick_texts(scale: Scale, y: float) -> list[str]:
    """Draw the texts of a horizontal axis; if there are many, every second text is not shown on narrow screens."""
    thins = len(scale.ticks) > MAX_NARROW_TICKS
    parts = []
    for index, tick in enumerate(scale.ticks):
        css = "second" if thins and index % 2 else ""
        place = f'x="{100 * scale.at(tick):.2f}%" y="{y}" text-anchor="middle" class="{css}"'
        parts.append(f"<text {place}>{scale.text(tick)}</text>")
    return parts


def _cut(name: str, longest: int) -> Markup:
    """Content of an SVG text: the name or, if it is too long, its beginning and end, with the whole name as tooltip."""
    if len(name) <= longest:
        return escape(name)
    end = longest // 3
    return Markup("{}…{}<title>{}</title>").format(name[: longest - end - 1], name[-end:], name)


@dataclass(frozen=True)
class Cell:
    """Cell of a heatmap, `span` columns wide; `column` is the index of its first column.

    `share` in [-1, 1] gives its colour: 0 has no colour, -1 and 1 are the two extremes. `title` is the text that
    browsers show at the cell.
    """

    column: int
    share: float
    title: str
    span: int = 1


def heatmap(
    rows: Sequence[tuple[str, Sequence[Cell]]], columns: Sequence[str], *, label: str, row_height: int = 18
) -> Markup:
    """Draw a heatmap: named rows of cells under named columns.

    `rows` are pairs (name, cells). Long column names are cut. `label` is a sentence that describes the chart to screen
    readers. `row_height` is in pixels.
    """
    width = 14 + 7.6 * min(MAX_NAME, max((len(name) for name, _ in rows), default=0))
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
            names.append(f'<text {place} text-anchor="end">{_cut(name, MAX_NAME)}</text>')
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
    """A row of a forest plot: a value with its interval from `low` to `high`.

    `label` is the name of the row. `css` is the CSS class of the row's marks. `title` is the text that browsers show at
    the row.
    """

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
    label_width: int = 160,
) -> Markup:
    """Draw a forest plot: for each row its label, a line from low to high, and a dot at the value.

    Args:
        rows: The intervals.
        scale: Horizontal scale.
        label: Sentence that describes the chart to screen readers.
        reference: Value at which a dashed line is drawn.
        with_bars: Draw a bar from the left end of the scale to each value.
        label_width: Width of the labels in pixels.
    """
    height = ROW * len(rows) + 26
    base = height - 24

    def at(value: float) -> str:
        return f"{100 * scale.at(value):.2f}%"

    names, parts = [], []
    for tick in scale.ticks:
        x = at(tick)
        parts.append(f'<line x1="{x}" x2="{x}" y1="2" y2="{base}" class="grid"/>')
    parts += _tick_texts(scale, base + 16)
    if reference is not None:
        parts.append(f'<line x1="{at(reference)}" x2="{at(reference)}" y1="2" y2="{base}" class="reference"/>')
    for index, row in enumerate(rows):
        y = ROW * index + ROW // 2 + 1
        css = escape(row.css)
        names.append(
            f'<text x="{label_width - 12}" y="{y + 4}" text-anchor="end" class="{css}">'
            f"{_cut(row.label, MAX_NAME)}</text>"
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
    """A part of a stacked bar; `share`, in [0, 1], is its length.

    `label` is the name of the part, and `style` is its inline CSS style.
    """

    label: str
    share: float
    style: str


def stacked_bar(parts: Sequence[Bar]) -> Markup:
    """Draw a stacked bar: its parts side by side, as wide as their shares."""
    pieces = "".join(
        f'<i style="width:{100 * part.share:.2f}%;{part.style}" title="{escape(part.label)} {part.share:.0%}"></i>'
        for part in parts
        if part.share > 0
    )
    return Markup(f'<span class="stack" aria-hidden="true">{pieces}</span>')


@dataclass(frozen=True)
class Legend:
    """An entry of a legend: a symbol as drawn in the chart, and its meaning.

    `label` is the meaning. `shape` is the kind of the symbol, and `css` and `style` are its CSS class and inline style.
    """

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
