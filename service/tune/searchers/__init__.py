"""Search algorithms: one module for each algorithm in `search_spaces.searchers`, which defines SEARCHER.

Importing this package imports neither SMAC nor scikit-learn.

- `base`: the interface, and what a searcher learns from
- `encoding`: configurations as rows of numbers
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from search_spaces.searchers import SEARCHERS as DECLARED
from service.errors import NotFound
from service.tune.searchers.base import Observation, Searcher

__all__ = ["SEARCHERS", "Observation", "Searcher", "get_searcher"]

_MODULES = {
    name: importlib.import_module(f"{__name__}.{name}") for name, declared in DECLARED.items() if not declared.alias_of
}

SEARCHERS: Mapping[str, Searcher] = {
    name: _MODULES[declared.alias_of or name].SEARCHER for name, declared in DECLARED.items()
}


def get_searcher(name: str) -> Searcher:
    """The searcher of this name. Raises NotFound, naming the available searchers."""
    try:
        return SEARCHERS[name]
    except KeyError:
        raise NotFound(f"search: there is no algorithm {name!r}; use one of {', '.join(sorted(SEARCHERS))}") from None
