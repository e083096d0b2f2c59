"""Counts of engine crashes by chunk of samples, and the decision whether a trial's merge is their cause.

The merge is the cause if an engine raises an error (or dies of a fatal signal such as SIGSEGV) twice with the same
chunk, the second time after another recipe was scored. Other crashes are weaker evidence, so more crashes are needed:
three if the engine made no progress, and six if its process ended without an error, because a kill from outside looks
the same. A chunk whose replica was killed is scored again next, so random kills may well hit the same chunk several
times.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from service.store import EventRecord
from service.tune.evaluation import ChunkFailed, Evaluation, FailureKind
from service.types import EventKind
from workers.errors import CrashKind
from workers.types import Span

__all__ = ["Crashes"]

log = logging.getLogger(__name__)

# The number of crashes with the same chunk from which the merge counts as their cause, by kind of crash. Crashes of
# several kinds count as shares of these numbers, which are added.
ENOUGH: Mapping[CrashKind, int] = {CrashKind.ERROR: 2, CrashKind.HANG: 3, CrashKind.EXIT: 6}

# After this many crashes with a chunk, on engines that had scored nothing else, no engine is considered available.
MAX_UNPROVEN = 6

Key = tuple[str, str, str]


class Crashes:
    """The crashes of engines in one study, counted by the chunk and the recipe that the engine was scoring.

    A chunk is the samples of one request. `events` are all stored events of the study, from which the crashes before a
    restart are read.
    """

    def __init__(self, events: Iterable[EventRecord]) -> None:
        self._crashes: dict[Key, list[Mapping[str, Any]]] = defaultdict(list)
        for event in events:
            if event.kind == EventKind.CRASH:
                self._add(event.payload)

    def add(self, evaluation: Evaluation, failed: ChunkFailed) -> tuple[dict[str, Any], ChunkFailed | None]:
        """Count an engine crash during `evaluation`, and decide whether the samples are scored again.

        `failed` describes the crash, with the samples that the engine was scoring. Returns two values: the event to
        store, and a failure. The failure is None if the samples are scored again. Otherwise it says either that the
        trial fails, because its merge crashes engines, or that no engine is available.
        """
        crash = failed.crash
        assert crash is not None
        event = {
            "trial": evaluation.trial,
            "recipe": evaluation.recipe.digest,
            "split": evaluation.split.value,
            "chunk": _chunk(crash.chunk),
            "replica": crash.replica,
            "scored_others": crash.scored_others,
            "kind": crash.kind.value,
            "reason": failed.reason,
        }
        count = self._add(event)
        log.warning("trial %d: crash %d of its engine: %s", evaluation.trial, count, failed.reason)
        return {**event, "crashes": count}, _consequence(self._of(evaluation, crash.chunk), failed.reason)

    def count(self, evaluation: Evaluation) -> int:
        """The largest number of engines that have crashed with the same chunk of `evaluation`.

        A chunk is the samples of one request to an engine.
        """
        return max((len(self._of(evaluation, chunk)) for chunk in evaluation.chunks), default=0)

    def _add(self, payload: Mapping[str, Any]) -> int:
        crashes = self._crashes[payload["recipe"], payload["split"], str(payload["chunk"])]
        crashes.append(payload)
        return len(crashes)

    def _of(self, evaluation: Evaluation, chunk: Sequence[Span]) -> Sequence[Mapping[str, Any]]:
        return self._crashes.get((evaluation.recipe.digest, evaluation.split.value, str(_chunk(chunk))), ())


def _consequence(crashes: Sequence[Mapping[str, Any]], reason: str) -> ChunkFailed | None:
    enough = sum(Fraction(1, ENOUGH[_kind(crash)]) for crash in crashes) >= 1
    if enough and crashes[-1]["scored_others"]:
        text = f"its engine crashed {len(crashes)} times with the same samples, at last after another recipe was scored"
        return ChunkFailed(FailureKind.TRIAL, f"{text}: {reason}")
    if sum(not crash["scored_others"] for crash in crashes) >= MAX_UNPROVEN:
        return ChunkFailed(FailureKind.ENGINE, reason)
    return None


def _kind(crash: Mapping[str, Any]) -> CrashKind:
    if "kind" in crash:
        return CrashKind(crash["kind"])
    return CrashKind.ERROR if crash["has_error"] else CrashKind.EXIT  # stored without a kind


def _chunk(spans: Sequence[Span]) -> list[list[str | int]]:
    return [[span.objective, span.start, span.stop] for span in spans]
