"""The analysis of fleets in the report: every picture and table, also with losses that are not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from service.cli.finetune_tables import analysis_tables
from service.errors import Conflict
from service.results.training.analysis import analyse, joined
from service.results.training.pictures import analysis_context, merge_text
from service.schemas.api import (
    AnalysisDocument,
    FleetAnalysisDocument,
    LandscapeDocument,
    MergeLossDocument,
    MixedDocument,
    TaskVectorDocument,
    TriedDocument,
)
from tests.service.api.harness import analysed_fleet as fleet
from tests.service.api.harness import finetuning
from workers.training.finetuning.fleet import parse_pipeline


def test_fleets_are_beside_each_other_on_one_scale() -> None:
    document: AnalysisDocument = {"samples": 7, "fleets": [fleet("mergopt", 1, 2, 3, 4), fleet("adamw", 2, 4, 4, 8)]}
    found = analysis_context(document)
    assert [chart["name"] for chart in found["histograms"]] == [
        "math, mergopt",
        "text, mergopt",
        "math, adamw",
        "text, adamw",
    ]
    assert len(found["fits"]) == 8
    assert (found["low"], found["high"]) == ("1.000", "8.000")
    lowest, highest = found["landscapes"][0]["svg"], found["landscapes"][1]["svg"]
    assert "--v:100%" in lowest
    assert 'class="cell minus" style="--v:100%"' in highest
    assert found["merges"][1] == {"method": "TIES", "experts": 2, "cells": ["2.000 at 0.5", "4.000 at 0.5"]}


def test_losses_that_are_not_finite_are_drawn_as_the_highest() -> None:
    found = analysis_context({"samples": 1, "fleets": [fleet("sgd", 1.0, math.inf, math.nan, 0.0)]})
    picture = found["landscapes"][0]["svg"]
    assert "nan%" not in picture
    assert picture.count('class="cell minus" style="--v:100%"') == 3
    assert found["merges"][1]["cells"] == ["not finite at 0.5"]


def test_one_experts_histogram_is_all_that_it_has() -> None:
    alone = fleet("adamw", 1, 1, 1, 1)
    found = analysis_context(
        {
            "samples": 1,
            "fleets": [{**alone, "task_vectors": alone["task_vectors"][:1], "landscape": None, "merges": []}],
        }
    )
    assert (len(found["histograms"]), found["landscapes"], found["merges"]) == (1, [], [])


def merge(mean: float | None, coefficient: float | None) -> MergeLossDocument:
    return {"method": "TIES", "coefficient": coefficient, "losses": {}, "mean": mean, "spread": 0.0}


def test_a_merge_names_its_coefficient() -> None:
    assert merge_text(merge(0.5, None)) == "0.500"
    assert merge_text(merge(0.5, 1.0)) == "0.500 at 1"
    assert merge_text({**merge(0.5, 1.0), "value": 0.75}) == "0.750 (loss 0.500) at 1"


def test_curves_and_landscapes_are_drawn() -> None:
    """Curves are of merges of all experts, with a line for each fleet; losses may be missing."""

    def with_parts(name: str, losses: list[float | None]) -> FleetAnalysisDocument:
        alone = fleet(name, 1, 2, 3, 4)
        assert alone["landscape"] is not None
        other: LandscapeDocument = {**alone["landscape"], "experts": ["math", "code"], "losses": [[1.0, 8.0]] * 2}
        tried: list[TriedDocument] = [{"coefficient": 0.1 * i, "mean": loss} for i, loss in enumerate(losses)]
        merges: list[MergeLossDocument] = [alone["merges"][0], {**alone["merges"][1], "tried": tried, "value": 0.5}]
        accumulated: TaskVectorDocument = {**alone["task_vectors"][0], "expert": "sum of all"}
        return {
            **alone,
            "merges": merges,
            "landscapes": [alone["landscape"], other],
            "accumulated": accumulated,
        }

    fleets = [with_parts("mergopt", [1.0, 2.0, 3.0]), with_parts("adamw", [2.0, None, 4.0])]
    found = analysis_context({"samples": 1, "fleets": fleets})
    assert found["has_values"]
    (chart,) = found["curves"]
    assert chart["name"] == "TIES"
    assert chart["svg"].count("stroke:var(--c0)") == 2
    assert chart["svg"].count("stroke:var(--c1)") == 1
    assert [each["name"] for each in found["landscapes"]] == [
        "math and text, mergopt",
        "math and code, mergopt",
        "math and text, adamw",
        "math and code, adamw",
    ]
    assert found["high"] == "8.000"
    assert "sum of all, mergopt" in [each["name"] for each in found["histograms"]]


def test_mixtures_of_trainings_are_columns_of_pairs() -> None:
    first, other = fleet("mergopt", 1, 2, 3, 4), fleet("adamw", 2, 3, 4, 5)
    every: MergeLossDocument = {**first["merges"][1], "num_experts": 3}
    both = [{**each, "merges": [*each["merges"], every]} for each in (first, other)]
    mixed: MixedDocument = {"fleets": ["mergopt", "adamw"], "merges": [{**first["merges"][1], "mean": 9.0}]}
    document: AnalysisDocument = {"samples": 1, "fleets": both, "mixed": [mixed]}  # type: ignore[typeddict-item]
    found = analysis_context(document)
    assert found["columns"] == ["mergopt", "adamw", "mergopt with adamw"]
    assert [row["cells"][2] for row in found["merges"]] == ["", "9.000 at 0.5", ""]
    printed = analysis_tables(document)[1]
    assert [column.header for column in printed.columns][2:] == found["columns"]


def test_analyses_with_other_methods_are_refused() -> None:
    plain = fleet("mergopt", 1, 2, 3, 4)
    with_wudi: FleetAnalysisDocument = {**plain, "merges": [*plain["merges"], {**plain["merges"][1], "method": "WUDI"}]}
    pipeline = parse_pipeline(finetuning())
    with pytest.raises(Conflict, match=r"b: has merges by other methods than a; .* same analysis.wudi"):
        joined(
            {
                "a": (pipeline, {"samples": 1, "fleets": [plain]}),
                "b": (pipeline, {"samples": 1, "fleets": [with_wudi]}),
            }
        )


def test_linearized_experts_are_a_column_of_their_own() -> None:
    exported, linearized = fleet("tangent", 1, 2, 3, 4), fleet("tangent, linearized", 4, 3, 2, 1)
    pipeline = parse_pipeline(finetuning(method={"kind": "tangent"}))
    other = parse_pipeline(finetuning())
    document: AnalysisDocument = {"samples": 1, "fleets": [exported, {**linearized, "task_vectors": []}]}
    found = joined({"a": (pipeline, document), "b": (other, {"samples": 1, "fleets": [fleet("x", 1, 2, 3, 4)]})})
    assert [each["name"] for each in found["fleets"]] == ["tangent", "tangent, linearized", "mergopt"]
    context = analysis_context(found)
    assert len(context["histograms"]) == 4
    assert context["merges"][0]["cells"] == ["1.000", "4.000", "1.000"]


def test_fleets_of_other_experts_are_refused() -> None:
    experts = parse_pipeline(finetuning()).experts
    fewer = dict(list(experts.items())[:1])
    places = {alias: Path("/trained") / alias for alias in experts}
    with pytest.raises(Conflict, match=r"has the experts math; to be compared it must have math, text"):
        analyse([(experts, places), (fewer, places)], samples=1)


def test_trainings_are_named_by_differences() -> None:
    """Trainings by the same optimizer are named by their differences."""
    document: AnalysisDocument = {"samples": 1, "fleets": [fleet("mergopt", 1, 2, 3, 4)]}
    changes: dict[str, dict[str, Any]] = {
        "a": {"method": {"scale": 0.001}},
        "b": {"method": {"scale": 0.002}},
        "c": {"method": {"kind": "sgd"}},
        "d": {"method": {"scale": 0.002}},
    }
    found = joined({name: (parse_pipeline(finetuning(**changes[name])), document) for name in changes})
    assert [each["name"] for each in found["fleets"]] == [
        "mergopt, scale 0.001",
        "mergopt, scale 0.002 1",
        "sgd",
        "mergopt, scale 0.002 2",
    ]
