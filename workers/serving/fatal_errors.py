"""Search of a replica's error log for the fatal signal that ended its process, as reported by Ray or Python."""

from __future__ import annotations

import logging
import re
import time

from workers.serving.current_chunk import CurrentChunk

__all__ = ["fatal_error"]

log = logging.getLogger(__name__)

# Ray's report comes first. Its reports of SIGTERM are ignored, because that signal comes from outside.
REPORT = re.compile(r"\*\*\* (SIG(?:SEGV|BUS|ILL|FPE|ABRT|TRAP) received)|(Fatal Python error: .+)")
# The end of the error log that is searched; the stack traces of all threads follow the report's first line.
MAX_BYTES = 1 << 20
# The end of a process may be known before its report is complete.
WAIT_S = 5.0
# Seconds that the node may take to start a process that reads the log.
READ_S = 30.0


def fatal_error(current: CurrentChunk) -> str | None:
    """Report of the fatal signal that ended a replica, such as "Fatal Python error: Segmentation fault".

    `current` says which samples the replica began to score last, and names the replica's log and node. Returns None if
    there is no report, for example after SIGKILL, and if the log cannot be read, for example because its node is gone.
    A Ray task on the replica's node reads the log, so that no dashboard is needed.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not (current.node and current.error_log):
        return None
    reading = (
        ray.remote(find_report)
        .options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(current.node, soft=False)
        )
        .remote(current.error_log, WAIT_S)
    )
    try:
        report: str | None = ray.get(reading, timeout=WAIT_S + READ_S)
    except (OSError, RayError) as error:
        if isinstance(error, GetTimeoutError):
            ray.cancel(reading, force=True)
        log.warning("the error log of %s was not read: %s", current.replica, error)
        return None
    return report


def find_report(error_log: str, wait_s: float) -> str | None:
    """Last report of a fatal signal in the file `error_log`; None if none appears within `wait_s` seconds.

    The report may be written shortly after the process has ended. Raises OSError if the file cannot be read.
    """
    deadline = time.monotonic() + wait_s
    while True:
        with open(error_log, "rb") as file:
            file.seek(max(file.seek(0, 2) - MAX_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
        report = next(filter(None, map(REPORT.match, reversed(lines))), None)
        if report is not None:
            return report[1] or report[2]
        if time.monotonic() > deadline:
            return None
        time.sleep(0.5)
