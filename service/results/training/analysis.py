"""Computes the analysis of trained fleets from their models, or reads an analysis that was computed before."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from search_spaces.errors import Problem
from service.errors import Conflict
from service.schemas.api import AnalysisDocument, FleetAnalysisDocument
from service.store import Store
from service.types import EventKind
from workers.file_access import FileAccess
from workers.models.remote import locate
from workers.training.finetuning.fleet import Pipeline
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.spec import FinetuneSpec

if TYPE_CHECKING:
    from search_spaces.recipe import Merge
    from workers.training.finetuning.merge_losses import MergeLosses

__all__ = [
    "ANALYSIS_FILE",
    "analyse",
    "joined",
    "lack_of_losses",
    "read_analysis",
    "stored_analysis",
]

ANALYSIS_FILE = "analysis.json"


def analyse(
    fleets: Sequence[tuple[Mapping[str, FinetuneSpec], Mapping[str, Path]]],
    *,
    samples: int,
    note: Callable[[str], None] = lambda _: None,
    progressed: Callable[[], None] = lambda: None,
    access: FileAccess | None = None,
) -> AnalysisDocument:
    """Analyse the trained experts of several fleets, which have the same aliases and the same base.

    Args:
        fleets: For each fleet the specifications and the directories of its experts, by alias. The first fleet is shown
            first, and all losses are on its tasks.
        samples: Number of samples of each evaluation task.
        note: Called with a line of progress.
        progressed: Called after every merge.
        access: Limits the files that tasks may read; None is no limit.

    Raises:
        Conflict: The fleets differ in experts or base, or an expert equals its base.
        InvalidTask: A task has no reference answers.
        InvalidModel: A model cannot be read.
    """
    from workers.training.finetuning.merge_losses import landscape, losses_of_experts, merge_table
    from workers.training.finetuning.task_vectors import task_vector

    (first, _), *_ = fleets
    for experts, places in fleets:
        _check_same(first, experts, str(next(iter(places.values()))))
    found: list[FleetAnalysisDocument] = []
    for name, (experts, places) in zip(_names([experts for experts, _ in fleets]), fleets, strict=True):
        note(f"Analysing the experts of {name} ...")
        models = {alias: places[alias] / EXPERT for alias in first}
        base = locate(next(iter(experts.values())).base)
        try:
            vectors = [asdict(task_vector(alias, base, model)) for alias, model in models.items()]
        except ValueError as error:
            raise Conflict(f"analysis of {name}: {error}") from error
        fleet: dict[str, Any] = {"name": name, "task_vectors": vectors, "landscape": None, "merges": []}
        if len(models) > 1:
            # All fleets are scored on the samples of the first one.
            losses = losses_of_experts(first, models, samples=samples, access=access)

            def measure(merge: Merge, losses: MergeLosses = losses) -> Mapping[str, float]:
                progressed()
                return losses.of(merge)

            one, other, *_ = models
            fleet["landscape"] = asdict(landscape(measure, (one, other)))
            fleet["merges"] = [asdict(row) for row in merge_table(measure, list(models))]
        found.append(cast("FleetAnalysisDocument", _finite(fleet)))
    return {"samples": samples, "fleets": found}


def lack_of_losses(pipeline: Pipeline, *, access: FileAccess | None = None) -> tuple[Problem, ...]:
    """List problems for which the analysis of a fine-tuning's experts would fail once they are trained."""
    from workers.training.finetuning.merge_losses import lack_of_losses

    return tuple(
        Problem(pipeline.field_of(alias, "evaluation"), reason)
        for alias, reason in lack_of_losses(pipeline.experts, access=access)
    )


def joined(analyses: Mapping[str, tuple[Pipeline, AnalysisDocument]]) -> AnalysisDocument:
    """Join the analyses of several fine-tunings into one document, in their order.

    Args:
        analyses: Fine-tuning and analysis by the name that error messages use.

    Raises:
        Conflict: The analyses differ in experts, base or samples.
    """
    names = list(analyses)
    (first, _), *_ = analyses.values()
    samples = next(iter(analyses.values()))[1]["samples"]
    for name, (pipeline, document) in analyses.items():
        _check_same(first.experts, pipeline.experts, name)
        if document["samples"] != samples or any(
            (spec.evaluation and spec.evaluation.objectives, spec.seed, spec.data.max_length)
            != (own.evaluation and own.evaluation.objectives, own.seed, own.data.max_length)
            for spec, own in ((pipeline.experts[alias], own) for alias, own in first.experts.items())
        ):
            raise Conflict(
                f"{name}: its losses are not those of the samples of {names[0]}; to be compared it must have the same "
                "analysis.samples, evaluation.objectives, data.max_length and seed"
            )
    labels = _names([pipeline.experts for pipeline, _ in analyses.values()])
    fleets = [document["fleets"][0] for _, document in analyses.values()]
    return {"samples": samples, "fleets": [{**fleet, "name": n} for n, fleet in zip(labels, fleets, strict=True)]}


def stored_analysis(store: Store, study_id: str) -> AnalysisDocument | None:
    """Read the analysis of a stored fine-tuning.

    Returns None if the analysis was not requested, or is not computed yet.
    """
    events = store.events(study_id, kinds=[EventKind.ANALYSIS])
    return cast("AnalysisDocument", dict(events[-1].payload)) if events else None


def read_analysis(directory: Path) -> AnalysisDocument | None:
    """Read the analysis that was written to the directory of a fine-tuning; None if no analysis was written."""
    try:
        document: AnalysisDocument = json.loads((directory / ANALYSIS_FILE).read_text())
        return document
    except FileNotFoundError:
        return None


def _check_same(first: Mapping[str, FinetuneSpec], experts: Mapping[str, FinetuneSpec], where: str) -> None:
    if experts.keys() != first.keys() or any(spec.base != first[a].base for a, spec in experts.items()):
        raise Conflict(
            f"{where}: has the experts {', '.join(experts)}; to be compared it must have {', '.join(first)}, of the "
            "same base"
        )


def _names(fleets: Sequence[Mapping[str, FinetuneSpec]]) -> list[str]:
    """Name each fleet by the optimizer of its experts, in the order of `fleets`.

    If several fleets have the same optimizer, their names also have the training options that differ; if no options
    differ, the names have numbers.
    """
    kinds = ["/".join(dict.fromkeys(spec.method.kind for spec in experts.values())) for experts in fleets]
    names = []
    for kind, experts in zip(kinds, fleets, strict=True):
        own = _options(experts)
        same = [_options(other) for k, other in zip(kinds, fleets, strict=True) if k == kind]
        varying = [key for key in own if any(options.get(key) != own[key] for options in same)]
        names.append(", ".join([kind, *(f"{key} {own[key]}" for key in varying)]))
    return [name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)]


def _options(experts: Mapping[str, FinetuneSpec]) -> dict[str, str]:
    """Training options of a fleet as text, by the option's name; `experts` has the specifications by alias.

    If the fleet's experts have different values of an option, the text has all values, separated by "/".
    """
    documents = [spec.canonical() for spec in experts.values()]
    found = {}
    for section in ("method", "training"):
        for key in documents[0][section]:
            found[key] = "/".join(dict.fromkeys(f"{each[section][key]}" for each in documents))
    return {**found, "seed": "/".join(dict.fromkeys(f"{each['seed']}" for each in documents))}


def _finite(value: Any) -> Any:
    """Convert a value to a JSON value: numbers that are not finite become None, and tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
