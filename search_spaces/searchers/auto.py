"""The default: gradient descent where a study allows it, which preflight decides, and otherwise SMAC.

Among the searchers without gradients, SMAC is the best in tests/benchmarks/bench_searchers.py.
"""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(learns=True, reference="as smac", handles=frozenset(Feature), alias_of="smac")
