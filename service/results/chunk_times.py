"""Scoring times of a study: how long engines scored samples, swapped weights, and waited.

A study has many chunks, so only a few numbers of each chunk are kept in memory.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from service.results.record import EngineFigures, StoredBytes
from service.store import EvidenceRecord
from service.store.documents import Canaries
from workers.types import Split

__all__ = ["ChunkTimes"]

# A longer time without stored results means that no driver ran: engines of a running driver pause for less, and a
# restart takes longer.
PAUSE_S = 30.0


class ChunkTimes:
    """Times and sizes of all chunks that a study has stored; a chunk is the samples of one request to an engine."""

    def __init__(self) -> None:
        self._replicas: set[str] = set()
        self._kinds: set[str] = set()
        # Of the search's chunks.
        self._finished_at = array("d")
        self._worked_s = array("d")
        self._swap_s = array("d")
        self._score_s = 0.0
        self._num_samples = 0
        self._bytes = [0, 0]
        self._holdout_s: dict[str, float] = defaultdict(float)

    def add(self, chunks: Iterable[EvidenceRecord]) -> None:
        """Count the times and sizes of further chunks (the samples of one request to an engine) in the totals.

        `chunks` has one database row for each chunk, in the order in which they were stored. All chunks must be new,
        because a chunk that is added twice counts twice.
        """
        for row in chunks:
            self._replicas.add(row.replica)
            self._kinds.add(row.engine)
            self._bytes[0] += row.sample_bytes or 0
            self._bytes[1] += row.text_bytes or 0
            if row.is_of(Split.SEARCH):
                self._finished_at.append(row.finished_at)
                self._worked_s.append(sum(seconds for name, seconds in row.timings_s.items() if name != "wait"))
                self._swap_s.append(row.timings_s.get("materialise", 0.0) + row.timings_s.get("swap", 0.0))
                self._score_s += row.timings_s.get("score", 0.0)
                self._num_samples += row.num_samples
            if row.is_of(Split.HOLDOUT):
                self._holdout_s[row.recipe_digest] += row.timings_s.get("score", 0.0)

    def engine_figures(self, *, num_replicas: int, canaries: Canaries) -> EngineFigures:
        """Return counts and times of the study's engines.

        `num_replicas` is the number of engines that work at the same time. `canaries` has the results of the engines'
        canaries, which compare log-probabilities on fixed prompts with those of transformers.
        """
        span = self._span_s()
        return EngineFigures(
            starts=len(self._replicas),  # engines that were killed count too
            kinds=tuple(sorted(self._kinds)),
            swap_s=tuple(seconds for seconds in self._swap_s if seconds > 0),
            score_s=self._score_s,
            busy_fraction=min(1.0, sum(self._worked_s) / (span * num_replicas)) if span else None,
            samples_not_checked=canaries.samples_not_checked,
            skipped=tuple(sorted(set(canaries.skipped.values()))),
        )

    def stored_bytes(self) -> StoredBytes:
        """Bytes that the study's scored samples take in the database.

        Samples that earlier versions of the program stored do not count, because their size was not recorded.
        """
        return StoredBytes(*self._bytes)

    def samples_per_second(self) -> float | None:
        """Samples scored per second during the search; None if nothing was scored."""
        span = self._span_s()
        return self._num_samples / span if span else None

    def tokens_per_second(self, num_tokens: Mapping[str, int]) -> dict[str, float]:
        """Tokens per second during the scoring of holdout data, keyed by recipe digest.

        `num_tokens` contains the number of generated tokens, keyed by recipe digest. All recipes are given the same
        prompts in this stage, so the rates can be compared. Recipes without a number of tokens or a measured time are
        left out.
        """
        seconds = self._holdout_s
        return {digest: number / seconds[digest] for digest, number in num_tokens.items() if seconds.get(digest)}

    def _span_s(self) -> float | None:
        """Seconds of the search from its first scored sample to its last; None if nothing was scored.

        A pause of more than PAUSE_S seconds between two stored results, for example while no driver worked on the
        study, does not count.
        """
        if not self._finished_at:
            return None
        order = np.argsort(np.frombuffer(self._finished_at), kind="stable")
        finished = np.frombuffer(self._finished_at)[order]
        started = finished - np.frombuffer(self._worked_s)[order]
        before = np.concatenate([[0.0], finished[:-1]])
        begin = np.where(started - before > PAUSE_S, started, before)
        return float(np.cumsum(np.maximum(0.0, finished - begin))[-1]) or None
