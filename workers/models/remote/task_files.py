"""Task files and data in object stores, downloaded to this machine once per version.

CACHE/tasks/s3:/BUCKET/FOLDER/FILE@VERSION/FILE    a data file
CACHE/tasks/s3:/BUCKET/FOLDER@VERSION/FILE         an lm-eval YAML file, with the other files of its folder
CACHE/tasks/s3:/BUCKET/FOLDER/FILE.latest          the version found last, which is used if the store does not answer
CACHE/tasks/s3:/BUCKET/FOLDER.latest               the same for the folder of an lm-eval YAML file

Versions that were not used for UNUSED_S are deleted when another version is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from workers.cache import cache_dir
from workers.directories import turn, write_file
from workers.errors import InvalidTask
from workers.models.remote.files import VERSION_DIGITS, ObjectFile, downloaded, version_of
from workers.models.remote.snapshots import size_text
from workers.object_store import ObjectStore, object_url_problem

__all__ = ["local_file"]

YAML = (".yaml", ".yml")

# Parts that a downloaded file's path must not have, because it could lead out of the directory.
UNSAFE = {"", ".", ".."}

# Most bytes that the folder of a task file may have, since all of it is downloaded.
MAX_FOLDER_BYTES = 4 * 2**30

# A version is deleted if no process has used it for this many seconds.
UNUSED_S = 7 * 24 * 3600.0

# The end of the name of a version's directory.
_VERSION = re.compile(rf"@[0-9a-f]{{{VERSION_DIGITS}}}$")


def local_file(name: str | Path) -> Path:
    """Local copy of `name`, which is a path or the URL of a file in an object store.

    A file at a URL is downloaded unless this machine has its current version. An lm-eval YAML file (.yaml, .yml) is
    downloaded with all files in its folder, to which it may refer by relative paths. If the store does not answer, the
    version that was last downloaded is used. Raises InvalidTask if the URL is invalid, or the file cannot be read.
    """
    url = str(name)
    if "://" not in url:
        return Path(name)
    if problem := object_url_problem(url):
        raise InvalidTask(problem)
    if UNSAFE & {*url.partition("://")[2].split("/")}:
        raise InvalidTask(f"{url}: has an empty part, or a part that is . or ..; expected s3://BUCKET/FOLDER/FILE")
    folder, _, file = url.rpartition("/")
    of = folder if file.endswith(YAML) else url
    latest = cache_dir().resolve() / "tasks" / f"{of}.latest"
    try:
        found = _downloaded(folder, file, of)
        with suppress(OSError):  # the cache cannot be written to
            write_file(latest, found.parent.name)
        return found
    except FileNotFoundError as error:
        raise InvalidTask(f"{url}: does not exist") from error
    except OSError as error:
        with suppress(OSError):
            known = latest.with_name(latest.read_text()) / file
            if known.is_file():
                return known
        raise InvalidTask(f"{url}: cannot be read: {error}") from error


def _downloaded(folder: str, file: str, of: str) -> Path:
    """Download a file of an object-store folder, alone or with the whole folder, and return its path on this machine.

    `folder` is the URL of the folder, and `file` is the path of the file in the folder. If `of` equals `folder`, the
    whole folder is downloaded. If `of` is the URL of the file, the file alone is downloaded.
    """
    objects = ObjectStore(folder)
    listed = objects.list() if of == folder else {file: objects.info(file)}
    files = {path: ObjectFile(path, info.num_bytes, info.tag) for path, info in listed.items() if info is not None}
    if file not in files:
        raise FileNotFoundError(file)
    files = {path: each for path, each in files.items() if not UNSAFE & {*path.split("/")}}
    if (num_bytes := sum(each.num_bytes for each in files.values())) > MAX_FOLDER_BYTES:
        raise InvalidTask(
            f"{folder}: has {size_text(num_bytes)}, and all files beside a task file are downloaded with it; put the "
            f"task file and what it refers to into a folder of at most {size_text(MAX_FOLDER_BYTES)}"
        )
    place = cache_dir().resolve() / "tasks" / f"{of}@{version_of(files)}"
    with suppress(OSError), turn(place):  # it is not there yet, or the cache cannot be written to
        os.utime(place)
    if list(downloaded(objects, place, files)):
        _delete_unused(cache_dir().resolve() / "tasks")
    return place / file


def _delete_unused(root: Path) -> None:
    """Delete the downloaded versions of task files below `root` that were not used for UNUSED_S seconds."""
    for parent, names, _ in os.walk(root):
        for place in [Path(parent, name) for name in names if _VERSION.search(name)]:
            names.remove(place.name)
            with suppress(OSError), turn(place):
                if time.time() - place.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(place, ignore_errors=True)
