"""A study of 10,000 trials: the server's routes and memory, samples on disk, a driver that resumes, and proposals.

The study is made up (`scale_study`), and kept in `.bench/scale`; `BENCH_DATABASE` names another database by its URL,
PostgreSQL for example. CPU seconds stand beside wall seconds, and a calibration of the machine and its load average
beside both.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import sqlalchemy as sa

from service.results.series import CHARTS
from service.store import JobWriter, Store, schema
from service.types import TrialState
from tests.benchmarks.calibration import calibration_s
from tests.benchmarks.process_memory import output
from tests.benchmarks.scale_proposals import NUM_OBSERVATIONS, NUM_PARAMETERS
from tests.benchmarks.scale_study import Size, stored_study

PLACE = Path(".bench/scale")
SIZE = Size()
PAGES = 40
START_S = 60.0

MUST = {
    "page_s": 0.1,
    "changed_s": 1.0,
    "unchanged_s": 0.15,
    "rss_mb": 400,
    "disk_bytes": 12,
    "driver_bytes": 30,
    "resume_s": 60,
    "proposal_s": 1.0,
}


def run() -> dict[str, Any]:
    PLACE.mkdir(parents=True, exist_ok=True)
    database = os.environ.get("BENCH_DATABASE") or f"sqlite:///{(PLACE / 'study.db').resolve()}"
    store = Store(database)
    try:
        study = stored_study(store, SIZE)
        return {
            "database": store.engine.dialect.name,
            "num_trials": SIZE.num_trials,
            "calibration_s": calibration_s(),
            "load": os.getloadavg()[0],
            "must": MUST,
            "proposals": _proposals(),
            "disk": _disk(store, study),
            "driver": json.loads(output("tests.benchmarks.scale_driver", store.url, study)),
            "server": _server(store, study),
        }
    finally:
        store.close()


def show(result: dict[str, Any]) -> None:
    must, server = result["must"], result["server"]
    print(
        f"{result['num_trials']} trials on {result['database']}; "
        f"calibration {result['calibration_s']:.2f} CPU seconds, load average {result['load']:.1f}"
    )
    print("list of 100 trials, p95         s  CPU s   must")
    for name, found in server["pages"].items():
        print(f"  {name:<24} {found['p95_s']:7.3f} {found['p95_cpu_s']:6.3f}  {must['page_s']:5.2f}")
    print("results              first s  CPU s  changed s  CPU s   must  unchanged s   must     KB")
    for name, found in server["results"].items():
        print(
            f"  {name:<18} {found['first']['s']:7.3f} {found['first']['cpu_s']:6.3f}  {found['changed']['s']:9.3f} "
            f"{found['changed']['cpu_s']:6.3f}  {must['changed_s']:5.2f}  {found['unchanged']['s']:11.3f}  "
            f"{must['unchanged_s']:5.2f}  {found['bytes'] / 1000:5.0f}"
        )
    print(f"memory of the server: {server['rss_mb']:.0f} MB   must {must['rss_mb']}")
    disk, driver = result["disk"], result["driver"]
    print(
        f"bytes on disk a sample: {disk['values']:.1f} for values, documents and flags   must {must['disk_bytes']}; "
        f"{disk['texts']:.1f} for responses and tokens"
    )
    print(
        f"a driver resumes {driver['samples'] / 1e6:.1f} million samples in {driver['resume_s']:.0f} s, "
        f"{driver['resume_cpu_s']:.0f} CPU s   must {must['resume_s']}; "
        f"{driver['bytes_per_sample']:.1f} bytes a sample in memory   must {must['driver_bytes']}"
    )
    print(f"a proposal at {NUM_OBSERVATIONS} observations of {NUM_PARAMETERS} parameters   must {must['proposal_s']}")
    for name, found in result["proposals"].items():
        print(f"  {name:<10} {found['s']:6.2f} s {found['cpu_s']:6.2f} CPU s")


class _Server:
    """The HTTP server in a separate process."""

    def __init__(self, client: httpx.Client, process: psutil.Process) -> None:
        self.client = client
        self.process = process

    def get(self, path: str, **headers: str) -> tuple[httpx.Response, dict[str, float]]:
        cpu, start = self.cpu_s(), time.perf_counter()
        answer = self.client.get(path, headers=headers)
        seconds = time.perf_counter() - start
        assert answer.status_code in (200, 304), answer.text
        return answer, {"s": seconds, "cpu_s": self.cpu_s() - cpu}

    def rss_mb(self) -> float:
        return float(self.process.memory_info().rss) / 1e6

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def serving(database: str) -> Iterator[_Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        command = [sys.executable, "-m", "tests.benchmarks.scale_server", database, str(port), directory]
        child = subprocess.Popen(command)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
                _wait_until(lambda: _answers(client))
                yield _Server(client, psutil.Process(child.pid))
        finally:
            child.terminate()
            child.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_true():
        assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.05)


def _proposals() -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "tests.benchmarks.scale_proposals"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, dict[str, float]] = json.loads(finished.stdout)
    return found


def _disk(store: Store, study: str) -> dict[str, float]:
    """Bytes per sample of the tables of samples, with their keys and pages."""
    table = schema.sample_chunks
    with store.engine.connect() as connection:
        count = connection.execute(sa.select(sa.func.sum(table.c.num_samples)).where(table.c.study == study)).scalar()
        assert count

        def size(*names: str) -> float:
            return sum(_table_bytes(connection, name) for name in names) / int(count)

        return {"values": size("sample_chunks", "sample_documents"), "texts": size("sample_texts")}


def _table_bytes(connection: sa.Connection, name: str) -> int:
    """Size of a table with its indexes, in bytes."""
    if connection.dialect.name == "postgresql":
        query = "SELECT pg_total_relation_size(:name)"
    else:
        query = "SELECT sum(pgsize) FROM dbstat WHERE name IN (SELECT name FROM sqlite_master WHERE tbl_name = :name)"
    return int(connection.execute(sa.text(query), {"name": name}).scalar_one())


def _server(store: Store, study: str) -> dict[str, Any]:
    path = f"/v1/studies/{study}"
    names = ["summary", "pareto", *(f"plots/{name}" for name in CHARTS), "report"]
    with serving(store.url) as server:
        pages = {name: _pages(server, f"{path}/trials", query) for name, query in QUERIES.items()}
        results = {name: _result(server, store, study, f"{path}/{name}") for name in names}
        return {"pages": pages, "results": results, "rss_mb": server.rss_mb()}


QUERIES: dict[str, dict[str, str]] = {
    "any state": {},
    "COMPLETE": {"state": "COMPLETE"},
    "FAIL": {"state": "FAIL"},
    "PRUNED (none)": {"state": "PRUNED"},
}


def _pages(server: _Server, path: str, query: dict[str, str]) -> dict[str, float]:
    starts = np.random.default_rng(0).integers(SIZE.num_trials, size=PAGES)
    found = []
    for start in starts:
        parameters = "&".join(f"{name}={value}" for name, value in {"after": start, **query}.items())
        found.append(server.get(f"{path}?{parameters}")[1])
    return {
        "p95_s": float(np.percentile([each["s"] for each in found], 95)),
        "p95_cpu_s": float(np.percentile([each["cpu_s"] for each in found], 95)),
    }


def _result(server: _Server, store: Store, study: str, path: str) -> dict[str, Any]:
    _, first = server.get(path)
    _add_result(store, study)
    answer, changed = server.get(path)
    again, unchanged = server.get(path, **{"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    return {"first": first, "changed": changed, "unchanged": unchanged, "bytes": len(answer.content)}


def _add_result(store: Store, study: str) -> None:
    """Add one more trial at full budget to the study, as its driver would."""
    attempt = store.job(study).attempt
    last = store.trials(study, start=SIZE.num_trials)[-1]
    writer = JobWriter(store.engine, study, attempt)
    number = last.number + 1
    writer.add_trial(replace(last, number=number, state=TrialState.WAITING, rungs=()))
    writer.finish_rung(number, last.rungs[-1], samples_reused=0, state=TrialState.COMPLETE)
