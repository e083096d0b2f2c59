"""Search algorithms, each in a module of its own, whose attribute SEARCHER is the searcher.

`search_spaces.searchers` lists the algorithms. Importing this package does not import the libraries that propose: SMAC,
scikit-learn, Optuna and cmaes. Several searchers share these modules:

- `base`: the interface of searchers, and the data that they receive
- `adam`: Adam, recomputed from stored gradients
- `descents`: the descents of a search by gradients, in their order
- `elites`: the best known layer paths of each preference vector, and random mutations of them
- `encoding`: configurations as rows of numbers
- `history`: each trial's result at its highest rung, and an order of trials
- `loss_comparison`: whether a search uses gradients
- `midpoints`: points halfway between two trials of a front
- `rung_choice`: whether a surrogate learns from all rungs or from the highest alone
- `optuna_study`: proposals by Optuna's samplers
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from search_spaces.searchers import SEARCHERS as DECLARED
from service.errors import NotFound
from service.tune.searchers.base import Searcher

__all__ = ["SEARCHERS", "get_searcher"]

_MODULES = {
    name: importlib.import_module(f"{__name__}.{name}") for name, declared in DECLARED.items() if not declared.alias_of
}

SEARCHERS: Mapping[str, Searcher] = {
    name: _MODULES[found.alias_of or name].SEARCHER for name, found in DECLARED.items()
}


def get_searcher(name: str) -> Searcher:
    """The searcher with the name `name`, such as "tpe".

    Raises NotFound, with the names of all searchers, if there is no such searcher.
    """
    try:
        return SEARCHERS[name]
    except KeyError:
        raise NotFound(f"search: there is no algorithm {name!r}; use one of {', '.join(sorted(DECLARED))}") from None
