"""Digests of the code behind a measurement: a module and all modules of search and training that it imports.

Code outside `service.tune` and `workers.training` is not followed: spaces, merging and scoring are held to their
numbers by tests.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

__all__ = ["closure", "code_digest", "statements_of"]

ROOT = Path(__file__).parents[2]
FOLLOWED = ("service.tune", "workers.training")


@cache
def code_digest(*modules: str) -> str:
    """Digest of the statements of these modules and of all imported modules of the packages in FOLLOWED."""
    content = "".join(statements_of(path.read_text()) for path in sorted(closure(modules)))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def statements_of(source: str) -> str:
    """Statements of a module without comments, docstrings and layout, because these do not change a measurement."""
    return ast.dump(_WithoutProse().visit(ast.parse(source)))


class _WithoutProse(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_prose = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_prose else node


def closure(modules: Sequence[str]) -> set[Path]:
    """Files of these modules and of all modules that they import, directly or not, from the packages in FOLLOWED."""
    found: set[Path] = set()
    waiting = list(modules)
    while waiting:
        place = ROOT / waiting.pop().replace(".", "/")
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.exists() and path not in found:
                found.add(path)
                waiting += _imports(path)
    return found


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(FOLLOWED):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
