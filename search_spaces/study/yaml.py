"""Strict reading of one YAML or JSON document: ambiguous content is refused, with its line.

YAML is read by the core schema of YAML 1.2 (`no` and `12:30` are text, `1e-3` is a number). Repeated keys, keys that
are not text, aliases (which can make a small file huge) and several documents in one file are refused. The module is
not specific to studies.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from search_spaces.errors import InvalidStudy, Problem

__all__ = ["parse_document", "read_document"]

MAX_BYTES = 1_000_000


def read_document(file: Path) -> dict[str, Any]:
    """Read the mapping in a file, as JSON if the file's name ends in .json, otherwise as YAML.

    Raises InvalidStudy if the file is unreadable, over 1 MB, not UTF-8, malformed (with line and column) or not a
    mapping.
    """
    return parse_document(_content(file), file, is_json=file.suffix == ".json")


def parse_document(content: bytes, name: object, *, is_json: bool) -> dict[str, Any]:
    """Parse the mapping in `content`, the bytes of a YAML document or, if `is_json`, of a JSON document.

    Error messages begin with `name`, the name of the file. Raises InvalidStudy if the document is not UTF-8, malformed
    (with line and column) or not a mapping.
    """
    text = _text(content, name)
    try:
        document = json.loads(text, object_pairs_hook=_mapping) if is_json else yaml.load(text, _Loader)
    except _RepeatedKey as error:
        twice = error if error.place else _first_repeated(text)
        line, column = twice.place
        raise _refused(name, f"line {line}, column {column}: key {twice.key!r} is given twice") from error
    except json.JSONDecodeError as error:
        raise _refused(name, f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from error
    except yaml.reader.ReaderError as error:
        raise _refused(name, f"character {error.position}: #x{error.character:04x} is not allowed in YAML") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _refused(name, f"{place}{error.problem or error.context}") from error
    except RecursionError as error:
        raise _refused(name, "is nested too deeply") from error
    except ValueError as error:
        raise _refused(name, str(error)) from error
    if not isinstance(document, dict):
        kinds = {type(None): "empty", str: "text", list: "a list"}
        found = kinds.get(type(document), "a single value")
        raise _refused(name, f"is {found}, not a mapping; write `name: ...`, `models: ...` and so on")
    return document


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:  # not by its size on disk: a device or a pipe has none
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            size = file.stat().st_size if file.is_file() else "more"
            raise _refused(file, f"has {size} bytes; a study file has at most {MAX_BYTES}")
        return content
    except OSError as error:
        raise _refused(file, f"cannot be read: {error.strerror}") from error


def _text(content: bytes, name: object) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(name, f"is not UTF-8 text (byte {error.start})") from error


def _refused(name: object, message: str) -> InvalidStudy:
    return InvalidStudy((Problem("", f"{name}: {message}"),))


class _RepeatedKey(Exception):
    """Raised if a mapping has the same key twice.

    `place` is the line and column of the second occurrence, counted from 1; it is empty if line and column are not
    known.
    """

    def __init__(self, key: str, place: tuple[int, ...] = ()) -> None:
        super().__init__(key, place)
        self.key = key
        self.place = place


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise _RepeatedKey(name)
        mapping[name] = value
    return mapping


# The tokens of a JSON text that show which strings are keys.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,]')


def _first_repeated(text: str) -> _RepeatedKey:
    """Find the first key that occurs twice in one object of the JSON text `text`.

    Returns an error, not raised, with the key and with the line and column of its second occurrence. The text must have
    such a key.
    """
    known: list[set[str] | None] = []  # the keys so far of each open object; None for an open list
    before = ""
    for token in _TOKEN.finditer(text):
        if token[0] in "{[":
            known.append(set() if token[0] == "{" else None)
        elif token[0] in "}]":
            known.pop()
        elif token[0][0] == '"' and before in ("{", ",") and (keys := known[-1]) is not None:
            key = json.loads(token[0])
            if key in keys:
                start = token.start()
                return _RepeatedKey(key, (text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)))
            keys.add(key)
        before = token[0][:1]
    raise AssertionError("no key is given twice")


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads values by the core schema of YAML 1.2, and refuses aliases and repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own form)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not accepted; write the value out", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def read_mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"key {key_node.value!r} is not text; put it in quotes"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            if key in mapping:
                raise _RepeatedKey(key, (key_node.start_mark.line + 1, key_node.start_mark.column + 1))
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def read_int(self, node: yaml.ScalarNode) -> int:
        text = node.value
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)

    def read_float(self, node: yaml.ScalarNode) -> float:
        return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


_CORE_SCHEMA = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
for _name, (_pattern, _first) in _CORE_SCHEMA.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.read_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.read_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.read_float)
