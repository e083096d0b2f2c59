"""In-memory cache of a study's scored samples, with estimates of objectives at each rung."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import Objective
from search_spaces.recipe import Recipe
from service.results.statistics import estimate
from service.store import Store
from service.store.samples import with_room
from service.tune.plan import Plan
from service.types import RungRecord, StoredRecipe, TrialRecord
from workers.types import SampleResult, Span, Split, TaskSpec

__all__ = ["SampleCache"]


class SampleCache:
    """In-memory cache of the sample values of one study, keyed by recipe.

    `store` reads the samples that are stored in the database; `plan` says which samples there are. Trials with equal
    recipes share their samples. The samples of a data split are grouped into rungs:

    - Search data: a rung is a budget level of the scheduler, that is, a number of samples.
    - Holdout data: the only rung has all samples.
    - Benchmark data: each benchmark has a rung, with its position in `Plan.benchmarks` as number. The rung has the
      samples of the original prompt template, and the samples of the templates that `set_attacked` has set last.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan = plan
        self._void: dict[tuple[str, str, int], float] = {}  # removed search samples, until they are added again
        self._attacked: dict[tuple[str, int], Collection[str]] = {}  # by recipe and position of the benchmark
        self._attacked_tasks: dict[str, TaskSpec] = {}
        self._values = {split: store.sample_values(plan.study_id, split) for split in Split}
        self._num_scored = {
            split: sum(int(np.count_nonzero(~np.isnan(array))) for of in by.values() for array in of.values())
            for split, by in self._values.items()
        }

    @property
    def num_scored(self) -> int:
        """Number of samples that are stored, on search data, holdout data and benchmarks together."""
        return sum(self._num_scored.values())

    @property
    def num_searched(self) -> int:
        """Number of scored samples of the search data, over all merges; holdout data and benchmarks do not count."""
        return self._num_scored[Split.SEARCH]

    def add(self, digest: str, split: Split, samples: Sequence[SampleResult]) -> None:
        values = self._values[split].setdefault(digest, {})
        for name in {sample.objective for sample in samples}:
            found = {sample.position: sample.value for sample in samples if sample.objective == name}
            values[name] = with_room(values.get(name), max(found) + 1)
            values[name][list(found)] = list(found.values())
        self._num_scored[split] += len(samples)

    def take_out(self, digest: str, split: Split, objective: str, position: int) -> None:
        """Remove a sample from the cache, so that it is scored again.

        `digest` identifies the recipe, and `split` identifies the data: search, holdout or benchmark data. `position`
        is the sample's index in the order in which the objective's samples are scored.
        """
        values = self._values[split][digest][objective]
        if split == Split.SEARCH:
            self._void[digest, objective, position] = float(values[position])
        values[position] = np.nan
        self._num_scored[split] -= 1

    def missing(self, digest: str, rung: int, split: Split) -> list[Span]:
        """The samples of a rung that still must be scored for a recipe, as ranges of adjacent positions.

        `digest` identifies the recipe, and `split` identifies the data: search, holdout or benchmark data. On search
        data, `rung` is the index of the rung; on benchmark data, it is the benchmark's position in `Plan.benchmarks`;
        on holdout data, it has no influence. Stored samples have gaps only where a driver was interrupted, or where
        samples of an engine that failed a check were removed.
        """
        samples, tasks = self._num_samples(digest, rung, split), self._tasks(split)
        known = self._values[split].get(digest, {})
        missing = {
            name: np.flatnonzero(np.isnan(with_room(known.get(name), stop)[:stop])).tolist()
            for name, stop in samples.items()
        }
        return _spans(missing, tasks)

    def missing_chunks(self, digest: str, rung: int, split: Split) -> tuple[tuple[Span, ...], ...]:
        """The samples of a rung that still must be scored for a recipe, in chunks of at most `Plan.chunk_samples`.

        A chunk is the samples of one request to an engine. `digest` identifies the recipe, and `split` identifies the
        data: search, holdout or benchmark data. On search data, `rung` is the index of the rung; on benchmark data, it
        is the benchmark's position in `Plan.benchmarks`; on holdout data, it has no influence.
        """
        return _chunks(self.missing(digest, rung, split), self._plan.chunk_samples)

    def chunks(self, positions: Mapping[str, Sequence[int]], split: Split) -> tuple[tuple[Span, ...], ...]:
        """The samples at `positions` in chunks (the samples of one request) of at most `Plan.chunk_samples` samples.

        `positions` contains sample positions, keyed by objective, in ascending order. `split` says which data they are
        from: search, holdout or benchmark data.
        """
        return _chunks(_spans(positions, self._tasks(split)), self._plan.chunk_samples)

    def rung_record(self, recipe: Recipe | StoredRecipe, rung: int) -> RungRecord:
        """Estimate a recipe's values from the samples of a rung of the search; all of them must be stored.

        A rung is a number of samples at which trials are compared. The result also has the values of the objectives
        that count the recipe's layers or parameters and need no samples.
        """
        samples = self._plan.rung_samples[rung]
        known = self._values[Split.SEARCH].get(recipe.digest, {})  # costs alone have no samples
        values: dict[str, float] = {}
        standard_errors: dict[str, float | None] = {}
        for objective, stop in samples.items():
            scored = known[objective][:stop].tolist()
            if stop == 1 and scored[0] not in (0.0, 1.0):  # a single value of such a metric shows no spread
                values[objective], standard_errors[objective] = scored[0], None
            else:
                found = estimate(scored)
                values[objective], standard_errors[objective] = found.value, found.standard_error
        exact = self._plan.recipe_values(recipe)
        return RungRecord(rung, dict(samples), values | exact, standard_errors | dict.fromkeys(exact, 0.0))

    def differences_of(self, trials: Mapping[int, TrialRecord]) -> Callable[[int, int, int], Sequence[NDArray[Any]]]:
        """Make a function that compares the costs of two trials at a rung, sample by sample.

        Its three arguments are the number of a trial, the number of a second trial (the rival), and the index of the
        rung. It returns an array [num_samples] for each objective: the costs of the trial minus the costs of the rival.
        `trials`, keyed by number, may grow while the function is in use.
        """
        return lambda trial, rival, rung: self.cost_differences(trials[trial].recipe, trials[rival].recipe, rung=rung)

    def cost_differences(
        self, recipe: Recipe | StoredRecipe, rival: Recipe | StoredRecipe, *, rung: int
    ) -> tuple[NDArray[np.float64], ...]:
        """The cost of `recipe` minus the cost of `rival` on each sample of a rung; one array for each objective.

        A rung is a number of samples at which trials are compared; `rung` is its index. The arrays [num_samples] are in
        the order of the objectives. Their numbers are in the order of the samples, and in [-1, 1], because costs are
        clipped to [0, 1]. Both recipes must have been scored on all of these samples. Some objectives need no samples,
        because they follow from the recipe alone, such as its number of layers. Such an objective has an array with one
        number: -1 if the recipe is better, else 1. Samples whose engine later failed a check count with their old
        values, because earlier decisions used these values.
        """

        def costs(recipe: Recipe | StoredRecipe, objective: Objective) -> NDArray[np.float64]:
            known, name = self._values[Split.SEARCH][recipe.digest][objective.name], objective.name
            values = known[: self._plan.rung_samples[rung][name]].copy()
            for position in np.flatnonzero(np.isnan(values)).tolist():
                values[position] = self._void[recipe.digest, name, position]
            return np.clip([objective.cost_of_stored(value) for value in values.tolist()], 0.0, 1.0)

        def difference(objective: Objective) -> NDArray[np.float64]:
            if objective.cost_of_recipe is None:
                return costs(recipe, objective) - costs(rival, objective)
            own, other = (self._plan.recipe_values(each)[objective.name] for each in (recipe, rival))
            return np.array([-1.0 if objective.cost_of_stored(own) < objective.cost_of_stored(other) else 1.0])

        return tuple(difference(objective) for objective in self._plan.objectives)

    def add_attacked_tasks(self, tasks: Mapping[str, TaskSpec]) -> None:
        """Add tasks whose prompt template was changed by an attack (a search for the template with the worst metric).

        The key of each task is the name under which its samples are stored.
        """
        self._attacked_tasks |= tasks

    def set_attacked(self, digest: str, benchmark: int, names: Collection[str]) -> None:
        """Set a recipe's changed prompt templates for a benchmark, in place of templates that were set before.

        An attack on a benchmark changes the prompt template, in search of the template with the worst metric. `digest`
        identifies the recipe, and `benchmark` is the position in `Plan.benchmarks`. `names` are the names of the
        changed templates, under which samples with these templates are stored. The names must have been passed to
        `add_attacked_tasks` before.
        """
        self._attacked[digest, benchmark] = names

    def mean(self, digest: str, split: Split, name: str) -> float:
        """The mean value of a recipe over its stored samples of the task `name`; at least one must be stored.

        `digest` identifies the recipe, and `split` identifies the data: search, holdout or benchmark data.
        """
        return float(np.nanmean(self._values[split][digest][name]))

    def _num_samples(self, digest: str, rung: int, split: Split) -> Mapping[str, int]:
        match split:
            case Split.SEARCH:
                return self._plan.rung_samples[rung]
            case Split.HOLDOUT:
                return self._plan.holdout_samples
            case Split.BENCHMARK:
                benchmark = self._plan.benchmarks[rung]
                return dict.fromkeys(
                    (benchmark.name, *self._attacked.get((digest, rung), ())), benchmark.facts.num_samples
                )

    def _tasks(self, split: Split) -> Mapping[str, TaskSpec]:
        match split:
            case Split.SEARCH:
                return self._plan.tasks
            case Split.HOLDOUT:
                return self._plan.holdout_tasks
            case Split.BENCHMARK:
                return {b.name: b.task for b in self._plan.benchmarks} | self._attacked_tasks


def _spans(positions: Mapping[str, Sequence[int]], tasks: Mapping[str, TaskSpec]) -> list[Span]:
    """Join consecutive sample positions into spans (ranges of positions), separately for each objective.

    `positions` contains ascending sample positions, keyed by objective. `tasks` has the task of each objective, which
    becomes a part of the span.
    """
    spans: list[Span] = []
    for objective, left in positions.items():
        while left:
            start = left[0]
            length = next((i for i, p in enumerate(left) if p != start + i), len(left))
            spans.append(Span(objective, tasks[objective], start, start + length))
            left = left[length:]
    return spans


def _chunks(spans: Iterable[Span], limit: int) -> tuple[tuple[Span, ...], ...]:
    """Divide the spans, in order, into chunks (the samples of one request) of at most `limit` samples.

    A span is a range of sample positions; a span that does not fit into the rest of a chunk is cut in two. A chunk has
    at most one span of an objective, because an engine reports one hash of prompts for each objective. The spans of an
    objective follow each other.
    """
    chunks: list[tuple[Span, ...]] = []
    current: list[Span] = []
    room = limit
    for span in spans:
        start = span.start
        while start < span.stop:
            if current and (room == 0 or current[-1].objective == span.objective):
                chunks.append(tuple(current))
                current, room = [], limit
            stop = min(span.stop, start + room)
            current.append(replace(span, start=start, stop=stop))
            room -= stop - start
            start = stop
    if current:
        chunks.append(tuple(current))
    return tuple(chunks)
