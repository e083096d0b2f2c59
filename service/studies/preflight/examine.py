"""All checks of a study that need no engine, in order, and the plan that follows from them.

All problems of a study are reported together. Weights are read only if there are no problems in headers, configurations
and task data, because reading large models takes minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from search_spaces.baselines import all_baselines
from search_spaces.costs import ModelSize
from search_spaces.errors import InvalidStudy, Problem
from search_spaces.fidelity import Bracket, bracket_cycle, bracket_plan
from search_spaces.preferences import equal_preference
from search_spaces.spaces.base import AlignedSpace, DifferentiableSpace, LayeredSpace, SearchSpace
from search_spaces.study.file import Study
from service.disk import gib, lack_of_space
from service.engine_machines import VARIABLE, EngineMachines, known_machines
from service.resolved_study import ChainedSource
from service.studies.preflight.algorithm import (
    AUTO,
    GRADIENT,
    Algorithm,
    FittedLosses,
    algorithm_of,
    check_refinement,
    fitted_losses,
)
from service.studies.preflight.dtype import DTYPE_BYTES, dtype_note, engine_dtype
from service.studies.preflight.files import check_files
from service.studies.preflight.gradients import GradientPlace, gradient_place
from service.studies.preflight.models import (
    check_engine,
    check_layers,
    check_models,
    check_weights,
    model_size,
    searched_models,
    start_probe,
)
from service.studies.preflight.recipes import given_recipes
from service.studies.preflight.resources import check_devices, check_memory, machines_for, merges_parts, plan_memory
from service.studies.preflight.result import (
    PreflightResult,
    StudyBudget,
    StudyModels,
    StudyTasks,
    preference_vectors,
    refinement_of,
)
from service.studies.preflight.shared_gpus import share_with_verification
from service.studies.preflight.tasks import benchmarks_of, check_modality, check_prompts, check_tasks, objectives_of
from workers.file_access import FileAccess
from workers.models.family import ResolvedFamily, locate_family
from workers.types import TaskInfo

__all__ = ["EXPORT", "built_space", "examine"]

logger = logging.getLogger(__name__)

# The directory of a run's exported best merge, within that of the run.
EXPORT = "export"


def examine(
    study: Study,
    *,
    available_bytes: int | None = None,
    machines: Sequence[EngineMachines] = (),
    export_dir: Path | None = None,
    downloads: bool = True,
    is_new: bool = False,
    stored_tasks: Collection[str] = (),
    access: FileAccess | None = None,
    chained: Mapping[str, ChainedSource] | None = None,
    before_weights: Callable[[StudyTasks], None] = lambda tasks: None,
    allows_lack: bool = False,
    note: Callable[[str], None] = logger.info,
) -> PreflightResult:
    """Make all checks of a study that need no engine, and return the result.

    - `machines`: the machines that are known to be able to run engines. Machines that are stated for this installation
      take precedence. If no machines are stated or known, this machine is used
      (`service.studies.preflight.resources.machines_for`)
    - `available_bytes`: the memory that each machine is assumed to have for the study. None uses the real memory
    - `export_dir`: the directory to which the best merge will be exported, whose disk must have room for it
    - `downloads`: whether weights that are not on this machine are downloaded once all other checks have passed;
      otherwise these weights are not checked
    - `is_new`: whether the study is not stored yet; some checks are made of new studies only
    - `stored_tasks`: the digests of the tasks that were stored with the study
    - `access`: the files that may be read, or None for all; if the study names a file that may not be read, no file is
      opened
    - `chained`: the sources that were exported from other studies for this one (`service.studies.chains`)
    - `before_weights`: called with the study's tasks once only the weights are left to check
    - `allows_lack`: whether a lack of memory is kept in the result instead of being a problem
    - `note`: called with messages about downloads

    Raises InvalidStudy with every problem.
    """
    with known_machines(machines):
        return _examine(
            study,
            available_bytes=available_bytes,
            machines=machines,
            export_dir=export_dir,
            downloads=downloads,
            is_new=is_new,
            stored_tasks=stored_tasks,
            access=access,
            chained=chained,
            before_weights=before_weights,
            allows_lack=allows_lack,
            note=note,
        )


def _examine(
    study: Study,
    *,
    available_bytes: int | None,
    machines: Sequence[EngineMachines],
    export_dir: Path | None,
    downloads: bool,
    is_new: bool,
    stored_tasks: Collection[str],
    access: FileAccess | None,
    chained: Mapping[str, ChainedSource] | None,
    before_weights: Callable[[StudyTasks], None],
    allows_lack: bool,
    note: Callable[[str], None],
) -> PreflightResult:
    """Make all checks of a study; the arguments and errors are those of the function `examine`."""
    check_files(study, access)
    problems: list[Problem] = []
    lacks: list[Problem] = []
    located = locate_family(study.models.base, study.models.named)
    probe = start_probe(located)
    sources = check_models(located, study, problems)
    checked = partial(
        check_tasks, study=study, problems=problems, is_new=is_new, access=access, stored=frozenset(stored_tasks)
    )
    tasks, infos = checked(study.scored_objectives, "objectives")
    holdout_tasks, holdout_infos = checked(dict(enumerate(study.holdout)), "holdout")
    benchmark_tasks, benchmark_infos = checked(dict(enumerate(study.benchmarks)), "benchmarks")
    benchmarks = benchmarks_of(study, benchmark_tasks, benchmark_infos, problems)
    rung_samples, cycle = _examine_fidelity(study, infos, problems)
    check_devices(study, sources, problems)
    algorithm: Algorithm | None = None
    size: ModelSize | None = None
    gradients: GradientPlace | None = None
    losses = FittedLosses()
    if sources is not None:
        # Reading the weights takes minutes and gives the fingerprints that the space's recipes need. So the space is
        # built before, with aliases in place of fingerprints, to report its problems and to choose the searcher, and
        # again after, which takes milliseconds.
        unread = built_space(study, sources, {alias: alias for alias in sources.checkpoints}, problems)
        max_layers = 0
        if isinstance(unread, LayeredSpace):
            max_layers = unread.max_layers
            size = model_size(sources, max_layers)
        elif len(study.scored_objectives) < len(study.objectives):
            size = model_size(sources, sources.layout.num_layers)
        largest = sources.num_parameters if size is None else int(size.most("parameters"))
        export_bytes = largest * DTYPE_BYTES[engine_dtype(study)]
        check_layers(study, sources, problems)
        aligns = isinstance(unread, AlignedSpace) and unread.alignment != "none"
        if aligns:
            _check_alignments(sources, infos, problems)
        for_engines = machines_for(study, known=machines, available_bytes=available_bytes)
        plan = partial(plan_memory, study, sources, for_engines, aligns=aligns)
        lack_of_room = ""
        if isinstance(unread, DifferentiableSpace) or study.search.refinement is not None:
            gradients, lack_of_room = gradient_place(
                study,
                sources,
                for_engines,
                plan=lambda place: plan(max_layers=max_layers, gradients=place),
                max_layers=max_layers,
                aligns=aligns,
            )
        is_refined = study.search.refinement is not None
        may_descend = study.search.algorithm in (AUTO, GRADIENT) and study.search.proposes
        if is_refined or (may_descend and isinstance(unread, DifferentiableSpace)):
            losses = fitted_losses(study, tasks, problems)
        if unread is not None:
            algorithm = algorithm_of(study, unread, losses, problems, lack_of_room=lack_of_room)
        check_refinement(study, losses, problems, lack_of_room=lack_of_room)
        is_needed = is_refined or (algorithm is not None and algorithm.name == GRADIENT)
        if not is_needed:
            gradients = None
        elif algorithm is not None and gradients is not None and gradients.reason:
            of = "" if algorithm.name == GRADIENT else "for the gradients of the refinement: "
            algorithm = replace(algorithm, reason=f"{algorithm.reason}; {of}{gradients.reason}")
        gpu_share_left = share_with_verification(
            study,
            sources,
            for_engines,
            share=gradients.gpu_share if gradients else 0.0,
            max_layers=max_layers,
            aligns=aligns,
        )
        plan = partial(plan, gradients=gradients)
        memory = plan(max_layers=max_layers)
        by_section = {"objectives": tasks, "holdout": holdout_tasks, "benchmarks": benchmark_tasks}
        check_modality(study, by_section, sources, problems)
        if sources.modality.has_vocabulary:
            check_prompts(study, sources.result_dir, problems)
        shorter = range(sources.layout.num_layers, max_layers)
        check_memory(
            memory, lacks if allows_lack else problems, shorter=shorter, plan=lambda layers: plan(max_layers=layers)
        )
        if memory.available_bytes is None:
            note(
                f"The memory of the machines for engines is not known here, and was not compared with the "
                f"{gib(memory.needed_bytes)} that the study needs: state these machines in {VARIABLE}"
            )
        if not problems:
            _check_sample_limit(study, sources, rung_samples, cycle, infos, problems)
        if export_dir is not None and (lack := lack_of_space(export_dir, export_bytes)):
            problems.append(Problem("", f"--export: {lack}"))
    objectives = objectives_of(study, infos, size, problems)
    engine_note = "; ".join(filter(None, (check_engine(study, probe, problems), dtype_note(study, sources))))
    if problems or sources is None:
        raise InvalidStudy(tuple(problems))
    study_tasks = StudyTasks(objectives, tasks, infos, holdout_tasks, holdout_infos, benchmarks)
    before_weights(study_tasks)
    sources = check_weights(sources, problems, downloads=downloads, note=note)
    space = built_space(study, sources, sources.fingerprints, problems)
    recipes = given_recipes(study, sources, problems, max_layers=max_layers, note=note)
    if problems or space is None or algorithm is None:
        raise InvalidStudy(tuple(problems))
    models = StudyModels(
        family=sources.family,
        num_layers=sources.layout.num_layers,
        num_parameters=sources.num_parameters,
        export_bytes=export_bytes,
        commits=sources.commits,
        absent_bytes=sources.absent_bytes,
        engine_note=engine_note,
        chained=chained or {},
        size=size,
    )
    return PreflightResult(
        study=study,
        models=models,
        tasks=study_tasks,
        budget=StudyBudget(rung_samples, cycle),
        space=space,
        algorithm=algorithm,
        memory=memory,
        gradients=gradients,
        gpu_share_left=gpu_share_left,
        merges_parts=merges_parts(study, sources),
        entropies=losses.entropies,
        access=access,
        recipes=recipes,
        lacks=tuple(lacks),
        dtype=engine_dtype(study),
        machines=for_engines,
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
    num_rungs = len(next(iter(counts.values()), (None,)))  # costs alone need no samples, and have one rung
    samples = tuple({name: counts[name][rung] or scored[name] for name in infos} for rung in range(num_rungs))
    cycle = bracket_cycle(
        fidelity.scheduler,
        num_rungs=num_rungs,
        eta=fidelity.reduction_factor,
        max_trials=study.search.max_trials,
    )
    return samples, cycle


def _check_sample_limit(
    study: Study,
    sources: ResolvedFamily,
    rung_samples: Sequence[Mapping[str, int]],
    cycle: Sequence[Bracket],
    infos: Mapping[str, TaskInfo],
    problems: list[Problem],
) -> None:
    """Check that the limit of samples suffices for baselines, given recipes, first proposals and the refinement.

    The first proposals are one trial or, with Hyperband, the whole first bracket (ladder of rungs) of `cycle`. The
    refinement learns coefficients of the trials on the Pareto front. `sources` are the models of the study, from which
    its baselines follow. `rung_samples` contains the number of samples at each rung, keyed by objective; `infos` has
    facts about each task. A limit that is too low is added to `problems`.
    """
    if (most := study.limits.max_samples) is None:
        return
    base, *experts = sources.checkpoints
    aliases = {alias: alias for alias in sources.checkpoints}
    baselines = all_baselines(
        base=base,
        experts=experts,
        fingerprints=aliases,
        num_layers=sources.layout.num_layers,
        chosen=study.search.baselines,
    )
    totals = [sum(samples.values()) for samples in rung_samples]
    if not study.search.proposes:
        return
    first, *_ = bracket_plan(cycle, study.search.max_trials)
    is_whole = study.fidelity.scheduler == "hyperband" and first.first_rung < len(totals) - 1
    recipes = study.search.recipes
    least = (len(baselines) + len(recipes)) * totals[-1] + (first.samples(totals) if is_whole else totals[-1])
    refinement = refinement_of(study, infos)
    least += 0 if refinement is None else refinement.most_samples(totals[-1])
    if most < least:
        what = f"the first bracket of {first.num_configurations} trials" if is_whole else "one trial"
        parts = [f"{len(baselines)} baselines"] * bool(baselines) + [f"{len(recipes)} recipes"] * bool(recipes) + [what]
        parts += [f"the refinement of {refinement.options.paths} paths"] if refinement is not None else []
        scored = " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else what
        message = f"{most:,} is below the {least:,} samples of {scored}"
        problems.append(Problem("limits.max_samples", f"{message}; give at least {least:,}"))


def _check_alignments(sources: ResolvedFamily, infos: Mapping[str, TaskInfo], problems: list[Problem]) -> None:
    if not sources.modality.has_vocabulary:
        message = f"is learned from prompts; models of the modality {sources.modality.name} have none; give none"
        problems.append(Problem("search_space.alignment", message))
        return
    from workers.alignments.samples import lack_of_samples

    if infos and (lack := lack_of_samples({name: info.num_samples for name, info in infos.items()})):
        problems.append(Problem("search_space.alignment", lack))


def _preferences(study: Study) -> tuple[Mapping[str, float], ...]:
    """The study's preference vectors, each a mapping from objectives to weights.

    Only objectives with a task have a weight. Without preference vectors in the study file, the result is a single
    vector of equal weights.
    """
    names = tuple(spec.name for spec in study.scored_objectives.values())
    if not names:
        return ()
    vectors = preference_vectors(study, names) or (equal_preference(len(names)),)
    return tuple(dict(zip(names, vector, strict=True)) for vector in vectors)


def built_space(
    study: Study, sources: ResolvedFamily, fingerprints: Mapping[str, str], problems: list[Problem]
) -> SearchSpace | None:
    """Build the search space of a study over the models `sources`.

    `fingerprints` has the models' fingerprints, keyed by alias; the recipes of the space contain them. If the space
    cannot be built, the reasons are added to `problems`, and the result is None.
    """
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
