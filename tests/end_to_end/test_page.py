"""The main job on the web page of a server whose scores are fakes: from a study file to a downloaded merge."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from service.client import Client
from tests.end_to_end import page as web
from tests.end_to_end.server import Server, cancelled_on_failure
from tests.end_to_end.studies import write_small_study

TIMEOUT_S = 200.0


@pytest.mark.timeout(600)
def test_a_merge_is_searched_picked_and_taken_home(fake_server: Server, tmp_path: Path) -> None:
    """A study is submitted, watched, and picked from by sliders; what is downloaded merges to the same weights."""
    server, models_dir = fake_server, fake_server.data_dir.parent / "by-page"
    models_dir.mkdir()
    document = yaml.safe_load(write_small_study(models_dir, name="by-page", rungs=[10, 30], max_trials=8).read_text())
    for part in ("objectives", "holdout"):
        document[part] += [{**document[part][0], "name": "words"}]
    with Client(server.url) as client, web.tab(server.url) as page, ExitStack() as places:
        study = web.submit(page, server.url, document, timeout_s=TIMEOUT_S)
        places.enter_context(cancelled_on_failure(server, study))
        web.watch(page, timeout_s=TIMEOUT_S)
        trial = web.pick(page, {"sums": 0, "words": 100})
        assert trial == client.pareto(study, prefer={"sums": 0.0, "words": 1.0})["preferred"]["trial"]
        taken = web.download(page, trial, tmp_path / "taken", timeout_s=TIMEOUT_S)
        assert taken["digest"] == client.trial(study, trial)["recipe_digest"]
        exported, digest = Path(taken["directory"]), client.trial(study, trial)["recipe_digest"]
        files = {
            "exported": exported / "recipe.json",
            "fetched": web.fetch_recipe(page, server.url, study, trial, tmp_path),
        }
        tensors = web.weights(exported)
        assert tensors, "the weights are there"
        for name, file in files.items():
            models = {alias: models_dir / alias for alias in json.loads(file.read_text())["models"]}
            merged = web.merge(file, models, tmp_path / f"merged-{name}")
            assert merged["digest"] == digest, name
            assert merged["dtype"] == taken["dtype"] == "float32", name
            assert merged["weights"] == tensors, f"{name}: other bits than those of the exported merge"
        names = "".join(file.read_text() for file in exported.glob("*.yml"))
        assert str(models_dir.parent) not in names, "paths of the server"
