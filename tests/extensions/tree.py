"""A copy of the repository to extend: tests add and edit files, and run Python in the copy in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from workers.cache import CACHE_VARIABLE

__all__ = ["Tree"]

ROOT = Path(__file__).parents[2]
COPIED = ("service", "workers", "search_spaces", "tests", "docs", "deploy", ".github")
TIMEOUT_S = 300


@dataclass
class Tree:
    """Copy of the repository in `root`, a new directory. `changed` has the added and edited files, in their order."""

    root: Path
    changed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in COPIED:
            # With compiled modules, which stay valid, but for those that another process is writing; without the
            # packages with which the web page is built, which are 280 MB.
            ignored = shutil.ignore_patterns("*.tmp.*", "*.pyc.*", "node_modules")
            shutil.copytree(ROOT / name, self.root / name, ignore=ignored)
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy2(file, self.root)
        # Its tests share what vLLM said before, as these tests do (`tests/conftest.py`): asking takes 12 s.
        cache = self.root / ".pytest_cache"
        cache.mkdir()
        (cache / "d").symlink_to(Path(os.environ[CACHE_VARIABLE]).parent)

    def write(self, path: str, text: str) -> None:
        """Add a file. Raises FileExistsError if it is there."""
        with (self.root / path).open("x") as file:
            file.write(text)
        self._touched(path)

    def insert(self, path: str, text: str, *, before: str = "", after: str = "") -> None:
        """Insert lines before or after the only line that matches a pattern."""
        file = self.root / path
        found = list(re.finditer(rf"^{before or after}\n", file.read_text(), re.MULTILINE))
        assert len(found) == 1, f"{path}: {len(found)} lines match {before or after!r}"
        place = found[0].start() if before else found[0].end()
        file.write_text(file.read_text()[:place] + text + file.read_text()[place:])
        self._touched(path)

    def append(self, path: str, text: str) -> None:
        """Add lines to the end of a file."""
        with (self.root / path).open("a") as file:
            file.write(text)
        self._touched(path)

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace the only occurrence of a text."""
        file = self.root / path
        assert file.read_text().count(old) == 1, f"{path}: not one occurrence of {old!r}"
        file.write_text(file.read_text().replace(old, new))
        self._touched(path)

    def run(self, script: str) -> str:
        """Run a Python script in the copy, and return what it printed."""
        return self._ran("-c", script)

    def test(self, *arguments: str) -> None:
        """Run tests of the copy; all must pass, and at least one must run."""
        self._ran("-m", "pytest", "-q", *arguments)

    def _ran(self, *arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(self.root)}
        ran = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def _touched(self, path: str) -> None:
        if path not in self.changed:
            self.changed.append(path)
