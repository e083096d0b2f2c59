"""Searches for the search benchmark, each in one process, with `one_pass` in place of engines.

Coordinator, scheduler, searcher and gradient actor are the product's, and the trials are those that `mergesearch run`
of the same study has. A finished search is a file in `.bench/search/runs`, from which several arms are measured. A
search is run again only if its study, its family or the code of its searcher has changed, or with FRESH=1.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from search_spaces.recipe import Recipe
from search_spaces.spaces.base import AlignedSpace
from search_spaces.study.search import Search
from service.store import Store
from service.store.steps import (
    ChargedRequest,
    CompletionsRequest,
    GradientRequest,
    LossesRequest,
    NoteRequest,
    NoteResult,
    NoteStep,
    Step,
    StepRequest,
    StepResult,
    UpdateRequest,
    step_of,
)
from service.studies.preflight.examine import examine
from service.studies.preflight.result import PreflightResult
from service.tune.coordinator import Coordinator
from service.tune.proposing.completions import SourceCompletions
from service.tune.proposing.gradient_actor import GradientActor
from service.tune.proposing.searcher_state import SearcherState
from service.tune.searchers.base import Observation
from service.types import Origin
from tests.benchmarks.arms import is_fresh
from tests.benchmarks.code_digests import code_digest
from tests.benchmarks.one_pass import OnePass
from tests.benchmarks.search_families import FAMILIES, TrainedFamily
from workers.types import ScoreRequest, TaskSpec

__all__ = ["Bench", "InProcess", "Run", "SearchSpec", "Trial"]

CACHE = Path(".bench/search")
ALIGNMENTS = CACHE / "alignments"

# A coordinator's evaluations are scored one at a time, so chunks need not be small.
CHUNK_SAMPLES = 100_000


@dataclass(frozen=True)
class SearchSpec:
    """A study of a family, with all settings that determine its trials.

    `search.hm3.start.dir` is here the file of another search, without its suffix, whose policy it begins with. The
    search ends after `search.max_trials`, or when the next trial would exceed the `budget`: samples' worth of proposed
    trials and steps.
    """

    family: str
    goal: str
    name: str
    seed: int
    search: Mapping[str, Any]
    space: Mapping[str, Any] | None = None
    fidelity: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None

    def document(self) -> dict[str, Any]:
        sections: dict[str, Any] = {"search": {**self.search, "seed": self.seed}, "fidelity": dict(self.fidelity)}
        if self.space is not None:
            sections["search_space"] = dict(self.space)
        return sections


@dataclass(frozen=True)
class Trial:
    """A trial at full budget.

    `spent` is what proposed trials and steps had cost once it was scored, in samples' worth; 0 for a baseline.
    """

    number: int
    origin: str
    label: str
    configuration: Mapping[str, Any] | None
    digest: str
    values: Mapping[str, float]
    spent: int

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.values.values())))


@dataclass(frozen=True)
class Run:
    """A finished search.

    `spent` is its cost in samples' worth, `notes` are the searcher's decisions, `seconds` is wall-clock time.
    """

    spec: SearchSpec
    trials: tuple[Trial, ...]
    spent: int
    notes: tuple[str, ...]
    seconds: float

    def until(self, budget: float) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.spent <= budget)

    def cut(self, budget: float) -> Run:
        """The search as it was after `budget` samples' worth; only for searches that score one trial after another."""
        return replace(self, trials=self.until(budget), spent=max(trial.spent for trial in self.until(budget)))

    def proposed(self) -> Run:
        """A copy of the search without baselines."""
        return replace(self, trials=tuple(trial for trial in self.trials if trial.origin == "search"))

    def best(self, budget: float = np.inf) -> Trial:
        """The trial with the best mean on search data within `budget`; baselines count, as in a study."""
        return max(self.until(budget), key=lambda trial: (round(trial.mean, 12), -trial.number))


class InProcess:
    """`proposals.Proposer` in the caller's thread; `steps` are those that the study has stored."""

    def __init__(
        self,
        preflight: PreflightResult,
        actor: GradientActor | None,
        completions: SourceCompletions,
        steps: Sequence[Step] = (),
    ) -> None:
        setting = preflight.search_setting(num_baselines=len(preflight.baselines()))
        self._searcher = SearcherState(preflight.algorithm.name, preflight.space.parameters, setting, steps, {})
        self._seed = preflight.study.search.seed
        self._actor = actor
        self._completions = completions
        self._num_steps = len(steps)
        self._call: dict[str, Any] = {}
        self._answer: StepRequest | dict[str, Any] = {}
        self._admitted: ChargedRequest | None = None
        self.checkpoints: dict[int, bytes] = {}
        """The newest policy's checkpoint, by the iteration that it has learned from last."""

    def submit(self, *, number: int, observations: Sequence[Observation], pending: Sequence[Mapping[str, Any]]) -> None:
        self._call = {"number": number, "seed": self._seed, "observations": observations, "pending": pending}
        self._answer = self._searcher.propose(**self._call)

    def result(self, *, timeout_s: float) -> Step | ChargedRequest | dict[str, Any] | None:
        if isinstance(self._answer, dict):
            return self._answer
        if isinstance(self._answer, (LossesRequest, GradientRequest)) and self._answer is not self._admitted:
            return self._answer
        return step_of(self._num_steps, self._call["number"], self._answer, self._computed(self._answer))

    def compute(self, request: ChargedRequest) -> None:
        self._admitted = request

    def stored(self, step: Step) -> None:
        self._num_steps += 1
        self._answer = self._searcher.propose_after(step, **self._call)

    def _computed(self, request: StepRequest) -> StepResult:
        if isinstance(request, NoteRequest):
            return NoteResult()
        if isinstance(request, UpdateRequest):
            result, content = self._searcher.update(request, **self._call)
            if content is not None:
                self.checkpoints = {request.iteration: content}
            return result
        assert self._actor is not None
        if isinstance(request, CompletionsRequest):
            found = self._completions.find(request)
            self._actor.use_completions(self._completions.read(found.completions))
            return found
        return self._actor.run(request)


@dataclass(eq=False)
class Bench:
    """The searches of one family, and the judging of the merges that they find; models are opened once."""

    losses: ClassVar[str] = "workers.training.text_losses"
    """The module with the losses of the family's tasks, of which gradients are."""

    family: TrainedFamily
    _searched: set[Path] = field(default_factory=set)  # by this process

    @classmethod
    @cache
    def of(cls, name: str) -> Bench:
        return cls(FAMILIES[name])

    @cached_property
    def judge(self) -> PreflightResult:
        """The study of the judge items, whose tasks have the same order for all seeds of searches."""
        return examine(self.family.study("judge", fidelity={"scheduler": "none"}))

    @cached_property
    def scorer(self) -> OnePass:
        family = replace(self.judge.models.family, alignments_dir=str(ALIGNMENTS.resolve()))
        return OnePass(family, self.judge.engine_options, memory=CACHE / "scores")

    @property
    def fingerprint(self) -> str:
        return self.judge.models.family.fingerprint

    def preflight(self, spec: SearchSpec) -> PreflightResult:
        found = self._examined(spec.goal, spec.document())
        start = found.study.search.hm3.start
        return found if start is None else replace(found, start=(_newest_policy(Path(str(start.dir)))[1],))

    def run(self, spec: SearchSpec) -> Run:
        """A search, read from its file or run now."""
        file, key = self.file(spec), self._key(spec)
        is_wanted = is_fresh() and file not in self._searched
        if file.exists() and not is_wanted and (stored := json.loads(file.read_text()))["key"] == key:
            trials = tuple(Trial(**trial) for trial in stored["trials"])
            return Run(spec, trials, stored["spent"], tuple(stored["notes"]), stored["seconds"])
        found, checkpoints = self._search(spec)
        what = f"{spec.family}, {spec.name}, seed {spec.seed}"
        print(f"{what}: {len(found.trials)} trials in {found.seconds:.0f} s", file=sys.stderr)
        file.parent.mkdir(parents=True, exist_ok=True)
        for iteration, content in checkpoints.items():
            file.with_suffix(f".{iteration}.policy").write_bytes(content)
        file.with_suffix(".part").write_text(json.dumps({"key": key, **asdict(found)}))
        file.with_suffix(".part").rename(file)
        self._searched.add(file)
        return found

    def policy(self, spec: SearchSpec) -> dict[int, bytes]:
        """Last checkpoint of the policy that a finished search has learned, by its iteration."""
        newest, content = _newest_policy(self.file(spec).with_suffix(""))
        return {newest: content}

    def file(self, spec: SearchSpec) -> Path:
        return CACHE / "runs" / spec.family / spec.goal / f"{spec.name}-{spec.seed}.json"

    def judged(self, recipe: Recipe) -> NDArray[np.bool_]:
        """Answers of a merge to judge items, [skills, items]."""
        return np.stack([self._all(recipe, task) for task in self.judge.tasks.search.values()])

    def searched(self, recipe: Recipe, seed: int, num: int | None = None) -> NDArray[np.bool_]:
        """Answers of a merge to search items: all items of each skill, or the first `num` in the order of a seed."""
        spec = SearchSpec(self.family.name, "skills", "", seed, {}, fidelity={"scheduler": "none"})
        tasks = self._prepared(spec.goal, json.dumps(spec.document(), sort_keys=True)).tasks.search.values()
        return np.stack([self._all(recipe, task, num) for task in tasks])

    def recipe(self, spec: SearchSpec, trial: Trial) -> Recipe:
        preflight = self._prepared(spec.goal, json.dumps(spec.document(), sort_keys=True))
        if trial.configuration is not None:
            recipe = preflight.space.to_recipe(trial.configuration)
        else:
            recipe = preflight.baselines()[trial.number][2]
        assert recipe.digest == trial.digest
        return recipe

    @cache  # noqa: B019  (one bench for each family, which lives as long as the process)
    def _prepared(self, goal: str, document: str) -> PreflightResult:
        return self._examined(goal, json.loads(document))

    def _examined(self, goal: str, document: Mapping[str, Any]) -> PreflightResult:
        """Preflight result of the study in a document.

        A search of the mean has no preference vectors of its own. If its pool has merged models, they are those of a
        search of the skills with the document's vectors.
        """
        space, search = document.get("search_space", {}), document.get("search", {})
        if goal != "mean" or "merged" not in space:
            return with_alignments(examine(self.family.study(goal, **document)))
        of_skills = self._examined("skills", {**document, "search": {**search, "algorithm": "random"}})
        plain = {
            **document,
            "search_space": {name: value for name, value in space.items() if name != "merged"},
            "search": {name: value for name, value in search.items() if name != "preferences"},
        }
        return replace(examine(self.family.study(goal, **plain)), space=of_skills.space)

    def _all(self, recipe: Recipe, task: TaskSpec, num: int | None = None) -> NDArray[np.bool_]:
        return self.scorer.exact_matches(recipe, task, 0, self.scorer.num_samples(task) if num is None else num)

    def code_of(self, algorithm: str) -> str:
        """Digest of the code that decides the trials of a search of this family."""
        return code_of(algorithm, losses=self.losses)

    def _key(self, spec: SearchSpec) -> str:
        """Digest of what decides the search: study, models, code."""
        parts = [json.dumps(asdict(spec), sort_keys=True), self.fingerprint, self.code_of(spec.search["algorithm"])]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _search(self, spec: SearchSpec) -> tuple[Run, Mapping[int, bytes]]:
        started = time.perf_counter()
        preflight = self.preflight(spec)
        actor = self._actor(preflight)
        with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
            store = Store(f"sqlite:///{directory}/study.db")
            try:
                return self._searched_in(store, spec, preflight, actor, started)
            finally:
                store.close()

    def _searched_in(
        self, store: Store, spec: SearchSpec, preflight: PreflightResult, actor: GradientActor | None, started: float
    ) -> tuple[Run, Mapping[int, bytes]]:
        resolved = preflight.resolved()
        study = store.create_job(
            kind="search", name=spec.name, document=preflight.study.canonical(), accepted=resolved.to_json()
        )

        def spent() -> int:
            scored = sum(t.samples_scored for t in coordinator.trials if t.origin is Origin.SEARCH)
            return scored + sum(step.request.num_charged for step in store.steps(study.id))

        full = sum(preflight.budget.rung_samples[-1].values())
        proposer = InProcess(preflight, actor, SourceCompletions(store, study.id, preflight.tasks.objectives))
        coordinator = Coordinator(
            replace(preflight.plan(study.id, resolved), holdout_samples={}, chunk_samples=CHUNK_SAMPLES),
            space=preflight.space,
            store=store,
            writer=store.open_attempt(study.id),
            proposer=proposer,
            is_out_of_budget=lambda: (
                "the bench's budget" if spec.budget is not None and spent() + full > spec.budget else None
            ),
        )
        while (evaluation := coordinator.next_evaluation(timeout_s=1.0)) is not None:
            for chunk in evaluation.chunks:
                coordinator.on_outcome(evaluation, self.scorer.score(ScoreRequest(study.id, evaluation.recipe, chunk)))
        assert coordinator.is_finished
        charged = store.steps(study.id)
        trials = []
        so_far = 0
        for trial in coordinator.trials:
            if trial.origin is Origin.SEARCH:
                so_far += trial.samples_scored
            steps = sum(step.request.num_charged for step in charged if step.proposal <= trial.number)
            if trial.values:
                is_searched = trial.origin is Origin.SEARCH
                trials.append(
                    Trial(
                        trial.number,
                        str(trial.origin),
                        trial.label,
                        dict(trial.configuration) if is_searched and trial.configuration is not None else None,
                        trial.recipe.digest,
                        dict(trial.values),
                        so_far + steps if is_searched else 0,
                    )
                )
        notes = [step.request.label for step in charged if isinstance(step, NoteStep)]
        found = Run(spec, tuple(trials), spent(), tuple(notes), time.perf_counter() - started)
        return found, proposer.checkpoints

    def _actor(self, preflight: PreflightResult) -> GradientActor | None:
        if preflight.algorithm.name != "gradient":
            return None
        inputs = preflight.gradient_inputs()
        assert inputs is not None
        return GradientActor(inputs)


def _newest_policy(run: Path) -> tuple[int, bytes]:
    """Last iteration and checkpoint of a finished search's policy; `run` is the search's file without suffix."""
    iterations = {int(file.suffixes[-2][1:]): file for file in run.parent.glob(f"{run.name}.*.policy")}
    newest = max(iterations)
    return newest, iterations[newest].read_bytes()


def with_alignments(preflight: PreflightResult) -> PreflightResult:
    """The study with the alignments that its space needs; missing alignments are learned."""
    space = preflight.space
    if not isinstance(space, AlignedSpace) or space.alignment == "none":
        return preflight
    import ray

    from service.studies.preflight.shared_gpus import SharedGpu
    from service.tune.proposing.alignments import alignments_in
    from workers.alignments.pairs import AlignmentInputs
    from workers.alignments.samples import positions_of

    positions = positions_of({name: info.num_samples for name, info in preflight.tasks.search_infos.items()})
    inputs = AlignmentInputs(
        preflight.models.family,
        space.pool,
        preflight.engine_options,
        dict(preflight.tasks.search),
        positions,
        space.alignment,
    )
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    names = alignments_in(
        ALIGNMENTS,
        inputs,
        space.pairs,
        before={},
        gpu_bytes=SharedGpu.smallest(preflight.machines),
        note=lambda text: print(text, file=sys.stderr),
    )
    family = replace(preflight.models.family, alignments_dir=str(ALIGNMENTS.resolve()))
    return replace(preflight, space=space.with_alignments(names), models=replace(preflight.models, family=family))


def code_of(algorithm: str, *, losses: str = "workers.training.text_losses") -> str:
    """Digest of the code that decides a search's trials: its searcher, the coordinator, and what these import.

    `losses` is the module with the losses of the tasks, if the search has gradients. For `hm3` the digest is also of
    the defaults of its options, which a search may leave out.
    """
    name = "gradient" if algorithm == "auto" else algorithm
    modules = [f"service.tune.searchers.{name}", "service.tune.coordinator"]
    if name == "hm3":
        code = code_digest(*modules, "service.tune.proposing.checkpoints")
        defaults = json.dumps(Search().hm3.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(f"{code}{defaults}".encode()).hexdigest()[:16]
    if name == "gradient":
        modules += ["service.tune.proposing.gradient_actor", "workers.training.gradients", losses]
    return code_digest(*modules)
