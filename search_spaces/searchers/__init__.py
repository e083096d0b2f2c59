"""Declarations of the search algorithms that a study file may name; each is one module, which is found automatically.

A module defines SEARCHER, the declaration, and imports nothing heavy. The algorithm itself is in the module of the same
name in the package `service.tune.searchers`.

- `base`: the types of a declaration, and the features that a search needs
"""

from __future__ import annotations

import importlib
import pkgutil

from search_spaces.errors import Problem
from search_spaces.parameters import Parameters
from search_spaces.searchers.base import Feature, SearcherDeclaration, needed_features

__all__ = ["SEARCHERS", "Feature", "SearcherDeclaration", "unsupported"]

_MODULES = {
    module.name: importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name != "base"
}

# By name; searchers that learn from results come first.
_DECLARED: dict[str, SearcherDeclaration] = {name: module.SEARCHER for name, module in _MODULES.items()}
SEARCHERS = dict(sorted(_DECLARED.items(), key=lambda item: (not item[1].learns, item[0])))


def unsupported(
    algorithm: str, parameters: Parameters, *, num_objectives: int, num_constraints: int = 0
) -> tuple[Problem, ...]:
    """Check that the searcher named `algorithm` can handle the features of a search.

    `algorithm` is the name of a searcher. The other arguments describe the search, and so the features that it needs,
    such as conditional parameters, several objectives or constraints. Returns (), or one problem that names the missing
    features and the searchers that handle them.
    """
    needed = needed_features(parameters, num_objectives=num_objectives, num_constraints=num_constraints)
    lacking = " and ".join(feature for feature in Feature if feature in needed - SEARCHERS[algorithm].handles)
    if not lacking:
        return ()
    able = [name for name, declared in SEARCHERS.items() if needed <= declared.handles]
    message = f"{algorithm} does not handle {lacking}, which this study has; searchers that do: {', '.join(able)}"
    return (Problem("search.algorithm", message),)
