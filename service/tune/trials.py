"""The trials of one study, in memory and in the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from service.store import JobWriter
from service.types import Origin, RungRecord, TrialRecord, TrialState

__all__ = ["Trials"]

# The most trials whose end is stored in one transaction: heartbeats wait for it, and databases limit the number of
# parameters of a statement.
ENDED_AT_ONCE = 1000


class Trials(Mapping[int, TrialRecord]):
    """The trials of one study in their current state, in the ascending order of their numbers.

    `stored` are the trials that are in the database when the driver starts. `writer` stores each change in the database
    before this object shows it.
    """

    def __init__(self, stored: Sequence[TrialRecord], writer: JobWriter) -> None:
        self._writer = writer
        self._trials = {trial.number: trial for trial in sorted(stored, key=lambda trial: trial.number)}
        self._first: dict[str, int] = {}
        for trial in self._trials.values():
            self._first.setdefault(trial.recipe.digest, trial.number)

    def __getitem__(self, number: int) -> TrialRecord:
        return self._trials[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._trials)

    def __len__(self) -> int:
        return len(self._trials)

    def first_with(self, digest: str) -> TrialRecord:
        """The trial with the lowest number among those whose recipe has the given `digest`.

        Raises KeyError if there is no such trial.
        """
        return self._trials[self._first[digest]]

    def num_duplicates_in_a_row(self) -> int:
        """Number of the newest trials in a row that were proposed with recipes of earlier trials.

        The count goes back to the newest trial that has a new recipe or was not proposed. For example, the number is 2
        if the last two trials have recipes of earlier trials, and the trial before them has a new recipe. Trials that a
        user requested, and refined trials, which follow the search, are passed over, because they say nothing about
        proposals.
        """
        count = 0
        for trial in reversed(self._trials.values()):
            if trial.origin in (Origin.REFINED, Origin.USER):
                continue
            if trial.origin is not Origin.SEARCH or self._first[trial.recipe.digest] == trial.number:
                break
            count += 1
        return count

    def add(self, trial: TrialRecord, *, request: int | None = None) -> None:
        """Add a trial, whose number must follow the number of the newest trial.

        `request` is the number of the user's request for which the trial is added; None if no user requested it.
        """
        assert trial.number == len(self._trials), f"trial {trial.number} is not the next one"
        self._writer.add_trial(trial, request=request)
        self._trials[trial.number] = trial
        self._first.setdefault(trial.recipe.digest, trial.number)

    def count_chunk(self, number: int, timings_s: Mapping[str, float], *, num_scored: int | None) -> None:
        """Add the timings and the number of samples of one stored request to the totals of trial `number`.

        `timings_s` contains the seconds that each part of scoring took, keyed by the part's name, such as "swap"
        (writing the merge into the engine). `num_scored` is the number of samples if they are search data; it is None
        for other data.
        """
        self._trials[number] = self._trials[number].after_chunk(timings_s, num_scored)

    def finish_rung(self, number: int, rung: RungRecord, *, is_last: bool) -> None:
        """Store a trial's estimated objective values at a rung, a number of samples at which trials are compared.

        `number` is the trial's number. If `is_last` is True, the rung is the last rung, and the trial becomes COMPLETE.
        """
        trial = self._trials[number]
        rungs = (*trial.rungs, rung)
        # Every rung counts with all its samples. Those that were not scored for this trial were reused from lower rungs
        # or from trials with an equal recipe.
        reused = sum(sum(record.num_samples.values()) for record in rungs) - trial.samples_scored
        finished = replace(trial, rungs=rungs, samples_reused=reused)
        if is_last:
            values, errors = rung.values, rung.standard_errors
            finished = replace(finished, state=TrialState.COMPLETE, values=values, standard_errors=errors)
        self._writer.finish_rung(number, rung, samples_reused=reused, state=finished.state if is_last else None)
        self._trials[number] = finished

    def finish(self, numbers: Sequence[int], state: TrialState, reason: str, *, rival: int | None = None) -> None:
        """End the trials `numbers` in the state `state`, such as PRUNED or FAIL, and store `reason` as the reason.

        `rival` is the number of the trial against which a scheduler has stopped them; None if no scheduler has stopped
        them. If there are many trials, they are stored in several transactions; after an interruption between these,
        the decision that ended the trials is made again when the study is resumed.
        """
        for start in range(0, len(numbers), ENDED_AT_ONCE):
            part = numbers[start : start + ENDED_AT_ONCE]
            self._writer.finish_trials(part, state, reason, rival=rival)
            for number in part:
                self._trials[number] = replace(self._trials[number], state=state, reason=reason, rival=rival)
