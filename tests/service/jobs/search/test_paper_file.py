"""A file of docs/papers with the real engine: its task, space, searcher and rungs, with tiny models and data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from search_spaces.study.file import parse_study
from tests.end_to_end.studies import undisturbed
from tests.workers.task_pack.rows import in_memory, shipped_index
from workers.engines.vllm.engine import Engine
from workers.evaluation import task_index
from workers.evaluation.lm_eval import TaskEvaluator
from workers.serving.engine_worker import EngineWorker
from workers.types import Family

PAPERS = Path(__file__).parents[4] / "docs" / "papers"


class Worker(EngineWorker):
    """A replica's worker with the engine of these tests."""

    def __init__(self, engine: Engine) -> None:
        self.name, self.engine, self.busy_s = "tests", engine, 0.0
        self.evaluator = TaskEvaluator(engine, engine.prompts)

    def is_starting(self) -> bool:
        return False


def test_lfs_on_openbookqa(
    engine: Engine, untied_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LFS of Table 2: models are merged and score the shipped task at three rungs."""
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", in_memory(12, {}, distinct=True))
    monkeypatch.setattr(task_index, "_given", shipped_index())
    document = yaml.safe_load((PAPERS / "lfs_reasoning.yaml").read_text())
    document |= {
        "models": {
            "base": untied_family.base.directory,
            "experts": {expert.alias: expert.directory for expert in untied_family.experts},
        },
        "search": document["search"] | {"max_trials": 3},
        "fidelity": {"scheduler": "hyperband", "rungs": [3, 6, 12]},
        "engine": {"dtype": "float32", "max_model_len": 256},
    }
    (tmp_path / "study.json").write_text(json.dumps(parse_study(document, PAPERS).canonical()))
    trials = undisturbed(tmp_path / "study.json", tmp_path / "run", scorer=Worker(engine))
    assert len(trials) == 1 + len(untied_family.experts) + 3
    values = [json.dumps(trial, default=str) for trial in trials]
    assert len(set(values)) == len(values)
