"""Persistent cache of small results about files, such as hashes and whether weights are finite.

A record begins with the sha256 of its key and value. A damaged or incomplete record is ignored, so that its value is
computed again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from workers.directories import turn, write_file

__all__ = ["CACHE_VARIABLE", "cache_dir", "cached", "computing"]

log = logging.getLogger(__name__)

CACHE_VARIABLE = "MERGESEARCH_CACHE"


def cache_dir(cache: str | Path | None = None) -> Path:
    """The cache directory: `cache` if given, else $MERGESEARCH_CACHE, else mergesearch in the user's cache folder.

    The user's cache folder is $XDG_CACHE_HOME, or ~/.cache.
    """
    if cache is not None:
        return Path(cache)
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergesearch"


def cached(key: str, value: str | None = None, *, cache: str | Path | None = None) -> str | None:
    """Store `value` under `key` in the cache and return it; if `value` is None, return the stored value.

    Returns None if nothing is stored under `key`, or the stored file is damaged or incomplete. If the cache cannot be
    written, the value is returned without being stored. `cache` is the cache's directory, or None for the default
    (function `cache_dir`).
    """
    file = cache_dir(cache) / "records" / hashlib.sha256(key.encode()).hexdigest()
    if value is None:
        try:
            stated, end, found = file.read_bytes().decode().partition("\n")
        except (OSError, UnicodeDecodeError):
            return None
        return found if end and stated == _checksum(key, found) else None
    try:
        write_file(file, f"{_checksum(key, value)}\n{value}")
    except OSError:
        return value
    return value


@contextmanager
def computing(key: str, *, what: str, cache: str | Path | None = None) -> Iterator[None]:
    """Context manager in which one process at a time computes the value of `key`; the others wait.

    A process that has waited looks into the cache again before it computes the value. `what` names the value in logs
    and in the name of the lock. `cache` is the cache's directory, or None for the default (function `cache_dir`). If
    the lock cannot be made there, several processes may compute the value at the same time.
    """
    with ExitStack() as stack:
        try:
            digest = hashlib.sha256(key.encode()).hexdigest()[:16]
            stack.enter_context(turn(cache_dir(cache) / "turns" / f"{what[:64]}-{digest}"))
        except OSError as error:
            log.info("other processes may compute the same of %s at the same time: %s", what, error)
        yield


def _checksum(key: str, value: str) -> str:
    return hashlib.sha256(f"{key}\n{value}".encode()).hexdigest()
