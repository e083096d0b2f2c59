"""A search over layer paths: proposals are repaired before they are stored, and equal paths are scored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.types import Origin
from tests.service.tune.harness import InlineProposer, coordinator_of, drive, new_study, space_of
from workers.serving.fake import FakeScorer

pytestmark = pytest.mark.slow  # whole searches


class UniformProposer(InlineProposer):
    """A searcher that draws each parameter independently, without the space's structure."""

    def result(self, *, timeout_s: float) -> dict[str, Any] | None:
        rng = np.random.default_rng(self._call["number"])
        return self._parameters.build(lambda parameter: parameter.sample(rng))


class RecordingProposer(InlineProposer):
    """A proposer that records the results reported to it."""

    told: list[Mapping[str, Any]]

    def submit(self, *, number: int, observations: Sequence[Any], pending: Sequence[Mapping[str, Any]]) -> None:
        self.told = [*(observation.configuration for observation in observations), *pending]
        super().submit(number=number, observations=observations, pending=pending)


def test_repaired_proposal_is_stored(tmp_path: Path) -> None:
    """The repaired configuration of a proposal is stored and given to the searcher."""
    own = space_of("dis")
    store, study = new_study(tmp_path)
    proposer = type("Both", (RecordingProposer, UniformProposer), {})(own)
    drive(coordinator_of(store, study, space=own, proposer=proposer, max_trials=30), FakeScorer())
    proposed = [trial for trial in store.trials(study) if trial.origin is Origin.SEARCH]
    too_deep = 0
    for trial in proposed:
        rng = np.random.default_rng(trial.number)
        drawn = own.parameters.build(lambda parameter, rng=rng: parameter.sample(rng))  # type: ignore[misc]
        assert trial.configuration == own.parameters.repair(drawn)
        assert len(trial.read_recipe().layers) <= 5
        assert trial.recipe == own.to_recipe(trial.configuration)
        assert trial.state.is_finished
        used = [value for name, value in drawn.items() if ".use." in name]
        too_deep += sum(map(int, used)) > 5
    assert too_deep  # of those that were proposed
    assert [told for told in proposer.told if own.parameters.repair(told) != told] == []


def test_searcher_receives_sources(tmp_path: Path) -> None:
    """The searcher receives the sources, and equal paths are scored once."""
    own = space_of("dis", scales=False, models=("math",))
    store, study = new_study(tmp_path)
    proposer = type("Both", (RecordingProposer, UniformProposer), {})(own)
    drive(coordinator_of(store, study, space=own, proposer=proposer, max_trials=30, scheduler="none"), FakeScorer())
    sources = [t.read_recipe() for t in store.trials(study) if t.label in ("base", "expert:math")]
    for recipe in sources:
        assert own.from_recipe(recipe) in proposer.told
    scored: dict[str, int] = {}
    for trial in store.trials(study):
        scored[trial.recipe.digest] = scored.get(trial.recipe.digest, 0) + trial.samples_scored
    assert set(scored.values()) == {72}  # two objectives of 36 samples, whatever number of trials has the recipe
    assert len(scored) < len(store.trials(study))
