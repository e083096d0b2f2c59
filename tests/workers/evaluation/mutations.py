"""Mutants of Python functions: copies with one small change each, as mutation tests make them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["mutants"]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}


def mutants(source: str, name: str) -> Iterator[str]:
    """Yield the function `name` of a program with one change.

    A comparison is turned round, an arithmetic or logical operator is exchanged, or a constant is made 1 larger, longer
    or negated. Last comes a function that returns a text that no test expects.
    """
    function = _function(source, name)
    num_nodes = sum(1 for _ in ast.walk(function))
    for index in range(num_nodes):
        changed = _function(source, name)
        if _change(list(ast.walk(changed))[index]):
            yield ast.unparse(changed)
    changed = _function(source, name)
    changed.body = [ast.Return(ast.Constant("changed"))]
    yield ast.unparse(ast.fix_missing_locations(changed))


def _function(source: str, name: str) -> ast.FunctionDef:
    found = [each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef) and each.name == name]
    function = found[-1]
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return function


def _change(node: ast.AST) -> bool:
    """Change a node; returns whether it is one that can be changed."""
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in COMPARISONS:
            node.ops[0] = COMPARISONS[type(operator)]()
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            node.op = OPERATORS[type(operator)]()
        case ast.BoolOp(op=operator):
            node.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() | float() as value):
            node.value = value + 1
        case ast.Constant(value=str() as value):
            node.value = value + "x"
        case _:
            return False
    return True
