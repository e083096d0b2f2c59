"""Speed of the machine, to compare figures of different machines and hours by."""

from __future__ import annotations

import json
import time

__all__ = ["calibration_s"]


def calibration_s() -> float:
    """CPU seconds in which this machine decodes a fixed text of JSON."""
    text = json.dumps([{"number": n, "values": {"math": n / 7, "text": n / 11}} for n in range(1000)])
    start = time.process_time()
    for _ in range(200):
        json.loads(text)
    return time.process_time() - start
