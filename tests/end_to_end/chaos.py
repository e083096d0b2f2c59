"""Injects faults into running studies in a seeded order, and compares their trials with those of undisturbed runs.

A fault kills or stops a process that works on studies. HTTP server, Ray, its jobs, Serve, the gradient actor and the
store are real; scores are those of fakes, unless the server is `mergesearch serve` itself. Studies run one after
another until all faults were injected. Between two faults, the running study has stored at least one chunk, or one step
of its searcher.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from search_spaces.study.file import load_study
from service.disk import DATABASE
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.store.steps import GradientStep, Step, UpdateStep
from service.types import JobState
from tests.end_to_end.memory_group import MemoryGroup, memory_group
from tests.end_to_end.server import Server, drivers, processes_of_ray, replicas, serving
from tests.end_to_end.studies import undisturbed, write_small_study
from tests.postgresql import PostgreSQL
from tests.service.tune.harness import trial_list

__all__ = [
    "GRADIENT_KILLS",
    "KILLS",
    "MEMORY",
    "STOPS",
    "kill_database",
    "on_the_server",
    "run_chaos",
    "stop_until_replaced",
]

# Results of a study, in the order of their numbers: those of its trials, and the steps of its searcher.
Results = list[tuple[Any, ...]]

RECOVERY_S = 300.0
DATABASE_AWAY_S = 2.0
POLL_S = 0.1

# The memory of a server and its Ray, the share of it above which Ray ends workers, and how much is filled at a time.
MEMORY_BYTES, MEMORY_SHARE, STEP_BYTES = 8 * 2**30, 0.75, 2**27

# The message that a raylet logs when its memory monitor has ended workers (Ray 2.60).
MEMORY_REPORT = "worker(s), kill details: Memory on the node"


def _kill_processes(find: Callable[[Server, str], Iterable[psutil.Process]]) -> Callable[[Server, str], bool]:
    def kill(server: Server, study: str) -> bool:
        found = list(find(server, study))
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(found)

    return kill


def _kill_server(server: Server, _: str) -> bool:
    server.kill()
    server.start()
    return True


def kill_database(postgresql: PostgreSQL) -> Callable[[Server, str], bool]:
    """Return the function that kills PostgreSQL, and starts it again after DATABASE_AWAY_S seconds."""

    def kill(*_: Any) -> bool:
        postgresql.kill()
        time.sleep(DATABASE_AWAY_S)
        postgresql.start()
        return True

    return kill


def _press_memory(group: MemoryGroup) -> Callable[[Server, str], bool]:
    """Return the function that fills memory until Ray's memory monitor has ended workers; False if it ended none."""

    def press(server: Server, _: str) -> bool:
        logs = Path(server.host.session_dir) / "logs"

        def num_reports() -> int:
            return sum(file.read_text(errors="replace").count(MEMORY_REPORT) for file in logs.glob("raylet*.out"))

        before = num_reports()
        return group.fill(lambda: num_reports() > before, step_bytes=STEP_BYTES, pause_s=POLL_S)

    return press


# Functions that kill each part; they return False if the part does not exist.
KILLS: Mapping[str, Callable[[Server, str], bool]] = {
    "driver": _kill_processes(lambda _, study: drivers(study)),
    "replica": _kill_processes(lambda server, _: replicas(server)),
    "trial actor": _kill_processes(lambda server, _: processes_of_ray(server, "ray::EvaluationTrainable")),
    "Serve controller": _kill_processes(lambda server, _: processes_of_ray(server, "ray::ServeController")),
    "server": _kill_server,
    "Ray head": _kill_processes(lambda server, _: processes_of_ray(server, "gcs_server")),
}

# The part whose kills are those of Ray's memory monitor, which ends workers when the node runs low on memory.
MEMORY = "memory"

# The same in studies that compute gradients.
GRADIENT_KILLS: Mapping[str, Callable[[Server, str], bool]] = {
    "driver": KILLS["driver"],
    "replica": KILLS["replica"],
    "gradient actor": _kill_processes(lambda server, _: processes_of_ray(server, "ray::GradientActor")),
}

# Parts that are stopped by SIGSTOP: their processes, and the kind of event that reports a replacement.
STOPS: Mapping[str, tuple[Callable[[Server, str], Iterable[psutil.Process]], str]] = {
    "driver": (lambda _, study: drivers(study), "attempt"),
    "replica": (lambda server, _: replicas(server), "replica"),
}


@dataclass
class _Studies:
    """The studies of one server, one at a time."""

    server: Server
    store: Store
    directory: Path
    file: Path
    undisturbed: Callable[[_Studies, int], Results]
    spaces: Sequence[Mapping[str, Any]] = ()
    kills: Mapping[str, Callable[[Server, str], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids: list[str] = []

    @property
    def current(self) -> str:
        """Id of the study at work; submits a new study if there is none."""
        if not self.ids or self.store.job(self.ids[-1]).state.is_finished:
            document = load_study(self.file_of(len(self.ids))).canonical()
            self.ids.append(self.server.submit(document))
        return self.ids[-1]

    def num_stored(self) -> int:
        return sum(len(self.store.evidence(study)) + len(self.store.steps(study)) for study in self.ids)

    def until_stored(self, number: int) -> None:
        """Wait until `number` more chunks or steps are stored, of any studies."""
        deadline, goal = time.monotonic() + RECOVERY_S, self.num_stored() + number
        while self.num_stored() < goal:
            study = self.current
            assert time.monotonic() < deadline, self.server.story(study)
            time.sleep(POLL_S)

    def kill(self, part: str, *, patience_s: float) -> bool:
        """Kill the part, or wait up to `patience_s` seconds for it to exist; False if it did not."""
        deadline = time.monotonic() + patience_s
        kill = {**KILLS, **GRADIENT_KILLS, **self.kills}[part]
        while not kill(self.server, self.current):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def differing(self) -> list[str]:
        """The studies whose trials differ from those of an undisturbed run, with the differences."""
        wrong = []
        for number, study in enumerate(self.ids):
            record = self.store.job(study)
            expected = self.undisturbed(self, number)
            found = results_of(self.store, study)
            if record.state is not JobState.COMPLETE or found != expected:
                pairs = zip(found, expected, strict=False)
                unequal = [(ours[0], str(ours[3]), ours[-1]) for ours, other in pairs if ours != other]
                wrong.append(f"{study} {record.state} {record.reason}; {len(unequal)} results differ: {unequal[:2]}")
        return wrong

    def file_of(self, number: int) -> Path:
        file = self.directory / f"study-{number}.yaml"
        if not file.exists():
            document = yaml.safe_load(self.file.read_text())
            document["name"] = f"chaos-{number}"
            document["search"]["seed"] = number
            if self.spaces:
                document["search_space"] = dict(self.spaces[number % len(self.spaces)])
            file.write_text(yaml.safe_dump(document))
        return file


def results_of(store: Store, study: str) -> Results:
    """Results of a study that a disturbed and an undisturbed run must have in common."""

    def without_seconds(step: Step) -> Step:
        if isinstance(step, GradientStep):
            return replace(step, result=replace(step.result, seconds=0.0))
        if isinstance(step, UpdateStep):
            return replace(step, result=replace(step.result, seconds=0.0))
        return step

    steps = [(without_seconds(step), "a step") for step in store.steps(study)]
    return [*trial_list(store, study), *steps]


def in_this_process(studies: _Studies, number: int) -> Results:
    """Results of a study run without a server, Ray or Tune: for searchers that compute no steps."""
    resolved = ResolvedStudy.of(studies.store.job(studies.ids[number]))
    return undisturbed(studies.file_of(number), studies.directory / f"alone-{number}", resolved=resolved)


def on_the_server(studies: _Studies, number: int) -> Results:
    """Results of a study run again on the same server, so that its gradients have as many threads."""
    document = load_study(studies.file_of(number)).canonical()
    study = studies.server.submit({**document, "name": f"alone-{number}"})
    studies.server.wait_until_ended(study, timeout_s=RECOVERY_S)
    return results_of(studies.store, study)


def run_chaos(
    directory: Path,
    *,
    kills: Sequence[str],
    stops: Sequence[str] = (),
    stop_s: float = 0.0,
    rungs: Sequence[int] = (20, 60, 180),
    max_trials: int = 24,
    write_study: Callable[..., Path] = write_small_study,
    undisturbed: Callable[[_Studies, int], Results] = in_this_process,
    spaces: Sequence[Mapping[str, Any]] = (),
    patience_s: float = 0.0,
    max_pause_s: float = 1.0,
    seed: int = 0,
    command: Sequence[str] = ("tests.benchmarks.fake_serve",),
    postgresql: PostgreSQL | None = None,
    **environment: Any,
) -> dict[str, Any]:
    """Kill the parts in `kills` and stop those in `stops`, in an order drawn from `seed`, while studies run.

    A stop lasts for `stop_s` seconds, and until an event reports that the part was replaced. Before each fault, a chunk
    or a step is stored, then up to `max_pause_s` seconds pass. A part that is to be killed and does not exist is waited
    for, for `patience_s` seconds. Where `kills` has MEMORY, the server and its Ray have a memory of their own
    (`memory_group`), which is filled until Ray ends workers.

    Each study has `rungs` and `max_trials`, and is written by `write_study`; `undisturbed` runs one again. Each study
    gets the next of `spaces`, by default the space that it is written with. `command` is the server's module and
    arguments, `environment` holds the settings of `tests.benchmarks.fake_serve` and `fake_job`, as JSON. The store is
    in `postgresql`, if that is given; then the part "database" can be killed, too.

    Returns the number of kills of each part, the studies, those that differ from an undisturbed run, how many gradients
    each one computed, and what was seen of each stop.
    """
    draw = random.Random(seed)
    faults = [*(f"kill {part}" for part in kills), *(f"stop {part}" for part in stops)]
    draw.shuffle(faults)
    (directory / "models").mkdir()
    file = write_study(directory / "models", name="chaos", rungs=rungs, max_trials=max_trials)
    started = time.monotonic()
    done: Counter[str] = Counter()
    seen: list[dict[str, Any]] = []
    settings = {name: json.dumps(value) for name, value in environment.items()}
    database = f"sqlite:///{directory / 'data' / DATABASE}"
    own_kills: dict[str, Callable[[Server, str], bool]] = {}
    launcher: Sequence[str] = ()
    if postgresql is not None:
        database = settings["MERGESEARCH_DATABASE"] = postgresql.migrated()
        own_kills["database"] = kill_database(postgresql)
    with ExitStack() as stack:
        if MEMORY in kills:
            group = stack.enter_context(memory_group(MEMORY_BYTES))
            launcher = group.launcher
            own_kills[MEMORY] = _press_memory(group)
            settings |= {"RAY_memory_usage_threshold": str(MEMORY_SHARE), "RAY_memory_monitor_refresh_ms": "100"}
        server = stack.enter_context(serving(command, directory / "data", environment=settings, launcher=launcher))
        store = Store(database, waits=True)
        studies = _Studies(server, store, directory, file, undisturbed, spaces, own_kills)
        for fault in faults:
            studies.until_stored(1)
            time.sleep(draw.uniform(0.0, max_pause_s))
            kind, part = fault.split(" ", 1)
            if kind == "stop":
                seen.append(stop_until_replaced(server, store, [studies.current], part, stop_s))
            elif studies.kill(part, patience_s=patience_s):
                done[part] += 1
        for study in studies.ids:
            server.wait_until_ended(study, timeout_s=RECOVERY_S)
        differing = studies.differing()
        gradients = [sum(isinstance(step, GradientStep) for step in store.steps(study)) for study in studies.ids]
        store.close()
        server.stop()
    return {
        "kills": dict(done),
        "stops": seen,
        "studies": len(studies.ids),
        "differing": differing,
        "gradients": gradients,
        "seconds": time.monotonic() - started,
    }


def stop_until_replaced(
    server: Server, store: Store, studies: Sequence[str], part: str, stop_s: float = 0.0
) -> dict[str, Any]:
    """Stop the processes of a part that work on any of the studies, and return what was seen of their replacement.

    The result has the number of seconds until an event reported the replacement (None: not within RECOVERY_S of
    `stop_s`), the number of stopped processes, and the number of those that still existed when they were continued.
    """
    find, kind = STOPS[part]
    study = next((study for study in studies if list(find(server, study))), studies[-1])
    before = _num_events(store, studies, kind)
    stopped = list(find(server, study))
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    started, told_after_s = time.monotonic(), None
    while (elapsed_s := time.monotonic() - started) < stop_s or (
        told_after_s is None and elapsed_s < stop_s + RECOVERY_S
    ):
        if told_after_s is None and _num_events(store, studies, kind) > before:
            told_after_s = elapsed_s
        time.sleep(POLL_S)
    left = 0
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
            left += 1
    return {"part": part, "stopped": len(stopped), "told_after_s": told_after_s, "left": left}


def _num_events(store: Store, studies: Sequence[str], kind: str) -> int:
    return sum(event.kind == kind for study in studies for event in store.events(study))
