"""Analysis of the experts that a fine-tuning trained; the result is stored as an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from service.errors import Conflict
from service.jobs.heartbeat import Heartbeat
from service.results.training import analyse, stored_analysis
from service.store import JobWriter, Store
from service.types import EventKind
from workers.errors import InvalidModel, InvalidTask
from workers.file_access import FileAccess
from workers.training.finetuning.fleet import ANALYSIS, Pipeline

__all__ = ["store_analysis"]


def store_analysis(
    store: Store,
    writer: JobWriter,
    heartbeat: Heartbeat,
    pipeline: Pipeline,
    places: Mapping[str, Path],
    *,
    note: Callable[[str], None],
    access: FileAccess | None,
) -> None:
    """Analyse trained experts if the specification asks for an analysis, and store the result as an event.

    `pipeline` is the specification of the fine-tuning. `places` contains the experts' directories, keyed by alias.
    `writer` stores the event, and `heartbeat` gets the progress. The function does nothing if an earlier driver has
    stored the analysis. `note` is called with messages about the progress. `access` limits the files that may be read;
    None is no limit. Raises Conflict if the experts cannot be analysed.
    """
    if pipeline.analysis is None or stored_analysis(store, writer.job_id) is not None:
        return
    try:
        found = analyse(
            [(pipeline.experts, places)],
            samples=pipeline.analysis.samples,
            wudi=pipeline.analysis.wudi,
            note=note,
            progressed=heartbeat.progressed,
            access=access,
        )
    except (InvalidModel, InvalidTask) as error:
        raise Conflict(f"{ANALYSIS}: {error}") from error
    writer.add_event(EventKind.ANALYSIS, {**found})
