"""Objects in S3, Google Cloud Storage and compatible stores, addressed by URL through fsspec.

Credentials, regions and endpoints come from the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, ...); URLs never contain them. The drivers s3fs and gcsfs are optional packages.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "SCHEMES",
    "ObjectInfo",
    "ObjectStore",
    "ObjectStoreError",
    "blob_at",
    "blob_path",
    "blobs_in",
    "is_object_url",
    "object_url_problem",
]

# Schemes of URLs, each with the extra of this package that installs its driver.
SCHEMES: Mapping[str, str] = {"s3": "s3", "gs": "gs"}

# Files of more than twice this size are sent in parts of this size.
PART_BYTES = 32 * 2**20

# A file that is stored by its sha256: FOLDER/blobs/ab/cdef..., where abcdef... is the sha256.
_BLOB = re.compile(r"([^\s\"']+)/blobs/([0-9a-f]{2})/([0-9a-f]{62})(?![0-9a-f/])")

# Bytes that `ObjectStore.open` reads with one request.
BLOCK_BYTES = 8 * 2**20


class ObjectStoreError(OSError):
    """Raised if an object store refuses an operation or does not answer.

    The message names the URL, the operation and the store's answer.
    """


@dataclass(frozen=True)
class ObjectInfo:
    """Facts about an object: its size in bytes, the time of its last write, and the store's version tag.

    The time `modified_at` is in seconds since the epoch. The version tag `tag` changes whenever the object's content
    changes. The tag is not a hash of the content.
    """

    num_bytes: int
    modified_at: float
    tag: str


def is_object_url(text: str) -> bool:
    """Whether `text` is the URL of an object store, such as s3://bucket/folder."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def object_url_problem(url: str) -> str | None:
    """Reason why `url` cannot be used as the URL of an object store; None if it can be used.

    The URL cannot be used if it is not the URL of an object store, or if it contains credentials, white space, a quote
    or a control character. It also cannot be used if it contains "::", because the part after "::" could be taken for
    another URL.
    """
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    if scheme not in SCHEMES or not bucket:
        return f"{url!r}: is no URL of an object store; expected {' or '.join(f'{s}://BUCKET/FOLDER' for s in SCHEMES)}"
    if "@" in bucket:
        return (
            f"{scheme}://***@{bucket.rpartition('@')[2]}: credentials do not belong in a URL; set them in the "
            "environment, as the store's own tools read them"
        )
    if "::" in url or any(char.isspace() or not char.isprintable() or char in "\"'" for char in url):
        return f"{url!r}: has white space, a quote, a control character or '::'; use the URL of a folder without these"
    return None


def blob_path(digest: str) -> str:
    """Path, in an object store, of the content-addressed file with the sha256 `digest` (hex)."""
    return f"blobs/{digest[:2]}/{digest[2:]}"


def blob_at(url: str) -> tuple[str, str] | None:
    """Store's URL and sha256 (hex) of the content-addressed file that `url` names; None for other URLs."""
    found = _BLOB.fullmatch(url)
    return None if found is None else (found[1], found[2] + found[3])


def blobs_in(text: str) -> list[tuple[str, str]]:
    """Find the URLs of content-addressed files in `text`, each as its store's URL and its sha256 (hex)."""
    return [(found[1], found[2] + found[3]) for found in _BLOB.finditer(text)]


class ObjectStore:
    """Objects of an S3 or compatible store below one URL; paths of objects are relative to the URL.

    Every process and thread may use the object. Creating the object reads nothing from the store. Every method raises
    ObjectStoreError if the store does not answer or refuses the operation, and FileNotFoundError if the object or
    bucket does not exist.

    Raises:
        ValueError: The URL is not the URL of an object store, holds credentials, or has characters that are refused.
        ObjectStoreError: The package that is needed for URLs of this scheme is not installed.
    """

    def __init__(self, url: str) -> None:
        if problem := object_url_problem(url):
            raise ValueError(problem)
        self.url = url.rstrip("/")
        self._fs, self._root = _file_system(self.url)

    def read(self, path: str, *, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes from `start` to `stop` - 1 of the object at `path`.

        If `start` is None, the bytes begin with the object's first byte; if `stop` is None, they end with its last
        byte.
        """
        with self._asking("read", path):
            content: bytes = self._fs.cat_file(self._key(path), start=start, end=stop)
        return content

    def write(self, path: str, content: bytes) -> None:
        """Store `content` as the object at `path`; an existing object of this path is replaced."""
        with self._asking("write", path):
            self._fs.pipe_file(self._key(path), content)

    def create(self, path: str, content: bytes) -> bool:
        """Store `content` as a new object at `path`, and return True; return False if the object exists already.

        The store checks and writes in one step (a conditional put), so of several writers exactly one succeeds.
        """
        try:
            with self._asking("create", path):
                self._fs.pipe_file(self._key(path), content, mode="create")
        except FileExistsError:
            return False
        return True

    def upload(self, file: Path, path: str) -> None:
        """Store `file` as the object at `path`, in several parts if it is large.

        The object appears only when it is complete.
        """
        with self._asking("write", path):
            self._fs.put_file(str(file), self._key(path), chunksize=PART_BYTES)

    def download(self, path: str, file: Path) -> None:
        """Write the object at `path` to the new file `file`."""
        with self._asking("read", path):
            self._fs.get_file(self._key(path), str(file))

    def open(self, path: str) -> BinaryIO:
        """Open the object at `path` for sequential reading; blocks are fetched as they are read."""
        with self._asking("read", path):
            stream: BinaryIO = self._fs.open(self._key(path), "rb", block_size=BLOCK_BYTES, cache_type="readahead")
        return stream

    def info(self, path: str) -> ObjectInfo | None:
        """Size, last write time and version tag of the object at `path`; None if it does not exist."""
        try:
            with self._asking("look up", path):
                return _info(self._fs.info(self._key(path)))
        except FileNotFoundError:
            return None

    def list(self, path: str = "") -> dict[str, ObjectInfo]:
        """Map the path of each object in the folder `path`, or below it, to the object's size and time of writing.

        The paths are relative to the store's URL. By default all objects of the store are listed.
        """
        key = self._key(path) if path else self._root
        with self._asking("list", path):
            found = self._fs.find(key, detail=True, withdirs=False)
        return {name.removeprefix(f"{self._root}/"): _info(entry) for name, entry in sorted(found.items())}

    def delete(self, path: str) -> None:
        """Delete the object at `path`; do nothing if it does not exist."""
        with self._asking("delete", path), suppress(FileNotFoundError):
            self._fs.rm_file(self._key(path))

    def check(self) -> None:
        """Write, list, read and delete a small object, to find missing permissions early."""
        path, content = f".check-{uuid.uuid4().hex}", b"mergesearch"
        try:
            self.write(path, content)
            self.list()
            found = self.read(path)
            self.delete(path)
        except FileNotFoundError as error:
            raise ObjectStoreError(f"{self.url}: {_line(error)}; create the bucket first") from error
        if found != content:
            raise ObjectStoreError(f"{self.url}/{path}: read other bytes than were written")

    def _key(self, path: str) -> str:
        return f"{self._root}/{path}"

    @contextmanager
    def _asking(self, what: str, path: str) -> Iterator[None]:
        """Context manager that turns errors of the store's driver into ObjectStoreError.

        In the message of the error, `what` names the operation, such as "read", and `path` is the path of the object.
        """
        try:
            yield
        except (FileNotFoundError, FileExistsError, ObjectStoreError):
            raise
        except Exception as error:  # the drivers raise errors of botocore, aiohttp and google-auth
            place = f"{self.url}/{path}" if path else self.url
            raise ObjectStoreError(f"{place}: cannot {what} it: {_line(error)}") from error


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for `url`, and the rest of `url` after the scheme: bucket and folder."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        # Listings that others have changed since would be stale.
        fs, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        command = f"pip install 'mergesearch[{SCHEMES[scheme]}]'"
        raise ObjectStoreError(
            f"{url}: needs the driver {error.name or scheme}; install it with `{command}`"
        ) from error
    return fs, root.rstrip("/")


def _info(entry: Mapping[str, Any]) -> ObjectInfo:
    modified: Any = entry.get("LastModified") or entry.get("mtime") or entry.get("updated")
    seconds = modified.timestamp() if hasattr(modified, "timestamp") else _seconds(modified)
    tag = entry.get("ETag") or entry.get("etag") or entry.get("generation") or ""
    return ObjectInfo(int(entry["size"]), seconds, str(tag).strip('"'))


def _seconds(text: Any) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else float(text or 0.0)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
