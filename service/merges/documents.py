"""Reads files that describe merges, as JSON or YAML, and collects the problems in the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from search_spaces.errors import InvalidRecipe
from workers.errors import InvalidModel

__all__ = ["Problems", "read_document", "read_documents"]

# Keys that identify the files of mergekit's other programs, and what those programs do.
OTHER_PROGRAMS = {
    "experts": "a file of mergekit-moe, which builds a mixture of experts from whole models",
    "genome": "a file of mergekit-evolve, which searches; write a study for `mergesearch run`",
    "layer_slices": "a file of bakllama, mergekit's former program; write slices for merge_method: passthrough",
}


class Problems:
    """Collector of problems and warnings about a merge, which are reported together as one error.

    Problems concern the merge's file, its models or the directory of the result; `of_file` has those that concern the
    file. `warnings` are lines about keys of the file that have no effect. If `strict` is True, warnings count as
    problems.
    """

    def __init__(self, file: Path, warnings: list[str], *, strict: bool) -> None:
        self.of_file: list[str] = []
        self.warnings = warnings
        self._of_others: list[str] = []
        self._file = file
        self._is_strict = strict

    def __bool__(self) -> bool:
        return bool(self.of_file or self._of_others)

    def add(self, *lines: str) -> None:
        """Record problems of the file that describes the merge; each of `lines` states one problem."""
        self.of_file += lines

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Context manager that records errors about the file, the models or the result's directory as problems.

        The errors are not raised, so that all problems can be reported together (`raise_all`).
        """
        try:
            yield
        except InvalidRecipe as error:
            self.add(*str(error).splitlines())
        except InvalidModel as error:
            self._of_others += error.problems
        except FileExistsError as error:
            self._of_others.append(str(error))
        except PermissionError as error:
            self._of_others.append(f"{error.filename}: {error.strerror}")

    def raise_all(self) -> None:
        """Raise all problems as one error; does nothing if there are no problems.

        Raises:
            InvalidRecipe: The file has problems; the message also has the problems of the models and the directory.
            InvalidModel: Only the models or the result's directory have problems.
        """
        in_file = list(dict.fromkeys(self.of_file))
        warnings = list(dict.fromkeys(self.warnings))
        others = tuple(dict.fromkeys(self._of_others))
        if self._is_strict:
            in_file += warnings
        elif in_file:
            in_file += [f"warning: {warning}" for warning in warnings]
        if in_file:
            raise InvalidRecipe("\n".join((*(f"{self._file}: {line}" for line in in_file), *others)))
        if others:
            raise InvalidModel(others)


def read_document(file: Path, *, warn: Callable[[str], None]) -> Any:
    """Parse a YAML or JSON file that describes one merge, and return its content.

    `warn` is called with a line for each key that is given twice. Raises InvalidRecipe if the file cannot be read or
    has several documents.
    """
    document, *others = read_documents(file, warn=warn)
    if others:
        raise InvalidRecipe(f"{file}: holds {len(others) + 1} documents; expected one")
    return document


def read_documents(file: Path, *, warn: Callable[[str], None]) -> list[Any]:
    """Parse a YAML or JSON file that describes one or several merges, and return the content of each description.

    `warn` is called with a line for each key that is given twice. Raises InvalidRecipe if the file cannot be read or
    describes no merge.
    """
    try:
        text = file.read_text()
        if file.suffix == ".json":
            documents = [json.loads(text, object_pairs_hook=lambda pairs: _last(pairs, warn))]
        else:
            documents = _from_yaml(text, warn)
    except OSError as error:
        raise InvalidRecipe(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRecipe(
            f"{file}: is not UTF-8 text (byte {error.start}); give a recipe.json or a mergekit configuration"
        ) from error
    except json.JSONDecodeError as error:
        raise InvalidRecipe(f"{file}: line {error.lineno}: not JSON: {error.msg}") from error
    except yaml.YAMLError as error:
        raise InvalidRecipe(f"{file}: {_yaml_problem(error)}") from error
    except RecursionError as error:
        raise InvalidRecipe(f"{file}: is nested too deeply") from error
    except ValueError as error:  # a number too long for Python
        raise InvalidRecipe(f"{file}: {error}") from error
    if len(documents) > 1:
        return documents
    document = documents[0] if documents else None
    if not isinstance(document, Mapping) or not document.keys() & {"merge_method", "format"}:
        for key, program in OTHER_PROGRAMS.items():
            if isinstance(document, Mapping) and key in document:
                raise InvalidRecipe(f"{file}: {key}: {program}; it cannot be merged here")
        raise InvalidRecipe(
            f"{file}: is neither a mergekit configuration (it has no merge_method) nor a recipe (it has no format)"
        )
    return [document]


def _last(pairs: list[tuple[str, Any]], warn: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            warn(f"key {key!r} is given twice; the last one counts")
        found[key] = value
    return found


def _from_yaml(text: str, warn: Callable[[str], None]) -> list[Any]:
    """Parse a YAML text with PyYAML's SafeLoader, as mergekit does, and return the content of each of its documents.

    If a key is repeated, the last value counts, and `warn` is called.
    """

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            first: dict[Any, int] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in first:
                        before = f"(first in line {first[key.value]})"
                        warn(f"line {line}: key {key.value!r} is given twice {before}; the last one counts")
                    first[key.value] = line
            return super().construct_mapping(node, deep)

    return [document for document in yaml.load_all(text, Loader) if document is not None]


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or str(error)
    return f"{where}not YAML: {problem}"
