"""Analysis of fleets (experts of one fine-tuning): task vectors and losses of merges."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from search_spaces.errors import Problem
from service.errors import Conflict
from service.schemas.api import AnalysisDocument, FleetAnalysisDocument, MixedDocument
from service.store import Store
from service.types import EventKind
from workers.file_access import FileAccess
from workers.models.remote import locate
from workers.training.finetuning.fleet import Pipeline
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.spec import FinetuneSpec

if TYPE_CHECKING:
    from search_spaces.recipe import Merge
    from workers.training.finetuning.merge_losses import MergeLoss
    from workers.training.finetuning.modality import MergeMeasurement, MergeReport

__all__ = [
    "ANALYSIS_FILE",
    "analyse",
    "joined",
    "lack_of_losses",
    "read_analysis",
    "stored_analysis",
]

ANALYSIS_FILE = "analysis.json"

# After the name of a fleet of tangent experts, where these are evaluated as they were trained.
LINEARIZED = ", linearized"

# After the alias of an expert of another fleet, where experts of two fleets are merged.
OTHER = ".other"


def analyse(
    fleets: Sequence[tuple[Mapping[str, FinetuneSpec], Mapping[str, Path]]],
    *,
    samples: int,
    wudi: bool = False,
    note: Callable[[str], None] = lambda _: None,
    progressed: Callable[[], None] = lambda: None,
    access: FileAccess | None = None,
) -> AnalysisDocument:
    """Analyse fleets of experts, trained from one base on the same tasks: task vectors and losses of merges.

    A fleet is the experts of one fine-tuning.

    Args:
        fleets: For each fleet the specifications and the directories of its experts, keyed by alias. All losses are
            computed on the evaluation tasks of the first fleet. A fleet whose experts were all trained by the method
            "tangent" (as linearizations of the base) is analysed twice: its experts are merged as ordinary models, and
            then as linearized models. The second analysis has no loss landscapes.
        samples: Number of samples of each evaluation task on which the merge coefficients are chosen. The reported
            values are measured on the same number of other samples.
        wudi: Whether WUDI-Merging is among the merge methods.
        note: Called with a line of progress.
        progressed: Called before every merge is measured.
        access: Limits the files that tasks may read; None is no limit.

    Raises:
        Conflict: The fleets differ in experts or base, or an expert equals its base.
        InvalidTask: A task has no reference answers.
        InvalidModel: A model cannot be read.
    """
    from workers.training.finetuning.merge_losses import losses_of_experts
    from workers.training.finetuning.task_vectors import accumulated_vector, task_vector

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
            fleet: dict[str, Any] = {"name": name, "task_vectors": vectors, "landscape": None, "merges": []}
            if len(models) == 1:
                found.append(cast("FleetAnalysisDocument", _finite(fleet)))
                continue
            fleet["accumulated"] = asdict(accumulated_vector(base, list(models.values())))
        except ValueError as error:
            raise Conflict(f"analysis of {name}: {error}") from error
        is_tangent = all(spec.method.kind == "tangent" for spec in experts.values())
        linearized = {"name": f"{name}{LINEARIZED}", "task_vectors": []}
        variants: list[tuple[dict[str, Any], bool]] = [(fleet, False), *([(linearized, True)] if is_tangent else [])]
        for document, is_linearized in variants:
            # All fleets are scored on the samples of the first one.
            losses = losses_of_experts(first, models, samples=samples, is_linearized=is_linearized, access=access)
            measured = _measured(losses, list(models), wudi=wudi, draws=not is_linearized, progressed=progressed)
            found.append(cast("FleetAnalysisDocument", _finite({**document, **measured})))
    analysis: AnalysisDocument = {"samples": samples, "fleets": found}
    if len(fleets) > 1 and len(first) > 1:
        names = _names([experts for experts, _ in fleets])
        analysis["mixed"] = [
            _mixed(
                (names[0], name), fleets[0], places, samples=samples, wudi=wudi, progressed=progressed, access=access
            )
            for name, (_, places) in zip(names[1:], fleets[1:], strict=True)
        ]
    return analysis


def _mixed(
    names: tuple[str, str],
    first: tuple[Mapping[str, FinetuneSpec], Mapping[str, Path]],
    places: Mapping[str, Path],
    *,
    samples: int,
    wudi: bool,
    progressed: Callable[[], None],
    access: FileAccess | None,
) -> MixedDocument:
    """Measure merges of two experts, one from each of two fleets (a fleet is the experts of one fine-tuning).

    `names` are the names of the two fleets. `first` contains the specifications and the directories of the first
    fleet's experts, keyed by alias. `places` contains the directories of the second fleet's experts, keyed by alias.
    `samples` is the number of samples by which coefficients are chosen. `wudi` says whether WUDI-Merging is among the
    methods. `progressed` is called before every merge is measured. `access` limits the files that tasks may read; None
    is no limit.
    """
    from workers.training.finetuning.merge_losses import losses_of_experts, mixed_table

    experts, own = first
    others = {alias: f"{alias}{OTHER}" for alias in experts}
    losses = losses_of_experts(
        {**experts, **{others[alias]: spec for alias, spec in experts.items()}},
        {
            **{alias: place / EXPERT for alias, place in own.items()},
            **{others[alias]: places[alias] / EXPERT for alias in experts},
        },
        samples=samples,
        access=access,
    )
    measure, report = _measures(losses, progressed)
    rows = [_row(row) for row in mixed_table(measure, others, report=report, wudi=wudi)]
    return cast("MixedDocument", _finite({"fleets": list(names), "merges": rows}))


def _measures(
    losses: MergeMeasurement, progressed: Callable[[], None]
) -> tuple[Callable[[Merge], Mapping[str, float]], Callable[[Merge], MergeReport]]:
    """Make two functions that measure merges: one for choosing coefficients, and one for reported values.

    The first function returns the mean loss on each expert's tasks, keyed by the expert's alias. The second function
    returns a report with losses and metrics, measured on other samples. Both functions compute with `losses`, and call
    `progressed` before each measurement.
    """

    def measure(merge: Merge) -> Mapping[str, float]:
        progressed()
        return losses.of(merge)

    def report(merge: Merge) -> MergeReport:
        progressed()
        return losses.report(merge)

    return measure, report


def _measured(
    losses: MergeMeasurement, aliases: Sequence[str], *, wudi: bool, draws: bool, progressed: Callable[[], None]
) -> dict[str, Any]:
    """Measure merges of the experts `aliases` by all merge methods, with one row for each method and number of experts.

    `losses` computes the losses of a merge. `wudi` says whether WUDI-Merging is among the methods. If `draws` is True,
    loss landscapes are computed for some pairs of experts: the losses of merges of the two experts over a grid of their
    two coefficients. The result contains the keys "merges" (the rows), "landscapes", and "landscape" (the first
    landscape, or None). `progressed` is called before every merge is measured.
    """
    from workers.training.finetuning.merge_losses import landscapes, merge_table

    measure, report = _measures(losses, progressed)
    drawn = [asdict(each) for each in landscapes(measure, aliases)] if draws else []
    rows = merge_table(measure, aliases, report=report, wudi=wudi)
    return {"landscape": drawn[0] if drawn else None, "landscapes": drawn, "merges": [_row(row) for row in rows]}


def _row(row: MergeLoss) -> dict[str, Any]:
    tried = [{"coefficient": coefficient, "mean": mean} for coefficient, mean in row.tried]
    return {**asdict(row), "tried": tried}


def lack_of_losses(pipeline: Pipeline, *, access: FileAccess | None = None) -> tuple[Problem, ...]:
    """List the problems of a fine-tuning that would make the analysis of its experts fail after the training.

    `pipeline` is the specification of the fine-tuning. For example, the analysis needs tasks with reference answers, on
    which losses are computed. `access` limits the files that tasks may read; None is no limit.
    """
    from workers.training.finetuning.merge_losses import lack_of_losses

    return tuple(
        Problem(pipeline.field_of(alias, "evaluation"), reason)
        for alias, reason in lack_of_losses(pipeline.experts, access=access)
    )


def joined(analyses: Mapping[str, tuple[Pipeline, AnalysisDocument]]) -> AnalysisDocument:
    """Join the analyses of several fine-tunings into one document, in the given order.

    Args:
        analyses: Maps the name that error messages use to a fine-tuning and its analysis.

    Raises:
        Conflict: The analyses differ in experts, base or samples.
    """
    names = list(analyses)
    (first, _), *_ = analyses.values()
    samples, merges = next((each["samples"], each["fleets"][0]["merges"]) for _, each in analyses.values())
    for name, (pipeline, document) in analyses.items():
        _check_same(first.experts, pipeline.experts, name)
        methods = {(row["method"], row.get("num_experts")) for row in document["fleets"][0]["merges"]}
        if methods != {(row["method"], row.get("num_experts")) for row in merges}:
            raise Conflict(f"{name}: has merges by other methods than {names[0]}; it must have the same analysis.wudi")
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
    fleets: list[FleetAnalysisDocument] = []
    for label, (_, document) in zip(labels, analyses.values(), strict=True):
        for fleet in document["fleets"]:
            is_linearized = fleet["name"].endswith(LINEARIZED)
            fleets.append({**fleet, "name": label + LINEARIZED if is_linearized else label})
    return {"samples": samples, "fleets": fleets}


def stored_analysis(store: Store, study_id: str) -> AnalysisDocument | None:
    """Read the analysis of the experts that a fine-tuning has trained, from the database of a server.

    `study_id` is the id of the fine-tuning. Returns None if the analysis was not requested, or is not computed yet.
    """
    events = store.events(study_id, kinds=[EventKind.ANALYSIS])
    return cast("AnalysisDocument", dict(events[-1].payload)) if events else None


def read_analysis(directory: Path) -> AnalysisDocument | None:
    """Read the analysis of the experts of a fine-tuning from the fine-tuning's directory.

    Returns None if the directory has no analysis.
    """
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
    """Name each fleet (the experts of one fine-tuning) by its optimizer, in the order of `fleets`.

    If several fleets have the same optimizer, their names also have the training options in which they differ. If the
    fleets differ in no option, the names have numbers.
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
    """Training options of a fleet (the experts of one fine-tuning) as text, keyed by the option's name.

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
