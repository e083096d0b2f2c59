"""Writer of an export's safetensors files, which records checksums so that a killed export can continue.

Tensors are streamed into the files one by one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from search_spaces.recipe import Recipe
from workers.directories import sync, write_file
from workers.merging.bank import Bank
from workers.merging.materialize import Scratch, is_small, merged_tensors

__all__ = ["DTYPES", "Progress", "Shard", "plan_shards", "write_index", "write_shards"]

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

# The file, beside an incomplete directory, with the checksums of its complete files.
STATE = "state.json"

# Detects damage by a crash only. sha256 of a file would take as long as merging it.
CHECKSUM = xxhash.xxh3_128


@dataclass(frozen=True)
class Progress:
    """Progress of an export: the number of bytes of tensors that are written so far, out of `total` bytes.

    `kept` is the number of written bytes that are from an earlier, killed export.
    """

    written: int
    kept: int
    total: int


@dataclass(frozen=True)
class Shard:
    file: str
    shapes: Mapping[str, tuple[int, ...]]
    num_bytes: int


def plan_shards(shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> list[Shard]:
    """Distribute tensors, in order, over safetensors files with at most `max_bytes` of tensors.

    `shapes` has the shape of each tensor, keyed by name. `itemsize` is the number of bytes of an element. A tensor
    larger than `max_bytes` is the only one in its file.
    """
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    sizes = [0]
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * itemsize
        if parts[-1] and sizes[-1] + num_bytes > max_bytes:
            parts.append({})
            sizes.append(0)
        parts[-1][name] = shape
        sizes[-1] += num_bytes
    if len(parts) == 1:
        return [Shard("model.safetensors", parts[0], sizes[0])]
    return [
        Shard(f"model-{number:05}-of-{len(parts):05}.safetensors", part, size)
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True), start=1)
    ]


def write_shards(
    shards: Sequence[Shard],
    recipe: Recipe,
    bank: Bank,
    dtype: torch.dtype,
    directory: Path,
    progress: Callable[[Progress], None],
    *,
    added: Mapping[str, torch.Tensor],
) -> None:
    """Write the tensors of a merge to safetensors files (shards), and then the index of these files.

    `recipe` describes the merge, and `bank` has the weights of its models. `shards` are the files with the names and
    shapes of their tensors, and `dtype` is the dtype of the tensors. A file's checksum is recorded, in a state file
    next to `directory`, once the file is on disk. Files that an earlier, killed export completed are kept if they still
    have the recorded checksum. The tensors in `added`, such as those of maps between layers (alignments), come after
    the tensors of the merge. `progress` is called at the beginning and for every tensor. A single file has no index.
    """
    state = directory.parent / STATE
    checksums = _complete_shards(shards, directory, state)
    kept = sum(shard.num_bytes for shard in shards if shard.file in checksums)
    current = Progress(kept, kept, sum(shard.num_bytes for shard in shards))
    progress(current)
    missing = [shard for shard in shards if shard.file not in checksums]
    wanted = {name for shard in missing for name in shard.shapes}
    memory, compiles = Scratch(bank, dtype), not is_small(recipe, bank)
    stream = merged_tensors(recipe, bank, dtype, names=wanted - {*added}, into=memory.tensor, compiles=compiles)

    rest = ((name, tensor) for name, tensor in added.items() if name in wanted)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in itertools.chain(stream, rest):
            current = replace(current, written=current.written + tensor.nbytes)
            progress(current)
            yield name, tensor

    counted = tensors()
    for shard in missing:
        checksums[shard.file] = _write_shard(directory / shard.file, shard.shapes, dtype, counted)
        sync(directory / shard.file)
        write_file(state, json.dumps(checksums))
    write_index(shards, directory)


def write_index(shards: Sequence[Shard], directory: Path) -> None:
    """Write the index of the weight files `shards` to `directory`; a single file has no index."""
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.shapes}
        index = {"metadata": {"total_size": sum(shard.num_bytes for shard in shards)}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _complete_shards(shards: Sequence[Shard], directory: Path, state: Path) -> dict[str, str]:
    """Find the files that an earlier, killed export completed, and return their checksums, keyed by file name.

    `shards` are the files of the export, with the names and shapes of their tensors. The file `state` lists checksums.
    A file in `directory` is complete if it still has the listed checksum. The result is empty if `state` is missing or
    damaged.
    """
    try:
        checksums = dict(json.loads(state.read_text()))
    except (OSError, ValueError, TypeError):
        return {}
    complete = {}
    for name in [shard.file for shard in shards if shard.file in checksums]:
        with suppress(OSError), (directory / name).open("rb") as file:
            checksum = hashlib.file_digest(file, CHECKSUM).hexdigest()
            if checksum == checksums[name]:
                complete[name] = checksum
    return complete


def _write_shard(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    stream: Iterator[tuple[str, torch.Tensor]],
) -> str:
    """Write the next tensors of `stream` as one safetensors file, and return its checksum (hex).

    `shapes` has the expected names and shapes, in order, and `dtype` is the dtype of all tensors. Only one tensor is in
    memory at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors must start at a multiple of eight bytes
    beginning = struct.pack("<Q", len(text)) + text
    checksum = CHECKSUM(beginning)
    with file.open("wb") as output:
        output.write(beginning)
        for expected, (name, tensor) in zip(shapes, stream, strict=False):
            assert (name, tuple(tensor.shape)) == (expected, shapes[expected]), f"got {name}, expected {expected}"
            content = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            output.write(content)
            checksum.update(content)
    return checksum.hexdigest()
