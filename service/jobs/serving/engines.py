"""The choice of the engine that completes prompts for a served study, so that no search is slowed.

A served study uses the engines of searches with the same models as long as no search uses them. While a search uses
them, the served study has a replica of its own if a GPU is free; otherwise it waits. A search and a served study use
the same engines at the same time only if an administrator has asked for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.jobs.completers import Place
from service.jobs.heartbeat import ENGINE, WORKERS
from service.jobs.search.kind import SEARCH
from service.jobs.serving import NAME
from service.types import JobRecord

__all__ = ["Choice", "IdleTimer", "Situation", "choose", "searches"]


@dataclass(frozen=True)
class Situation:
    """Facts by which the engine that completes prompts for a served study is chosen.

    - `shares`: whether an administrator lets the served study use the engines of a search
    - `users`: number of the studies that run and use the same models as the served study
    - `searches`: number of all studies that run
    - `starting`: number of jobs, other than served studies, whose engines or workers have not begun to start
    - `running`: which replicas run: those that searches use too (SCORER), the served study's own (OWN)
    - `num_gpus`, `free_gpus`: number of the cluster's GPUs, and how many of them are free
    - `needed_gpus`: number of GPUs that a replica uses

    Studies are only counted and not named, because users who read texts made from these facts may not know of every
    study.
    """

    shares: bool = False
    users: int = 0
    searches: int = 0
    starting: int = 0
    running: tuple[Place, ...] = ()
    num_gpus: float = 0.0
    free_gpus: float = 0.0
    needed_gpus: int = 1


@dataclass(frozen=True)
class Choice:
    """Decision about which replicas complete a served study's prompts now.

    - `place`: the replicas that searches use too (SCORER), or the served study's own (OWN); None if no replica may
      complete prompts now
    - `waits_for`: what must happen before a replica may complete prompts; None if one may now
    - `yields`: whether completions end as soon as a search uses the engine
    """

    place: Place | None
    waits_for: str | None = None
    yields: bool = False


def choose(situation: Situation) -> Choice:
    """Choose which replicas complete the prompts of a served study now: replicas of searches, its own replica, or none.

    `situation` has the present facts, such as the number of free GPUs. The choice is made so that searches are not
    slowed, unless an administrator has allowed it.
    """
    if situation.shares:
        return Choice(Place.SCORER)
    is_room = situation.free_gpus >= situation.needed_gpus
    if not situation.num_gpus:
        if situation.searches:
            return Choice(None, "the running studies to end: without a GPU of its own, a chat slows a search")
        return Choice(Place.SCORER, yields=True)
    if situation.starting and not is_room:
        return Choice(None, "another job to get its GPUs")
    if Place.OWN in situation.running:
        return Choice(Place.OWN)
    if not situation.users and (is_room or Place.SCORER in situation.running):
        return Choice(Place.SCORER, yields=True)
    if is_room:
        return Choice(Place.OWN)
    ends = ", or the studies that use these models to end" if situation.users else ""
    return Choice(None, f"a free GPU: {situation.num_gpus:g} are in use{ends}")


def searches(jobs: Sequence[JobRecord], *, fingerprints: object, now: float) -> dict[str, int]:
    """Count the running jobs that matter for the choice of the engine that completes a served study's prompts.

    `jobs` are the unfinished jobs, and `now` is the time in seconds since the epoch. The keys of the result are names
    of fields of `Situation`:

    - "searches": number of studies that run
    - "users": number of studies that run and whose models have the given `fingerprints`
    - "starting": number of jobs, other than served studies, whose engines or workers have not begun to start
    """
    driven = [job for job in jobs if job.has_driver(now=now)]
    running = [job for job in driven if job.kind == SEARCH.name]
    # Once an engine of a job starts, the text of the job's wait also has its phase: it has its GPUs then.
    return {
        "searches": len(running),
        "users": sum(job.accepted.get("fingerprints") == fingerprints for job in running),
        "starting": sum(job.kind != NAME and job.waiting_for in (ENGINE, WORKERS) for job in driven),
    }


class IdleTimer:
    """Timer of the time without requests to a served study; serving ends when the time reaches `limit_s` seconds.

    `clock` returns seconds that never go back. `num_requests` is the number of requests so far, and `has_answered` says
    whether an engine has generated a part of an answer to one of them.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._used_at = clock()
        self._num_in_use = 0
        self.num_requests = 0
        self.has_answered = False

    def begin(self) -> None:
        """Record that a request to the served study begins; until it ends, the study does not count as idle."""
        self._num_in_use += 1
        self.num_requests += 1

    def end(self) -> None:
        """Record that a request to the served study has ended; the time without requests is counted from now on."""
        self._num_in_use -= 1
        self._used_at = self._clock()

    @property
    def remaining_s(self) -> float:
        """Seconds until serving ends if no request comes; the whole limit while a request is answered."""
        return self._limit_s - (0.0 if self._num_in_use else self._clock() - self._used_at)
