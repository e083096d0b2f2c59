"""`python -m tests.benchmarks.watchers_load`: watch events and send reads at a steady rate, from one process.

The process reads a JSON document from stdin (`Load`), prints a line as soon as all watchers are connected, sends reads
for the given time, waits until all streams have ended, and prints its observations as JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

import aiohttp

from service.open_files import raise_limit

__all__ = ["READS", "Load", "Seen", "quantiles"]

# The kinds of reads: name, number among 20 reads, and path below a study ("" is the study itself, None the list of
# studies).
READS: Sequence[tuple[str, int, str | None]] = (
    ("list", 3, None),
    ("show", 7, ""),
    ("trials", 5, "/trials?limit=50"),
    ("events", 4, "/events?limit=100"),
    ("report", 1, "/report"),
)

CONNECT_S = 120.0
FRAME_ID, FRAME_TIME = re.compile(rb"^id: (\d+)$", re.MULTILINE), re.compile(rb'"time":"([^"]+)"')


@dataclass(frozen=True)
class Load:
    """Requests that the load generator sends to the server at `url`, with `tokens` in turn, about `studies`."""

    url: str
    tokens: list[str]
    studies: list[str]
    num_watchers: int
    reads_per_s: float
    seconds: float


@dataclass
class Seen:
    """Observations of the load generator: ids and delays of events, latencies by kind of read, and CPU seconds.

    `failed` has a text for each read that was reset or answered with another status than 200.

    Delays are those of events that were stored after `begun_at`, as earlier ones had to wait for a watcher. A latency
    counts from the moment at which the read was due, so that a server that falls behind is seen.
    """

    ids: list[tuple[str, list[int]]] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name, _, _ in READS})
    failed: list[str] = field(default_factory=list)
    begun_at: float = math.inf
    cpu_s: float = 0.0


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum."""
    ordered = sorted(values)
    place = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95, 1.0)]
    return dict(zip(("p50", "p95", "max"), place, strict=True))


async def main() -> None:
    load = Load(**json.loads(sys.stdin.readline()))
    raise_limit()
    seen = Seen()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # before the server closes idle connections
    async with aiohttp.ClientSession(load.url, timeout=timeout, connector=connector) as http:
        connected = asyncio.Semaphore(0)
        watchers = [
            asyncio.create_task(_watch(http, load, seen, number, connected)) for number in range(load.num_watchers)
        ]
        async with asyncio.timeout(CONNECT_S):
            for _ in watchers:
                await connected.acquire()
        print("connected", flush=True)
        sys.stdin.readline()  # the study's writer has begun
        seen.begun_at, cpu_s = time.time(), time.process_time()
        await _read_steadily(http, load, seen)
        seen.cpu_s = time.process_time() - cpu_s
        print("read", flush=True)
        await asyncio.gather(*watchers)
    print(json.dumps(asdict(seen)))


def _headers(load: Load, number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {load.tokens[number % len(load.tokens)]}"}


async def _watch(
    http: aiohttp.ClientSession, load: Load, seen: Seen, number: int, connected: asyncio.Semaphore
) -> None:
    study = load.studies[number % len(load.studies)]
    ids: list[int] = []
    async with http.get(f"/v1/studies/{study}/events", headers=_headers(load, number)) as answer:
        answer.raise_for_status()
        connected.release()
        rest = b""
        async for chunk in answer.content.iter_any():
            *frames, rest = (rest + chunk).split(b"\n\n")
            now = time.time()
            for frame in frames:
                if (found := FRAME_ID.search(frame)) is not None:
                    ids.append(int(found[1]))
                    told = FRAME_TIME.search(frame)
                    assert told is not None
                    stored_at = datetime.fromisoformat(told[1].decode()).timestamp()
                    if stored_at >= seen.begun_at:
                        seen.delays_s.append(now - stored_at)
    seen.ids.append((study, ids))


async def _read_steadily(http: aiohttp.ClientSession, load: Load, seen: Seen) -> None:
    """Send each read at its time, even if earlier reads are not answered yet."""
    kinds = [(name, path) for name, share, path in READS for _ in range(share)]
    order = [kinds[position * 7 % len(kinds)] for position in range(len(kinds))]
    start = time.monotonic()
    reads = []
    for number in range(int(load.seconds * load.reads_per_s)):
        due = start + number / load.reads_per_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        reads.append(asyncio.create_task(_read(http, load, seen, number, order[number % len(order)], due)))
    await asyncio.gather(*reads)


async def _read(
    http: aiohttp.ClientSession, load: Load, seen: Seen, number: int, kind: tuple[str, str | None], due: float
) -> None:
    name, path = kind
    study = load.studies[number // len(READS) % len(load.studies)]
    place = "/v1/studies" if path is None else f"/v1/studies/{study}{path}"
    headers = {**_headers(load, number), "Accept": "application/json"} if name == "events" else _headers(load, number)
    try:
        async with http.get(place, headers=headers) as answer:
            await answer.read()
            if answer.status != 200:
                seen.failed.append(f"status {answer.status}")
    except aiohttp.ClientError as error:
        seen.failed.append(f"{type(error).__name__}: {error}")
    seen.latencies_s[name].append(time.monotonic() - due)


if __name__ == "__main__":
    asyncio.run(main())
