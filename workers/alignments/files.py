"""Alignments as safetensors files that are named by their digests.

A layer of a recipe names the alignment after it by the sha256 of its file, `DIGEST.safetensors` in
`Family.alignments_dir`. Therefore a recipe's digest also covers the alignment's numbers. If `Family.alignments_dir` is
the URL of an object store, the file is among the store's artifacts, and each machine downloads it once.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from search_spaces.errors import InvalidRecipe
from workers.cache import cache_dir
from workers.directories import write_file
from workers.object_store import ObjectStore, is_object_url

if TYPE_CHECKING:
    from workers.alignments.alignment import Alignment

__all__ = ["is_stored", "read_alignment", "store_alignment", "stored_file", "write_alignment"]

DIGEST = re.compile(r"^[0-9a-f]{64}$")


def write_alignment(directory: str | Path, alignment: Alignment) -> str:
    """Write an alignment (a map of the residual stream) to `directory` as a file, and return the file's digest.

    The file has the format safetensors in float32. The digest is the sha256 of the file; it is also the file's name.
    """
    from safetensors.torch import save

    return store_alignment(
        directory,
        save({name: tensor.detach().cpu().float().contiguous() for name, tensor in alignment.tensors().items()}),
    )


def store_alignment(directory: str | Path, content: bytes) -> str:
    """Write `content`, an alignment's safetensors file, to `directory`, and return its sha256 digest.

    An alignment is a map of the residual stream between two layers. The file's name is the digest. If the file exists
    with this content, it is kept; if its content is damaged, it is replaced.
    """
    digest = hashlib.sha256(content).hexdigest()
    if not is_stored(directory, digest):
        write_file(stored_file(directory, digest), content)
    return digest


def is_stored(directory: str | Path, digest: str) -> bool:
    """Whether `directory` has an undamaged file of an alignment (a map of the residual stream between two layers).

    `digest` is the sha256 of the file's content, and also the file's name.
    """
    try:
        return hashlib.sha256(stored_file(directory, digest).read_bytes()).hexdigest() == digest
    except OSError:
        return False


def read_alignment(directory: str | Path, digest: str, *, layer: int, hidden_size: int) -> Alignment:
    """Read the alignment `digest` from a directory or object store, in float32.

    An alignment is a map of the residual stream, and its digest is the sha256 of its file. `directory` may be the URL
    of an object store. `layer` is for error messages: the index of the layer that the alignment follows in the recipe.
    Raises InvalidRecipe, with the layer and the file, if the file is missing, has another digest, or is not an
    alignment of `hidden_size` channels.
    """
    try:
        return _read(directory, digest, hidden_size)
    except InvalidRecipe as error:
        raise InvalidRecipe(f"layer {layer}: alignment {digest[:12]!r}: {error}") from error


def _read(directory: str | Path, digest: str, hidden_size: int) -> Alignment:
    from safetensors.torch import load

    from workers.alignments.alignment import Alignment  # imports torch

    if not DIGEST.match(digest):
        raise InvalidRecipe("expected the sha256 of a file, 64 hex digits")
    if not str(directory):
        raise InvalidRecipe("these models were opened without a directory of alignments (Family.alignments_dir)")
    file = stored_file(directory, digest)
    try:
        if is_object_url(str(directory)):
            file = _downloaded(str(directory), digest)
        content = file.read_bytes()
    except OSError as error:
        raise InvalidRecipe(f"{file}: cannot be read: {error.strerror or error}") from error
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise InvalidRecipe(f"{file}: its contents have the digest {found[:12]}")
    try:
        alignment = Alignment(**{name: tensor.float() for name, tensor in load(content).items()})
    except Exception as error:  # safetensors raises its own class, which is no more than an Exception
        raise InvalidRecipe(f"{file}: not an alignment: {error}") from error
    if alignment.hidden_size != hidden_size:
        raise InvalidRecipe(f"{file}: it aligns {alignment.hidden_size} numbers; the models have {hidden_size}")
    return alignment


def _downloaded(url: str, digest: str) -> Path:
    """Path of an alignment's file in this machine's cache.

    An alignment is a map of the residual stream, and `digest` is the sha256 of its file. If the file is missing in the
    cache, or damaged, it is downloaded first from the object store at `url`.
    """
    directory = cache_dir() / "alignments"
    if not is_stored(directory, digest):
        store_alignment(directory, ObjectStore(url).read(f"blobs/{digest[:2]}/{digest[2:]}"))
    return stored_file(directory, digest)


def stored_file(directory: str | Path, digest: str) -> Path:
    """Path of the file of the alignment `digest` in `directory`; the file need not exist."""
    return Path(directory) / f"{digest}.safetensors"
