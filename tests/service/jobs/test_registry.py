"""Code that handles jobs of every kind asks the declaration of the kind, and does not compare names of kinds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from service.jobs.registry import KINDS

SERVICE = Path(__file__).parents[3] / "service"

# A study may have experts of a fine-tuning, and refuses references to jobs of other kinds.
REFERENCES = {"studies/chains.py"}


def comparisons(code: str) -> Iterator[str]:
    """Comparisons and cases in which the code names a kind of job: `job.kind == "search"`, `... == SEARCH.name`."""
    for node in ast.walk(ast.parse(code)):
        sides: list[ast.AST] = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.Match):
            sides = [node.subject, *(part for case in node.cases for part in ast.walk(case.pattern))]
        names = (_names_a_kind(part) for side in sides for part in ast.walk(side))
        if any(_is_kind(side) for side in sides) and any(names):
            yield ast.unparse(node).splitlines()[0]


def _is_kind(node: ast.AST) -> bool:
    is_key = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == "kind"
    return is_key or (isinstance(node, ast.Attribute) and node.attr == "kind")


def _names_a_kind(node: ast.AST) -> bool:
    declared = {name.upper() for name in KINDS}
    return (isinstance(node, ast.Constant) and node.value in KINDS) or (
        isinstance(node, ast.Name) and node.id in declared
    )


def test_no_other_code_names_a_kind() -> None:
    """Outside of the package of a kind, no code branches by the name of a kind of job."""
    own = {SERVICE / "jobs" / name for name in KINDS}
    files = [file for file in SERVICE.rglob("*.py") if not own & set(file.parents)]
    assert len(files) > 200
    found = {str(file.relative_to(SERVICE)) for file in files if list(comparisons(file.read_text()))}
    assert found == REFERENCES


def test_names_of_kinds_are_found() -> None:
    code = """
if job.kind == "finetune": ...
if SEARCH.name != found["kind"]: ...
if job.kind in (SERVING.name, "other"): ...
match job.kind:
    case "search": ...
if job.kind == kind.name or event.kind == "progress": ...
"""
    expected = {"job.kind == 'finetune'", "SEARCH.name != found['kind']", "job.kind in (SERVING.name, 'other')"}
    assert set(comparisons(code)) == {*expected, "match job.kind:"}
