"""Training curves of fine-tuned experts: losses and evaluations by step, read from stored events or history files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from service.results.losses import PLURALS, is_at_offset
from service.schemas.api import CurvesDocument, EvaluationPoint, ExpertCurvesDocument, LossPoint
from service.store import Store
from service.types import EventKind
from workers.training.finetuning.history import LINEARIZED, METRICS, read_history

__all__ = ["MAX_POINTS", "directory_curves", "stored_curves"]

# Maximum number of points of one curve; more are averaged over neighbours.
MAX_POINTS = 1000


def stored_curves(store: Store, study_id: str, experts: Iterable[str]) -> CurvesDocument:
    """Read the training curves of a server's fine-tuning, the job `study_id`, from its stored events.

    The result contains, for each of the `experts` (aliases), the losses and the evaluations up to now.
    """
    payloads = [event.payload for event in store.events(study_id, kinds=[EventKind.TRAINING])]
    return {"experts": [_expert(alias, [p for p in payloads if p["expert"] == alias]) for alias in experts]}


def directory_curves(places: Mapping[str, Path]) -> CurvesDocument:
    """Read the training curves of experts from the history files in their directories.

    `places` maps an expert's alias to its directory. The result contains, for each expert, the losses and the
    evaluations.
    """
    return {"experts": [_expert(alias, read_history(place / METRICS)) for alias, place in places.items()]}


def _expert(alias: str, lines: Sequence[Mapping[str, Any]]) -> ExpertCurvesDocument:
    """Build the training curves of the expert `alias` from the lines of its history file or from its stored events.

    A line with the key "values" is an evaluation. Any other line has losses: a line of a history file has the loss of
    one step, and an event has the losses of several steps. If several lines have the same step, the last one is used.
    """
    losses: dict[str, dict[int, float]] = {"loss": {}, "weights_loss": {}, "offset_loss": {}}
    evaluations: dict[int, EvaluationPoint] = {}
    for line in lines:
        if "values" in line:
            evaluations[line["step"]] = {"step": line["step"], "values": line["values"]}
            if LINEARIZED in line:
                evaluations[line["step"]]["linearized_values"] = line[LINEARIZED]
        else:
            for name, found in losses.items():
                own = [[line["step"], line[name]]] if name in line else []
                found |= dict(line.get(PLURALS[name], own))
    curves = {name: _thinned(sorted(found.items())) for name, found in losses.items()}
    return {
        "expert": alias,
        "loss": curves["loss"],
        "loss_at": "offset" if any(map(is_at_offset, lines)) else "weights",
        "weights_loss": curves["weights_loss"],
        "offset_loss": curves["offset_loss"],
        "evaluations": [evaluations[step] for step in sorted(evaluations)],
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[LossPoint]:
    """Reduce a loss curve to at most MAX_POINTS points by averaging adjacent points.

    A point is a pair (step, loss), and its loss is the mean over all steps since the previous point. The loss of an
    averaged point is again the mean over its steps.
    """
    size = -(-len(points) // MAX_POINTS) or 1
    weights = [after - before for before, after in pairwise([0, *(step for step, _ in points)])]
    found: list[LossPoint] = []
    for start in range(0, len(points), size):
        group, counts = points[start : start + size], weights[start : start + size]
        mean = sum(loss * count for (_, loss), count in zip(group, counts, strict=True)) / sum(counts)
        found.append({"step": group[-1][0], "loss": mean})
    return found
