"""Report picture of the best trial's layer path: rows are models, columns are positions, colours are scales."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup, escape

from service.results.record import RunRecord
from service.results.series.path import PathPlot, PathStep, path

__all__ = ["path_picture"]

# Width and height of a cell, and room above the first row, in pixels.
WIDTH, HEIGHT, TOP = 24, 26, 18

# Least distance from 1 at which a scale has the full colour: by default, the searched ranges end there.
FAR = 0.5

MERGED = "merged"


def path_picture(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's picture of the best trial's layers: the source model and layer at each position.

    Returns None if the best trial has the layers of one model in their original order.
    """
    plot = path(run)
    if plot.is_plain:
        return None
    scales = [number for step in plot.steps for number in (step.scale, step.mlp_scale, step.weights)]
    far = max(FAR, *(abs(scale - 1) for scale in scales))
    foreign = sum(step.model is not None and step.layer != step.position for step in plot.steps)
    return {
        "svg": _drawing(plot, far),
        "num_layers": len(plot.steps),
        "num_moved": foreign,
        "has_scales": any(scale != 1 for scale in scales),
        "low": min(scales),
        "high": max(scales),
        "far": far,
        "scales_mlps": any(step.mlp_scale != 1 for step in plot.steps),
        "steps": [
            {
                "position": step.position,
                "model": step.model or MERGED,
                "layer": step.position if step.layer is None else step.layer,
                "scale": step.scale,
                "mlp_scale": step.mlp_scale,
                "weights": step.weights,
            }
            for step in plot.steps
        ],
    }


def _drawing(plot: PathPlot, far: float) -> Markup:
    rows: list[str | None] = [*plot.models]
    if any(step.model is None for step in plot.steps):
        rows.append(None)
    left = 16 + 8 * max(len(row or MERGED) for row in rows)
    width, height = left + WIDTH * len(plot.steps) + 8, TOP + HEIGHT * len(rows) + 6
    parts = []
    for index, row in enumerate(rows):
        y = TOP + HEIGHT * index + HEIGHT / 2 + 4
        parts.append(f'<text x="{left - 8}" y="{y:.0f}" text-anchor="end">{escape(row or MERGED)}</text>')
    for step in plot.steps:
        parts.append(_cell(step, left + WIDTH * step.position, TOP + HEIGHT * rows.index(step.model), far))
    label = f"layer path of trial {plot.trial}: {len(plot.steps)} layers; the steps are in the table below"
    return Markup(
        f'<svg class="path" role="img" aria-label="{escape(label)}" width="{width}" height="{height}">'
        f"{''.join(parts)}</svg>"
    )


def _cell(step: PathStep, x: float, y: float, far: float) -> str:
    """Draw one layer of a merge, `step`, as a box with the source layer's number, at the position (x, y) in pixels.

    The colour of the box shows the factor of the layer's output or, if that is 1, the factor of the output of its MLP.
    A line in the box shows the factor of the layer's weights by its colour. A factor that differs from 1 by `far` has
    the full colour.
    """
    layer = "" if step.layer is None else str(step.layer)
    title = f"position {step.position}: {step.model or MERGED}{f', layer {layer}' if layer else ''}"
    title += f", output times {step.scale:.3f}" if step.scale != 1 else ""
    title += f", MLP times {step.mlp_scale:.3f}" if step.mlp_scale != 1 else ""
    title += f", weights times {step.weights:.3f}" if step.weights != 1 else ""
    head = f'<text x="{x + WIDTH / 2:.0f}" y="12" text-anchor="middle" class="soft">{step.position}</text>'
    box = f'x="{x + 1}" y="{y + 1}" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="3"'
    line = f'x="{x + 1}" y="{y + HEIGHT - 5}" width="{WIDTH - 2}" height="4"'
    return (
        f"{head if step.position % 2 == 0 else ''}<g><title>{escape(title)}</title>"
        f"<rect {box} {_look(step.scale if step.scale != 1 else step.mlp_scale, far)}/>"
        + (f"<rect {line} {_look(step.weights, far)}/>" if step.weights != 1 else "")
        + f'<text x="{x + WIDTH / 2:.0f}" y="{y + HEIGHT / 2 + 4:.0f}" text-anchor="middle">{layer}</text></g>'
    )


def _look(scale: float, far: float) -> str:
    sign = "plus" if scale >= 1 else "minus"
    return f'class="cell {sign}" style="--v:{min(1.0, abs(scale - 1) / far):.0%}"'
