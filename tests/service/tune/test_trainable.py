"""The trial actor, called directly: its report of a chunk that was not scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.tune.evaluation import ChunkFailed, FailureKind
from service.tune.trainable import EvaluationTrainable
from tests.service.tune.harness import coordinator_of, new_study
from workers.errors import EngineUnavailable, EvidenceMismatch, InvalidModel, InvalidTask, MetricFailed, TrialFailed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MetricFailed("the reason"), FailureKind.METRIC),
        (TrialFailed("the reason"), FailureKind.TRIAL),
        (EvidenceMismatch("the reason"), FailureKind.EVIDENCE),
        (EngineUnavailable("the reason"), FailureKind.ENGINE),
        (InvalidTask("the reason"), FailureKind.STUDY),
        (InvalidModel(("the reason",)), FailureKind.STUDY),
    ],
)
def test_errors_of_scoring_are_reported_with_who_is_to_blame(
    tmp_path: Path, error: Exception, kind: FailureKind
) -> None:
    class Failing:
        def score(self, request: Any) -> Any:
            raise error

    evaluation = coordinator_of(*new_study(tmp_path)).next_evaluation()
    actor = EvaluationTrainable.__new__(EvaluationTrainable)
    actor.setup({"evaluation": evaluation}, Failing())  # type: ignore[arg-type]
    assert actor.step() == {"outcome": None}
    assert actor.step() == {"outcome": ChunkFailed(kind, "the reason")}
