"""How the CPU kernels are compiled, and where the compiled code is kept.

Numba keeps compiled code beside the file that defines a function (else in the user's cache, or in NUMBA_CACHE_DIR) and
compiles again when that file changes. The code and constants of other files are compiled in too, and Numba does not
notice a change there. So the names of the cache files contain a digest of all files in SOURCES.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache

__all__ = ["IN_PLACE", "SOURCES", "compiled", "digest"]

F = TypeVar("F", bound=Callable[..., Any])

# The loops over the sources are inside those over the elements. With LLVM's own limits, more than a handful of sources
# would keep it from unrolling the inner loop and from checking that no operand overlaps the result, and so from
# vectorising the loop over the elements.
for option in ("-unroll-threshold=10000", "-runtime-memory-check-threshold=200"):
    llvm.set_option("mergesearch", option)

# Options of functions that become part of their callers.
IN_PLACE = {"nogil": True, "error_model": "numpy", "forceinline": True}

MERGING = Path(__file__).parents[1]
# Every module that may define a compiled function, and the other modules whose code or constants these use.
SOURCES = (
    *sorted((MERGING / "kernels").rglob("*.py")),
    MERGING / "masks.py",
    MERGING / "order_statistics.py",
    MERGING / "methods" / "arithmetic.py",
    MERGING.parent / "training" / "mergopt" / "kernel.py",
)


def compiled(function: F) -> F:
    """Decorator that compiles a function with Numba at its first call with arguments of given types.

    The compiled code is kept on disk if a directory for it is writable. The function runs without the interpreter lock.
    Sums keep their order and nothing is contracted to fused multiply-add, so that results have the same bits as the
    same operations in torch.
    """
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # neither this folder nor the user's cache is writable
        dispatcher._cache = _Cache(function)  # `cache=True` does this with Numba's own class
    return cast("F", dispatcher)


def digest(sources: Iterable[Path]) -> str:
    """Digest of the contents of files, in the order given."""
    content = hashlib.sha256()
    for source in sources:
        content.update(hashlib.sha256(source.read_bytes()).digest())
    return content.hexdigest()[:16]


@cache
def _digest_of_sources() -> str:
    return digest(SOURCES)


class _CacheFiles(CompileResultCacheImpl):
    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"{super().get_filename_base(fullname, abiflags)}.{_digest_of_sources()}"


class _Cache(FunctionCache):
    _impl_class = _CacheFiles
