"""How many replicas drivers, database and Ray's head keep busy: service times measured here, simulated to 1,000.

Measured on Ray, by seconds of processors: a chunk in the driver, which includes Tune, coordinator and store, in
searches on 8, 16 and 32 fake replicas; the rows of a chunk in each database; Ray's head and Serve's controller by the
number of actors. The first two sizes give the service times, and the simulation (`capacity_model`) must then predict
the throughput of the measured searches. Each fake replica is inside a trial actor, which has one chunk at a time:
a machine with two cores has no room for more processes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
FITTED, CHECKED = (8, 16), (16, 32)
CHUNK_S = 1.0
CHUNKS_PER_REPLICA = 14
MUST = 0.2  # largest relative difference between simulated and measured throughput
BUSY = 0.9  # replicas count as busy
SIMULATED = (16, 32, 64, 128, 256, 512, 1000)
CHUNK_TIMES_S = (1.0, 10.0, 60.0)
DRIVERS = (1, 4, 16)
SERVE_REPLICAS = (2, 10)
IDLE_S = 20.0
STORED_CHUNKS = 200


def run() -> dict[str, Any]:
    load_average = os.getloadavg()[0]
    found = {"calibration_s": calibration_s(), "load_average": load_average}
    databases = _databases()
    searches = [asdict(_search(replicas)) for replicas in sorted({*FITTED, *CHECKED})]
    by_size = {search["replicas"]: search for search in searches}
    driver_s = _line({size: by_size[size]["driver_s"] for size in FITTED})
    checked = [_checked(by_size[size], driver_s(size)) for size in CHECKED]
    controllers = {replicas: _controller(replicas) for replicas in SERVE_REPLICAS}
    simulated = [
        {
            "database": database,
            "chunk_s": chunk_s,
            "drivers": drivers,
            "replicas": replicas,
            **asdict(simulate(Load(replicas, chunk_s, drivers), _times(driver_s(FITTED[-1]), stored, databases))),
        }
        for database, stored in databases.items()
        for chunk_s in CHUNK_TIMES_S
        for drivers in DRIVERS
        for replicas in SIMULATED
    ]
    return {
        **found,
        "databases": databases,
        "searches": searches,
        "checked": checked,
        "must": MUST,
        "controllers": controllers,
        "simulated": simulated,
        "met": all(row["difference"] <= MUST for row in checked),
    }


def show(result: dict[str, Any]) -> None:
    print(f"load average {result['load_average']:.1f}, calibration {result['calibration_s']:.2f} CPU seconds")
    print("database    ms a chunk  of it in the driver")
    for name, stored in result["databases"].items():
        print(f"{name:10}  {1e3 * stored['seconds']:10.1f}  {1e3 * stored['driver_s']:19.1f}")
    print("replicas  chunk s  driver ms a chunk  driver busy  chunks/s  replicas busy  actor MB  GCS CPU  GCS MB")
    for row in result["searches"]:
        print(
            f"{row['replicas']:8}  {row['chunk_s']:7.2f}  {1e3 * row['driver_s']:17.1f}  {row['driver_share']:11.2f}  "
            f"{row['chunks_per_s']:8.1f}  {row['busy']:13.2f}  {row['actor_mb']:8.0f}  {row['gcs_share']:7.3f}  "
            f"{row['gcs_mb']:6.0f}"
        )
    print("replicas  simulated chunks/s  measured  difference  must")
    for row in result["checked"]:
        print(
            f"{row['replicas']:8}  {row['simulated']:18.1f}  {row['measured']:8.1f}  {row['difference']:10.2f}  "
            f"{result['must']:4.2f}"
        )
    for replicas, share in result["controllers"].items():
        print(f"Serve's controller with {replicas} idle replicas: {share:.3f} of a processor")
    print(
        "database    chunk s  drivers  " + "".join(f"{size:>7}" for size in SIMULATED) + "   busy replicas; first limit"
    )
    rows = result["simulated"]
    for key in dict.fromkeys((row["database"], row["chunk_s"], row["drivers"]) for row in rows):
        mine = [row for row in rows if (row["database"], row["chunk_s"], row["drivers"]) == key]
        limit = next((row for row in mine if row["busy"] < BUSY), None)
        text = (
            "none"
            if limit is None
            else f"{'driver' if limit['driver'] > limit['database'] else 'database'} at {limit['replicas']}"
        )
        print(
            f"{key[0]:10}  {key[1]:7.0f}  {key[2]:7}  " + "".join(f"{row['busy']:7.2f}" for row in mine) + f"   {text}"
        )


# -- searches on Ray ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchTimes:
    """What a search on fake replicas took, while all were up.

    `chunk_s` are the seconds of a chunk in a replica, `driver_s` the driver's processor seconds for a chunk. Shares are
    of one processor, and of the replicas' time (`busy`). Megabytes are those that a process shares with no other.
    """

    replicas: int
    chunk_s: float
    driver_s: float
    driver_share: float
    chunks_per_s: float
    busy: float
    actor_mb: float
    gcs_share: float
    gcs_mb: float


class _Watch:
    """What a search has taken so far, twice a second: time, processor time of the driver and of Ray's head, chunks."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        (self._gcs,) = [child for child in _children() if child.name().startswith("gcs_server")]
        self.points: list[tuple[float, float, float, float]] = []
        self.actor_mb = self.gcs_mb = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if self.points and now - self.points[-1][0] < 0.5:
            return
        head = self._gcs.cpu_times()
        chunks = self._coordinator.num_samples_scored / CHUNK_SAMPLES
        self.points.append((now, time.process_time(), head.user + head.system, chunks))

    def weigh(self) -> None:
        """Take the memory of Ray's head and of a trial actor."""
        self.gcs_mb = self._gcs.memory_full_info().uss / 1e6
        actors = [child for child in _children() if child.name().startswith("ray::Evaluation")]
        self.actor_mb = fmean(actor.memory_full_info().uss / 1e6 for actor in actors[:8])


def _search(replicas: int) -> SearchTimes:
    from service.tune.ray_tune import run_evaluations

    num_trials = CHUNKS_PER_REPLICA * replicas
    plan, space, _ = search_of(replicas, "none", "random", num_trials)
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
        weighed = False

        def tick() -> None:
            nonlocal weighed
            watch()
            if not weighed and watch.points[-1][3] > CHUNKS_PER_REPLICA * replicas / 2:
                weighed = True
                watch.weigh()

        scorer = FakeScorer(sample_delay_s=CHUNK_S / CHUNK_SAMPLES)
        run_evaluations(
            coordinator, scorer, name="search", storage_dir=Path(directory) / "ray", concurrency=replicas, tick=tick
        )
        scored_s = [row.timings_s["score"] for row in store.evidence(study)]
        store.close()
    whole = CHUNKS_PER_REPLICA * replicas
    counted = [point for point in watch.points if 2 * replicas <= point[3] <= whole - replicas]
    (begin, driver_0, head_0, chunks_0), (end, driver_1, head_1, chunks_1) = counted[0], counted[-1]
    chunks, seconds = chunks_1 - chunks_0, end - begin
    chunk_s = fmean(scored_s)
    return SearchTimes(
        replicas=replicas,
        chunk_s=chunk_s,
        driver_s=(driver_1 - driver_0) / chunks,
        driver_share=(driver_1 - driver_0) / seconds,
        chunks_per_s=chunks / seconds,
        busy=chunks * chunk_s / (seconds * replicas),
        actor_mb=watch.actor_mb,
        gcs_share=(head_1 - head_0) / seconds,
        gcs_mb=watch.gcs_mb,
    )


def _checked(search: Mapping[str, Any], driver_s: float) -> dict[str, Any]:
    load = Load(search["replicas"], search["chunk_s"], in_flight=1, spread=0.0)
    simulated = simulate(load, ServiceTimes(driver_s, 0.0)).chunks_per_s
    measured = search["chunks_per_s"]
    difference = abs(simulated - measured) / measured
    return {"replicas": search["replicas"], "simulated": simulated, "measured": measured, "difference": difference}


def _controller(replicas: int) -> float:
    """Share of a processor that Serve's controller takes while so many replicas are idle."""
    with _ray(cpus=4), _idle_replicas(replicas):
        (controller,) = [child for child in _children() if child.name().startswith("ray::ServeContr")]
        before = controller.cpu_times()
        time.sleep(IDLE_S)
        after = controller.cpu_times()
    return (after.user + after.system - before.user - before.system) / IDLE_S


# -- the database ------------------------------------------------------------------------------------------------------


def _databases() -> dict[str, dict[str, float]]:
    """Seconds of what the driver stores for a chunk, by database, and the driver's processor seconds among them."""
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        found = {"SQLite": _stored(Path(directory), None)}
    for server in postgresql_server():
        url = server.migrated()
        found["PostgreSQL"] = _stored(Path(), url)
        server.drop(url)
    return found


def _stored(directory: Path, url: str | None) -> dict[str, float]:
    plan, space, _ = search_of(FITTED[0], "none", "random", STORED_CHUNKS)
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


def _times(driver_s: float, stored: Mapping[str, float], databases: Mapping[str, Mapping[str, float]]) -> ServiceTimes:
    """Service times with another database than SQLite, which the searches were measured with.

    SQLite works in the driver's process and has one writer: all that is stored for a chunk counts as the database's.
    Another database counts with what it takes beside the driver's own work.
    """
    rest_s = driver_s - databases["SQLite"]["driver_s"]
    if stored is databases["SQLite"]:
        return ServiceTimes(rest_s, stored["seconds"])
    return ServiceTimes(rest_s + stored["driver_s"], stored["seconds"] - stored["driver_s"])


# -- helpers -----------------------------------------------------------------------------------------------------------


def _line(points: Mapping[int, float]) -> Callable[[int], float]:
    """The line through two points."""
    (x0, y0), (x1, y1) = sorted(points.items())
    return lambda x: y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@contextmanager
def _ray(*, cpus: int) -> Iterator[None]:
    """A Ray of this process, whose workers have the priority of the driver, as they would on machines of their own."""
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
