"""The trial actor, called directly: what it reports of a chunk that was not scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.tune.evaluation import ChunkFailed, FailureKind
from service.tune.trainable import EvaluationTrainable
from tests.service.tune.harness import coordinator_of, new_study
from workers.errors import EngineUnavailable, EvidenceMismatch, MetricFailed, TrialFailed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MetricFailed, FailureKind.METRIC),
        (TrialFailed, FailureKind.TRIAL),
        (EvidenceMismatch, FailureKind.EVIDENCE),
        (EngineUnavailable, FailureKind.ENGINE),
    ],
)
def test_errors_of_scoring_are_reported_with_who_is_to_blame(
    tmp_path: Path, error: type[Exception], kind: FailureKind
) -> None:
    class Failing:
        def score(self, request: Any) -> Any:
            raise error("the reason")

    evaluation = coordinator_of(*new_study(tmp_path)).next_evaluation()
    actor = EvaluationTrainable.__new__(EvaluationTrainable)
    actor.setup({"evaluation": evaluation}, Failing())  # type: ignore[arg-type]
    assert actor.step() == {"outcome": None}
    assert actor.step() == {"outcome": ChunkFailed(kind, "the reason")}
