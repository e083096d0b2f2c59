"""Importances of the parameters of studies, computed in a separate process with limits of time and memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import anyio.to_thread

from search_spaces.objectives import Objective
from service.api.limits.fair_queue import FairQueue
from service.api.problems import Unavailable
from service.api.record_cache import RunRecords, Version
from service.results.importance import (
    MIN_TRIALS,
    ImportancePlot,
    importance_columns,
    importance_json,
    importance_plot,
    importances,
    missing_plot,
    scored_trials,
)
from service.store import Store
from service.types import JobRecord, TrialResult
from service.worker_process import CallLimits, LimitExceeded, ProcessDied, WorkerProcess

__all__ = ["Importances"]

# Limits of one computation.
TIME_S = 60.0
LIMITS = CallLimits(cpu_s=60, memory_bytes=2 * 2**30)

# Most waiting requests of one client, and most clients with waiting requests.
MAX_WAITING = 8
MAX_CLIENTS = 32

# Plots that are kept; one has about 20 KB.
MAX_PLOTS = 64


class Importances:
    """Computes the importances of the parameters of studies in a separate process, one study at a time.

    The process starts at the first computation. The plot of the importances is kept until the study changes. If a
    computation reached a limit of time or memory, the next request for the plot computes the importances again. An
    instance is bound to one asyncio event loop.
    """

    def __init__(self, store: Store, records: RunRecords, *, time_s: float = TIME_S) -> None:
        self._store = store
        self._records = records
        self._time_s = time_s
        self._process = WorkerProcess("importances", warm_up=_warm_up)
        self._queue = FairQueue(1, max_waiting=MAX_WAITING, max_clients=MAX_CLIENTS)
        self._plots: OrderedDict[tuple[str, Version, str], bytes] = OrderedDict()

    def stop(self) -> None:
        self._process.stop()

    async def plot(self, study: JobRecord, objective: Objective, *, client: str = "") -> tuple[bytes, bool]:
        """Compute the plot of the importances of a study's parameters for one objective, as JSON.

        `client` names the sender of the request, so that many requests of one client do not delay other clients'
        requests. Returns the plot, and whether it is final. The plot is not final if the computation reached a limit of
        time or memory: a later request may then get another plot. Raises Unavailable if the process that computes has
        died, or if too many requests wait.
        """
        version = await anyio.to_thread.run_sync(self._records.version, study.id)
        key = (study.id, version, objective.name)
        if key not in self._plots:
            async with self._queue.turn(client):
                if key not in self._plots:  # an earlier request may have computed it
                    try:
                        self._plots[key] = importance_json(await self._computed(study, objective, version))
                    except _LimitReached as error:
                        plot = missing_plot(objective.name, str(error), num_trials=error.num_trials)
                        return importance_json(plot), False
        found = self._plots[key]
        self._plots.move_to_end(key)
        while len(self._plots) > MAX_PLOTS:
            self._plots.popitem(last=False)
        return found, True

    async def _computed(self, study: JobRecord, objective: Objective, version: Version) -> ImportancePlot:
        trials, configurations = await self._read(study, objective, version)
        count = len(trials)
        if count < MIN_TRIALS:
            reason = f"{count} trials at full budget have a configuration; importances need {MIN_TRIALS}"
            return missing_plot(objective.name, reason, num_trials=count)
        columns = await anyio.to_thread.run_sync(importance_columns, trials, configurations, objective.name)
        try:
            found = await self._process.call(
                importances, columns, objective.name, objective.direction, timeout_s=self._time_s, limits=LIMITS
            )
        except (TimeoutError, LimitExceeded) as error:
            raise _LimitReached(
                f"the computation takes more than {self._time_s:g} s or its limit of memory", num_trials=count
            ) from error
        except ProcessDied as error:
            raise Unavailable(f"the importances could not be computed ({error}); try again") from error
        return importance_plot(study, objective, found, num_trials=count, num_used=len(columns["state"]))

    async def _read(
        self, study: JobRecord, objective: Objective, version: Version
    ) -> tuple[list[TrialResult], Mapping[int, Mapping[str, Any]]]:
        """Read the trials that have a value of `objective` and a configuration, and the configurations by trial number.

        The data have at least the changes up to `version`.
        """
        scored = scored_trials(await self._records.trials(study.id, since=version), objective.name)
        numbers = {trial.number for trial in scored}
        configurations = await anyio.to_thread.run_sync(self._store.configurations, study.id, numbers)
        return [trial for trial in scored if trial.number in configurations], configurations


class _LimitReached(Exception):
    """Raised if importances of `num_trials` trials take more than the limit of time or memory."""

    def __init__(self, reason: str, *, num_trials: int) -> None:
        super().__init__(reason)
        self.num_trials = num_trials


# Run in the separate process.


def _warm_up() -> None:
    import optuna.importance

    del optuna
