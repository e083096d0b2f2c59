"""Report picture of the best trial's coefficients: one heatmap for each expert, layers by components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.results.record import RunRecord
from service.results.report.charts import Cell, heatmap
from service.results.report.marks import evenly
from service.results.series.coefficients import Coefficient, coefficients

__all__ = ["coefficients_picture"]

# A heatmap paints at most this many layers, and a report this many heatmaps.
MAX_LAYERS, MAX_EXPERTS = 128, 16

# Height of a row, and the largest height of all rows of a heatmap together, in pixels.
ROW, MAX_HEIGHT = 18, 560


def coefficients_picture(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's heatmaps of the best trial's coefficients.

    Returns None if the best trial has no coefficients in layers.
    """
    found = coefficients(run).values
    layers = sorted({c.layer for c in found if c.layer is not None})
    if not layers:
        return None
    largest = max(abs(c.value) for c in found) or 1.0
    experts = list(dict.fromkeys(c.expert for c in found))
    columns = list(dict.fromkeys(c.part for c in found if c.layer is not None))
    return {
        "charts": [
            {
                "name": expert,
                "svg": _heatmap(expert, [c for c in found if c.expert == expert], layers, columns, largest),
            }
            for expert in experts[:MAX_EXPERTS]
        ],
        "num_left_out": max(0, len(experts) - MAX_EXPERTS),
        "low": min(c.value for c in found),
        "high": max(c.value for c in found),
        "largest": largest,
    }


def _heatmap(
    expert: str, found: Sequence[Coefficient], layers: Sequence[int], columns: Sequence[str], largest: float
) -> Any:
    """Draw the coefficients `found` of one expert as a heatmap, with a row for each layer and a column for each part.

    `layers` are the numbers of the layers from input to output; if there are too many for the figure, only evenly
    spaced layers get a row. `columns` are the names of the parts of a layer. The coefficients outside of the layers,
    such as the embedding's coefficient, get separate rows above or below the rows of the layers. A coefficient of the
    size `largest` has the full colour.
    """
    inside = [index for index, c in enumerate(found) if c.layer is not None]
    shown = evenly(layers, MAX_LAYERS)
    column_of = {name: index for index, name in enumerate(columns)}

    def outside(part: Sequence[Coefficient]) -> list[tuple[str, list[Cell]]]:
        return [(_short(c.part), [Cell(0, c.value / largest, _title(expert, c), span=len(columns))]) for c in part]

    by_layer: dict[int, list[Cell]] = {layer: [] for layer in shown}
    for c in found:
        if c.layer in by_layer:
            by_layer[c.layer].append(Cell(column_of[c.part], c.value / largest, _title(expert, c)))
    rows = [
        *outside([c for c in found[: inside[0]] if c.layer is None]),
        *((f"layer {layer}", cells) for layer, cells in by_layer.items()),
        *outside([c for c in found[inside[0] :] if c.layer is None]),
    ]
    return heatmap(
        rows,
        [_short(name) for name in columns] if len(columns) > 1 else [],
        label=f"coefficients of {expert} by layer{' and component' if len(columns) > 1 else ''}",
        row_height=max(4, min(ROW, MAX_HEIGHT // len(rows))),
    )


def _short(part: str) -> str:
    """Shorten `part`, the name of a tensor, to the last words of the name, so that it fits into a chart."""
    return part.rpartition(".")[2] if part.count(".") <= 1 else ".".join(part.split(".")[-2:])


def _title(expert: str, c: Coefficient) -> str:
    where = " ".join(filter(None, ["" if c.layer is None else f"layer {c.layer}", c.part]))
    return f"{expert}, {where}: {c.value:.3f}"
