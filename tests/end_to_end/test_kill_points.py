"""SIGKILL at every point where a driver can be caught, in processes: the same command goes on as if nothing was."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from search_spaces.study import load_study
from service.preflight import examine
from service.run import DATABASE, read_run
from service.store import Store
from service.tune.coordinator import Coordinator
from service.types import StudyState
from tests.builders import tiny_family
from tests.end_to_end.processes import query, started
from tests.service.harness import InlineProposer, drive, trial_list
from workers.checkpoints import open_checkpoint
from workers.fake import FakeScorer

ATTEMPT_S = 300.0

# In the order in which one study comes to them. The first chunk of a trial at full budget holds 512 of its 540 samples.
KILL_POINTS = (
    ("ask", 2),
    ("scoring", 2),  # while a chunk is being scored
    ("chunk", 2),  # scored, not yet stored
    ("commit", 3),  # stored, and nothing made of it yet
    ("promotion", 1),
    ("holdout", 2),
    ("complete", 1),  # the study is, its files are not
    ("export", 5),
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kill_points")
    tiny_family(directory, experts=("math", "text"))
    for name, size in (("search", 540), ("holdout", 40)):
        lines = (json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(size))
        (directory / f"{name}.jsonl").write_text("".join(lines))

    def objective(split: str) -> dict[str, Any]:
        task = {"file": str(directory / f"{split}.jsonl"), "max_tokens": 6}
        return {"name": "sums", "task": task, "metric": "exact_match"}

    document = {
        "name": "kill-points",
        "models": {"base": str(directory / "base"), "experts": {a: str(directory / a) for a in ("math", "text")}},
        "search_space": {"kind": "lfs", "layer_groups": 2},
        "search": {"algorithm": "random", "max_trials": 12},
        "fidelity": {"scheduler": "hyperband", "rungs": [60, 180, 540]},
        "objectives": [objective("search")],
        "holdout": [objective("holdout")],
        "engine": {"max_model_len": 64},
    }
    file = directory / "study.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.fixture(scope="module")
def ray_address(ray_cluster: None) -> str:
    """Of a Ray that outlives the commands: starting one for each takes longer than the study."""
    return str(ray.get_runtime_context().gcs_address)


@pytest.mark.timeout(900)
def test_killed_at_every_point_the_study_ends_with_the_trials_chunks_and_samples_of_an_undisturbed_one(
    study: Path, tmp_path: Path, ray_address: str
) -> None:
    out = tmp_path / "run"
    attempts = [{"dies_at": point, "in_flight": 1} for point in KILL_POINTS]
    with started(command(study, out, attempts), directory=out, ray_address=ray_address) as run:
        assert run.wait(timeout_s=ATTEMPT_S) == 0, run.log
    assert json.loads(run.log.splitlines()[-1]) == [-signal.SIGKILL] * len(KILL_POINTS), run.log
    assert not (out / "export").exists()
    assert len(list(out.glob(".export.*.partial"))) == 1, "the last kill came in the middle of the export"

    with started(command(study, out, {}), directory=out, ray_address=ray_address) as run:
        assert run.wait(timeout_s=ATTEMPT_S) == 0, run.log
    with read_run(out) as (store, record):
        assert record.state is StudyState.COMPLETE
        trials = trial_list(store, record.id)
        expected = undisturbed(study, record.facts, tmp_path / "undisturbed")
    assert (trials, stored(out)) == expected
    assert open_checkpoint(out / "export").tensors.keys() == open_checkpoint(study.parent / "base").tensors.keys()
    assert not list(out.glob(".export.*"))


def command(study: Path, out: Path, settings: Any) -> list[str | Path]:
    fake = [sys.executable, "-m", "tests.end_to_end.fake_run", json.dumps(settings)]
    return [*fake, "run", study, "--out", out, "--export", "best"]


def undisturbed(study_file: Path, facts: Mapping[str, Any], directory: Path) -> tuple[list[Any], list[Any]]:
    """Trials and what is stored of their chunks and samples, without Ray: one evaluation after the other."""
    directory.mkdir()
    examination = examine(load_study(study_file))
    store = Store(f"sqlite:///{directory / DATABASE}")
    study_id = store.create_study(name="undisturbed", document={}, facts={}).id
    coordinator = Coordinator(
        examination.plan(study_id, facts),
        space=examination.space,
        store=store,
        writer=store.open_attempt(study_id),
        proposer=InlineProposer(examination.space, seed=0),
    )
    drive(coordinator, FakeScorer(bank_fingerprint=examination.family.fingerprint), concurrency=1)
    trials = trial_list(store, study_id)
    store.close()
    return trials, stored(directory)


def stored(directory: Path) -> list[Any]:
    chunks = query(directory, "SELECT recipe_digest, prompts, num_samples FROM evidence ORDER BY 1, 2")
    columns = "recipe_digest, split, objective, position, value, response"
    return [chunks, query(directory, f"SELECT {columns} FROM samples ORDER BY 1, 2, 3, 4")]
