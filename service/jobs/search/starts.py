"""Messages about the phases in which engines start, for a driver that waits for the engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.jobs.heartbeat import ENGINE, Heartbeat
from workers.serving.start_phases import start_text

__all__ = ["LOOK_S", "telling_starts"]

LOOK_S = 2.0  # seconds between two looks at the phases of starts


@contextmanager
def telling_starts(application: str, heartbeat: Heartbeat, progressed: Callable[[str], None]) -> Iterator[None]:
    """Context in which the phases of starting replicas are reported whenever they change.

    `application` is the name of the Serve application with the replicas. `heartbeat` stores a text that says what the
    driver waits for, and the phases become part of this text. `progressed` is called with a line for logs at each
    change.
    """
    stop, told = threading.Event(), ""

    def look() -> None:
        nonlocal told
        while not stop.wait(LOOK_S):
            text = start_text(application)
            if text and text != told:
                told = text
                heartbeat.wait_for(f"{ENGINE}: {text}")
                progressed(f"Engines start: {text}")

    thread = threading.Thread(target=look, name="starts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
