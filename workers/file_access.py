"""Access control for studies that are sent over HTTP: the directories and URLs that they may read, and their judges.

This module opens no file. All code that opens a file which a study names asks this module first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from workers.object_store import is_object_url, object_url_problem

__all__ = ["DATABASE_URL", "FileAccess"]

# File in a server's data directory that may hold a password: no study may read it.
DATABASE_URL = "database.url"


@dataclass(frozen=True)
class FileAccess:
    """Permissions of a study: the directories and object-store folders it may read, and the judges it may query.

    Symbolic links are resolved before a path is compared with a directory.

    - `readable`: absolute directories; files below them may be read
    - `trusted`: absolute directories; files below them may be read, and task files below them may name Python functions
    - `urls`: folders in object stores; models and files below them may be read
    - `judges`: the URLs of endpoints with a language model that may judge completions
    - `closed`: directories below which no file may be read, except below a directory of `readable` or `trusted` that is
      itself inside the closed one
    """

    readable: tuple[str, ...]
    trusted: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    judges: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> FileAccess:
        """Create the object from a stored document, which `dataclasses.asdict` has made from an object of this class.

        A document of an earlier version may lack fields; missing fields have their defaults.
        """
        return cls(**{name: tuple(values) for name, values in document.items()})

    def allowing(self, places: Iterable[str]) -> Self:
        """Copy of this object that also allows `places`: directories and URLs that the service wrote to."""
        added = [place for place in places if place not in (*self.readable, *self.urls)]
        urls = tuple(filter(is_object_url, added))
        directories = tuple(place for place in added if place not in urls)
        return replace(self, readable=(*self.readable, *directories), urls=(*self.urls, *urls))

    def refusal(self, path: str | Path) -> str | None:
        """Reason why the file or directory `path` may not be read; None if it may be read.

        The directories in the fields `readable` and `trusted` may be read with all below them, except the directories
        in the field `closed` with all below them. If a directory of `readable` or `trusted` is itself below a closed
        directory, it may be read. The file `database.url`, which may hold the password of the server's database, is
        refused in any directory. A URL is checked by the method `url_refusal`.
        """
        if is_object_url(str(path)):
            return self.url_refusal(str(path))
        if os.path.basename(os.path.realpath(path)) == DATABASE_URL:
            return f"{path}: may hold the password of the server's database, which no study may read"
        opened = (*self.readable, *self.trusted)
        for closed in self.closed:
            if _is_below(path, [closed]):
                opened = tuple(
                    place for place in opened if _is_below(os.path.dirname(os.path.realpath(place)), [closed])
                )
        if _is_below(path, opened):
            return None
        if len(opened) < len(self.readable) + len(self.trusted):
            return f"{path}: is among the server's own files, which studies may not name by their paths"
        return (
            f"{path}: is not below a directory that studies may read ({', '.join((*self.readable, *self.trusted))}; "
            "symbolic links are followed); the server's operator can add its directory with --allow-dir"
        )

    def refusal_of_all(self, path: str | Path) -> str | None:
        """Reason why the directory `path` or an entry of it may not be read; None if all entries may be read.

        Entries are checked one by one because they may be links to other places. A URL, whose entries are no links, is
        checked by the method `url_refusal`.
        """
        if is_object_url(str(path)):
            return self.url_refusal(str(path))
        return next(filter(None, map(self.refusal, _with_entries(path))), None)

    def url_refusal(self, url: str) -> str | None:
        """Reason why the model or file at `url`, in an object store, may not be read; None if it may be read.

        The URL may be read if it is one of the URLs in the field `urls` or below one of them, has no part `.` or `..`,
        and is valid (function `object_url_problem`).
        """
        if problem := object_url_problem(url):
            return problem
        parts = url.partition("://")[2].split("/")
        is_below = any(f"{url.rstrip('/')}/".startswith(f"{allowed.rstrip('/')}/") for allowed in self.urls)
        if is_below and not {".", ".."} & {*parts}:
            return None
        return (
            f"{url}: is not below a URL that studies may read ({', '.join(self.urls) or 'there is none'}); the "
            "server's operator can add its folder with --allow-url"
        )

    def judge_refusal(self, url: str) -> str | None:
        """Reason why no request may be sent to the judge at `url`; None if the field `judges` lists this URL.

        A judge is a language model, on an HTTP server, that compares answers.
        """
        if url.rstrip("/") in [allowed.rstrip("/") for allowed in self.judges]:
            return None
        return (
            f"{url}: is not the URL of a judge that studies may ask ({', '.join(self.judges) or 'there is none'}); the "
            "server's operator can add it with --allow-judge"
        )

    def distrust(self, directory: str | Path) -> str | None:
        """Reason why Python functions that task files in `directory` name must not run; None if they may run.

        The functions may run if the directory is in the field `trusted` or below a directory of this field, and is not
        below a directory of the field `closed`.
        """
        if _is_below(directory, self.trusted) and not _is_below(directory, self.closed):
            return None
        return (
            f"{directory}: its task files name Python functions (!function), which are run only from directories that "
            f"the server's operator trusts with --trust-dir ({', '.join(self.trusted) or 'none so far'})"
        )


def _is_below(path: str | Path, roots: Iterable[str]) -> bool:
    place = Path(os.path.realpath(path))
    return any(place.is_relative_to(os.path.realpath(root)) for root in roots)


def _with_entries(path: str | Path) -> Iterator[Path]:
    path = Path(path)
    yield path
    with suppress(OSError):  # not a directory, which opening it reports
        yield from sorted(path.iterdir())
