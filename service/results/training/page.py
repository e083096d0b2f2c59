"""Report of a fine-tuning: losses and evaluations on one page, in the style of a study's report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from service.results.report.charts import Legend, Plot, legend
from service.results.report.marks import NUM_COLOURS
from service.results.report.page import template
from service.results.report.scales import Scale, nice_scale
from service.results.report.texts import number_text
from service.results.training.pictures import analysis_context
from service.schemas.api import AnalysisDocument, CurvesDocument, ExpertCurvesDocument, LossPoint
from workers.training.finetuning.fleet import Pipeline

__all__ = ["render_training"]

# Where a loss is measured, after its value or the name of its expert.
AT_OFFSET, AT_WEIGHTS = ", at the offset", ", at the weights"

# After the name of an expert of the method tangent, whose linearization was evaluated.
LINEARIZED_MARK = ", linearized"

# The style of an expert's second line in a chart.
DASHED = "stroke-dasharray:5 3"


def render_training(
    pipeline: Pipeline,
    curves: CurvesDocument,
    *,
    state: str,
    reason: str | None = None,
    analysis: AnalysisDocument | None = None,
) -> str:
    """Render the report of a fine-tuning as one HTML document, at any stage of the training.

    Args:
        pipeline: The specification of the fine-tuning.
        curves: Losses and evaluations so far.
        state: State of the job, as text.
        reason: Reason of the state; None if the state has no reason.
        analysis: Analysis of the trained experts; None if it was not requested or is not computed yet.
    """
    experts = curves["experts"]
    names = sorted({name for expert in experts for point in expert["evaluations"] for name in point["values"]})
    rows = [
        {
            "name": expert["expert"],
            "method": spec.method.kind,
            "rate": f"{spec.training.learning_rate:g}",
            "steps": expert["loss"][-1]["step"] if expert["loss"] else 0,
            "loss": _last_loss(expert),
            "values": [_last(expert, name) for name in names],
        }
        for expert, spec in zip(experts, pipeline.experts.values(), strict=True)
    ]
    return template("training.html.j2").render(
        name=pipeline.name,
        base=next(iter(pipeline.experts.values())).base,
        state=state,
        reason=reason,
        rows=rows,
        names=names,
        loss=_losses(experts),
        evaluations=[{"name": name, "svg": _evaluations(experts, name)} for name in names],
        analysis=None if analysis is None else analysis_context(analysis),
        legend=_legend(experts),
        loss_legend=legend([Legend(line.name, "loss", "line", style=line.style) for line in _loss_lines(experts)]),
    )


class _LossLine(NamedTuple):
    """A curve of an expert's losses, with its name in the legend and its colour; the second of an expert is dashed."""

    name: str
    points: list[LossPoint]
    style: str
    fill: str


def _loss_lines(experts: Sequence[ExpertCurvesDocument]) -> list[_LossLine]:
    """The curves of losses where gradients are computed and, if they were measured, at the weights or at the offset."""
    lines = []
    for index, expert in enumerate(experts):
        alias, is_moved = expert["expert"], expert["loss_at"] == "offset"
        second = expert["weights_loss"] if is_moved else expert["offset_loss"]
        names = (f"{alias}{AT_OFFSET if is_moved else ''}", f"{alias}{AT_WEIGHTS if is_moved else AT_OFFSET}")
        lines.append(_LossLine(names[0], expert["loss"], _stroke(index), _fill(index)))
        if second:
            lines.append(_LossLine(names[1], second, f"{_stroke(index)};{DASHED}", _fill(index)))
    return lines


def _last_loss(expert: ExpertCurvesDocument) -> str:
    if not expert["loss"]:
        return ""
    text = number_text(expert["loss"][-1]["loss"])
    if expert["loss_at"] == "offset":
        text += AT_OFFSET
        if at_weights := expert["weights_loss"]:
            text += f"; {number_text(at_weights[-1]['loss'])}{AT_WEIGHTS}"
    return text


def _legend(experts: Sequence[ExpertCurvesDocument]) -> Markup:
    entries = []
    for index, expert in enumerate(experts):
        entries.append(Legend(expert["expert"], "loss", "line", style=_stroke(index)))
        if any("linearized_values" in point for point in expert["evaluations"]):
            style = f"{_stroke(index)};{DASHED}"
            entries.append(Legend(f"{expert['expert']}{LINEARIZED_MARK}", "loss", "line", style=style))
    return legend(entries)


def _losses(experts: Sequence[ExpertCurvesDocument]) -> Markup | None:
    lines = _loss_lines(experts)
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    plot = Plot(
        _steps(max(point["step"] for point in points)),
        nice_scale(point["loss"] for point in points),
        label="The mean training loss of every expert over its updates",
        x_title="update",
        y_title="loss",
    )
    for line in lines:
        found = [(float(point["step"]), point["loss"]) for point in line.points]
        plot.curve(found, css="loss", style=line.style)
        if len(found) == 1:
            plot.point(*found[0], css="dot", style=line.fill, title=line.name)
    return plot.render()


def _evaluations(experts: Sequence[ExpertCurvesDocument], name: str) -> Markup:
    lines = [
        (index, mark, [(float(p["step"]), values[name]) for p, values in found if name in values])
        for index, expert in enumerate(experts)
        for mark, found in (
            ("", [(point, point["values"]) for point in expert["evaluations"]]),
            (LINEARIZED_MARK, [(point, point.get("linearized_values", {})) for point in expert["evaluations"]]),
        )
    ]
    plot = Plot(
        _steps(int(max(step for _, _, line in lines for step, _ in line))),
        nice_scale(value for _, _, line in lines for _, value in line),
        label=f"{name} of every expert in the course of training",
        x_title="update",
        height=210,
    )
    for index, mark, line in lines:
        plot.curve(line, css="loss", style=f"{_stroke(index)};{DASHED}" if mark else _stroke(index))
        for step, value in line:
            title = f"{experts[index]['expert']}{mark}, update {step:.0f}: {number_text(value)}"
            plot.point(step, value, css="dot", style=_fill(index), title=title, size=3)
    return plot.render()


def _last(expert: ExpertCurvesDocument, name: str) -> str:
    found = [point for point in expert["evaluations"] if name in point["values"]]
    if not found:
        return ""
    text, linearized = number_text(found[-1]["values"][name]), found[-1].get("linearized_values", {})
    return f"{text} ({number_text(linearized[name])} linearized)" if name in linearized else text


def _steps(last: int) -> Scale:
    return Scale(0, max(last, 1), max(1.0, nice_scale((0, max(last, 1)), count=8).step))


def _stroke(index: int) -> str:
    return f"stroke:var(--c{index % NUM_COLOURS})"


def _fill(index: int) -> str:
    return f"fill:var(--c{index % NUM_COLOURS})"
