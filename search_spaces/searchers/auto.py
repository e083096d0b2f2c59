"""The default: `gradient` where the study has gradients, otherwise the searcher of `alias_of`."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(learns=True, reference="as smac", handles=frozenset(Feature), alias_of="smac")
