"""A cache of small results about files, kept between runs: hashes, and whether weights are finite."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_dir", "cached"]

CACHE_VARIABLE = "MERGESEARCH_CACHE"


def cache_dir(cache: str | Path | None = None) -> Path:
    """The directory of the cache: `cache`, else $MERGESEARCH_CACHE, else the user's cache folder."""
    if cache is not None:
        return Path(cache)
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergesearch"


def cached(key: str, value: str | None = None, *, cache: str | Path | None = None) -> str | None:
    """Look up the value of `key`, None if there is none, or store `value`. An unwritable cache is not an error."""
    file = cache_dir(cache) / "findings" / hashlib.sha256(key.encode()).hexdigest()
    if value is None:
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError):
            return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(value)
        os.replace(temporary.name, file)
    except OSError:
        return value
    return value
