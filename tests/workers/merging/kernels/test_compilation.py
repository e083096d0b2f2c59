"""Compiled code on disk is used only while all its sources are unchanged."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from workers.merging.kernels.compilation import MERGING, SOURCES, compiled, digest

ROOT = MERGING.parents[1]
COMPILERS = ("numba", "llvmlite", "workers.merging.kernels.compilation")


def module_file(name: str) -> Path | None:
    """The file of a module of this project; None for a package, a module of another project, or a name in a module."""
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return path if path.is_file() else None


def imported_by(source: Path) -> dict[str, set[str]]:
    """The modules that a file imports anywhere, each with the imported names."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{source}: relative import"
            for alias in node.names:
                if module_file(f"{node.module}.{alias.name}"):
                    found.setdefault(f"{node.module}.{alias.name}", set())
                else:
                    found.setdefault(node.module, set()).add(alias.name)
    return found


def defined_in(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def compiling() -> list[Path]:
    files = ROOT.glob("workers/**/*.py")
    return [file for file in files if any(name.startswith(COMPILERS) for name in imported_by(file))]


@pytest.mark.slow
def test_sources_include_all_imports() -> None:
    """The sources are the compiling modules and all that they import.

    A name that is compiled in must also be defined in the module that it is imported from, or a change of the module
    that defines it would pass unnoticed.
    """
    expected = set(compiling())
    for source in compiling():
        for module, names in imported_by(source).items():
            if module.split(".")[0] not in ("workers", "search_spaces", "service"):
                continue
            file = module_file(module)
            assert file is not None, f"{source} imports {names} from the package {module}; name the module"
            assert names <= defined_in(file), f"{source} imports {names} from {module}, which does not define them"
            expected.add(file)
    kernels = set((MERGING / "kernels").rglob("*.py"))
    assert expected - kernels == set(SOURCES) - kernels
    assert kernels <= set(SOURCES)


@pytest.mark.parametrize("changed", SOURCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_change_of_any_source_changes_the_digest(changed: Path, tmp_path: Path) -> None:
    copies = [Path(shutil.copy(source, tmp_path / f"{i}.py")) for i, source in enumerate(SOURCES)]
    assert digest(copies) == digest(SOURCES)
    copy = copies[SOURCES.index(changed)]
    copy.write_text(copy.read_text() + "\n")
    assert digest(copies) != digest(SOURCES)


PROBE = """
import numpy as np
from workers.merging.kernels.compilation import compiled
from workers.merging.kernels.elements import hashed

@compiled
def probe(i):
    return hashed(i, np.uint32(1), np.uint32(2))
"""
# Each line of the input begins a run of the program, in a process that has only libraries from the process before.
PROGRAM = """
import os, sys
from pathlib import Path
import numba, torch

def run():
    from workers.merging.kernels.probe import probe
    number, files = probe(7), Path(probe.stats.cache_path).glob("probe.probe*.nbc")
    print(number, len(list(files)), sum(probe.stats.cache_hits.values()), flush=True)

for line in sys.stdin:
    if (child := os.fork()) == 0:
        run()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("a run failed")
"""


@pytest.mark.slow
def test_compiled_code_of_another_version_is_not_used(tmp_path: Path) -> None:
    """A compiled function is loaded from disk until code that it uses changes, even a constant two modules away.

    The test runs on a copy of the packages.
    """
    for package in ("workers", "search_spaces"):
        ignored = shutil.ignore_patterns("__pycache__", "tiny_family")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "workers/merging/kernels/probe.py").write_text(PROBE)

    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )

    def run() -> tuple[int, int, int]:
        assert program.stdout is not None
        print("run", file=program.stdin, flush=True)
        number, num_files, hits = map(int, program.stdout.readline().split())
        return number, num_files, hits

    with program:
        number, num_files, hits = run()
        assert (num_files, hits) == (1, 0)
        assert run() == (number, 1, 1)
        masks = tmp_path / "workers/merging/masks.py"
        masks.write_text(re.sub("STEP = 0x9E3779B9", "STEP = 0x9E3779B1", masks.read_text()))
        changed, num_files, hits = run()
        assert changed != number
        assert (num_files, hits) == (2, 0)


def squared(number: int) -> int:
    return number * number


def test_simultaneous_compilations_keep_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that store code at the same time leave each signature with its own code.

    The second knows nothing of the first, as if it had looked before the first wrote, and stores its code between two
    writes of the first.
    """
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    first, second = (compiled(squared)._cache._cache_file for _ in range(2))  # type: ignore[attr-defined]
    monkeypatch.setattr(second, "_load_index", dict)
    write = first._save_data

    def write_after_the_second(name: str, data: object) -> None:
        second.save("second", "code of the second")
        write(name, data)

    monkeypatch.setattr(first, "_save_data", write_after_the_second)
    first.save("first", "code of the first")
    later = compiled(squared)._cache._cache_file  # type: ignore[attr-defined]
    assert later.load("first") == "code of the first"
    assert later.load("second") == "code of the second"
    later.flush()
    assert later.load("first") is None
