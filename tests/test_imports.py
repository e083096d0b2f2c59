"""Rules about imports that the import linter cannot express: imports of parts of a package and inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("search_spaces", "workers", "service")

# Packages that take long to import, or much memory: only they justify an import inside a function.
HEAVY = {
    "alembic",
    "fastapi",
    "httpx",
    "jinja2",
    "lm_eval",
    "moocore",
    "numba",
    "numpy",
    "opentelemetry",
    "optuna",
    "pydantic",
    "ray",
    "rich",
    "scipy",
    "sklearn",
    "smac",
    "sqlalchemy",
    "starlette",
    "torch",
    "triton",
    "transformers",
    "uvicorn",
    "vllm",
}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(file): file for package in OURS for file in sorted((ROOT / package).rglob("*.py"))}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def imports_in(node: ast.AST, *, in_functions: bool) -> Iterator[tuple[str, int]]:
    """Modules that the code imports, with the lines; those under TYPE_CHECKING are left out.

    `in_functions`: only those within functions, else only those outside of them.
    """

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import | ast.ImportFrom) and inside == in_functions:
                yield from ((name, child.lineno) for name in imported_by(child))
            yield from walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return walk(node, False)


@cache
def imports_of(module: str, *, in_functions: bool) -> tuple[tuple[str, int], ...]:
    return tuple(imports_in(tree_of(module), in_functions=in_functions))


def imported_by(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    package = statement.module or ""
    members = [f"{package}.{alias.name}" for alias in statement.names]
    return sorted({member if member in FILES else package for member in members})


@cache
def loads(module: str) -> frozenset[str]:
    """The heavy packages that importing one of our modules loads."""
    seen: set[str] = set()
    heavy: set[str] = set()
    waiting = [module]
    while waiting:
        parts = waiting.pop().split(".")
        for name in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):  # importing a.b imports a
            if name not in seen and name in FILES:
                seen.add(name)
                for imported, _ in imports_of(name, in_functions=False):
                    root = imported.partition(".")[0]
                    if root in OURS:
                        waiting.append(imported)
                    elif root in HEAVY:
                        heavy.add(root)
    return frozenset(heavy)


@pytest.mark.parametrize("package", OURS)
def test_function_imports_are_heavy(package: str) -> None:
    """An import in a function has a heavy dependency as its reason."""
    without_reason = [
        f"{FILES[module].relative_to(ROOT)}:{line}: {imported}"
        for module in FILES
        if module.split(".")[0] == package
        for imported, line in imports_of(module, in_functions=True)
        if imported.partition(".")[0] in OURS and not loads(imported) - loads(module)
    ]
    assert without_reason == []


def importers_of(prefix: str) -> set[str]:
    """Our modules that import `prefix` or something in it, anywhere in the file and also for types."""
    found = set()
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            if any(f"{name}.".startswith(f"{prefix}.") for name in names):
                found.add(module)
    return found


def outside(modules: set[str], *packages: str) -> set[str]:
    return {module for module in modules if not f"{module}.".startswith(tuple(f"{package}." for package in packages))}


def test_ray_serve_is_known_to_serving_and_to_the_cluster_only() -> None:
    importers = importers_of("ray.serve")
    assert importers
    assert outside(importers, "workers.serving", "service.cluster") == set()


def test_who_builds_transformers_models() -> None:
    """Only the engines that run in torch, training and BERT-Attack build models of transformers."""
    importers = {module for module in importers_of("transformers") if "AutoModel" in FILES[module].read_text()}
    assert importers
    # The model class and the list of heads that exports bring along say how they are loaded. BERT-Attack's model fills
    # masks; it is no source.
    others = (
        "workers.export.heads",
        "workers.engines.images",
        "workers.training",
        "workers.tiny_family",
        "workers.alignments.modeling_aligned",
        "workers.evaluation.attacks.masked_model",
    )
    assert outside(importers, "workers.engines.transformers", *others) == set()
