"""Random search: each configuration is drawn from the search space's own distribution."""

from __future__ import annotations

from typing import Any

from service.tune.searchers.base import ProposalContext

__all__ = ["SEARCHER", "RandomSearcher"]


class RandomSearcher:
    """Searcher by random draws, which avoids known configurations and ignores results."""

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        return context.sample_unseen(context.generator())


SEARCHER = RandomSearcher()
