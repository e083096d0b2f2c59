"""Resources of running jobs and their remaining time, from their documents and their progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from search_spaces.study.file import Study
from service.jobs.finetune.kind import FINETUNE
from service.jobs.search.kind import SEARCH
from service.types import Demand, JobRecord, JobState
from tests.service.api.harness import document, finetuning
from workers.training.finetuning.fleet import parse_pipeline


def job(kind: str, document: Mapping[str, Any], progress: Mapping[str, Any] | None = None) -> JobRecord:
    return JobRecord("a" * 32, "a", JobState.RUNNING, document, {}, 0.0, kind, progress=progress)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_model_len": 64}, Demand(1, 1)),
        ({"max_model_len": 64, "replicas": 3}, Demand(3, 3)),
        ({"max_model_len": 64, "replicas": 2, "tensor_parallel_size": 4}, Demand(2, 8)),
    ],
)
def test_a_study_counts_as_its_limit_of_gpu_hours(options: dict[str, Any], expected: Demand) -> None:
    study = Study.model_validate(document(engine=options))
    found = SEARCH.demand(job("search", study.canonical()))
    assert found == expected
    assert found.num_gpus == study.engine.num_gpus


def test_a_fine_tuning_counts_its_workers() -> None:
    """One expert at a time counts, or as many as train side by side, those with the most workers."""
    experts = finetuning()["experts"]
    experts["math"]["workers"], experts["text"]["workers"] = 1, 2
    fleet = parse_pipeline(finetuning(experts=experts)).canonical()
    assert FINETUNE.demand(job("finetune", fleet)) == Demand(2, 2)
    both = parse_pipeline(finetuning(experts=experts, parallel_experts=2)).canonical()
    assert FINETUNE.demand(job("finetune", both)) == Demand(3, 3)
    assert FINETUNE.demand(job("finetune", {"name": "one", "workers": 4})) == Demand(4, 4)


def test_time_left_is_what_the_progress_tells() -> None:
    """A study says it itself; a single expert has its updates; nothing is made up for a fleet."""
    assert SEARCH.time_left_s(job("search", {})) is None
    assert SEARCH.time_left_s(job("search", {}, {"stage": "searching"})) is None
    assert SEARCH.time_left_s(job("search", {}, {"time_left_s": 12.5})) == 12.5
    begun = {"experts": {"one": {"step": 10, "steps": 30, "loss": 1.0, "seconds": 0.5, "values": {}}}}
    assert FINETUNE.time_left_s(job("finetune", {"name": "one"}, begun)) == 10.0
    assert FINETUNE.time_left_s(job("finetune", {"name": "one"})) is None
    assert FINETUNE.time_left_s(job("finetune", {"name": "fleet", "experts": {}}, begun)) is None
