"""`service.jobs.driver` with fake workers in real Serve replicas. FAKE_SCORER holds the fake's settings as JSON.

Image classifiers have their own workers: tiny ones start in the time of an import.

FAKE_HEARTBEAT replaces constants of the heartbeat, for instance {"SCORING_PATIENCE_S": 10}, FAKE_TUNE those of
`service.tune.ray_tune`, for instance {"CHUNK_GRACE_S": 5}, and FAKE_DEPLOY arguments of `deploy_scorer`, for instance
{"health_check_timeout_s": 1}. FAKE_IN_FLIGHT is the number of trial actors for each replica; starting one takes 3 s of
a core.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import service.jobs.driver
import service.jobs.heartbeat
import service.jobs.search.attempt
import service.studies.preflight.result
import service.tune.ray_tune
from search_spaces.study.engine import EngineOptions
from service.jobs.resources import KEEP_IDLE_S, SHARED
from workers.serving.deployment import deploy_scorer
from workers.serving.fake import FakeScorer
from workers.types import Family, Scorer


@contextmanager
def _fake_scorer(family: Family, options: EngineOptions, replicas: int) -> Iterator[Scorer]:
    settings = json.loads(os.environ["FAKE_SCORER"])
    fake = functools.partial(FakeScorer, bank_fingerprint=family.fingerprint, **settings)
    yield deploy_scorer(
        family,
        options,
        replicas=replicas,
        keep_idle_s=KEEP_IDLE_S,
        make_worker=None if family.modality == "image" else fake,
        **{"health_check_period_s": 1.0, **json.loads(os.environ.get("FAKE_DEPLOY", "{}"))},
    )


if __name__ == "__main__":
    for name, value in json.loads(os.environ.get("FAKE_HEARTBEAT", "{}")).items():
        for module in (service.jobs.heartbeat, service.jobs.search.attempt):
            setattr(module, name, value)
    for name, value in json.loads(os.environ.get("FAKE_TUNE", "{}")).items():
        setattr(service.tune.ray_tune, name, value)
    if in_flight := os.environ.get("FAKE_IN_FLIGHT"):
        service.studies.preflight.result.CHUNKS_IN_FLIGHT_PER_REPLICA = int(in_flight)  # type: ignore[attr-defined]
    sys.exit(service.jobs.driver.main(replace(SHARED, scorer=_fake_scorer)))
