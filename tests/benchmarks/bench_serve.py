"""Cost of watching a study over HTTP: the study's speed with 100 watchers and without, and the number of lost events.

HTTP server, Ray, its jobs, Serve and store are real; the replicas are fakes that take a fixed time per sample, so that
a study lasts a minute and emits at least 5 events a second. Studies without and with watchers alternate on one server;
the ratio is the median of the pairs' ratios of samples per second. The bench also measures the seconds until `/healthz`
answers.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from search_spaces.study.file import load_study
from tests.end_to_end.server import Server, serving

LFS_STUDY = Path(__file__).parents[2] / "docs" / "examples" / "lfs.yaml"
MUST, GOAL = 0.9, 0.97
NUM_PAIRS = 3
NUM_WATCHERS = 100
MIN_EVENTS_PER_S = 5.0
HEALTHZ_MUST_S = 5.0
SETTINGS = {"sample_delay_s": 0.006}
END_S = 600.0


def run() -> dict[str, Any]:
    environment = {"FAKE_SCORER": json.dumps(SETTINGS)}
    with (
        tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory,
        serving(["tests.benchmarks.fake_serve"], Path(directory) / "data", environment=environment) as server,
    ):
        _measure(server, seed=99, num_watchers=0)  # starts Ray and the replicas
        pairs = [
            {
                "alone": _measure(server, seed=i, num_watchers=0),
                "watched": _measure(server, seed=i, num_watchers=NUM_WATCHERS),
            }
            for i in range(NUM_PAIRS)
        ]
        healthz_s = server.seconds_to_healthz
        server.stop()
    ratios = [pair["watched"]["samples_per_s"] / pair["alone"]["samples_per_s"] for pair in pairs]
    watched = [pair["watched"] for pair in pairs]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "must": MUST,
        "goal": GOAL,
        "pairs": pairs,
        "events_lost": sum(each["events_lost"] for each in watched),
        "events_repeated": sum(each["events_repeated"] for each in watched),
        "events_per_s": min(each["events_per_s"] for each in watched),
        "healthz_s": healthz_s,
        "healthz_must_s": HEALTHZ_MUST_S,
    }


def show(result: dict[str, Any]) -> None:
    print("pair  alone samples/s  watched samples/s  ratio  events/s  lost  repeated")
    for number, (pair, ratio) in enumerate(zip(result["pairs"], result["ratios"], strict=True)):
        alone, watched = pair["alone"], pair["watched"]
        print(
            f"{number:>4}  {alone['samples_per_s']:15.0f}  {watched['samples_per_s']:17.0f}  {ratio:5.2f}  "
            f"{watched['events_per_s']:8.1f}  {watched['events_lost']:>4}  {watched['events_repeated']:>8}"
        )
    print(
        f"median ratio {result['ratio']:.2f} with {NUM_WATCHERS} watchers   must {MUST}, goal {GOAL}; "
        f"at least {result['events_per_s']:.1f} events/s (must {MIN_EVENTS_PER_S})"
    )
    print(f"/healthz answered {result['healthz_s']:.1f} s after the start   must {HEALTHZ_MUST_S}")


def _measure(server: Server, *, seed: int, num_watchers: int) -> dict[str, Any]:
    """Run one study of about a minute with watchers from its first second to its end."""
    study = server.submit(_study(seed))
    seen = asyncio.run(_watch(server.url, study, num_watchers)) if num_watchers else []
    assert server.wait_until_ended(study, timeout_s=END_S)["state"] == "COMPLETE", server.story(study)
    events = server.events(study)
    stored = [event["id"] for event in events]
    rungs = [number for number, event in enumerate(events) if event["kind"] == "rung"]
    during = events[rungs[0] : rungs[-1] + 1]
    seconds = _seconds(during)
    return {
        "samples_per_s": server.get(f"/v1/studies/{study}/summary")["samples"]["per_second"],
        "events": len(stored),
        "events_per_s": len(during) / seconds,
        "seconds": seconds,
        "events_lost": sum(len(set(stored) - set(ids)) for ids in seen),
        "events_repeated": sum(len(ids) - len(set(ids)) for ids in seen),
    }


def _seconds(events: list[dict[str, Any]]) -> float:
    first, last = (datetime.fromisoformat(event["time"]) for event in (events[0], events[-1]))
    return (last - first).total_seconds()


def _study(seed: int) -> dict[str, Any]:
    study = load_study(LFS_STUDY)
    document = study.canonical()
    document["search"].update(algorithm="random", max_trials=160, seed=seed)
    document["fidelity"] = {"scheduler": "hyperband", "rungs": [8, 24]}
    document["holdout"] = []
    document["engine"]["verify"] = False
    return document


async def _watch(url: str, study: str, num_watchers: int) -> list[list[int]]:
    """The event ids that each watcher received until the end of its stream."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        return list(await asyncio.gather(*(_ids(client, study) for _ in range(num_watchers))))


async def _ids(client: httpx.AsyncClient, study: str) -> list[int]:
    ids = []
    async with client.stream("GET", f"/v1/studies/{study}/events") as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("id:"):
                ids.append(int(line[3:]))
    return ids
