"""Work of SQLite, counted in steps of its virtual machine, which grow with the rows that are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import event

from service.store import Store

__all__ = ["num_steps"]

GRAIN = 10


def num_steps(store: Store, call: Callable[[], object]) -> int:
    """Number of steps that SQLite takes for the queries of `call`."""
    count = 0

    def step() -> int:
        nonlocal count
        count += GRAIN
        return 0

    def watch(connection: Any, *_: object) -> None:
        connection.set_progress_handler(step, GRAIN)

    event.listen(store.engine, "checkout", watch)
    try:
        call()
    finally:
        event.remove(store.engine, "checkout", watch)
        with store.engine.connect() as connection:
            connection.connection.driver_connection.set_progress_handler(None, 0)  # type: ignore[union-attr]
    return count
