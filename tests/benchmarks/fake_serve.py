"""`mergesearch serve` whose studies are scored by fakes; HTTP, Ray, its jobs, Serve and store are the real ones.

Studies of image classifiers have engines of their own. FAKE_SERVE replaces constants of the reconciler, for instance
{"LOST_AFTER_S": 10}, and FAKE_QUEUE those of the queue. With FAKE_LATE_CHECKS=1 the process that checks studies starts
with the first study, not with the server: its imports take 6 s of a core.
"""

from __future__ import annotations

import json
import os
import sys

import service.cluster.queue
import service.cluster.reconciler
from service.api.preflight_process import PreflightProcess
from service.cli.main import main

if __name__ == "__main__":
    service.cluster.reconciler.JOB_MODULE = "tests.benchmarks.fake_job"
    for name, value in json.loads(os.environ.get("FAKE_SERVE", "{}")).items():
        setattr(service.cluster.reconciler, name, value)
    for name, value in json.loads(os.environ.get("FAKE_QUEUE", "{}")).items():
        setattr(service.cluster.queue, name, value)
    if os.environ.get("FAKE_LATE_CHECKS") == "1":
        PreflightProcess.start = lambda self: None  # type: ignore[method-assign]
    sys.exit(main(["serve", *sys.argv[1:]]))
