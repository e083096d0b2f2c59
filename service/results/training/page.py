"""Report of a fine-tuning: losses and evaluations on one page, in the style of a study's report."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from service.results.report.charts import Legend, Plot, legend
from service.results.report.marks import NUM_COLOURS
from service.results.report.page import template
from service.results.report.scales import Scale, nice_scale
from service.results.report.texts import number_text
from service.results.training.pictures import analysis_context
from service.schemas.api import AnalysisDocument, CurvesDocument, ExpertCurvesDocument
from workers.training.finetuning.fleet import Pipeline

__all__ = ["render_training"]


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
            "loss": number_text(expert["loss"][-1]["loss"]) if expert["loss"] else "",
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
        legend=legend([Legend(expert["expert"], "loss", "line", style=_stroke(i)) for i, expert in enumerate(experts)]),
    )


def _losses(experts: Sequence[ExpertCurvesDocument]) -> Markup | None:
    points = [point for expert in experts for point in expert["loss"]]
    if not points:
        return None
    plot = Plot(
        _steps(max(point["step"] for point in points)),
        nice_scale(point["loss"] for point in points),
        label="The mean training loss of every expert over its updates",
        x_title="update",
        y_title="loss",
    )
    for index, expert in enumerate(experts):
        line = [(float(point["step"]), point["loss"]) for point in expert["loss"]]
        plot.curve(line, css="loss", style=_stroke(index))
        if len(line) == 1:
            plot.point(*line[0], css="dot", style=_fill(index))
    return plot.render()


def _evaluations(experts: Sequence[ExpertCurvesDocument], name: str) -> Markup:
    lines = [
        [(float(p["step"]), p["values"][name]) for p in expert["evaluations"] if name in p["values"]]
        for expert in experts
    ]
    plot = Plot(
        _steps(int(max(step for line in lines for step, _ in line))),
        nice_scale(value for line in lines for _, value in line),
        label=f"{name} of every expert in the course of training",
        x_title="update",
        height=210,
    )
    for index, line in enumerate(lines):
        plot.curve(line, css="loss", style=_stroke(index))
        for step, value in line:
            title = f"{experts[index]['expert']}, update {step:.0f}: {number_text(value)}"
            plot.point(step, value, css="dot", style=_fill(index), title=title, size=3)
    return plot.render()


def _last(expert: ExpertCurvesDocument, name: str) -> str:
    found = [point["values"][name] for point in expert["evaluations"] if name in point["values"]]
    return number_text(found[-1]) if found else ""


def _steps(last: int) -> Scale:
    return Scale(0, max(last, 1), max(1.0, nice_scale((0, max(last, 1)), count=8).step))


def _stroke(index: int) -> str:
    return f"stroke:var(--c{index % NUM_COLOURS})"


def _fill(index: int) -> str:
    return f"fill:var(--c{index % NUM_COLOURS})"
