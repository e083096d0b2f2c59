"""The default: the searcher that tests/benchmarks/bench_searchers.py shows to be best."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(learns=True, reference="as smac", handles=frozenset(Feature), alias_of="smac")
