"""A driver's progress in its job's log."""

import pytest

from service.jobs.search import progress_log
from service.jobs.search.progress import ProgressSnapshot
from service.jobs.search.progress_log import ProgressLog
from service.types import TrialState


def snapshot(stage: str = "searching", scored: int = 0) -> ProgressSnapshot:
    return ProgressSnapshot("math", stage, {TrialState.COMPLETE: 1}, 4, samples_scored=scored, samples_planned=90)


def test_stages_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The log holds each stage and the end, and no update in between."""
    with ProgressLog() as log:
        for scored in (0, 10, 20):
            log.update(snapshot(scored=scored))
        log.note("Verifying ...")
        log.update(snapshot("held-out", 30))
        log.update(snapshot("held-out", 40))
    assert capsys.readouterr().err.splitlines() == [
        "[0s] searching: 1/4 trials, 0/90 samples",
        "Verifying ...",
        "[0s] held-out: 1/4 trials, 30/90 samples",
        "[0s] held-out: 1/4 trials, 40/90 samples",
    ]


def test_a_line_follows_after_every_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_log, "INTERVAL_S", 0.0)
    with ProgressLog() as log:
        log.update(snapshot(scored=0))
        log.update(snapshot(scored=10))
    assert len(capsys.readouterr().err.splitlines()) == 2
