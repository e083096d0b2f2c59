"""Estimated durations of studies: correct tokens and depths, and the time of a study that was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import load_study, parse_study
from service.jobs.search.dry_run import check
from service.studies.planning import here
from service.studies.planning.profiles import MachineProfile
from service.studies.planning.roofline import Speeds, Work
from service.studies.preflight import examine
from service.studies.preflight.resources import GradientPlace
from tests.builders import tiny_family
from workers.evaluation import lengths

EXAMPLES = Path(__file__).parents[4] / "docs" / "examples"
MEASURED_S = 270  # of examples/dis.yaml (docs/measurements.md), on cores with the speeds of profiles


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("durations")
    tiny_family(directory, experts=("math",))
    lines = [json.dumps({"prompt": "abcdef", "answer": "xyz"})] * 3 + [json.dumps({"prompt": "ab", "answer": "x"})] * 3
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def study_of(root: Path, task: Any, metric: str = "exact_match", **changes: Any) -> Any:
    document = {
        "name": "small",
        "models": {"base": "base", "experts": {"math": "math"}},
        "search_space": {"kind": "lfs", "layer_groups": 2},
        "search": {"algorithm": "random", "max_trials": 2},
        "fidelity": {"scheduler": "none", "max_samples": 6},
        "objectives": [{"name": "data", "task": task, "metric": metric}],
        "engine": {"max_model_len": 64},
    } | changes
    return parse_study(document, root)


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "this_machine", lambda: MachineProfile("here", 2, 1 << 34))


def test_answers_end_where_the_references_do_or_at_the_limit(root: Path, speed: None) -> None:
    plan = check(study_of(root, {"file": "data.jsonl", "max_tokens": 8}), root)
    prompts, answers = 1 + (6 + 2) / 2, (3 + 1) / 2 + 1  # characters; one token begins a prompt, one ends an answer
    assert plan.tokens == pytest.approx((prompts + answers, prompts + 8))
    assert plan.hours < plan.most_hours
    assert "min, by this machine's arithmetic speed and 8 to 13 tokens a sample" in plan.to_text()


@pytest.mark.parametrize(
    ("search", "space", "is_sorted"),
    [
        ({}, {"kind": "layerwise"}, True),  # the default baselines include TIES
        ({"baselines": "sources"}, {"kind": "layerwise"}, False),
        ({"baselines": ["m3"]}, {"kind": "layerwise"}, False),  # by thresholds of whole models
        ({"baselines": "none"}, {"kind": "lfs", "layer_groups": 2, "methods": ["linear", "ties"]}, True),
        ({"baselines": "none"}, {"kind": "lfs", "layer_groups": 2, "methods": ["linear"]}, False),
    ],
)
def test_statistics_are_a_phase_if_merges_use_them(
    root: Path, speed: None, search: dict[str, Any], space: dict[str, Any], is_sorted: bool
) -> None:
    """The sorting of the expert's task vector for magnitude tables is planned once."""
    changes: dict[str, Any] = {
        "search_space": space,
        "search": {"algorithm": "random", "max_trials": 2, **search},
    }
    machine = check(study_of(root, {"file": "data.jsonl", "max_tokens": 8}, **changes), root).machine
    sorting = [phase for phase in machine.phases if phase.name == "statistics"]
    assert len(sorting) == is_sorted
    for phase in sorting:
        assert phase.elapsed_s.most == pytest.approx(machine.facts.parameters / 2.6e7)


@pytest.mark.parametrize(("trials", "number"), [(2, 3), (150, 7)])
def test_canaries_are_a_phase(root: Path, speed: None, trials: int, number: int) -> None:
    """Two engines of a machine make one canary for both at the start, one each after 32 swaps, and one at the end."""
    engine = {"max_model_len": 64, "replicas": 2}
    search = {"algorithm": "random", "max_trials": trials, "baselines": "none"}
    study = study_of(root, {"file": "data.jsonl", "max_tokens": 8}, search=search, engine=engine)
    (phase,) = [each for each in check(study, root).machine.phases if each.name == "canary"]
    assert (phase.number, phase.width) == (number, 1), "one after the other"
    assert phase.elapsed_s.most > 0


def test_token_counts_are_kept(root: Path, tmp_path: Path, speed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counted tokens of a task are kept until its data change."""
    data, counted = tmp_path / "own.jsonl", []
    count = lengths._counted
    monkeypatch.setattr(lengths, "_counted", lambda *arguments: counted.append(1) or count(*arguments))
    found = []
    for answer in ("x", "x", "xyz"):
        data.write_text((json.dumps({"prompt": "ab", "answer": answer}) + "\n") * 6)
        found.append(check(study_of(root, {"file": str(data), "max_tokens": 8}), root).tokens)
    assert found == [(3 + 2, 3 + 8), (3 + 2, 3 + 8), (3 + 4, 3 + 8)]
    assert len(counted) == 2


def test_long_prompts_are_reported_early(root: Path) -> None:
    """Prompts that an engine would refuse are reported before one starts."""
    task = {
        "task": "beams",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(root / "data.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "num_beams": 4, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (root / "beams.yaml").write_text(yaml.safe_dump(task))
    with pytest.raises(InvalidStudy, match=r"^objectives\.0\.task: generation argument num_beams: beam search is not"):
        check(study_of(root, "beams.yaml"), root)


def test_passes_of_gradient_steps_are_counted(root: Path, speed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of a gradient step reads the sources, so the plan counts the passes that a step's tokens need."""
    seen: list[tuple[Work, int]] = []

    def step_s(self: Speeds, work: Work, *, recomputes: bool, num_passes: int) -> float:
        seen.append((work, num_passes))
        return 1.0

    monkeypatch.setattr(Speeds, "step_s", step_s)
    monkeypatch.setattr(examine, "gradient_place", lambda *_, **__: (GradientPlace("cpu", tokens=20), ""))
    changes: dict[str, Any] = {
        "search_space": {"kind": "layerwise"},
        "search": {"algorithm": "gradient", "max_trials": 2},
    }
    check(study_of(root, {"file": "data.jsonl", "max_tokens": 8}, **changes), root)
    [(work, num_passes)] = seen
    tokens = work.samples * (work.tokens.read + work.tokens.answered)
    assert num_passes == math.ceil(tokens / 20) > 1


@pytest.mark.slow
def test_time_of_a_measured_study(root: Path, speed: None) -> None:
    """The estimated time of a measured study is right within a factor of two."""
    plan = check(load_study(EXAMPLES / "dis.yaml"), root)
    assert plan.samples.search == 81_540, "as the study scored"
    assert MEASURED_S / 2 < plan.hours * 3600 < plan.most_hours * 3600 < 2 * MEASURED_S
