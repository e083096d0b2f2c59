"""Conversion of validation errors to messages for users: the value, the accepted values, the nearest known name.

pydantic's errors become Problems with the help of the model's JSON Schema. The module is not specific to studies: the
names of values and keys that are planned for later versions are given by the caller (`MessageHints`).
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from search_spaces.errors import Problem

__all__ = ["MAX_PROBLEMS", "UNKNOWN_KIND", "MessageHints", "at_most", "in_file_order", "is_tag", "problems_of"]

ACCEPTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
    "dict_type": "a mapping (key: value)",
    "tuple_type": "a list",
}
BOUNDS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than")}
BOUNDS |= {"less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
MAX_SHOWN = 60

# The type of the error that a mapping's key `kind` has an unknown value.
UNKNOWN_KIND = "unknown_kind"

# The largest number of problems that are listed: a longer list helps nobody and takes time to make.
MAX_PROBLEMS = 100


@dataclass(frozen=True)
class MessageHints:
    """Texts for error messages that a JSON Schema cannot supply.

    - `later_values`: for the path of a field, the values that are planned but not accepted yet
    - `later_keys`: for the path of a key that is planned but not accepted yet, a message about it
    - `patterns`: for a regular expression, a description of the texts that it matches

    In a path, "*" stands for any position in a list, as in "objectives.*.cost".
    """

    later_values: Mapping[str, tuple[str, ...]]
    later_keys: Mapping[str, str]
    patterns: Mapping[str, str]


def is_tag(part: str | int) -> bool:
    """Whether a part of the location of a validation error is a tag, such as "<inline>", and not a key of the file.

    If a value may have one of several forms, pydantic adds the tag of the form to the location.
    """
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def problems_of(errors: Sequence[ErrorDetails], schema: Mapping[str, Any], hints: MessageHints) -> list[Problem]:
    """Convert validation errors to problems with messages for users, in the order of the errors.

    Only the first MAX_PROBLEMS errors become problems; one more problem then says how many errors are left. `schema` is
    the JSON Schema that the document violates. `hints` has texts for messages that the schema cannot supply.
    """
    problems: list[Problem] = []
    for error in errors[:MAX_PROBLEMS]:
        if error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]:
            continue  # pydantic counts valid entries only, and has already reported the others
        at = error["loc"]
        if error["type"] == UNKNOWN_KIND and isinstance(error["input"], Mapping):
            at = (*at, "kind")
        place = tuple(part for part in at if not is_tag(part) and part != "[key]")
        pattern = ".".join("*" if isinstance(part, int) else part for part in place)
        field = ".".join(map(str, place))
        if error["type"] == "extra_forbidden":
            message = hints.later_keys.get(pattern) or _unknown_key(str(place[-1]), _node(schema, at[:-1]))
        elif error["type"] in ("literal_error", "enum"):
            message = _unknown_value(error["input"], _choices(_node(schema, at)), hints.later_values.get(pattern, ()))
        elif error["type"] == UNKNOWN_KIND:
            message = _unknown_kind(error["input"], _nodes(schema, at), hints.later_values.get(pattern, ()))
        elif error["type"] == "missing":
            message = f"is missing; {_wanted(_node(schema, at))}"
        elif error["type"] == "string_pattern_mismatch":
            message = f"{_shown(error['input'])} is not accepted; give {hints.patterns[error['ctx']['pattern']]}"
        else:
            message = _message(error)
        problem = Problem(field, message)
        if problem not in problems:
            problems.append(problem)
    if (num_others := len(errors) - MAX_PROBLEMS) > 0:
        problems.append(_others(num_others))
    return problems


def at_most(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The first MAX_PROBLEMS of `problems`, followed by one problem about the rest if there are more.

    The problems that are left out are not computed.
    """
    found = iter(problems)
    yield from itertools.islice(found, MAX_PROBLEMS)
    if next(found, None) is not None:
        yield _others(None)


def _others(number: int | None) -> Problem:
    return Problem("", f"{'' if number is None else f'{number} '}other problems are not listed; fix these first")


def in_file_order(problems: Iterable[Problem], document: Mapping[str, Any]) -> tuple[Problem, ...]:
    """The problems, sorted by the position of their fields in `document`."""
    orders: dict[int, dict[str, int]] = {}  # the positions of a mapping's keys, by the mapping's id

    def index(place: Mapping[str, Any], key: str) -> int:
        if id(place) not in orders:
            orders[id(place)] = {name: number for number, name in enumerate(place)}
        return orders[id(place)].get(key, len(place))

    def position(problem: Problem) -> tuple[int, ...]:
        place: Any = document
        positions: list[int] = []
        for part in problem.field.split("."):
            if isinstance(place, Mapping):
                positions.append(index(place, part))
                place = place.get(part)
            elif isinstance(place, list) and part.isdigit():
                positions.append(int(part))
                place = place[int(part)] if int(part) < len(place) else None
        return tuple(positions)

    return tuple(sorted(problems, key=position))


def _message(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    value = _shown(error["input"])
    if accepted := ACCEPTED.get(kind):
        return f"{value} is not accepted; give {accepted}"
    if bound := BOUNDS.get(kind):
        return f"{value} is not accepted; give {bound[1]} {context[bound[0]]}"
    if kind in ("too_short", "string_too_short"):
        return f"is empty; give at least {context['min_length']}"
    if kind in ("too_long", "string_too_long"):
        return f"{value} is too long; give at most {context['max_length']}"
    return f"{value} is not accepted; {error['msg']}"


def _unknown_key(key: str, node: Mapping[str, Any]) -> str:
    known = tuple(node.get("properties", {}))
    return f"unknown key; {_nearest(key, known)}known keys: {', '.join(known)}"


def _unknown_kind(value: Any, kinds: Iterable[Mapping[str, Any]], later: tuple[str, ...]) -> str:
    if not isinstance(value, Mapping):
        return f"{_shown(value)} is not accepted; give {ACCEPTED['model_type']}"
    return _unknown_value(value["kind"], tuple(kind for node in kinds for kind in _choices(node)), later)


def _unknown_value(value: Any, available: tuple[str, ...], later: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in later:
        return f"{_shown(value)} is not available yet; available: {', '.join(available)}"
    near = _nearest(value, available) if isinstance(value, str) else ""
    return f"{_shown(value)} is not known; {near}available: {', '.join(available)}"


def _wanted(node: Mapping[str, Any]) -> str:
    if choices := _choices(node):
        return f"available: {', '.join(choices)}"
    words = {"string": "text", "object": "a mapping (key: value)", "array": "a list", "integer": "a whole number"}
    return f"give {words.get(node.get('type', ''), 'a value')}"


def _choices(node: Mapping[str, Any]) -> tuple[str, ...]:
    values = node.get("enum", [node["const"]] if "const" in node else [])
    return tuple(value if isinstance(value, str) else _shown(value) for value in values)


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f'did you mean "{near[0]}"? ' if near else ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _node(schema: Mapping[str, Any], place: Sequence[str | int]) -> Mapping[str, Any]:
    """The part of a JSON Schema that describes the value at `place`, the location of a validation error.

    `place` is a sequence of keys, list positions and tags (names of a value's form) that pydantic reports. Several
    parts of `schema` may describe the value. The result is the first part that has properties. If no part has
    properties, it is the first part with an enumeration, a constant or a type; without such a part it is an empty
    mapping.
    """
    found = _nodes(schema, place)
    wanted = ("properties", "enum", "const", "type")
    return next((node for key in wanted for node in found if key in node), {})


def _nodes(schema: Mapping[str, Any], place: Sequence[str | int]) -> list[Mapping[str, Any]]:
    """All parts of a JSON Schema that may describe the value at `place`, the location of a validation error.

    `schema` is the JSON Schema. A location is a sequence of keys, list positions and tags. A tag names the form of a
    value that may have one of several forms (a union). It selects the parts of the union whose `kind` is the tag, or
    that have a key with the tag's name.
    """
    found = list(_branches(schema, schema))
    for part in place:
        if is_tag(part):
            found = [node for node in found if _is_tagged(node, str(part)[1:-1])] or found
        elif part != "[key]":
            found = [branch for child in _children(found, part) for branch in _branches(child, schema)]
    return found


def _is_tagged(node: Mapping[str, Any], tag: str) -> bool:
    properties = node.get("properties", {})
    return tag in properties or properties.get("kind", {}).get("const") == tag


def _branches(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in node:
        yield from _branches(schema["$defs"][node["$ref"].rsplit("/", 1)[-1]], schema)
    for branch in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _branches(branch, schema)
    yield node


def _children(branches: Iterable[Mapping[str, Any]], part: str | int) -> Iterator[Mapping[str, Any]]:
    for node in branches:
        if isinstance(part, int):
            yield node.get("items", {})
        else:
            yield node.get("properties", {}).get(part, {})
