"""Whole searches by HM3's policy, in which every episode is a trial.

A search that was killed continues as an undisturbed one.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.spaces.base import SearchSpace
from search_spaces.spaces.layer_paths import MERGED
from search_spaces.study.search import PolicyOptions
from search_spaces.study.search import Search as SearchSection
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.store.steps import Step, UpdateRequest, UpdateStep, step_of
from service.tune.coordinator import Coordinator
from service.tune.proposing.checkpoints import PolicyCheckpoints
from service.tune.proposing.searcher_state import SearcherState
from service.tune.searchers import get_searcher
from service.tune.searchers.base import LearningSearcher, Observation, ProposalContext, SearchSetting
from service.tune.searchers.hm3 import FEW_STEPS, Hm3Searcher, action_of, paths_of
from service.types import Origin
from tests.search_spaces.spaces.families import models, space
from tests.service.tune.harness import (
    FINGERPRINTS,
    InlineProposer,
    Killed,
    coordinator_of,
    drive,
    killer,
    make_plan,
    new_study,
    trial_list,
)
from workers.errors import TrainingFailed, TrialFailed
from workers.serving.fake import FakeScorer
from workers.training.hm3.actions import LegalSteps
from workers.types import ScoreRequest, ScoreResult

pytestmark = pytest.mark.slow  # whole searches

NUM_BASELINES = len(make_plan("").baselines)
MAX_TRIALS = 26
POLICY = PolicyOptions(episodes=5, explored=2, epochs=2, mini_batches=2)
VECTORS = ((1.0, 0.0), (0.0, 1.0))
INTERIOR = ({"math": 0.75, "text": 0.25}, {"math": 0.25, "text": 0.75})


def paths_space(*, preferences: Sequence[Mapping[str, float]] = (), **options: Any) -> SearchSpace:
    family = replace(models(("math", "text"), 4), fingerprints=FINGERPRINTS, preferences=tuple(preferences))
    built: SearchSpace = space("hm3", family, **{"max_path_length": 5, **options})
    return built


def setting(**changes: Any) -> SearchSetting:
    options: dict[str, Any] = {"options": SearchSection(hm3=POLICY), **changes}
    plain = SearchSetting(
        objectives=("math", "text"),
        num_samples={"math": 36, "text": 36},
        num_baselines=NUM_BASELINES,
    )
    return replace(plain, **options)


class LearningProposer(InlineProposer):
    """`proposals.Proposer` for a learning searcher: does the work of `RayProposer`'s actors in the caller's thread."""

    def __init__(
        self, own: SearchSpace, store: Store, study: str, directory: Path, told: SearchSetting, learns_ahead: bool
    ) -> None:
        searcher = get_searcher("hm3")
        assert isinstance(searcher, LearningSearcher)
        self.checkpoints = PolicyCheckpoints(ArtifactStore(store, directory), study, searcher, told)
        steps = store.steps(study)
        self._num_steps = len(steps)
        self._state = SearcherState("hm3", own.parameters, told, steps, self.checkpoints.load(steps))
        self._ready: Any = None
        self._learns_ahead = learns_ahead

    def submit(self, *, number: int, observations: Sequence[Any], pending: Sequence[Mapping[str, Any]]) -> None:
        self._call = {"number": number, "seed": 0, "observations": observations, "pending": pending}
        self._ready = self._state.propose(**self._call)

    def result(self, *, timeout_s: float) -> Any:
        if isinstance(self._ready, dict):
            if self._learns_ahead:
                self._state.learn_ahead()
            return self._ready
        assert isinstance(self._ready, UpdateRequest)
        result, content = self._state.update(self._ready, **self._call)
        if content is not None:
            self.checkpoints.put(self._ready.iteration, content)
        return step_of(self._num_steps, self._call["number"], self._ready, result)

    def stored(self, step: Step) -> None:
        self._num_steps += 1
        self._ready = self._state.propose_after(step, **self._call)


class Search:
    """A study in a directory, and attempts at it."""

    def __init__(
        self,
        directory: Path,
        *,
        told: SearchSetting | None = None,
        scorer: Any = None,
        learns_ahead: bool = True,
        **options: Any,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.space = paths_space(**options)
        self.told = told or setting()
        self.store, self.study = new_study(directory)
        self.scorer = scorer or FakeScorer()
        self.learns_ahead = learns_ahead

    def attempt(self, observer: Callable[[str], None] = lambda _: None, **plan: Any) -> Coordinator:
        proposer = LearningProposer(
            self.space, self.store, self.study, self.directory, self.told, learns_ahead=self.learns_ahead
        )
        chosen: dict[str, Any] = {"scheduler": "none", "max_trials": MAX_TRIALS, "max_duplicates": 1000, **plan}
        return coordinator_of(self.store, self.study, proposer=proposer, observer=observer, space=self.space, **chosen)

    def run(self, **options: Any) -> Search:
        concurrency = {name: options.pop(name) for name in ("concurrency", "order_seed") if name in options}
        drive(self.attempt(**options), self.scorer, **concurrency)
        return self

    @property
    def trials(self) -> list[Any]:
        return trial_list(self.store, self.study)

    @property
    def steps(self) -> list[UpdateStep]:
        steps = self.store.steps(self.study)
        found = [step for step in steps if isinstance(step, UpdateStep)]
        assert len(found) == len(steps)
        return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Search:
    return Search(tmp_path_factory.mktemp("undisturbed")).run()


def test_every_episode_is_a_trial_and_every_iteration_a_step(undisturbed: Search) -> None:
    found = undisturbed.store.trials(undisturbed.study)
    proposed = [trial for trial in found if trial.origin is Origin.SEARCH]
    assert len(proposed) == MAX_TRIALS
    paths = paths_of(undisturbed.space.parameters)
    for trial in proposed:
        assert trial.configuration is not None
        assert paths.contains(paths.path(trial.configuration))
        assert trial.recipe == undisturbed.space.to_recipe(trial.configuration)
    # Iterations 0 to 3 are learned from before iteration 5 begins; the first is the warm-up.
    steps = undisturbed.steps
    assert [step.request.iteration for step in steps] == [0, 1, 2, 3]
    assert [bool(step.result.checkpoint) for step in steps] == [False, True, True, True]
    # Each stands before the first episode of the iteration after the next.
    assert [step.proposal - NUM_BASELINES for step in steps] == [10, 15, 20, 25]
    assert all(step.result.seconds > 0 for step in steps)


def test_the_statistics_of_a_step_are_those_of_its_trials(undisturbed: Search) -> None:
    trials = undisturbed.store.trials(undisturbed.study)
    (step,) = [step for step in undisturbed.steps if step.request.iteration == 2]
    mine = trials[NUM_BASELINES + 10 : NUM_BASELINES + 15]
    lengths = [len(trial.read_recipe().layers) for trial in mine]
    outcomes = [sum(trial.values.values()) / 2 - 0.001 * length for trial, length in zip(mine, lengths, strict=True)]
    assert step.result.statistics["length"] == pytest.approx(sum(lengths) / 5)
    assert step.result.statistics["outcome"] == pytest.approx(sum(outcomes) / 5)
    assert set(step.result.statistics) >= {
        "outcome_std",
        "policy_loss",
        "value_loss",
        "entropy",
        "kl",
        "clipped",
        "drift",
    }


# The configurations of whole searches, as the last programs with these versions proposed them, with one policy and with
# a conditioned one.
EARLIER_SEARCHES: dict[tuple[int, str], str] = {
    (1, "per_preference"): "42428196527b5caa",
    (1, "conditioned"): "9f2b770a90ff49c9",
    (2, "per_preference"): "9a635668d343289f",
    (2, "conditioned"): "d92e769e617662ba",
    (3, "per_preference"): "a352ecd22d79fa91",
    (3, "conditioned"): "4ff4bb1a5895ce46",
}


@pytest.mark.parametrize(("version", "policy"), EARLIER_SEARCHES)
def test_studies_of_earlier_versions_keep_their_rule(
    undisturbed: Search, tmp_path: Path, version: int, policy: str
) -> None:
    expected = EARLIER_SEARCHES[version, policy]
    vectors = VECTORS if policy == "conditioned" else ()
    options = with_policy(policy=policy, elite_share=1.0, archive=4)  # the default of version 3
    told = setting(preferences=vectors, options=options, version=version)
    search = Search(tmp_path, told=told).run()
    proposed = [t for t in search.store.trials(search.study) if t.origin is Origin.SEARCH]
    rows = [sorted((t.configuration or {}).items()) for t in proposed]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == expected
    assert ("clipped" in search.steps[-1].result.statistics) == (version > 1)
    assert search.trials != undisturbed.trials


def test_mutants_add_merged_layers_of_their_own_vector(tmp_path: Path) -> None:
    """Experts' paths have no merged layers; those of version 3 added the first vector's, whatever theirs was."""
    vectors = tuple(tuple(vector.values()) for vector in INTERIOR)
    options = with_policy(policy="conditioned", elite_share=1.0, archive=4, gamma=0.9)
    found = []
    for version in (3, 4):
        told = setting(preferences=vectors, options=options, version=version)
        search = Search(tmp_path / str(version), told=told, merged={}, preferences=INTERIOR).run()
        found.append(proposed_in(search))
    rows = [sorted(each.items()) for each in found[0]]
    # As the last program with version 3 proposed them.
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "dc49f4bb14d472cc"
    differing = [(old, new) for old, new in zip(*found, strict=True) if old != new]
    assert differing
    old, new = differing[0]
    assert (old["preference"], new["preference"]) == (0, 1)
    assert {**old, "preference": 1} == new


def test_conditioned_policies_learn_for_merged_layers(tmp_path: Path) -> None:
    """A mutant keeps the merged layers of its path, whose vector may be another one than that of the episode."""
    vectors = tuple(tuple(vector.values()) for vector in INTERIOR)
    for version in (3, 4):
        told = setting(preferences=vectors, options=with_policy(policy="conditioned", elite_share=1.0), version=version)
        search = Search(tmp_path / str(version), told=told, merged={}, preferences=INTERIOR).run()
        searcher = get_searcher("hm3")
        assert isinstance(searcher, LearningSearcher)
        artifacts = ArtifactStore(search.store, search.directory)
        saved = PolicyCheckpoints(artifacts, search.study, searcher, told).load(search.store.steps(search.study))
        memory = torch.load(io.BytesIO(saved[max(saved)]), weights_only=True)["memory"]
        learned = memory["preferences"][:, 0].tolist()
        paths, proposed = paths_of(search.space.parameters), proposed_in(search)
        own = [number % 2 for number in range(len(proposed))]
        merged = [paths.merged_preference(each) for each in proposed]
        assert any(vector not in (None, turn) for vector, turn in zip(merged, own, strict=True))
        if version == 4:
            own = [turn if vector is None else vector for turn, vector in zip(own, merged, strict=True)]
        # The warm-up, one iteration, is not learned from.
        assert learned == [vectors[each][0] for each in own[POLICY.episodes :][: len(learned)]]


def test_policies_of_one_vector_know_its_merged_layers_only(tmp_path: Path) -> None:
    """Mutants of a path with merged layers of the other vector have those of their policy's vector, since version 4."""
    vectors = tuple(tuple(vector.values()) for vector in INTERIOR)
    foreign = {}
    for version in (3, 4):
        told = setting(preferences=vectors, options=with_policy(elite_share=1.0), version=version)
        search = Search(tmp_path / str(version), told=told, merged={}, preferences=INTERIOR).run()
        with_merged = [
            (number // POLICY.episodes % 2, configuration["preference"])
            for number, configuration in enumerate(proposed_in(search))
            if MERGED in configuration.values()
        ]
        assert {vector for vector, _ in with_merged} == {0, 1}
        foreign[version] = sum(vector != preference for vector, preference in with_merged)
    assert foreign[3] > 0
    assert foreign[4] == 0


def proposed_in(search: Search) -> list[Mapping[str, Any]]:
    """The configurations that a search proposed, in order."""
    rows = [row for row in search.store.trials(search.study) if row.origin is Origin.SEARCH]
    return [row.configuration or {} for row in rows]


def num_edits(one: Sequence[int], other: Sequence[int]) -> int:
    """The least number of replaced, inserted and removed elements that make `other` of `one` (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        before, row[0] = row[0], i
        for j, right in enumerate(other, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]


def test_paths_are_mutants_of_the_best_that_are_known(tmp_path: Path) -> None:
    """With `elite_share: 1` all paths are, once results are known; each is one to three changes from the archive's."""
    told = setting(options=with_policy(elite_share=1.0, archive=1))
    search = Search(tmp_path, told=told, min_path_length=6, max_path_length=12).run()
    paths = paths_of(search.space.parameters)
    trials = [row for row in search.store.trials(search.study) if row.configuration is not None]
    outcome = {
        row.number: sum(row.values.values()) / 2 - 0.001 * row.configuration["length"]
        for row in trials
        if row.configuration is not None
    }
    own = [row for row in trials if row.origin is Origin.SEARCH]
    first = own[0].number

    def edits(row: Any, *, before: int) -> int:
        """Edits between a path and the best one among the trials with a number below `before`."""
        known = [each for each in trials if each.number < before]
        best = max(known, key=lambda each: (outcome[each.number], -each.number))
        return num_edits(*(paths.path(each.configuration or {}) for each in (row, best)))

    drawn, mutants = own[: 2 * POLICY.episodes], own[2 * POLICY.episodes :]
    for row in mutants:
        end = first + ((row.number - first) // POLICY.episodes - 1) * POLICY.episodes
        assert edits(row, before=end) in (1, 2, 3)
    far = [edits(row, before=first + POLICY.episodes) > 3 for row in drawn[POLICY.episodes :]]
    assert sum(far) > len(far) / 2, "paths that are drawn are not near the best one"


def test_no_path_is_proposed_twice(tmp_path: Path) -> None:
    """Paths are repeated only where no new one is near: the space has 16 paths here, and 4 models' worth of trials."""
    repeating = Search(tmp_path / "v2", told=setting(version=2), max_jump=0).run(max_trials=14)
    found = Search(tmp_path / "v3", max_jump=0).run(max_trials=14)
    counts = [
        len({json.dumps(each, sort_keys=True) for each in proposed_in(each_of)}) for each_of in (repeating, found)
    ]
    assert counts[0] < counts[1]
    assert counts[1] >= 13
    plain = setting(options=with_policy(avoids_repeats=False, elite_share=0.0))
    same = Search(tmp_path / "plain", told=plain, max_jump=0).run(max_trials=14)
    assert proposed_in(same) == proposed_in(repeating)


@pytest.mark.parametrize(("num_models", "chosen"), [(4, "categorical"), (5, "wolpertinger")])
def test_auto_draws_from_all_steps_where_they_are_few(num_models: int, chosen: str) -> None:
    """With paths that may jump to any layer, each model adds its 8 layers to the allowed steps; one step is the end."""
    family = replace(models(tuple("abcde"[: num_models - 1]), 8), fingerprints={n: n for n in ("base", *"abcde")})
    built = space("hm3", family, max_jump=7, min_path_length=1, max_path_length=5)
    paths = paths_of(built.parameters)
    assert (LegalSteps(paths).most <= FEW_STEPS) == (chosen == "categorical")
    assert action_of(paths, setting(options=with_policy(action="auto"))) == chosen
    assert action_of(paths, setting(options=with_policy(action="auto"), version=1)) == "wolpertinger"
    assert action_of(paths, setting(options=with_policy(action="categorical"))) == "categorical"


def test_a_search_without_results_yet_has_no_mutants() -> None:
    """The first trials of a study without baselines are drawn; no two of them are equal."""
    told = replace(setting(options=with_policy(elite_share=1.0)), num_baselines=0)
    parameters = paths_space().parameters
    found: list[dict[str, Any]] = []
    for number in range(2 * POLICY.episodes):
        context = ProposalContext(parameters, number=number, seed=0, pending=tuple(found), setting=told)
        proposed = Hm3Searcher().advance(context)
        assert isinstance(proposed, dict)
        assert proposed not in found
        found.append(proposed)


class EqualScorer(FakeScorer):
    """A scorer for which all answers are right, so that no path is better than the first."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        found = super().score(request)
        return replace(found, samples=tuple(replace(sample, value=1.0) for sample in found.samples))


def test_a_policy_that_finds_nothing_better_starts_anew(tmp_path: Path) -> None:
    """It does after every `restart_after` iterations without a better path, and what was found stays known."""
    options = {"length_penalty": 0.0, "restart_after": 2}
    found = Search(tmp_path / "anew", told=setting(options=with_policy(**options)), scorer=EqualScorer()).run()
    assert ["restarts" in step.result.statistics for step in found.steps] == [False, False, True, False]
    same = Search(tmp_path / "same", told=setting(options=with_policy(length_penalty=0.0)), scorer=EqualScorer()).run()
    digests = [[step.result.checkpoint for step in each.steps] for each in (found, same)]
    assert digests[0][:2] == digests[1][:2]
    assert digests[0][2] != digests[1][2]
    again = Search(tmp_path / "again", told=setting(options=with_policy(**options)), scorer=EqualScorer()).run()
    assert [step.result.checkpoint for step in again.steps] == digests[0]


def test_policies_may_learn_by_tchebycheffs_function(undisturbed: Search, tmp_path: Path) -> None:
    found = Search(tmp_path, told=setting(options=with_policy(scalarisation="tchebycheff"))).run()
    assert found.trials != undisturbed.trials


def test_a_policy_that_is_not_finite_ends_the_search(tmp_path: Path) -> None:
    told = setting(options=with_policy(learning_rate=1e30))
    with pytest.raises(TrainingFailed, match=r"hm3: .* is (nan|inf|-inf) in update [12] .*learning_rate=1e\+30"):
        Search(tmp_path, told=told).run()


@pytest.mark.parametrize("concurrency", [1, 5])
def test_the_trials_are_the_same_with_any_number_of_runners(
    undisturbed: Search, tmp_path: Path, concurrency: int
) -> None:
    other = Search(tmp_path).run(concurrency=concurrency, order_seed=3, max_staleness=concurrency)
    assert other.trials == undisturbed.trials
    assert [step.result.checkpoint for step in other.steps] == [s.result.checkpoint for s in undisturbed.steps]


def test_updates_are_computed_ahead(undisturbed: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are computed before they are requested and are the same."""
    learned: list[tuple[str, int]] = []
    learn = Hm3Searcher.learn
    asked = ["no"]

    def noted(self: Hm3Searcher, *given: Any, iteration: int, **options: Any) -> Any:
        learned.append((asked[0], iteration))
        return learn(self, *given, iteration=iteration, **options)

    update = SearcherState.update

    def updated(self: SearcherState, *given: Any, **call: Any) -> Any:
        asked[0] = "asked"
        found = update(self, *given, **call)
        asked[0] = "no"
        return found

    monkeypatch.setattr(Hm3Searcher, "learn", noted)
    monkeypatch.setattr(SearcherState, "update", updated)
    Search(tmp_path / "ahead").run()
    assert learned == [("no", 0), ("no", 1), ("no", 2), ("no", 3)]
    learned.clear()
    waiting = Search(tmp_path / "waiting", learns_ahead=False).run()
    assert learned == [("asked", 0), ("asked", 1), ("asked", 2), ("asked", 3)]
    assert waiting.trials == undisturbed.trials
    assert [step.result.checkpoint for step in waiting.steps] == [s.result.checkpoint for s in undisturbed.steps]


def test_an_update_of_other_results_is_computed_again(undisturbed: Search) -> None:
    told = setting()
    rows = [trial for trial in undisturbed.store.trials(undisturbed.study) if trial.number < NUM_BASELINES + 10]
    known = [
        Observation(
            row.configuration or {}, 1.0, tuple(1 - value for value in row.values.values()), number=row.number, rung=0
        )
        for row in rows
    ]
    call = {"seed": 0, "number": NUM_BASELINES + 9, "pending": []}

    def checkpoint(seen: list[Observation], then: list[Observation]) -> bytes | None:
        state = SearcherState("hm3", undisturbed.space.parameters, told, undisturbed.steps[:1], {})
        state.propose(observations=seen, **call)
        state.learn_ahead()
        return state.update(UpdateRequest(label="", iteration=1), observations=then, **call)[1]

    worse = [*known[:-1], replace(known[-1], costs=(1.0, 1.0))]
    assert checkpoint(known, known) == checkpoint([], known)
    assert checkpoint(known, worse) == checkpoint(worse, worse) != checkpoint(known, known)


def test_kill_at_any_step_changes_no_trial(undisturbed: Search, tmp_path: Path) -> None:
    """A search killed at any step has the undisturbed trial list."""
    search = Search(tmp_path)
    for kill_at in range(200):
        try:
            search.run(observer=killer(9 + kill_at % 11))
        except Killed:
            continue
        break
    assert kill_at > 3
    assert search.trials == undisturbed.trials
    assert [step.request for step in search.steps] == [step.request for step in undisturbed.steps]


def test_the_best_paths_are_scored_on_more_samples(tmp_path: Path) -> None:
    """With successive halving the policy learns at one rung, and the best paths climb after the search."""
    whole = Search(tmp_path / "whole").run(scheduler="successive_halving")
    found = [trial for trial in whole.store.trials(whole.study) if trial.origin is Origin.SEARCH]
    assert Counter(record.rung for trial in found for record in trial.rungs) == {0: 26, 1: 8, 2: 2}
    assert [step.request.iteration for step in whole.steps] == [0, 1, 2, 3]
    first = {trial.number: next(record.values for record in trial.rungs) for trial in found}
    climbed = [trial.number for trial in found if len(trial.rungs) > 1]
    for number in set(first) - set(climbed):
        for best in climbed:
            gains = [value - first[best][name] for name, value in first[number].items()]
            assert min(gains) < 0 or max(gains) == 0, "no path that stayed behind is better than one that climbed"
    killed = Search(tmp_path / "killed")
    for step in (20, 30, 40):
        with pytest.raises(Killed):
            killed.run(scheduler="successive_halving", observer=killer(step))
    assert killed.run(scheduler="successive_halving").trials == whole.trials


def test_policies_that_are_gone_or_damaged_are_learned_again(
    undisturbed: Search, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = Search(tmp_path)
    with pytest.raises(Killed):
        search.run(observer=lambda _: kill_after(3, search))
    damage_policies(tmp_path)
    assert search.run().trials == undisturbed.trials
    assert "the policy of iteration 2 is learned again" in caplog.text
    assert "differs" not in caplog.text


def test_policies_that_become_others_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    search = Search(tmp_path)
    with pytest.raises(Killed):
        search.run(observer=lambda _: kill_after(3, search))
    damage_policies(tmp_path)
    search.told = setting(options=with_policy(epochs=1))  # in place of a machine that computes other bits
    search.run()
    for iteration in (1, 2):
        assert f"the policy of iteration {iteration} was learned again, and differs from the stored one" in caplog.text


def kill_after(num_steps: int, search: Search) -> None:
    if len(search.steps) == num_steps:
        raise Killed


def damage_policies(directory: Path) -> None:
    files = [file for file in (directory / "blobs").glob("*/*") if file.stat().st_size > 10_000]
    assert files
    for file in files:
        file.write_bytes(b"not a policy")


def test_a_checkpoint_without_its_step_costs_nothing(
    undisturbed: Search, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that ended after it had stored a checkpoint, and before the step, continues from stored policies."""
    put, last = PolicyCheckpoints.put, 3

    def put_and_die(checkpoints: PolicyCheckpoints, iteration: int, content: bytes) -> None:
        put(checkpoints, iteration, content)
        if iteration == last:
            raise Killed

    search = Search(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PolicyCheckpoints, "put", put_and_die)
        with pytest.raises(Killed):
            search.run()
    assert len(search.steps) == last
    assert search.run().trials == undisturbed.trials
    assert "learned again" not in caplog.text


def test_policies_of_earlier_versions_are_read(
    undisturbed: Search, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study whose policies have two artifacts each continues, and new policies do not replace those that it needs."""
    search = Search(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PolicyCheckpoints, "_artifact", PolicyCheckpoints._earlier_artifact)
        with pytest.raises(Killed):
            search.run(observer=lambda _: kill_after(3, search))
    with pytest.raises(Killed):
        search.run(observer=lambda _: kill_after(4, search))
    assert search.run().trials == undisturbed.trials
    assert "learned again" not in caplog.text
    slots = {record.name for record in ArtifactStore(search.store, tmp_path).of(search.study)}
    assert slots == {f"hm3-policy-0-{turn}" for turn in "01a"}


def test_a_policy_for_each_preference_takes_its_turn(tmp_path: Path) -> None:
    told = setting(preferences=VECTORS, options=with_policy(episodes=3))
    search = Search(tmp_path, told=told).run(max_staleness=3)
    assert [step.request.preference["math"] for step in search.steps] == [1.0, 0.0] * 3 + [1.0]
    assert [bool(step.result.checkpoint) for step in search.steps] == [False] * 2 + [True] * 5
    slots = {record.name for record in ArtifactStore(search.store, tmp_path).of(search.study)}
    assert slots == {f"hm3-policy-{policy}-{turn}" for policy, turn in ("0a", "0b", "0c", "1b", "1c")}


def test_a_conditioned_policy_is_one(tmp_path: Path) -> None:
    told = setting(preferences=VECTORS, options=with_policy(policy="conditioned"))
    search = Search(tmp_path, told=told).run()
    assert [step.request.preference for step in search.steps] == [{}] * 4
    slots = {record.name for record in ArtifactStore(search.store, tmp_path).of(search.study)}
    assert slots == {"hm3-policy-0-a", "hm3-policy-0-b", "hm3-policy-0-c"}


def with_policy(**changes: Any) -> SearchSection:
    return SearchSection(hm3=POLICY.model_copy(update=changes))


class FailingScorer(FakeScorer):
    """A scorer that fails on every third path."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        if len(request.recipe.layers) == 5:
            raise TrialFailed("its logits are NaN")
        return super().score(request)


def test_paths_that_fail_do_not_stop_the_search(tmp_path: Path) -> None:
    search = Search(tmp_path, scorer=FailingScorer()).run()
    states = [row[3] for row in search.trials]
    assert "FAIL" in [state.value for state in states]
    assert len(search.steps) == 4


def test_a_search_whose_policies_repeat_themselves_ends(tmp_path: Path) -> None:
    search = Search(tmp_path, max_jump=0)  # 16 paths
    coordinator = search.attempt(max_trials=500, max_duplicates=6)
    drive(coordinator, search.scorer)
    assert coordinator.end_of_search is not None
    assert "the last 6 proposals were recipes scored already" in coordinator.end_of_search


@pytest.mark.parametrize("learns", [True, False])
def test_a_search_begins_with_policies_that_are_given(undisturbed: Search, tmp_path: Path, learns: bool) -> None:
    artifacts = ArtifactStore(undisturbed.store, undisturbed.directory)
    searcher = get_searcher("hm3")
    assert isinstance(searcher, LearningSearcher)
    kept = PolicyCheckpoints(artifacts, undisturbed.study, searcher, undisturbed.told).load(undisturbed.steps)
    told = setting(start=(kept[max(kept)],), options=with_policy(learns=learns))
    search = Search(tmp_path, told=told).run()
    # It learns from the first iteration on, or never.
    assert [bool(step.result.checkpoint) for step in search.steps] == ([True] * 4 if learns else [])
    proposed = [row for row in search.store.trials(search.study) if row.origin is Origin.SEARCH]
    assert len(proposed) == MAX_TRIALS
    if not learns:
        best = searcher.proposals(  # type: ignore[attr-defined]
            search.space.parameters,
            preference=(0.5, 0.5),
            count=1,
            seed=0,
            setting=undisturbed.told,
            checkpoints=kept,
        )
        assert proposed[0].configuration == best[0]


def test_scales_of_layers_are_part_of_a_search(tmp_path: Path) -> None:
    """Proposed paths have scales, which the policies learn from, and a second search has the same ones."""
    first, second = (Search(tmp_path / name, scales=(0.8, 1.25)).run() for name in "ab")
    proposed = [t for t in first.store.trials(first.study) if t.origin is Origin.SEARCH]
    scales = [[layer.scale for layer in trial.read_recipe().layers] for trial in proposed]
    assert all(each[-1] == 1.0 for each in scales)
    assert len({tuple(each) for each in scales}) > 10
    assert all(0.8 <= scale <= 1.25 for each in scales for scale in each)
    assert [bool(step.result.checkpoint) for step in first.steps] == [False, True, True, True]
    assert second.trials == first.trials
