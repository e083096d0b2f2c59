"""Wrong headers of files: whatever a file claims, reading stays within its bounds, and problems name the file."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from workers.models.headers import DTYPE_BYTES, MAX_HEADER_BYTES, read_headers

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
GOOD = {"a": F32, "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}}


def write(directory: Path, header: Any, *, num_bytes: int = 22, name: str = "model.safetensors") -> Path:
    """Write a file with `num_bytes` after `header`, which is JSON or the raw text; returns the directory."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return directory / name


def problems_of(directory: Path) -> list[str]:
    problems: list[str] = []
    read_headers(directory, problems)
    return problems


def test_a_good_file_is_told_as_it_is(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD | {"__metadata__": {"format": "pt"}})
    problems: list[str] = []
    tensors = read_headers(tmp_path, problems)
    assert problems == []
    assert {name: (info.dtype, info.shape, info.num_bytes, info.file) for name, info in tensors.items()} == {
        "a": ("F32", (2, 2), 16, file),
        "b": ("BF16", (3,), 6, file),
    }


B = GOOD["b"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": F32, "b": B | {"data_offsets": [8, 14]}}, "tensors 'a' and 'b' overlap: one ends at byte 16, the other"),
        ({"a": F32, "b": B | {"data_offsets": [18, 24]}}, "2 bytes before tensor 'b' belong to no tensor"),
        ({"a": F32 | {"data_offsets": [4, 20]}, "b": B}, "4 bytes before tensor 'a' belong to no tensor"),
        ({"a": F32}, "has bytes that belong to no tensor: its header declares"),
        ({**GOOD, "c": B | {"data_offsets": [22, 28]}}, "is truncated: its header declares"),
        (b'{"a": {"dtype": "F32"}, "b": 1, "a": {}}', "its safetensors header cannot be read: given twice: 'a'"),
        ({"a": F32 | {"dtype": "F8_E4M3", "data_offsets": [0, 16]}, "b": B}, "dtype F8_E4M3 of a cannot be merged; ex"),
        ({"a": F32 | {"dtype": "I64", "data_offsets": [0, 16]}, "b": B}, "expected one of F32, F16, BF16"),
        ({"a": F32 | {"dtype": 7}, "b": B}, "tensor 'a': its dtype is 7; expected one of F32, F16, BF16"),
        ({"a": F32 | {"shape": "22"}, "b": B}, "tensor 'a': its shape is '22'; expected a list of whole numbers"),
        ({"a": F32 | {"shape": [2, 2.0]}, "b": B}, "tensor 'a': its shape is [2, 2.0]; expected"),
        ({"a": F32 | {"shape": [-2, -2]}, "b": B}, "tensor 'a': its shape is [-2, -2]; expected"),
        ({"a": F32 | {"shape": [True, 4]}, "b": B}, "tensor 'a': its shape is [True, 4]; expected"),
        ({"a": F32 | {"shape": [2**62, 2**62]}, "b": B}, f"needs {2**126} bytes; its offsets 0..16 hold 16"),
        ({"a": F32 | {"data_offsets": [16, 0]}, "b": B}, "tensor 'a': its data_offsets are [16, 0]; expected [begin,"),
        ({"a": F32 | {"data_offsets": [-16, 0]}, "b": B}, "tensor 'a': its data_offsets are [-16, 0]"),
        ({"a": F32 | {"data_offsets": [0]}, "b": B}, "tensor 'a': its data_offsets are [0]"),
        ({"a": None, "b": B}, "tensor 'a' is described by None; expected dtype, shape and data_offsets"),
        ({"a\nb": F32, "b": B}, "tensor 'a\\nb': its name is not printable text"),
        ({"\ud800": F32, "b": B}, "tensor '\\ud800': its name is not printable text"),
        ([GOOD], "its safetensors header cannot be read: a list where an object was expected"),
        (GOOD | {"__metadata__": {"format": 1}}, "with texts in its __metadata__"),
        (GOOD | {"__metadata__": []}, "a list where an object was expected"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"\xff": 1}', "can't decode byte 0xff"),
        (b"", "its safetensors header cannot be read"),
    ],
)
def test_what_is_wrong_is_told_by_file_and_tensor(tmp_path: Path, header: Any, message: str) -> None:
    file = write(tmp_path, header)
    found = problems_of(tmp_path)
    assert any(problem.startswith(f"{file}: ") and message in problem for problem in found), found


@pytest.mark.parametrize("length", [0, 1, 23, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_header_larger_than_its_file_is_not_read(tmp_path: Path, length: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{" + bytes(21))
    (found,) = problems_of(tmp_path)
    if length < 23:
        assert "its safetensors header cannot be read" in found
    else:
        assert found == f"{file}: not a complete safetensors file: it has 30 bytes and declares a header of {length}"


def test_all_problems_of_all_shards_come_together(tmp_path: Path) -> None:
    good = F32 | {"data_offsets": [22, 38]}
    write(tmp_path, {"a": F32 | {"shape": [3]}, "b": B | {"shape": []}, "g": good}, num_bytes=38, name="1.safetensors")
    write(tmp_path, {"c": F32 | {"dtype": "I32"}, "d": B, "g": F32 | {"data_offsets": [16, 32]}}, name="2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "e": "3.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = "\n".join(problems_of(tmp_path))
    for part in (
        "1 of 3 shards are missing: 3.safetensors",
        "1.safetensors: tensor 'a' of shape [3] in F32 needs 12 bytes; its offsets 0..16 hold 16",
        "1.safetensors: tensor 'b' of shape [] in BF16 needs 2 bytes; its offsets 16..22 hold 6",
        "2.safetensors: tensors 'd' and 'g' overlap",
        "2.safetensors: dtype I32 of c cannot be merged",
        "2.safetensors: tensor 'g' is also in 1.safetensors",
    ):
        assert part in found, found


def test_many_problems_of_a_kind_are_counted(tmp_path: Path) -> None:
    write(tmp_path, {f"t{i}": F32 | {"shape": [i]} for i in range(100, 300)})
    found = problems_of(tmp_path)
    assert len(found) == 6
    assert found[-1].endswith("195 more such problems in its header")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {"x": "../a/model.safetensors"}},
            "shards must be in the folder of the index, found '../a/model.safe",
        ),
        ({"weight_map": {"x": ".."}}, "shards must be in the folder of the index, found '..'"),
        ({"weight_map": {"x": "/etc/passwd"}}, "shards must be in the folder of the index, found '/etc/passwd'"),
        ({"weight_map": {"x": 3}}, "shards must be in the folder of the index, found 3"),
        ({"weight_map": {"x": ""}}, "shards must be in the folder of the index, found ''"),
        ({"weight_map": {"x": "a\0b"}}, "shards must be in the folder of the index, found 'a\\x00b'"),
        ({"weight_map": ["a"]}, "a list where an object was expected"),
        ({}, "it has no weight_map"),
        ([], "a list where an object was expected"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"weight_map": {"a": "1", "a": "2"}}', "given twice: 'a'"),
        (b"\xff", "can't decode byte 0xff"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: Any, message: str) -> None:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    (found,) = problems_of(tmp_path)
    assert found.startswith(f"{tmp_path}/model.safetensors.index.json: not a safetensors index: ")
    assert message in found


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    write(tmp_path, GOOD, name="1.safetensors")
    write(tmp_path, {"c": F32}, num_bytes=16, name="2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors", "d": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert problems_of(tmp_path) == [
        f"{tmp_path}: the index names tensors that no shard holds: d",
        f"{tmp_path}: tensor 'b' is in 1.safetensors, the index says 2.safetensors",
    ]


numbers = st.one_of(st.integers(-1, 40), st.sampled_from([True, 2.0, None, "4", 2**31, 2**63, 2**64, 10**30]))
values = st.recursive(numbers | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=5)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "F8_E5M2", "F4", "XX", "", None]),
        "shape": st.lists(st.integers(0, 4), max_size=3) | values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2).map(sorted) | values,
        "more": values,
    },
)
headers = st.one_of(
    st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__", "", "\x00", "\ud800"]), entries | values),
    values,
)


@st.composite
def packed(draw: st.DrawFn) -> dict[str, Any]:
    """Headers of tensors that follow each other without gaps, as they should."""
    end, header = 0, {}
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(["F32", "F16", "BF16"]))
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        size = DTYPE_BYTES[dtype]
        for number in shape:
            size *= number
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    header=st.one_of(packed(), headers).map(lambda header: json.dumps(header).encode()) | st.binary(max_size=60),
    edits=st.just([]) | st.just([]) | st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=2),
    num_bytes=st.none() | st.none() | st.integers(0, 80),
    lie=st.none() | st.none() | st.none() | st.integers(-2, 3) | st.integers(0, 2**64 - 1),
)
def test_whatever_a_header_says_is_refused_or_true(
    header: bytes, edits: list[tuple[int, int]], num_bytes: int | None, lie: int | None
) -> None:
    """No crash, no hang, nothing outside the file: what is accepted, safetensors' own reader gives in that shape."""
    for place, byte in edits:
        if header:
            at = place % len(header)
            header = header[:at] + bytes([byte]) + header[at + 1 :]
    if num_bytes is None:
        num_bytes = _declared(header)
    length = len(header) if lie is None else (len(header) + lie if -2 <= lie <= 3 else lie) % 2**64
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        file.write_bytes(struct.pack("<Q", length) + header + bytes(num_bytes))
        problems: list[str] = []
        tensors = read_headers(Path(directory), problems)
        "\n".join(problems).encode()  # can be printed
        event("refused" if problems else "accepted")
        if problems:
            return
        size = file.stat().st_size
        with safe_open(file, framework="numpy") as opened:
            assert set(opened.keys()) == set(tensors)
            for name, info in tensors.items():
                assert tuple(opened.get_slice(name).get_shape()) == info.shape
        assert 8 + length + sum(info.num_bytes for info in tensors.values()) == size


def _declared(header: bytes) -> int:
    """Number of bytes that a readable header declares, so that not every example fails because of the file's size."""
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        return int(max(ends, default=0)) if all(0 <= end < 500 for end in ends) else 0
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
        return 0
