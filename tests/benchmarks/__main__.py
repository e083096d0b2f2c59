"""`python -m tests.benchmarks [NAME ...]`: run bench_NAME.py, print its table, write .bench/NAME.json.

A benchmark module has `run()`, which measures and returns plain data, and `show(result)`, which prints it. Where that
data says `met: False`, a bar that does not depend on the machine was missed, and the exit status is 1.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
OUT = Path(".bench")


def main(names: list[str]) -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    if unknown := sorted(set(names) - set(known)):
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    OUT.mkdir(exist_ok=True)
    # A bar for each model that is loaded would bury what a benchmark says about its progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    status = 0
    for name in names or known:
        module = importlib.import_module(f"tests.benchmarks.bench_{name}")
        start = time.perf_counter()
        result = module.run()
        machine = {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
        document = {"benchmark": name, "machine": machine, "wall_clock_s": time.perf_counter() - start, **result}
        (OUT / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        module.show(result)
        print(f"written: {OUT / name}.json")
        status = status if result.get("met", True) else 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
