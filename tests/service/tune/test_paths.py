"""A search over layer paths: proposals are repaired before they are stored, equal paths are scored once, and a killed
search goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.fidelity import Scheduler
from search_spaces.spaces.base import SearchSpace
from service.types import Origin
from tests.search_spaces.spaces.families import models, space
from tests.service.tune.harness import (
    FINGERPRINTS,
    InlineProposer,
    Killed,
    coordinator_of,
    drive,
    killer,
    new_study,
    trial_list,
)
from workers.serving.fake import FakeScorer

pytestmark = pytest.mark.slow  # whole searches, killed at every step


def paths_space(**options: Any) -> SearchSpace:
    family = models(("math", "text"), 4, max_layers=5)
    return space("dis", type(family)(**{**vars(family), "fingerprints": FINGERPRINTS}), **options)


class UniformProposer(InlineProposer):
    """A searcher that knows nothing of the space's structure: each parameter is drawn by itself."""

    def result(self, *, timeout_s: float) -> dict[str, Any] | None:
        rng = np.random.default_rng(self._call["number"])
        return self._parameters.build(lambda parameter: parameter.sample(rng))


class RecordingProposer(InlineProposer):
    """Keeps what it is told."""

    told: list[Mapping[str, Any]]

    def submit(self, *, number: int, observations: Sequence[Any], pending: Sequence[Mapping[str, Any]]) -> None:
        self.told = [*(observation.configuration for observation in observations), *pending]
        super().submit(number=number, observations=observations, pending=pending)


def test_a_proposal_is_repaired_and_the_repaired_configuration_is_stored_and_told(tmp_path: Path) -> None:
    own = paths_space()
    store, study = new_study(tmp_path)
    proposer = type("Both", (RecordingProposer, UniformProposer), {})(own)
    drive(coordinator_of(store, study, space=own, proposer=proposer, max_trials=30), FakeScorer())
    proposed = [trial for trial in store.trials(study) if trial.origin is Origin.SEARCH]
    too_deep = 0
    for trial in proposed:
        rng = np.random.default_rng(trial.number)
        drawn = own.parameters.build(lambda parameter, rng=rng: parameter.sample(rng))  # type: ignore[misc]
        assert trial.configuration == own.parameters.repair(drawn)
        assert len(trial.recipe.layers) <= 5
        assert trial.recipe == own.to_recipe(trial.configuration)
        assert trial.state.is_finished
        used = [value for name, value in drawn.items() if ".use." in name]
        too_deep += sum(map(int, used)) > 5
    assert too_deep  # of those that were proposed
    assert [told for told in proposer.told if own.parameters.repair(told) != told] == []


def test_the_sources_are_told_to_the_searcher_and_equal_paths_are_scored_once(tmp_path: Path) -> None:
    own = paths_space(scales=False, models=("math",))
    store, study = new_study(tmp_path)
    proposer = type("Both", (RecordingProposer, UniformProposer), {})(own)
    drive(coordinator_of(store, study, space=own, proposer=proposer, max_trials=30, scheduler="none"), FakeScorer())
    sources = [t.recipe for t in store.trials(study) if t.label in ("base", "expert:math")]
    for recipe in sources:
        assert own.from_recipe(recipe) in proposer.told
    scored: dict[str, int] = {}
    for trial in store.trials(study):
        scored[trial.recipe.digest] = scored.get(trial.recipe.digest, 0) + trial.samples_scored
    assert set(scored.values()) == {72}  # two objectives of 36 samples, whatever number of trials has the recipe
    assert len(scored) < len(store.trials(study))


@pytest.mark.parametrize("scheduler", ["hyperband", "asha", "racing"])
def test_killed_at_any_step_a_search_over_paths_gives_the_undisturbed_trial_list(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    own = paths_space()
    (tmp_path / "undisturbed").mkdir()
    store, study = new_study(tmp_path / "undisturbed")
    drive(coordinator_of(store, study, space=own, scheduler=scheduler), FakeScorer())
    expected = trial_list(store, study)
    store, study = new_study(tmp_path)
    for kill_at in range(200):
        try:
            observer = killer(5 + kill_at % 7)
            drive(coordinator_of(store, study, space=own, scheduler=scheduler, observer=observer), FakeScorer())
        except Killed:
            continue
        break
    assert trial_list(store, study) == expected
