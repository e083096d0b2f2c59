"""Location of models: the directory of a downloaded model, or of a model's metadata if its weights are elsewhere.

Models are checked before their weights are downloaded. A model on the hub or in an object store whose weights are not
on this machine is checked as a metadata-only snapshot, which has its files without the contents of the weights. A
snapshot belongs to one commit, and the download that replaces it belongs to the same commit.
"""

from __future__ import annotations

import re
from pathlib import Path

from workers.errors import InvalidModel
from workers.models.remote.errors import reason_of
from workers.models.remote.hub import COMMIT, cached, looked_up
from workers.models.remote.objects import located
from workers.models.remote.snapshots import is_metadata_only, read_record
from workers.object_store import is_object_url

__all__ = ["HUB_ID", "commit_of", "id_of", "locate", "source_name"]

DIRECTORY = "a directory with config.json, tokenizer files and *.safetensors"

# `name` or `owner/name`, with an optional branch, tag, commit or reference such as refs/pr/1.
HUB_ID = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?")


def locate(model: str | Path) -> Path:
    """Find the directory of a model given as a directory, a hub id, or the URL of an object-store folder.

    For a hub id or URL, the result is the directory of the downloaded model. If the model is not downloaded, it is the
    directory of a metadata-only snapshot, which has the model's files without the contents of the weights. No weights
    are downloaded. A downloaded hub model is used without asking the hub if the id has a commit (owner/name@commit). A
    downloaded model is also used if its origin cannot be reached (or HF_HUB_OFFLINE is set). Raises InvalidModel if
    there is no such model.
    """
    if is_object_url(str(model)):
        return located(str(model))
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidModel((f"{path}: is a file; expected {DIRECTORY}",))
    parts = HUB_ID.fullmatch(str(model))
    if parts is None:
        raise InvalidModel((f"{path}: does not exist; expected {DIRECTORY}",))
    name, revision = parts[1], parts[2] or "main"
    found = cached(name, revision)
    if found and COMMIT.fullmatch(revision):
        return found
    try:
        return looked_up(name, revision)
    except Exception as error:  # raised by the hub's client, by its HTTP library, or by the system
        if found:
            return found
        reason = reason_of(error, name, revision)
        raise InvalidModel(
            (
                f"{model}: neither a directory nor a hub model that can be loaded here: {reason}; expected "
                f"{DIRECTORY}, or the id of a hub model that is in the hub's cache or can be downloaded",
            )
        ) from error


def commit_of(directory: Path) -> str | None:
    """Commit of the hub model in a directory that the function `locate` returned; None for other directories."""
    if is_metadata_only(directory):
        record = read_record(directory)
        return None if is_object_url(record.name) else record.commit
    return directory.name if directory.parent.name == "snapshots" and COMMIT.fullmatch(directory.name) else None


def id_of(directory: Path) -> str | None:
    """Hub id (owner/name) of the model in a directory returned by the function `locate`; None for others."""
    if is_metadata_only(directory):
        name = read_record(directory).name
        return None if is_object_url(name) else name
    owner, _, name = directory.parent.parent.name.removeprefix("models--").rpartition("--")
    return (f"{owner}/{name}" if owner else name) if commit_of(directory) else None


def source_name(directory: Path) -> str:
    """Name of the model in a directory that the function `locate` returned, such as ID@COMMIT for a hub model.

    A model in an object store is named by its URL until its weights have been downloaded to this machine. Otherwise a
    model that is not on the hub is named by its directory. Names of hub models are valid on any machine.
    """
    if name := id_of(directory):
        return f"{name}@{commit_of(directory)}"
    return read_record(directory).name if is_metadata_only(directory) else str(directory)
