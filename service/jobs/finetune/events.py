"""Events and progress of a stored fine-tuning, read from the histories that training workers write.

An event of the kind `training` has the step, losses and other numbers of an expert's last updates, or the results of an
evaluation. From the stored events, a new driver knows which lines of the histories are stored already, and continues
after them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from service.errors import StaleAttempt
from service.jobs.heartbeat import WORKERS, Heartbeat
from service.results.losses import PLURALS, is_at_offset
from service.schemas.api import ExpertProgressDocument
from service.store import JobWriter, Store
from service.types import EventKind
from workers.training.finetuning.history import LINEARIZED, METRICS, VALUES, HistoryReader

__all__ = ["storing_events"]

logger = logging.getLogger(__name__)

EVENTS_S = 2.0

# Losses in one event; more updates are reported as means over neighbours.
MAX_LOSSES = 10


@contextmanager
def storing_events(
    store: Store,
    writer: JobWriter,
    heartbeat: Heartbeat,
    places: Mapping[str, Path],
    *,
    spec_file: str,
    worker_file: str,
) -> Iterator[None]:
    """Context that stores new losses and evaluations of running trainings as events every 2 s.

    `places` contains the experts' directories, keyed by alias. `writer` stores the events, and `heartbeat` gets the
    progress. `spec_file` and `worker_file` are names of files in each expert's directory. The training writes
    `spec_file` when it starts, and its workers write `worker_file` when they start. While `worker_file` is missing, or
    older than `spec_file`, `heartbeat` reports that this process waits for workers.
    """
    history = _HistoryEvents(store, writer, heartbeat, places)
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            done.wait(EVENTS_S)
            try:
                is_waiting = any(_is_older(place / worker_file, place / spec_file) for place in places.values())
                if is_waiting:
                    heartbeat.progressed()
                heartbeat.wait_for(WORKERS if is_waiting and not done.is_set() else None)
                history.store_new()
            except StaleAttempt:  # the server stops this driver
                return
            except Exception:  # the next round tries again
                logger.exception("events of the training were not stored")

    thread = threading.Thread(target=run, name="events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _HistoryEvents:
    """Writer of events about new losses and evaluations in the training of experts.

    `places` contains the directory of each expert, keyed by alias. The directory has a history, a file to which the
    training adds a line for each update and each evaluation. The method `store_new` reads the new lines and stores them
    as events with `writer`. `heartbeat` gets the progress.
    """

    def __init__(self, store: Store, writer: JobWriter, heartbeat: Heartbeat, places: Mapping[str, Path]) -> None:
        self._writer, self._heartbeat = writer, heartbeat
        self._readers = {alias: HistoryReader(place / METRICS) for alias, place in places.items()}
        self._progress: dict[str, ExpertProgressDocument] = {}
        # Step of the last stored event of an expert: of its updates (False) and of its evaluations (True).
        self._stored = {(alias, is_value): 0 for alias in places for is_value in (False, True)}
        for event in store.events(writer.job_id, kinds=[EventKind.TRAINING]):
            self._stored[event.payload["expert"], "values" in event.payload] = event.payload["step"]

    def store_new(self) -> None:
        for alias, reader in self._readers.items():
            lines = reader.new()
            for is_value in (False, True):
                seen = self._stored[alias, is_value]
                new = [line for line in lines if ("values" in line) == is_value and line["step"] > seen]
                for payload in new if is_value else _summed(new):
                    self._writer.add_event(EventKind.TRAINING, {"expert": alias, **payload})
                    self._stored[alias, is_value] = payload["step"]
            if lines:
                self._progress[alias] = _progress(lines, before=self._progress.get(alias))
                self._heartbeat.progress = {"experts": dict(self._progress)}
                self._heartbeat.progressed()


def _summed(updates: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one event for several training `updates`: the last update, with all losses under the key "losses".

    This key has at most 10 pairs (step, loss), where a step is the number of an update. A pair represents several
    adjacent updates by the step of the last update and the mean of their losses. Losses that only some updates or some
    methods have, at the weights and at an offset, are in keys of their own. If there are no updates, no event is
    yielded.
    """
    if updates:
        event = dict(updates[-1])
        for name, plural in PLURALS.items():
            measured = [(update["step"], update[name]) for update in updates if name in update]
            size = -(-len(measured) // MAX_LOSSES) or 1
            groups = [measured[start : start + size] for start in range(0, len(measured), size)]
            if groups:
                event[plural] = [[group[-1][0], fmean(loss for _, loss in group)] for group in groups]
        yield event


def _progress(lines: Sequence[Mapping[str, Any]], *, before: ExpertProgressDocument | None) -> ExpertProgressDocument:
    update = next((line for line in reversed(lines) if "loss" in line), None)
    evaluation = next((line for line in reversed(lines) if VALUES in line), None)
    found: ExpertProgressDocument = before or {"step": 0, "steps": 0, "loss": 0.0, "seconds": 0.0, "values": {}}
    if update is not None:
        found = {
            **found,
            "step": update["step"],
            "steps": update.get("steps", 0),  # earlier versions wrote none
            "loss": update["loss"],
            "seconds": update["seconds"],
        }
        if is_at_offset(update):
            found["loss_at"] = "offset"
        measured = [line["weights_loss"] for line in lines if "weights_loss" in line]
        if measured:
            found["weights_loss"] = measured[-1]
    if evaluation is not None:
        found = {**found, "values": evaluation[VALUES]}
        if LINEARIZED in evaluation:
            found["linearized_values"] = evaluation[LINEARIZED]
    return found


def _is_older(file: Path, other: Path) -> bool:
    """Whether `other` exists, and `file` is missing or older than it."""
    try:
        time = other.stat().st_mtime_ns
        return not file.exists() or file.stat().st_mtime_ns < time
    except FileNotFoundError:
        return False
