from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.yaml import read_document


def read(tmp_path: Path, content: str | bytes, name: str = "study.yaml") -> Any:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_document(file)


def test_scalars_are_read_as_yaml_1_2_has_them(tmp_path: Path) -> None:
    text = "{a: no, b: 12:30, c: 1e-3, d: 010, e: 0x10, f: ~, g: true, h: 2024-01-01, i: -.5, j: 1_000, k: +7, l: }"
    assert read(tmp_path, text) == {
        "a": "no",
        "b": "12:30",
        "c": 0.001,
        "d": 10,
        "e": 16,
        "f": None,
        "g": True,
        "h": "2024-01-01",
        "i": -0.5,
        "j": "1_000",
        "k": 7,
        "l": None,
    }


def test_json_and_yaml_give_the_same(tmp_path: Path) -> None:
    text = '{"name": "x", "list": [1, 2.5, null, "a"]}'
    assert read(tmp_path, text, "study.json") == read(tmp_path, text, "study.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfname: x") == {"name": "x"}


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "s.yaml", "line 3, column 1: key 'a' is given twice"),
        ("x: {a: 1, a: 3}\n", "s.yaml", "line 1, column 11: key 'a' is given twice"),
        ('{\n"x": {"a": 1,\t"a": 3}}', "s.json", "line 2, column 15: key 'a' is given twice"),
        ('{"x": {"a": 1, "' + 2000 * "k" + '": 0, "a": 3}}', "s.json", "line 1, column 2023: key 'a' is given twice"),
        ("1: x\n", "s.yaml", "key '1' is not text; put it in quotes"),
        (BOMB, "s.yaml", r"line 2, column 8: aliases \(\*name\) are not accepted; write the value out"),
        ("a: &a [*a]", "s.yaml", r"aliases \(\*name\) are not accepted"),
        ("a: [1\nb: 2", "s.yaml", r"line 2, column \d+: "),
        ("a: 1\n---\nb: 2\n", "s.yaml", "line 2, column 1: but found another document"),
        ("a: !!python/object/apply:os.system [ls]", "s.yaml", "could not determine a constructor for the tag"),
        ('{"a": }', "s.json", "line 1, column 7: not JSON"),
        ("", "s.yaml", "is empty, not a mapping"),
        ("- a\n- b\n", "s.yaml", "is a list, not a mapping"),
        ("just text", "s.yaml", "is text, not a mapping"),
        (b"name: \xff\xfe", "s.yaml", r"is not UTF-8 text \(byte 6\)"),
        (b"name: \x01", "s.yaml", "character 6: #x0001 is not allowed in YAML"),
        ("x" * 1_000_001, "s.yaml", "has 1000001 bytes; a study file has at most 1000000"),
        ("[" * 100_000, "s.yaml", "is nested too deeply"),
        ("[" * 100_000, "s.json", "is nested too deeply"),
        ("a: " + "9" * 5000, "s.yaml", "Exceeds the limit"),
    ],
)
def test_what_is_not_one_clear_mapping_is_refused_with_its_place(
    tmp_path: Path, content: str | bytes, name: str, message: str
) -> None:
    with pytest.raises(InvalidStudy, match=message) as caught:
        read(tmp_path, content, name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["s.json", "s.yaml"])
def test_a_repeated_key_is_found_among_very_many(tmp_path: Path, name: str) -> None:
    lines = [f'"k{i:06d}": 0' for i in range(3_000 if name == "s.yaml" else 30_000)]
    started = time.process_time()
    place = f"line {len(lines) + 2}, column 1"
    with pytest.raises(InvalidStudy, match=f"{place}: key 'k{len(lines) - 1:06d}' is given twice"):
        read(tmp_path, "{\n" + ",\n".join([*lines, lines[-1]]) + "}", name)
    assert time.process_time() - started < 4.0  # quadratic work takes 10 s and more


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (r'{"a": "x\"{,", "b": [1, "a", {"a": {}}], "\u0061": 1}', "line 1, column 42: key 'a'"),
        ('{"b": {"c": 1, "c": 2}, "b": 1}', "line 1, column 16: key 'c'"),
        ('{"b": [{"c": 1}, {"c": 1}],\n "d": 1, "d": {"e": 1, "e": 2}}', "line 2, column 10: key 'd'"),
    ],
)
def test_place_of_a_repeated_key(tmp_path: Path, content: str | bytes, place: str) -> None:
    """The place of a repeated key is that of its second appearance."""
    with pytest.raises(InvalidStudy, match=f"{place} is given twice"):
        read(tmp_path, content, "s.json")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidStudy, match=r"nowhere\.yaml: cannot be read: No such file"):
        read_document(tmp_path / "nowhere.yaml")
    with pytest.raises(InvalidStudy, match="cannot be read: Is a directory"):
        read_document(tmp_path)
