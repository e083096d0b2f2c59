"""Names of tests: short enough for a line of output; the docstring states the claim."""

from __future__ import annotations

import ast
from pathlib import Path

MAX_LENGTH = 60


def test_names_of_tests_are_short() -> None:
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    names = {
        f"{file}: {node.name}": len(node.name)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }
    assert len(names) > len(files)
    assert [name for name, length in names.items() if length > MAX_LENGTH] == []
