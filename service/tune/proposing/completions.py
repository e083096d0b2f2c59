"""Stored correct completions of the source models, which gradients can use as reference answers.

The completions are used for objectives for which a lower loss on the task's reference answers does not imply a better
score.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from search_spaces.objectives import Objective
from service.store import Store
from service.store.steps import CompletionsRequest, CompletionsResult
from service.types import Origin, TrialRecord, TrialState
from workers.types import Completions, Split

__all__ = ["Chosen", "SourceCompletions"]

Chosen = Mapping[str, Sequence[tuple[int, int]]]
"""Sample positions by objective, each with the trial number of the source whose completion is the reference."""

# Largest cost of a correct completion: the cost of the best value is 0 but for rounding.
ROUNDING = 1e-9


class SourceCompletions:
    """Reader of the correct completions among the stored samples of a study's source models, on search data.

    `objectives` are the study's objectives; `store` has the samples of the study `study_id`. A completion is correct if
    its sample has the best value of the objective's range. Some samples give no completion: samples of a multiple
    choice, samples with several completions (one of these may be wrong although the sample has the best value), and
    samples stored without tokens. Every source model must have been scored on all samples.
    """

    def __init__(self, store: Store, study_id: str, objectives: Sequence[Objective]) -> None:
        self._store = store
        self._study_id = study_id
        self._objectives = {objective.name: objective for objective in objectives}

    def find(self, request: CompletionsRequest) -> CompletionsResult:
        """Find, for each requested objective, the positions of the samples that a source model has completed correctly.

        A position is a sample's index in the order in which samples are scored. For each position, the result also has
        the trial number of the first source model that completed the sample correctly.
        """
        found: dict[str, dict[int, int]] = {name: {} for name in request.completions}
        for source in self._sources():
            for name, tokens in self._correct(source, found.keys()).items():
                for position in tokens:
                    found[name].setdefault(position, source.number)
        return CompletionsResult(completions={name: tuple(sorted(chosen.items())) for name, chosen in found.items()})

    def read(self, chosen: Chosen) -> Completions:
        """The token ids of chosen completions, keyed by objective and sample position.

        `chosen` has, for each objective, the chosen samples as pairs (position, trial number of the source model).
        """
        wanted = {number for pairs in chosen.values() for _, number in pairs}
        of = {s.number: self._correct(s, chosen.keys()) for s in self._sources() if s.number in wanted}
        return {
            name: {position: of[number][name][position] for position, number in pairs} for name, pairs in chosen.items()
        }

    def _sources(self) -> list[TrialRecord]:
        trials = self._store.trials(self._study_id)
        return [t for t in trials if t.origin is Origin.SOURCE and t.state is TrialState.COMPLETE]

    def _correct(self, source: TrialRecord, names: Collection[str]) -> Completions:
        found: dict[str, dict[int, tuple[int, ...]]] = {name: {} for name in names}
        for sample in self._store.samples(self._study_id, source.recipe.digest, Split.SEARCH):
            if sample.objective not in found or sample.tokens is None or len(sample.tokens) != 1:
                continue
            is_correct = self._objectives[sample.objective].cost_of_stored(sample.value) <= ROUNDING
            if is_correct and sample.tokens[0]:
                found[sample.objective][sample.position] = sample.tokens[0]
        return found
