"""`service.jobs.driver` with fake workers in real Serve replicas. FAKE_SCORER holds the fake's settings as JSON.

FAKE_HEARTBEAT replaces constants of the heartbeat, for instance {"SCORING_PATIENCE_S": 10}, and FAKE_DEPLOY arguments
of `deploy_scorer`, for instance {"health_check_timeout_s": 1}.
"""

from __future__ import annotations

import functools
import json
import os
import sys

import service.jobs.driver
import service.jobs.search
import service.studies.attempt
import service.studies.heartbeat
from service.studies.preflight.examine import PreflightResult
from workers.serving.deployment import deploy_scorer
from workers.serving.fake import FakeScorer
from workers.types import Scorer


def _fake_scorer(preflight: PreflightResult) -> Scorer:
    settings = json.loads(os.environ["FAKE_SCORER"])
    make_worker = functools.partial(FakeScorer, bank_fingerprint=preflight.family.fingerprint, **settings)
    return deploy_scorer(
        preflight.family,
        preflight.engine_options,
        replicas=preflight.study.engine.replicas,
        keep_idle_s=service.jobs.search.KEEP_IDLE_S,
        make_worker=make_worker,
        **{"health_check_period_s": 1.0, **json.loads(os.environ.get("FAKE_DEPLOY", "{}"))},
    )


if __name__ == "__main__":
    service.jobs.search._shared_scorer = _fake_scorer
    for name, value in json.loads(os.environ.get("FAKE_HEARTBEAT", "{}")).items():
        for module in (service.studies.heartbeat, service.studies.attempt):
            setattr(module, name, value)
    sys.exit(service.jobs.driver.main())
