"""Cache of the most recently used statistics of several sources, with a limit of memory.

A search may use any subset of its experts; the tables of all subsets would be larger than the models.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar

from workers.models.family import ResolvedFamily
from workers.models.headers import DTYPE_BYTES

__all__ = ["Recent", "recent_bytes", "statistics_bytes"]

# Share of the size of the family's models, each counted whole in the base's dtype. It is enough for the tables of all
# subsets of four experts.
RECENT_SHARE = 1 / 8
# Bytes of a table of order statistics (`order_statistics`) per element of its tensor.
TABLE_BYTES = 9 / 128

T = TypeVar("T")


class Recent:
    """Thread-safe cache of values by key, with at most `max_bytes` in total.

    Beyond this limit, the least recently used values are dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    def value(self, key: Hashable, make: Callable[[], T], num_bytes: Callable[[T], int]) -> T:
        """The cached value of `key`, or the result of `make`, which is then cached.

        `num_bytes` returns the size of a value. Values that were used least recently are dropped until all values
        together fit into the limit of the cache (argument `max_bytes`).
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                known: T = self._values[key][0]
                return known
        made = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = made, num_bytes(made)
                self.num_bytes += num_bytes(made)
            while self.num_bytes > self.max_bytes:
                _, (_, dropped) = self._values.popitem(last=False)
                self.num_bytes -= dropped
        return made

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.num_bytes = 0


def recent_bytes(sources: ResolvedFamily) -> int:
    """Limit, in bytes of host memory, of the cache of statistics that depend on several source models.

    The limit is an eighth of the size of all models in `sources`. Each model counts as a whole model in the base's
    dtypes, even if it is an adapter.
    """
    base = sources.base.tensors.values()
    stored = sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in base)
    return int(RECENT_SHARE * stored * len(sources.checkpoints))


def statistics_bytes(sources: ResolvedFamily) -> int:
    """Upper limit, in bytes of host memory, for cached statistics of the models in `sources`.

    The result is the size of the tables of each expert's magnitudes, which are always cached, plus the result of the
    function `recent_bytes` for statistics of several sources. Ranks of magnitudes within rows are not counted.
    """
    experts = len(sources.checkpoints) - 1
    return int(TABLE_BYTES * sources.num_parameters * experts) + recent_bytes(sources)
