"""The search algorithms that a study file may name: one module each, which is found automatically.

A module holds its declaration, SEARCHER, and imports nothing heavy. The algorithm is the module of the same name in
service.tune.searchers.

- `base`: what a declaration says
"""

from __future__ import annotations

import importlib
import pkgutil

from search_spaces.searchers.base import SearcherDeclaration

__all__ = ["SEARCHERS", "SearcherDeclaration"]

_MODULES = {
    module.name: importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name != "base"
}

# By name; those that learn from results come first.
_DECLARED: dict[str, SearcherDeclaration] = {name: module.SEARCHER for name, module in _MODULES.items()}
SEARCHERS = dict(sorted(_DECLARED.items(), key=lambda item: (not item[1].learns, item[0])))
