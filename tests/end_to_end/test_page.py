"""The main job on the web page of a server whose scores are fakes: from a study file to a downloaded merge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from service.client import Client
from tests.end_to_end import page as web
from tests.end_to_end.server import serving
from tests.end_to_end.studies import write_small_study

TIMEOUT_S = 200.0


@pytest.mark.timeout(600)
def test_a_merge_is_searched_picked_and_taken_home(tmp_path: Path) -> None:
    """A study is submitted, watched, its front picked from by sliders, and the download has that trial's recipe."""
    (tmp_path / "models").mkdir()
    document = yaml.safe_load(
        write_small_study(tmp_path / "models", name="by-page", rungs=[20, 60], max_trials=8).read_text()
    )
    for part in ("objectives", "holdout"):
        document[part] += [{**document[part][0], "name": "words"}]
    settings = {"FAKE_SCORER": json.dumps({"sample_delay_s": 0.005})}
    with (
        serving(["tests.benchmarks.fake_serve"], tmp_path / "data", environment=settings) as server,
        Client(server.url) as client,
        web.tab(server.url) as page,
    ):
        study = web.submit(page, server.url, document, timeout_s=TIMEOUT_S)
        web.watch(page, timeout_s=TIMEOUT_S)
        trial = web.pick(page, {"sums": 0, "words": 100})
        assert trial == client.pareto(study, prefer={"sums": 0.0, "words": 1.0})["preferred"]["trial"]
        taken = web.download(page, trial, tmp_path / "taken", timeout_s=TIMEOUT_S)
        assert taken["digest"] == client.trial(study, trial)["recipe_digest"]
        assert list(Path(taken["directory"]).glob("*.safetensors")), "the weights are there"
