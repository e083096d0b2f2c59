"""A coordinator run without Ray: with the fake scorer, one chunk at a time, in any order of completion."""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from search_spaces.baselines import Baseline, all_baselines
from search_spaces.fidelity import Scheduler, bracket_cycle
from search_spaces.objectives import Objective
from search_spaces.parameters import Parameters
from search_spaces.spaces.base import SearchSpace
from search_spaces.spaces.lfs import LfsSpace
from search_spaces.study.search import Search, SmacOptions
from service.store import Store
from service.store.steps import ChargedRequest, NoteRequest, NoteResult, Step, step_of
from service.tune.coordinator import Coordinator
from service.tune.evaluation import ChunkFailed, Crash, Evaluation, FailureKind
from service.tune.plan import Plan
from service.tune.refinement_stage import Gradients
from service.tune.searchers import get_searcher
from service.tune.searchers.base import ProposalContext, Searcher, SearchSetting
from service.types import Origin
from tests.search_spaces.spaces.families import models, space
from tests.service.resolved import resolved_study
from workers.errors import (
    EngineCrashed,
    EngineFault,
    EngineUnavailable,
    InvalidModel,
    InvalidTask,
    MetricFailed,
    TrialFailed,
)
from workers.serving.fake import FakeScorer
from workers.types import Scorer, ScoreRequest, TaskSpec

FINGERPRINTS = {"base": "b0", "math": "m1", "text": "t2"}

# Spaces that searches run in alike: groups of layers, tensors, paths of layers, scales of one model.
SPACES: Mapping[str, Mapping[str, Any]] = {
    "lfs": {"layer_groups": 2},
    "layerwise": {},
    "dis": {},
    "sfs": {"model": "math"},
}


def lfs_space(**changes: Any) -> LfsSpace:
    arguments: dict[str, Any] = {
        "base": "base",
        "experts": ("math", "text"),
        "fingerprints": FINGERPRINTS,
        "num_layers": 4,
        "layer_groups": 2,
    }
    return LfsSpace(**{**arguments, **changes})


def space_of(kind: str, **options: Any) -> SearchSpace:
    """The space over the models of FINGERPRINTS. If merges may have any number of layers, the limit is five."""
    family = replace(models(("math", "text"), 4, max_layers=5), fingerprints=FINGERPRINTS)
    built: SearchSpace = space(kind, family, **{**SPACES[kind], **options})
    return built


@cache
def _known_baselines() -> tuple[Baseline, ...]:
    return all_baselines(base="base", experts=("math", "text"), fingerprints=FINGERPRINTS, num_layers=4)


def make_plan(study_id: str, *, scheduler: Scheduler = "hyperband", max_trials: int = 14, **changes: Any) -> Plan:
    """A plan: two objectives, rungs of 4, 12 and 36 samples (only 36 without a scheduler), a holdout of 50 samples."""
    names = ("math", "text")
    sizes = (36,) if scheduler == "none" else (4, 12, 36)
    tasks = {name: TaskSpec(task=name, metric="exact_match") for name in names}
    arguments: dict[str, Any] = {
        "study_id": study_id,
        "seed": 0,
        "objectives": tuple(Objective(name, "exact_match", "maximize", None) for name in names),
        "tasks": tasks,
        "holdout_tasks": {name: replace(task, split="test") for name, task in tasks.items()},
        "rung_samples": tuple(dict.fromkeys(names, size) for size in sizes),
        "holdout_samples": dict.fromkeys(names, 50),
        "scheduler": scheduler,
        "cycle": bracket_cycle(scheduler, num_rungs=len(sizes), eta=3, max_trials=max_trials),
        "eta": 3,
        "max_trials": max_trials,
        "max_staleness": 5,
        "chunk_samples": 30,
        "bank_fingerprint": FakeScorer().bank_fingerprint,
        "baselines": tuple((Origin(origin), label, recipe) for origin, label, recipe in _known_baselines()),
    }
    return Plan(**{**arguments, **changes})


# A searcher `smac` whose proposals are all the forest's.
NO_RANDOM = SearchSetting(options=Search(smac=SmacOptions(random_share=0.0)))


def propose(
    searcher: Searcher, parameters: Parameters, *, steps: Sequence[Step] = (), **context: Any
) -> dict[str, Any]:
    """The configuration that a searcher without computed steps proposes; `context` as for `ProposalContext`.

    Decisions that it notes first are added to the given steps.
    """
    noted = list(steps)
    while True:
        answer = searcher.advance(ProposalContext(parameters, steps=noted, **context))
        if isinstance(answer, dict):
            return answer
        assert isinstance(answer, NoteRequest)
        noted.append(step_of(len(noted), context["number"], answer, NoteResult()))


class InlineProposer:
    """`proposals.Proposer` in the caller's thread, for searchers without computed steps; a random search by default.

    If `seed` is None, the seed of each draw is a checksum of all results that the proposal knows. `steps` are the
    study's earlier notes.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        seed: int | None = None,
        algorithm: str = "random",
        options: Search | None = None,
        steps: Sequence[Step] = (),
    ) -> None:
        self._seed = seed
        self._searcher = get_searcher(algorithm)
        self._setting = SearchSetting(options=options or Search())
        self._parameters = space.parameters
        self._steps = list(steps)
        self._call: Mapping[str, Any] = {}

    def submit(self, *, number: int, observations: Sequence[Any], pending: Sequence[Mapping[str, Any]]) -> None:
        self._call = {"number": number, "observations": observations, "pending": pending}

    def compute(self, request: ChargedRequest) -> None:
        raise AssertionError("it computes no steps")

    def stored(self, step: Step) -> None:
        self._steps.append(step)

    def release(self) -> None:
        """Do nothing: this proposer has no actors."""

    def result(self, *, timeout_s: float) -> Any:
        told = zlib.crc32(repr(self._call).encode())
        seed = told if self._seed is None else self._seed
        answer = self._searcher.advance(
            ProposalContext(self._parameters, seed=seed, setting=self._setting, steps=self._steps, **self._call)
        )
        if isinstance(answer, dict):
            return answer
        assert isinstance(answer, NoteRequest)
        return step_of(len(self._steps), self._call["number"], answer, NoteResult())


def new_study(directory: Path, database: str | None = None) -> tuple[Store, str]:
    """Create a study in a new database in the directory, or in the database at the URL `database`."""
    store = Store(database or f"sqlite:///{directory / 'study.db'}")
    return store, store.create_job(kind="search", name="test", document={}, accepted=resolved_study().to_json()).id


def closed_study(store: Store, study_id: str) -> tuple[Path, str]:
    """Close a study's store; returns the file of its database, and the study's id, for `copied_study`."""
    file = Path(store.engine.url.database or "")
    store.close()
    assert not file.with_name(f"{file.name}-wal").exists(), "all pages are in the file"
    return file, study_id


def copied_study(closed: tuple[Path, str], directory: Path) -> tuple[Store, str]:
    """Copy a closed study to a directory, which is made if necessary, and open its store."""
    file, study_id = closed
    directory.mkdir(exist_ok=True)
    shutil.copyfile(file, directory / file.name)
    return Store(f"sqlite:///{directory / file.name}"), study_id


def coordinator_of(
    store: Store,
    study_id: str,
    *,
    proposer: InlineProposer | None = None,
    observer: Callable[[str], None] = lambda _: None,
    is_out_of_budget: Callable[[], str | None] = lambda: None,
    space: SearchSpace | None = None,
    gradients: Gradients | None = None,
    **plan: Any,
) -> Coordinator:
    """A new attempt at the study; `plan` as for `make_plan`."""
    space = space or lfs_space()
    return Coordinator(
        make_plan(study_id, **plan),
        space=space,
        store=store,
        writer=store.open_attempt(study_id),
        proposer=proposer or InlineProposer(space),
        gradients=gradients,
        observer=observer,
        is_out_of_budget=is_out_of_budget,
    )


def drive(
    coordinator: Coordinator, scorer: Scorer, *, concurrency: int = 3, order_seed: int = 0, asks_ahead: bool = True
) -> None:
    """Run the study to its end, or until only judgments are left.

    A random draw decides which evaluation in flight finishes its next chunk first.
    """
    draw = random.Random(order_seed)
    in_flight: list[tuple[Evaluation, int]] = []
    while True:
        while len(in_flight) < concurrency and (evaluation := coordinator.next_evaluation()) is not None:
            in_flight.append((evaluation, 0))
        if not in_flight:
            assert coordinator.is_finished or coordinator.awaited_judges
            return
        if asks_ahead and len(in_flight) == concurrency:
            coordinator.ask_ahead()
        evaluation, chunk = in_flight.pop(draw.randrange(len(in_flight)))
        outcome = score(scorer, evaluation, chunk)
        if not coordinator.on_outcome(evaluation, outcome):
            in_flight.append((evaluation, chunk if isinstance(outcome, ChunkFailed) else chunk + 1))


def score(scorer: Scorer, evaluation: Evaluation, chunk: int) -> Any:
    try:
        return scorer.score(ScoreRequest(evaluation.study, evaluation.recipe, evaluation.chunks[chunk]))
    except MetricFailed as error:
        return ChunkFailed(FailureKind.METRIC, str(error))
    except TrialFailed as error:
        return ChunkFailed(FailureKind.TRIAL, str(error))
    except (InvalidModel, InvalidTask) as error:
        return ChunkFailed(FailureKind.STUDY, str(error))
    except EngineCrashed as error:
        crash = Crash(evaluation.chunks[chunk], error.replica, error.scored_others, error.kind)
        return ChunkFailed(FailureKind.CRASH, str(error), crash=crash)
    except EngineUnavailable as error:
        return ChunkFailed(FailureKind.ENGINE, str(error))
    except EngineFault as error:
        return ChunkFailed(FailureKind.FAULT, str(error), fault=error)


class Killed(BaseException):
    """Stand-in for SIGKILL: nothing catches it, and nothing is written after it."""


def killer(at: int) -> Callable[[str], None]:
    """An observer that raises Killed at step number `at` (from 0)."""
    count = 0

    def observe(_: str) -> None:
        nonlocal count
        if count == at:
            raise Killed
        count += 1

    return observe


def trial_list(store: Store, study_id: str) -> list[tuple[Any, ...]]:
    """The trials, with all that a resumed and an undisturbed search must have in common."""
    return [
        (
            trial.number,
            trial.origin,
            trial.label,
            trial.state,
            trial.configuration,
            trial.recipe.digest,
            trial.bracket,
            trial.rungs,
            trial.samples_scored,
            trial.samples_reused,
            trial.reason,
            trial.rival,
        )
        for trial in store.trials(study_id)
    ]
