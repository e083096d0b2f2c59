"""Simulation of many replicas, drivers and a database, for the shares of time in which they are busy.

A replica scores a chunk. The chunk's result waits for its study's driver, which handles one result after the other. The
driver stores the result in the database, which serves the drivers of all studies one after the other, and then sends
the replica another chunk. Each driver has its own replicas; each replica always has the same number of chunks, of which
it scores one at a time. The simulation leaves out the schedulers, which may have nothing to send, and the network.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass

__all__ = ["Load", "Result", "ServiceTimes", "simulate"]

# Chunks of each replica at the beginning that are not counted, and those that are.
WARM_CHUNKS, COUNTED_CHUNKS = 4, 20


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds that a chunk takes: `driver_s` of the driver's processor, and `database_s` of the database."""

    driver_s: float
    database_s: float


@dataclass(frozen=True)
class Load:
    """The simulated load: `replicas` replicas in total, shared evenly by `drivers` drivers.

    A chunk takes a replica `chunk_s` seconds on average, drawn uniformly from `spread` of that around it. A replica has
    `in_flight` chunks.
    """

    replicas: int
    chunk_s: float
    drivers: int = 1
    in_flight: int = 3
    spread: float = 0.5


@dataclass(frozen=True)
class Result:
    """Share of the time during which replicas score, drivers compute, and the database works, on average.

    `chunks_per_s` is the throughput of all replicas together.
    """

    busy: float
    driver: float
    database: float
    chunks_per_s: float


@dataclass
class _Replica:
    driver: int
    queue: int


def simulate(load: Load, times: ServiceTimes, *, seed: int = 0) -> Result:
    """Simulate WARM_CHUNKS and COUNTED_CHUNKS chunks for each replica. The same arguments give the same result."""
    draw = random.Random(seed)
    replicas = [_Replica(number % load.drivers, load.in_flight) for number in range(load.replicas)]
    # Results that wait for a driver, as numbers of their replicas; a driver that handles one has it at the left.
    results: list[deque[int]] = [deque() for _ in range(load.drivers)]
    database_free_at = 0.0
    events: list[tuple[float, int, int]] = []  # when, which kind of event, which replica
    scored, computed = 0, 1
    worked_s = driver_s = database_s = 0.0
    num_done, first_counted = 0, WARM_CHUNKS * load.replicas
    begins_at = now = 0.0

    def score(replica: int, at: float) -> None:
        heapq.heappush(events, (at + load.chunk_s * draw.uniform(1 - load.spread, 1 + load.spread), scored, replica))

    for number in range(load.replicas):
        score(number, load.chunk_s * draw.random())
    while num_done < first_counted + COUNTED_CHUNKS * load.replicas:
        now, event, number = heapq.heappop(events)
        replica = replicas[number]
        waiting = results[replica.driver]
        if event == scored:
            replica.queue -= 1
            if replica.queue:
                score(number, now)
            waiting.append(number)
            if len(waiting) > 1:
                continue
        else:
            waiting.popleft()
            replica.queue += 1
            if replica.queue == 1:
                score(number, now)
            num_done += 1
            worked_s += load.chunk_s
            if num_done == first_counted:
                begins_at, worked_s, driver_s, database_s = now, 0.0, 0.0, 0.0
            if not waiting:
                continue
        # The driver takes the next result: it computes, then waits for the database and is served there.
        stored_from = max(now + times.driver_s, database_free_at)
        database_free_at = stored_from + times.database_s
        driver_s += times.driver_s
        database_s += times.database_s
        heapq.heappush(events, (database_free_at, computed, waiting[0]))
    elapsed_s = now - begins_at
    return Result(
        busy=min(1.0, worked_s / (elapsed_s * load.replicas)),
        driver=driver_s / (elapsed_s * load.drivers),
        database=database_s / elapsed_s,
        chunks_per_s=COUNTED_CHUNKS * load.replicas / elapsed_s,
    )
