"""Everything that can be checked before an engine starts, in order, and the plan that follows from it.

All problems of a study are reported together: first those in headers, configurations and task data, and only where
there are none those in the weights, because reading large models takes minutes (and is cached by content).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

from search_spaces.baselines import sources_and_published
from search_spaces.costs import ModelSize
from search_spaces.errors import InvalidStudy, Problem
from search_spaces.fidelity import Bracket, bracket_cycle, bracket_plan
from search_spaces.objectives import Objective
from search_spaces.preferences import equal_preference
from search_spaces.searchers import SEARCHERS
from search_spaces.spaces.base import AlignedSpace, DifferentiableSpace, LayeredSpace, SearchSpace
from search_spaces.study.file import Study
from search_spaces.study.sections import EngineOptions
from service.disk import lack_of_space
from service.studies.preflight.algorithm import GRADIENT, Algorithm, algorithm_of
from service.studies.preflight.dtype import DTYPE_BYTES, engine_dtype
from service.studies.preflight.files import check_files
from service.studies.preflight.models import (
    check_engine,
    check_layers,
    check_models,
    check_weights,
    model_size,
    searched_models,
    start_probe,
)
from service.studies.preflight.resources import MemoryPlan, check_devices, check_memory, plan_memory
from service.studies.preflight.tasks import check_prompts, check_tasks, objectives_of
from service.tune.plan import PROPOSALS_AHEAD, Baseline, Plan
from service.tune.proposing.gradient_actor import GradientJob
from service.tune.searchers.base import SearchSetting
from service.types import ChainedSource, Origin, ResolvedStudy
from workers.file_access import FileAccess
from workers.models.family import ResolvedFamily, locate_family
from workers.types import CHUNKS_IN_FLIGHT_PER_REPLICA, Family, TaskInfo, TaskSpec

__all__ = ["EXPORT", "ExpectedSamples", "PreflightResult", "examine"]

logger = logging.getLogger(__name__)

# The directory of a run's exported best merge, within that of the run.
EXPORT = "export"

# Samples per request: the most that a crash loses, and that a replica scores before it looks at its queue again.
CHUNK_SAMPLES = 512


@dataclass(frozen=True)
class ExpectedSamples:
    """Samples of the search and of the held-out stage, and of the search with every trial at full budget.

    Under asha the search scores at least that many: it also promotes trials that were best only when they were
    promoted."""

    search: int
    holdout: int
    full_budget: int


@dataclass(frozen=True)
class PreflightResult:
    """A study that can run: its models, its space, its tasks, and how many samples of them each rung uses."""

    study: Study
    family: Family
    space: SearchSpace
    num_layers: int
    num_parameters: int
    objectives: tuple[Objective, ...]
    tasks: Mapping[str, TaskSpec]
    task_infos: Mapping[str, TaskInfo]
    holdout_tasks: Mapping[str, TaskSpec]
    holdout_infos: Mapping[str, TaskInfo]
    rung_samples: tuple[Mapping[str, int], ...]
    cycle: tuple[Bracket, ...]
    memory: MemoryPlan
    export_bytes: int
    """Weights of one merged model, as exported: of the largest, where merges have different numbers of layers."""
    commits: Mapping[str, str]
    """Commits of hub models, by the names in the study file."""
    absent_bytes: int
    """Weights that are still on the hub, and were not checked."""
    algorithm: Algorithm
    engine_note: str
    """A message for the user about how vLLM runs the models; "" if there is none."""
    access: FileAccess | None = None
    """Which files the study may read; None: all."""
    chained: Mapping[str, ChainedSource] = field(default_factory=dict)
    """The sources that are merges of other studies."""
    size: ModelSize | None = None
    """What costs of recipes are made of; None where merges do not differ in them."""
    start: tuple[bytes, ...] = ()
    """The checkpoints that policies begin with (`service.studies.policies.start`)."""

    @property
    def concurrency(self) -> int:
        return CHUNKS_IN_FLIGHT_PER_REPLICA * self.study.engine.replicas

    @property
    def engine_options(self) -> EngineOptions:
        """Of engines whose merges may have other layers than the base where the study's space has such merges."""
        options = self.study.engine.options
        if not isinstance(self.space, LayeredSpace):
            return options
        return options.model_copy(update={"max_layers": self.space.max_layers})

    def resolved(self) -> ResolvedStudy:
        return ResolvedStudy(
            fingerprints=self.family.fingerprints,
            commits=self.commits,
            num_layers=self.num_layers,
            tasks={name: spec.digest for name, spec in self.tasks.items()},
            holdout_tasks={name: spec.digest for name, spec in self.holdout_tasks.items()},
            rung_samples=self.rung_samples,
            max_staleness=self._max_staleness,
            objectives=self.objectives,
            version=version("mergesearch"),
            access=self.access,
            algorithm=self.algorithm.name,
            algorithm_reason=self.algorithm.reason,
            chained=self.chained,
        )

    @property
    def _max_staleness(self) -> int:
        """A policy learns from all of an iteration once that of the next one is scored, and knows no single results: it
        proposes half an iteration while repeated paths, which end at once, and an update keep no engine waiting."""
        staleness = self.concurrency + PROPOSALS_AHEAD
        if not SEARCHERS[self.algorithm.name].trains_policy:
            return staleness
        episodes = self.study.search.hm3.episodes
        return min(max(staleness, episodes // 2), episodes)

    def search_setting(self, *, num_baselines: int) -> SearchSetting:
        """What a searcher that computes steps knows of the study."""
        given = self.study.search.preferences
        scored = {name: self.study.search.num_scored(info.num_samples) for name, info in self.task_infos.items()}
        return SearchSetting(
            objectives=tuple(self.tasks),
            num_samples={name: info.num_samples for name, info in self.task_infos.items()},
            num_baselines=num_baselines,
            options=self.study.search,
            preferences=() if given is None else given.weights(tuple(self.tasks), seed=self.study.search.seed),
            first_fitted=scored if self.study.search.fit_share < 1 else {},
            family=self.family if SEARCHERS[self.algorithm.name].trains_policy else None,
            start=self.start,
        )

    def gradient_job(self) -> GradientJob | None:
        """What gradients are of; None where the space has none."""
        if not isinstance(self.space, DifferentiableSpace):
            return None
        return GradientJob(self.family, self.engine_options, dict(self.tasks), self.space)

    @property
    def _num_repeated(self) -> int:
        """Two iterations of every policy: if all their paths are known, nothing is left to learn."""
        search = self.study.search
        num_vectors = 1 if search.preferences is None else search.preferences.size(len(self.tasks))
        num_policies = 1 if search.hm3.policy == "conditioned" else num_vectors
        return 2 * max(search.hm3.episodes * num_policies, num_vectors)

    def plan(self, study_id: str, resolved: ResolvedStudy, *, baselines: tuple[Baseline, ...] | None = None) -> Plan:
        """The driver's plan; `resolved` is what was stored when the study was created, whose searcher and staleness it
        keeps. `baselines` are those of a study that goes on; None: those of a new one."""
        declared = SEARCHERS[resolved.algorithm or self.study.search.algorithm]
        return Plan(
            study_id=study_id,
            seed=self.study.search.seed,
            objectives=self.objectives,
            tasks=self.tasks,
            holdout_tasks=self.holdout_tasks,
            rung_samples=self.rung_samples,
            holdout_samples={name: info.num_samples for name, info in self.holdout_infos.items()},
            scheduler=self.study.fidelity.scheduler,
            cycle=self.cycle,
            eta=self.study.fidelity.reduction_factor,
            max_trials=self.study.search.max_trials,
            max_staleness=resolved.max_staleness,
            chunk_samples=CHUNK_SAMPLES,
            bank_fingerprint=self.family.fingerprint,
            baselines=self.baselines() if baselines is None else baselines,
            error_rate=self.study.fidelity.bound_error_rate,
            size=self.size,
            waits_for_baselines=declared.waits_for_baselines,
            **({"max_duplicates": self._num_repeated} if declared.trains_policy else {}),
        )

    def baselines(self) -> tuple[Baseline, ...]:
        """The source and published recipes of a new study, scored before the search."""
        aliases = tuple(expert.alias for expert in self.family.experts)
        found = sources_and_published(
            base=self.family.base.alias,
            experts=aliases,
            fingerprints=self.family.fingerprints,
            num_layers=self.num_layers,
            tokenizer=self.family.tokenizer,
        )
        return tuple((Origin(origin), label, recipe) for origin, label, recipe in found)

    def expected_samples(self) -> ExpectedSamples:
        """Samples the study will score if no trial fails and no two recipes are equal."""
        totals = [sum(samples.values()) for samples in self.rung_samples]
        search = len(self.baselines()) * totals[-1]
        for bracket in bracket_plan(self.cycle, self.study.search.max_trials):
            paid = 0
            for rung, size in enumerate(bracket.sizes, start=bracket.first_rung):
                search += size * (totals[rung] - paid)
                paid = totals[rung]
        # Assumes four trials on the front besides sources and published recipes.
        holdout = sum(info.num_samples for info in self.holdout_infos.values()) * (len(self.baselines()) + 4)
        full = (len(self.baselines()) + self.study.search.max_trials) * totals[-1]
        return ExpectedSamples(search, holdout, full)


def examine(
    study: Study,
    *,
    available_bytes: int | None = None,
    export_dir: Path | None = None,
    downloads: bool = True,
    access: FileAccess | None = None,
    chained: Mapping[str, ChainedSource] | None = None,
    before_weights: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = logger.info,
) -> PreflightResult:
    """Check everything that can be checked without an engine.

    `available_bytes` is the memory of one machine; None: this machine's. With an `export_dir`, the best merge must fit
    on its disk. Weights that are only on the hub are downloaded once all other checks have passed, and `note` is called
    with messages about it; without `downloads` they are not checked. `access` limits the files that are read (None: no
    limit): if the study names others, nothing is opened. `chained` are the sources that were exported for it
    (`service.studies.chains`). `before_weights` is called once only the weights are left to
    check. Raises InvalidStudy with every problem.
    """
    check_files(study, access)
    problems: list[Problem] = []
    located = locate_family(study.models.base, study.models.named)
    probe = start_probe(located)
    sources = check_models(located, study, problems)
    tasks, infos = check_tasks(study.scored_objectives, "objectives", study, problems, access=access)
    holdout = dict(enumerate(study.holdout))
    holdout_tasks, holdout_infos = check_tasks(holdout, "holdout", study, problems, access=access)
    rung_samples, cycle = _examine_fidelity(study, infos, problems)
    check_devices(study, sources, problems)
    algorithm: Algorithm | None = None
    size: ModelSize | None = None
    if sources is not None:
        searched = _examine_space(study, sources, dict.fromkeys(sources.checkpoints, ""), problems)
        max_layers = 0
        if isinstance(searched, LayeredSpace):
            max_layers = searched.max_layers
            size = model_size(sources, max_layers)
        largest = sources.num_parameters if size is None else int(size.most("parameters"))
        export_bytes = largest * DTYPE_BYTES[engine_dtype(study)]
        check_layers(study, sources, problems)
        aligns = isinstance(searched, AlignedSpace) and searched.alignment != "none"
        if aligns:
            _check_alignments(infos, problems)
        if searched is not None:
            algorithm = algorithm_of(study, searched, tasks, problems)
        computes_gradients = algorithm is not None and algorithm.name == GRADIENT
        plan = partial(
            plan_memory, study, sources, available_bytes, computes_gradients=computes_gradients, aligns=aligns
        )
        memory = plan(max_layers=max_layers)
        check_prompts(study, sources.result_dir, problems)
        shorter = range(sources.layout.num_layers, max_layers)
        check_memory(memory, problems, shorter=shorter, plan=lambda layers: plan(max_layers=layers))
        if export_dir is not None and (lack := lack_of_space(export_dir, export_bytes)):
            problems.append(Problem("", f"--export: {lack}"))
    objectives = objectives_of(study, infos, size, problems)
    engine_note = check_engine(study, probe, problems)
    if problems or sources is None:
        raise InvalidStudy(tuple(problems))
    before_weights()
    sources = check_weights(sources, problems, downloads=downloads, note=note)
    space = _examine_space(study, sources, sources.fingerprints, problems)
    if problems or space is None or algorithm is None:
        raise InvalidStudy(tuple(problems))
    return PreflightResult(
        study=study,
        family=sources.family,
        space=space,
        num_layers=sources.layout.num_layers,
        num_parameters=sources.num_parameters,
        objectives=objectives,
        tasks=tasks,
        task_infos=infos,
        holdout_tasks=holdout_tasks,
        holdout_infos=holdout_infos,
        rung_samples=rung_samples,
        cycle=cycle,
        memory=memory,
        export_bytes=export_bytes,
        commits=sources.commits,
        absent_bytes=sources.absent_bytes,
        algorithm=algorithm,
        engine_note=engine_note,
        access=access,
        size=size,
        chained=chained or {},
    )


def _examine_fidelity(
    study: Study, infos: Mapping[str, TaskInfo], problems: list[Problem]
) -> tuple[tuple[Mapping[str, int], ...], tuple[Bracket, ...]]:
    fidelity = study.fidelity
    counts = {spec.name: fidelity.rungs_of(spec) for spec in study.scored_objectives.values()}
    scored = {name: study.search.num_scored(info.num_samples) for name, info in infos.items()}
    for index, spec in study.scored_objectives.items():
        if spec.name not in infos:
            continue
        full, size, rest = counts[spec.name][-1], infos[spec.name].num_samples, scored[spec.name]
        share = study.search.fit_share
        if share < 1 and not 0 < rest < size:
            what = "to score" if rest == 0 else "to fit"
            message = f"{share:g} of the {size} samples of objective {spec.name!r} leaves none {what}"
            problems.append(Problem("search.fit_share", message))
        elif full is not None and rest < full:
            place = "fidelity.rungs" if fidelity.rungs else "fidelity.max_samples"
            has = f"{size}" if rest == size else f"{size}, of which search.fit_share={share:g} leaves {rest} to score"
            message = f"{full} samples requested, objective {spec.name!r} has {has}; use at most {rest}"
            problems.append(Problem(f"objectives.{index}.rungs" if spec.rungs else place, message))
    num_rungs = len(next(iter(counts.values())))
    samples = tuple({name: counts[name][rung] or scored[name] for name in infos} for rung in range(num_rungs))
    cycle = bracket_cycle(
        fidelity.scheduler,
        num_rungs=num_rungs,
        eta=fidelity.reduction_factor,
        max_trials=study.search.max_trials,
    )
    return samples, cycle


def _check_alignments(infos: Mapping[str, TaskInfo], problems: list[Problem]) -> None:
    from workers.training.hm3.activations import lack_of_samples

    if infos and (lack := lack_of_samples({name: info.num_samples for name, info in infos.items()})):
        problems.append(Problem("search_space.alignment", lack))


def _preferences(study: Study) -> tuple[Mapping[str, float], ...]:
    """The vectors by objective with a task; one of equal weights where the study has none."""
    names = tuple(spec.name for spec in study.scored_objectives.values())
    given = study.search.preferences
    vectors = (equal_preference(len(names)),) if given is None else given.weights(names, seed=study.search.seed)
    return tuple(dict(zip(names, vector, strict=True)) for vector in vectors)


def _examine_space(
    study: Study, sources: ResolvedFamily, fingerprints: Mapping[str, str], problems: list[Problem]
) -> SearchSpace | None:
    num_layers, max_layers = sources.layout.num_layers, study.limits.max_layers
    if max_layers is not None and num_layers > max_layers and not study.search_space.changes_layers:
        message = f"{max_layers} is below the {num_layers} layers that every merge of this study has"
        problems.append(Problem("limits.max_layers", message))
    try:
        return study.search_space.build(
            searched_models(sources, fingerprints, max_layers=max_layers, preferences=_preferences(study))
        )
    except InvalidStudy as error:
        problems.extend(error.problems)
        return None
