"""Plan of one study: all settings that determine which samples its driver evaluates, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from search_spaces.costs import ModelSize
from search_spaces.fidelity import OPEN_BRACKETS, Bracket, Scheduler
from search_spaces.objectives import Objective
from search_spaces.recipe import Recipe
from search_spaces.study.benchmarks import TrialChoice
from search_spaces.study.judge import JudgeSpec
from search_spaces.study.search import RefinementOptions
from service.store.documents import BenchmarkFacts
from service.store.steps import GradientRequest, LossesRequest
from service.types import Origin, StoredRecipe, TrialRecord
from workers.evaluation.attacks.search import PromptAttack
from workers.types import TaskSpec

__all__ = ["Baseline", "Benchmark", "Plan", "RefinementPlan", "baselines_of"]

# The least number of proposed trials that are kept waiting while others are in flight.
PROPOSALS_AHEAD = 2

Baseline: TypeAlias = tuple[Origin, str, Recipe]
"""A merge that is scored before the search: a source, a published recipe, or a recipe of the user's.

It has an origin, a label and the recipe.
"""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of a study: a task that is scored after the search.

    - `facts`: the name, the data, the metric and the range of values
    - `task`: how samples are scored
    - `trials`: the rules that choose the trials to score
    - `attack`: a search for the prompt template with the worst metric; None without an attack
    - `judge`: an LLM that rates the completions; None without a judge
    """

    facts: BenchmarkFacts
    task: TaskSpec
    trials: tuple[TrialChoice, ...]
    attack: PromptAttack | None = None
    judge: JudgeSpec | None = None

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def objective(self) -> Objective:
        """The benchmark as an objective: its metric, its direction of optimisation and its range of values."""
        return self.facts.objective

    @property
    def most_samples(self) -> int:
        """The largest number of samples of this benchmark that are scored for one trial.

        This is the number of the task's samples, times the number of prompt templates. Without an attack (a search for
        the template with the worst metric), only the original template is scored. With an attack, changed templates are
        scored in addition, at most as many as the attack's option `most_queries` allows.
        """
        return self.facts.num_samples * (1 + (0 if self.attack is None else self.attack.most_queries))


@dataclass(frozen=True)
class RefinementPlan:
    """Settings of the refinement, which learns the coefficients of layer paths on the Pareto front by gradients.

    A layer path is the sequence of source models' layers of which a merge consists.

    - `options`: the section `search.refinement` of the study file
    - `num_samples`: maps the name of each objective to the number of samples from which gradients are computed
    - `vectors`: the study's preference vectors; each vector has one weight for each objective, in the order of
      `num_samples`
    """

    options: RefinementOptions
    num_samples: Mapping[str, int]
    vectors: tuple[tuple[float, ...], ...]

    def most_samples(self, num_scored: int) -> int:
        """The most samples that the whole refinement takes, for its gradients and for scoring the refined trials.

        The refinement improves coefficients of trials by gradient descent, after the search. `num_scored` is the number
        of samples on which each refined trial is scored.
        """
        batch = max(self.options.batch, len(self.num_samples))
        charged = self.options.steps * GradientRequest.charge + LossesRequest.charge
        return self.options.paths * (batch * charged + num_scored)


@dataclass(frozen=True)
class Plan:
    """Settings that determine what the driver of a study evaluates; a resumed study has the same settings.

    A rung is a number of samples at which trials are compared; a bracket is a ladder of rungs, as in Hyperband.

    - `rung_samples`: for each rung, the number of samples to score, keyed by objective
    - `holdout_samples`: the number of holdout samples, keyed by objective
    - `tasks`, `holdout_tasks`: the tasks of search and holdout data, keyed by objective
    - `benchmarks`: the benchmarks, scored whole after the search
    - `cycle`: the brackets that the scheduler repeats
    - `eta`: the reduction factor of successive halving; about 1/eta of a rung's trials are promoted
    - `max_trials`: the number of trials that the searcher proposes
    - `chunk_samples`: the largest number of samples in one request to an engine
    - `bank_fingerprint`: the fingerprint of the source models
    - `waits_for_baselines`: whether the searcher is asked for its first proposal only after all baselines have ended
    - `max_staleness`: the number of trials by which proposals may be ahead of evaluations
    - `batch`: the number of consecutive proposals that are made from the same results
    - `open_brackets`: the number of brackets of Hyperband in which trials may run at the same time
    - `scheduler_version`: the version of the scheduler that the study was created with; None for the newest version
    - `error_rate`: for the scheduler racing, the largest probability that it stops any trial wrongly; None lets it stop
      a trial as soon as its results are worse than the results of another trial
    - `max_duplicates`: the search ends after this number of consecutive proposals with recipes of earlier trials
    - `max_samples`: the search ends at this number of samples; None is no limit
    - `refinement`: settings of the refinement, which improves the coefficients of the Pareto front's trials after the
      search; None if there is no refinement
    - `size`: sizes of models, from which the number of parameters of a merge is computed; None if all merges have the
      same number of layers
    """

    study_id: str
    seed: int
    objectives: tuple[Objective, ...]
    tasks: Mapping[str, TaskSpec]
    holdout_tasks: Mapping[str, TaskSpec]
    rung_samples: tuple[Mapping[str, int], ...]
    holdout_samples: Mapping[str, int]
    scheduler: Scheduler
    cycle: tuple[Bracket, ...]
    eta: int
    max_trials: int
    max_staleness: int
    chunk_samples: int
    bank_fingerprint: str
    baselines: tuple[Baseline, ...]
    open_brackets: int = OPEN_BRACKETS
    batch: int = 1
    waits_for_baselines: bool = False
    scheduler_version: int | None = None
    error_rate: float | None = None
    max_duplicates: int = 16
    """The search ends after this many proposals in a row whose recipe was scored already."""
    max_samples: int | None = None
    """The search ends before it uses more samples than this (`sample_limit`); None: there is no limit."""
    refinement: RefinementPlan | None = None
    benchmarks: tuple[Benchmark, ...] = ()
    size: ModelSize | None = None
    """Sizes of models, from which a merge's number of parameters is computed if an objective counts parameters."""

    @property
    def most_refined_samples(self) -> int:
        """The largest number of samples that the refinement may take; 0 without a refinement.

        The refinement improves coefficients of the Pareto front's trials after the search. The search leaves this
        number of samples of the limit `max_samples` unused, so that the refinement can take them.
        """
        return 0 if self.refinement is None else self.refinement.most_samples(sum(self.rung_samples[-1].values()))

    @property
    def proposals_ahead(self) -> int:
        """The number of proposed trials that are kept waiting for an engine.

        The number is half of `max_staleness`, the number of trials by which proposals may be ahead of evaluations. It
        affects when trials are proposed, but not which trials are proposed.
        """
        return max(PROPOSALS_AHEAD, self.max_staleness // 2)

    def recipe_values(self, recipe: Recipe | StoredRecipe) -> dict[str, float]:
        """The value of each objective that counts the recipe's layers or parameters, and therefore needs no samples."""
        size, costs = self.size, {o.name: cost for o in self.objectives if (cost := o.cost_of_recipe) is not None}
        if not costs or size is None:
            return {}
        whole = recipe.read() if isinstance(recipe, StoredRecipe) else recipe
        return {name: size.of(whole, cost) for name, cost in costs.items()}

    def costs(self, values: Mapping[str, float]) -> tuple[float, ...]:
        """A trial's costs, one for each objective, in the order of `objectives`; smaller is better.

        `values` contains the trial's objective values, keyed by objective name. Raises InvalidStudy for a value outside
        its objective's range.
        """
        return tuple(objective.cost(values[objective.name]) for objective in self.objectives)

    def cost_errors(self, standard_errors: Mapping[str, float | None]) -> tuple[float | None, ...]:
        """The standard errors of a trial's costs, one for each objective, in the order of `objectives`.

        `standard_errors` contains the standard errors of the trial's objective values, keyed by objective name. An
        error is None if it is not known.
        """
        found = ((standard_errors.get(objective.name), objective.bounds) for objective in self.objectives)
        return tuple(None if error is None else error / (high - low) for error, (low, high) in found)


def baselines_of(trials: Sequence[TrialRecord], known: Sequence[Baseline], *, has_begun: bool) -> tuple[Baseline, ...]:
    """The baselines of a study: stored baselines, and baselines that a new search must still add.

    The baselines among the stored `trials` come first, in the order of their trial numbers. If the search has not begun
    (`has_begun` is False), the baselines in `known` that are not stored yet follow; `known` has the baselines of a new
    study. Once the search has begun, no baseline is added, because the numbers of all other trials depend on the number
    of baselines. A program version with other baselines therefore does not change a study whose search has begun.
    """
    stored = sorted((t for t in trials if t.origin.is_given), key=lambda t: t.number)
    found = tuple((trial.origin, trial.label, trial.read_recipe()) for trial in stored)
    if has_begun:
        return found
    digests = {trial.recipe.digest for trial in stored}
    return found + tuple(baseline for baseline in known if baseline[2].digest not in digests)
