"""`mergesearch serve` whose studies are scored by fakes; HTTP, Ray, its jobs, Serve and store are the real ones."""

from __future__ import annotations

import sys

import service.cluster.reconciler
from service.cli.main import main

if __name__ == "__main__":
    service.cluster.reconciler.JOB_MODULE = "tests.benchmarks.fake_job"
    sys.exit(main(["serve", *sys.argv[1:]]))
