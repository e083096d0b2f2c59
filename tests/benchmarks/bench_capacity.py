"""Load of drivers, database and Ray's head with up to 1,000 replicas: measured service times, and a simulation.

Three times are measured: those of a search whose fake replicas take almost no time for a chunk, so that its driver
(Tune, coordinator and store) is always busy; those of a driver that stores a chunk in each database; and the processor
time of Ray's head and Serve's controller. The simulation (`capacity_model`) with these times must predict the
throughput of searches on 16 and 32 fake replicas with chunks of 1 s. A fake replica is inside its trial actor, which
has one chunk at a time: two cores have no room for more processes. Databases do not wait for the disk.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from search_spaces.study.engine import EngineOptions
from service.tune.coordinator import Coordinator
from service.types import Origin, RungRecord, TrialRecord, TrialState
from tests.benchmarks.bench_replicas import NAMES, RUNGS, search_of
from tests.benchmarks.calibration import calibration_s
from tests.benchmarks.capacity_model import Load, ServiceTimes, simulate
from tests.postgresql import postgresql_server
from tests.service.tune.harness import InlineProposer, new_study
from workers.serving.fake import FakeScorer
from workers.types import Family, ModelSource, ScoreRequest, Span, Split

CHUNK_SAMPLES = len(NAMES) * RUNGS[-1]
SATURATED = (8, 0.02)  # replicas and seconds of a chunk with which the driver is always occupied
CHECKED = ((16, 1.0), (32, 1.0))
CHUNKS = 448  # of a measured search, its baselines included
MUST = 0.2  # largest relative difference between simulated and measured throughput
BUSY = 0.9  # replicas that score for this share of the time count as busy
SIMULATED = (16, 32, 64, 128, 256, 512, 1000)
CHUNK_TIMES_S = (1.0, 10.0, 60.0)
DRIVERS = (1, 4, 16)
SERVE_REPLICAS = (2, 10)
IDLE_S = 20.0
STORED_CHUNKS = 200


def run() -> dict[str, Any]:
    found: dict[str, Any] = {"load_average": os.getloadavg()[0], "calibration_s": calibration_s()}
    databases = _databases()
    saturated, *checked = [_search(*size) for size in (SATURATED, *CHECKED)]
    driver_s = 1 / saturated.chunks_per_s
    head_s = max(search.gcs_share / search.chunks_per_s for search in (saturated, *checked))
    predictions = [_checked(search, driver_s) for search in checked]
    controllers = {replicas: _controller(replicas) for replicas in SERVE_REPLICAS}
    return {
        **found,
        "databases": databases,
        "searches": [asdict(search) for search in (saturated, *checked)],
        "driver_s": driver_s,
        "head_s": head_s,
        "checked": predictions,
        "must": MUST,
        "controllers": controllers,
        "simulated": _simulated(driver_s, head_s, databases),
        "met": all(row["difference"] <= MUST for row in predictions),
    }


def _simulated(driver_s: float, head_s: float, databases: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for name, chunk_s, drivers in itertools.product(databases, CHUNK_TIMES_S, DRIVERS):
        times = _times(driver_s, databases[name], databases["SQLite"])
        for replicas in SIMULATED:
            result = asdict(simulate(Load(replicas, chunk_s, drivers), times))
            row = {"name": name, "chunk_s": chunk_s, "drivers": drivers, "replicas": replicas, **result}
            rows.append({**row, "head": result["chunks_per_s"] * head_s})
    return rows


def show(result: dict[str, Any]) -> None:
    print(f"load average {result['load_average']:.1f}, calibration {result['calibration_s']:.2f} CPU seconds")
    print("database    ms a chunk  of it in the driver")
    for name, stored in result["databases"].items():
        print(f"{name:10}  {1e3 * stored['seconds']:10.1f}  {1e3 * stored['driver_s']:19.1f}")
    print(
        "replicas  chunk s  driver CPU ms a chunk (halves)  all  driver CPU  chunks/s  busy  actor MB  GCS CPU  GCS MB"
    )
    for row in result["searches"]:
        halves = f"({1e3 * row['first_half_s']:.1f}, {1e3 * row['second_half_s']:.1f})"
        print(
            f"{row['replicas']:8}  {row['chunk_s']:7.2f}  {1e3 * row['driver_s']:15.1f} {halves:>15}  "
            f"{1e3 * row['all_s']:3.0f}  {row['driver_share']:10.2f}  {row['chunks_per_s']:8.1f}  {row['busy']:4.2f}  "
            f"{row['actor_mb']:8.0f}  {row['gcs_share']:7.3f}  {row['gcs_mb']:6.0f}"
        )
    driver_ms, head_ms = 1e3 * result["driver_s"], 1e3 * result["head_s"]
    print(f"a chunk occupies the driver for {driver_ms:.1f} ms, and Ray's head for {head_ms:.1f} ms")
    print("replicas  simulated chunks/s  measured  difference  must")
    for row in result["checked"]:
        print(
            f"{row['replicas']:8}  {row['simulated']:18.1f}  {row['measured']:8.1f}  {row['difference']:10.2f}  "
            f"{result['must']:4.2f}"
        )
    for replicas, share in result["controllers"].items():
        print(f"Serve's controller with {replicas} idle replicas: {share:.3f} of a processor")
    print(
        f"database    chunk s  drivers  {''.join(f'{size:>6}' for size in SIMULATED)}  replicas busy; the first limit"
    )
    for key, group in itertools.groupby(
        result["simulated"], key=lambda row: (row["name"], row["chunk_s"], row["drivers"])
    ):
        rows = list(group)
        busy = "".join(f"{row['busy']:6.2f}" for row in rows)
        print(f"{key[0]:10}  {key[1]:7.0f}  {key[2]:7}  {busy}  {_first_limit(rows)}")


def _first_limit(rows: list[dict[str, Any]]) -> str:
    """The part with the highest load, at the smallest number of replicas that are not always busy."""
    for row in rows:
        if row["busy"] < BUSY:
            return f"{max(('driver', 'database', 'head'), key=lambda name: row[name])} at {row['replicas']}"
    return "none"


# -- searches on Ray ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchTimes:
    """Times and memory of a search on fake replicas, measured while all replicas were up.

    `chunk_s` are the seconds of a chunk in a replica. `driver_s` are the driver's processor seconds for a chunk, also
    in each half of the search (`first_half_s`, `second_half_s`); `all_s` are those of all processes. Shares are of one
    processor, and of the replicas' time (`busy`). Megabytes do not include memory that processes share.
    """

    replicas: int
    chunk_s: float
    driver_s: float
    first_half_s: float
    second_half_s: float
    all_s: float
    driver_share: float
    chunks_per_s: float
    busy: float
    actor_mb: float
    gcs_share: float
    gcs_mb: float


@dataclass(frozen=True)
class _Point:
    """Totals of a search so far: seconds, chunks, and processor seconds of the driver, Ray's head and all processes."""

    time: float
    driver: float
    head: float
    all: float
    chunks: float


class _Watch:
    """Thread that records totals once a second and, in the middle of the search, the memory of two processes."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        (self._gcs,) = [child for child in _children() if child.name().startswith("gcs_server")]
        self.points: list[_Point] = []
        self.actor_mb = self.gcs_mb = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if self.points and now - self.points[-1].time < 1.0:
            return
        chunks = self._coordinator.num_samples_scored / CHUNK_SAMPLES
        children = _children()
        everything = time.process_time() + sum(map(_seconds, children))
        self.points.append(_Point(now, time.process_time(), _seconds(self._gcs), everything, chunks))
        if not self.actor_mb and chunks > CHUNKS / 2:
            self.gcs_mb = _own_mb(self._gcs)
            self.actor_mb = fmean(_own_mb(each) for each in children if each.name().startswith("ray::Evaluation"))

    def counted(self, replicas: int) -> list[_Point]:
        """Recorded points during which all replicas had work, without the first and the last chunks."""
        return [point for point in self.points if 2 * replicas <= point.chunks <= CHUNKS - 2 * replicas]


def _search(replicas: int, chunk_s: float) -> SearchTimes:
    from service.tune.ray_tune import run_evaluations

    plan, space, _ = search_of(replicas, "none", "random", CHUNKS)
    plan = replace(plan, max_trials=CHUNKS - len(plan.baselines))
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory, _ray(cpus=2 + replicas // 8):
        store, study = new_study(Path(directory))
        coordinator = Coordinator(
            replace(plan, study_id=study),
            space=space,
            store=store,
            writer=store.open_attempt(study),
            proposer=InlineProposer(space, seed=0),
        )
        watch = _Watch(coordinator)
        scorer = FakeScorer(sample_delay_s=chunk_s / CHUNK_SAMPLES)
        run_evaluations(
            coordinator, scorer, name="search", storage_dir=Path(directory) / "ray", concurrency=replicas, tick=watch
        )
        scored_s = fmean(row.timings_s["score"] for row in store.evidence(study))
        store.close()
    counted = watch.counted(replicas)
    first, middle, last = counted[0], counted[len(counted) // 2], counted[-1]
    chunks, seconds = last.chunks - first.chunks, last.time - first.time
    return SearchTimes(
        replicas=replicas,
        chunk_s=scored_s,
        driver_s=(last.driver - first.driver) / chunks,
        first_half_s=(middle.driver - first.driver) / (middle.chunks - first.chunks),
        second_half_s=(last.driver - middle.driver) / (last.chunks - middle.chunks),
        all_s=(last.all - first.all) / chunks,
        driver_share=(last.driver - first.driver) / seconds,
        chunks_per_s=chunks / seconds,
        busy=chunks * scored_s / (seconds * replicas),
        actor_mb=watch.actor_mb,
        gcs_share=(last.head - first.head) / seconds,
        gcs_mb=watch.gcs_mb,
    )


def _checked(search: SearchTimes, driver_s: float) -> dict[str, Any]:
    """The measured throughput of a search, with the throughput that the simulation predicts."""
    load = Load(search.replicas, search.chunk_s, in_flight=1, spread=0.0)
    simulated, measured = simulate(load, ServiceTimes(driver_s, 0.0)).chunks_per_s, search.chunks_per_s
    difference = abs(simulated - measured) / measured
    return {"replicas": search.replicas, "simulated": simulated, "measured": measured, "difference": difference}


def _controller(replicas: int) -> float:
    """Share of a processor that Serve's controller takes while `replicas` replicas are idle."""
    with _ray(cpus=4), _idle_replicas(replicas):
        (controller,) = [child for child in _children() if child.name().startswith("ray::ServeContr")]
        before = _seconds(controller)
        time.sleep(IDLE_S)
        after = _seconds(controller)
    return (after - before) / IDLE_S


# -- the database ------------------------------------------------------------------------------------------------------


def _databases() -> dict[str, dict[str, float]]:
    """Seconds for storing a chunk's results in each database, and the driver's processor seconds for this."""
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        found = {"SQLite": _stored(Path(directory), None)}
    for server in postgresql_server():
        url = server.migrated()
        found["PostgreSQL"] = _stored(Path(), url)
        server.drop(url)
    return found


def _stored(directory: Path, url: str | None) -> dict[str, float]:
    plan, space, _ = search_of(SATURATED[0], "none", "random", STORED_CHUNKS)
    proposer, scorer = InlineProposer(space, seed=0), FakeScorer()
    store, study = new_study(directory, url)
    writer = store.open_attempt(study)
    seconds = driver_s = 0.0
    for number in range(STORED_CHUNKS):
        proposer.submit(number=number, observations=(), pending=())
        configuration = proposer.result(timeout_s=0.0)
        assert configuration is not None
        recipe = space.to_recipe(configuration)
        spans = tuple(Span(name, plan.tasks[name], 0, RUNGS[-1]) for name in NAMES)
        result = scorer.score(ScoreRequest(study, recipe, spans))
        values = dict.fromkeys(NAMES, 0.5)
        rung = RungRecord(0, dict.fromkeys(NAMES, RUNGS[-1]), values, values)
        trial = TrialRecord(
            number, Origin.SEARCH, f"trial {number}", TrialState.WAITING, recipe, bracket=0, configuration=configuration
        )
        begin, begin_driver = time.perf_counter(), time.process_time()
        writer.add_trial(trial)
        writer.record_chunk(number, Split.SEARCH, result)
        writer.finish_rung(number, rung, samples_reused=0)
        writer.finish_trials([number], TrialState.COMPLETE, None)
        seconds += time.perf_counter() - begin
        driver_s += time.process_time() - begin_driver
    store.close()
    return {"seconds": seconds / STORED_CHUNKS, "driver_s": driver_s / STORED_CHUNKS}


def _times(driver_s: float, stored: Mapping[str, float], sqlite: Mapping[str, float]) -> ServiceTimes:
    """Service times for one database; with SQLite, the driver is occupied for `driver_s` seconds a chunk.

    SQLite works in the driver's process and has one writer, so the whole time for storing a chunk counts as time of the
    database. For another database, the driver's own work is subtracted.
    """
    rest_s = driver_s - sqlite["seconds"]
    if stored is sqlite:
        return ServiceTimes(rest_s, sqlite["seconds"])
    return ServiceTimes(rest_s + stored["driver_s"], stored["seconds"] - stored["driver_s"])


# -- helpers -----------------------------------------------------------------------------------------------------------


def _seconds(process: psutil.Process) -> float:
    """Processor seconds that a process has used so far; 0 if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _own_mb(process: psutil.Process) -> float:
    return float(process.memory_full_info().uss / 1e6)


def _children() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


@contextmanager
def _ray(*, cpus: int) -> Iterator[None]:
    """Context manager with a Ray of this process, whose workers have the driver's priority, as on separate machines."""
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init("local", num_cpus=cpus, _system_config={"worker_niceness": 0}, **options)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _idle_replicas(replicas: int) -> Iterator[None]:
    from ray import serve

    from workers.serving.deployment import deploy_scorer

    family = Family(ModelSource("base", "none", "b0"), ())
    deploy_scorer(family, EngineOptions(max_model_len=64, threads=1), replicas=replicas, make_worker=FakeScorer)
    try:
        yield
    finally:
        serve.shutdown()
