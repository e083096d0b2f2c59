"""Fleets and pipelines: sections that override each other, and mistakes reported with their places."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.objectives import InlineTask, ObjectiveSpec
from workers.training.finetuning.fleet import load_pipeline, parse_pipeline

FLEET: dict[str, Any] = {
    "name": "family",
    "base": "base",
    "data": {"max_length": 64},
    "training": {"steps": 5, "batch": 4},
    "experts": {
        "math": {"data": {"file": "math.jsonl"}},
        "text": {"data": {"file": "text.jsonl"}, "training": {"steps": 9}},
    },
}
TASK = {"name": "math", "task": {"file": "dev.jsonl"}, "metric": "exact_match"}
STUDY = {"name": "merge", "fidelity": {"scheduler": "none"}, "objectives": [TASK]}


def test_an_expert_has_the_shared_options_and_its_own(tmp_path: Path) -> None:
    pipeline = parse_pipeline(FLEET, tmp_path)
    math, text = pipeline.experts["math"], pipeline.experts["text"]
    assert (math.name, math.training.steps, math.training.batch, math.data.max_length) == ("math", 5, 4, 64)
    assert (text.name, text.training.steps, text.training.batch) == ("text", 9, 4)
    assert math.data.file == str(tmp_path / "math.jsonl")
    assert pipeline.places(tmp_path) == {name: tmp_path / "experts" / name for name in ("math", "text")}
    assert pipeline.study_of(pipeline.places(tmp_path)) is None


@pytest.mark.parametrize(
    ("of_text", "expected"),
    [
        ({"training": {"layers": [2]}}, {"math": (0, 1, 2), "text": (0, 1, 2)}),
        ({"training": {"layers": [2]}, "method": {"noise_layers": [5]}}, {"math": (0, 1, 2), "text": (5,)}),
        ({}, {"math": None, "text": None}),  # merges move all weights
    ],
)
def test_noise_is_where_the_fleet_trains(tmp_path: Path, of_text: dict[str, Any], expected: dict[str, Any]) -> None:
    """If all experts train layers only, noise is on the layers that any of them trains."""
    math, text = ({"data": {"file": f"{name}.jsonl"}} for name in ("math", "text"))
    experts = {"math": {**math, "training": {"layers": [0, 1]}}, "text": {**text, **of_text}}
    pipeline = parse_pipeline({**FLEET, "experts": experts}, tmp_path)
    assert {alias: spec.method.noise_layers for alias, spec in pipeline.experts.items()} == expected
    assert parse_pipeline(pipeline.canonical()).experts == pipeline.experts


@pytest.mark.parametrize(
    ("of_math", "of_text", "expected"),
    [
        (["q_proj"], ["down_proj", "q_proj"], {"math": ("down_proj", "q_proj"), "text": ("down_proj", "q_proj")}),
        (["q_proj"], "all-linear", {"math": "all-linear", "text": "all-linear"}),
        (["q_proj"], ["q_proj"], {"math": None, "text": None}),  # their adapters change what merges change
        (["q_proj"], ".*_proj", {"math": None, "text": None}),  # a pattern is not resolved without the model
    ],
)
def test_noise_is_where_the_fleets_adapters_are(
    tmp_path: Path, of_math: Any, of_text: Any, expected: dict[str, Any]
) -> None:
    """If adapters differ, noise is on the modules that any of them changes."""
    experts = {
        name: {"data": {"file": f"{name}.jsonl"}, "adapter": {"targets": targets}}
        for name, targets in (("math", of_math), ("text", of_text))
    }
    pipeline = parse_pipeline({**FLEET, "experts": experts}, tmp_path)
    assert {alias: spec.method.noise_targets for alias, spec in pipeline.experts.items()} == expected
    assert parse_pipeline(pipeline.canonical()).experts == pipeline.experts
    stated = {alias: {**each, "method": {"noise_targets": ["o_proj"]}} for alias, each in experts.items()}
    own = parse_pipeline({**FLEET, "experts": stated}, tmp_path)
    assert {spec.method.noise_targets for spec in own.experts.values()} == {("o_proj",)}


def test_the_study_merges_the_fleets_experts(tmp_path: Path) -> None:
    pipeline = parse_pipeline({**FLEET, "study": STUDY}, tmp_path)
    study = pipeline.study_of({alias: tmp_path / alias for alias in pipeline.experts})
    assert study is not None
    assert study.models.experts == {"math": str(tmp_path / "math"), "text": str(tmp_path / "text")}
    (objective,) = study.objectives
    assert isinstance(objective, ObjectiveSpec)
    assert isinstance(objective.task, InlineTask)
    assert objective.task.file == str(tmp_path / "dev.jsonl")


def test_the_canonical_form_gives_the_same_pipeline(tmp_path: Path) -> None:
    pipeline = parse_pipeline({**FLEET, "study": STUDY, "parallel_experts": 2}, tmp_path)
    again = parse_pipeline(pipeline.canonical())
    assert again.parallel_experts == 2
    assert (again.name, again.experts) == (pipeline.name, pipeline.experts)
    assert again.canonical() == pipeline.canonical()
    places = pipeline.places(tmp_path)
    assert again.study_of(places) == pipeline.study_of(places)


def test_one_expert_is_no_fleet(tmp_path: Path) -> None:
    document = {"name": "a", "base": "base", "data": {"file": "a.jsonl"}, "training": {"steps": 1}}
    pipeline = parse_pipeline(document, tmp_path)
    assert pipeline.places(tmp_path / "out") == {"a": tmp_path / "out"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": {}}, "experts: expected a mapping"),
        ({"experts": {"a b": {}}}, "experts.a b: 'a b' is no alias"),
        ({"experts": {"base": {}}}, "experts.base: 'base' is no alias"),
        ({"experts": {"math": 3}}, "experts.math: 3 is no mapping"),
        ({"experts": {"math": {"base": "x"}}}, "experts.math.base: is that of the whole fleet"),
        ({"experts": {"math": {}}}, "experts.math.data: give either file or dataset"),
        ({"experts": {"math": {"data": {"fil": "x"}}}}, "experts.math.data.fil"),
        ({"data": 3, "experts": {"math": {"data": {"file": "a"}}}}, "data: 3 is no mapping"),
        ({"method": None}, "method: None is no mapping"),
        ({"parallel_experts": 0}, "parallel_experts: 0; expected a number of experts, at least 1"),
        ({"name": "a b"}, "name: 'a b' is no name"),
        ({"study": {**STUDY, "models": {}}}, "study: expected a study without models"),
        ({"study": {**STUDY, "objectives": []}}, "study.objectives"),
    ],
)
def test_mistakes_are_named_with_their_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidStudy) as refused:
        parse_pipeline({**FLEET, **changes})
    assert message in str(refused.value)


@pytest.mark.parametrize("is_fleet", [True, False])
def test_objectives_of_one_name_are_refused_in_files(tmp_path: Path, is_fleet: bool) -> None:
    """The values of an evaluation have the names of objectives; what an earlier version stored is still read."""
    section = {"evaluation": {"objectives": [TASK, {**TASK, "name": "text"}, TASK]}}
    alone = {**{key: value for key, value in FLEET.items() if key != "experts"}, **FLEET["experts"]["math"]}
    document = {**FLEET, "experts": {"math": {**FLEET["experts"]["math"], **section}}} if is_fleet else alone | section
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(document))
    place = "experts.math." if is_fleet else ""
    message = f"{place}evaluation.objectives.2.name: math is the name of two objectives; give another name"
    with pytest.raises(InvalidStudy, match=re.escape(message)):
        load_pipeline(file)
    assert parse_pipeline(parse_pipeline(document, tmp_path).canonical()).experts


@pytest.mark.parametrize("is_fleet", [True, False])
def test_an_analysis_is_of_the_whole_file(tmp_path: Path, is_fleet: bool) -> None:
    alone = {**{key: value for key, value in FLEET.items() if key != "experts"}, **FLEET["experts"]["math"]}
    document = FLEET if is_fleet else alone
    assert parse_pipeline(document, tmp_path).analysis is None
    assert "analysis" not in parse_pipeline(document, tmp_path).canonical()
    pipeline = parse_pipeline({**document, "analysis": {}}, tmp_path)
    assert pipeline.analysis is not None
    assert pipeline.analysis.samples == 100
    again = parse_pipeline(pipeline.canonical())
    assert (again.experts, again.analysis) == (pipeline.experts, pipeline.analysis)
    with pytest.raises(InvalidStudy, match=r'analysis\.sample: unknown key; did you mean "samples"\?'):
        parse_pipeline({**document, "analysis": {"sample": 3}}, tmp_path)
