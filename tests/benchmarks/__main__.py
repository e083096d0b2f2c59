"""`python -m tests.benchmarks NAME ...`: run bench_NAME.py, print its tables, write .bench/NAME.json.

`all` runs every benchmark, `tables` writes the tables in docs from the arms in tests/benchmarks/results, and without a
name the benchmarks are listed. A benchmark module has `run()`, which measures and returns plain data, and
`show(result)`, which prints the data. If the data contain `met: False`, a bar that does not depend on the machine was
missed, and the exit status is 1.
"""

from __future__ import annotations

import ast
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
    if names == ["tables"]:
        return write_tables()
    if names == ["all"]:
        names = known
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        print(f"no benchmark {', '.join(unknown)}" if unknown else "name at least one benchmark", file=sys.stderr)
        print(f"usage: python -m tests.benchmarks NAME ... | all | tables\n\n{listing(known)}", file=sys.stderr)
        return 2
    OUT.mkdir(exist_ok=True)
    # A bar for each model that is loaded would bury what a benchmark says about its progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    status = 0
    for name in names:
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


def listing(known: list[str]) -> str:
    """List of all benchmarks, one per line: the name, and the first line of the module's docstring."""
    width = max(map(len, known))
    return "\n".join(f"  {name:<{width}}  {first_line(HERE / f'bench_{name}.py')}" for name in known)


def first_line(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def write_tables() -> int:
    from tests.benchmarks.tables import write_all

    if missing := write_all():
        print(f"left as they are, for want of arms: {', '.join(missing)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
