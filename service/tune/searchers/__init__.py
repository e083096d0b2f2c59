"""Search algorithms: one module for each algorithm in `search_spaces.searchers`, which defines SEARCHER.

Importing this package imports no library that proposes: neither SMAC, scikit-learn, Optuna nor cmaes.

- `base`: the interface, and what a searcher learns from
- `descents`: which descents a search by gradients makes, in which order
- `encoding`: configurations as rows of numbers
- `history`: each trial at its highest rung, and which of two is better
- `midpoints`: points halfway between two trials of a front
- `optuna_study`: proposals by Optuna's samplers
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from search_spaces.searchers import SEARCHERS as DECLARED
from service.errors import NotFound
from service.tune.searchers.base import Observation, Searcher, SteppingSearcher

__all__ = ["SEARCHERS", "STEPPING_SEARCHERS", "Observation", "Searcher", "get_searcher"]

_MODULES = {
    name: importlib.import_module(f"{__name__}.{name}") for name, declared in DECLARED.items() if not declared.alias_of
}

SEARCHERS: Mapping[str, Searcher] = {
    name: _MODULES[declared.alias_of or name].SEARCHER
    for name, declared in DECLARED.items()
    if not (declared.computes_steps or declared.trains_policy)
}

STEPPING_SEARCHERS: Mapping[str, SteppingSearcher] = {
    name: _MODULES[name].SEARCHER
    for name, declared in DECLARED.items()
    if declared.computes_steps or declared.trains_policy
}


def get_searcher(name: str) -> Searcher | SteppingSearcher:
    """The searcher of this name. Raises NotFound, naming the available searchers."""
    if name in STEPPING_SEARCHERS:
        return STEPPING_SEARCHERS[name]
    try:
        return SEARCHERS[name]
    except KeyError:
        raise NotFound(f"search: there is no algorithm {name!r}; use one of {', '.join(sorted(DECLARED))}") from None
