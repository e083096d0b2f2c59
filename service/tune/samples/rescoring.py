"""Samples of engines that failed a check: removed from the sample cache, scored again, and compared.

The driver that receives an engine's fault stores it once, for all studies of the database. The drivers of other
studies look for new faults while they run, and before their study ends.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from service.errors import StudyFailed
from service.store import EngineFaultRecord, JobWriter, Store
from service.tune.evaluation import Evaluation
from service.tune.samples.sample_cache import SampleCache
from service.types import EventKind, TrialRecord
from workers.errors import EngineFault
from workers.types import ScoreResult, Split

__all__ = ["Rescoring"]

# Seconds between queries for faults in the store.
LOOK_S = 1.0

# A study fails when this many engines have failed a check during one attempt at it: the next one would fail too.
MAX_FAULTS = 3

# Largest number of positions that a message lists, per recipe, split and objective.
NAMED_POSITIONS = 20

Key = tuple[str, int]  # objective, position


class Rescoring:
    """Samples of one study that are scored again, because their engine failed a check after it had scored them.

    Engines are checked from time to time. All samples that an engine scored since its last passed check are void. The
    old value of a void sample stays in the store until the sample is scored again with the same value. If the new value
    differs, it is never stored, and the study fails. If such a study is resumed, it fails again.
    """

    def __init__(self, study_id: str, store: Store, writer: JobWriter, samples: SampleCache) -> None:
        self._study_id = study_id
        self._store = store
        self._writer = writer
        self._samples = samples
        self._void: dict[tuple[str, Split], dict[Key, float]] = {}
        # The trials of each sample that has another value when scored again.
        self._changed: dict[tuple[str, Split, Key], tuple[int, ...]] = {}
        self._faults: dict[str, EngineFaultRecord] = {}
        self._reported: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._num_taken_out = 0
        self._looked_at = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether any samples must still be scored again, because their engine failed a check."""
        return bool(self._void)

    def is_void(self, replica: str, canaries: int | None) -> bool:
        """Whether samples of an engine must be scored again, because the first check after they were scored failed.

        `replica` is the id of the engine's process (Ray Serve replica). `canaries` is the number of checks (canaries:
        comparisons with transformers on fixed prompts) that the engine had passed when it scored the samples.
        `canaries` is None for samples that an earlier version stored; these samples are not void.
        """
        fault = self._faults.get(replica)
        return fault is not None and canaries is not None and canaries >= fault.canaries

    def has_void(self, digest: str, split: Split) -> bool:
        return (digest, split) in self._void

    def report(self, fault: EngineFault) -> None:
        """Store that an engine of this study failed a check, as `fault` describes.

        Raises StudyFailed if MAX_FAULTS engines have failed a check.
        """
        self._writer.record_engine_fault(fault.replica, fault.canaries, str(fault))
        self._reported.add(fault.replica)
        if len(self._reported) >= MAX_FAULTS:
            raise StudyFailed(f"{len(self._reported)} engines failed their checks; the last: {fault}")

    def look(self, *, at_once: bool) -> bool:
        """Look in the store for new failed checks of engines, and remove the affected samples from the sample cache.

        Returns whether there are new failed checks, also of engines that this study does not use. If `at_once` is
        False, a call within LOOK_S seconds of the last call does nothing and returns False.
        """
        if not at_once and time.monotonic() - self._looked_at < LOOK_S:
            return False
        self._looked_at = time.monotonic()
        faults = self._store.engine_faults(after=max((fault.id for fault in self._faults.values()), default=0))
        if not faults:
            return False
        self._faults |= {fault.replica: fault for fault in faults}
        concerned, num_samples = self._take_out()
        concerned |= {fault.replica for fault in faults if fault.replica in self._reported}
        if concerned:
            reasons = {replica: self._faults[replica].reason for replica in sorted(concerned)}
            self._reasons |= reasons
            self._writer.add_event(EventKind.ENGINE_FAULT, {"replicas": reasons, "samples": num_samples})
        return True

    def _take_out(self) -> tuple[set[str], int]:
        """Remove samples of engines that failed a check from the sample cache, to be scored again.

        Returns the ids of the engines' processes (Ray Serve replicas) that had scored the samples, and the number of
        samples.
        """
        replicas, num_samples = set(), 0
        for sample in self._store.void_samples(self._study_id):
            held, key = (sample.recipe_digest, sample.split), (sample.objective, sample.position)
            if key in self._void.get(held, {}) or (*held, key) in self._changed:
                continue
            self._void.setdefault(held, {})[key] = sample.value
            self._samples.take_out(*held, *key)
            replicas.add(sample.replica)
            num_samples += 1
        self._num_taken_out += num_samples
        return replicas, num_samples

    def next_evaluation(
        self, in_flight: Iterable[Evaluation], *, trial_of: Callable[[str], TrialRecord]
    ) -> Evaluation | None:
        """An evaluation that scores samples of one recipe again, because their engine failed a check.

        The samples are all of one kind of data: search, holdout or benchmark data. Recipes that are being evaluated
        (`in_flight`) are passed over. Returns None if no other recipe has samples to score again. `trial_of` gives the
        trial of a recipe by the recipe's digest.
        """
        busy = {evaluation.recipe.digest for evaluation in in_flight}
        for (digest, split), values in self._void.items():
            if digest not in busy:
                trial = trial_of(digest)
                positions: dict[str, list[int]] = defaultdict(list)
                for objective, position in sorted(values):
                    positions[objective].append(position)
                chunks = self._samples.chunks(positions, split)
                return Evaluation(self._study_id, trial.number, 0, split, trial.read_recipe(), chunks, is_again=True)
        return None

    def compare(
        self, evaluation: Evaluation, result: ScoreResult, trials: Iterable[TrialRecord]
    ) -> tuple[set[Key], set[Key]]:
        """Compare the new values of rescored samples with the values that were stored before.

        `result` has the new values for `evaluation`. Returns two sets of samples: the samples whose new value equals
        the stored value, and the samples whose new value differs. The new values of the second set must not be stored.
        A sample is given as (objective, position), and its position is its index in scoring order.

        Raises StudyFailed when no sample of the study is left to rescore and at least one value differed. The message
        names the samples that differed, and the numbers of those `trials` whose recipe was scored on them.
        """
        held = evaluation.recipe.digest, evaluation.split
        void = self._void.get(held, {})
        values = {(sample.objective, sample.position): sample.value for sample in result.samples}
        again = {key: void.pop(key) for key in values if key in void}
        if not again:
            return set(), set()
        if not void:
            del self._void[held]
        changed = {key for key, value in again.items() if value != values[key]}
        if changed:
            numbers = tuple(sorted(trial.number for trial in trials if trial.recipe.digest == held[0]))
            self._changed |= {(*held, key): numbers for key in changed}
        if not self._void:
            self._settle()
        return again.keys() - changed, changed

    def _settle(self) -> None:
        """Store an event about the end of rescoring: all samples of engines that failed a check were scored again.

        Raises StudyFailed instead if some of these samples have another value than before.
        """
        number, self._num_taken_out = self._num_taken_out, 0
        if self._changed:
            raise StudyFailed(
                f"{len(self._changed)} of {number} samples have other values when scored again after an engine failed "
                f"a check ({'; '.join(self._reasons.values())}): {_where(self._changed)}"
            )
        self._writer.add_event(EventKind.SCORED_AGAIN, {"samples": number})


def _where(changed: Mapping[tuple[str, Split, Key], tuple[int, ...]]) -> str:
    positions: dict[tuple[tuple[int, ...], Split, str], list[int]] = defaultdict(list)
    for (_, split, (objective, position)), trials in changed.items():
        positions[trials, split, objective].append(position)
    places = []
    for (trials, split, objective), at in sorted(positions.items()):
        named, more = sorted(at)[:NAMED_POSITIONS], max(0, len(at) - NAMED_POSITIONS)
        text = f"trial {', '.join(map(str, trials))}: {objective} ({split} data) at {', '.join(map(str, named))}"
        places.append(text + (f" and {more} more" if more else ""))
    return "; ".join(places)
