"""Program that runs one test case of LiveBench's coding category on a solution, inside the sandbox.

The module `livebench_coding` appends a call of the function `check_call` or `check_output` to the text of this file.
The program runs to its end if the solution passes. A solution runs in the same environment as in LiveBench's published
code (April 2025 and later).
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from decimal import Decimal, InvalidOperation
from types import ModuleType
from typing import Any

__all__ = ["check_call", "check_output"]

# Modules whose names a solution has without importing them. Names of later modules hide those of earlier ones.
OPEN = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
PRELUDE = "\n".join(
    [f"from {name} import *" for name in OPEN]
    + [f"import {name}" for name in OPEN if name not in ("builtins", "typing")]
    + ["sys.setrecursionlimit(50_000)\n"]
)
MAX_DIGITS = 50_000  # of a number that is converted from or to text
MAIN = "__name__ == '__main__'"


def check_call(code: str, name: str, given: str, wanted: str) -> None:
    """Raise an error unless the function `name` in `code`, a model's program, returns the expected value.

    `name` may also be a method of the class `Solution` in the program. Each line of `given` is one of the arguments,
    and `wanted` is the expected return value, all in JSON.
    """
    sys.set_int_max_str_digits(MAX_DIGITS)
    module = _executed(PRELUDE + code)
    owner = module.Solution() if "class Solution" in code else module
    found = getattr(owner, name)(*map(json.loads, given.split("\n")))
    if isinstance(found, tuple):
        found = list(found)
    if not found == json.loads(wanted):
        raise AssertionError("wrong value")


def check_output(code: str, given: str, wanted: str) -> None:
    """Raise an error unless `code`, a model's program, prints `wanted` when its standard input is `given`.

    Lines are compared without the white space around them, and as numbers if both are numbers.
    """
    sys.set_int_max_str_digits(MAX_DIGITS)
    module = _executed(_in_function(code))
    _give(given)
    sys.stdout = io.StringIO()
    with contextlib.suppress(SystemExit):
        module.main()
    found, right = ([line.strip() for line in text.strip().split("\n")] for text in (sys.stdout.getvalue(), wanted))
    if len(found) != len(right) or not all(map(_are_equal, found, right)):
        raise AssertionError("wrong output")


def _executed(code: str | ast.Module) -> Any:
    module = ModuleType("solution")
    exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    return module


def _in_function(code: str) -> ast.Module:
    """Wrap the program `code` in the function `main` of a module, so that it runs only when `main` is called.

    The imports of the program stay outside the function. If the program ends with a block `if __name__ == '__main__'`,
    the content of the block becomes the end of the function.
    """
    body = ast.parse(code).body
    if body and isinstance(last := body[-1], ast.If) and ast.unparse(last.test) == MAIN:
        body[-1:] = last.body
    module = ast.parse(PRELUDE)
    (main,) = ast.parse("def main(): pass").body
    assert isinstance(main, ast.FunctionDef)
    main.body = [each for each in body if not isinstance(each, ast.Import | ast.ImportFrom)]
    module.body += [*(each for each in body if isinstance(each, ast.Import | ast.ImportFrom)), main]
    return module


def _give(text: str) -> None:
    """Make `text` the standard input of a model's program, under both names: `sys.stdin` and `stdin`.

    `sys.stdin` becomes a stream of text. This stream has no attribute `buffer`, so the program cannot read bytes. The
    program's module has run `from sys import *` before this call, so its name `stdin` still refers to the old stream.
    The read methods of the old stream are therefore replaced by methods that read `text`.
    """
    lines = iter(text.split("\n"))
    vars(sys.stdin).update(read=lambda *_: text, readline=lambda *_: next(lines), readlines=lambda *_: text.split("\n"))
    sys.stdin = io.StringIO(text)


def _are_equal(found: str, right: str) -> bool:
    try:
        return found == right or [*map(Decimal, found.split())] == [*map(Decimal, right.split())]
    except InvalidOperation:
        return False
