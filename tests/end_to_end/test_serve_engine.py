"""The main job over HTTP on the shipped family with a real engine: two studies at once, one engine, one download."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from search_spaces.study import load_study, parse_study
from service.client import Client
from service.preflight import examine
from service.store import Store
from service.study_job import DATABASE
from tests.conftest import record_engine_start
from tests.end_to_end.processes import mergesearch
from tests.end_to_end.server import serving
from workers.reference import verify
from workers.tiny_family import family_dir
from workers.types import Span

START_S = 400.0
NUM_SAMPLES = 30


def study(directory: Path, *, seed: int) -> dict[str, Any]:
    """A short study of the shipped family, with twenty held-out samples a skill."""
    document = load_study(family_dir() / "study.yaml").canonical()
    document["name"] = f"shipped-{seed}"
    document["search"] = {"algorithm": "random", "max_trials": 3, "seed": seed}
    document["fidelity"] = {"scheduler": "none", "max_samples": NUM_SAMPLES}
    document["engine"]["verify"] = {"trials": 1, "samples": 8}
    for spec in document["holdout"]:
        short = directory / f"{spec['name']}_holdout.jsonl"
        short.write_text("".join(Path(spec["task"]["file"]).read_text().splitlines(keepends=True)[:20]))
        spec["task"]["file"] = str(short)
    return document


@pytest.mark.timeout(900)
def test_two_studies_share_an_engine_and_the_downloaded_model_scores_as_reported(tmp_path: Path) -> None:
    documents = [study(tmp_path, seed=seed) for seed in (1, 2)]
    file = tmp_path / "first.json"
    file.write_text(json.dumps(documents[0]))
    started_at = time.monotonic()
    with serving(["service.cli", "serve"], tmp_path / "data") as server, Client(server.url) as client:
        second = client.submit(documents[1])["id"]
        watched = subprocess.run(
            [str(argument) for argument in mergesearch("submit", file, "--watch", "--server", server.url)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        record_engine_start("shipped family, two studies over HTTP", time.monotonic() - started_at)
        assert watched.returncode == 0, watched.stderr + server.log
        assert server.wait_until_ended(second, timeout_s=START_S)["state"] == "COMPLETE", server.story(second)
        (first,) = (each["id"] for each in client.studies() if each["name"] == "shipped-1")
        best = client.summary(first)["best"]
        assert best is not None
        front = [entry["trial"] for entry in client.pareto(first)["front"]]
        assert best["trial"] in front
        out = client.export(first, "best", tmp_path / "model")
        assert server.stop() == 0

    store = Store(f"sqlite:///{server.data_dir / DATABASE}")
    replicas = {id: {row["replica"] for row in store.evidence(id)} for id in (first, second)}
    assert len(replicas[first] | replicas[second]) == 1
    examination = examine(parse_study(documents[0]))
    recipe = store.trial(first, best["trial"]).recipe
    report = verify(
        recipe.digest,
        str(out),
        examination.engine_options,
        samples=store.samples(first, recipe.digest, "search"),
        spans=tuple(Span(name, task, 0, NUM_SAMPLES) for name, task in examination.tasks.items()),
        dtype="float32",
        engine_logprobs={},
    )
    store.close()
    assert report.num_samples == NUM_SAMPLES * len(examination.tasks)
    assert report.num_beyond == 0, report.differences
