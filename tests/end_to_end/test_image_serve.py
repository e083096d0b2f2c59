"""A study of image classifiers over HTTP, with real engines whose replica and driver are killed: as for text."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from search_spaces.study.file import load_study
from service.cli.main import main
from service.client import Client, Event
from service.disk import DATABASE
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.studies.preflight.examine import examine
from tests.conftest import record_engine_start
from tests.end_to_end.page import weights
from tests.end_to_end.server import Server, cancelled_on_failure, drivers
from tests.end_to_end.studies import HEADS, image_study, undisturbed, write_image_models
from tests.end_to_end.test_serve import chunks_scored_twice
from tests.service.tune.harness import trial_list
from workers.serving.image_worker import ImageWorker

WAIT_S = 240.0
SPACE = {"kind": "lfs", "layer_groups": 2, "methods": ["task_arithmetic", "linear"]}
NUM_TRIALS = 12  # more than are scored until both kills


class Scorer(ImageWorker):
    """The worker of a replica, called directly."""

    def is_starting(self) -> bool:
        return False


def events_until_ended(url: str, study: str) -> list[Event]:
    """The study's events, from a stream that ends with the study."""
    with Client(url) as client:
        return list(client.events(study))


@pytest.mark.timeout(600)
def test_an_image_study_survives_kills(fake_server: Server, tmp_path: Path) -> None:
    """An image study whose replica and driver are killed has the undisturbed trials.

    It is watched from its submission to its end. Its report, recipe and best merge are fetched, and the recipe gives
    the same weights on this machine.
    """
    server = fake_server
    models = server.data_dir.parent / "images"
    models.mkdir()
    document = image_study(
        write_image_models(models),
        SPACE,
        search={"algorithm": "random", "max_trials": NUM_TRIALS, "seed": 3, "baselines": "sources"},
        engine={"verify": {"trials": 1, "samples": 12}},
    )
    file = tmp_path / "study.json"
    file.write_text(json.dumps(document))
    with ThreadPoolExecutor(1) as pool, Client(server.url) as client, ExitStack() as places:
        started_at = time.monotonic()
        study = client.submit(file)["id"]
        places.enter_context(cancelled_on_failure(server, study))
        watched = pool.submit(events_until_ended, server.url, study)
        server.wait_for_events(study, 2, "rung", timeout_s=WAIT_S)
        record_engine_start("image classifiers, over HTTP", time.monotonic() - started_at)
        with closing(Store(f"sqlite:///{server.data_dir / DATABASE}", waits=True)) as store:
            kill_replica(server, study, store)
        kill_driver(server, study)
        assert server.wait_until_ended(study, timeout_s=WAIT_S)["state"] == "COMPLETE", server.story(study)
        events = watched.result(timeout=WAIT_S)
        summary = client.summary(study)
        report = client.report(study)
        assert summary["best"] is not None
        best = summary["best"]["trial"]
        exported = Path(client.export(study, "best", tmp_path / "exported"))
        recipe = client.recipe(study, best)
        digest = client.trial(study, best)["recipe_digest"]

    assert (events[-1].kind, events[-1].payload["state"]) == ("end", "COMPLETE")
    stored = [event for event in events if event.id is not None]
    assert [event.id for event in stored] == [event["id"] for event in server.events(study)]
    assert [event.kind for event in stored].count("attempt") == 2
    assert summary["verification"]["samples"] == summary["verification"]["equal"] == 24
    assert "<h1>images</h1>" in report
    assert f"trial {best}" in report.lower()

    preflight = examine(load_study(file))
    scorer = Scorer(preflight.models.family, preflight.engine_options, device="cpu")
    with closing(Store(f"sqlite:///{server.data_dir / DATABASE}")) as store:
        resolved = ResolvedStudy.of(store.job(study))
        expected = undisturbed(file, tmp_path / "alone", scorer=scorer, resolved=resolved)
        assert trial_list(store, study) == expected
        assert chunks_scored_twice(store, study) == []
        assert len({row.replica for row in store.evidence(study)}) == 2
    assert len({json.dumps(trial[7][-1].values) for trial in expected}) > 3, "scores tell the trials apart"

    check_merged_here(exported, recipe, digest, models, tmp_path)


def kill_replica(server: Server, study: str, store: Store) -> None:
    """Kill the replica that has scored the study so far, and wait for the next one."""
    (name,) = {row.replica for row in store.evidence(study)}
    started_at = time.monotonic()
    psutil.Process(int(name.split("-")[-2])).kill()
    server.wait_for_events(study, 2, "replica", timeout_s=WAIT_S)
    record_engine_start("image classifiers, in place of the killed replica", time.monotonic() - started_at)


def kill_driver(server: Server, study: str) -> None:
    killed = drivers(study)
    assert killed, "no driver of the study is running"
    for driver in killed:
        driver.kill()
    server.wait_for_events(study, 2, "attempt", timeout_s=WAIT_S)


def check_merged_here(exported: Path, recipe: Mapping[str, Any], digest: str, models: Path, directory: Path) -> None:
    """The downloaded merge has the trial's digest, and its recipe gives the same encoder on this machine.

    The download has the heads of all models of the study, a merge of the recipe those of the models in it.
    """
    assert json.loads((exported / "recipe.json").read_text())["digest"] == digest
    file, merged = directory / "recipe.json", directory / "merged"
    file.write_text(json.dumps(recipe))
    sources = [word for alias in recipe["models"] for word in ("--model", f"{alias}={models / alias}")]
    assert main(["merge", str(file), "--out", str(merged), *sources]) == 0
    assert json.loads((merged / "recipe.json").read_text())["digest"] == digest
    downloaded, here = (load_file(place / "model.safetensors") for place in (exported, merged))
    encoder = [name for name in downloaded if not name.startswith("classifier.")]
    assert len(encoder) > 30
    for name in encoder:
        assert torch.equal(downloaded[name], here[name]), name
    heads, fewer = weights(exported / "heads"), weights(merged / "heads")
    assert heads.keys() == {"shape.safetensors", "answer.safetensors"}
    assert fewer == {
        f"{alias}.safetensors": heads[f"{alias}.safetensors"] for alias in recipe["models"] if alias in HEADS
    }
