"""Chromium without a window, if it is installed: the content of a page after its scripts have run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["browser_path", "has_browser", "shown"]

# The first one, in Debian's package of this name, has no user interface, and takes a quarter less processor time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def browser_path() -> str | None:
    """Path of Chromium, None if it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def has_browser() -> bool:
    """Whether tests may open pages: Chromium is installed, or this is CI, where they fail without it."""
    return browser_path() is not None or bool(os.environ.get("CI"))


def shown(url: str, directory: Path, *, budget_ms: int = 5000) -> str:
    """The document at `url` after its scripts have run for `budget_ms` of the page's own time.

    `directory` is that of the browser's profile.
    """
    browser = browser_path()
    assert browser is not None, "Chromium is not installed (Debian: apt-get install chromium)"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
    place = [f"--user-data-dir={directory}", f"--virtual-time-budget={budget_ms}", "--dump-dom"]
    command = [browser, *options, *place, url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
