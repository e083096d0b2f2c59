"""Merges of a file with several merges, as in mergekit-multi: a named merge can be a source of another merge.

Each named merge is written to a separate directory and kept, so that the final merge can be repeated from its recipe.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidRecipe
from service.merges.documents import read_documents
from service.merges.merge import MergePlan, check_merge, merge_file
from workers.errors import InvalidModel
from workers.mergekit.config import split_adapter
from workers.mergekit.reader import read_configuration, shown

__all__ = ["check_merges", "intermediate_dir", "merge_all"]

logger = logging.getLogger(__name__)

NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class _Document:
    """One of the documents in a merge file; it describes one merge.

    `name` is the merge's name; None for the final merge. `content` is the parsed document; None for the only document
    of a file, which is read later. `uses` are the names of merges of the same file that are sources of this merge.
    """

    name: str | None
    content: Any
    uses: tuple[str, ...]


def intermediate_dir(out: Path) -> Path:
    """Directory for the named merges of a file; it is next to `out`, the directory of the final merge."""
    return out.with_name(f"{out.name}-intermediate")


def check_merges(
    file: Path,
    directories: Mapping[str, Path],
    out: Path,
    *,
    strict: bool = False,
    note: Callable[[str], None] = logger.info,
    **options: Any,
) -> dict[str, MergePlan | tuple[str, ...]]:
    """Check all merges of a file without writing anything, and return a plan for each merge.

    The plans are keyed by the merge's name, in the order of merging. The name of the final merge is "". If a source of
    a merge is another merge of the file that is not written yet, the merge cannot be checked. In this case the result
    contains the names of the missing sources in place of a plan. `directories` contains directories of models, keyed by
    name, and `out` is the directory of the final merge. `strict` treats warnings as errors, and `note` is called with
    messages. `options` are passed on to the function `check_merge`. Raises InvalidRecipe for problems of the file,
    InvalidModel for problems of the models or of `out`, and Conflict if the directory of a merge contains anything but
    this merge, or if its disk has too little space. Problems of several merges are raised as one error.
    """
    place = intermediate_dir(out)
    checked: dict[str, MergePlan | tuple[str, ...]] = {}
    errors: list[Exception] = []
    for document in _series(file, note, strict=strict):
        missing = tuple(name for name in document.uses if not (place / name).is_dir())
        known = {**directories, **{name: place / name for name in document.uses}}
        target = out if document.name is None else place / document.name
        try:
            checked[document.name or ""] = missing or check_merge(
                file, _named_in(document, known), target, strict=strict, document=document.content, note=note, **options
            )
        except (InvalidRecipe, InvalidModel) as error:
            errors.append(error)
    if len(errors) > 1:
        lines = (line for each in errors for line in str(each).splitlines())
        raise InvalidRecipe("\n".join(dict.fromkeys(lines)))
    if errors:
        raise errors[0]
    return checked


def merge_all(
    file: Path,
    directories: Mapping[str, Path],
    out: Path,
    *,
    dtype: str | None = None,
    strict: bool = False,
    note: Callable[[str], None] = logger.info,
    **details: Any,
) -> Path:
    """Write all merges that a file describes, each after the merges that it uses; return `out`.

    `out` is the directory of the final merge. Named merges are written next to it; named merges that exist already are
    not changed. `directories` contains directories of models, keyed by name. `dtype` is the dtype of the final merge
    alone; None uses the dtype that the file states. `strict` treats warnings as errors, and `note` is called with
    messages. `details` are passed on to the function `merge_file`, which writes each merge. Raises InvalidRecipe for
    problems of the file, InvalidModel for problems of the models or of `out`, and Conflict if the directory of a merge
    contains anything but this merge, or if its disk has too little space.
    """
    place = intermediate_dir(out)
    details |= {"strict": strict, "note": note}
    for document in _series(file, note, strict=strict):
        known = _named_in(document, {**directories, **{name: place / name for name in document.uses}})
        if document.name is not None:
            merge_file(file, known, place / document.name, document=document.content, **details)
            note(f"merged {document.name}: {place / document.name}")
        else:
            merge_file(file, known, out, document=document.content, dtype=dtype, **details)
    return out


def _series(file: Path, note: Callable[[str], None], *, strict: bool) -> list[_Document]:
    """Read the documents of a merge file, and sort them so that each merge comes after its source merges.

    `note` is called with each warning. If `strict` is True, warnings are problems instead. Raises InvalidRecipe with
    every problem.
    """
    warnings: list[str] = []
    contents = read_documents(file, warn=warnings.append)
    if len(contents) == 1:
        return [_Document(None, None, ())]
    problems = warnings if strict else []
    for warning in () if strict else warnings:
        note(f"warning: {file}: {warning}")
    names = [content.get("name") if isinstance(content, Mapping) else None for content in contents]
    for number, (name, content) in enumerate(zip(names, contents, strict=True), start=1):
        if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
            problems.append(f"document {number}: name: {shown(name)} is not accepted; give letters, digits, . _ and -")
        elif name is not None and names.count(name) > 1:
            problems.append(f"document {number}: name: {name} is given twice; merges need names of their own")
        if not isinstance(content, Mapping) or "merge_method" not in content:
            problems.append(f"document {number}: is no mergekit configuration (it has no merge_method)")
    used: dict[int, tuple[str, ...]] = {}
    for number, content in enumerate(contents):
        try:
            models = read_configuration(content, warn=lambda _: None).models
        except InvalidRecipe as error:
            problems += [f"document {number + 1}: {line}" for line in str(error).splitlines()]
        else:
            parts = {part for model in models for part in split_adapter(model)}
            used[number] = tuple(name for name in names if name is not None and name in parts)
    if problems:
        raise InvalidRecipe("\n".join(f"{file}: {problem}" for problem in problems))
    final = _final(file, names, used)
    return _in_order(
        file,
        [
            _Document(None if number == final else names[number], content, used[number])
            for number, content in enumerate(contents)
        ],
    )


def _final(file: Path, names: Sequence[str | None], used: Mapping[int, tuple[str, ...]]) -> int:
    """Index of the final merge, the one that is written as the result, among the documents of `file`.

    The final merge is the only document without a name. If all documents have names, the final merge is the only
    document that no other document uses. `names` are the documents' names, None for a document without a name. `used`
    contains the names of the merges that each document uses, keyed by index. Raises InvalidRecipe if no document is the
    final merge, or if several documents could be the final merge.
    """
    unnamed = [number for number, name in enumerate(names) if name is None]
    needed = {name for uses in used.values() for name in uses}
    found = unnamed or [number for number, name in enumerate(names) if name not in needed]
    if len(found) != 1:
        listed = ", ".join(str(number + 1) for number in found) or "none"
        raise InvalidRecipe(
            f"{file}: the final merge is not clear: documents without a name, or that no other uses, are {listed}; "
            "leave out the name of one, and name all others"
        )
    return found[0]


def _in_order(file: Path, documents: Sequence[_Document]) -> list[_Document]:
    ordered: list[_Document] = []
    waiting = list(documents)
    while waiting:
        done = {document.name for document in ordered}
        ready = [document for document in waiting if done.issuperset(document.uses)]
        if not ready:
            names = ", ".join(document.name or "(without a name)" for document in waiting)
            raise InvalidRecipe(f"{file}: the merges {names} are made from each other; one must come first")
        ready.sort(key=lambda document: document.name is None)
        ordered.append(ready[0])
        waiting.remove(ready[0])
    return ordered


def _named_in(document: _Document, directories: Mapping[str, Path]) -> dict[str, Path]:
    """Select from `directories` the models that one merge of a file uses.

    `document` is the part of the file that describes the merge. If the file describes only one merge, its content is
    not parsed yet, and all `directories` are returned.
    """
    if document.content is None:
        return dict(directories)
    models = read_configuration(document.content, warn=lambda _: None).models
    parts = {part for model in models for part in (model, *split_adapter(model))}
    return {name: directory for name, directory in directories.items() if name in parts}
