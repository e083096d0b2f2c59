"""`mergesearch` with the fake scorer instead of engines; Ray, Tune, store and command line are the real ones.

python -m tests.end_to_end.fake_run '{"sample_delay_s": 0.001}' run STUDY --out DIR

A list of settings runs the command once with each, in processes of its own that are forked once everything is imported
(which takes half of a short run's time), and prints what each ended with: an exit code, or a negative signal.

In the settings, `in_flight` is the number of trial actors, by default one: starting one takes 3 s of a core.
`dies_at`, a step and a number, ends the process by SIGKILL the n-th time (1-based) that it comes there: one of the
driver's steps as observers hear of them ("ask", "commit", ...), "scoring" (while a trial actor scores a chunk) or
"export" (before the n-th tensor is written).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from search_spaces.study.file import load_study
from service.cli.main import main
from service.jobs.base import Resources
from service.jobs.search.local_run import run_study
from service.results.record import RunRecord
from service.studies.preflight.examine import examine
from workers.merging.materialize import merged_tensors
from workers.serving.fake import FakeScorer
from workers.types import Family, ScoreRequest, ScoreResult


def fake_main(settings: str, *arguments: str) -> int:
    parsed = json.loads(settings)
    if isinstance(parsed, dict):
        return run_once(parsed, *arguments)
    import service.tune.ray_tune  # noqa: F401
    import workers.merging.bank  # noqa: F401

    examine(load_study(arguments[1]))
    statuses = []
    for options in parsed:
        if (child := os.fork()) == 0:
            os._exit(run_once(options, *arguments))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(statuses))
    return 0


def run_once(options: dict[str, Any], *arguments: str) -> int:
    changes = pytest.MonkeyPatch()  # never undone: the process ends
    in_flight = options.pop("in_flight", 1)
    changes.setattr("service.studies.preflight.result.CHUNKS_IN_FLIGHT_PER_REPLICA", in_flight)
    step, number = options.pop("dies_at", ("", 0))

    @contextmanager
    def fake_scorer(family: Family, *_: Any) -> Iterator[FakeScorer]:
        fingerprint = family.fingerprint
        if step == "scoring":
            yield _KillingScorer(bank_fingerprint=fingerprint, driver=os.getpid(), kills_at_call=number, **options)
        else:
            yield FakeScorer(bank_fingerprint=fingerprint, **options)

    observer = _killer(step, number)
    if step == "export":
        changes.setattr("workers.export.shards.merged_tensors", _dying(merged_tensors, observer))

    def run_with_fake(*given: Any, resources: Resources, **named: Any) -> RunRecord:
        return run_study(*given, resources=replace(resources, scorer=fake_scorer), observer=observer, **named)

    changes.setattr("service.jobs.search.local_run.run_study", run_with_fake)
    return main(arguments)


def _killer(step: str, number: int) -> Callable[[str], None]:
    count = 0

    def observe(name: str) -> None:
        nonlocal count
        count += name == step
        if name == step and count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


@dataclass
class _KillingScorer(FakeScorer):
    """A scorer that kills the driver while it waits for the n-th chunk of this actor."""

    driver: int = 0
    kills_at_call: int = 0

    def score(self, request: ScoreRequest) -> ScoreResult:
        result = super().score(request)
        if self._calls == self.kills_at_call:
            os.kill(self.driver, signal.SIGKILL)
            time.sleep(60)  # Ray ends the actors of a driver that is gone
        return result


def _dying(stream: Callable[..., Iterator[Any]], observer: Callable[[str], None]) -> Callable[..., Iterator[Any]]:
    def tensors(*arguments: Any, **options: Any) -> Iterator[Any]:
        for item in stream(*arguments, **options):
            observer("export")
            yield item

    return tensors


if __name__ == "__main__":
    sys.exit(fake_main(*sys.argv[1:]))
