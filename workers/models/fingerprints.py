"""Fingerprints (hashes of contents) of checkpoints, and checks of whether their weights are finite; results are cached.

Reading all of a large model takes minutes. Therefore the hash of each file is cached by the file's path, size,
modification time and inode, and the problems of a model's weights are cached by the model's fingerprint. Of processes
that need the same result at the same time, such as the ranks of an engine, one reads the file and the others wait.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from workers.cache import cached, computing
from workers.models.adapters import ADAPTER_CONFIG
from workers.models.checkpoints import Checkpoint
from workers.models.remote import stated_hash
from workers.models.vocabulary import EMBEDDING_NAMES

__all__ = ["FileState", "content_problems", "file_hash", "file_states", "fingerprint"]


@dataclass(frozen=True)
class FileState:
    """State of a file in the file system, recorded so that a later change of the file is noticed.

    The state has the size in bytes, the time of modification (ns since 1970), and the inode. A program that changes a
    file changes at least one of these three, unless it sets the time of modification back.
    """

    num_bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path) -> FileState:
        """Read the current size, modification time and inode of `file`. Raises OSError if the file does not exist."""
        found = file.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)

    def change(self, file: Path) -> str:
        """Describe how `file` has changed since this state was recorded.

        Returns "" if it has not changed, or no longer exists.
        """
        try:
            now = FileState.of(file)
        except OSError:
            return ""
        if self == now:
            return ""
        if self.num_bytes != now.num_bytes:
            return f"it had {self.num_bytes} bytes and has {now.num_bytes}"
        if self.modified_ns != now.modified_ns:
            before, after = (datetime.fromtimestamp(each.modified_ns / 1e9, UTC) for each in (self, now))
            return f"it was modified at {before:%Y-%m-%d %H:%M:%S} and at {after:%Y-%m-%d %H:%M:%S} UTC"
        return "another file has its name"


def file_states(checkpoint: Checkpoint) -> dict[Path, FileState]:
    """State (size, time, inode) of each file that the checkpoint's fingerprint depends on, keyed by path.

    The files of an adapter's base are not included.
    """
    return {file: FileState.of(file) for file in _defining_files(checkpoint)}


def fingerprint(checkpoint: Checkpoint, *, base: str | None = None, cache: str | Path | None = None) -> str:
    """Fingerprint of a checkpoint: sha256 (hex) of the names and contents of the files that define the model.

    The name of the checkpoint's directory is not included. The files of a whole model are its safetensors files,
    config.json, generation_config.json and its modality's files, such as those of a tokenizer. The files of an adapter
    are its safetensors files, adapter_config.json and its modality's files; the fingerprint of its base is added to
    them. `base` is the base's fingerprint; if it is None, it is computed. `cache` is the directory of the cache, or
    None for the default directory. Raises InvalidModel if a file cannot be read.
    """
    hashes = [(file.name, file_hash(file, cache=cache)) for file in _defining_files(checkpoint)]
    if checkpoint.base is not None:
        hashes.append(("base", fingerprint(checkpoint.base, cache=cache) if base is None else base))
    return hashlib.sha256(json.dumps(sorted(hashes)).encode()).hexdigest()


def content_problems(checkpoint: Checkpoint, content: str, *, cache: str | Path | None = None) -> tuple[str, ...]:
    """Problems in a checkpoint's weights: NaN, infinity, or a tied head that differs from the embedding.

    All weights are read, but only once for each content, because results are cached by the checkpoint's fingerprint,
    which is the argument `content`. `cache` is the directory of the cache, or None for the default directory. The
    result is empty for models whose weights are not on this machine.
    """
    if not checkpoint.is_here:
        return ()
    key = f"content/1 {content}"
    found = cached(key, cache=cache)
    if found is None:
        with computing(key, what=checkpoint.directory.name, cache=cache):
            found = cached(key, cache=cache)
            if found is None:
                found = "\n".join(_bad_tensors(checkpoint))
                cached(key, found, cache=cache)
    return tuple(f"{checkpoint.directory.resolve()}: {line}" for line in found.splitlines())


def _bad_tensors(checkpoint: Checkpoint) -> Iterator[str]:
    import torch

    known = checkpoint.base.tensors if checkpoint.base else {}
    for name in [name for name, tensor in checkpoint.tensors.items() if tensor is not known.get(name)]:
        tensor = checkpoint.read(name)
        if tensor.numel() and not all(torch.isfinite(end) for end in torch.aminmax(tensor)):
            num_bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            yield f"tensor {name!r} holds {num_bad} values that are NaN or infinite; expected finite weights"
    head = checkpoint.layout.tied_head
    embeddings = [name for name in checkpoint.tensors if name.endswith(EMBEDDING_NAMES)]
    if head and embeddings and not torch.equal(checkpoint.read(head), checkpoint.read(embeddings[0])):
        yield (
            f"tensor {head!r} differs from {embeddings[0]!r}, though config.json ties them; remove it or set "
            "tie_word_embeddings to false"
        )


def _defining_files(checkpoint: Checkpoint) -> list[Path]:
    others = [ADAPTER_CONFIG] if checkpoint.base is not None else ["config.json", "generation_config.json"]
    files = [*checkpoint.files, *(checkpoint.directory / name for name in (*others, *checkpoint.modality.files))]
    return [file for file in files if file.is_file()]


def file_hash(file: Path, *, cache: str | Path | None = None) -> str:
    """The sha256 (hex) of a file, which is read only if its path, size, modification time or inode is new to the cache.

    For weights that are not downloaded, the result is the hash that the hub or object store states. `cache` is the
    directory of the cache, or None for the default directory.
    """
    if stated := stated_hash(file):
        return stated
    state = FileState.of(file)
    key = f"sha256/2 {file.resolve()} {state.num_bytes} {state.modified_ns} {state.inode}"
    known = cached(key, cache=cache)
    if known is not None:
        return known
    with computing(key, what=file.name, cache=cache):
        known = cached(key, cache=cache)
        if known is not None:
            return known
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if not state.change(file):
            cached(key, found, cache=cache)
        return found
