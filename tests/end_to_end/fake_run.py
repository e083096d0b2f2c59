"""`mergesearch` with the fake scorer instead of engines; Ray, Tune, store and command line are the real ones.

python -m tests.end_to_end.fake_run '{"sample_delay_s": 0.001}' run STUDY --out DIR
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import service.run
from service.cli import main
from service.preflight import Examination
from service.progress import ProgressView
from workers.fake import FakeScorer


def fake_main(settings: str, *arguments: str) -> int:
    @contextmanager
    def fake_scorer(examination: Examination, view: ProgressView) -> Iterator[FakeScorer]:
        yield FakeScorer(bank_fingerprint=examination.family.fingerprint, **json.loads(settings))

    service.run.run_study = functools.partial(service.run.run_study, open_scorer=fake_scorer)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(fake_main(*sys.argv[1:]))
