"""Tables in the docs, made from arms on file: `python -m tests.benchmarks tables` writes them.

A table stands in a page between `<!-- table: BENCHMARK NAME -->` and `<!-- end of table -->`. NAME is a key of `TABLES`
in the benchmark's module. A line below the table gives the commits whose code produced its arms. A table with an arm
that is not on file is left as it is; that line says since which commit its figures have been recorded.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.arms import NotKept, files_alone

__all__ = ["BLOCK", "NOT_KEPT", "declared", "pages", "rendered", "write_all", "written"]

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- table: (\w+) (\S+) -->\n(.*?)^<!-- end of table -->$", re.MULTILINE | re.DOTALL)
NOT_KEPT = re.compile(r"^Recorded at (`[0-9a-f]{7}`(, | and )?)+; arms not kept\.$", re.MULTILINE)


def declared() -> Iterator[tuple[str, str]]:
    """Benchmark and name of every table that benchmarks declare."""
    for file in sorted(Path(__file__).parent.glob("bench_*.py")):
        if "\nTABLES" in file.read_text():
            benchmark = file.stem.removeprefix("bench_")
            yield from ((benchmark, name) for name in _module(benchmark).TABLES)


def _module(benchmark: str) -> Any:
    return importlib.import_module(f"tests.benchmarks.bench_{benchmark}")


def pages() -> Iterator[Path]:
    """Pages of the docs that may have tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def rendered(benchmark: str, name: str) -> str | None:
    """Content of a table's block, made from the arms on file; None if an arm is missing."""
    try:
        with files_alone() as commits:
            table = _module(benchmark).TABLES[name]()
    except NotKept:
        return None
    code = " and ".join(f"`{commit}`" for commit in sorted(commits))
    return f"{table}\n\nMade from the arms in `tests/benchmarks/results`, measured with the code of {code}.\n"


def written(text: str) -> str:
    """A page's text in which each table is made again, if all of its arms are on file."""

    def block(match: re.Match[str]) -> str:
        benchmark, name, content = match.groups()
        made = rendered(benchmark, name)
        return f"<!-- table: {benchmark} {name} -->\n{content if made is None else made}<!-- end of table -->"

    return BLOCK.sub(block, text)


def write_all() -> list[str]:
    """Write the tables of all pages; return the names of those that have arms missing."""
    missing = []
    for page in pages():
        text = page.read_text()
        page.write_text(written(text))
        missing += [f"{b} {n}" for b, n, _ in BLOCK.findall(text) if rendered(b, n) is None]
    return missing
