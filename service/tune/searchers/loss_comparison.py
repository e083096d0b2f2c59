"""Comparison of losses with scores over the baselines: it decides whether a search uses gradients.

A gradient descent lowers losses on reference answers. This helps only for objectives for which a lower loss means a
better score. Therefore, before any gradient, the baselines in the search space are ranked by their losses and by their
costs. If the ranks disagree for an objective (for example because the references of a task that needs reasoning are
bare answers), the source models' own correct completions are tried as references. If these ranks disagree too,
gradients are not used. The decision is stored once per study. All baselines take part in it, because the searcher waits
for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from service.store.steps import CompletionsRequest, CompletionsStep, LossesRequest, LossesStep, NoteRequest, Step
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting

__all__ = [
    "NOT_USED",
    "USED",
    "compare",
    "mean_loss",
    "most_compared_samples",
    "rank_correlation",
    "reference_completions",
]

# The decision that a note stores: who proposes trials.
USED, NOT_USED = "gradient", "smac"

# Samples of each objective on which losses are compared, and the rank correlation from which gradients are used.
NUM_COMPARED = 16
MIN_CORRELATION = 0.3

# With fewer baselines than this, gradients are used without a comparison.
MIN_BASELINES = 4

# With fewer correct completions than this, a loss is too noisy to compare.
MIN_COMPLETIONS = 8

Correlations = Mapping[str, float]


def compare(context: ProposalContext) -> LossesRequest | CompletionsRequest | NoteRequest:
    """Decide whether a search uses gradients; request losses or completions if the decision needs them.

    A gradient lowers losses, so it helps only if losses rank the baselines as their scores do. First the losses of the
    baselines in `context` are computed on the tasks' reference answers. For objectives where the ranks disagree, losses
    are then computed on the source models' own correct completions, if models answer by completions. The decision is
    returned as a NoteRequest, which asks the driver to store its text.
    """
    setting, steps = context.setting, context.steps
    known = [o for o in context.observations if not o.is_proposed and o.costs is not None]
    first = _comparisons(steps, on_completions=False)
    if len(first) < len(known):
        return _losses_of(context, known[len(first)], {name: setting.fitted(name) for name in setting.objectives})
    if len(known) < MIN_BASELINES:
        return _use(f"gradients are used: {len(known)} baselines are too few to compare losses with scores")
    found = _correlations(known, first, setting)
    text = f"rank correlation over {len(known)} baselines: {_listed(found)}"
    failing = tuple(name for name, value in found.items() if value < MIN_CORRELATION)
    if not failing:
        return _use(f"gradients are used: lower losses mean better scores ({text})")
    reason = f"lower losses do not mean better scores ({text}; {MIN_CORRELATION:g} is needed)"
    if not setting.has_completions:
        return _refuse(reason, setting)
    if setting.first_fitted:
        return _refuse(f"{reason}, and no source is scored on the samples that are fitted", setting)
    completed = reference_completions(steps)
    if completed is None:
        return CompletionsRequest(label="correct completions of the sources", completions=failing)
    few = {name: len(positions) for name, positions in completed.items() if len(positions) < MIN_COMPLETIONS}
    if few:
        counts = ", ".join(f"{name} {count}" for name, count in few.items())
        lack = f"the sources have too few correct completions ({counts}; {MIN_COMPLETIONS} are needed)"
        return _refuse(f"{reason}, and {lack}", setting)
    second = _comparisons(steps, on_completions=True)
    if len(second) < len(known):
        return _losses_of(context, known[len(second)], completed, completions=failing)
    again = _correlations(known, second, setting)
    if min(again.values()) < MIN_CORRELATION:
        return _refuse(f"{reason}, nor do those on the sources' own correct completions ({_listed(again)})", setting)
    counts = ", ".join(f"{name} on {len(positions)} samples" for name, positions in completed.items())
    return _use(
        f"gradients are used, with the sources' own correct completions as references of {counts}: losses on them go "
        f"with scores ({_listed(again)}), those on the tasks' reference answers do not ({text}; {MIN_CORRELATION:g} is "
        "needed)"
    )


def most_compared_samples(setting: SearchSetting) -> int:
    """The most samples that the comparison of losses with scores may take from the study's limit of samples.

    The comparison computes the losses of all baselines, at most once on reference answers and once on completions.
    `setting` has the objectives, their numbers of samples and the number of baselines.
    """
    compared = sum(min(NUM_COMPARED, len(setting.fitted(name))) for name in setting.objectives)
    return 2 * setting.num_baselines * compared * LossesRequest.charge


def reference_completions(steps: Sequence[Step]) -> Mapping[str, Sequence[int]] | None:
    """Positions of the samples whose reference answers are source models' correct completions, keyed by objective.

    Only objectives whose gradients are computed on such completions have an entry. The positions are read from the
    stored `steps` (results of computations that the searcher has requested). A position is a sample's index in the
    order in which samples are scored. Returns None if the search has not requested completions.
    """
    for step in steps:
        if isinstance(step, CompletionsStep):
            pairs = step.result.completions
            return {name: [position for position, _ in found] for name, found in pairs.items()}
    return None


def mean_loss(name: str, steps: Sequence[Step]) -> float:
    """The mean loss of the baselines on the objective `name`; 1 if no such loss is stored.

    Losses of the baselines are read from the stored `steps` (results of computations that the searcher has requested).
    The losses were computed with the reference answers that gradients use for this objective: the task's answers, or
    completions of the source models.
    """
    on_completions = name in (reference_completions(steps) or {})
    compared = [s for s in _comparisons(steps, on_completions=on_completions) if s.result.failure is None]
    return fmean(step.result.losses[name] for step in compared) if compared else 1.0


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation of the lists `left` and `right`, in [-1, 1]; equal numbers have their mean rank.

    The correlation is 0 if one of the lists is constant or has fewer than two numbers.
    """
    from scipy.stats import rankdata

    if len(left) < 2 or len(set(left)) == 1 or len(set(right)) == 1:
        return 0.0
    return float(np.corrcoef(rankdata(left), rankdata(right))[0, 1])


def _losses_of(
    context: ProposalContext,
    baseline: Observation,
    positions: Mapping[str, Sequence[int]],
    *,
    completions: tuple[str, ...] = (),
) -> LossesRequest:
    """A request for one baseline's losses: the losses of its merge on the first samples of each objective.

    The samples are the first NUM_COMPARED of the objective's `positions`. For the objectives in `completions`, the
    losses are computed on the source models' own correct completions; for all other objectives, the losses are computed
    on the tasks' reference answers. `context` has the search space.
    """
    return LossesRequest(
        label=f"trial {baseline.number}",
        point=tuple(float(baseline.configuration[parameter.name]) for parameter in context.parameters),
        positions={name: tuple(each[:NUM_COMPARED]) for name, each in positions.items()},
        completions=completions,
    )


def _use(text: str) -> NoteRequest:
    return NoteRequest(label=text, decision=USED)


def _refuse(reason: str, setting: SearchSetting) -> NoteRequest:
    if setting.preferences:
        reason += "; it does not use the preference vectors"
    return NoteRequest(label=f"gradients are not used, smac proposes: {reason}", decision=NOT_USED)


def _comparisons(steps: Sequence[Step], *, on_completions: bool) -> list[LossesStep]:
    found = [step for step in steps if isinstance(step, LossesStep)]
    return [step for step in found if bool(step.request.completions) is on_completions]


def _correlations(known: Sequence[Observation], compared: Sequence[LossesStep], setting: SearchSetting) -> Correlations:
    """The rank correlation between losses and costs over the baselines, for each objective that has losses.

    `compared` are the stored computations of losses, one for each of the baselines `known` and in their order.
    `setting` has the names of the objectives. Baselines that have failed, or whose loss is not finite, are left out.
    """
    found = {}
    for index, name in enumerate(setting.objectives):
        if name in compared[0].request.positions:
            pairs = [
                (step.result.losses[name], o.costs[index])
                for step, o in zip(compared, known, strict=True)
                if step.result.failure is None and o.costs is not None
            ]
            found[name] = rank_correlation([loss for loss, _ in pairs], [cost for _, cost in pairs])
    return found


def _listed(correlations: Correlations) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in correlations.items())
