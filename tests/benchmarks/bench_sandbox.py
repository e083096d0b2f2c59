"""Programs per second, and time of each, in the sandbox for generated code, compared with a plain process.

Each means of confinement is measured: bubblewrap and Landlock. The program is a solution of HumanEval's kind with its
tests. "each" is the median of programs that run one at a time, in turns with a plain process, which is `python -c` and
starts an interpreter each time. "a second" runs as many at a time as there are cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from workers.evaluation.available_confinement import MEANS, lack_of
from workers.evaluation.confinement import Confinement
from workers.evaluation.execution import Executor

TURNS = 50
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
    found = [_measured(means) for means in MEANS]
    measured = [each for each in found if "lack" not in each]
    return {
        "means": found,
        "cores": len(os.sched_getaffinity(0)),
        "met": bool(measured) and all(each["beyond_ms"] <= MOST_BEYOND_MS for each in measured),
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['cores']} cores")
    for each in result["means"]:
        if "lack" in each:
            print(f"{each['name']}: not here: {each['lack']}")
        else:
            print(
                f"{each['enforced']}: each {each['each_ms']:.1f} ms, plain {each['plain_ms']:.1f} ms, "
                f"{each['a_second']:.0f} programs a second"
            )


def _measured(means: type[Confinement]) -> dict[str, Any]:
    if lack := lack_of(means().of_program(0)):
        return {"name": means.__name__, "lack": lack}
    executor = Executor(confinement=means)
    try:
        assert executor.run([PROGRAM] * 10) == [None] * 10
        turns = [
            (
                _ms(lambda: executor.run([PROGRAM])),
                _ms(lambda: subprocess.run([sys.executable, "-c", PROGRAM], check=True)),
            )
            for _ in range(TURNS)
        ]
        started = time.perf_counter()
        outcomes = executor.run([PROGRAM] * PROGRAMS)
        a_second = PROGRAMS / (time.perf_counter() - started)
    finally:
        executor.close()
    assert outcomes == [None] * PROGRAMS
    each, plain = (statistics.median(times) for times in zip(*turns, strict=True))
    return {
        "name": means.__name__,
        "enforced": executor.enforced,
        "each_ms": each,
        "plain_ms": plain,
        "beyond_ms": each - plain,
        "a_second": a_second,
    }


def _ms(execute: Callable[[], object]) -> float:
    started = time.perf_counter()
    execute()
    return 1000 * (time.perf_counter() - started)
