"""Event watchers and mixed reads on one server: lost or repeated events, latencies, delays of events, CPU time.

500 watchers follow the events of four running studies with tokens of accounts, while 200 reads a second (lists of
studies, studies, trials, events, reports) arrive when they are due. Threads write as drivers do: events, trials and
heartbeats. Server and load are processes of their own; Ray is not needed. `BENCH_DATABASE`: the URL of another
database than SQLite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from service.auth.tokens import new_token
from service.store import JobWriter, Store
from service.store.accounts import AccountStore, Actor
from service.types import JobState, Scope, TrialRecord
from tests.benchmarks.bench_scale import serving
from tests.benchmarks.watchers_load import READS, Load, Seen, quantiles
from tests.service.api.harness import snapshot, stored_study, write_trial
from tests.service.synthetic_run import run_record

NUM_WATCHERS, READS_PER_S = 500, 200.0
NUM_STUDIES, EVENTS_PER_S = 4, 2.5  # of each study, beside those of its trials
SECONDS = 30.0
NUM_TRIALS = 40  # of each study, of which a third is there at the beginning
NUM_TOKENS = 10
OPERATOR = Actor(None, "bench")


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        store = Store(os.environ.get("BENCH_DATABASE") or f"sqlite:///{directory}/watchers.db")
        try:
            return _measure(store)
        finally:
            store.close()


def show(result: dict[str, Any]) -> None:
    print(f"{NUM_WATCHERS} watchers of {NUM_STUDIES} studies, {READS_PER_S:g} reads a second, {SECONDS:g} s")
    print(f"events: {result['events_per_s']:.1f} a second, {result['frames_per_s']:.0f} sent a second, of which")
    print(f"  lost {result['lost']}, repeated {result['repeated']}   must 0 and 0")
    print("seconds            p50     p95     max")
    for name, found in {"event's delay": result["delay_s"], **result["latency_s"]}.items():
        print(f"  {name:<14} {found['p50']:6.3f}  {found['p95']:6.3f}  {found['max']:6.3f}")
    print(f"reads that failed: {result['num_failed']} of {result['num_reads']}   must 0")
    for text, number in result["failures"].items():
        print(f"  {number} times {text}")
    print(
        f"cores: server {result['server_cores']:.2f}, load {result['load_cores']:.2f}; server {result['rss_mb']:.0f} MB"
    )


def _measure(store: Store) -> dict[str, Any]:
    tokens = _tokens(store)
    made = run_record(num_trials=NUM_TRIALS)
    writers = [_begun(store, made.whole_trials[: NUM_TRIALS // 3], f"study-{i}") for i in range(NUM_STUDIES)]
    studies = [writer.job_id for writer in writers]
    load = Load("", tokens, studies, NUM_WATCHERS, READS_PER_S, SECONDS)
    with serving(store.url) as server, ExitStack() as stack:
        process = stack.enter_context(_loading(load, str(server.client.base_url)))
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        before = [store.last_event_id(study) for study in studies]
        cpu_s, start = server.cpu_s(), time.monotonic()
        stop = threading.Event()
        writing = [
            threading.Thread(target=_write, args=(writer, made.whole_trials[NUM_TRIALS // 3 :], stop))
            for writer in writers
        ]
        for thread in writing:
            thread.start()
        stack.callback(stop.set)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "read\n"
        cpu_s, seconds, rss_mb = server.cpu_s() - cpu_s, time.monotonic() - start, server.rss_mb()
        stop.set()
        for thread in writing:
            thread.join()
        stored = {study: [event.id for event in store.events(study, limit=100_000)] for study in studies}
        for writer in writers:
            writer.set_state(JobState.COMPLETE)
        told, _ = process.communicate(timeout=120)
    seen = Seen(**json.loads(told))
    num_new = sum(sum(i > last for i in stored[study]) for study, last in zip(studies, before, strict=True))
    lost = sum(len(set(stored[study]) - set(ids)) for study, ids in seen.ids)
    repeated = sum(len(ids) - len(set(ids)) for _, ids in seen.ids)
    assert len(seen.ids) == NUM_WATCHERS
    return {
        "met": lost == repeated == len(seen.failed) == 0,
        "lost": lost,
        "repeated": repeated,
        "events_per_s": num_new / seconds,
        "frames_per_s": num_new * NUM_WATCHERS / NUM_STUDIES / seconds,
        "delay_s": quantiles(seen.delays_s),
        "latency_s": {name: quantiles(seen.latencies_s[name]) for name, _, _ in READS},
        "num_reads": sum(map(len, seen.latencies_s.values())),
        "num_failed": len(seen.failed),
        "failures": dict(Counter(seen.failed).most_common(10)),
        "server_cpu_s": cpu_s,
        "server_cores": cpu_s / seconds,
        "load_cores": seen.cpu_s / seconds,
        "rss_mb": rss_mb,
        "database": store.place,
    }


def _tokens(store: Store) -> list[str]:
    accounts = AccountStore(store)
    accounts.add_user("root", is_admin=True, actor=OPERATOR)
    tokens = [new_token() for _ in range(NUM_TOKENS)]
    for number, token in enumerate(tokens):
        accounts.add_token(
            "root",
            name=f"bench-{number}",
            digest=token.digest,
            prefix=token.prefix,
            scope=Scope.READ,
            lifetime_s=None,
            actor=OPERATOR,
        )
    return [token.secret for token in tokens]


def _begun(store: Store, trials: Sequence[TrialRecord], name: str) -> JobWriter:
    record = stored_study(store, name=name)
    writer = store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    for trial in trials:
        write_trial(writer, trial)
    return writer


def _write(writer: JobWriter, trials: Sequence[TrialRecord], stop: threading.Event) -> None:
    """Store events at a steady rate, a trial each second and a heartbeat each two, until `stop` is set."""
    start, number = time.monotonic(), 0
    waiting = list(trials)
    progress = snapshot(run_record(num_trials=4)).to_json()
    each_s = round(EVENTS_PER_S)
    while not stop.wait(max(0.0, start + number / EVENTS_PER_S - time.monotonic())):
        writer.add_event("note", {"number": number})
        if number % each_s == 0 and waiting:
            write_trial(writer, waiting.pop(0))
        if number % (2 * each_s) == 0:
            writer.heartbeat(wall_clock_s=float(number), progress={**progress, "samples_scored": number})
        number += 1


@contextmanager
def _loading(load: Load, url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.benchmarks.watchers_load"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({**asdict(load), "url": url}) + "\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()
