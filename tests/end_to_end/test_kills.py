"""Kill of a run's driver with real engines and a real Ray: the state that the run leaves.

The death of a replica is in `test_serve.py`, that of the process group in `test_run.py`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.jobs.search.local_run import read_run
from tests.conftest import OPTIONS, record_engine_start
from tests.end_to_end.processes import (
    ALL_GONE_S,
    REPLICA,
    WORKING_GONE_S,
    Run,
    check_gone,
    mergesearch,
    num_chunks,
    query,
    started,
)
from tests.end_to_end.studies import undisturbed
from tests.service.tune.harness import trial_list
from workers.engines.transformers.backend import Reference
from workers.evaluation.prompts import Generation
from workers.serving.serve_scorer import ServeScorer
from workers.types import Family

START_S = 300.0  # Ray, Serve and an engine, on two busy cores
MAX_TOKENS = 2
NUM_SEARCH, NUM_HOLDOUT = 128, 40


@pytest.fixture(scope="module")
def study(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Study file of a Qwen2 family with tied embeddings. Each task has the completions of one of the experts."""
    directory = tmp_path_factory.mktemp("kills")
    objectives: dict[str, list[dict[str, Any]]] = {"search": [], "holdout": []}
    for expert in tied_family.experts:
        name = expert.alias
        rows = _sayings(expert.directory, name)[: NUM_SEARCH + NUM_HOLDOUT]
        for split, part in (("search", rows[:NUM_SEARCH]), ("holdout", rows[NUM_SEARCH:])):
            file = directory / f"{name}_{split}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in part))
            task = {"file": str(file), "max_tokens": MAX_TOKENS}
            objectives[split].append({"name": name, "task": task, "metric": "exact_match"})
    document = {
        "name": "kills",
        "models": {
            "base": tied_family.base.directory,
            "experts": {expert.alias: expert.directory for expert in tied_family.experts},
        },
        "search_space": {"kind": "lfs", "layer_groups": 2},
        "search": {"algorithm": "random", "max_trials": 14},
        "fidelity": {"scheduler": "hyperband", "rungs": [20, 60, NUM_SEARCH]},
        "objectives": objectives["search"],
        "holdout": objectives["holdout"],
        "engine": {"max_model_len": OPTIONS.max_model_len, "verify": {"trials": 1, "samples": 8}},
    }
    file = directory / "study.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def _sayings(model: str, name: str) -> list[dict[str, str]]:
    """Prompts that the model completes with some text, and the completions of transformers."""
    reference = Reference(model, OPTIONS)
    prompts = [f"{name} {7 * i % 1000}+{i}=" for i in range(3 * NUM_SEARCH)]
    requests = [Generation(tuple(reference.prompts.encode(prompt)), MAX_TOKENS, ("\n",)) for prompt in prompts]
    answers = [completion.text.strip() for completion in reference.generate(requests)]
    return [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True) if a]


@pytest.mark.timeout(1500)
def test_a_kill_leaves_trials_and_no_process(study: Path, scorer: ServeScorer, tmp_path: Path) -> None:
    """A kill of a run's driver leaves no process, and the resumed run has the undisturbed trials."""
    expected = undisturbed(study, tmp_path / "undisturbed", scorer=scorer)
    scores = {trial[2]: trial[7][-1].values for trial in expected}
    assert min(scores[f"expert:{name}"][name] for name in ("math", "text")) > 0.99, "what transformers said they say"
    assert len({tuple(values.values()) for values in scores.values()}) > 10, "scores tell the trials apart"
    total = num_chunks(tmp_path / "undisturbed")

    disturbed = tmp_path / "disturbed"
    command = mergesearch("run", study, "--out", disturbed)
    with started(command, directory=disturbed) as run:
        _until_scoring(run, 3, "killed run")
        processes = run.processes()
        assert sum(process.name.startswith(REPLICA) for process in processes) == 1
        run.kill()
    killed_at = time.monotonic()
    before = _trials(disturbed)
    assert num_chunks(disturbed) < total, "the kill came too late to matter"

    with started(command, directory=disturbed) as run:
        check_gone(processes, since=killed_at, timeout_s=WORKING_GONE_S, working_only=True)
        _until_scoring(run, num_chunks(disturbed) + 1, "run resumed after the driver's kill")
        assert [trial[:3] for trial in _trials(disturbed)][: len(before)] == [trial[:3] for trial in before]
        check_gone(processes, since=killed_at, timeout_s=ALL_GONE_S)
        assert run.wait(timeout_s=START_S) == 0, run.log

    assert _trials(disturbed) == expected
    assert num_chunks(disturbed) == total
    # Every chunk that left evidence left all its samples, and none of them was there already.
    assert query(disturbed, "SELECT sum(num_samples) FROM evidence") == query(
        disturbed, "SELECT sum(num_samples) FROM sample_chunks"
    )
    summary = json.loads((disturbed / "summary.json").read_text())
    assert summary["state"] == "COMPLETE"
    assert summary["engine"]["starts"] == 2
    assert summary["verification"]["samples"] == summary["verification"]["equal"] == 16


def _until_scoring(run: Run, num_rows: int, label: str) -> None:
    started_at = time.monotonic()
    run.wait_for_rows(num_rows, timeout_s=START_S)
    record_engine_start(label, time.monotonic() - started_at)


def _trials(directory: Path) -> list[tuple[Any, ...]]:
    with read_run(directory) as (store, study):
        return trial_list(store, study.id)
