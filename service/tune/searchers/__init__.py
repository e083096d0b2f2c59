"""The searchers a study may name. Importing this package imports neither SMAC nor scikit-learn."""

from __future__ import annotations

from service.errors import NotFound
from service.tune.searchers.base import Observation, Searcher
from service.tune.searchers.random import RandomSearcher
from service.tune.searchers.smac import SmacSearcher

__all__ = ["SEARCHERS", "Observation", "Searcher", "get_searcher"]

# "auto", the default, is what tests/benchmarks/bench_searchers.py shows to be best.
SEARCHERS: dict[str, Searcher] = {"auto": SmacSearcher(), "smac": SmacSearcher(), "random": RandomSearcher()}


def get_searcher(name: str) -> Searcher:
    """Raises NotFound, naming the searchers there are."""
    try:
        return SEARCHERS[name]
    except KeyError:
        raise NotFound(f"search: there is no algorithm {name!r}; use one of {', '.join(sorted(SEARCHERS))}") from None
