"""Choice of a study's searcher: the study file names it, or `auto` selects one that fits search space and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from search_spaces.errors import Problem
from search_spaces.searchers import SEARCHERS, unsupported
from search_spaces.spaces.base import DifferentiableSpace, SearchSpace
from search_spaces.spaces.layer_paths import LayerPaths
from search_spaces.study.file import Study
from search_spaces.study.objectives import CostSpec
from service.tune.searchers.descents import fitting_points
from workers.errors import InvalidTask
from workers.types import TaskSpec

__all__ = [
    "AUTO",
    "GRADIENT",
    "Algorithm",
    "FittedLosses",
    "algorithm_of",
    "check_refinement",
    "descent_points_of",
    "fitted_losses",
    "iterations_ahead",
    "num_policies_of",
]

AUTO, GRADIENT = "auto", "gradient"


@dataclass(frozen=True)
class Algorithm:
    """The searcher of a study: its name, and the reason why it was chosen."""

    name: str
    reason: str


@dataclass(frozen=True)
class FittedLosses:
    """The losses of a study's objectives, from which gradients with respect to coefficients can be computed.

    `entropies` are the objectives whose loss is the entropy of predictions; the loss of all other objectives is the
    cross-entropy of reference answers. `lack` is the reason why an objective has no loss, or None if all objectives
    have a loss.
    """

    entropies: tuple[str, ...] = ()
    lack: str | None = None

    @property
    def description(self) -> str:
        """Text for messages: which objectives have which loss."""
        if not self.entropies:
            return "all objectives have reference answers"
        return f"the entropy of predictions is the loss of {', '.join(self.entropies)}"


def algorithm_of(
    study: Study,
    space: SearchSpace,
    losses: FittedLosses,
    problems: list[Problem],
    *,
    lack_of_room: str = "",
) -> Algorithm:
    """Choose the searcher of a study, and add to `problems` the requirements that the searcher does not meet.

    The option `auto` means the searcher `gradient` if the space has coefficients with gradients and all objectives have
    a loss, because that searcher is best in tests/benchmarks/bench_search.py. Otherwise, `auto` means the searcher that
    has the alias `auto` in SEARCHERS. A study with preference vectors (weights of the objectives) must have a searcher
    or a search space that uses them.

    `losses` says which loss each objective has (see the function `fitted_losses`). `lack_of_room` is the reason why no
    device has enough memory for gradients. `lack_of_room` is "" if a device has enough memory, or if the space has no
    gradients.
    """
    if not study.search.proposes:
        return Algorithm("random", "the study scores given recipes and searches nothing")
    found = _algorithm_of(study, space, losses, problems, lack_of_room)
    declared = SEARCHERS[found.name]
    why = f", and auto is {found.name} here as {found.reason}" if study.search.algorithm == AUTO else ""
    paths = space.parameters.structure
    is_merged_by_them = isinstance(paths, LayerPaths) and paths.num_preferences > 1
    is_used = declared.uses_preferences or is_merged_by_them or study.search.refinement is not None
    if study.search.preferences is not None and not is_used:
        able = ", ".join(name for name, each in SEARCHERS.items() if each.uses_preferences)
        message = f"{found.name} does not use preference vectors{why}; leave them out; searchers that use them: {able}"
        problems.append(Problem("search.preferences", message))
    if study.search.fit_share < 1 and not declared.computes_steps:
        able = ", ".join(name for name, each in SEARCHERS.items() if each.computes_steps)
        message = f"{found.name} fits no samples, and would only leave a share of them out{why}"
        problems.append(Problem("search.fit_share", f"{message}; searchers that fit samples: {able}"))
    if found.name == GRADIENT:
        found = replace(found, reason=found.reason + _note_of_points(study))
    if declared.trains_policy:
        problems += _problems_of_policy(study, space)
        found = replace(found, reason=found.reason + _warning_of_policy(study, space) + _warning_of_draws(study))
    return found


def descent_points_of(study: Study) -> int:
    """How many points of a new study's gradient descents become trials: `search.gradient.points`, or as many as fit."""
    search = study.search
    num_vectors = 1 if search.preferences is None else search.preferences.size(len(study.scored_objectives))
    return fitting_points(search.gradient, num_vectors=num_vectors, max_trials=search.max_trials)


def _note_of_points(study: Study) -> str:
    """Note for a study that has fewer points of descents than it asks for; "" for other studies."""
    given, points = study.search.gradient, descent_points_of(study)
    if points == given.points:
        return ""
    limits = f"max_trials={study.search.max_trials} and steps={given.steps}"
    return f"; {points} points of descents become trials and not points={given.points}, to fit {limits}"


def _warning_of_draws(study: Study) -> str:
    """Warning for a study whose merges' layers are mostly drawn at random, and rarely chosen by its policies.

    The warning is given if policies choose the layers of fewer trials than are drawn at random; otherwise the result is
    "". Trials that mutate (randomly change) the best known sequences of layers are in neither number; the option
    `elite_share` sets the share of such trials.
    """
    drawn, chosen = _draws_of(study)
    if chosen >= drawn:
        return ""
    policies = num_policies_of(study)
    of = "its policy" if policies == 1 else f"its {policies} policies"
    remedy = "fewer iterations in explored and warm_up" + (", or policy: conditioned" if policies > 1 else "")
    return (
        f"; warning: {of} would choose {chosen:.0f} of {study.search.max_trials} trials, and {drawn:.0f} would be "
        f"drawn at random; give more trials or {remedy}"
    )


def _draws_of(study: Study) -> tuple[float, float]:
    """Expected numbers of a study's trials, as a pair: trials with random layer paths, trials with policies' paths.

    Trials whose paths are mutants (random changes of good paths) are in neither number. A layer path is the sequence of
    layers of a merge, and a policy is a network that builds layer paths.
    """
    options, policies = study.search.hm3, num_policies_of(study)
    if options.start is not None:
        return 0.0, float(study.search.max_trials)
    drawn = chosen = 0.0
    for number in range(study.search.max_trials):
        iteration = number // options.episodes
        passed = iteration // policies - options.warm_up
        share = 1.0 if passed < 0 else max(0.0, 1.0 - passed / max(options.explored, 1))
        # Mutants need the results of earlier iterations, which are not known in the first two iterations.
        own = 1.0 if iteration < max(2, policies) else 1.0 - options.elite_share
        drawn += own * share
        chosen += own * (1.0 - share)
    return drawn, chosen


def _warning_of_policy(study: Study, space: SearchSpace) -> str:
    """Warning for a study whose length penalty is so large that the shortest layer paths always win.

    A layer path is the sequence of layers of a merge. The penalty lowers a path's score with each layer. Scores without
    the penalty differ by at most 1. The penalty is therefore too large if it lowers the score of the longest path by at
    least 1 more than the score of the shortest path. Otherwise, and for a `space` without layer paths, the result is
    "".
    """
    penalty, paths = study.search.hm3.length_penalty, space.parameters.structure
    if not isinstance(paths, LayerPaths) or penalty * (paths.longest - paths.shortest) < 1:
        return ""
    return (
        f"; warning: with length_penalty={penalty:g} the shortest paths win whatever they score: {paths.longest} "
        f"layers cost {penalty * (paths.longest - paths.shortest):g} more than {paths.shortest}, and scores differ by "
        "at most 1"
    )


def _problems_of_policy(study: Study, space: SearchSpace) -> Iterator[Problem]:
    """Find problems of a study whose searcher trains a policy to build layer paths (sequences of layers).

    For example, the search `space` may have no layer paths, or the study too few trials for the policy to learn from.
    """
    if not isinstance(space.parameters.structure, LayerPaths):
        message = f"hm3 learns layer paths; a space of kind {space.kind} has none; write kind: hm3"
        yield Problem("search_space.kind", message)
    if study.fidelity.scheduler not in ("none", "successive_halving"):
        message = (
            f"{study.fidelity.scheduler}: hm3 needs the reward of every path at one budget; write scheduler: none, or "
            "successive_halving, which scores the best paths on more samples after the search"
        )
        yield Problem("fidelity.scheduler", message)
    costs = {index: spec for index, spec in enumerate(study.objectives) if isinstance(spec, CostSpec)}
    for index, spec in costs.items():
        message = f"{spec.cost}: hm3 has search.hm3.length_penalty for the length of a path; leave the objective out"
        yield Problem(f"objectives.{index}.cost", message)
    options = study.search.hm3
    if options.scalarisation == "tchebycheff" and options.gamma is not None and options.gamma < 1:
        message = f"{options.gamma:g}: with scalarisation: tchebycheff outcomes are distances, which have no discount"
        yield Problem("search.hm3.gamma", f"{message}; leave it out, or write scalarisation: weighted_sum")
    paths = space.parameters.structure
    if isinstance(paths, LayerPaths) and paths.scale_range is not None and options.action == "categorical":
        message = "categorical: scales of layers are drawn with a proto-action; write action: wolpertinger"
        yield Problem("search.hm3.action", message)
    if options.mini_batches > options.episodes:
        message = f"{options.mini_batches} is above episodes={options.episodes}; give at most {options.episodes}"
        yield Problem("search.hm3.mini_batches", message)
    policies = num_policies_of(study)
    most = options.episodes * iterations_ahead(policies)
    if options.learns and study.search.max_staleness is not None and study.search.max_staleness > most:
        message = f"{study.search.max_staleness}: the policies of iterations of {options.episodes} episodes would have"
        yield Problem(
            "search.max_staleness", f"{message} to learn from results that are not known; give at most {most}"
        )
    warm_up = options.warm_up if options.start is None else 0
    least = (warm_up + 2) * options.episodes * policies if options.learns else 0
    if study.search.max_trials < least:
        each = f"{policies} policies with {warm_up} iterations of {options.episodes} episodes to warm up"
        message = f"{study.search.max_trials} is too few for {each}, one to learn from and one to play"
        hint = "or policy: conditioned" if policies > 1 else "or fewer episodes"
        yield Problem("search.max_trials", f"{message}; give at least {least}, {hint}")


def num_policies_of(study: Study) -> int:
    """Number of policies that the study's searcher trains; a policy is a network that chooses the layers of merges.

    The searcher of `study` must be one that trains policies.
    """
    vectors = study.search.preferences
    return 1 if vectors is None or study.search.hm3.policy == "conditioned" else vectors.size(len(study.objectives))


def iterations_ahead(num_policies: int) -> int:
    """Largest number of training iterations by which proposals of policies may run ahead of results.

    An iteration is a fixed number of trials from which one policy then learns; the `num_policies` policies take turns.
    The result is one less than the number of policies, but at least 1: a policy's turn comes again only after the turns
    of all others.
    """
    return max(1, num_policies - 1)


def _algorithm_of(
    study: Study, space: SearchSpace, losses: FittedLosses, problems: list[Problem], lack_of_room: str
) -> Algorithm:
    named = study.search.algorithm
    problems += unsupported(
        named,
        space.parameters,
        num_objectives=len(study.objectives),
        num_constraints=len(study.search.constraints),
    )
    if named not in (AUTO, GRADIENT):
        return Algorithm(named, "the study names it")
    lack = _lack_of_gradients(study, space, losses) or lack_of_room or None
    if lack is None:
        reason = f"merges in this space have gradients, and {losses.description}"
        return Algorithm(GRADIENT, "the study names it" if named == GRADIENT else reason)
    if named == GRADIENT:
        problems.append(Problem("search.algorithm", f"gradient cannot be used: {lack}; use auto or another searcher"))
    return Algorithm(SEARCHERS[AUTO].alias_of or AUTO, f"gradients cannot be used: {lack}")


def _lack_of_gradients(study: Study, space: SearchSpace, losses: FittedLosses) -> str | None:
    if study.search.warm_start is not None:
        return "a descent cannot begin with results of another study (search.warm_start)"
    if space.parameters.structure is not None:
        return "which layers a merge has, and in which order, are discrete choices, which have no gradients"
    if not isinstance(space, DifferentiableSpace):
        return f"coefficients of a space of kind {space.kind} have no gradients, those of layerwise and sfs do"
    return losses.lack


def check_refinement(study: Study, losses: FittedLosses, problems: list[Problem], *, lack_of_room: str = "") -> None:
    """Add a problem to `problems` if a study refines its front by gradients, but the gradients cannot be computed.

    The refinement learns coefficients of the trials on the Pareto front. Every objective must have a loss; `losses`
    says which loss each objective has. `lack_of_room` is the reason why no device has enough memory for gradients, or
    "" if a device has enough memory.
    """
    if study.search.refinement is None:
        return
    if losses.lack is not None:
        problems.append(Problem("search.refinement", f"{losses.lack}; gradients need them; leave it out"))
    elif lack_of_room:
        problems.append(Problem("search.refinement", f"there is no room for gradients: {lack_of_room}; leave it out"))


def fitted_losses(study: Study, tasks: Mapping[str, TaskSpec], problems: list[Problem]) -> FittedLosses:
    """Find, for each objective of a study, the loss whose gradients with respect to coefficients can be computed.

    `tasks` contains the objectives' tasks, keyed by name. The option `search.gradient.loss` of the study file chooses
    the loss. If the study file chooses the entropy of predictions, and a task does not have this loss, a problem is
    added to `problems`.
    """
    from workers.evaluation.references import lack_of_entropy, lack_of_references

    wanted = study.search.gradient.loss
    entropies: list[str] = []
    for name, spec in tasks.items():
        lack = _lack_by(lack_of_references, spec) if wanted != "entropy" else ""
        if lack is None:
            continue
        lack_here = _lack_by(lack_of_entropy, spec) if wanted != "cross_entropy" else lack
        if lack_here is None:
            entropies.append(name)
        elif wanted == "entropy":
            message = f"entropy: objective {name!r} has none: {lack_here}; write auto or cross_entropy"
            problems.append(Problem("search.gradient.loss", message))
            return FittedLosses(lack=f"objective {name!r} has no entropy of predictions")
        else:
            return FittedLosses(lack=f"objective {name!r} has no reference answers: {lack}")
    return FittedLosses(tuple(entropies))


def _lack_by(reason: Callable[[TaskSpec], str | None], spec: TaskSpec) -> str | None:
    """The reason that the function `reason` returns for the task `spec`, or the error text if it raises InvalidTask."""
    try:
        return reason(spec)
    except InvalidTask as error:
        return str(error)
