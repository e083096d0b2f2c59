"""Inline tasks: samples in a JSONL file, with templates for the prompt, the answer, and the program that tests it."""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Set, ValuesView
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import SandboxedEnvironment

from workers.errors import InvalidTask
from workers.models.remote import local_file

__all__ = ["InlineRow", "RowTemplates", "parse_line", "program_of", "read_inline"]

INLINE_KEYS = frozenset(
    {"file", "prompt", "answer", "until", "max_tokens", "program", "repeats", "temperature", "top_p"}
)


@dataclass(frozen=True)
class InlineRow:
    """One sample of an inline task (JSONL file): the prompt, and the right answer.

    `fields` is the JSON object of the sample's line in the file.
    """

    prompt: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)


def read_inline(task: Mapping[str, Any]) -> list[InlineRow]:
    """Read the samples of a task that the study file defines by a JSONL file, in the order of the file.

    `task` is the task's description in the study file: the path `file`, the templates `prompt` and `answer`, and
    further settings. Raises InvalidTask, whose message has the file, the line and the reason.
    """
    if unknown := sorted(set(task) - INLINE_KEYS):
        raise InvalidTask(f"inline task: unknown key {unknown[0]!r}; known are {', '.join(sorted(INLINE_KEYS))}")
    file = str(task["file"])
    templates = {
        "prompt": str(task.get("prompt", "{{prompt}}")),
        "answer": str(task.get("answer", "{{answer}}")),
    }
    try:
        lines = local_file(file).read_bytes().splitlines()
    except OSError as error:
        raise InvalidTask(f"{file}: cannot be read ({error.strerror})") from error
    compiled = RowTemplates(templates, where=file)
    program = None if task.get("program") is None else _template(str(task["program"]), where=file)
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file}, line {number}"
            row = compiled.row(parse_line(line, where=where), where=where)
            if program is not None:
                _rendered(program, row, row.answer, where=where)  # a key that the line lacks is found here
            rows.append(row)
    if not rows:
        raise InvalidTask(f"{file}: holds no samples; expected one JSON object per line")
    return rows


def program_of(task: Mapping[str, Any], row: InlineRow, completion: str) -> str:
    """The program that tests a completion of one sample.

    `task` is the description of a task with a JSONL file. The task's template `program` is rendered with the completion
    and with the fields of `row`, the sample. Raises InvalidTask if the template cannot be rendered.
    """
    file = str(task["file"])
    return _rendered(_template(str(task["program"]), where=file), row, completion, where=file)


def _template(text: str, *, where: str) -> jinja2.Template:
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidTask(f"{where}: program template {text!r} is not valid: {error.message}") from error


def _rendered(template: jinja2.Template, row: InlineRow, completion: str, *, where: str) -> str:
    try:
        return template.render(row.fields, completion=completion)
    except MemoryError:
        raise
    except Exception as error:  # a template is code; only the class is shown: the message may quote the file
        fields = ", ".join(sorted(map(str, row.fields)))
        raise InvalidTask(
            f"{where}: program template: {type(error).__name__}; fields here are {fields} and completion"
        ) from error


class RowTemplates:
    """Jinja templates that render the prompt and the answer from the fields of a JSONL line.

    `templates` has the templates under the keys "prompt" and "answer". A value that is null, a list or an object is
    written as a Python expression; with `only_text`, such a value is an error. In error messages, `where` says where
    the templates come from, and `answer_name` is the name of the answer's template. Raises InvalidTask for an invalid
    template.
    """

    def __init__(
        self, templates: Mapping[str, str], *, where: str, answer_name: str = "answer", only_text: bool = False
    ) -> None:
        self._templates = templates
        self._names = {"answer": answer_name}
        self._compiled = {}
        environment = _environment()
        if only_text:
            environment.finalize = _as_text
        for key, text in templates.items():
            try:
                self._compiled[key] = environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise InvalidTask(f"{where}: {self._of(key)} is not valid: {error.message}") from error

    def row(self, fields: Mapping[str, Any], *, where: str) -> InlineRow:
        """Render the prompt and the answer from `fields`, the JSON object of one line.

        `where` names the file and line in messages. Raises InvalidTask if a template cannot be rendered or the prompt
        is empty.
        """
        rendered = {}
        for key, template in self._compiled.items():
            try:
                rendered[key] = template.render(fields)
            except jinja2.UndefinedError as error:
                text = self._templates[key]
                raise InvalidTask(
                    f"{where}: {self._of(key)}: {_undefined(text, fields)}; "
                    f"fields here are {', '.join(sorted(map(str, fields))) or 'none'}"
                ) from error
            except _NoTextError as error:
                raise InvalidTask(f"{where}: {self._of(key)}: a value is {error}") from error
            except MemoryError:
                raise
            except Exception as error:  # a template is code; only the class is shown: the message may quote the file
                reason = type(error).__name__
                raise InvalidTask(f"{where}: {self._of(key)}: {reason}") from error
        if not rendered["prompt"]:
            raise InvalidTask(f"{where}: the prompt is empty")
        return InlineRow(**rendered, fields=fields)

    def _of(self, key: str) -> str:
        return f"{self._names.get(key, key)} template {self._templates[key]!r}"


class _NoTextError(ValueError):
    """Raised when an expression in a template has a value that is not text, such as null, a list or an object."""


def _as_text(value: Any) -> Any:
    """Return a template's value, unless it is one that Jinja would write as Python code, such as null or a list.

    Raises _NoTextError for such a value.
    """
    if value is None:
        raise _NoTextError("null; give text, or leave the line out")
    if isinstance(value, list | tuple | Mapping):
        kind = "an object" if isinstance(value, Mapping) else "a list"
        raise _NoTextError(f"{kind}; expected text: pick an item of it, or use a filter, such as join or tojson")
    is_function = callable(value) and not isinstance(value, jinja2.Undefined)
    if is_function or isinstance(value, Iterator | KeysView | ValuesView | ItemsView | Set):
        kind = "a function" if is_function else f"of the type {type(value).__name__}"
        raise _NoTextError(f"{kind}; expected text: use a filter, such as join")
    return value


def _environment() -> SandboxedEnvironment:
    return SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)


def _undefined(template: str, fields: Mapping[str, Any]) -> str:
    """Explain, for an error message, which value `template` uses although the line of the JSONL file does not have it.

    `fields` is the JSON object of the line. The result names a missing field, but quotes no value of the line.
    """
    environment = _environment()
    names = meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys() - fields.keys()
    return f"{min(names)!r} is undefined" if names else "it uses an attribute or item that a value does not have"


def parse_line(line: bytes, *, where: str) -> dict[str, Any]:
    """Parse a line of a JSONL file as a JSON object.

    `where` names the file and line in messages. Raises InvalidTask if the line is not a JSON object in UTF-8.
    """
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InvalidTask(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise InvalidTask(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(fields, dict):
        raise InvalidTask(f"{where}: expected a JSON object, found {type(fields).__name__}")
    return fields
