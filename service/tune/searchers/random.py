"""Random search: every configuration drawn uniformly, parent parameters first. The baseline of all other searchers."""

from __future__ import annotations

from typing import Any

from service.tune.searchers.base import ProposalContext

__all__ = ["SEARCHER", "RandomSearcher"]


class RandomSearcher:
    """The searcher by random draws. It looks only at which configurations are known already, not at their results."""

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        return context.sample_unseen(context.generator())


SEARCHER = RandomSearcher()
