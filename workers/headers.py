"""Read safetensors headers: what a model's files declare, checked against what they are.

Kept apart from the library's reader because a broken file must be reported with every other problem, by name and in
bytes, and without reading its weights.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.layout import some_of

__all__ = ["DTYPE_BYTES", "TensorInfo", "read_headers"]

# Bytes per element of what can be merged, by the name that safetensors uses.
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

# A header larger than this is no header (safetensors itself refuses it too).
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: safetensors' name of its dtype, its shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES.get(self.dtype, 1)


def read_headers(path: Path, problems: list[str]) -> dict[str, TensorInfo]:
    """Every tensor stored in directory `path`, by name; what is wrong with its files is appended to `problems`."""
    shards, expected = _shards(path, problems)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        try:
            found = _read_header(shard, problems)
        except OSError as error:
            problems.append(f"{shard}: cannot be read: {error.strerror}")
            continue
        for name, info in found.items():
            if name in tensors:
                problems.append(f"{shard}: tensor {name!r} is also in {tensors[name].file.name}")
            tensors[name] = info
    if not problems and expected is not None and (missing := [name for name in expected if name not in tensors]):
        problems.append(f"{path}: the index names tensors that no shard holds: {some_of(missing)}")
    return tensors


def _shards(path: Path, problems: list[str]) -> tuple[list[Path], Mapping[str, str] | None]:
    """The safetensors files, and the index's map from tensor to file where there is one."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single], None
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{index}: not a safetensors index ({type(error).__name__}: {error})")
            return [], None
        if outside := [file for file in files if Path(file).name != file]:
            problems.append(f"{index}: shards must lie beside the index, found {some_of(outside)}")
            return [], None
        if missing := [file for file in files if not (path / file).is_file()]:
            problems.append(f"{path}: {len(missing)} of {len(files)} shards are missing: {some_of(missing)}")
        return [path / file for file in files if (path / file).is_file()], weight_map
    pickles = sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(suffix))
    if (path / "adapter_config.json").is_file():
        problems.append(f"{path}: a PEFT adapter; expected a whole model: merge the adapter into its base first")
    elif pickles:
        problems.append(
            f"{path}: only pickles ({some_of(pickles)}), which are never loaded; convert the model to safetensors"
        )
    else:
        problems.append(f"{path}: no model.safetensors and no model.safetensors.index.json")
    return [], None


def _read_header(file: Path, problems: list[str]) -> dict[str, TensorInfo]:
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
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: TensorInfo(str(entry["dtype"]), tuple(map(int, entry["shape"])), file)
                for name, entry in header.items()
            }
            ends = {
                name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            problems.append(f"{file}: its safetensors header cannot be read ({type(error).__name__}: {error})")
            return {}
    declared = 8 + length + max((end for _, end in ends.values()), default=0)
    if declared != size:
        problem = "is truncated" if size < declared else "has bytes that belong to no tensor"
        problems.append(f"{file}: {problem}: its header declares {declared} bytes, the file has {size}")
    for name, info in tensors.items():
        start_offset, end = ends[name]
        if info.dtype in DTYPE_BYTES and (start_offset < 0 or end - start_offset != info.num_bytes):
            problems.append(
                f"{file}: tensor {name!r} of shape {list(info.shape)} in {info.dtype} needs {info.num_bytes} bytes; "
                f"its offsets {start_offset}..{end} hold {end - start_offset}"
            )
    return tensors
