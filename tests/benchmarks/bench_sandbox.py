"""Programs in the sandbox for generated code, a second and each, against a plain process that runs no sandbox.

The program is a solution of HumanEval's kind with its tests. "each" is the median of programs that run one at a time;
"a second" runs as many at a time as there are cores. "plain" is `python -c`, which starts an interpreter each time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from workers.evaluation.execution import Executor

PROGRAMS = 200
# Milliseconds of a program in the sandbox beyond those of a plain process: must.
MOST_BEYOND_MS = 100.0

PROGRAM = """
def primes(n):
    return [k for k in range(2, n) if all(k % d for d in range(2, int(k**0.5) + 1))]

def check(candidate):
    assert candidate(10) == [2, 3, 5, 7]
    assert len(candidate(1000)) == 168

check(primes)
"""


def run() -> dict[str, Any]:
    executor = Executor()
    try:
        assert executor.run([PROGRAM] * 10) == [None] * 10
        each = _median_ms(lambda: executor.run([PROGRAM]))
        plain = _median_ms(lambda: subprocess.run([sys.executable, "-c", PROGRAM], check=True))
        started = time.perf_counter()
        outcomes = executor.run([PROGRAM] * PROGRAMS)
        a_second = PROGRAMS / (time.perf_counter() - started)
    finally:
        executor.close()
    return {
        "each_ms": each,
        "plain_ms": plain,
        "a_second": a_second,
        "cores": len(os.sched_getaffinity(0)),
        "enforced": executor.enforced,
        "met": outcomes == [None] * PROGRAMS and each - plain <= MOST_BEYOND_MS,
    }


def show(result: dict[str, Any]) -> None:
    print(f"confined by {result['enforced']}; {result['cores']} cores")
    print(f"each: {result['each_ms']:.1f} ms in the sandbox, {result['plain_ms']:.1f} ms plain")
    print(f"{result['a_second']:.0f} programs a second")


def _median_ms(execute: Callable[[], object]) -> float:
    times = []
    for _ in range(50):
        started = time.perf_counter()
        execute()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)
