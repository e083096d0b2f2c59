"""Declaration of the default searcher `auto`: gradient descent if a study allows it, otherwise SMAC.

Preflight decides between the two. Among the searchers without gradients, SMAC is the best in
tests/benchmarks/bench_searchers.py.
"""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(learns=True, reference="as smac", handles=frozenset(Feature), alias_of="smac")
