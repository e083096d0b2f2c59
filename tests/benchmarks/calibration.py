"""Speed of the machine, for comparing figures of different machines and times."""

from __future__ import annotations

import json
import time

__all__ = ["calibration_s"]


def calibration_s() -> float:
    """CPU seconds that this machine needs to decode a fixed JSON text."""
    text = json.dumps([{"number": n, "values": {"math": n / 7, "text": n / 11}} for n in range(1000)])
    start = time.process_time()
    for _ in range(200):
        json.loads(text)
    return time.process_time() - start
