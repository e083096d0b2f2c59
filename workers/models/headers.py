"""safetensors headers: the tensors that a model's files declare, checked against the files' sizes.

This module does not use the safetensors library to read headers, because a broken file must be reported together with
all other problems, with its name and byte counts, and without reading its weights.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from workers.models.components import IGNORED, first_few

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPE_BYTES", "MAX_HEADER_BYTES", "TensorInfo", "read_headers"]

# Bytes per element of what can be merged, by the name that safetensors uses.
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

# The largest header that is read; safetensors has the same limit.
MAX_HEADER_BYTES = 100_000_000

# A report lists this many tensors of one file that are described wrongly, then counts the rest.
MAX_ENTRIES = 5

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# Files that a trainer saves with a model: pickles too, but without weights.
TRAINERS = ("training_args.bin", "optimizer.pt", "scheduler.pt")

CONVERSIONS = {
    "model": "`{loader}.from_pretrained(DIR, dtype='auto').save_pretrained(NEW_DIR)` of transformers",
    "adapter_model": "`AutoPeftModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)` of peft",
}


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: its dtype (safetensors' name), its shape, its file, and its name in the file.

    The class implements the interface `computed_tensors.SourceTensor`.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    name: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES.get(self.dtype, 1)

    def stored(self) -> Iterator[TensorInfo]:
        yield self

    def value(self, read: Callable[[TensorInfo], torch.Tensor]) -> torch.Tensor:
        return read(self)


def _is_known_buffer(name: str) -> bool:
    """Whether the tensor called `name`, of any dtype, is a buffer that language models compute themselves."""
    return IGNORED.search(name) is not None


def read_headers(
    path: Path,
    problems: list[str],
    *,
    stem: str = "model",
    is_needed: Callable[[str], bool] = lambda name: not _is_known_buffer(name),
) -> dict[str, TensorInfo]:
    """Read the headers of a model's safetensors files, and append problems of the files to `problems`.

    Returns the description of each tensor, keyed by name. The files in the directory `path` are `stem`.safetensors, or
    the files that `stem`.safetensors.index.json lists. Tensors for which `is_needed` is True, by their stored names,
    must have a dtype that can be merged.

    Only the index and the headers are read, and never more bytes than a file has. If there are no problems, the bytes
    of each tensor are within its file, no two tensors share bytes, and every byte after the header belongs to a tensor.
    """
    shards, expected = _shards(path, stem, problems)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        try:
            found = _read_header(shard, problems, is_needed)
        except OSError as error:
            problems.append(f"{shard}: cannot be read: {error.strerror}")
            continue
        for name, info in found.items():
            if name in tensors:
                problems.append(f"{shard}: tensor {name!r} is also in {tensors[name].file.name}")
            tensors[name] = info
    if not problems and expected is not None:
        problems += _index_problems(path, expected, tensors)
    return tensors


# The files


def _shards(path: Path, stem: str, problems: list[str]) -> tuple[list[Path], Mapping[str, str] | None]:
    """Weight files (safetensors) of a model, and the index that maps each tensor's name to its file.

    `path` is the directory of the model. The index is None if the model has a single file, or if there is no index that
    can be read. `stem` is the beginning of the files' names. Problems are appended to `problems`, for example that
    there are only pickles, or that files in the index are missing. Missing files are left out of the result.
    """
    single, index = path / f"{stem}.safetensors", path / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single], None
    if index.is_file():
        return _indexed_shards(path, index, problems)
    pickles = {file.name for pattern in PICKLES for file in path.glob(pattern)} - set(TRAINERS)
    if stem == "model" and (path / "adapter_config.json").is_file():
        problems.append(f"{path}: a PEFT adapter; expected a whole model: merge the adapter into its base first")
    elif pickles:
        problems.append(
            f"{path}: only pickles ({first_few(pickles)}), which are never loaded, because they can run code; convert "
            f"a model that you trust to safetensors: {_conversion(path, stem)} does so"
        )
    else:
        problems.append(f"{path}: no {single.name} and no {index.name}")
    return [], None


def _conversion(path: Path, stem: str) -> str:
    """Code that converts the pickles of a model or adapter, by the class that the model's config.json states."""
    loader = "AutoModelForCausalLM"
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
        stated = json.loads((path / "config.json").read_bytes())["architectures"][0]
        if isinstance(stated, str) and stated.isidentifier() and not stated.endswith("ForCausalLM"):
            loader = stated
    return CONVERSIONS[stem].format(loader=loader)


def _indexed_shards(path: Path, index: Path, problems: list[str]) -> tuple[list[Path], Mapping[str, str] | None]:
    try:
        if (size := index.stat().st_size) > MAX_HEADER_BYTES:
            raise ValueError(f"{size} bytes, the largest index read has {MAX_HEADER_BYTES}")
        weight_map = _json_object(_json_object(index.read_bytes())["weight_map"])
        files = sorted({_file_name(file) for file in weight_map.values()})
    except OSError as error:
        problems.append(f"{index}: cannot be read: {error.strerror}")
        return [], None
    except KeyError:
        problems.append(f"{index}: not a safetensors index: it has no weight_map from tensors to files")
        return [], None
    except (ValueError, RecursionError) as error:
        problems.append(f"{index}: not a safetensors index: {_reason(error)}")
        return [], None
    if missing := [file for file in files if not (path / file).is_file()]:
        problems.append(f"{path}: {len(missing)} of {len(files)} shards are missing: {first_few(missing)}")
    return [path / file for file in files if (path / file).is_file()], weight_map


def _file_name(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or value in ("", "..") or Path(value).name != value:
        raise ValueError(f"shards must be in the folder of the index, found {value!r:.80}")
    return value


def _index_problems(path: Path, expected: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    if missing := [name for name in expected if name not in tensors]:
        yield f"{path}: the index names tensors that no shard holds: {first_few(missing)}"
    for name, file in expected.items():
        if name in tensors and tensors[name].file.name != file:
            yield f"{path}: tensor {name!r} is in {tensors[name].file.name}, the index says {file}"


# One file


def _read_header(file: Path, problems: list[str], is_needed: Callable[[str], bool]) -> dict[str, TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            problems.append(f"{file}: a Git LFS pointer of {size} bytes, not the weights; fetch them with git lfs pull")
            return {}
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or 8 + length > size or length > MAX_HEADER_BYTES:
            declared_header = "" if length is None else f" and declares a header of {length}"
            problems.append(f"{file}: not a complete safetensors file: it has {size} bytes{declared_header}")
            return {}
        text = stream.read(length)
    try:
        header = _json_object(text)
        metadata = _json_object(header.pop("__metadata__", {}))
        if not text.startswith(b"{") or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("expected an object from its first byte on, with texts in its __metadata__")
    except (ValueError, RecursionError) as error:
        problems.append(f"{file}: its safetensors header cannot be read: {_reason(error)}")
        return {}
    tensors: dict[str, TensorInfo] = {}
    spans: dict[str, tuple[int, int]] = {}
    wrong: list[str] = []
    for name, entry in header.items():
        try:
            tensors[name], spans[name] = _entry(name, entry, file)
        except ValueError as error:
            wrong.append(f"{file}: tensor {name!r:.200}{error}")
    if not wrong:
        wrong += _span_problems(file, spans, num_bytes=size - 8 - length)
    problems += wrong[:MAX_ENTRIES]
    if len(wrong) > MAX_ENTRIES:
        problems.append(f"{file}: {len(wrong) - MAX_ENTRIES} more such problems in its header")
    problems += _dtype_problems(file, tensors, is_needed)
    return tensors


def _entry(name: str, entry: object, file: Path) -> tuple[TensorInfo, tuple[int, int]]:
    """Check the entry of the tensor `name` in a safetensors header; return the tensor's description and byte range.

    `entry` is the value that the header of `file` has for this name. The range is (begin, end), counted from the end of
    the header. Raises ValueError if the entry is wrong; the error's text completes a message that begins with the
    tensor's name.
    """
    if not name or not name.isprintable():  # it will be printed, and named in an index
        raise ValueError(": its name is not printable text")
    if not isinstance(entry, dict):
        raise ValueError(f" is described by {entry!r:.80}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not dtype.isprintable():
        raise ValueError(f": its dtype is {dtype!r:.80}; expected one of {', '.join(DTYPE_BYTES)}")
    if not _are_counts(shape):
        raise ValueError(f": its shape is {shape!r:.80}; expected a list of whole numbers, 0 or more")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f": its data_offsets are {offsets!r:.80}; expected [begin, end] in bytes")
    info = TensorInfo(dtype, tuple(shape), file, name)
    begin, end = offsets
    if dtype in DTYPE_BYTES and end - begin != info.num_bytes:
        raise ValueError(
            f" of shape {list(shape)} in {dtype} needs {info.num_bytes} bytes; its offsets {begin}..{end} hold "
            f"{end - begin}"
        )
    return info, (begin, end)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**63 for number in value)


def _span_problems(file: Path, spans: Mapping[str, tuple[int, int]], *, num_bytes: int) -> Iterator[str]:
    """Yield problems in a file: tensors that overlap, leave gaps, or do not fill the `num_bytes` after the header.

    `spans` has the range of bytes (begin, end) of each tensor, keyed by name.
    """
    in_order = sorted(spans.items(), key=lambda item: item[1])
    for (first, (_, end)), (second, (begin, _)) in pairwise([("", (0, 0)), *in_order]):
        if begin < end:
            places = f"one ends at byte {end}, the other begins at {begin}"
            yield f"{file}: tensors {first!r} and {second!r} overlap: {places}"
        elif begin > end:
            yield f"{file}: {begin - end} bytes before tensor {second!r} belong to no tensor"
    declared = max((end for _, end in spans.values()), default=0)
    if declared != num_bytes:
        header = file.stat().st_size - num_bytes
        problem = "is truncated" if num_bytes < declared else "has bytes that belong to no tensor"
        yield f"{file}: {problem}: its header declares {header + declared} bytes, the file has {header + num_bytes}"


def _dtype_problems(file: Path, tensors: Mapping[str, TensorInfo], is_needed: Callable[[str], bool]) -> Iterator[str]:
    by_dtype: dict[str, list[str]] = {}
    for name, info in tensors.items():
        if info.dtype not in DTYPE_BYTES and is_needed(name):
            by_dtype.setdefault(info.dtype, []).append(name)
    accepted = ", ".join(DTYPE_BYTES)
    for dtype, names in by_dtype.items():
        yield f"{file}: dtype {dtype:.20} of {first_few(names)} cannot be merged; expected one of {accepted}"


# JSON


def _json_object(value: object) -> dict[str, Any]:
    """Parse a JSON object from bytes, or check that a parsed value is a JSON object.

    Raises ValueError if `value` is anything else, or if parsed bytes have the same key twice in an object.
    """
    document = json.loads(value.decode(), object_pairs_hook=_unique) if isinstance(value, bytes) else value
    if not isinstance(document, dict):
        raise ValueError(f"a {type(document).__name__} where an object was expected")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"given twice: {first_few(repr(name) for name, count in counts.items() if count > 1)}")
    return found


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
