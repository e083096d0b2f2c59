"""Compilation of the CPU kernels with Numba, and the disk cache of their compiled code.

Numba keeps compiled code beside the file that defines a function (else in the user's cache, or in NUMBA_CACHE_DIR) and
compiles again when that file changes. The compiled code also contains code and constants of other files, and Numba does
not detect changes in these files. So the names of the cache files contain a digest of all files in SOURCES.

Numba numbers the files of a function by an index. If two processes compile at the same time, one process overwrites the
index of the other process. A number may then belong to other code, and a later process would run the kernel of another
rule. Here a file's name says for which arguments it was compiled, and there is no index.
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
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile

__all__ = ["IN_PLACE", "SOURCES", "compiled", "digest"]

F = TypeVar("F", bound=Callable[..., Any])

# The loops over the sources are inside those over the elements. With LLVM's own limits, more than a handful of sources
# would keep it from unrolling the inner loop and from checking that no operand overlaps the result, and so from
# vectorising the loop over the elements.
for option in ("-unroll-threshold=10000", "-runtime-memory-check-threshold=200"):
    llvm.set_option("mergesearch", option)

# Options of functions that become part of their callers. Nothing calls them from Python or C: wrappers for such calls
# would take a quarter of the time of a compilation.
IN_PLACE = {
    "nogil": True,
    "error_model": "numpy",
    "forceinline": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}

MERGING = Path(__file__).parents[1]
# Every module that may define a compiled function, and the other modules whose code or constants these use.
SOURCES = (
    *sorted((MERGING / "kernels").rglob("*.py")),
    MERGING / "masks.py",
    MERGING / "order_statistics.py",
    MERGING / "shards.py",
    MERGING / "methods" / "arithmetic.py",
    MERGING.parent / "training" / "mergopt" / "kernel.py",
)


def compiled(function: F) -> F:
    """Decorator that compiles a function with Numba, at the first call with each combination of argument types.

    The compiled code is kept on disk if a directory for it is writable. The function runs without Python's interpreter
    lock. The results have the same bits as the same operations in torch: the compiler neither changes the order of sums
    nor contracts a multiplication and an addition to one operation.
    """
    dispatcher = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    with suppress(RuntimeError):  # neither this folder nor the user's cache is writable
        dispatcher._cache = _Cache(function)  # `cache=True` does this with Numba's own class
    return cast("F", dispatcher)


def digest(sources: Iterable[Path]) -> str:
    """The first 16 hexadecimal digits of the sha256 of the contents of the files `sources`, in the given order."""
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


class _File(IndexDataCacheFile):
    """Numba's store of a function's compiled code on disk, with one file per signature and without an index.

    The name of a file depends on the signature and the type of processor. Therefore processes that compile at the same
    time do not overwrite each other's files with other code.
    """

    def __init__(self, *, cache_path: str, filename_base: str, source_stamp: Any) -> None:
        super().__init__(cache_path, filename_base, source_stamp)
        self._pattern = f"{filename_base}.{{}}.nbc"

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (key, data))

    def load(self, key: Any) -> Any:
        """The compiled code for `key`, a signature and processor; None if there is none on disk."""
        try:
            found, data = self._load_data(self._name(key))
        except OSError:
            return None
        return data if found == key else None

    def flush(self) -> None:
        for file in Path(self._cache_path).glob(self._pattern.format("*")):
            file.unlink(missing_ok=True)

    def _name(self, key: Any) -> str:
        content = repr((self._version, self._source_stamp, key))
        return self._pattern.format(hashlib.sha256(content.encode()).hexdigest()[:16])


class _Cache(FunctionCache):
    _impl_class = _CacheFiles

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _File(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )
