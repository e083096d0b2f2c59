"""SIGKILL at each point of a driver's work, in processes: the same command then continues as if without a kill."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.recipe import Recipe
from service.jobs.search.local_run import read_run
from service.resolved_study import ResolvedStudy
from service.types import JobState
from tests.end_to_end.processes import started
from tests.end_to_end.studies import DIS, stored, undisturbed, write_small_study
from tests.service.tune.harness import trial_list
from workers.models.checkpoints import open_checkpoint

ATTEMPT_S = 300.0

# In the order in which one study comes to them. The first chunk of a trial at full budget holds 512 of its 540 samples.
KILL_POINTS = (
    ("ask", 2),
    ("scoring", 2),  # while a chunk is being scored
    ("chunk", 2),  # scored, not yet stored
    ("commit", 3),  # stored, and nothing made of it yet
    ("promotion", 1),
    ("holdout", 2),
    ("benchmark", 2),
    ("complete", 1),  # the study is, its files are not
    ("export", 5),
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Study file with layer paths, long enough for two chunks of a trial at full budget.

    A study of paths has the most work that a resumed study must repeat: draws, repairs, and an export of another depth.
    """
    directory = tmp_path_factory.mktemp("kill_points")
    file = write_small_study(directory, name="kill-points", rungs=[60, 180, 540], max_trials=12, space=DIS)
    document = yaml.safe_load(file.read_text())
    document["benchmarks"] = [{**document["holdout"][0], "name": name, "group": "sums"} for name in ("one", "other")]
    file.write_text(json.dumps(document))  # YAML, without aliases of what occurs twice
    return file


@pytest.mark.timeout(900)
def test_kill_at_every_point_changes_nothing(study: Path, tmp_path: Path, ray_address: str) -> None:
    """A study killed at every point ends with the trials, chunks and samples of an undisturbed one."""
    out = tmp_path / "run"
    attempts = [{"dies_at": point} for point in KILL_POINTS]
    with started(command(study, out, attempts), directory=out, ray_address=ray_address) as run:
        assert run.wait(timeout_s=ATTEMPT_S) == 0, run.log
    assert json.loads(run.log.splitlines()[-1]) == [-signal.SIGKILL] * len(KILL_POINTS), run.log
    assert not (out / "export").exists()
    assert len(list(out.glob(".export.*.partial"))) == 1, "the last kill came in the middle of the export"

    with started(command(study, out, {}), directory=out, ray_address=ray_address) as run:
        assert run.wait(timeout_s=ATTEMPT_S) == 0, run.log
    with read_run(out) as (store, record):
        assert record.state is JobState.COMPLETE
        trials = trial_list(store, record.id)
        assert trials == undisturbed(study, tmp_path / "undisturbed", resolved=ResolvedStudy.of(record), concurrency=1)
    assert stored(out) == stored(tmp_path / "undisturbed")
    recipe = Recipe.from_json(json.loads((out / "export" / "recipe.json").read_text()))
    assert open_checkpoint(out / "export").layout.num_layers == len(recipe.layers)
    assert not list(out.glob(".export.*"))


def command(study: Path, out: Path, settings: Any) -> list[str | Path]:
    fake = [sys.executable, "-m", "tests.end_to_end.fake_run", json.dumps(settings)]
    return [*fake, "run", study, "--out", out, "--export", "best"]
