"""The result of preflight: a study that can run, and the plan of its search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from search_spaces.baselines import all_baselines
from search_spaces.costs import ModelSize
from search_spaces.errors import Problem
from search_spaces.fidelity import Bracket, bracket_plan, open_brackets
from search_spaces.methods import METHODS
from search_spaces.objectives import Objective
from search_spaces.preferences import equal_preference
from search_spaces.recipe import Recipe
from search_spaces.searchers import SEARCHERS
from search_spaces.spaces.base import DifferentiableSpace, LayeredSpace, SearchSpace
from search_spaces.study.engine import EngineOptions
from search_spaces.study.file import Study
from service.engine_machines import EngineMachines
from service.resolved_study import ChainedSource, ResolvedStudy
from service.studies.preflight.algorithm import (
    GRADIENT,
    Algorithm,
    descent_points_of,
    iterations_ahead,
    num_policies_of,
)
from service.studies.preflight.gradients import GradientPlace
from service.studies.preflight.resources import MemoryPlan
from service.tune.plan import Baseline, Benchmark, Plan, RefinementPlan
from service.tune.proposing.gradient_actor import GradientInputs
from service.tune.schedulers import SCHEDULERS
from service.tune.searchers.base import Observation, SearchSetting
from service.types import Origin
from workers.file_access import FileAccess
from workers.models.modalities import MODALITIES
from workers.types import CHUNKS_IN_FLIGHT_PER_REPLICA, Family, TaskInfo, TaskSpec

__all__ = [
    "ExpectedSamples",
    "PreflightResult",
    "StudyBudget",
    "StudyModels",
    "StudyTasks",
    "preference_vectors",
    "refinement_of",
]

# Samples per request: the most that a crash loses, and that a replica scores before it looks at its queue again.
CHUNK_SAMPLES = 512

# Trials by which proposals may run ahead of results: this number for each replica, minus one in all. Measured with
# tests/benchmarks/bench_replicas.py.
STALENESS_PER_REPLICA = 6

# Number of batches in which proposals that run ahead of results are made, if there are at least as many proposals.
BATCHES_AHEAD = 8


# Trials on the front besides the baselines that estimates of cost assume.
ASSUMED_FINALISTS = 4


@dataclass(frozen=True)
class ExpectedSamples:
    """Numbers of samples that a study is expected to score.

    `search` is the number of samples for the search, `holdout` is the number of samples for scoring on holdout data,
    and `full_budget` is the number of samples for a search that scores every trial on all samples. These three numbers
    include baselines, which take `baselines` samples in the search and `holdout_baselines` samples on holdout data.
    `benchmarks` is the number of samples for scoring on benchmarks, with the largest number of samples that prompt
    attacks can take. With the scheduler asha, `search` is a lower bound: asha decides early, so it also promotes trials
    that later turn out not to be among the best.
    """

    search: int
    holdout: int
    full_budget: int
    baselines: int
    holdout_baselines: int
    benchmarks: int = 0


@dataclass(frozen=True)
class StudyModels:
    """The models of a study, after the checks that they fit together and can run in vLLM.

    Attributes:
        family: The base and the experts, with content fingerprints.
        num_layers: Decoder layers of each model.
        num_parameters: Parameters of one model.
        export_bytes: Size of the weights of an exported merge; of the largest merge if merges have different numbers of
            layers.
        commits: Commits of hub models, keyed by the names in the study file.
        absent_bytes: Size of the weights that are not on this machine yet, and were therefore not checked.
        engine_note: A message for the user about how vLLM runs the models; "" for no message.
        chained: The sources that are merges of other studies, keyed by alias.
        size: Numbers of parameters of each layer and component, from which costs of recipes are computed; None if all
            merges have the same number of layers.
    """

    family: Family
    num_layers: int
    num_parameters: int
    export_bytes: int
    commits: Mapping[str, str]
    absent_bytes: int
    engine_note: str
    chained: Mapping[str, ChainedSource] = field(default_factory=dict)
    size: ModelSize | None = None


@dataclass(frozen=True)
class StudyTasks:
    """The objectives of a study, and the tasks that score them on search data and on holdout data.

    `search` and `holdout` have the tasks, keyed by the objective's name. `benchmarks` are the study's benchmarks, whose
    tasks are scored after the search. `search_infos` and `holdout_infos` have facts about each task, such as its number
    of samples.
    """

    objectives: tuple[Objective, ...]
    search: Mapping[str, TaskSpec]
    search_infos: Mapping[str, TaskInfo]
    holdout: Mapping[str, TaskSpec]
    holdout_infos: Mapping[str, TaskInfo]
    benchmarks: tuple[Benchmark, ...] = ()

    @property
    def unsearched(self) -> dict[str, Mapping[str, TaskSpec]]:
        """The tasks of holdout data and benchmarks, which the search must not use.

        Keys are the section of the study file ("holdout" or "benchmarks") and then the entry's name.
        """
        return {"holdout": self.holdout, "benchmarks": {each.name: each.task for each in self.benchmarks}}


@dataclass(frozen=True)
class StudyBudget:
    """The numbers of samples on which the trials of a study are scored and compared.

    `rung_samples` has, for each rung, the number of samples, keyed by objective; trials are compared at rungs. `cycle`
    has the brackets (ladders of rungs, as in Hyperband) that the scheduler repeats.
    """

    rung_samples: tuple[Mapping[str, int], ...]
    cycle: tuple[Bracket, ...]


def refinement_of(study: Study, infos: Mapping[str, TaskInfo]) -> RefinementPlan | None:
    """Plan the refinement of a study, which learns coefficients of the trials on the Pareto front after the search.

    `infos` has facts about each objective's task, such as its number of samples. Returns None if the study has no
    refinement.
    """
    if study.search.refinement is None:
        return None
    names = tuple(infos)
    return RefinementPlan(
        options=study.search.refinement,
        num_samples={name: info.num_samples for name, info in infos.items()},
        vectors=preference_vectors(study, names) or (equal_preference(len(names)),),
    )


def preference_vectors(study: Study, objectives: Sequence[str]) -> tuple[tuple[float, ...], ...]:
    """The study's preference vectors (importances of the objectives), with weights in the order of `objectives`.

    The result is empty if the study has no preference vectors.
    """
    given = study.search.preferences
    return () if given is None else given.weights(objectives, seed=study.search.seed)


@dataclass(frozen=True)
class PreflightResult:
    """Result of preflight (the checks that a study must pass before it runs), with everything that a run needs.

    Attributes:
        study: The study file, in which merges of other studies are replaced by the directories of their exports.
        models: Models of the study.
        tasks: Objectives of the study and their tasks.
        budget: Numbers of samples at which trials are compared.
        space: Search space of the study.
        algorithm: Searcher of the study, and why it was chosen.
        memory: Memory that the study needs.
        gradients: Where gradients are computed; None if no gradients are needed.
        gpu_share_left: Share of its GPU's memory that each engine leaves to gradients and verification.
        merges_parts: Whether each GPU of an engine merges only the part of a tensor that it holds.
        entropies: Objectives whose gradients are the gradients of the entropy of predictions.
        access: Files that the study may read; None for all.
        start: Checkpoints of another study from which the searcher's policies (networks) start; empty if the policies
            start untrained.
        observed: Results of an earlier study that the searcher knows from its first proposal on.
        recipes: Recipes that the study file lists, with their names; they are scored in place of a search or before it.
        lacks: Reasons why the study does not fit into the memory of the machines. The reasons are in this field only if
            a plan is to be made; otherwise a lack of memory is a problem, and is raised.
        dtype: Dtype in which engines compute, on the machines for which the study was checked.
        machines: Groups of machines for which the study was checked.
    """

    study: Study
    models: StudyModels
    tasks: StudyTasks
    budget: StudyBudget
    space: SearchSpace
    algorithm: Algorithm
    memory: MemoryPlan
    gradients: GradientPlace | None = None
    gpu_share_left: float = 0.0
    merges_parts: bool = False
    entropies: tuple[str, ...] = ()
    access: FileAccess | None = None
    start: tuple[bytes, ...] = ()
    observed: tuple[Observation, ...] = ()
    recipes: tuple[tuple[str, Recipe], ...] = ()
    lacks: tuple[Problem, ...] = ()
    dtype: str = "float32"
    machines: tuple[EngineMachines, ...] = ()

    @property
    def concurrency(self) -> int:
        return CHUNKS_IN_FLIGHT_PER_REPLICA * self.study.engine.replicas

    @property
    def engine_options(self) -> EngineOptions:
        """Options of the study's engines.

        The option `max_layers` is set only in search spaces whose merges may have any number and order of layers.
        """
        further: dict[str, Any] = {"gpu_share_left": self.gpu_share_left, "merges_parts": self.merges_parts}
        if isinstance(self.space, LayeredSpace):
            further["max_layers"] = self.space.max_layers
        return self.study.engine.options.model_copy(update=further)

    def resolved(self) -> ResolvedStudy:
        return ResolvedStudy(
            fingerprints=self.models.family.fingerprints,
            commits=self.models.commits,
            num_layers=self.models.num_layers,
            tasks={name: spec.digest for name, spec in self.tasks.search.items()},
            holdout_tasks={name: spec.digest for name, spec in self.tasks.holdout.items()},
            rung_samples=self.budget.rung_samples,
            max_staleness=self._max_staleness,
            open_brackets=open_brackets(self.budget.cycle, max_staleness=self._max_staleness),
            batch=max(1, self._max_staleness // BATCHES_AHEAD),
            objectives=self.tasks.objectives,
            version=version("mergesearch"),
            access=self.access,
            algorithm=self.algorithm.name,
            algorithm_reason=self.algorithm.reason,
            searcher_version=SEARCHERS[self.algorithm.name].version,
            scheduler_version=SCHEDULERS[self.study.fidelity.scheduler].version,
            descent_points=self._descent_points,
            chained=self.models.chained,
            recipes={name: recipe.digest for name, recipe in self.recipes},
            dtype=self.dtype,
            gpu_share_left=self.gpu_share_left,
        )

    @property
    def _max_staleness(self) -> int:
        """Largest number of trials by which proposals may run ahead of results.

        The study file may state the number. Otherwise it grows with the number of replicas (processes with an engine).

        A searcher that trains policies learns after every iteration, a fixed number of trials. For such a searcher the
        number is at least half an iteration, so that engines have work while a policy learns. It is at most one
        iteration for each replica, and at most `iterations_ahead` iterations.
        """
        if self.study.search.max_staleness is not None:
            return self.study.search.max_staleness
        replicas = self.study.engine.replicas
        staleness = STALENESS_PER_REPLICA * replicas - 1
        if not SEARCHERS[self.algorithm.name].trains_policy:
            return staleness
        episodes = self.study.search.hm3.episodes
        iterations = min(replicas, iterations_ahead(num_policies_of(self.study)))
        return min(max(staleness, episodes // 2), episodes * iterations)

    def search_setting(
        self, *, num_baselines: int, batch: int = 1, version: int | None = None, descent_points: int | None = None
    ) -> SearchSetting:
        """Facts about the study that some searchers need in addition to the search space and results.

        `num_baselines` is the number of trials before the first proposal. `batch` is the number of proposals in a row
        that are made from the same results. `version` is the version of the searcher that the study was created with;
        None means a new study, which uses the newest version. `descent_points` is the number of points of gradient
        descents that become trials, as stored with the study; None means the number of a new study.
        """
        scored = {
            name: self.study.search.num_scored(info.num_samples) for name, info in self.tasks.search_infos.items()
        }
        options, points = self.study.search, descent_points or self._descent_points
        if points is not None:
            gradient = options.gradient.model_copy(update={"points": points})
            options = options.model_copy(update={"gradient": gradient})
        return SearchSetting(
            objectives=tuple(self.tasks.search),
            num_samples={name: info.num_samples for name, info in self.tasks.search_infos.items()},
            num_baselines=num_baselines,
            batch=batch,
            options=options,
            preferences=preference_vectors(self.study, tuple(self.tasks.search)),
            first_fitted=scored if self.study.search.fit_share < 1 else {},
            family=self.models.family if SEARCHERS[self.algorithm.name].trains_policy else None,
            start=self.start,
            version=SEARCHERS[self.algorithm.name].version if version is None else version,
            observed=self.observed,
            experts=self._searched_experts,
            has_completions=MODALITIES[self.models.family.modality].has_vocabulary,
        )

    @property
    def _descent_points(self) -> int | None:
        """How many points of a new study's gradient descents become trials; None if the searcher is another one."""
        return descent_points_of(self.study) if self.algorithm.name == GRADIENT else None

    @property
    def _searched_experts(self) -> tuple[str, ...]:
        """Aliases of the experts whose coefficients are parameters of the search space; empty if there are none."""
        space = self.space
        if not isinstance(space, DifferentiableSpace):
            return ()
        declared = METHODS[space.method].coefficient(space.coefficient)
        is_of_experts = declared is not None and declared.per_model
        return tuple(expert.alias for expert in self.models.family.experts) if is_of_experts else ()

    def gradient_inputs(self) -> GradientInputs | None:
        """Arguments of the actor that computes gradients; None if the study cannot need gradients.

        A study can need gradients if its search space is differentiable, or if it refines its Pareto front by
        gradients.
        """
        space = self.space if isinstance(self.space, DifferentiableSpace) else None
        if space is None and self.study.search.refinement is None:
            return None
        place = self.gradients or GradientPlace("cpu")
        return GradientInputs(
            self.models.family,
            self.engine_options,
            dict(self.tasks.search),
            space,
            device=place.device,
            recomputes=place.recomputes,
            num_gpus=place.num_gpus,
            tokens=place.tokens,
            entropies=self.entropies,
        )

    @property
    def _num_repeated(self) -> int:
        """Number of consecutive repeated proposals after which a search that trains policies ends.

        A proposal is repeated if an earlier trial has its recipe. The number is two training iterations (fixed numbers
        of proposals) for every policy, but at least two proposals for each preference vector (weights of the
        objectives).
        """
        search = self.study.search
        num_vectors = 1 if search.preferences is None else search.preferences.size(len(self.tasks.search))
        return 2 * max(search.hm3.episodes * num_policies_of(self.study), num_vectors)

    def plan(self, study_id: str, resolved: ResolvedStudy, *, baselines: tuple[Baseline, ...] | None = None) -> Plan:
        """Make the plan of the study `study_id`: all settings that determine what its driver evaluates.

        `resolved` has facts that were stored when the study was created. The plan uses these facts: the searcher, the
        version of the scheduler, how far proposals may run ahead of results, the number of open brackets (ladders of
        rungs), and the number of proposals in a batch. `baselines` are the baselines of a study that is resumed, or
        None to use the baselines of a new study.
        """
        declared = SEARCHERS[resolved.algorithm or self.study.search.algorithm]
        return Plan(
            study_id=study_id,
            seed=self.study.search.seed,
            objectives=self.tasks.objectives,
            tasks=self.tasks.search,
            holdout_tasks=self.tasks.holdout,
            rung_samples=self.budget.rung_samples,
            holdout_samples={name: info.num_samples for name, info in self.tasks.holdout_infos.items()},
            benchmarks=self.tasks.benchmarks,
            scheduler=self.study.fidelity.scheduler,
            scheduler_version=resolved.scheduler_version,
            cycle=self.budget.cycle,
            eta=self.study.fidelity.reduction_factor,
            max_trials=self.study.search.num_proposals,
            max_staleness=resolved.max_staleness,
            open_brackets=resolved.open_brackets,
            batch=resolved.batch,
            chunk_samples=CHUNK_SAMPLES,
            bank_fingerprint=self.models.family.fingerprint,
            baselines=self.baselines() if baselines is None else baselines,
            error_rate=self.study.fidelity.bound_error_rate,
            max_samples=self.study.limits.max_samples,
            size=self.models.size,
            refinement=refinement_of(self.study, self.tasks.search_infos),
            waits_for_baselines=declared.waits_for_baselines,
            **({"max_duplicates": self._num_repeated} if declared.trains_policy else {}),
        )

    def baselines(self) -> tuple[Baseline, ...]:
        """The merges of a new study that are scored before the search: baselines and recipes listed in the study file.

        A listed recipe that is also a baseline is scored once, as the baseline.
        """
        aliases = tuple(expert.alias for expert in self.models.family.experts)
        found = all_baselines(
            base=self.models.family.base.alias,
            experts=aliases,
            fingerprints=self.models.family.fingerprints,
            num_layers=self.models.num_layers,
            tokenizer=self.models.family.tokenizer,
            chosen=self.study.search.baselines,
        )
        baselines = tuple((Origin(origin), label, recipe) for origin, label, recipe in found)
        known = {recipe.digest for _, _, recipe in baselines}
        return baselines + tuple((Origin.USER, name, own) for name, own in self.recipes if own.digest not in known)

    @property
    def num_finalists(self) -> int:
        """Number of finalists (trials of the Pareto front to score on holdout data) that estimates of cost assume.

        Baselines, which are scored too, are not counted. The number is 0 if given recipes are scored in place of a
        search.
        """
        return ASSUMED_FINALISTS if self.study.search.proposes else 0

    def num_scored_on(self, benchmark: Benchmark) -> int:
        """Number of trials that are expected to be scored on `benchmark`, by its rules for choosing trials."""
        origins = [origin for origin, _, _ in self.baselines()]
        numbers = {
            "finalists": self.num_finalists,
            "sources": origins.count(Origin.SOURCE),
            "published": origins.count(Origin.PUBLISHED),
            "recipes": origins.count(Origin.USER),
        }
        return sum(numbers.get(choice, 1) if isinstance(choice, str) else 1 for choice in benchmark.trials)

    def within_limit(self, num_samples: int) -> int:
        """Return `num_samples`, or the study file's limit of samples if this limit is smaller."""
        limit = self.study.limits.max_samples
        return num_samples if limit is None else min(num_samples, limit)

    def expected_samples(self) -> ExpectedSamples:
        """Numbers of samples that the study will score if no trial fails and no two recipes are equal.

        The whole plan is counted, even if the limit of samples in the study file may end the search earlier.
        """
        totals = [sum(samples.values()) for samples in self.budget.rung_samples]
        brackets = bracket_plan(self.budget.cycle, self.study.search.num_proposals)
        num_baselines = len(self.baselines())
        baselines = num_baselines * totals[-1]
        per_row = sum(info.num_samples for info in self.tasks.holdout_infos.values())
        return ExpectedSamples(
            search=baselines + sum(bracket.samples(totals) for bracket in brackets),
            holdout=per_row * (num_baselines + self.num_finalists),
            full_budget=baselines + self.study.search.num_proposals * totals[-1],
            baselines=baselines,
            holdout_baselines=per_row * num_baselines,
            benchmarks=sum(self.num_scored_on(b) * b.most_samples for b in self.tasks.benchmarks),
        )
